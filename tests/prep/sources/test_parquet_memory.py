"""Parquet files are read in little memory, which readers share: none of them takes that of another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from resolute.errors import ResoluteError
from resolute.prep.sources import parquet_file
from resolute.prep.sources.parquet_file import open_parquet

ROWS = 4000


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with one group of 4000 rows, whose images have 5 kB each."""
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    images = [number.to_bytes(2, "big") * 2500 for number in range(ROWS)]
    path = tmp_path_factory.mktemp("parquet") / "images.parquet"
    table = pa.table({"image": pa.array(images, pa.binary())})
    parquet.write_table(table, path, row_group_size=ROWS, compression="none", use_dictionary=False)
    return path


def images(path: Path) -> Iterator[bytes]:
    with open_parquet(str(path)) as file:
        for (image,) in file.rows(["image"], 64):
            yield image


def test_a_group_of_rows_is_never_in_memory_as_a_whole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = parquet_file._File.read

    def read(self: parquet_file._File, nbytes: int = -1) -> bytes:
        asked.append(nbytes)
        return real(self, nbytes)

    monkeypatch.setattr(parquet_file._File, "read", read)
    assert [image[:2] for image in images(path)] == [number.to_bytes(2, "big") for number in range(ROWS)]
    assert 0 < max(asked) < path.stat().st_size / 2


def test_every_reader_has_a_limit_of_memory_in_proportion_to_its_images(path: Path) -> None:
    with open_parquet(str(path)) as file:
        default = file._connection.execute("SELECT current_setting('memory_limit')").fetchone()[0]
        next(file.rows(["image"], 1))
        limit = file._connection.execute("SELECT current_setting('memory_limit')").fetchone()[0]
    assert limit == "1.1 GiB"  # four times 256 MiB and four times 2048 images of 5 kB
    assert default != limit


def test_images_that_do_not_fit_end_in_one_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_file, "_LEAST", 1 << 20)
    monkeypatch.setattr(parquet_file, "_COPIES", 0)
    monkeypatch.setattr(parquet_file, "_UNEVEN", 1)
    with pytest.raises(ResoluteError) as error:
        list(images(path))
    assert "images.parquet: needs too much memory, got 'Out of Memory Error: " in str(error.value)
    assert "\n" not in str(error.value)


def test_readers_wait_for_memory_and_the_next_begins_even_if_one_fails() -> None:
    memory, inside, most, done = parquet_file._SharedMemory(), 0, 0, []
    lock, waited = threading.Lock(), threading.Event()

    def read(nbytes: int) -> None:
        nonlocal inside, most
        with memory.take(nbytes, 100):
            with lock:
                inside += nbytes
                most = max(most, inside)
            waited.wait(0.02)
            with lock:
                inside -= nbytes
                done.append(nbytes)

    def fail() -> None:
        with pytest.raises(ZeroDivisionError), memory.take(60, 100):
            raise ZeroDivisionError

    threads = [threading.Thread(target=read, args=(nbytes,)) for nbytes in (40, 40, 40, 500, 90, 40)]
    threads.append(threading.Thread(target=fail))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(done) == [40, 40, 40, 40, 90, 500]
    assert most == 500, "which is more than there is, so alone"
