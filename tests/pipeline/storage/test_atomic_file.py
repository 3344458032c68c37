"""Files appear whole or not at all; what killed writers leave is removed, what is being written is not."""

from __future__ import annotations

import multiprocessing
import signal
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from pipeline.storage.atomic_file import atomic_file, atomic_write, delete_partial


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
