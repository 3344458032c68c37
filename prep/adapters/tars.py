"""What lies in a tar, looked through once with flat memory?"""

from __future__ import annotations

import bz2
import gzip
import lzma
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import BinaryIO, cast

from pipeline.errors import ResoluteError

from .files import file_name, opened, reading

__all__ = ["COMPRESSED", "TarMember", "TarReader", "is_compressed", "open_tar"]

COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tbz", ".tar.xz", ".txz")
_BLOCK_BYTES = 512


class TarMember:
    """`kind` is file, folder or other (links, devices, sparse files); `offset` counts from the tar's start."""

    __slots__ = ("_info", "_tar", "kind", "name", "nbytes", "offset")

    def __init__(self, tar: tarfile.TarFile, info: tarfile.TarInfo) -> None:
        self._tar, self._info = tar, info
        plain = info.isreg() and not info.issparse()
        self.kind = "file" if plain else "folder" if info.isdir() else "other"
        self.name, self.nbytes, self.offset = info.name, info.size, info.offset_data

    def read(self) -> bytes:
        """The content; only before the next member is asked for."""
        file = self._tar.extractfile(self._info)
        data = file.read() if file is not None else b""
        if len(data) < self.nbytes:
            raise EOFError(f"end of file within {self.name}")
        return data


class TarReader:
    """Iterating gives the members, once."""

    def __init__(self, path: str, tar: tarfile.TarFile, file: BinaryIO, *, compressed: bool) -> None:
        self._path, self._tar, self._file, self._compressed = path, tar, file, compressed

    def __iter__(self) -> Iterator[TarMember]:
        # why: tarfile keeps every member it has seen, and holds an unreadable header for the end
        while (info := self._tar.next()) is not None:
            self._tar.members.clear()  # type: ignore[attr-defined]  # typeshed lacks it
            yield TarMember(self._tar, info)
        if self._compressed:
            while self._file.read(1 << 16):  # why: only the end tells whether the compressed stream is whole
                pass
            return
        self._file.seek(self._tar.offset)
        block = self._file.read(_BLOCK_BYTES)
        if block.strip(b"\0"):
            raise ResoluteError(
                f"{self._path}: damaged tar, got no header at byte {self._tar.offset}, expected one or the end; "
                "make or download it again"
            )


def is_compressed(path: str) -> bool:
    return file_name(path).lower().endswith(COMPRESSED)


@contextmanager
def open_tar(path: str) -> Iterator[TarReader]:
    """A tar, compressed or not, by its name. Raises `ResoluteError` while open if it is damaged or unreadable."""
    compressed = is_compressed(path)
    with ExitStack() as stack:
        stack.enter_context(reading(path))
        file = stack.enter_context(opened(path, forward=compressed))
        if compressed:
            file = stack.enter_context(_decompressed(path, file))
        mode = "r|" if compressed else "r:"
        tar = stack.enter_context(
            # why: names that are no text have to come through, whatever the locale
            tarfile.open(fileobj=file, mode=mode, encoding="utf-8", errors="surrogateescape")  # type: ignore[call-overload]
        )
        yield TarReader(path, tar, file, compressed=compressed)


@contextmanager
def _decompressed(path: str, file: BinaryIO) -> Iterator[BinaryIO]:
    lower = file_name(path).lower()
    opener = gzip.open if lower.endswith("gz") else lzma.open if lower.endswith("xz") else bz2.open
    with opener(file, "rb") as plain:
        yield cast(BinaryIO, plain)
