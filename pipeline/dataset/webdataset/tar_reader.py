"""Lists the samples of a third-party tar and the offsets of their files by reading its headers, not its images.

Samples are grouped as WebDataset does: consecutive files that share their path up to the first dot of the file name.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

from resolute.errors import ResoluteError, as_typed

__all__ = ["Member", "Sample", "samples"]

_WINDOW_BYTES = 4096  # read at once: covers the small files between two images and their headers
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"\x28\xb5": "zstd"}
_MAX_HEADER_BYTES = 1 << 20  # of one member: header, long name, extended headers and sparse map together

Read = Callable[[int, int], bytes]  # (offset, nbytes) -> exactly nbytes bytes


class Member(NamedTuple):
    extension: str  # lower case, everything after the first dot of the file name: jpg, seg.png
    offset: int  # of the content in the tar, in bytes
    nbytes: int


class Sample(NamedTuple):
    key: str
    members: list[Member]


def samples(read: Read, nbytes: int, where: str) -> Iterator[Sample]:
    """Yield the samples of a tar of `nbytes`, in order. Folders, links and files without a key are skipped.

    `where` names the tar in messages. Raises `ResoluteError` for a compressed, damaged or truncated tar.
    """
    if packed := _COMPRESSED.get(read(0, min(2, nbytes))):
        raise ResoluteError(
            f"{where}: got a {packed} file, expected an uncompressed tar, whose images can be read one by one; "
            f"unpack it, or make shards of it: run {as_typed('shards', {'src': where, 'out': 'shards'})}"
        )
    key, members = "", list[Member]()
    for name, offset, size in _files(read, nbytes, where):
        file_key, extension = _split(name)
        if not extension:
            continue
        if file_key != key:
            if members:
                yield Sample(key, members)
            key, members = file_key, []
        members.append(Member(extension, offset, size))
    if members:
        yield Sample(key, members)


def _split(name: str) -> tuple[str, str]:
    folder, slash, file = name.rpartition("/")
    stem, _, extension = file.partition(".")
    return (f"{folder}{slash}{stem}", extension.lower()) if stem else ("", "")


def _files(read: Read, nbytes: int, where: str) -> Iterator[tuple[str, int, int]]:
    """Yield (name, offset, bytes) of each regular file in the tar."""
    headers, at = _Headers(read, nbytes), 0  # `at`: start of the next member
    try:
        tar = tarfile.TarFile(fileobj=cast(Any, headers), encoding="utf-8", errors="surrogateescape")
        while (info := tar.next()) is not None:
            # why: tarfile keeps all members and global headers
            tar.members.clear()  # type: ignore[attr-defined]  # typeshed lacks it
            tar.pax_headers = {}
            if info.size < 0 or tar.offset <= at:
                raise tarfile.ReadError("a negative size")
            if info.isreg() and not info.issparse():
                if info.offset_data + info.size > nbytes:
                    raise _damaged(where, f"got {nbytes} bytes, expected {info.offset_data + info.size} or more")
                yield info.name, info.offset_data, info.size
            at, headers.left = tar.offset, _MAX_HEADER_BYTES
        headers.seek(at)
        # why: tarfile takes an unreadable header for the end
        if headers.read(tarfile.BLOCKSIZE) not in (b"", bytes(tarfile.BLOCKSIZE)):
            raise tarfile.ReadError("no header")
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        raise _damaged(where, f"got '{error}' at byte {at}") from None


def _damaged(where: str, what: str) -> ResoluteError:
    return ResoluteError(f"{where}: cut short or damaged, {what}, expected a complete tar; fetch it again")


class _Headers:
    """A tar as a file for `tarfile`, which reads only its headers; at most `left` more bytes.

    why a limit: tarfile reads a long name, an extended header or a sparse map of any size that a header declares.
    """

    def __init__(self, read: Read, nbytes: int) -> None:
        self._read, self._nbytes = read, nbytes
        self._at, self._start, self._window = 0, 0, b""
        self.left = _MAX_HEADER_BYTES

    def tell(self) -> int:
        return self._at

    def seek(self, at: int) -> None:
        self._at = at

    def read(self, nbytes: int) -> bytes:
        if not 0 <= nbytes <= self.left:
            raise tarfile.ReadError(f"a header of more than {_MAX_HEADER_BYTES} bytes")
        self.left -= nbytes
        nbytes = max(0, min(nbytes, self._nbytes - self._at))
        if nbytes and not self._start <= self._at <= self._at + nbytes <= self._start + len(self._window):
            self._start = self._at
            self._window = self._read(self._at, min(max(nbytes, _WINDOW_BYTES), self._nbytes - self._at))
        self._at += nbytes
        return self._window[self._at - nbytes - self._start : self._at - self._start]
