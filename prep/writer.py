"""How do pieces of tar become files that are either whole or not there?"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from pipeline.errors import ResoluteError

__all__ = ["FileInfo", "Part", "sync_folder", "write_file", "writing"]


@dataclass(frozen=True, kw_only=True)
class FileInfo:
    nbytes: int
    sha256: str


@contextmanager
def writing(path: Path) -> Iterator[None]:
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
    """A file written as `NAME.part`, hashed on the way, renamed when it is whole.

    Leaving the `with` block normally syncs it to disk and renames it; leaving it by an exception removes it.
    All methods raise `ResoluteError` when the disk refuses.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.nbytes = 0
        self._part = path.with_name(f"{path.name}.part")
        self._digest = hashlib.sha256()
        with writing(self._part):
            self._file = self._part.open("wb", buffering=0)

    def write(self, data: bytes) -> None:
        with writing(self._part):
            view = memoryview(data)
            while view:  # why: a raw write may take only a part
                view = view[self._file.write(view) :]
        self._digest.update(data)
        self.nbytes += len(data)

    def info(self) -> FileInfo:
        return FileInfo(nbytes=self.nbytes, sha256=self._digest.hexdigest())

    def __enter__(self) -> Part:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._file.close()
            self._part.unlink(missing_ok=True)
            return
        try:
            with writing(self._part):
                os.fsync(self._file.fileno())
                self._file.close()
                self._part.replace(self.path)
        except BaseException:
            self._file.close()
            self._part.unlink(missing_ok=True)
            raise


def write_file(path: Path, data: bytes) -> FileInfo:
    """Write a small file at once, atomically."""
    with Part(path) as part:
        part.write(data)
    return part.info()


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` durable."""
    with writing(folder):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
