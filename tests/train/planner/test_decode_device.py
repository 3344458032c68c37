"""The choice of the decode device: a GPU that decodes as the CPU does is measured by a few steps, once per run."""

from __future__ import annotations

import contextlib
import math
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from resolute.cli import main
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.loader import Batch, Loader
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import Stage
from resolute.train import trainer
from resolute.train.devices.distributed import Ranks
from resolute.train.devices.trial import trial_fault
from resolute.train.inference.saved_run import open_saved_run
from resolute.train.planner.gpu_decode import difference
from resolute.train.planner.measure import Stopwatch, choose_decode
from resolute.train.setup import Options
from resolute.train.trainer import _Session, session
from tests.support import trials
from tests.support.gpu_on_cpu import GpuLoader
from tests.train.conftest import stop_at

STAGES = [Stage(res=32, epochs=1, batch_size=2), Stage(res=48, epochs=5, batch_size=4)]


class Machine:
    """A clock that advances with steps, `cost[decode]` s each, a tenth for a loader's first three."""

    def __init__(self, shards: ShardSet, cost: dict[str, float]) -> None:
        self.plan = Plan(shards, STAGES, eval_batch_size=8)
        self.cost = cost
        self.now, self.decode, self.at, self.since_open = 0.0, "", 0, 0
        self.steps: dict[str, int] = {}

    @contextlib.contextmanager
    def open(self, decode: str, start: int) -> Iterator[Any]:
        assert not self.decode
        self.decode, self.at, self.since_open = decode, start, 0
        yield self
        self.decode = ""

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.since_open = state["next_batch"], 0

    def __next__(self) -> Any:
        self.at, self.since_open = self.at + 1, self.since_open + 1
        return SimpleNamespace(spec=SimpleNamespace(global_size=1), segment=self.plan.phase_at(self.at - 1))

    def step(self, batch: Any) -> None:
        segment = batch.segment
        assert (segment.split, segment.stage) == ("train", 1)  # where most of the run's pixels are
        self.steps[self.decode] = self.steps.get(self.decode, 0) + 1
        self.now += self.cost[self.decode] * (0.1 if self.since_open <= 3 else 1)

    def choose(self, **words: Any) -> tuple[str, dict[Any, float]]:
        """The faster device, and the seconds of a step on each."""
        watch = Stopwatch(sync=lambda: None, clock=lambda: self.now, **words)
        return choose_decode(self.plan, self.open, self.step, watch)


@pytest.mark.parametrize(("cost", "expected"), [({"cpu": 1.0, "gpu": 2.0}, "cpu"), ({"cpu": 0.3, "gpu": 0.2}, "gpu")])
def test_the_faster_device_is_chosen_without_counting_prefetched_batches(
    shard_set: ShardSet, cost: dict[str, float], expected: str
) -> None:
    assert Machine(shard_set, cost).choose() == (expected, pytest.approx(cost))


def test_every_rank_runs_the_number_of_steps_of_rank_0(shard_set: ShardSet) -> None:
    machine = Machine(shard_set, {"cpu": 0.1, "gpu": 0.1})
    machine.choose(broadcast=lambda count: 3)
    assert machine.steps == {"cpu": 3 * (4 + 3), "gpu": 2 * (4 + 3)}


@pytest.mark.slow
def test_a_run_keeps_its_decode_device_and_evaluates_with_it(
    words: Callable[[Path], list[str]],
    tmp_path: Path,
    shard_root: Path,
    recipe_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_Session, "_decode", lambda self: "cpu")  # as on a GPU that decodes more slowly
    stop_at(monkeypatch, 0)
    assert main(words(tmp_path)) == 128 + 15
    assert open_saved_run(tmp_path / "tiny").decode == "cpu"
    options = Options(shards=shard_root, recipe=recipe_file, folder=tmp_path / "tiny", device="cpu", threads=1)
    with session(options, Ranks()) as resumed:
        assert resumed.decode == "cpu"


def a_session(**words: Any) -> Any:
    """A run on a GPU that could not run a step, with these attributes."""
    begun: Any = object.__new__(_Session)
    begun.learner = SimpleNamespace(device=torch.device("cuda", 0), train_step=None, ranks=Ranks())
    vars(begun).update(words)
    return begun


@pytest.mark.parametrize(
    ("fault", "decode", "line"),
    [
        ("killed by SIGSEGV", "cpu", "a trial on the GPU failed (killed by SIGSEGV); this run decodes on the CPU"),
        (None, "gpu", "step time is 2.0 ms on the CPU, 1.0 ms on the GPU; this run decodes on the GPU"),
    ],
)
def test_auto_decodes_on_the_gpu_only_after_a_child_process_did(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    shard_set: ShardSet,
    fault: str | None,
    decode: str,
    line: str,
) -> None:
    begun = a_session(
        ranks=Ranks(),
        decode=None,
        options=SimpleNamespace(decode="auto", threads=1),
        _warm_up=lambda: None,
        plan=Plan(shard_set, STAGES, eval_batch_size=8),
    )
    tried: list[Any] = []

    def fault_of(trial: Any) -> str | None:
        tried.append(trial.func)
        return fault

    monkeypatch.setattr(trainer, "trial_fault", fault_of)
    monkeypatch.setattr(trainer, "restored", contextlib.nullcontext)
    monkeypatch.setattr(trainer, "choose_decode", lambda *_: ("gpu", {"cpu": 0.002, "gpu": 0.001}))
    assert begun._decode() == decode
    assert tried == [difference]
    out, err = capsys.readouterr()
    assert (out, err.partition(": ")[2]) == (("", f"decoding: {line}\n") if fault else (f"decoding: {line}\n", ""))


# ---- the trial in a child process: the images of a GPU's decoder, here simulated, and the CPU's ----------------------

SETTINGS: dict[str, Any] = {"res": 48, "batch_size": 16, "device": "cuda:0", "threads": 1}


@pytest.mark.parametrize(
    ("damaged", "change"),
    [
        (slice(0), lambda images: images),
        (slice(1), lambda images: images + 0.2),  # 12 levels of 255
        (slice(1), torch.zeros_like),
        (slice(None), lambda images: images * math.nan),
    ],
    ids=["no image", "a lighter image", "a black image", "no numbers"],
)
def test_only_decoders_that_differ_by_more_than_rounding_are_refused(
    monkeypatch: pytest.MonkeyPatch, shard_set: ShardSet, damaged: slice, change: Callable[[Any], Any]
) -> None:
    def damage(loader: GpuLoader) -> Batch:
        batch = Loader.__next__(loader)
        batch.images[damaged] = change(batch.images[damaged])
        return batch

    monkeypatch.setattr(GpuLoader, "__next__", damage)
    found = trials.in_simulation(shard_set, **SETTINGS)
    assert (found or "").startswith("images differ from the CPU's by ") == (damaged != slice(0))
    assert "\n" not in (found or "")


@pytest.mark.slow
def test_the_trial_runs_in_a_child_process_without_the_records_of_the_set(shard_set: ShardSet) -> None:
    assert len(pickle.dumps(shard_set)) < 100_000
    assert trial_fault(partial(trials.in_simulation, shard_set, **SETTINGS)) is None
