"""Reads a zip archive's directory in bounded memory, and decompresses single members without it.

Not the standard library's `zipfile`: it holds an object per member, and workers need to read a member without the
directory. Source: PKWARE's APPNOTE.TXT 6.3.10: 4.3.7 local header, 4.3.12 central directory, 4.3.14 to 4.3.16 its ends,
4.5.3 the Zip64 extra field.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from resolute.prep.convert.reject import Reject

__all__ = ["HEADER_BYTES", "TAIL_BYTES", "ZipMember", "unzip", "zip_members"]

HEADER_BYTES, TAIL_BYTES = 30, 12  # fixed part of a local header; longest part of a data descriptor that is used
_STORED, _DEFLATED = 0, 8
_ENCRYPTED, _DESCRIPTOR, _UTF8 = 1 << 0, 1 << 3, 1 << 11
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sBBHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_FULL32, _FULL16 = 0xFFFFFFFF, 0xFFFF
_UNIX, _LINK = 3, 0o120000


class ZipMember(NamedTuple):
    """`offset` is that of the local header in the file; sizes are in bytes. A folder's name ends with a slash."""

    name: str
    offset: int
    packed_bytes: int
    size_bytes: int
    encrypted: bool
    is_link: bool


def zip_members(file: BinaryIO) -> Iterator[ZipMember]:
    """Yield the members of a seekable zip file in directory order; memory does not grow with their number.

    Raises `ValueError` if it is not a zip archive or its directory is damaged.
    """
    start, nbytes, count, prefix_bytes = _directory(file)
    file.seek(start)
    bytes_left, member_count, buffer, pos = nbytes, 0, b"", 0

    def need(n: int) -> None:
        nonlocal bytes_left, buffer, pos
        if len(buffer) - pos < n and bytes_left:
            more = file.read(min(bytes_left, 1 << 20))
            bytes_left -= len(more)
            buffer, pos = buffer[pos:] + more, 0
        if len(buffer) - pos < n:
            raise ValueError("its directory is cut short")

    while pos < len(buffer) or bytes_left:
        need(_CENTRAL.size)
        (magic, _, system, _, flags, _, _, _, _, packed_bytes, size_bytes, name_bytes, extra_bytes, comment_bytes,
         _, _, attributes, offset) = _CENTRAL.unpack_from(buffer, pos)  # fmt: skip
        if magic != b"PK\1\2":
            raise ValueError(f"its directory is damaged at member {member_count}")
        need(_CENTRAL.size + name_bytes + extra_bytes + comment_bytes)
        pos += _CENTRAL.size
        raw, extra = buffer[pos : pos + name_bytes], buffer[pos + name_bytes : pos + name_bytes + extra_bytes]
        pos += name_bytes + extra_bytes + comment_bytes
        size_bytes, packed_bytes, offset = _apply_zip64(extra, size_bytes, packed_bytes, offset)
        yield ZipMember(
            name=_name(raw, flags),
            offset=prefix_bytes + offset,
            packed_bytes=packed_bytes,
            size_bytes=size_bytes,
            encrypted=bool(flags & _ENCRYPTED),
            is_link=system == _UNIX and attributes >> 16 & 0o170000 == _LINK,
        )
        member_count += 1
    if member_count & _FULL16 != count & _FULL16:
        raise ValueError(f"its directory is damaged: {member_count} of {count} members")


