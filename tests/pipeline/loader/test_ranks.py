"""Which part of each batch a loader takes, if it is not told: that of its process in the process group."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import numpy as np
import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.loader import Loader
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import Stage
from tests import ROOT


@pytest.fixture
def group() -> Iterator[None]:
    """This process is rank 1 of 2."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.fixture
def plan(shard_set: ShardSet) -> Plan:
    return Plan(shard_set, [Stage(res=32, epochs=1, batch_size=16)], eval_batch_size=7)


@pytest.mark.usefixtures("group")
def test_in_a_process_group_a_loader_takes_the_part_of_its_process(plan: Plan) -> None:
    with Loader(plan) as loader:
        assert (loader.rank, loader.world_size) == (1, 2)
        for batch in loader:
            planned = plan.batch(batch.spec.index, rank=1, world_size=2)
            np.testing.assert_array_equal(batch.spec.ids, planned.ids)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        ({"world_size": 1}, (0, 1)),
        ({"rank": 0, "world_size": 1}, (0, 1)),
        ({"rank": 2, "world_size": 3}, (2, 3)),
    ],
)
def test_ranks_that_are_given_win_over_the_group(plan: Plan, options: dict[str, int], ranks: tuple[int, int]) -> None:
    with Loader(plan, **options) as loader:  # type: ignore[arg-type]
        assert (loader.rank, loader.world_size) == ranks
        np.testing.assert_array_equal(next(loader).spec.ids, plan.ids(0, rank=ranks[0], world_size=ranks[1]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": 1}, "Loader: got rank 1 without world_size, expected both or none; add world_size"),
        ({"rank": 0}, "Loader: got rank 0 without world_size, expected both or none; add world_size"),
        ({"world_size": 2}, "Loader: got world_size 2 without rank, expected both or none; add rank"),
    ],
)
def test_one_of_rank_and_world_size_is_refused(plan: Plan, options: dict[str, int], words: str) -> None:
    with pytest.raises(ResoluteError, match=words):
        Loader(plan, **options)  # type: ignore[arg-type]


def test_without_a_process_group_a_process_that_torchrun_has_started_is_refused(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank would train on every batch as a whole, and nothing would tell."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    words = r"Loader: got WORLD_SIZE=4 \(torchrun\) without a process group, expected one: .*init_process_group before"
    with pytest.raises(ResoluteError, match=words):
        Loader(plan)
    with Loader(plan, world_size=1) as loader:
        assert loader.world_size == 1
    monkeypatch.setenv("WORLD_SIZE", "1")
    with Loader(plan) as loader:
        assert loader.world_size == 1


def test_every_loader_of_training_says_how_many_processes_share_its_batches() -> None:
    """Reports and trials of rank 0 alone would otherwise get its part of the photos."""
    calls = [
        (path, call)
        for path in sorted((ROOT / "train").rglob("*.py"))
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Loader"
    ]
    assert len(calls) >= 5
    for path, call in calls:
        assert "world_size" in {keyword.arg for keyword in call.keywords}, f"{path}:{call.lineno}"
