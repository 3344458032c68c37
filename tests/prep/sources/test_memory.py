"""A worker that converts large files holds one at a time, and reads it when its turn comes."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest

from resolute.prep.convert.batch import Batch, EncodeOptions
from resolute.prep.convert.decode import Reject
from resolute.prep.run import worker
from resolute.prep.sources.fetch import fetch_many
from resolute.prep.sources.image_ref import ByteRange

OPTIONS = EncodeOptions(quality=90, label_digits=1)


def large_files(tmp_path: Path, count: int, nbytes: int) -> Batch:
    for i in range(count):
        (tmp_path / f"{i}.jpg").touch()
        os.truncate(tmp_path / f"{i}.jpg", nbytes)
    places = tuple(ByteRange(str(tmp_path / f"{i}.jpg")) for i in range(count))
    return Batch(first_key=0, byte_ranges=places, labels=(0,) * count, short_sides=(16,))


def test_a_worker_holds_one_large_file_at_a_time(tmp_path: Path) -> None:
    batch = large_files(tmp_path, 8, 60 << 20)
    tracemalloc.start()
    converted = worker.convert(OPTIONS, batch)
    assert tracemalloc.get_traced_memory()[1] < 200 << 20  # and not 8 times 60 MiB
    tracemalloc.stop()
    assert converted.rejects == tuple((i, "not an image") for i in range(8))


def test_slow_storage_is_not_counted_as_a_hanging_decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at: list[int] = []
    current = [-2]

    def fetch(places: Sequence[ByteRange], **options: int) -> list[bytes | Reject | None]:
        if options:  # ahead of their turn
            return fetch_many(places, **options)
        at.append(current[-1])
        return [Reject("seen")]

    monkeypatch.setattr(worker, "fetch_many", fetch)
    batch = large_files(tmp_path, 2, worker._AHEAD_BYTES + 1)
    converted = worker.convert(OPTIONS, batch, current.append)
    assert at == [-1, -1]
    assert converted.rejects == ((0, "seen"), (1, "seen"))
