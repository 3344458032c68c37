"""The place of decoding follows from real steps of every stage, weighed by how many there are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from pipeline.plan import Plan
from pipeline.recipe import Stage
from pipeline.shards import ShardSet
from train.calibrate import choose_decode, stage_steps, step_times


class Machine:
    """A clock that only steps move; a step takes `cost[decode][stage]`, the first three after a jump ten times that."""

    def __init__(self, plan: Plan, cost: dict[str, list[float]]) -> None:
        self.plan, self.cost, self.now = plan, cost, 0.0
        self.decode, self.at, self.since_jump = "", 0, 0
        self.log: list[tuple[str, int]] = []

    @contextlib.contextmanager
    def open(self, decode: str) -> Iterator[Any]:
        self.decode = decode
        yield self
        self.decode = ""

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.since_jump = state["next_batch"], 0

    def __next__(self) -> Any:
        self.at, self.since_jump = self.at + 1, self.since_jump + 1
        return self.plan.segment(self.at - 1)

    def step(self, segment: Any) -> None:
        assert segment.split == "train"
        self.log.append((self.decode, segment.stage))
        self.now += self.cost[self.decode][segment.stage] * (10 if self.since_jump <= 3 else 1)


@pytest.fixture
def plan(shard_set: ShardSet) -> Plan:
    stages = [Stage(res=32, epochs=1, batch_size=2), Stage(res=48, epochs=5, batch_size=4)]
    return Plan(shard_set, stages, eval_batch_size=8)


def test_steady_steps_of_every_stage_are_timed(plan: Plan) -> None:
    machine = Machine(plan, {"cpu": [1.0, 2.0]})
    with machine.open("cpu") as stream:
        assert step_times(plan, stream, machine.step, sync=lambda: None, clock=lambda: machine.now) == [1.0, 2.0]
    assert {stage for _, stage in machine.log} == {0, 1}


@pytest.mark.parametrize(("gpu", "expected"), [([2.0, 1.0], "gpu"), ([0.5, 3.0], "cpu"), ([6.0, 1.9], "cpu")])
def test_the_choice_is_the_shorter_run(plan: Plan, gpu: list[float], expected: str) -> None:
    """38 steps of the first stage, 95 of the second: with decoding on the CPU 228 s."""
    assert stage_steps(plan) == [38, 95]
    machine = Machine(plan, {"cpu": [1.0, 2.0], "gpu": gpu})
    found, measured = choose_decode(plan, machine.open, machine.step, sync=lambda: None, clock=lambda: machine.now)
    assert found == expected
    assert measured == {"cpu": [1.0, 2.0], "gpu": pytest.approx(gpu)}
