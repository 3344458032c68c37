"""The lock of a folder: one writer at a time, named to a second one, released by a kill."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from resolute.errors import ResoluteError, StorageError
from resolute.lock import exclusive_lock


def lock(path: Path):  # type: ignore[no-untyped-def]
    return exclusive_lock(path, folder=path.parent, writer="prep", remedy="choose another OUT")


def hold(path: Path, ready: Event) -> None:
    with lock(path):
        ready.set()
        signal.pause()


def test_a_second_writer_is_refused_with_host_and_pid_of_the_first(tmp_path: Path) -> None:
    expected = f"another prep is writing here, got host .*, pid {os.getpid()}, since"
    with lock(tmp_path / "lock"), pytest.raises(ResoluteError, match=expected):
        lock(tmp_path / "lock").__enter__()
    assert not any(tmp_path.iterdir())


def test_the_lock_of_a_killed_process_is_released(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=hold, args=(tmp_path / "lock", ready))
    process.start()
    assert ready.wait(30)
    with pytest.raises(ResoluteError, match=f"pid {process.pid}"):
        lock(tmp_path / "lock").__enter__()
    process.kill()
    process.join()
    with lock(tmp_path / "lock"):
        pass
    assert not any(tmp_path.iterdir())


def test_a_file_system_without_locks_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StorageError, match="cannot be locked, got 'No locks available'"):
        lock(tmp_path / "lock").__enter__()


def test_the_holder_of_a_lock_detects_that_its_folder_was_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    with exclusive_lock(folder / "lock", folder=folder, writer="prep", remedy="choose another OUT") as is_held:
        assert is_held()
        folder.rename(tmp_path / "away")
        folder.mkdir()
        assert not is_held()
        (folder / "lock").touch()
        assert not is_held()
