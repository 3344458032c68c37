"""The choice of the decode device: measured from a few real steps, once per run, and kept with it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.dataset.shard_set import ShardSet
from pipeline.plan.plan import Plan
from pipeline.plan.stage import Stage
from train.__main__ import main
from train.devices.distributed import Ranks
from train.inference.saved_run import open_saved_run
from train.planner.measure import Stopwatch, choose_decode
from train.setup import Options
from train.trainer import _Session, session

STAGES = [Stage(res=32, epochs=1, batch_size=2), Stage(res=48, epochs=5, batch_size=4)]


class Machine:
    """A clock that advances with steps, `cost[decode]` s each, a tenth for a loader's first three, and `open_s`."""

    def __init__(self, plan: Plan, cost: dict[str, float], open_s: float = 0.0) -> None:
        self.plan, self.cost, self.open_s, self.now = plan, cost, open_s, 0.0
        self.decode, self.at, self.since_open = "", 0, 0
        self.steps: dict[str, int] = {}

    @contextlib.contextmanager
    def open(self, decode: str, start: int) -> Iterator[Any]:
        assert not self.decode
        self.decode, self.at, self.since_open = decode, start, 0
        self.now += self.open_s
        yield self
        self.decode = ""

    def __next__(self) -> Any:
        self.at, self.since_open = self.at + 1, self.since_open + 1
        return SimpleNamespace(spec=SimpleNamespace(global_size=1), segment=self.plan.pass_at(self.at - 1))

    def step(self, batch: Any) -> None:
        segment = batch.segment
        assert (segment.split, segment.stage) == ("train", 1)  # where most of the run's pixels are
        self.steps[self.decode] = self.steps.get(self.decode, 0) + 1
        self.now += self.cost[self.decode] * (0.1 if self.since_open <= 3 else 1)


def choose(
    shards: ShardSet, cost: dict[str, float], open_s: float = 0.0, **words: Any
) -> tuple[Machine, str, dict[Any, float]]:
    plan = Plan(shards, STAGES, eval_batch_size=8)
    machine = Machine(plan, cost, open_s)
    watch = Stopwatch(sync=lambda: None, clock=lambda: machine.now, **words)
    decode, measured = choose_decode(plan, machine.open, machine.step, watch)
    return machine, decode, measured


@pytest.mark.parametrize(("cost", "expected"), [({"cpu": 1.0, "gpu": 2.0}, "cpu"), ({"cpu": 0.3, "gpu": 0.2}, "gpu")])
def test_the_faster_device_is_chosen_without_counting_prefetched_batches(
    shard_set: ShardSet, cost: dict[str, float], expected: str
) -> None:
    _, decode, measured = choose(shard_set, cost)
    assert decode == expected
    assert measured == pytest.approx(cost)


@pytest.mark.parametrize("open_s", [0.0, 0.5, 1.5])
@pytest.mark.parametrize("step_s", [0.001, 0.1, 0.3])
def test_the_measurement_takes_a_few_steps_and_at_most_five_seconds(
    shard_set: ShardSet, step_s: float, open_s: float
) -> None:
    machine, _, _ = choose(shard_set, {"cpu": step_s, "gpu": step_s}, open_s)
    assert machine.now <= 5
    assert max(machine.steps.values()) <= 28


def test_every_rank_runs_the_number_of_steps_of_rank_0(shard_set: ShardSet) -> None:
    machine, _, _ = choose(shard_set, {"cpu": 0.1, "gpu": 0.1}, broadcast=lambda count: 3)
    assert machine.steps == {"gpu": 4 + 3, "cpu": 4 + 3}


@pytest.mark.slow
def test_a_run_keeps_its_decode_device_and_evaluates_with_it(
    words: Callable[[Path], list[str]], tmp_path: Path, shard_root: Path, recipe_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(_Session, "_decode", lambda self: "cpu")  # as on a GPU that decodes more slowly
    assert main([*words(tmp_path), "--threads", "1"]) == 0
    folder = tmp_path / "tiny"
    assert open_saved_run(folder).decode == "cpu"
    options = Options(shards=shard_root, recipe=recipe_file, folder=folder, device="cpu", threads=1)
    with session(options, Ranks()) as resumed:
        assert resumed.decode == "cpu"


@pytest.mark.parametrize(
    ("kept", "flag", "expected"), [("cpu", "auto", "cpu"), ("gpu", "auto", "gpu"), ("cpu", "gpu", "gpu")]
)
def test_a_decided_device_is_not_measured_again(kept: Any, flag: str, expected: str) -> None:
    """Nothing here could run a step, so a measurement would fail."""
    resumed: Any = object.__new__(_Session)
    resumed.learner, resumed.options = SimpleNamespace(device=torch.device("cuda", 0)), SimpleNamespace(decode=flag)
    resumed.decode = kept
    assert resumed._decode() == expected
