"""Running prep again: a finished set is recognised and repaired, an unfinished one resumed, to the same bytes."""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from resolute.prep.storage import hashed_file as writer
from resolute.prep.storage.output import LocalStore
from resolute.prep.verify import to_rebuild
from tests import ROOT
from tests.conftest import make_photos
from tests.support.cli import verify
from tests.support.commands import Command, Ended
from tests.support.damage import flip
from tests.support.manifests import read_joined
from tests.support.trees import tree

Prep = Callable[..., Any]
Damage = Callable[[Path], None]


def test_changed_settings_are_refused_by_name(argv: tuple[object, ...], copied: Path, prep: Prep) -> None:
    before = tree(copied)
    for change, words in (
        (("--quality", 80), "quality: got 90, expected 80"),
        (("--shard-samples", 10), "shard_samples: got 20, expected 10"),
        (("--val-frac", 0), '"frac": 0.1'),
    ):
        ran = prep(*argv, *change)
        assert (ran.status, ran.err.count("\n")) == (2, 1), ran.err
        assert words in ran.err
        assert "REBUILD=1" in ran.err
    assert tree(copied) == before


@pytest.mark.slow
def test_changed_photos_are_refused_and_a_rebuild_leaves_nothing_of_the_old_set(
    own_photos: Path, copied: Path, tmp_path: Path, prep: Prep
) -> None:
    (own_photos / "class1" / "003.jpg").unlink()
    (copied / "notes.txt").write_text("mine")
    argv = ("--src", own_photos, "--shard-samples", 30)
    ran = prep(*argv[:2], "--out", copied, "--res", "32,48", "--shard-samples", 20)
    assert ran.status == 2
    assert "images: got 60, expected 59" in ran.err
    assert re.search(r"the source has changed in (train|val) class1 \(\d+ -> \d+ images\)", ran.err)
    assert prep(*argv, "--out", copied, "--res", "32", "--rebuild").status == 0
    assert prep(*argv, "--out", tmp_path / "fresh", "--res", "32").status == 0
    got = tree(copied)
    assert got.pop("notes.txt")
    assert got == tree(tmp_path / "fresh")
    assert not (copied / "48").exists()


def test_only_incomplete_shards_are_rebuilt(argv: tuple[object, ...], copied: Path, prep: Prep) -> None:
    whole = tree(copied)
    tar = copied / "48" / "train-000001.tar"
    tar.write_bytes(tar.read_bytes()[:-512])
    (copied / "32" / "val-000000.idx").unlink()
    before = {path: path.stat().st_ino for path in copied.rglob("*.tar")}
    ran = prep(*argv)
    assert ran.status == 0, ran.err
    assert "kept 2 shards" in ran.out
    assert tree(copied) == whole
    changed = {path.name for path, inode in before.items() if path.stat().st_ino != inode}
    assert changed == {"train-000001.tar", "val-000000.tar"}


def test_an_image_with_changed_content_is_detected_when_a_resolution_is_added(
    own_photos: Path, copied: Path, prep: Prep
) -> None:
    whole = tree(copied)
    photo = own_photos / "class1" / "003.jpg"
    data = bytearray(photo.read_bytes())
    data[15] ^= 2  # the density in its header, which no decoder uses
    photo.write_bytes(data)
    ran = prep("--src", own_photos, "--out", copied, "--res", "32,48,64", "--shard-samples", 20)
    assert ran.status == 2
    assert "its images have changed since it was first made" in ran.err
    assert {name: digest for name, digest in tree(copied).items() if name in whole} == whole


def test_a_full_disk_is_reported_in_one_line_and_leaves_no_partial_file(
    argv: tuple[object, ...], made: Path, tmp_path: Path, prep: Prep, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_create = LocalStore.create

    class Full:
        def __init__(self, file: object) -> None:
            self.file = file

        def write(self, data: bytes) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

    def create(folder: LocalStore, name: str) -> writer.AtomicFile:
        part = whole_create(folder, name)
        if name == "48/train-000001.tar":
            part._file = Full(part._file)  # type: ignore[assignment]
        return part

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "create", create)
        ran = prep(*argv, "--workers", 4)  # so many that this process writes the four shards
    assert (ran.status, ran.err.count("\n")) == (2, 1), ran.err
    assert "not written" in ran.err
    assert not (tmp_path / "s" / "manifest.json").exists()
    assert not list((tmp_path / "s").rglob("*.partial"))
    ran = prep(*argv)
    assert ran.status == 0, ran.err
    assert re.search("kept 1 shard|kept [23] shards", ran.out)
    assert tree(tmp_path / "s") == tree(made / "set")


