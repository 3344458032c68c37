"""Damage to stored images."""

from __future__ import annotations

from pathlib import Path

from resolute.pipeline.dataset.shard_set import ShardSet


def flip(path: Path, at: int | None = None, bits: int = 1) -> None:
    """Change `bits` of the byte `at` of a file, by default of the one in its middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= bits
    path.write_bytes(data)


def damage_sample(
    shards: ShardSet, sample: int, *, split: str = "train", res: int = 32, header: bool = False
) -> tuple[str, int]:
    """Flip a bit in the middle of a stored image, or in its `header`, which no decoder accepts.

    Returns the name of its tar, and the offset of the image in it.
    """
    part = shards.splits[split]
    record = part.stored[res][sample]
    tar = shards.path(res, part.shards[record["shard"]])
    data = bytearray(tar.read_bytes())
    data[int(record["offset"]) + (0 if header else int(record["nbytes"]) // 2)] ^= 4
    tar.write_bytes(data)
    return tar.name, int(record["offset"])
