"""With every augmentation on, batches are bit-identical after a resume at any step and on any number of ranks."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch

from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.batch import Batch
from resolute.pipeline.loader.loader import Loader
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import Augment, Stage

RICH: dict[str, Any] = {
    "vflip_prob": 0.3,
    "jitter": (0.4, 0.4, 0.4, 0.1),
    "grey_prob": 0.2,
    "blur_prob": 0.3,
    "random_erasing_prob": 0.5,
    "mixup_alpha": 0.8,
    "cutmix_alpha": 1.0,
    "mixup_prob": 0.8,
}
STAGES = (
    Stage(res=32, epochs=2, batch_size=32, fraction=0.7, augment=Augment(policy="randaugment", **RICH)),
    Stage(
        res=64,
        epochs=1,
        batch_size=32,
        order="windowed",
        augment=Augment(policy="autoaugment", mixup_mode="elem", **RICH),
    ),
    Stage(res=48, epochs=1, batch_size=40),
    Stage(
        res=48, epochs=2, batch_size=32, augment=Augment(policy="trivialaugment", random_erasing_fill="noise", **RICH)
    ),
    Stage(res=32, epochs=1, batch_size=32, augment=Augment(policy="3-augment")),
    Stage(res=(40, 56), epochs=1, batch_size=32, res_schedule="step", augment=Augment(policy="autoaugment", **RICH)),
    Stage(res=(33, 64, 47), epochs=1, batch_size=25, res_schedule="random", augment=Augment(**RICH)),
)


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
    """First and last batches of all epochs, stages and validation passes, and ten random batches."""
    places = {place for s in plan.phases for place in (s.first, s.first + s.batches - 1)}
    return sorted(places | set(np.random.default_rng(3).integers(0, plan.total_batches, 10).tolist()))


def test_a_state_moves_a_running_loader_to_any_batch(plan: Plan, batches: list[Batch]) -> None:
    with Loader(plan) as loader:
        for place in np.random.default_rng(4).permutation(borders(plan)).tolist():
            loader.load_state_dict({"next_batch": place})
            assert loader.state_dict()["next_batch"] == place
            assert_same(next(loader), batches[place])


def union(parts: list[Batch], whole: Batch) -> None:
    for name in ("images", "labels", "partner_labels", "lam"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name)), whole.spec.index
    assert sum(len(part.labels) for part in parts) == whole.spec.global_size


def test_a_run_on_four_ranks_is_resumed_on_two_and_then_one(plan: Plan, batches: list[Batch]) -> None:
    at = 0
    for world, steps in ((4, 7), (2, 9), (1, plan.total_batches)):
        with ExitStack() as stack:
            ranks = [stack.enter_context(Loader(plan, rank=r, world_size=world, num_threads=1)) for r in range(world)]
            for rank in ranks:
                rank.load_state_dict({"next_batch": at})
            for whole in batches[at : at + steps]:
                union([next(rank) for rank in ranks], whole)
            states = [rank.state_dict()["next_batch"] for rank in ranks]
            assert len(set(states)) == 1
            at = states[0]
    assert at == plan.total_batches
