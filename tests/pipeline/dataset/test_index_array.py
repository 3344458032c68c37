"""Index arrays: records equal those of the whole array, and no byte is used before its checksum was verified."""

from __future__ import annotations

import pickle
import re
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.format import SAMPLE, STORED
from resolute.pipeline.dataset.index_array import (
    BLOCK_BYTES,
    JoinedRecords,
    Records,
    checksums,
    checksums_name,
    read_checksums,
)

N = 5000


@pytest.fixture(params=[SAMPLE, STORED], ids=["SAMPLE", "STORED"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, NDArray[Any], NDArray[np.uint32]]:
    """A file of N records of random bytes, its records, and its checksums."""
    dtype: np.dtype[Any] = request.param
    rows = np.frombuffer(np.random.default_rng(0).bytes(N * dtype.itemsize), dtype)
    path = tmp_path / "a.npy"
    np.save(path, rows)
    return path, rows, checksums([path.read_bytes()])


@pytest.mark.parametrize("length", [0, 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES, 50_000])
@pytest.mark.parametrize("piece", [1, 100, BLOCK_BYTES, 5000, 100_000])
def test_checksums_do_not_depend_on_the_chunk_size(length: int, piece: int) -> None:
    data = np.random.default_rng(length).bytes(length)
    got = checksums(data[at : at + piece] for at in range(0, length, piece))
    assert got.tolist() == [zlib.crc32(data[at : at + BLOCK_BYTES]) for at in range(0, length, BLOCK_BYTES)]
    assert got.dtype == np.uint32


def test_records_equal_numpys(made: tuple[Path, NDArray[Any], NDArray[np.uint32]]) -> None:
    path, rows, crcs = made
    rng = np.random.default_rng(1)
    keys = [0, -0, N - 1, np.int64(7), slice(None), slice(10, 20), slice(20, 10), slice(5, 4000, 7), slice(-3, None),
            rng.integers(0, N, 256), rng.integers(0, N, (3, 4)).astype(np.uint32), np.empty(0, np.int64),
            np.arange(N)]  # fmt: skip
    for key in keys:
        got = Records(path, crcs, rows.dtype)[key]
        assert got.dtype == rows.dtype
        assert got.shape == rows[key].shape
        assert got.tobytes() == rows[key].tobytes()
    records = Records(path, crcs, rows.dtype)
    assert len(records) == N
    for name in rows.dtype.names or ():
        np.testing.assert_array_equal(records[name], rows[name])
    assert [record.tobytes() for record in records] == [record.tobytes() for record in rows]
    assert np.asarray(records).tobytes() == rows.tobytes()
    assert pickle.loads(pickle.dumps(records))[:].tobytes() == rows.tobytes()


def test_writing_to_a_returned_copy_does_not_change_the_file(
    made: tuple[Path, NDArray[Any], NDArray[np.uint32]]
) -> None:
    path, rows, crcs = made
    records, before = Records(path, crcs, rows.dtype), path.read_bytes()
    for key in (slice(0, 10), np.arange(10)):
        records[key]["label" if rows.dtype == SAMPLE else "width"] = 7
    records[3][0] = 0
    assert records[:].tobytes() == rows.tobytes()
    assert path.read_bytes() == before


@pytest.mark.parametrize("bad", [-1, N, 2**62, -(2**62)])
def test_out_of_range_is_an_error(made: tuple[Path, NDArray[Any], NDArray[np.uint32]], bad: int) -> None:
    path, rows, crcs = made
    records = Records(path, crcs, rows.dtype)
    for view in (records, records.subset(np.arange(N, dtype=np.uint32))):
        for key in (bad, np.asarray([5, bad])):
            with pytest.raises(IndexError, match="out of range of 5000 records"):
                view[key]
    with pytest.raises(IndexError, match="expected integers"):
        records[np.zeros(N, np.bool_)]


def test_every_damaged_byte_is_detected_when_its_record_is_read(
    made: tuple[Path, NDArray[Any], NDArray[np.uint32]],
) -> None:
    path, rows, crcs = made
    data, size = path.read_bytes(), rows.dtype.itemsize
    first = len(data) - N * size
    block_edges = [at for at in range(2 * BLOCK_BYTES, len(data), 7 * BLOCK_BYTES) for at in (at - 1, at)]
    for at in [*block_edges, len(data) - 1, *np.random.default_rng(3).integers(BLOCK_BYTES, len(data), 20).tolist()]:
        path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        sample, block = (at - first) // size, at // BLOCK_BYTES
        keys: list[Any] = [sample, np.asarray([1, sample]), slice(sample, sample + 1), slice(None)]
        for key in keys:
            records = Records(path, crcs, rows.dtype, where="set/a.npy")
            assert records[1].tobytes() == rows[1].tobytes()  # other records are unaffected
            message = rf"set/a\.npy: changed since prep, got CRC-32 \w{{8}} at byte {block * BLOCK_BYTES}, expected"
            for _ in range(2):  # repeated: a failed check does not count as checked
                with pytest.raises(ResoluteError, match=message):
                    records[key]


@pytest.mark.parametrize("change", ["header", "type", "cut", "longer", "other checksums"])
def test_a_changed_file_is_refused_when_opened(
    made: tuple[Path, NDArray[Any], NDArray[np.uint32]], change: str
) -> None:
    path, rows, crcs = made
    data = path.read_bytes()
    changed: dict[str, Callable[[], bytes]] = {
        "header": lambda: data.replace(b"descr", b"descR", 1),
        "type": lambda: data,
        "cut": lambda: data[:-1],
        "longer": lambda: data + bytes(BLOCK_BYTES),
        "other checksums": lambda: data,
    }
    path.write_bytes(changed[change]())
    if change != "header":
        crcs = checksums([path.read_bytes()]) if change != "other checksums" else crcs[:-1]
    dtype = rows.dtype if change != "type" else np.dtype([("key", "<u8"), ("other", "<u8")])
    with pytest.raises(ResoluteError, match=re.escape(f"{path}: changed since prep")):
        Records(path, crcs, dtype)


def test_a_subset_of_a_subset_is_indexed_from_zero(made: tuple[Path, NDArray[Any], NDArray[np.uint32]]) -> None:
    path, rows, crcs = made
    odd = np.arange(1, N, 2, dtype=np.uint32)
    part = Records(path, crcs, rows.dtype).subset(odd)
    assert len(part) == N // 2
    ids = np.random.default_rng(2).integers(0, N // 2, 64)
    assert part[ids].tobytes() == rows[odd][ids].tobytes()
    assert part[10:20].tobytes() == rows[odd][10:20].tobytes()
    assert part[7].tobytes() == rows[15].tobytes()
    again = part.subset(np.asarray([3, 1], np.uint32))
    assert again[:].tobytes() == rows[[7, 3]].tobytes()


def test_concurrent_reads_of_a_block_are_correct(made: tuple[Path, NDArray[Any], NDArray[np.uint32]]) -> None:
    path, rows, crcs = made
    for trial in range(10):
        records, wrong = Records(path, crcs, rows.dtype), []
        start = threading.Barrier(8)

        def work(ids: NDArray[np.int64], records: Records = records, wrong: list[Any] = wrong,
                 start: threading.Barrier = start) -> None:  # fmt: skip
            start.wait()
            for part in ids.reshape(-1, 50):
                if records[part].tobytes() != rows[part].tobytes():
                    wrong.append(part)

        rng = np.random.default_rng(trial)
        threads = [threading.Thread(target=work, args=(rng.permutation(N),)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def test_the_checksum_file_is_verified_by_its_hash(tmp_path: Path) -> None:
    assert checksums_name("index/train-32.npy") == "index/train-32.crc.npy"
    path = tmp_path / "a.crc.npy"
    np.save(path, np.arange(5, dtype=np.uint32))
    with pytest.raises(ResoluteError, match="set/a: changed since prep, got SHA-256"):
        read_checksums(path, "0" * 64, "set/a")


def test_several_arrays_are_read_as_one(tmp_path: Path) -> None:
    dtype = np.dtype([("key", "<u8"), ("labels", "u1", (2,))])
    narrow = np.dtype([("key", "<u8"), ("labels", "u1", (1,))])  # as it was before classes were added
    parts, rows = [], []
    for number, (count, own) in enumerate([(700, narrow), (1, dtype), (300, dtype)]):
        array = np.zeros(count, own)
        array["key"] = 1000 * number + np.arange(count)
        array["labels"] = number + 1
        path = tmp_path / f"{number}.npy"
        np.save(path, array)
        parts.append(Records(path, checksums([path.read_bytes()]), own))
        rows += [(int(key), [number + 1, number + 1 if number else 0]) for key in array["key"]]
    joined = JoinedRecords(parts, dtype)
    assert len(joined) == 1001
    ids = np.random.default_rng(0).integers(0, 1001, (40, 5))
    assert joined[ids]["key"].tolist() == [[rows[i][0] for i in row] for row in ids.tolist()]
    assert joined[700]["key"] == 1000
    assert joined[-3:]["labels"].tolist() == [row[1] for row in rows[-3:]]
    assert joined[690:710]["key"].tolist() == [row[0] for row in rows[690:710]]
    assert joined["key"].tolist() == [row[0] for row in rows]
    chosen = np.flatnonzero(np.arange(1001) % 3 == 0).astype(np.uint32)
    subset = joined.subset(chosen).subset(np.arange(10, 300, dtype=np.uint32))
    expected = [rows[3 * i][0] for i in range(10, 300)]
    for view in (subset, pickle.loads(pickle.dumps(subset))):
        assert [int(record["key"]) for record in view] == expected
        assert view[[0, 289]]["key"].tolist() == [expected[0], expected[-1]]
    for bad in (1001, -1):
        with pytest.raises(IndexError, match="out of range of 1001 records"):
            joined[[bad]]
    with pytest.raises(IndexError, match="out of range of 290 records"):
        subset[[290]]
