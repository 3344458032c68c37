"""Atomic files and the lock of a folder: complete or absent, one writer at a time, and clean after a kill."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest

from resolute.errors import ResoluteError, StorageError
from resolute.files import atomic_file, atomic_write, check_output, delete_partial, output_file
from resolute.lock import exclusive_lock


def lock(path: Path) -> Any:
    return exclusive_lock(path, folder=path.parent, writer="prep", remedy="choose another OUT")


def write_and_wait(path: Path, ready: Event) -> None:
    with atomic_file(path) as file:
        file.write(b"half")
        file.flush()
        ready.set()
        signal.pause()


def lock_and_wait(path: Path, ready: Event) -> None:
    with lock(path):
        ready.set()
        signal.pause()


def started(work: Callable[[Path, Event], None], path: Path) -> Any:
    """A process that does `work` and waits."""
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=work, args=(path, ready))
    process.start()
    assert ready.wait(30)
    return process


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    def write(text: bytes, error: Exception | None = None) -> None:
        with atomic_file(tmp_path / "f") as file:
            file.write(text)
            assert (tmp_path / "f").read_text() == "old"
            if error:
                raise error

    atomic_write(tmp_path / "f", "old")
    with pytest.raises(ValueError, match="stop"):
        write(b"half", ValueError("stop"))
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("f", "old")]
    write(b"new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("f", "new")]


def test_partial_files_of_killed_writers_are_deleted_and_of_running_ones_kept(tmp_path: Path) -> None:
    process = started(write_and_wait, tmp_path / "f")
    delete_partial(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    process.kill()
    process.join()
    delete_partial(tmp_path)
    assert not any(tmp_path.iterdir())


def test_an_output_deletes_partial_files_of_the_same_name_only(tmp_path: Path) -> None:
    own, unrelated = tmp_path / ".eval.json.0123456789ab.partial", tmp_path / ".best.pt.0123456789ab.partial"
    for path in (own, unrelated):
        path.touch()
    with output_file(tmp_path / "eval.json") as file:
        file.write(b"{}")
    assert sorted(path.name for path in tmp_path.iterdir()) == [unrelated.name, "eval.json"]


def test_a_second_writer_is_refused_until_the_first_ends_or_is_killed(tmp_path: Path) -> None:
    process = started(lock_and_wait, tmp_path / "lock")
    with pytest.raises(ResoluteError, match=f"another prep is writing here, got host .*, pid {process.pid}, since"):
        lock(tmp_path / "lock").__enter__()
    process.kill()
    process.join()
    with lock(tmp_path / "lock"), pytest.raises(ResoluteError, match=f"pid {os.getpid()}"):
        lock(tmp_path / "lock").__enter__()
    assert not any(tmp_path.iterdir())


def test_a_file_system_without_locks_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StorageError, match="cannot be locked, got 'No locks available'"):
        lock(tmp_path / "lock").__enter__()


def test_a_file_that_the_user_names_is_said_to_be_overwritten_if_it_exists(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "eval.json"
    check_output(path, setting="--json", suffixes=(".json",))
    path.touch()
    check_output(path, setting="--json", suffixes=(".json",), named=False)
    assert capsys.readouterr().out == ""
    check_output(path, setting="--json", suffixes=(".json",))
    assert capsys.readouterr().out == f"{path}: exists, and will be overwritten\n"
