"""After Ctrl-C, an operator's error or a stray StopIteration in `next()`, the loader continues with the same batch."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from nvidia.dali.pipeline import Pipeline

from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.batch import Batch
from resolute.pipeline.loader.loader import Loader
from resolute.pipeline.loader.reader import PendingBatch, Reader
from resolute.pipeline.plan import rows
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import Augment, Stage
from tests import ROOT
from tests.support.commands import Command
from tests.support.damage import damage_sample
from tests.support.gpu_on_cpu import GpuLoader

# A process of its own: a signal that arrives late must not hit the test runner. `batches.append` is reached without a
# call after `next()`, so Python cannot handle the signal between the two, and a batch that was returned is always seen.
_LOOP = """
import json, os, random, signal, sys, threading, time
import torch
from resolute import Augment, Loader, Plan, ShardSet, Stage

root, kind, wanted = sys.argv[1], sys.argv[2], int(sys.argv[3])
rich = Augment(policy="randaugment", mixup_alpha=0.4)
stage = Stage(res=32, epochs=2000, batch_size=8) if kind == "fast" else Stage(
    res=64, epochs=2000, batch_size=64, augment=rich)
plan, batches, errors, sent, caught = Plan(ShardSet.open(root), [stage], eval_batch_size=8), [], [], 0, 0
rng, armed = random.Random(wanted), threading.Event()


def interrupt(step_s):
    global sent
    while True:
        armed.wait()
        armed.clear()
        time.sleep(rng.uniform(0, 4 * step_s + 0.002))
        sent += 1
        os.kill(os.getpid(), signal.SIGINT)


with Loader(plan) as loader:
    for batch in loader:
        began = began if batch.spec.index > 10 else time.perf_counter()
        if batch.spec.index == 30:
            break
threading.Thread(target=interrupt, args=[(time.perf_counter() - began) / 20], daemon=True).start()
with Loader(plan) as loader:
    while caught < wanted and len(batches) < 100 * wanted:
        try:
            armed.set()
            for batch in loader:
                batches.append(batch)
            break
        except KeyboardInterrupt:
            caught += 1
            if caught % 2:  # every other time, the next interrupt hits a loader that has recovered
                batches.append(next(loader))
        except BaseException as error:
            errors.append(repr(error))
            break
with Loader(plan) as uninterrupted:
    wrong = sum(not all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("images", "targets", "lam"))
                for a, b in zip(batches, uninterrupted))
print(json.dumps({"indices": [batch.spec.index for batch in batches], "wrong": wrong, "errors": errors, "sent": sent,
                  "caught": caught}))
"""


@pytest.mark.parametrize(("kind", "count"), [("fast", 20), pytest.param("slow", 100, marks=pytest.mark.slow)])
def test_a_loop_interrupted_at_random_moments_gets_every_batch_once_and_in_order(
    shard_root: Path, tmp_path: Path, kind: str, count: int
) -> None:
    done = Command("tests.support.execute", [_LOOP, shard_root, kind, count], folder=ROOT, scratch=tmp_path).end()
    assert done.status == 0, done.err
    report = json.loads(done.out)
    assert report["errors"] == []
    assert (report["caught"], report["sent"]) == (count, count)  # none was swallowed
    assert report["indices"] == [*range(len(report["indices"]))]
    assert len(report["indices"]) > count / 4
    assert report["wrong"] == 0


@pytest.fixture(scope="module")
def plan(shard_set: ShardSet) -> Plan:
    augment = Augment(policy="randaugment", mixup_alpha=0.8)
    stages = [Stage(res=32, epochs=1, batch_size=16, augment=augment), Stage(res=48, epochs=2, batch_size=10)]
    return Plan(shard_set, stages, eval_batch_size=8)


@pytest.fixture(scope="module")
def batches(plan: Plan) -> list[Batch]:
    with Loader(plan) as loader:
        return [*loader]


def raise_once(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: BaseException, *, call: int, after: bool
) -> None:
    """From now on, the `call`-th call of `owner.name` raises `error`, before or `after` its work."""
    real, calls = getattr(owner, name), 0

    def instead(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and not after:
            raise error
        result = real(*args, **named)
        if calls == call:
            raise error
        return result

    monkeypatch.setattr(owner, name, instead)


def assert_rest(loader: Loader, batches: list[Batch]) -> None:
    rest = [*loader]
    assert [batch.spec.index for batch in rest] == [batch.spec.index for batch in batches]
    for got, expected in zip(rest, batches, strict=True):
        assert torch.equal(got.images, expected.images)
        assert torch.equal(got.targets, expected.targets)


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        (Pipeline, "feed_input", 1),
        (Pipeline, "feed_input", 2),
        (Pipeline, "schedule_run", 1),
        (Pipeline, "share_outputs", 1),
        (Pipeline, "release_outputs", 1),
        (Loader, "_targets_on_device", 1),
    ],
)
def test_an_interrupt_before_or_after_any_call_in_next_loses_and_mixes_no_batch(
    plan: Plan, batches: list[Batch], monkeypatch: pytest.MonkeyPatch, owner: type, name: str, call: int, after: bool
) -> None:
    with Loader(plan) as loader:
        next(loader)
        raise_once(monkeypatch, owner, name, KeyboardInterrupt(), call=call, after=after)
        with pytest.raises(KeyboardInterrupt):
            next(loader)
        assert loader.state_dict()["next_batch"] == 1
        assert_rest(loader, batches[1:])


def test_an_interrupt_while_the_graph_is_rebuilt_is_harmless(
    plan: Plan, batches: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Loader(plan) as loader:
        for name in ("share_outputs", "build", "schedule_run"):
            raise_once(monkeypatch, Pipeline, name, KeyboardInterrupt(), call=1, after=True)
            with pytest.raises(KeyboardInterrupt):
                next(loader)
        assert_rest(loader, batches)


def hidden_interrupt() -> SystemError:
    """As numba's own code turns one into."""
    error = SystemError("returned a result with an exception set")
    error.__cause__ = KeyboardInterrupt()
    return error


