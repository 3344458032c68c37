"""The bytes of a shard: a ustar archive without owners and times, and DALI's index of it.

Source: POSIX.1-1988 ustar as in GNU tar's manual, "Basic Tar Format".
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resolute.pipeline.dataset.format import key_name

__all__ = ["BLOCK_BYTES", "dali_index", "member", "member_bytes", "padded_bytes", "tar_end", "target_file"]

BLOCK_BYTES = 512
RECORD_BYTES = 20 * BLOCK_BYTES  # tar pads its files to full records
_MODE_OWNERS, _TIME = b"0000644\0" + 2 * b"0000000\0", b"00000000000\0"
_AFTER_CHECKSUM = b"0" + bytes(100) + b"ustar\x0000" + bytes(64 + 16 + 155 + 12)
_CONSTANT_SUM = sum(_MODE_OWNERS + _TIME + _AFTER_CHECKSUM) + 8 * ord(" ")  # the checksum field counts as spaces
_MAX_BYTES = 0o77777777777


def padded_bytes(size_bytes: int) -> int:
    """The size of a member's content in the tar: rounded up to full blocks."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def member(name: str, content: bytes) -> bytes:
    """Header, content and padding of a regular file; the content starts at byte 512."""
    raw = name.encode("ascii")
    if len(raw) > 100 or len(content) > _MAX_BYTES:
        raise ValueError(f"{name}: does not fit a ustar header ({len(raw)} characters, {len(content)} bytes)")
    size = b"%011o\0" % len(content)
    checksum = b"%06o\0 " % (sum(raw) + sum(size) + _CONSTANT_SUM)
    padding = bytes(padded_bytes(len(content)) - len(content))
    return b"".join((raw.ljust(100, b"\0"), _MODE_OWNERS, size, _TIME, checksum, _AFTER_CHECKSUM, content, padding))


def member_bytes(header: bytes) -> int:
    """The size of the content after a header, of at most 16 MiB; 0 if the header is damaged."""
    digits = header[124:135]
    size = int(digits, 8) if len(digits) == 11 and digits.isdigit() and not digits.strip(b"01234567") else 0
    return size if size <= 1 << 24 else 0


def tar_end(size_bytes: int) -> bytes:
    """The end of a tar of `size_bytes` so far: two zero blocks, then zeros up to a full record."""
    total = size_bytes + 2 * BLOCK_BYTES
    return bytes(-(-total // RECORD_BYTES) * RECORD_BYTES - size_bytes)


def target_file(column: str, target: Any, label_digits: int) -> tuple[str, bytes]:
    """(extension, content) of the file of a sample's target, from the `column` of its record.

    A class number in `.cls`, or in `.json` {"labels": [0, 3]}, with ignored labels {"labels": [0, 3], "ignored": [1]},
    or {"target": [0.5, 2.0]}, from which float32 are read back exactly.
    """
    if column == "label":
        return "cls", b"%0*d" % (label_digits, target)
    if column == "labels":
        bits = np.unpackbits(np.atleast_2d(target), axis=1, bitorder="little")
        names = ("labels", "ignored")[: len(bits)]
        numbers = {name: np.flatnonzero(row).tolist() for name, row in zip(names, bits, strict=True)}
        return "json", json.dumps(numbers).encode()
    return "json", json.dumps({"target": [_shortest(value) for value in np.asarray(target, "<f4")]}).encode()


def _shortest(value: np.float32) -> float:
    """The float of fewest digits that is `value` as float32."""
    short = float(str(value))
    return short if np.float32(short) == value else float(value)


def dali_index(samples: NDArray[Any], stored: NDArray[Any], label_digits: int) -> bytes:
    """The index of one shard of `Target.sample_dtype` and STORED records for DALI's `fn.readers.webdataset`.

    Source: nvidia-dali's tools/wds2idx.py: "v1.2 COUNT", then one line per sample with "EXT OFFSET BYTES NAME" per
    member.
    """
    lines = [f"v1.2 {len(samples)}\n"]
    column = str(samples.dtype.names[1]) if samples.dtype.names else ""
    targets = samples[column].tolist() if column == "label" else samples[column]
    for number, target, record in zip(samples["key"].tolist(), targets, stored.tolist(), strict=True):
        key, offset, nbytes = key_name(number), record[0], record[1]
        start = offset + padded_bytes(nbytes) + BLOCK_BYTES
        extension, content = target_file(column, target, label_digits)
        lines.append(f"jpg {offset} {nbytes} {key}.jpg {extension} {start} {len(content)} {key}.{extension}\n")
    return "".join(lines).encode("ascii")
