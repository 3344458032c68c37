"""The members of a zip archive, and the decompression of a single one without the archive's directory.

Workers read members by their offset, in files and in stores, where `zipfile` would read the directory first. Source:
PKWARE's APPNOTE.TXT 6.3.10, 4.3.7 local header.
"""

from __future__ import annotations

import codecs
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from resolute.prep.sources.reject import Reject

__all__ = ["HEADER_BYTES", "TAIL_BYTES", "SeveralVolumes", "ZipMember", "unzip", "zip_members"]

HEADER_BYTES, TAIL_BYTES = 30, 12  # fixed part of a local header; longest part of a data descriptor that is used
_STORED, _DEFLATED = 0, 8
_ENCRYPTED, _DESCRIPTOR, _UTF8 = 1 << 0, 1 << 3, 1 << 11
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_MAX_END_BYTES = 22 + 65_535  # of the record at the end with its comment
_UNIX, _LINK = 3, 0o120000
_WINDOWS = (0, 10, 11, 14)  # FAT, NTFS in APPNOTE.TXT and in Info-ZIP, VFAT


class ZipMember(NamedTuple):
    """`offset` is that of the local header in the file; sizes are in bytes. A folder's name ends with a slash.

    `has_backslashes`: they are slashes in `name`. `method` is the name of a compression method that `unzip` lacks, ""
    for others; `raw` are the bytes of a name in an unknown encoding, None for others.
    """

    name: str
    offset: int
    packed_bytes: int
    size_bytes: int
    encrypted: bool
    is_link: bool
    has_backslashes: bool
    method: str
    raw: bytes | None


class SeveralVolumes(ValueError):
    """A zip file is one of several volumes of an archive."""


def zip_members(file: BinaryIO, encoding: str | None = None) -> Iterator[ZipMember]:
    """Yield the members of a seekable zip file in directory order, in about 0.6 kB of memory for each.

    `encoding` is that of names that the archive does not mark as UTF-8; cp437 only of those that are not valid UTF-8.
    Backslashes are slashes in names that Windows wrote, and in all if no file's name has a slash. Raises `ValueError`
    if it is not a zip archive, its directory is damaged, or a name is not in `encoding`, and `SeveralVolumes`.
    """
    _refuse_volumes(file)
    try:
        members = zipfile.ZipFile(file).infolist()
    # why these: what zipfile raises for a directory that it cannot read: NotImplementedError for a newer version of the
    # format, struct.error for an extra field that is cut short, UnicodeDecodeError for a name that is marked as UTF-8
    # and is not. A user needs one line that names the archive, as for any damaged one.
    except (zipfile.BadZipFile, NotImplementedError, struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"a zip archive that cannot be used: {error}") from None
    has_slash = any("/" in member.orig_filename.rstrip("/") for member in members)
    for member in members:
        if member.volume:
            raise SeveralVolumes
        name, raw = _name(member, encoding)
        has_backslashes = "\\" in name and (not has_slash or member.create_system in _WINDOWS)
        yield ZipMember(
            name=name.replace("\\", "/") if has_backslashes else name,
            raw=raw,
            offset=member.header_offset,
            packed_bytes=member.compress_size,
            size_bytes=member.file_size,
            method="" if member.compress_type in (_STORED, _DEFLATED) else _method(member.compress_type),
            encrypted=bool(member.flag_bits & _ENCRYPTED),
            is_link=member.create_system == _UNIX and member.external_attr >> 16 & 0o170000 == _LINK,
            has_backslashes=has_backslashes,
        )


def _refuse_volumes(file: BinaryIO) -> None:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _MAX_END_BYTES))
    _, mark, end = file.read(_MAX_END_BYTES).rpartition(b"PK\5\6")
    file.seek(0)
    # why 0xFFFF: then the number is in another record, which zipfile checks
    if (mark and end[:2] not in (b"\0\0", b"\xff\xff")) or (not mark and file.read(4) == b"PK\7\b"):
        raise SeveralVolumes


def _method(number: int) -> str:
    names = {1: "Shrink", 6: "Implode", 9: "Deflate64", 12: "bzip2", 14: "LZMA", 93: "Zstandard", 95: "XZ", 98: "PPMd"}
    return names.get(number, f"method {number}")


def _name(member: zipfile.ZipInfo, encoding: str | None) -> tuple[str, bytes | None]:
    """(name, its bytes if their encoding is unknown)."""
    if member.flag_bits & _UTF8:
        return member.orig_filename, None
    raw = member.orig_filename.encode("cp437")  # as which zipfile has decoded it
    if (name := _unicode_path(member.extra, raw)) is not None:
        return name, None
    if encoding is not None and codecs.lookup(encoding).name != "cp437":
        try:
            return raw.decode(encoding), None
        except UnicodeDecodeError:
            raise ValueError(f"the name {raw!r}, which is not in ZIP_NAMES={encoding}") from None
    try:  # why: zip on Linux and macOS writes UTF-8 without the flag; other encodings are hardly ever valid UTF-8
        return raw.decode(), None
    except UnicodeDecodeError:
        return member.orig_filename, raw if encoding is None else None


def _unicode_path(extra: bytes, raw: bytes) -> str | None:
    """The name in the extra field "Info-ZIP Unicode Path", if it belongs to the name `raw`; APPNOTE.TXT 4.6.9."""
    while len(extra) >= 4:
        kind, nbytes = struct.unpack_from("<HH", extra)
        field, extra = extra[4 : 4 + nbytes], extra[4 + nbytes :]
        if kind == 0x7075 and field[:5] == b"\1" + zlib.crc32(raw).to_bytes(4, "little"):
            return field[5:].decode("utf-8", "surrogateescape")
    return None


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
