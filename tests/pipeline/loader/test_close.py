"""A loader that is closed, interrupted or dropped leaves no thread, file, child or shared memory; none leaks."""

from __future__ import annotations

import copy
import json
import pickle
import signal
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.utils.data import DataLoader, IterableDataset

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.loader import Loader
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import Stage
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


# why: the memory of a process that ran other tests changes with what they left to the allocator
_STAGES = """
import json, sys, threading
from pathlib import Path
from resolute import Loader, Plan, ShardSet, Stage
from resolute.pipeline.plan.stage import Augment

shards = ShardSet.open(sys.argv[1])
augments = (Augment(), Augment(mixup_alpha=0.4, cutmix_alpha=1.0), Augment(policy="randaugment"))
stages = [
    Stage(
        res=shards.resolutions[i % 3],
        epochs=12,
        batch_size=8 if i % 2 else 4,
        fraction=1.0 if i % 2 else 0.5,
        augment=augments[i % len(augments)],
        order="windowed" if i % 2 else "shuffled",
    )
    for i in range(75)
]
plan = Plan(shards, stages, eval_batch_size=8, eval_every_epochs=10)
resident, files, threads = [], [], []
with Loader(plan, num_threads=2) as loader:
    for batch in loader:
        if batch.spec.index % 10 == 0:
            resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20)
            files.append(len(list(Path("/proc/self/fd").iterdir())))
            threads.append(threading.active_count())
print(json.dumps({"resident": resident, "files": files, "threads": threads}))
"""


@pytest.mark.slow
def test_memory_files_and_threads_stay_constant_over_stage_changes(shard_root: Path, tmp_path: Path) -> None:
    """Consecutive stages differ in resolution, batch size, fraction, augmentation and order."""
    done = Command("tests.support.execute", [_STAGES, shard_root], folder=ROOT, scratch=tmp_path).end()
    assert done.status == 0, done.err
    curve = json.loads(done.out.splitlines()[-1])
    third = len(curve["resident"]) // 3
    assert third > 250
    early, late = (
        {name: values[part] for name, values in curve.items()}
        for part in (slice(third, 2 * third), slice(2 * third, None))
    )
    # measured on two cores, of 150 stages: 853 MiB in the first twentieth, 871 to 873 from the fourth to the last
    assert statistics.median(late["resident"]) < statistics.median(early["resident"]) + 10
    assert max(late["files"]) <= max(early["files"])
    assert max(late["threads"]) <= max(early["threads"])


@pytest.mark.parametrize(
    "use",
    [
        next,
        iter,
        list,
        lambda loader: list(loader.epochs()),
        lambda loader: loader.transform_s,
        lambda loader: loader.load_state_dict({"next_batch": 0}),
        lambda loader: loader.__enter__(),
    ],
)
def test_a_closed_loader_says_so_in_one_line(shard_set: ShardSet, use: Callable[[Loader], object]) -> None:
    loader = Loader(Plan(shard_set, [Stage(res=32, epochs=1, batch_size=16)], eval_batch_size=8))
    batches = iter(next(loader.epochs()).train)
    next(batches)
    loader.close()
    loader.close()
    for again in (use, lambda _: next(batches)):
        with pytest.raises(ResoluteError, match=r"Loader: used after close\(\), expected an open loader; open another"):
            again(loader)
    assert loader.state_dict()["next_batch"] == 1


class Batches(IterableDataset[int]):
    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[int]:
        yield from (batch.spec.index for batch in self.loader)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("started", [False, True])
def test_a_loader_that_a_worker_inherits_by_fork_is_refused_in_one_line(shard_set: ShardSet, started: bool) -> None:
    with Loader(Plan(shard_set, [Stage(res=32, epochs=1, batch_size=16)], eval_batch_size=8)) as loader:
        if started:
            next(loader)
        workers = DataLoader(
            Batches(loader), batch_size=None, num_workers=1, multiprocessing_context="fork", timeout=20
        )
        with pytest.raises(
            ResoluteError, match=r"Loader: used in process \d+, which was forked from process \d+, where"
        ):
            list(workers)
        assert next(loader).spec.index == int(started)


_WITHOUT_WAITING = """
import gc, os, sys
from resolute import Loader, Plan, ShardSet, Stage
plan = Plan(ShardSet.open(sys.argv[1]), [Stage(res=32, epochs=1, batch_size=16)])
loader = Loader(plan)
next(loader)
child = os.fork()
if sys.argv[2] == "close":
    loader.close()
del loader
gc.collect()
if child:
    assert os.waitpid(child, 0)[1] == 0
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["close", "drop"])
def test_a_forked_process_closes_or_drops_a_loader_without_waiting(shard_root: Path, tmp_path: Path, end: str) -> None:
    process = Command("tests.support.execute", [_WITHOUT_WAITING, shard_root, end], folder=ROOT, scratch=tmp_path)
    done = process.end()
    assert done.status == 0, done.err


@pytest.mark.parametrize("send", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_loader_is_not_copied_or_sent(shard_set: ShardSet, send: Callable[[Loader], object]) -> None:
    with Loader(Plan(shard_set, [Stage(res=32, epochs=1, batch_size=16)])) as loader:
        with pytest.raises(ResoluteError, match="Loader: copied or sent to another process, expected to stay"):
            send(loader)
        assert next(loader).spec.index == 0


_REMOTE = """
import os, sys
from resolute import ResoluteError
from resolute.pipeline.storage.open_files import open_files
from resolute.pipeline.storage.obstore_client import open_store
files = open_files("http://127.0.0.1:9/set")
child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
for use in (lambda: files.file_version("a"), lambda: files.read("a", 0, 1), lambda: open_files("http://127.0.0.1:9/x")):
    try:
        use()
    except ResoluteError as error:
        print(error, flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_a_remote_set_that_a_forked_process_uses_is_refused_in_one_line(tmp_path: Path) -> None:
    """obstore's threads do not exist there: requests would wait for ever."""
    done = Command("tests.support.execute", [_REMOTE], folder=ROOT, scratch=tmp_path).end()
    assert done.status == 0, done.err
    lines = done.out.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("object store: used in process ") for line in lines)
    assert 'multiprocessing_context="spawn"' in lines[0]