@pytest.mark.slow
def test_a_run_killed_five_times_produces_the_same_bytes(
    tmp_path: Path, prep: Prep, forked: Callable[..., Ended]
) -> None:
    photos = make_photos(tmp_path / "many", classes=2, each=10)
    argv = ["--src", photos, "--out", tmp_path / "s", "--res", "32,48", "--shard-samples", "1", "--workers", "2"]
    done = forked("tests.support.kill_prep", 5, 0, 20, *argv)
    assert done.status == 0, done.out + done.err
    last_try = done.out.rpartition("starting over")[2]
    assert len(re.findall(r"^kill \d+: \d+ of 20 shards, status 9$", last_try, re.MULTILINE)) == 5
    assert prep(*argv[:2], "--out", tmp_path / "fresh", *argv[4:]).status == 0
    assert tree(tmp_path / "s") == tree(tmp_path / "fresh")


@pytest.mark.timing
@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_prep_leaves_no_process_and_is_resumed(
    argv: tuple[object, ...], tmp_path: Path, prep: Prep, sent: signal.Signals
) -> None:
    argv = (*argv[:-1], 5)
    command = Command("shards", [*argv, "--workers", 2], folder=ROOT, scratch=tmp_path)
    deadline = time.monotonic() + 40
    while not list((tmp_path / "s").glob("32/train-*.tar*")) and time.monotonic() < deadline:
        time.sleep(0.001)
    # why: a terminal's Ctrl-C reaches the whole group; SIGKILL only the one that was aimed at
    os.killpg(command.pid, sent) if sent == signal.SIGINT else command.send(sent)
    ended = command.end(seconds=40)
    assert ended.status == (130 if sent == signal.SIGINT else 128 + sent)
    if sent == signal.SIGINT:
        assert ended.err.startswith("resolute shards: interrupted; ")
        assert ended.err.count("\n") == 1
    assert not (tmp_path / "s" / "manifest.json").exists()
    while _alive(command.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _alive(command.pid) == []
    assert prep(*argv).status == 0
    assert prep(*argv, "--out", tmp_path / "fresh").status == 0
    assert tree(tmp_path / "s") == tree(tmp_path / "fresh")


def _alive(group: int) -> list[int]:
    """Processes of the group `group`, zombies aside."""
    alive = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            alive.append(int(path.parent.name))
    return alive


DAMAGE: dict[str, dict[str, Damage]] = {
    "shards and records": {
        "48/train-000001.tar": partial(flip, at=5000),
        "32/train-000002.tar": Path.unlink,
        "32/val-000000.tar": lambda path: os.truncate(path, 20_000),
        "32/train-000000.idx": partial(flip, at=9),
        "records/train-000000-48.rec": partial(flip, at=700),
        "records/val-000000-48.rec": Path.unlink,
    },
    "derived files": {
        "index/train-48.npy": partial(flip, at=200),
        "index/val-48.npy": Path.unlink,
        "index/val.npy": partial(flip, at=140),
        "index/val.sources.jsonl": partial(flip, at=4),
        "_info.json": partial(flip, at=60),
    },
    "manifest": {"manifest.json": partial(flip, at=60)},
    "manifest of a generation": {"manifest.g000.32-48.json": partial(flip, at=60)},
    "lost manifest of a generation": {"manifest.g000.32-48.json": Path.unlink},
    "plan": {"records/plan.json": partial(flip, at=60)},
}


def state(path: Path) -> tuple[int, int]:
    return path.stat().st_ino, path.stat().st_mtime_ns


@pytest.mark.slow
@pytest.mark.parametrize("what", DAMAGE)
def test_prep_rebuilds_what_verify_reported_and_nothing_else(
    argv: tuple[object, ...], copied: Path, prep: Prep, capfd: pytest.CaptureFixture[str], what: str
) -> None:
    before = tree(copied)
    manifest = read_joined(copied)
    for name, damage in DAMAGE[what].items():
        damage(copied / name)
    kept = {path: state(path) for path in copied.glob("[0-9]*/*.*") if not path.name.startswith("_info")}
    assert verify([str(copied), "--workers", "2"]) == 1
    out = capfd.readouterr().out
    assert all(f"\n  {name}: " in out for name in DAMAGE[what])
    assert out.count("\n  ") == len(DAMAGE[what]) + out.count("to rebuild")
    ran = prep(*argv)
    assert ran.status == 0, ran.err
    assert tree(copied) == before
    assert not (copied / "damaged.json").exists()
    shards = {f"{res}/{name}" for res, names in to_rebuild(manifest, set(DAMAGE[what])).items() for name in names}
    for path, was in kept.items():
        same = f"{path.parent.name}/{path.stem}" not in shards
        assert (state(path) == was) == same, path
    assert verify([str(copied), "--workers", "2"]) == 0
