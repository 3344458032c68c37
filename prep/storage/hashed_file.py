"""Files that are hashed while they are written and that appear complete or not at all."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, BinaryIO

__all__ = ["AtomicFile", "FileInfo"]


@dataclass(frozen=True, kw_only=True)
class FileInfo:
    """Size and SHA-256 (hex) of a written file."""

    nbytes: int
    sha256: str

    def to_json(self) -> dict[str, Any]:
        return {"bytes": self.nbytes, "sha256": self.sha256}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> FileInfo:
        return cls(nbytes=values["bytes"], sha256=values["sha256"])


class AtomicFile:
    """A file being written, hashed on the way.

    `file` is a context manager: leaving it normally makes the file appear, complete and durable; leaving it by an
    exception removes all traces. `error_context` wraps every write. Use the object in a `with` block, or call `close`
    or `discard`. All methods raise `ResoluteError`.
    """

    def __init__(
        self, file: AbstractContextManager[BinaryIO], error_context: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.nbytes = 0
        self._digest = hashlib.sha256()
        self._error_context = error_context
        self._open = ExitStack()
        with error_context():
            self._file = self._open.enter_context(file)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        with self._error_context():
            self._file.write(data)
        self._digest.update(data)
        self.nbytes += len(data)

    def info(self) -> FileInfo:
        return FileInfo(nbytes=self.nbytes, sha256=self._digest.hexdigest())

    def close(self) -> None:
        """Make the file appear, complete and durable."""
        with self._error_context():
            self._open.close()

    def discard(self) -> None:
        """Abandon the file and remove all traces of it. No effect after `close`."""
        with suppress(OSError):  # of a disk that fails once more, as it is closed
            self._open.__exit__(_Discarded, _Discarded(), None)

    def __enter__(self) -> AtomicFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


class _Discarded(Exception):
    """Raised into the context manager of an abandoned file."""
