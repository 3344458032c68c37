"""The members of a zip archive, and the decompression of a single one without the archive's directory.

Workers read members by their offset, in files and in stores, where `zipfile` would read the directory first. Source:
PKWARE's APPNOTE.TXT 6.3.10, 4.3.7 local header.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from resolute.prep.sources.reject import Reject

__all__ = ["HEADER_BYTES", "TAIL_BYTES", "ZipMember", "unzip", "zip_members"]

HEADER_BYTES, TAIL_BYTES = 30, 12  # fixed part of a local header; longest part of a data descriptor that is used
_STORED, _DEFLATED = 0, 8
_ENCRYPTED, _DESCRIPTOR, _UTF8 = 1 << 0, 1 << 3, 1 << 11
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
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
    """Yield the members of a seekable zip file in directory order, in about 0.6 kB of memory for each.

    Raises `ValueError` if it is not a zip archive or its directory is damaged.
    """
    try:
        members = zipfile.ZipFile(file).infolist()
    # why these: zipfile raises NotImplementedError for a version of the format that it cannot read, struct.error for
    # an extra field that is cut short; a user needs one line that names the archive, as for any damaged one
    except (zipfile.BadZipFile, NotImplementedError, struct.error) as error:
        raise ValueError(f"a zip archive that cannot be used: {error}") from None
    for member in members:
        yield ZipMember(
            name=_name(member),
            offset=member.header_offset,
            packed_bytes=member.compress_size,
            size_bytes=member.file_size,
            encrypted=bool(member.flag_bits & _ENCRYPTED),
            is_link=member.create_system == _UNIX and member.external_attr >> 16 & 0o170000 == _LINK,
        )


def _name(member: zipfile.ZipInfo) -> str:
    if member.flag_bits & _UTF8:
        return member.orig_filename
    try:  # why: zip on Linux and macOS writes UTF-8 without the flag; code page 437 is hardly ever valid UTF-8
        return member.orig_filename.encode("cp437").decode()
    except UnicodeDecodeError:
        return member.orig_filename


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
