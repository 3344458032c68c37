"""Reads the members of a tar once, in order, in bounded memory for any tar.

A member's name, extended headers and sparse map together are limited to `_MAX_HEADER_BYTES`, its content to
`MAX_BYTES`.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, BinaryIO, cast

from resolute.errors import ResoluteError
from resolute.prep.sources.filesystem import file_name, open_file, read_errors
from resolute.prep.sources.image_ref import MAX_BYTES

__all__ = ["COMPRESSED", "TarMember", "TarReader", "is_archive", "is_compressed", "open_tar", "stem"]

COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tbz", ".tar.xz", ".txz")
_ARCHIVES = (*COMPRESSED, ".tar", ".zip")
_BLOCK_BYTES = 512
_MAX_HEADER_BYTES = 1 << 20


class TarMember:
    """`kind` is file, folder or other (links, devices, sparse files); `offset` counts from the tar's start."""

    __slots__ = ("_info", "_tar", "kind", "name", "nbytes", "offset")

    def __init__(self, tar: tarfile.TarFile, info: tarfile.TarInfo) -> None:
        self._tar, self._info = tar, info
        plain = info.isreg() and not info.issparse()
        self.kind = "file" if plain else "folder" if info.isdir() else "other"
        self.name, self.nbytes, self.offset = info.name, info.size, info.offset_data

    def read(self) -> bytes:
        """The content, at most `MAX_BYTES`; only valid until the next member is requested."""
        if self.nbytes > MAX_BYTES:
            raise ValueError(f"{self.name} of {self.nbytes} bytes, more than {MAX_BYTES}")
        file = self._tar.extractfile(self._info)
        data = file.read() if file is not None else b""
        if len(data) < self.nbytes:
            raise EOFError(f"end of file within {self.name}")
        return data


class TarReader:
    """The members of an open tar; may be iterated once."""

    def __init__(self, path: str, tar: _BoundedTar, file: BinaryIO, *, compressed: bool) -> None:
        self._path, self._tar, self._file, self._compressed = path, tar, file, compressed

    def __iter__(self) -> Iterator[TarMember]:
        at = -1  # start of the last member
        # why clear: tarfile keeps all members
        while (info := self._tar.next()) is not None:
            self._tar.members.clear()  # type: ignore[attr-defined]  # typeshed lacks it
            if info.size < 0 or info.offset <= at:
                raise tarfile.ReadError(f"a negative size at byte {info.offset}")
            at = info.offset
            yield TarMember(self._tar, info)
        if self._tar.last_read not in (b"", bytes(_BLOCK_BYTES)):  # why: tarfile takes a damaged header for the end
            raise ResoluteError(
                f"{self._path}: damaged tar, got no header at byte {self._tar.offset}, expected a header or the end; "
                "create or download it again"
            )
        while self._compressed and self._file.read(1 << 16):  # why: only the end shows whether the stream is complete
            pass


class _HeaderLimit:
    """A tar's file object, of which `left` more bytes may be read (None: unlimited). Seeking is not counted."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.left: int | None = None
        self.last_read = b""

    def read(self, nbytes: int) -> bytes:
        if self.left is not None:
            if not 0 <= nbytes <= self.left:
                raise ValueError(f"the header of a member takes more than {_MAX_HEADER_BYTES} bytes")
            self.left -= nbytes
        self.last_read = self._file.read(nbytes)
        return self.last_read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _BoundedTar(tarfile.TarFile):
    # why: tarfile reads a GNU long name, a pax header or a sparse map of any size that the tar declares
    def __init__(self, name: Any = None, mode: Any = "r", fileobj: Any = None, **options: Any) -> None:
        self._limit = _HeaderLimit(fileobj)
        super().__init__(name, mode, cast(BinaryIO, self._limit), **options)

    @property
    def last_read(self) -> bytes:
        """What was read last: after the last member, the block where the next header was expected."""
        return self._limit.last_read

    def next(self) -> tarfile.TarInfo | None:
        outer_limit = self._limit.left  # not None if tarfile calls this method for an extended header
        self._limit.left = _MAX_HEADER_BYTES if outer_limit is None else outer_limit
        try:
            return super().next()
        except RecursionError:
            raise tarfile.ReadError("too many extended headers of one member") from None
        finally:
            self._limit.left = outer_limit


def is_compressed(path: str) -> bool:
    """Whether the name is that of a compressed tar."""
    return file_name(path).lower().endswith(COMPRESSED)


def is_archive(path: str) -> bool:
    """Whether the name is that of an archive."""
    return file_name(path).lower().endswith(_ARCHIVES)


def stem(path: str) -> str:
    """The name of an archive without its suffix, which may be a compound one."""
    name = file_name(path)
    suffix = next(suffix for suffix in (*_ARCHIVES, "") if name.lower().endswith(suffix))
    return name[: len(name) - len(suffix)]


@contextmanager
def open_tar(path: str) -> Iterator[TarReader]:
    """Open a tar, compressed or not by its name. Raises `ResoluteError` in the block if it is damaged or unreadable."""
    compressed = is_compressed(path)
    with ExitStack() as stack:
        stack.enter_context(read_errors(path))
        file = stack.enter_context(open_file(path, forward=compressed))
        if compressed:
            file = stack.enter_context(_decompressed(path, file))
        mode = "r|" if compressed else "r:"
        tar = stack.enter_context(
            # why: names that are not valid text must survive in any locale
            _BoundedTar.open(fileobj=file, mode=mode, encoding="utf-8", errors="surrogateescape")  # type: ignore[call-overload]
        )
        yield TarReader(path, tar, file, compressed=compressed)


@contextmanager
def _decompressed(path: str, file: BinaryIO) -> Iterator[BinaryIO]:
    lower = file_name(path).lower()
    opener = gzip.open if lower.endswith("gz") else lzma.open if lower.endswith("xz") else bz2.open
    with opener(file, "rb") as plain:
        yield cast(BinaryIO, plain)
