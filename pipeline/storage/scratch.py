"""Temporary folders that a killed process does not leave behind for good.

The owner holds a flock(2) on its folder; whoever makes the next one deletes the folders that nobody holds any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import uuid
from pathlib import Path
from types import TracebackType

__all__ = ["ScratchFolder"]

_PREFIX = "resolute-scratch-"


class ScratchFolder:
    """An empty folder at `path`, deleted with all that is in it by `close`, or when the `with` block ends."""

    def __init__(self) -> None:
        place = Path(tempfile.gettempdir())
        _delete_abandoned(place)
        unlocked = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}"))
        self._descriptor = os.open(unlocked, os.O_RDONLY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a disk without locks: nobody else can lock it, and so delete it, either
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # why renamed: under its first name no other process looks at it before it is locked
        self.path = unlocked.rename(place / f"{_PREFIX}{uuid.uuid4().hex[:12]}")

    def close(self) -> None:
        if self._descriptor >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _delete_abandoned(place: Path) -> None:
    for folder in place.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or deleted by another process just now
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
