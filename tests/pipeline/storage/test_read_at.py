"""A read that the system answers in parts is whole all the same, also where shard sets and records are read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.dataset.shard_set import ShardSet
from pipeline.storage.read_at import read_at
from prep.__main__ import main as prep

CONTENT = bytes(range(256)) * 4


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every `pread` takes half of the bytes, as `pread(2)` may."""
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, nbytes, at: real(fd, -(-nbytes // 2), at))
    return iter(())


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(("nbytes", "offset"), [(0, 0), (1, 5), (700, 3), (1024, 0), (2000, 0), (10, 1024), (10, 1020)])
def test_all_bytes_come_up_to_the_end_of_the_file(tmp_path: Path, nbytes: int, offset: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    with path.open("rb") as file:
        assert read_at(file.fileno(), nbytes, offset) == CONTENT[offset : offset + nbytes]


@pytest.mark.usefixtures("short")
def test_an_index_read_in_parts_is_not_taken_for_a_damaged_one(shard_root: Path) -> None:
    shards = ShardSet.open(shard_root)
    samples = shards.splits["train"].samples
    assert len(samples[0 : len(samples)]) == len(samples) > 0


def test_records_read_in_parts_are_not_taken_for_damaged_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np
    import simplejpeg

    for i in range(12):
        path = tmp_path / "photos" / f"c{i % 2}" / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(i).integers(0, 255, (64, 64, 3), dtype=np.uint8)
        path.write_bytes(simplejpeg.encode_jpeg(pixels))
    words = ["--src", str(tmp_path / "photos"), "--out", str(tmp_path / "out"), "--res", "32", "--workers", "1"]
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, nbytes, at: real(fd, -(-nbytes // 2), at))
    assert prep(words) == 0
