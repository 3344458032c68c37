"""How do pieces of tar become files that are either whole or not there?"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from pipeline.errors import ResoluteError

__all__ = ["FileInfo", "Part", "sync_folder", "writing"]


@dataclass(frozen=True, kw_only=True)
class FileInfo:
    nbytes: int
    sha256: str


@contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Tell the system's refusal to write `path` as one `ResoluteError`. Put nothing but writing inside."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResoluteError(
                f"{path}: disk full, got '{error.strerror}', expected room for the whole set; "
                "free some space or choose another OUT, and run the same command again"
            ) from None
        raise ResoluteError(
            f"{path}: cannot be written, got '{error.strerror or error}', expected a writable place; "
            "correct its permissions or choose another OUT"
        ) from None


class Part:
    """A file written as `NAME.xxxxxxxx.part`, hashed on the way, renamed when it is whole.

    Leaving the `with` block normally syncs it to disk and renames it; leaving it by an exception removes it.
    Without `with`: `close` or `discard`. All methods raise `ResoluteError` when the disk refuses.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.nbytes = 0
        # why: one name each; a node of a cluster that was given up may still be writing
        self._part = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.part")
        self._digest = hashlib.sha256()
        with writing(self._part):
            self._file = self._open()

    def write(self, data: bytes | memoryview) -> None:
        with writing(self._part):
            view = memoryview(data)
            while view:  # why: a raw write may take only a part
                view = view[self._file.write(view) :]
        self._digest.update(data)
        self.nbytes += len(data)

    def info(self) -> FileInfo:
        return FileInfo(nbytes=self.nbytes, sha256=self._digest.hexdigest())

    def close(self) -> None:
        """Make the file appear, whole and durable but for its folder's entry (`sync_folder`)."""
        try:
            self._publish()
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Give up: nothing of it stays."""
        self._file.close()
        self._part.unlink(missing_ok=True)

    def _open(self) -> io.RawIOBase:
        return self._part.open("wb", buffering=0)

    def _publish(self) -> None:
        with writing(self._part):
            os.fsync(self._file.fileno())
            self._file.close()
            self._part.replace(self.path)

    def __enter__(self) -> Part:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` durable."""
    with writing(folder):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
