"""Files appear whole or not at all; what killed writers leave is removed, what is being written is not."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from pipeline.errors import ResoluteError
from pipeline.storage.atomic_file import atomic_file, atomic_write, check_output, delete_partial, output_file


def write_and_wait(path: Path, ready: Event) -> None:
    with atomic_file(path) as file:
        file.write(b"half")
        file.flush()
        ready.set()
        signal.pause()


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
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


def test_cleaning_spares_writers_at_work_and_removes_the_dead(tmp_path: Path) -> None:
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


def test_the_next_output_removes_what_a_killed_writer_of_the_same_file_left(tmp_path: Path) -> None:
    ours, other = tmp_path / ".eval.json.0123456789ab.partial", tmp_path / ".best.pt.0123456789ab.partial"
    for path in (ours, other):
        path.touch()
    with output_file(tmp_path / "eval.json") as file:
        file.write(b"{}")
    assert sorted(path.name for path in tmp_path.iterdir()) == [other.name, "eval.json"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("old.csv", None), ("new.CSV", None), ("link.csv", None),
        ("new.jpg", "got .*new.jpg, expected a name that ends in .csv"), ("new", "expected a name that ends in"),
        ("folder.csv", r"not written \(Is a directory\); name a file"),
        ("missing/new.csv", r"not written \(No such folder\); name a file in a folder that is there"),
        ("old.csv/new.csv", r"not written \(No such folder\)"), ("pipe.csv", r"not written \(not a regular file\)"),
        ("dangling.csv", r"not written \(not a regular file\)"), ("read-only.csv", r"not written \(read-only file\)"),
        (f"{'x' * 250}.csv", r"not written \(File name too long\)"),
    ],
)  # fmt: skip
def test_a_place_for_output_is_judged_before_the_work_and_nothing_is_left(
    tmp_path: Path, name: str, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in ("old.csv", "read-only.csv"):
        (tmp_path / file).write_text("old")
    (tmp_path / "folder.csv").mkdir()
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "link.csv").symlink_to("old.csv")
    (tmp_path / "dangling.csv").symlink_to("nowhere")
    # why: whoever runs the tests may be root, who may write everything
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
