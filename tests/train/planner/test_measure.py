"""The choice of the decode device: measured from a few real steps, once per run, and kept with it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from resolute.cli import main
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import Stage
from resolute.train import trainer
from resolute.train.devices.distributed import Ranks
from resolute.train.devices.trial import trial_fault
from resolute.train.inference.saved_run import open_saved_run
from resolute.train.planner.measure import Stopwatch, choose_decode
from resolute.train.setup import Options
from resolute.train.trainer import _Session, session
from tests.support import trials

STAGES = [Stage(res=32, epochs=1, batch_size=2), Stage(res=48, epochs=5, batch_size=4)]


class Machine:
    """A clock that advances with steps, `cost[decode]` s each, a tenth for a loader's first three, and `open_s`.

    A batch that no loader has read before takes `disk_s` longer; with `slows`, every second makes all steps after it
    that fraction slower.
    """

    def __init__(
        self, plan: Plan, cost: dict[str, float], open_s: float = 0.0, *, disk_s: float = 0.0, slows: float = 0.0
    ) -> None:
        self.plan, self.cost, self.open_s, self.now = plan, cost, open_s, 0.0
        self.disk_s, self.slows, self.cached = disk_s, slows, set[int]()
        self.decode, self.at, self.since_open = "", 0, 0
        self.steps: dict[str, int] = {}

    @contextlib.contextmanager
    def open(self, decode: str, start: int) -> Iterator[Any]:
        assert not self.decode
        self.decode, self.at, self.since_open = decode, start, 0
        self.now += self.open_s
        yield self
        self.decode = ""

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.since_open = state["next_batch"], 0

    def __next__(self) -> Any:
        if self.at not in self.cached:
            self.now += self.disk_s
            self.cached.add(self.at)
        self.at, self.since_open = self.at + 1, self.since_open + 1
        return SimpleNamespace(spec=SimpleNamespace(global_size=1), segment=self.plan.phase_at(self.at - 1))

    def step(self, batch: Any) -> None:
        segment = batch.segment
        assert (segment.split, segment.stage) == ("train", 1)  # where most of the run's pixels are
        self.steps[self.decode] = self.steps.get(self.decode, 0) + 1
        self.now += self.cost[self.decode] * (0.1 if self.since_open <= 3 else 1) * (1 + self.slows * self.now)


def choose(
    shards: ShardSet, cost: dict[str, float], open_s: float = 0.0, disk_s: float = 0.0, slows: float = 0.0, **words: Any
) -> tuple[Machine, str, dict[Any, float]]:
    plan = Plan(shards, STAGES, eval_batch_size=8)
    machine = Machine(plan, cost, open_s, disk_s=disk_s, slows=slows)
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


@pytest.mark.parametrize("disk_s", [0.1, 1.0])
def test_neither_device_is_charged_for_reading_the_photos_for_the_first_time(
    shard_set: ShardSet, disk_s: float
) -> None:
    _, _, measured = choose(shard_set, {"cpu": 0.1, "gpu": 0.1}, disk_s=disk_s)
    assert measured == pytest.approx({"cpu": 0.1, "gpu": 0.1})


@pytest.mark.parametrize("slows", [-0.02, 0.02])
def test_a_machine_that_grows_slower_or_faster_favours_neither_device(shard_set: ShardSet, slows: float) -> None:
    _, _, measured = choose(shard_set, {"cpu": 0.1, "gpu": 0.1}, slows=slows)
    assert measured["cpu"] == pytest.approx(measured["gpu"], rel=0.01)


@pytest.mark.parametrize("open_s", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("step_s", [0.001, 0.1, 0.3])
def test_the_measurement_takes_a_few_steps_and_at_most_ten_seconds(
    shard_set: ShardSet, step_s: float, open_s: float
) -> None:
    machine, _, _ = choose(shard_set, {"cpu": step_s, "gpu": step_s}, open_s)
    assert machine.now <= 10
    assert max(machine.steps.values()) <= 3 * 28


def test_every_rank_runs_the_number_of_steps_of_rank_0(shard_set: ShardSet) -> None:
    machine, _, _ = choose(shard_set, {"cpu": 0.1, "gpu": 0.1}, broadcast=lambda count: 3)
    assert machine.steps == {"cpu": 3 * (4 + 3), "gpu": 2 * (4 + 3)}


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


@pytest.mark.parametrize(("trial", "line"), [
    (trials.crash, "decoding: a trial on the GPU failed (killed by SIGSEGV); this run decodes on the CPU\n"),
    (trials.hang, "decoding: a trial on the GPU failed (no end within 0.5 s); this run decodes on the CPU\n"),
    (trials.disagree, "decoding: a trial on the GPU failed (images differ); this run decodes on the CPU\n"),
    (trials.succeed, "decoding: step time is 2.0 ms on the CPU, 1.0 ms on the GPU; this run decodes on the GPU\n"),
], ids=["crash", "hang", "difference", "success"])  # fmt: skip
def test_auto_decodes_on_the_gpu_only_after_a_child_process_did(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], shard_set: ShardSet, trial: Any, line: str
) -> None:
    begun: Any = object.__new__(_Session)
    begun.learner = SimpleNamespace(device=torch.device("cuda", 0), train_step=None, ranks=Ranks())
    begun.ranks, begun.decode, begun.options = Ranks(), None, SimpleNamespace(decode="auto", threads=1)
    begun.plan, begun._warm_up = Plan(shard_set, STAGES, eval_batch_size=8), lambda: None
    monkeypatch.setattr(trainer, "difference", trial)
    limit_s = 0.5 if trial is trials.hang else 60.0
    monkeypatch.setattr(trainer, "trial_fault", partial(trial_fault, limit_s=limit_s))
    monkeypatch.setattr(trainer, "restored", contextlib.nullcontext)
    monkeypatch.setattr(trainer, "choose_decode", lambda *_: ("gpu", {"cpu": 0.002, "gpu": 0.001}))
    assert begun._decode() == ("gpu" if trial is trials.succeed else "cpu")
    assert capfd.readouterr() == (line, "")


def test_a_run_decodes_on_the_cpu_unless_told_otherwise(tmp_path: Path) -> None:
    begun: Any = object.__new__(_Session)
    begun.options = Options(shards=tmp_path, recipe=tmp_path / "x.toml", folder=tmp_path)
    begun.learner, begun.decode = SimpleNamespace(device=torch.device("cuda", 0)), None
    assert begun._decode() == "cpu"
