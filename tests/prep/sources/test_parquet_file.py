"""Parquet files as DuckDB reads them through Python's files."""

from __future__ import annotations

import io
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from resolute.prep.sources import parquet_file
from resolute.prep.sources.parquet_file import open_parquet
from tests.support.source_formats import pack_parquet


class SlowSeek(io.BytesIO):
    """A file in which another thread gets its turn between a seek and the read that follows."""

    def seek(self, offset: int, whence: int = 0) -> int:
        at = super().seek(offset, whence)
        time.sleep(0.002)
        return at


class Interrupted(io.BytesIO):
    def read(self, nbytes: int | None = -1) -> bytes:
        signal.raise_signal(signal.SIGINT)
        return super().read(nbytes)


def test_threads_of_duckdb_that_share_a_file_each_read_their_own_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(0)
    rows: list[tuple[bytes | None, str, int]] = [(random.bytes(3000 + 17 * n), f"{n}.jpg", n) for n in range(60)]
    path = pack_parquet(tmp_path / "photos.parquet", rows, None)
    monkeypatch.setattr(parquet_file, "open_file", lambda path: SlowSeek(Path(path).read_bytes()))
    with open_parquet(str(path)) as opened:
        assert list(opened.rows(["image.bytes", "label"], 64)) == [(data, label) for data, _, label in rows]


def test_ctrl_c_while_duckdb_reads_a_file_is_an_interrupt_and_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pack_parquet(tmp_path / "photos.parquet", [(b"x" * 100, "a.jpg", 0)], None)
    monkeypatch.setattr(parquet_file, "open_file", lambda path: Interrupted(Path(path).read_bytes()))
    with pytest.raises(KeyboardInterrupt), open_parquet(str(path)):
        pass