@pytest.mark.parametrize(
    ("owner", "name", "error", "seen", "words"),
    [
        (rows, "_train_rows", hidden_interrupt(), KeyboardInterrupt, None),
        (Pipeline, "share_outputs", StopIteration(), RuntimeError, "batch 1: it was not delivered"),
    ],
)
def test_a_hidden_interrupt_stays_one_and_a_stray_stop_iteration_does_not_end_the_loop(
    plan: Plan,
    batches: list[Batch],
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    error: BaseException,
    seen: type[BaseException],
    words: str | None,
) -> None:
    with Loader(plan) as loader:
        next(loader)
        raise_once(monkeypatch, owner, name, error, call=1, after=False)
        with pytest.raises(seen, match=words):
            next(loader)
        assert_rest(loader, batches[1:])


def thread_count() -> int:
    return len([*Path("/proc/self/task").iterdir()])


def test_after_an_error_of_an_operator_the_loader_continues_or_raises_it_again(
    shard_root: Path, tmp_path: Path, plan: Plan
) -> None:
    """And `close` ends DALI's threads although the error's traceback still refers to the pipeline."""
    root = Path(shutil.copytree(shard_root, tmp_path / "set"))
    shards = ShardSet.open(root)
    bad = int(plan.batch(2).ids[0])
    damage_sample(shards, bad, header=True)
    damaged = Plan(shards, plan.stages, eval_batch_size=8)
    threads = thread_count()
    with Loader(damaged, check_crc=False) as loader:
        running = thread_count()
        good = [next(loader).spec.index for _ in range(2)]
        for _ in range(2):
            with pytest.raises(RuntimeError, match="decoders") as error:
                next(loader)
        loader.load_state_dict({"next_batch": 3})
        good.append(next(loader).spec.index)
    assert good == [0, 1, 3]
    assert error.value.__traceback__ is not None
    until = time.monotonic() + 10  # why: the system may list a thread for a while after it was joined
    while thread_count() > threads and time.monotonic() < until:
        time.sleep(0.01)
    assert thread_count() <= threads < running


@pytest.mark.slow
@pytest.mark.parametrize("on_gpu", [False, True])
def test_images_of_another_batch_are_detected_even_if_all_shapes_are_equal(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, on_gpu: bool
) -> None:
    """As after an interrupt between two inputs of the graph: the encoded images of one batch, the crops of another."""
    submit = Reader.submit

    def other(*args: Any, tag: int = 0) -> PendingBatch:
        return submit(*args, tag=1 if tag == 2 else tag)

    monkeypatch.setattr(Reader, "submit", other)
    plain = Plan(plan.shards, [Stage(res=32, epochs=1, batch_size=16)], eval_batch_size=8)
    with GpuLoader(monkeypatch, plain) if on_gpu else Loader(plain) as loader:
        assert [next(loader).spec.index for _ in range(2)] == [0, 1]
        with pytest.raises(RuntimeError, match="batch 2: DALI returned another one, expected 16 at 32 px"):
            next(loader)
