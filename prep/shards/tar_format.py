"""The bytes of a shard: a ustar archive without owners and times, and DALI's index of it.

Source: POSIX.1-1988 ustar as in GNU tar's manual, "Basic Tar Format".
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from pipeline.dataset.shard_set import key_name

__all__ = ["BLOCK_BYTES", "dali_index", "member", "padded_bytes", "tar_end"]

BLOCK_BYTES = 512
RECORD_BYTES = 20 * BLOCK_BYTES  # tar pads its files to full records
_MODE, _OWNER, _TIME = b"0000644\0", b"0000000\0", b"00000000000\0"
_MAX_BYTES = 0o77777777777


def padded_bytes(size_bytes: int) -> int:
    """The size of a member's content in the tar: rounded up to full blocks."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def member(name: str, content: bytes) -> bytes:
    """Header, content and padding of a regular file; the content starts at byte 512."""
    raw = name.encode("ascii")
    if len(raw) > 100 or len(content) > _MAX_BYTES:
        raise ValueError(f"{name}: does not fit a ustar header ({len(raw)} characters, {len(content)} bytes)")
    before = raw.ljust(100, b"\0") + _MODE + _OWNER + _OWNER + b"%011o\0" % len(content) + _TIME
    after = b"0" + bytes(100) + b"ustar\x0000" + bytes(64 + 16 + 155 + 12)
    checksum = sum(before) + sum(after) + 8 * ord(" ")
    header = before + b"%06o\0 " % checksum + after
    return header + content + bytes(padded_bytes(len(content)) - len(content))


def tar_end(size_bytes: int) -> bytes:
    """The end of a tar of `size_bytes` so far: two zero blocks, then zeros up to a full record."""
    total = size_bytes + 2 * BLOCK_BYTES
    return bytes(-(-total // RECORD_BYTES) * RECORD_BYTES - size_bytes)


def dali_index(samples: NDArray[Any], stored: NDArray[Any], label_digits: int) -> bytes:
    """The index of one shard of SAMPLE and STORED records for DALI's `fn.readers.webdataset`.

    Source: nvidia-dali's tools/wds2idx.py: "v1.2 COUNT", then one line per sample with "EXT OFFSET BYTES NAME" per
    member.
    """
    lines = [f"v1.2 {len(samples)}\n"]
    for sample, record in zip(samples.tolist(), stored.tolist(), strict=True):
        key, offset, nbytes = key_name(sample[0]), record[0], record[1]
        label = offset + padded_bytes(nbytes) + BLOCK_BYTES
        lines.append(f"jpg {offset} {nbytes} {key}.jpg cls {label} {label_digits} {key}.cls\n")
    return "".join(lines).encode("ascii")
