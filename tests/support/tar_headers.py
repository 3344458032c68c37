"""Headers of tar members as in damaged or malicious tars, which no tool writes."""

from __future__ import annotations

import tarfile


def header(kind: bytes, nbytes: int, content: bytes = b"") -> bytes:
    """The header and padded content of a member of any declared size."""
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, nbytes
    return info.tobuf(tarfile.GNU_FORMAT) + content + bytes(-len(content) % 512)


MANY_DIGITS = b"1" * 5000
DAMAGED_HEADERS = {
    "a length of thousands of digits": header(tarfile.XHDTYPE, 5007, MANY_DIGITS + b" path=x\n"),
    "a size of thousands of digits": header(tarfile.XHDTYPE, 5011, b"5011 size=" + MANY_DIGITS + b"\n"),
    "a long name of 1 GiB": header(tarfile.GNUTYPE_LONGNAME, 1 << 30),
    "an extended header of 1 GiB": header(tarfile.XHDTYPE, 1 << 30),
    "a wrong checksum": header(tarfile.GNUTYPE_SPARSE, 0)[:-30] + b"\1" * 30 + b"\1" * (2 << 20),
    "extended headers without end": header(tarfile.XHDTYPE, 9, b"9 path=x\n") * 5000,
    "a negative size": header(tarfile.REGTYPE, -512),
    "no header": b"x" * 512,
}
