"""A loader that is closed, interrupted or dropped leaves no thread, file, child or shared memory."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

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
before = left()
ended = attempt(sys.argv[2])
print(json.dumps({"ended": ended, "before": before, "after": left()}))
"""


@pytest.mark.parametrize(
    ("way", "ended"),
    [("close", "closed"), ("drop", "closed"), ("error", "ValueError"), ("ctrl-c", "KeyboardInterrupt")],
)
def test_a_loader_leaves_no_threads_files_children_or_shared_memory(
    shard_root: Path, tmp_path: Path, way: str, ended: str
) -> None:
    process = Command("tests.support.execute", [_CONSUMER, shard_root, way], folder=ROOT, scratch=tmp_path)
    if way == "ctrl-c":
        process.wait_for("running\n")
        process.send(signal.SIGINT)
    done = process.end()
    assert done.status == 0, done.err
    report = json.loads(done.out.splitlines()[-1])
    assert report["ended"] == ended
    assert report["after"]["tars"] == []
    assert report["after"]["children"] == []
    assert report["after"] == report["before"]
