"""A loader that is closed, interrupted or dropped leaves no thread, file, child or shared memory; none leaks."""

from __future__ import annotations

import json
import signal
import statistics
import threading
from pathlib import Path

import pytest

from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.loader import Loader
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import Augment, Stage
from tests import ROOT
from tests.support.commands import Command

# why: a process of its own: only there are all threads, files and segments of shared memory ours
_CONSUMER = """
import gc, json, os, signal, sys, threading, time
from pathlib import Path
from resolute import Loader, Plan, ShardSet, Stage
from resolute.pipeline.plan.stage import Augment


def left():
    gc.collect()
    tasks = sorted(Path(f"/proc/self/task/{t}/comm").read_text().strip() for t in os.listdir("/proc/self/task"))
    files = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    tars = [f for f in files if f.endswith(".tar")]
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {"tasks": len(tasks), "threads": threading.active_count(), "tars": tars, "children": children,
            "shared": Path("/proc/self/maps").read_text().count("/dev/shm/"), "files": len(files)}


def consume(way):
    shards = ShardSet.open(sys.argv[1])
    rich = Augment(policy="randaugment", mixup_alpha=0.4)
    plan = Plan(shards, [Stage(res=32, epochs=400, batch_size=16, augment=rich)], eval_batch_size=8)
    if way == "drop":
        for n, batch in enumerate(Loader(plan)):
            if n == 3:
                return
    with Loader(plan) as loader:
        for n, batch in enumerate(loader):
            if n == 3 and way == "error":
                raise ValueError("consumer")
            if n == 3 and way == "close":
                return
            if n == 3 and way == "ctrl-c":
                print("running", flush=True)
            if n > 3:
                time.sleep(0.01)


def attempt(way):
    try:
        consume(way)
    except (ValueError, KeyboardInterrupt) as error:
        return type(error).__name__
    return "closed"


attempt("close")  # why: libraries keep a pool or a file of their own after the first use; the second adds nothing
before, ended = left(), {}
for way in ("close", "drop", "error", "ctrl-c"):
    ended[way] = [attempt(way), left()]
print(json.dumps({"ended": ended, "before": before}))
"""


@pytest.mark.slow
def test_a_loader_leaves_no_threads_files_children_or_shared_memory(shard_root: Path, tmp_path: Path) -> None:
    process = Command("tests.support.execute", [_CONSUMER, shard_root], folder=ROOT, scratch=tmp_path)
    process.wait_for("running\n")
    process.send(signal.SIGINT)
    done = process.end()
    assert done.status == 0, done.err
    report = json.loads(done.out.splitlines()[-1])
    assert [how for how, _ in report["ended"].values()] == ["closed", "closed", "ValueError", "KeyboardInterrupt"]
    for way, (_, after) in report["ended"].items():
        assert (after["tars"], after["children"]) == ([], [])
        assert after == report["before"], way


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


@pytest.mark.slow
def test_memory_files_and_threads_stay_constant_over_stage_changes(shard_set: ShardSet) -> None:
    """Consecutive stages differ in resolution, batch size, fraction, augmentation and order."""
    augments = (Augment(), Augment(mixup_alpha=0.4, cutmix_alpha=1.0), Augment(policy="randaugment"))
    stages = [
        Stage(
            res=shard_set.resolutions[i % 3],
            epochs=12,
            batch_size=8 if i % 2 else 4,
            fraction=1.0 if i % 2 else 0.5,
            augment=augments[i % len(augments)],
            order="block" if i % 2 else "full",
        )
        for i in range(25)
    ]
    plan = Plan(shard_set, stages, eval_batch_size=8, eval_every_epochs=10)
    curve: list[tuple[float, int, int]] = []
    with Loader(plan, num_threads=2) as loader:
        for batch in loader:
            if batch.spec.index % 10 == 0:
                curve.append((resident_mib(), len(list(Path("/proc/self/fd").iterdir())), threading.active_count()))
    assert len(curve) > 250
    fifth = len(curve) // 5
    early, late = curve[fifth : 2 * fifth], curve[-fifth:]
    # measured on two cores: 759 to 762 MiB over 119 439 batches and 50 changes
    assert statistics.median(row[0] for row in late) < statistics.median(row[0] for row in early) + 10
    assert max(row[1] for row in late) <= max(row[1] for row in early)
    assert max(row[2] for row in late) <= max(row[2] for row in early)
