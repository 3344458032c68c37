"""With every augmentation on: the same batches after a cut at any place, and on any number of ranks, to the bit."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest
import torch

from pipeline.dataset.shard_set import ShardSet
from pipeline.loader.loader import Batch, Loader
from pipeline.plan.plan import Plan
from pipeline.plan.stage import Augment, Stage

RICH = {"vflip_prob": 0.3, "jitter": (0.4, 0.4, 0.4, 0.1), "grey_prob": 0.2, "blur_prob": 0.3,
        "random_erasing_prob": 0.5, "mixup_alpha": 0.8, "cutmix_alpha": 1.0, "mixup_prob": 0.8}  # fmt: skip
STAGES = (
    Stage(res=32, epochs=2, batch_size=32, fraction=0.7, augment=Augment(policy="randaugment", **RICH)),
    Stage(res=64, epochs=1, batch_size=32, order="block",
          augment=Augment(policy="autoaugment", mixup_mode="elem", **RICH)),
    Stage(res=48, epochs=1, batch_size=40),
    Stage(res=48, epochs=2, batch_size=32,
          augment=Augment(policy="trivialaugment", random_erasing_fill="noise", **RICH)),
    Stage(res=32, epochs=1, batch_size=32, augment=Augment(policy="3-augment")),
)  # fmt: skip


@pytest.fixture(scope="module")
def plan(shard_set: ShardSet) -> Plan:
    return Plan(shard_set, STAGES, seed=11, eval_batch_size=16, eval_every_epochs=2)


@pytest.fixture(scope="module")
def batches(plan: Plan) -> list[Batch]:
    with Loader(plan) as loader:
        return list(loader)


def assert_same(got: Batch, expected: Batch) -> None:
    assert got.spec.index == expected.spec.index
    for name in ("images", "labels", "partner_labels", "lam"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), (name, expected.spec.index)


def borders(plan: Plan) -> list[int]:
    """First and last batches of all epochs, stages and validation passes, and ten places at random."""
    found = {place for s in plan.passes for place in (s.first, s.first + s.batches - 1)}
    return sorted(found | set(np.random.default_rng(3).integers(0, plan.total_batches, 10).tolist()))


@pytest.mark.slow
def test_a_cut_at_any_border_or_random_step_changes_nothing(plan: Plan, batches: list[Batch]) -> None:
    assert len(borders(plan)) >= 20
    for start in borders(plan):
        with Loader(plan, start=start, threads=1 + start % 3) as loader:
            for expected in batches[start : start + 2]:
                assert_same(next(loader), expected)


def test_a_state_moves_a_running_loader_anywhere_and_back(plan: Plan, batches: list[Batch]) -> None:
    with Loader(plan) as loader:
        for place in np.random.default_rng(4).permutation(borders(plan)).tolist():
            loader.load_state_dict({"next_batch": place})
            assert loader.state_dict()["next_batch"] == place
            assert_same(next(loader), batches[place])


def union(parts: list[Batch], whole: Batch) -> None:
    for name in ("images", "labels", "partner_labels", "lam"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name)), whole.spec.index
    assert sum(len(part.labels) for part in parts) == whole.spec.global_size


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_the_ranks_parts_are_the_batch_at_every_step(plan: Plan, batches: list[Batch], world: int) -> None:
    """In training and in validation, whose counts over the ranks are therefore those of one."""
    with ExitStack() as stack:
        loaders = (Loader(plan, rank=r, world_size=world, threads=1) for r in range(world))
        ranks = [stack.enter_context(loader) for loader in loaders]
        for whole in batches:
            union([next(rank) for rank in ranks], whole)


def test_a_run_cut_on_four_ranks_goes_on_with_two_and_then_one(plan: Plan, batches: list[Batch]) -> None:
    at = 0
    for world, steps in ((4, 7), (2, 9), (1, plan.total_batches)):
        with ExitStack() as stack:
            ranks = [stack.enter_context(Loader(plan, rank=r, world_size=world, threads=1)) for r in range(world)]
            for rank in ranks:
                rank.load_state_dict({"next_batch": at})
            for whole in batches[at : at + steps]:
                union([next(rank) for rank in ranks], whole)
            states = [rank.state_dict()["next_batch"] for rank in ranks]
            assert len(set(states)) == 1
            at = states[0]
    assert at == plan.total_batches
