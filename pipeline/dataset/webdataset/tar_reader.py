"""Lists the samples of a third-party tar and the offsets of their files by walking its headers, not its images.

Samples are grouped as WebDataset does: consecutive files that share their path up to the first dot of the file name.
Source: POSIX.1-2017 `pax` (ustar and extended headers), GNU tar's long names.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from typing import NamedTuple

from pipeline.errors import ResoluteError

__all__ = ["Member", "Sample", "samples"]

_BLOCK = 512
_WINDOW = 4096  # bytes read at once: covers the small files between two images and their headers
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"\x28\xb5": "zstd"}
_FILES, _LONG_NAME, _PAX = (b"0", b"\0", b"7"), b"L", b"x"
_MAX_HEADER_BYTES = 1 << 20
_MAX_DIGITS = 20  # of a number in an extended header

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
    start, window = 0, b""

    def get(at: int, length: int) -> bytes:
        nonlocal start, window
        if at + length > nbytes:
            raise _damaged(where, f"got {nbytes} bytes, expected {at + length} or more")
        if not start <= at <= at + length <= start + len(window):
            start, window = at, read(at, min(max(length, _WINDOW), nbytes - at))
        return window[at - start : at - start + length]

    at = 0
    # of the next file, if an extended header gave them
    name: bytes | None = None
    size: int | None = None
    if not nbytes:
        raise _damaged(where, "got 0 bytes")
    if nbytes >= 2 and (packed := _COMPRESSED.get(get(0, 2))):
        raise ResoluteError(
            f"{where}: got a {packed} file, expected an uncompressed tar, whose images can be read one by one; "
            f"unpack it, or make shards of it: run `make shards SRC={shlex.quote(where)} OUT=shards`"
        )
    while at < nbytes:
        head = get(at, _BLOCK)
        if not head.strip(b"\0"):
            return
        checksum = sum(head) - sum(head[148:156]) + 8 * ord(" ")
        if checksum != _number(head[148:156]):
            raise _damaged(where, f"got no header at byte {at}")
        length, kind, content = size if size is not None else _number(head[124:136]), head[156:157], at + _BLOCK
        if length < 0:
            raise _damaged(where, f"got a file of {length} bytes at byte {at}")
        at = content + -(-length // _BLOCK) * _BLOCK
        if kind in (_LONG_NAME, _PAX):
            if length > _MAX_HEADER_BYTES:
                raise _damaged(where, f"got an extended header of {length} bytes")
            extra = get(content, length)
            if kind == _LONG_NAME:
                name = extra.rstrip(b"\0")
            else:
                fields = _pax(extra, where)
                name = fields.get(b"path", name)
                size = int(fields[b"size"]) if b"size" in fields else size
            continue
        if content + length > nbytes:
            raise _damaged(where, f"got {nbytes} bytes, expected {content + length} or more")
        if kind in _FILES:
            yield (_name(head) if name is None else name).decode("utf-8", "surrogateescape"), content, length
        name = size = None


def _name(head: bytes) -> bytes:
    name, prefix = head[:100].rstrip(b"\0"), head[345:500].rstrip(b"\0")
    return prefix + b"/" + name if head[257:263] == b"ustar\0" and prefix else name


def _number(field: bytes) -> int:
    """Parse a size or checksum: octal digits or GNU's base 256; -1 if it is neither."""
    if field[:1] == b"\x80":
        return int.from_bytes(field[1:], "big")
    try:
        return int(field.strip(b"\0 ") or b"0", 8)
    except ValueError:
        return -1


def _pax(data: bytes, where: str) -> dict[bytes, bytes]:
    """Parse the records "LENGTH KEY=VALUE\\n" of an extended header."""
    fields = {}
    while data.strip(b"\0"):
        length, _, _ = data.partition(b" ")
        # why the length check: int() raises on thousands of digits
        if not length.isdigit() or len(length) > _MAX_DIGITS or not len(length) < int(length) <= len(data):
            raise _damaged(where, "got an extended header that makes no sense")
        key, _, value = data[len(length) + 1 : int(length) - 1].partition(b"=")
        fields[key] = value
        data = data[int(length) :]
    size = fields.get(b"size", b"0")
    if not size.isdigit() or len(size) > _MAX_DIGITS:
        raise _damaged(where, "got an extended header that makes no sense")
    return fields


def _damaged(where: str, what: str) -> ResoluteError:
    return ResoluteError(f"{where}: cut short or damaged, {what}, expected a complete tar; fetch it again")
