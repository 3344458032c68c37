"""Prep again: finished sets are recognised, unfinished ones redone, other people's files left alone."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prep import writer

Prep = Callable[..., Any]
ROOT = Path(__file__).parents[2]


def tree(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def argv(photos: Path, tmp_path: Path) -> tuple[object, ...]:
    return ("--src", photos, "--out", tmp_path / "s", "--res", "32,48", "--shard-samples", 20)


def test_finished_set_is_recognised_and_left_alone(argv: tuple[object, ...], tmp_path: Path, prep: Prep) -> None:
    assert prep(*argv).status == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "s").rglob("*")}
    again = prep(*argv)
    assert again.status == 0
    assert "already there" in again.out
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "s").rglob("*")} == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("--quality", 80), "got quality 90, expected 80"),
        (("--seed", 3), "got seed 0, expected 3"),
        (("--res", "32,64"), "got resolutions [32, 48], expected [32, 64]"),
        (("--val-frac", 0.2), '"frac": 0.1'),
    ],
)
def test_other_settings_are_refused_by_name(
    argv: tuple[object, ...], tmp_path: Path, prep: Prep, change: tuple[object, ...], words: str
) -> None:
    assert prep(*argv).status == 0
    before = tree(tmp_path / "s")
    ran = prep(*argv, *change)
    assert ran.status == 2
    assert ran.err.count("\n") == 1
    assert words in ran.err
    assert "REBUILD=1" in ran.err
    assert tree(tmp_path / "s") == before


def test_changed_photos_are_noticed_and_rebuilt_on_request(
    argv: tuple[object, ...], photos: Path, tmp_path: Path, prep: Prep
) -> None:
    assert prep(*argv).status == 0
    (photos / "bee" / "03.jpg").unlink()
    ran = prep(*argv)
    assert ran.status == 2
    assert "source" in ran.err
    assert "got source fingerprint" in ran.err or "got source images 60, expected 59" in ran.err
    assert prep(*argv, "--rebuild").status == 0
    assert json.loads((tmp_path / "s" / "manifest.json").read_text())["source"]["images"] == 59


def test_rebuild_leaves_nothing_of_the_old_set(argv: tuple[object, ...], tmp_path: Path, prep: Prep) -> None:
    assert prep(*argv, "--shard-samples", 5).status == 0
    (tmp_path / "s" / "notes.txt").write_text("mine")
    other = (*argv[:4], "--res", "32", "--rebuild")
    assert prep(*other).status == 0
    assert prep(*argv[:2], "--out", tmp_path / "fresh", "--res", "32").status == 0
    got = tree(tmp_path / "s")
    assert got.pop("notes.txt")
    assert got == tree(tmp_path / "fresh")
    assert not (tmp_path / "s" / "48").exists()


def test_damaged_set_is_not_called_finished(argv: tuple[object, ...], tmp_path: Path, prep: Prep) -> None:
    assert prep(*argv).status == 0
    whole = tree(tmp_path / "s")
    tar = tmp_path / "s" / "48" / "train-000001.tar"
    tar.write_bytes(tar.read_bytes()[:-512])
    ran = prep(*argv)
    assert ran.status == 2
    assert "train-000001.tar" in ran.err
    assert "REBUILD=1" in ran.err
    assert prep(*argv, "--rebuild").status == 0
    assert tree(tmp_path / "s") == whole


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_is_one_line_and_leaves_no_part(
    argv: tuple[object, ...], tmp_path: Path, prep: Prep, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    whole_write = writer.Part.write

    class Full:
        def __init__(self, file: object) -> None:
            self.file = file

        def write(self, data: bytes) -> int:
            raise OSError(number, os.strerror(number))

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

    def write(part: writer.Part, data: bytes) -> None:
        if part.path.name == "train-000001.tar" and part.path.parent.name == "48":
            part._file = Full(part._file)  # type: ignore[assignment]
        whole_write(part, data)

    monkeypatch.setattr(writer.Part, "write", write)
    ran = prep(*argv)
    assert ran.status == 2
    assert ran.err.count("\n") == 1
    assert "disk full" in ran.err
    assert "Traceback" not in ran.err
    assert not (tmp_path / "s" / "manifest.json").exists()
    assert not list((tmp_path / "s").rglob("*.part"))
    monkeypatch.undo()
    assert prep(*argv).status == 0
    assert prep(*argv[:2], "--out", tmp_path / "fresh", *argv[4:]).status == 0
    assert tree(tmp_path / "s") == tree(tmp_path / "fresh")


def test_two_preps_at_once_do_not_mix(argv: tuple[object, ...], tmp_path: Path, prep: Prep) -> None:
    (tmp_path / "s").mkdir()
    with (tmp_path / "s" / "unfinished").open("w") as mark:
        fcntl.flock(mark, fcntl.LOCK_EX)
        ran = prep(*argv)
        assert ran.status == 2
        assert "another prep is writing" in ran.err
    assert prep(*argv).status == 0
    assert not (tmp_path / "s" / "unfinished").exists()


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_killed_prep_redoes_to_identical_bytes(
    argv: tuple[object, ...], tmp_path: Path, prep: Prep, sent: signal.Signals
) -> None:
    command = [sys.executable, "-m", "prep", *map(str, argv), "--workers", "2"]
    process = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True, env=os.environ
    )
    deadline = time.monotonic() + 40
    while not _begun(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.01)
    # why: a terminal's Ctrl-C reaches the whole group; SIGKILL only the one that was aimed at
    os.killpg(process.pid, sent) if sent == signal.SIGINT else process.send_signal(sent)
    _, err = process.communicate(timeout=40)
    if sent == signal.SIGINT:
        assert process.returncode == 130
        assert "Traceback" not in err
        assert err.count("\n") == 1
    assert (tmp_path / "s" / "unfinished").exists()
    assert not (tmp_path / "s" / "manifest.json").exists()
    while _alive(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _alive(process.pid) == []
    assert prep(*argv).status == 0
    assert prep(*argv[:2], "--out", tmp_path / "fresh", *argv[4:]).status == 0
    assert tree(tmp_path / "s") == tree(tmp_path / "fresh")


def _begun(folder: Path) -> bool:
    """Whether the first tar has bytes: the workers are at work."""
    try:
        return (folder / "s" / "32" / "train-000000.tar.part").stat().st_size > 0
    except FileNotFoundError:  # not begun, or renamed already
        return (folder / "s" / "32" / "train-000000.tar").exists()


def _alive(session: int) -> list[int]:
    """Processes of the session `session`, zombies aside."""
    alive = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            alive.append(int(path.parent.name))
    return alive


def test_a_worker_that_dies_is_one_clear_line(
    argv: tuple[object, ...], tmp_path: Path, prep: Prep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prep.pool._start", os.abort)
    ran = prep(*argv)
    assert ran.status == 2
    assert ran.err.count("\n") == 1
    assert "a worker process died" in ran.err
    assert not (tmp_path / "s" / "manifest.json").exists()
