"""The soak test: injected faults occur as specified, checks detect every difference, a short run has no findings."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.loader import Loader
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import Augment, Stage
from resolute.train.recipe.schema import Recipe
from tests.soak.checks import _check_samples, check_training, compare_trees, leftover_files, tree
from tests.soak.events import Event, Place, draw, problems_of
from tests.soak.faults import NAME, OPEN, READ, SYNC, WRITE, Control, compile_library, preload
from tests.soak.scenarios import PrepMemory, World, chosen_scenarios, write_recipes

PLACES = {"in": Place(path=Path("in"), reads=True, vanishes=True), "out": Place(path=Path("out"), writes=True)}
_WORK = """
import os, sys
try:
    data = open(sys.argv[1] + "/inside/file", "rb", buffering=0).read(8)
    handle = os.open(sys.argv[1] + "/inside/new", os.O_CREAT | os.O_RDWR)
    print(len(data), os.write(handle, b"12345678"))
    os.fsync(handle)
    os.rename(sys.argv[1] + "/inside/new", sys.argv[1] + "/inside/renamed")
except OSError as error:
    print(error.errno)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = compile_library(tmp_path_factory.mktemp("library"))
    if library is None:
        pytest.skip("needs a C compiler")
    return library


class Faulty:
    """A process that reads, writes and renames in a folder, under a `Control`."""

    def __init__(self, library: Path, folder: Path) -> None:
        self.folder = folder
        (folder / "inside").mkdir()
        (folder / "inside" / "file").write_bytes(b"abcdefgh")
        self.environ = {**os.environ, **preload(library, folder / "page")}
        self.control = Control(folder / "page")

    def run(self) -> tuple[str, int]:
        words = [sys.executable, "-c", _WORK, str(self.folder)]
        done = subprocess.run(words, env=self.environ, capture_output=True, text=True)
        return done.stdout.strip(), done.returncode


@pytest.fixture
def faulty(library: Path, tmp_path: Path) -> Faulty:
    return Faulty(library, tmp_path)


def test_calls_without_a_fault_succeed_and_are_counted(faulty: Faulty) -> None:
    assert faulty.run() == ("8 8", 0)
    faulty.control.count(faulty.folder / "inside", READ)
    assert faulty.run() == ("8 8", 0)
    assert faulty.control.counts() == (1, 0)
    faulty.control.count(faulty.folder / "inside", WRITE | SYNC | NAME)
    faulty.run()
    assert faulty.control.counts() == (3, 0)
    faulty.control.count(faulty.folder / "ins", READ | WRITE | SYNC | NAME | OPEN)  # only a prefix
    faulty.run()
    assert faulty.control.counts() == (0, 0)


def test_calls_fail_with_the_requested_errno_and_count(faulty: Faulty) -> None:
    inside = faulty.folder / "inside"
    for ops, error in ((READ, errno.EIO), (WRITE, errno.ENOSPC), (OPEN, errno.ESTALE)):
        faulty.control.fail(inside, ops, error=error, limit=1)
        assert faulty.run() == (str(error), 0)
        assert faulty.run() == ("8 8", 0)
    for ops in (SYNC, NAME):
        faulty.control.fail(inside, ops, error=errno.EIO)
        assert faulty.run() == (f"8 8\n{errno.EIO}", 0)
    faulty.control.fail(inside, READ, error=errno.EIO, after=1)
    assert faulty.run()[0] == "8 8"
    assert faulty.run()[0] == str(errno.EIO)
    faulty.control.clear()
    assert faulty.run()[0] == "8 8"


def test_short_reads_and_writes_transfer_half(faulty: Faulty) -> None:
    faulty.control.shorten(faulty.folder / "inside", READ | WRITE)
    assert faulty.run() == ("4 4", 0)


