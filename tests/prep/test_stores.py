"""Shards on an object store: the same bytes, whole or not at all, through kills and failing uploads."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from prep import store as stores
from prep.store import LOCK, Folder, Objects, open_store
from tests.prep.trees import tree
from tests.s3 import s3_server  # noqa: F401  # a fixture

Prep = Callable[..., Any]


def contents(url: str) -> dict[str, str]:
    fs, base = fsspec.core.url_to_fs(url, use_listings_cache=False)
    fs.invalidate_cache()
    files = {
        name.removeprefix(base).lstrip("/"): hashlib.sha256(fs.cat_file(name)).hexdigest() for name in fs.find(base)
    }
    files.pop("report.html", None)  # tells times
    return files


@pytest.fixture
def bucket(s3_server: Any) -> str:  # noqa: F811
    fs = fsspec.filesystem("s3")
    fs.mkdir("photos-and-shards")
    return "s3://photos-and-shards"


def test_a_set_on_s3_from_photos_on_s3_has_the_bytes_of_a_local_one(
    bucket: str, photos: Path, tmp_path: Path, prep: Prep
) -> None:
    fsspec.filesystem("s3").put(f"{photos}/", f"{bucket}/photos/", recursive=True)
    argv = ("--res", "32,48", "--shard-samples", 20)
    ran = prep("--src", f"{bucket}/photos", "--out", f"{bucket}/set", *argv)
    assert ran.status == 0, ran.err
    assert prep("--src", photos, "--out", tmp_path / "s", *argv).status == 0
    assert contents(f"{bucket}/set") == tree(tmp_path / "s")
    assert "already there" in prep("--src", f"{bucket}/photos", "--out", f"{bucket}/set", *argv).out


def test_an_upload_that_fails_leaves_no_object_and_the_run_goes_on(
    bucket: str, photos: Path, tmp_path: Path, prep: Prep, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ("--src", photos, "--res", "32,48", "--shard-samples", 20)
    fs = type(fsspec.filesystem("s3"))
    put = fs._put_file

    async def refuse(self: Any, local: str, remote: str, *args: Any, **kwargs: Any) -> Any:
        if remote.endswith("48/train-000001.tar"):
            raise OSError(5, "connection lost")
        return await put(self, local, remote, *args, **kwargs)

    monkeypatch.setattr(fs, "_put_file", refuse)
    fs.clear_instance_cache()  # why: instances keep the methods that they were made with
    ran = prep(*argv, "--out", f"{bucket}/set")
    assert ran.status == 2
    assert "connection lost" in ran.err
    assert "48/train-000001.tar" in ran.err
    there = contents(f"{bucket}/set")
    assert "manifest.json" not in there
    assert "48/train-000001.tar" not in there
    assert LOCK not in there
    monkeypatch.setattr(fs, "_put_file", put)
    fs.clear_instance_cache()
    ran = prep(*argv, "--out", f"{bucket}/set")
    assert ran.status == 0, ran.err
    assert "were there and are kept" in ran.out
    assert prep(*argv, "--out", tmp_path / "s").status == 0
    assert contents(f"{bucket}/set") == tree(tmp_path / "s")


def test_a_second_prep_on_one_prefix_is_refused_until_the_lease_is_old(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = open_store(f"{bucket}/set"), open_store(f"{bucket}/set")
    with one.alone():
        with pytest.raises(Exception, match="another prep is writing"), two.alone():
            pass
        assert one.size(LOCK) is not None
    assert one.size(LOCK) is None
    one.write(LOCK, json.dumps(["dead", time.time() - 61]).encode())  # a crash leaves its lease behind
    with two.alone():
        assert json.loads(two.read(LOCK))[0] != "dead"


def test_a_lease_is_renewed_while_the_run_lasts(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_RENEW_S", 0.05)
    store = open_store(f"{bucket}/set")
    with store.alone():
        first = json.loads(store.read(LOCK))[1]
        deadline = time.monotonic() + 10
        while json.loads(store.read(LOCK))[1] == first and time.monotonic() < deadline:
            time.sleep(0.02)
        assert json.loads(store.read(LOCK))[1] > first


def test_both_stores_answer_alike(bucket: str, tmp_path: Path) -> None:
    for store in (Folder(tmp_path / "set"), Objects(f"{bucket}/alike")):
        assert store.size("a/b.bin") is None
        assert store.names("a") == []
        assert store.folders() == []
        with pytest.raises(FileNotFoundError):
            store.read("a/b.bin")
        with store.create("a/b.bin") as part:
            part.write(b"12")
            part.write(b"345")
        assert part.info().nbytes == 5
        assert store.size("a/b.bin") == 5
        assert store.read("a/b.bin") == b"12345"
        with store.open("a/b.bin") as file:
            file.seek(3)
            assert file.read() == b"45"
        assert store.local("a/b.bin", tmp_path).read_bytes() == b"12345"
        store.write("c.json", b"{}")
        assert (store.names(), store.names("a"), store.folders()) == (["c.json"], ["b.bin"], ["a"])
        half = store.create("a/half.bin")
        half.write(b"12")
        half.discard()
        assert store.names("a") == ["b.bin"]
        store.remove("a/b.bin")
        store.remove("a/b.bin")
        store.remove_folder("a")
        assert store.folders() == []


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ("nosuch://bucket/set", "nosuch"),
        ("s3://there-is-no-such-bucket/set", "the store refuses"),
    ],
)
def test_a_store_that_cannot_be_written_is_one_clear_line(
    bucket: str, photos: Path, prep: Prep, out: str, words: str
) -> None:
    ran = prep("--src", photos, "--out", out, "--res", "32")
    assert ran.status == 2
    assert ran.err.count("\n") == 1
    assert words in ran.err
    assert out in ran.err
