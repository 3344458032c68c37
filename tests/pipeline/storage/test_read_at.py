"""Short reads: a read that the system answers in parts returns all bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.storage.read_at import read_at
from tests.conftest import make_photos
from tests.support.cli import prep

CONTENT = bytes(range(256)) * 4


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every `pread` returns half of the bytes, as `pread(2)` may."""
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, nbytes, at: real(fd, -(-nbytes // 2), at))
    return iter(())


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(("nbytes", "offset"), [(0, 0), (1, 5), (700, 3), (1024, 0), (2000, 0), (10, 1024), (10, 1020)])
def test_short_reads_are_completed_up_to_the_end_of_the_file(tmp_path: Path, nbytes: int, offset: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    with path.open("rb") as file:
        assert read_at(file.fileno(), nbytes, offset) == CONTENT[offset : offset + nbytes]


@pytest.mark.usefixtures("short")
def test_short_reads_of_an_index_are_not_reported_as_damage(shard_root: Path) -> None:
    shards = ShardSet.open(shard_root)
    samples = shards.splits["train"].samples
    assert len(samples[0 : len(samples)]) == len(samples) > 0


@pytest.mark.usefixtures("short")
def test_prep_succeeds_with_short_reads(tmp_path: Path) -> None:
    photos = make_photos(tmp_path / "photos", classes=2, each=6)
    assert prep(["--src", str(photos), "--out", str(tmp_path / "out"), "--res", "32", "--workers", "1"]) == 0