def test_a_kill_during_a_write_leaves_a_partial_write(faulty: Faulty) -> None:
    faulty.control.kill(faulty.folder / "inside", WRITE, after=0, group=False)
    assert faulty.run()[1] == -9
    assert (faulty.folder / "inside" / "new").read_bytes() == b"1234"


def test_events_depend_on_the_seed_only() -> None:
    def drawn_events(seed: int) -> list[Event]:
        rng = random.Random(seed)
        return [draw(rng, fault=i % 2 == 0, places=PLACES, several=True, loss=frozenset(), remote=True, library=True,
                     stop_s=1.0) for i in range(300)]  # fmt: skip

    assert drawn_events(1) == drawn_events(1)
    assert drawn_events(1) != drawn_events(2)
    kinds = Counter(event.how for event in drawn_events(3))
    for how in ("SIGKILL", "SIGKILL at a file call", "SIGTERM", "SIGSTOP", "vanish", "ENOSPC", "EIO read", "short read",
                "slow read", "s3 403", "s3 503", "s3 hang", "s3 cut"):  # fmt: skip
        assert kinds[how], how
    plain = [event for event in drawn_events(4) if event.how in ("SIGKILL", "SIGSTOP", "vanish")]
    assert not any(event.ops or event.remote for event in plain)


@pytest.mark.parametrize(
    ("status", "stderr", "expected"),
    [
        (0, "", []),
        (2, "resolute train: disk full", []),
        (2, "", ["0 lines"]),
        (2, "one\ntwo", ["2 lines"]),
        (0, "warning: something", ["1 lines"]),
        (1, "", ["status 1"]),
        (-9, "", ["status -9"]),
        (None, "", ["did not end"]),
        (2, "Traceback (most recent call last):\n  File\nError", ["traceback", "3 lines"]),
        (0, "resolute shards: already there: 3 shards\n[W1122 14:02:11.5 socket.cpp:1] [c10d] lost", []),
    ],
)
def test_commands_under_a_fault_must_succeed_or_end_with_status_2_and_one_line(
    status: int | None, stderr: str, expected: list[str]
) -> None:
    event = Event(kind="fault", how="ENOSPC", at=0.5, expected=frozenset({2}))
    problems = problems_of(event, status=status, final=0, stderr=stderr, what="prep")
    assert len(problems) == len(expected)
    assert all(part in problem for part, problem in zip(expected, problems, strict=True))


def test_a_killed_worker_must_end_prep_with_its_line() -> None:
    event = PrepMemory(World(root=Path("none"), store=None), 0).draw(random.Random(0))
    line = "resolute shards: worker process: died, got SIGKILL in one of 2, which no photo causes"
    assert problems_of(event, status=2, final=0, stderr=line, what="prep") == []
    for status, stderr in ((0, ""), (2, "resolute shards: too many unusable images")):
        assert len(problems_of(event, status=status, final=0, stderr=stderr, what="prep")) == 1


def test_leftover_missing_and_changed_files_are_detected(tmp_path: Path) -> None:
    for name in ("same", "missing", "changed"):
        (tmp_path / name).write_text(name)
    expected = tree(tmp_path)
    assert compare_trees("OUT", tree(tmp_path), expected) == []
    (tmp_path / "missing").unlink()
    (tmp_path / "changed").write_text("otherwise")
    (tmp_path / ".file.part").touch()
    kinds = [problem.split(": ")[1] for problem in compare_trees("OUT", tree(tmp_path), expected)]
    assert kinds == ["1 files missing", "1 files left over", "1 files with different content"]
    assert leftover_files("TMPDIR", tmp_path, ["same", "changed"]) == ["TMPDIR: left over: .file.part"]
    assert leftover_files("TMPDIR", tmp_path / "none") == []
    (tmp_path / "pymp-1").mkdir()
    (tmp_path / "pymp-1" / "file").touch()
    assert leftover_files("TMPDIR", tmp_path / "pymp-1") == ["TMPDIR: left over: file"]


