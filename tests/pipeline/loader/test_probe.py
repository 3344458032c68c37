"""`auto` follows the disk: fast random reads keep the full order, slow ones and remote sets get blocks."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from pipeline.dataset.shard_set import ShardSet
from pipeline.errors import ResoluteError
from pipeline.loader.probe import choose_order
from pipeline.storage.local import Folder


class Slow(Folder):
    """A folder whose every read takes `delay_s` more."""

    def __init__(self, root: str, delay_s: float) -> None:
        super().__init__(root)
        self.delay_s, self.reads = delay_s, 0

    def read(self, name: str, offset: int, nbytes: int, *, fresh: bool = False) -> bytes:
        self.reads += 1
        time.sleep(self.delay_s)
        return super().read(name, offset, nbytes, fresh=fresh)


class Far(Slow):
    remote = True


def test_random_reads_from_memory_keep_the_full_order(shard_set: ShardSet) -> None:
    found = min((choose_order(shard_set, 48) for _ in range(3)), key=lambda probe: probe.mean_s)
    assert (found.order, found.reads) == ("full", 512)
    assert str(found).startswith("order: full, because a random read takes 0.")


@pytest.mark.parametrize("delay_s", [0.005, 0.2])
def test_slow_reads_get_blocks_and_the_measurement_is_short(shard_set: ShardSet, delay_s: float) -> None:
    files = Slow(shard_set.root, delay_s)
    began = time.monotonic()
    found = choose_order(dataclasses.replace(shard_set, files=files), 48)
    assert time.monotonic() - began < 3.0
    assert found.order == "block"
    assert found.mean_s >= delay_s
    assert found.reads == files.reads > 0


def test_a_remote_set_gets_blocks_unread(shard_set: ShardSet) -> None:
    files = Far(shard_set.root, 0.0)
    found = choose_order(dataclasses.replace(shard_set, files=files), 48)
    assert (found.order, found.reads, files.reads) == ("block", 0, 0)
    assert str(found) == "order: block, because the shards are remote"


def test_a_tar_that_ends_too_early_is_told(shard_set: ShardSet, tmp_path: Path) -> None:
    (tmp_path / "48").mkdir()
    for shard in shard_set.splits["train"].shards:
        (tmp_path / "48" / f"{shard}.tar").write_bytes(bytes(100))
    with pytest.raises(ResoluteError, match=r"48/train-00000\d\.tar: ends too early, got 0 bytes at offset"):
        choose_order(dataclasses.replace(shard_set, files=Folder(str(tmp_path))), 48)
