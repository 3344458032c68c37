"""The index of third-party tars: built once by any number of processes, and rebuilt when tars or index have changed."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import fsspec
import numpy as np
import pytest

from resolute import ResoluteError
from resolute.pipeline.loader.reader import Reader
from tests.support.s3 import s3_server  # noqa: F401
from tests.support.third_party_tars import encoded, opened, sample, write


def test_a_second_open_reads_no_tar_and_gives_the_same_set(tars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = opened(tars)
    monkeypatch.setattr("resolute.pipeline.dataset.webdataset.index.samples", None)  # the walk over a tar
    second, lines = opened([tars / "val-000.tar", str(tars / "train-{000..002}.tar")])
    assert not lines
    assert first.hash == second.hash
    np.testing.assert_array_equal(first.splits["train"].samples[:], second.splits["train"].samples[:])
    assert opened(tars, val=0.4)[0].hash != first.hash


def test_changed_tars_are_indexed_again_and_the_old_index_is_deleted(tars: Path) -> None:
    first, _ = opened(tars)
    write(tars / "val-%03d.tar", [sample(i) for i in range(7)])
    second, lines = opened(tars)
    assert "the tars changed since they were indexed" in lines[0]
    assert (len(first.splits["val"]), len(second.splits["val"])) == (10, 7)
    assert len(list((tars / ".resolute-index").iterdir())) == 1


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.unlink()
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["meta.json", "samples.crc.npy", "stored.npy"])
def test_a_damaged_index_is_detected_and_rebuilt(tars: Path, name: str) -> None:
    first, _ = opened(tars)
    (path,) = tars.glob(f".resolute-index/*/{name}")
    flip(path, -40)
    second, lines = opened(tars)
    assert "the index is damaged" in lines[0]
    assert second.hash == first.hash
    assert opened(tars)[1] == []


def test_a_damaged_block_of_a_large_index_is_detected_when_it_is_used(tmp_path: Path) -> None:
    tiny = encoded(0)
    write(tmp_path / "%d.tar", [{"__key__": f"{i}", "jpg": tiny, "cls": b"1"} for i in range(500)], size=500)
    opened(tmp_path)
    (path,) = tmp_path.glob(".resolute-index/*/stored.npy")
    flip(path, -40)
    shards, lines = opened(tmp_path)
    assert not lines
    part = shards.splits["train"].stored[32]
    assert part[np.arange(100)]["nbytes"].tolist() == [len(tiny)] * 100
    with pytest.raises(ResoluteError, match=r"stored\.npy: changed .*remove the folder it is in: it is made again"):
        part[np.arange(500)]


def test_concurrent_processes_index_the_same_tars_once(tars: Path) -> None:
    code = "import sys; from resolute.pipeline.dataset.webdataset.open import open_webdataset as o; " \
           "print(o(sys.argv[1], threads=1).hash)"  # fmt: skip
    runs = [
        subprocess.Popen([sys.executable, "-c", code, str(tars)], stdout=-1, stderr=-1, text=True) for _ in range(3)
    ]
    outputs = [run.communicate() for run in runs]
    assert {out for out, _ in outputs} == {opened(tars)[0].hash + "\n"}
    assert "".join(err for _, err in outputs).count("indexing 4 tars") == 1


def test_the_index_is_cached_elsewhere_if_the_tars_are_on_read_only_storage(
    tars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESOLUTE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("resolute.pipeline.dataset.webdataset.index._writable", lambda place: tars not in place.parents)
    shards, _ = opened(tars)
    assert not (tars / ".resolute-index").exists()
    assert len(list((tmp_path / "cache" / "foreign").glob("*/*/meta.json"))) == 1
    assert opened(tars)[1] == []
    assert len(shards.splits["train"]) == 28


def test_tars_in_an_object_store_are_read_through_the_cache(
    tars: Path, tmp_path: Path, s3_server: str, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    monkeypatch.setenv("RESOLUTE_CACHE", str(tmp_path / "cache"))
    fsspec.filesystem("s3").put(f"{tars}/*.tar", f"{s3_server}/set/")
    near, _ = opened(tars)
    sources = [f"{s3_server}/set/{{train-000,train-001,train-002,val-000}}.tar"]
    for first_time in (True, False):
        far, lines = opened(sources)
        assert bool(lines) == first_time
        assert far.hash == near.hash
        with closing(Reader(far, padded=False)) as there, closing(Reader(near, padded=False)) as here:
            for split, count in (("train", 28), ("val", 10)):
                ids = np.arange(count)
                remote_read, local_read = (reader.submit(split, 32, ids).result() for reader in (there, here))
                assert not remote_read.errors
                assert all(np.array_equal(*both) for both in zip(remote_read.images, local_read.images, strict=True))
        far.close()
    with pytest.raises(ResoluteError, match="stores are not listed; write them as"):
        opened(f"{s3_server}/set")


def test_an_index_whose_writer_was_killed_is_rebuilt(tars: Path) -> None:
    first, _ = opened(tars)
    (meta,) = tars.glob(".resolute-index/*/meta.json")
    meta.with_name("meta.json.part").write_bytes(meta.read_bytes()[:50])
    partial = meta.with_name(".stored.npy.0123456789ab.partial")
    partial.write_bytes(b"half of it")
    meta.unlink()
    flip(meta.with_name("samples.npy"), -1)
    second, lines = opened(tars)
    assert "indexing 4 tars" in lines[0]
    assert second.hash == first.hash
    assert second.splits["train"].samples[:].tolist() == first.splits["train"].samples[:].tolist()
    assert opened(tars)[1] == []
    assert not partial.exists()