def test_missing_repeated_and_unplanned_samples_are_detected() -> None:
    planned = [(0, 0, [1, 2]), (0, 1, [3, 4])]
    good = {0: {0: Counter([1, 2])}, 1: {0: Counter([3]), 1: Counter([3, 4])}}
    assert _check_samples(good, planned, complete=True) == []
    assert _check_samples({0: good[0]}, planned, complete=False) == []
    for step, ids in ((1, [3]), (1, [3, 4, 4]), (1, [3, 5]), (2, [3])):
        assert _check_samples({0: good[0], step: {0: Counter(ids)}}, planned, complete=True), (step, ids)
    assert _check_samples(good, [*planned, (0, 2, [1])], complete=False)  # twice in an epoch


def test_the_recipe_with_every_feature_is_valid(tmp_path: Path) -> None:
    world = World(root=tmp_path, store=None)
    write_recipes(world)
    recipe = Recipe.load(world.recipe("all"))
    assert recipe.precision.compile
    assert recipe.optim.lookahead
    assert "train-all" not in chosen_scenarios([])
    assert chosen_scenarios(["train-all"]) == ["train-all"]


def _run(folder: Path, *, loss: float = 2.0, weight: float = 0.5, steps: int = 2) -> Path:
    import torch

    folder.mkdir()
    records = [{"kind": "step", "step": step, "loss": loss} for step in range(steps)] + [{"kind": "epoch", "epoch": 0}]
    (folder / "run.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    for name in ("last.pt", "best.pt"):
        torch.save({"model": {"w": torch.tensor([weight])}, "ema": None}, folder / name)
    return folder


def test_a_run_that_differs_from_the_undisturbed_run_is_detected(tmp_path: Path) -> None:
    reference = _run(tmp_path / "reference")

    def differences(run: Path, *, exact: bool = True) -> list[str]:
        return check_training(run, reference, tmp_path / "seen", [], exact=exact, complete=False)

    assert differences(_run(tmp_path / "same")) == []
    near = _run(tmp_path / "near", loss=2.0 + 1e-7, weight=0.5 + 1e-7)
    assert [problem.split(":")[0] for problem in differences(near)] == ["losses", "last.pt", "best.pt"]
    assert differences(near, exact=False) == []
    assert len(differences(_run(tmp_path / "far", loss=2.1, weight=0.6), exact=False)) == 3
    assert "step records" in differences(_run(tmp_path / "short", steps=1))[0]
    (tmp_path / "same" / ".last.pt.part").touch()
    assert "run folder" in differences(tmp_path / "same")[0]


def test_a_graph_leaves_no_generated_code_behind(
    shard_set: ShardSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    augment = Augment(mixup_alpha=0.2, mixup_prob=1.0, random_erasing_prob=0.5)
    plan = Plan(shard_set, [Stage(res=32, epochs=1, batch_size=16, augment=augment)], eval_batch_size=None)
    with Loader(plan) as loader:
        assert next(iter(loader)).images.shape[-1] == 32
        assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="the soak runs on Linux")
def test_ctrl_c_before_a_forked_command_begins_ends_it_silently(tmp_path: Path) -> None:
    code = """
import os, pathlib, signal, sys
from tests.soak.processes import Command, start
command = Command(module="none", main=lambda words: 0, arguments=[])
process = start(command, pathlib.Path(sys.argv[1]), prepare=lambda: os.kill(os.getpid(), signal.SIGINT))
print(process.wait(20), repr(process.stderr))
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "130 ''\n", done.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the soak runs on Linux")
def test_a_short_soak_has_no_findings(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    words = ["--only", "prep-folder,train-1", "--seed", 7, "--index", 2, "--out", out]
    done = subprocess.run([sys.executable, "-m", "tests.soak", *map(str, words)], text=True,
                          capture_output=True,
                          timeout=900)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert result["findings"] == []
    assert result["cycles"] == {"prep-folder": 1, "train-1": 1}
    assert result["kills"] + result["faults"] >= 3
