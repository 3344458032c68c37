"""Damage to stored images."""

from __future__ import annotations

from resolute.pipeline.dataset.shard_set import ShardSet


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