def _directory(file: BinaryIO) -> tuple[int, int, int, int]:
    """(start, length in bytes, number of entries) of the directory, and the bytes that precede the archive."""
    total = file.seek(0, 2)
    tail_bytes = min(total, _END.size + _FULL16 + _LOCATOR.size)
    file.seek(total - tail_bytes)
    tail = file.read(tail_bytes)
    pos = tail.rfind(b"PK\5\6")
    if pos < 0 or len(tail) - pos < _END.size:
        raise ValueError("not a zip archive, or cut short")
    _, disk, _, _, count, nbytes, offset, _ = _END.unpack_from(tail, pos)
    end = total - tail_bytes + pos
    if pos >= _LOCATOR.size and tail.startswith(b"PK\6\7", pos - _LOCATOR.size):
        _, _, end64, _ = _LOCATOR.unpack_from(tail, pos - _LOCATOR.size)
        for candidate in (end64, end - _LOCATOR.size - _END64.size):  # why two: other data may precede the archive
            file.seek(candidate)
            record = file.read(_END64.size)
            if record.startswith(b"PK\6\6") and len(record) == _END64.size:
                _, _, _, _, disk, _, _, count, nbytes, offset = _END64.unpack(record)
                end = candidate
                break
        else:
            raise ValueError("its Zip64 directory cannot be found")
    start = end - nbytes
    if disk or start < offset:
        raise ValueError("one of several parts, or its directory is damaged")
    return start, nbytes, count, start - offset


def _apply_zip64(extra: bytes, size_bytes: int, packed_bytes: int, offset: int) -> tuple[int, int, int]:
    """Replace values that are all ones by those of the Zip64 extra field, which holds just these, in this order."""
    values = [size_bytes, packed_bytes, offset]
    while len(extra) >= 4 and _FULL32 in values:
        kind, length = struct.unpack_from("<HH", extra)
        if kind == 1:
            wide = iter(struct.unpack_from(f"<{length // 8}Q", extra[4 : 4 + length]))
            values = [next(wide, value) if value == _FULL32 else value for value in values]
            break
        extra = extra[4 + length :]
    return values[0], values[1], values[2]


def _name(raw: bytes, flags: int) -> str:
    try:  # why: zip on Linux and macOS writes UTF-8 without the flag; code page 437 is hardly ever valid UTF-8
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("utf-8", "surrogateescape") if flags & _UTF8 else raw.decode("cp437")


def content_start(data: bytes) -> int:
    """Offset of the content after the local header at the start of `data`. Raises `Reject` without a header."""
    if len(data) < HEADER_BYTES or data[:4] != b"PK\3\4":
        raise Reject("corrupt: no zip header where the directory says")
    *_, name_bytes, extra_bytes = _LOCAL.unpack_from(data)
    return HEADER_BYTES + int(name_bytes) + int(extra_bytes)


def unzip(data: bytes, packed_bytes: int, size_bytes: int) -> bytes:
    """The file in `data`: its local header, `packed_bytes` of content, and `TAIL_BYTES` more if available.

    At most `size_bytes`, as the directory declares, are decompressed. Raises `Reject` if the content is damaged, has
    another size or checksum, is encrypted, or uses a method other than deflate.
    """
    start = content_start(data)
    _, _, flags, method, _, _, crc, _, _, _, _ = _LOCAL.unpack_from(data)
    packed = data[start : start + packed_bytes]
    if flags & _ENCRYPTED:
        raise Reject("cannot be decompressed: encrypted")
    if method not in (_STORED, _DEFLATED):
        raise Reject(f"cannot be decompressed: zip method {method}")
    content = packed
    if method == _DEFLATED:
        try:
            inflate = zlib.decompressobj(-zlib.MAX_WBITS)
            content = inflate.decompress(packed, size_bytes + 1)
        except zlib.error as error:
            raise Reject(f"corrupt: {error}") from None
    if len(content) != size_bytes:
        raise Reject(f"corrupt: {'more than' if len(content) > size_bytes else 'less than'} {size_bytes} bytes")
    if flags & _DESCRIPTOR:
        tail = data[start + packed_bytes : start + packed_bytes + TAIL_BYTES].removeprefix(b"PK\7\b")
        crc = int.from_bytes(tail[:4], "little") if len(tail) >= 4 else zlib.crc32(content)
    if zlib.crc32(content) != crc:
        raise Reject("corrupt: another CRC-32 than the archive says")
    return content
