"""The soak test: injected faults occur as specified, checks detect every difference, a short run has no findings."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import ROOT
from tests.soak.checks import check_training, compare_trees, leftover_files, tree
from tests.soak.events import NAME, OPEN, READ, SYNC, WRITE, Event, Faults, problems_of

_WORK = """
import os, sys
try:
    data = open(sys.argv[1] + "/file", "rb", buffering=0).read(8)
    handle = os.open(sys.argv[1] + "/new", os.O_CREAT | os.O_RDWR)
    print(len(data), os.write(handle, b"12345678"))
    os.fsync(handle)
    os.rename(sys.argv[1] + "/new", sys.argv[1] + "/renamed")
except OSError as error:
    print(error.errno)
"""


class Faulty(Faults):
    """Faults, and the folder in which a process reads, writes and renames under them."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.folder = root / "folder"
        self.folder.mkdir()
        (self.folder / "file").write_bytes(b"abcdefgh")

    def work(self, action: str = "", calls: int = 0, *, folder: str = "folder", **more: Any) -> tuple[str, int]:
        """Output and exit status of the process, under a fault or the one before."""
        if action:
            event = Event(kind="fault", how=action, at=0.0, action=action, calls=calls, **{"limit": -1, **more})
            self.inject(event, self.folder.with_name(folder))
        done = subprocess.run([sys.executable, "-c", _WORK, str(self.folder)], env={**os.environ, **self.variables},
                              capture_output=True, text=True)  # fmt: skip
        return done.stdout.strip(), done.returncode


@pytest.fixture
def faulty(tmp_path: Path) -> Faulty:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    return Faulty(tmp_path)


def test_calls_fail_with_the_requested_errno_and_count(faulty: Faulty) -> None:
    assert faulty.work() == ("8 8", 0)
    for calls, error in ((READ, errno.EIO), (WRITE, errno.ENOSPC), (OPEN, errno.ESTALE)):
        assert faulty.work("fail", calls, error=error, limit=1) == (str(error), 0)
        assert faulty.work() == ("8 8", 0)
        assert faulty.clear() == 1
    for calls in (SYNC, NAME):
        assert faulty.work("fail", calls, error=errno.EIO) == (f"8 8\n{errno.EIO}", 0)
    assert faulty.work("fail", READ, error=errno.EIO, after=1) == ("8 8", 0)
    assert faulty.work() == (str(errno.EIO), 0)
    assert faulty.work("fail", READ | WRITE, error=errno.EIO, folder="fold") == ("8 8", 0)  # only begins alike
    assert faulty.clear() == 0


def test_short_reads_and_writes_transfer_half(faulty: Faulty) -> None:
    assert faulty.work("shorten", READ | WRITE) == ("4 4", 0)


def test_a_kill_during_a_write_leaves_a_partial_write(faulty: Faulty) -> None:
    assert faulty.work("kill", WRITE)[1] == -9
    assert (faulty.folder / "new").read_bytes() == b"1234"


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
    problems = problems_of(event, status=status, success=[0], stderr=stderr, what="prep")
    assert len(problems) == len(expected)
    assert all(part in problem for part, problem in zip(expected, problems, strict=True))


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


def _run(folder: Path, *, loss: float = 2.0, weight: float = 0.5, steps: int = 2) -> Path:
    folder.mkdir()
    records = [{"kind": "step", "step": step, "loss": loss} for step in range(steps)] + [{"kind": "epoch", "epoch": 0}]
    (folder / "run.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    for name in ("last.pt", "best.pt"):
        torch.save({"model": {"w": torch.tensor([weight])}, "ema": None}, folder / name)
    return folder


def test_a_run_that_differs_from_the_undisturbed_run_is_detected(tmp_path: Path) -> None:
    reference = _run(tmp_path / "reference")

    def differences(run: Path, *, exact: bool = True) -> list[str]:
        return check_training(run, reference, exact=exact)

    assert differences(_run(tmp_path / "same")) == []
    near = _run(tmp_path / "near", loss=2.0 + 1e-7, weight=0.5 + 1e-7)
    assert [problem.split(":")[0] for problem in differences(near)] == ["run.jsonl, steps", "last.pt", "best.pt"]
    assert differences(near, exact=False) == []
    assert len(differences(_run(tmp_path / "far", loss=2.1, weight=0.6), exact=False)) == 3
    assert "run.jsonl, steps" in differences(_run(tmp_path / "short", steps=1))[0]
    (tmp_path / "same" / ".last.pt.part").touch()
    assert "run folder" in differences(tmp_path / "same")[0]


@pytest.mark.slow
def test_a_short_soak_has_no_findings(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    words = ["--only", "prep-folder", "--seed", 7, "--index", 2, "--out", out]
    done = subprocess.run([sys.executable, "-m", "tests.soak", *map(str, words)], cwd=ROOT, text=True,
                          capture_output=True, timeout=900)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert result["findings"] == []
    assert result["cycles"] == {"prep-folder": 1}
    assert result["kills"] + result["faults"] >= 1  # a fast machine may end a command before its event
