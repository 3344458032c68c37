"""Running prep again: finished sets are recognised, unfinished ones are resumed, foreign files are left untouched."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from resolute.prep.storage import hashed_file as writer
from resolute.prep.storage.output import LocalStore
from tests import ROOT
from tests.conftest import make_photos
from tests.support.trees import tree

Prep = Callable[..., Any]


@pytest.fixture
def argv(photos: Path, tmp_path: Path) -> tuple[object, ...]:
    return ("--src", photos, "--out", tmp_path / "s", "--res", "32,48", "--shard-samples", 20)


def test_a_finished_set_is_recognised_and_not_changed(argv: tuple[object, ...], tmp_path: Path, prep: Prep) -> None:
    assert prep(*argv).status == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "s").rglob("*")}
    again = prep(*argv)
    assert again.status == 0
    assert "already there" in again.out
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "s").rglob("*")} == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("--quality", 80), "quality: got 90, expected 80"),
        (("--seed", 3), "seed: got 0, expected 3"),
        (("--margin", 1.5), "margin: got 1.14"),
        (("--shard-samples", 10), "shard_samples: got 20, expected 10"),
        (("--val-frac", 0.2), '"frac": 0.1'),
        (("--val-frac", 0), '"frac": 0.1'),
    ],
)
def test_changed_settings_are_refused_by_name(
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


def test_changed_photos_are_detected_and_rebuilt_on_request(
    argv: tuple[object, ...], photos: Path, tmp_path: Path, prep: Prep
) -> None:
    assert prep(*argv).status == 0
    (photos / "bee" / "03.jpg").unlink()
    ran = prep(*argv)
    assert ran.status == 2
    assert "images: got 60, expected 59" in ran.err
    assert "the source has changed in train bee (20 -> 19 images)" in ran.err
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


def test_only_incomplete_shards_are_rebuilt(argv: tuple[object, ...], tmp_path: Path, prep: Prep) -> None:
    assert prep(*argv).status == 0
    whole = tree(tmp_path / "s")
    tar = tmp_path / "s" / "48" / "train-000001.tar"
    tar.write_bytes(tar.read_bytes()[:-512])
    (tmp_path / "s" / "32" / "val-000000.idx").unlink()
    before = {path: path.stat().st_ino for path in (tmp_path / "s").rglob("*.tar")}
    ran = prep(*argv)
    assert ran.status == 0
    assert "kept 2 shards" in ran.out
    assert tree(tmp_path / "s") == whole
    after = {path: path.stat().st_ino for path in (tmp_path / "s").rglob("*.tar")}
    assert {path.name for path in after if after[path] != before[path]} == {"train-000001.tar", "val-000000.tar"}


def test_a_resolution_is_added_without_touching_the_others(
    argv: tuple[object, ...], tmp_path: Path, prep: Prep
) -> None:
    base = (*argv[:4], *argv[6:])
    assert prep(*base, "--res", "32,64").status == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "s").rglob("*.tar")}
    assert prep(*base, "--res", "32,48,64").status == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert prep(*base[:2], "--out", tmp_path / "fresh", *base[4:], "--res", "32,48,64").status == 0
    assert tree(tmp_path / "s") == tree(tmp_path / "fresh")
    assert "already there" in prep(*base, "--res", "48").out


def test_an_image_with_changed_content_is_detected_when_a_resolution_is_added(
    argv: tuple[object, ...], photos: Path, tmp_path: Path, prep: Prep
) -> None:
    assert prep(*argv).status == 0
    whole = tree(tmp_path / "s")
    data = bytearray((photos / "bee" / "03.jpg").read_bytes())
    data[len(data) // 2] ^= 1
    (photos / "bee" / "03.jpg").write_bytes(data)
    ran = prep(*argv[:4], "--res", "32,48,64", *argv[6:])
    assert ran.status == 2
    assert "its images have changed since it was first made" in ran.err
    assert {name: digest for name, digest in tree(tmp_path / "s").items() if name in whole} == whole


def spoil_a_photo_of_the_last_shard(argv: tuple[object, ...], photos: Path, tmp_path: Path, prep: Prep) -> None:
    assert prep(*argv[:2], "--out", tmp_path / "order", *argv[4:]).status == 0
    index = tmp_path / "order" / "index"
    last = json.loads((index / "train.sources.jsonl").read_text().splitlines()[-1])
    (photos / last).write_bytes(b"junk")


def test_a_run_with_too_many_rejects_keeps_its_finished_shards(
    argv: tuple[object, ...], photos: Path, tmp_path: Path, prep: Prep
) -> None:
    argv = (*argv[:-1], 5)
    spoil_a_photo_of_the_last_shard(argv, photos, tmp_path, prep)
    ran = prep(*argv)
    assert ran.status == 2
    assert "too many unusable images" in ran.err
    kept = len(list((tmp_path / "s" / "records").glob("*-48.rec")))
    assert kept > 0
    ran = prep(*argv, "--max-bad", 0.1)
    assert ran.status == 0
    assert f"kept {kept} shards" in ran.out


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_reported_in_one_line_and_leaves_no_partial_file(
    argv: tuple[object, ...], tmp_path: Path, prep: Prep, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    whole_create = LocalStore.create

    class Full:
        def __init__(self, file: object) -> None:
            self.file = file

        def write(self, data: bytes) -> int:
            raise OSError(number, os.strerror(number))

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

    def create(folder: LocalStore, name: str) -> writer.AtomicFile:
        part = whole_create(folder, name)
        if name == "48/train-000001.tar":
            part._file = Full(part._file)  # type: ignore[assignment]
        return part

    monkeypatch.setattr(LocalStore, "create", create)
    ran = prep(*argv, "--workers", 4)  # so many that this process writes the four shards
    assert ran.status == 2
    assert ran.err.count("\n") == 1
    assert "not written" in ran.err
    assert "Traceback" not in ran.err
    assert not (tmp_path / "s" / "manifest.json").exists()
    assert not list((tmp_path / "s").rglob("*.partial"))
    monkeypatch.undo()
    ran = prep(*argv)
    assert ran.status == 0
    assert re.search("kept 1 shard|kept [23] shards", ran.out)
    assert prep(*argv[:2], "--out", tmp_path / "fresh", *argv[4:]).status == 0
    assert tree(tmp_path / "s") == tree(tmp_path / "fresh")


def test_an_unfinished_run_is_resumed_only_with_the_same_settings_and_source(
    argv: tuple[object, ...], photos: Path, tmp_path: Path, prep: Prep
) -> None:
    argv = (*argv[:-1], 5)
    spoil_a_photo_of_the_last_shard(argv, photos, tmp_path, prep)
    assert prep(*argv).status == 2  # too many rejects: unfinished
    ran = prep(*argv, "--quality", 80)
    assert ran.status == 2
    assert "an unfinished run with other settings: quality: got 90, expected 80" in ran.err
    (photos / "cat" / "extra.jpg").write_bytes(b"junk")
    ran = prep(*argv, "--max-bad", 0.1)
    assert ran.status == 2
    assert "the source has changed in train cat (20 -> 21 images)" in ran.err
    assert prep(*argv, "--max-bad", 0.1, "--rebuild").status == 0


@pytest.mark.slow
def test_a_run_killed_thirty_times_produces_the_same_bytes(tmp_path: Path, prep: Prep) -> None:
    photos = make_photos(tmp_path / "many", classes=2, each=60)
    argv = ["--src", photos, "--out", tmp_path / "s", "--res", "32,48", "--shard-samples", "1", "--workers", "2"]
    command = [sys.executable, str(ROOT / "tests" / "support" / "kill_prep.py"), "30", "0", "120", *map(str, argv)]
    # why: a script's own folder is on its path, not this one; what is installed may be another checkout
    here = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=here, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    last_try = done.stdout.rpartition("starting over")[2]
    assert len(re.findall(r"^kill \d+: \d+ of 120 shards, status 9$", last_try, re.MULTILINE)) == 30
    assert prep(*argv[:2], "--out", tmp_path / "fresh", *argv[4:]).status == 0
    assert tree(tmp_path / "s") == tree(tmp_path / "fresh")


@pytest.mark.timing
@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_prep_leaves_no_process_and_is_resumed(
    argv: tuple[object, ...], tmp_path: Path, prep: Prep, sent: signal.Signals
) -> None:
    argv = (*argv[:-1], 2)
    command = [sys.executable, "-m", "resolute", "shards", *map(str, argv), "--workers", "2"]
    process = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True, env=os.environ
    )
    deadline = time.monotonic() + 40
    while not list((tmp_path / "s").glob("32/train-*.tar*")) and time.monotonic() < deadline:
        time.sleep(0.001)
    # why: a terminal's Ctrl-C reaches the whole group; SIGKILL only the one that was aimed at
    os.killpg(process.pid, sent) if sent == signal.SIGINT else process.send_signal(sent)
    _, err = process.communicate(timeout=40)
    if sent == signal.SIGINT:
        assert process.returncode == 130
        assert "Traceback" not in err
        assert err.count("\n") == 1
    assert not (tmp_path / "s" / "manifest.json").exists()
    while _alive(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _alive(process.pid) == []
    assert prep(*argv).status == 0
    assert prep(*argv[:2], "--out", tmp_path / "fresh", *argv[4:]).status == 0
    assert tree(tmp_path / "s") == tree(tmp_path / "fresh")


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
