"""Atomic files: complete or absent; partial files of killed writers are deleted, those of running writers are not."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from resolute.errors import ResoluteError
from resolute.files import atomic_file, atomic_write, check_output, delete_partial, output_file
from resolute.lock import try_lock


def write_and_wait(path: Path, ready: Event) -> None:
    with atomic_file(path) as file:
        file.write(b"half")
        file.flush()
        ready.set()
        signal.pause()


def test_a_file_is_replaced_atomically(tmp_path: Path) -> None:
    atomic_write(tmp_path / "f", "old")
    with atomic_file(tmp_path / "f") as file:
        file.write(b"new")
        assert (tmp_path / "f").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
    assert (tmp_path / "f").read_text() == "new"


def test_an_exception_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    atomic_write(tmp_path / "f", "old")
    def fail() -> None:
        with atomic_file(tmp_path / "f") as file:
            file.write(b"new")
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
    assert (tmp_path / "f").read_text() == "old"


def test_partial_files_of_killed_writers_are_deleted_and_of_running_ones_kept(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=write_and_wait, args=(tmp_path / "f", ready))
    process.start()
    assert ready.wait(30)
    delete_partial(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    process.kill()
    process.join()
    delete_partial(tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_file_deleted_as_abandoned_before_it_was_locked_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = iter([True])

    def lock(handle: int) -> bool:
        if next(early, False):
            delete_partial(tmp_path)  # of another process
        return try_lock(handle)

    monkeypatch.setattr("resolute.files.try_lock", lock)
    atomic_write(tmp_path / "f", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
    assert (tmp_path / "f").read_text() == "new"


def test_an_output_deletes_partial_files_of_the_same_name_only(tmp_path: Path) -> None:
    own, unrelated = tmp_path / ".eval.json.0123456789ab.partial", tmp_path / ".best.pt.0123456789ab.partial"
    for path in (own, unrelated):
        path.touch()
    with output_file(tmp_path / "eval.json") as file:
        file.write(b"{}")
    assert sorted(path.name for path in tmp_path.iterdir()) == [unrelated.name, "eval.json"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("old.csv", None), ("new.CSV", None), ("link.csv", None),
        ("new.jpg", "got .*new.jpg, expected a name that ends in .csv"), ("new", "expected a name that ends in"),
        ("folder.csv", r"not written \(Is a directory\); choose a file name"),
        ("missing/new.csv", r"not written \(No such folder\); choose a path in an existing folder"),
        ("old.csv/new.csv", r"not written \(No such folder\)"), ("pipe.csv", r"not written \(not a regular file\)"),
        ("dangling.csv", r"not written \(not a regular file\)"), ("read-only.csv", r"not written \(read-only file\)"),
        (f"{'x' * 250}.csv", r"not written \(File name too long\)"),
    ],
)  # fmt: skip
def test_an_output_path_is_checked_beforehand_and_nothing_is_left_behind(
    tmp_path: Path, name: str, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in ("old.csv", "read-only.csv"):
        (tmp_path / file).write_text("old")
    (tmp_path / "folder.csv").mkdir()
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "link.csv").symlink_to("old.csv")
    (tmp_path / "dangling.csv").symlink_to("nowhere")
    # why: the tests may run as root, who may write everything
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "read-only" not in str(path) and access(path, mode))
    before = sorted(path.name for path in tmp_path.rglob("*"))
    if message is None:
        check_output(tmp_path / name, setting="--out", suffixes=(".csv",))
    else:
        with pytest.raises(ResoluteError, match=message):
            check_output(tmp_path / name, setting="--out", suffixes=(".csv",))
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    assert (tmp_path / "old.csv").read_text() == "old"
