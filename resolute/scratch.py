"""Temporary folders that are cleaned up even after their process was killed.

The owner holds a flock(2) on its folder; creating the next scratch folder deletes those that nobody locks any more.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import uuid
from pathlib import Path

from resolute.lock import try_lock

__all__ = ["ScratchFolder"]

_PREFIX = "resolute-scratch-"


class ScratchFolder:
    """An empty folder at `path`; `close`, or the end of the `with` block, deletes it with its contents."""

    def __init__(self) -> None:
        place = Path(tempfile.gettempdir())
        _delete_abandoned(place)
        unlocked = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}"))
        self._descriptor = os.open(unlocked, os.O_RDONLY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # without locks no other process can delete it either
            try_lock(self._descriptor)
        # why renamed: other processes ignore the first name, so they cannot delete it before it is locked
        self.path = unlocked.rename(place / f"{_PREFIX}{uuid.uuid4().hex[:12]}")

    def close(self) -> None:
        if self._descriptor >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def _delete_abandoned(place: Path) -> None:
    for folder in place.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # owned by another user, or just deleted by another process
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if try_lock(descriptor):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
