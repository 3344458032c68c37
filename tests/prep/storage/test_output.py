"""Shards on an object store: the same bytes, whole or not at all, through kills and failing uploads."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fsspec
import pytest

from pipeline.errors import ResoluteError, StorageError
from pipeline.storage.scratch import ScratchFolder
from prep.sources.scan_cache import cached_scan
from prep.storage import lease
from prep.storage.output import LOCK, LocalStore, ObjectStore, open_store
from tests.support.s3 import s3_server  # noqa: F401  # a fixture
from tests.support.trees import tree

Prep = Callable[..., Any]


def contents(url: str) -> dict[str, str]:
    fs, base = fsspec.core.url_to_fs(url, use_listings_cache=False)
    fs.invalidate_cache()
    files = {
        name.removeprefix(base).lstrip("/"): hashlib.sha256(fs.cat_file(name)).hexdigest() for name in fs.find(base)
    }
    for name in ("report.html", "source.json"):  # tell times and places
        files.pop(name, None)
    return files


@pytest.fixture
def bucket(s3_server: Any) -> str:  # noqa: F811
    fs = fsspec.filesystem("s3")
    fs.mkdir("photos-and-shards")
    return "s3://photos-and-shards"


@pytest.mark.slow
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


@pytest.mark.slow
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
    assert not [name for name in there if name.startswith(LOCK)]
    monkeypatch.setattr(fs, "_put_file", put)
    fs.clear_instance_cache()
    ran = prep(*argv, "--out", f"{bucket}/set")
    assert ran.status == 0, ran.err
    assert "were kept" in ran.out
    assert prep(*argv, "--out", tmp_path / "s").status == 0
    assert contents(f"{bucket}/set") == tree(tmp_path / "s")


class Hooked:
    """A file system that calls `hook(path)` before each write."""

    def __init__(self, fs: Any, hook: Callable[[str], None]) -> None:
        self._fs, self._hook = fs, hook

    def put_file(self, file: str, path: str) -> Any:
        self._hook(path)
        return self._fs.put_file(file, path)

    def pipe_file(self, path: str, data: bytes, **options: Any) -> Any:
        self._hook(path)
        return self._fs.pipe_file(path, data, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)


def before_writes(monkeypatch: pytest.MonkeyPatch, hook: Callable[[str], None]) -> None:
    whole = ObjectStore._fs
    assert isinstance(whole, property)
    get = whole.fget
    assert get is not None
    monkeypatch.setattr(ObjectStore, "_fs", property(lambda store: Hooked(get(store), hook)))


def leave_lock(store: Any, name: str, age_s: float) -> None:
    """What a run leaves that was killed when its lock had been renewed `age_s` before now."""
    record = {"host": "elsewhere", "pid": 7, "since": "long ago", "token": "another's", "renewed": time.time() - age_s}
    store.put(f"{LOCK}/{name}", json.dumps(record).encode())


@pytest.mark.parametrize("left_behind", [False, True])
def test_of_two_writers_that_saw_the_same_store_one_gets_the_lock(
    bucket: str, monkeypatch: pytest.MonkeyPatch, left_behind: bool
) -> None:
    one, two = open_store(f"{bucket}/set"), open_store(f"{bucket}/set")
    if left_behind:
        leave_lock(two, "00000007", age_s=61)
    with ExitStack() as second:
        inside: list[str] = []

        def overtake(path: str) -> None:
            if LOCK in path and not inside:  # the first has looked, and is about to write
                inside.append("second")
                second.enter_context(two.exclusive_lock())

        before_writes(monkeypatch, overtake)
        with (
            pytest.raises(ResoluteError, match=rf"another prep is writing here, got host .*, pid {os.getpid()}, since"),
            one.exclusive_lock(),
        ):
            inside.append("first")
        assert inside == ["second"]
        assert len(two.names(LOCK)) == 1
        two.write("a.bin", b"1")
    assert two.names(LOCK) == []


def test_a_lock_is_taken_over_when_its_holder_has_not_renewed_it(bucket: str) -> None:
    store = open_store(f"{bucket}/set")
    leave_lock(store, "00000001", age_s=10)
    with (
        pytest.raises(ResoluteError, match=r"got host elsewhere, pid 7, since long ago, last renewed \d+ s ago"),
        store.exclusive_lock(),
    ):
        raise AssertionError("two writers")
    leave_lock(store, "00000001", age_s=61)
    with store.exclusive_lock():
        assert store.names(LOCK) == ["00000002"]
    assert store.names(LOCK) == []


def test_a_holder_whose_lock_was_taken_over_changes_nothing_any_more(bucket: str) -> None:
    one, two = open_store(f"{bucket}/set"), open_store(f"{bucket}/set")
    with ExitStack() as second:
        with one.exclusive_lock():
            (mine,) = one.names(LOCK)
            on_a_node = pickle.loads(pickle.dumps(one))
            on_a_node.write("b.bin", b"1")
            large = one.create("large.bin")
            large.write(b"1")
            leave_lock(one, mine, age_s=61)  # as after a pause
            second.enter_context(two.exclusive_lock())
            for store in (one, on_a_node):
                with pytest.raises(StorageError, match=r"this run has lost its lock on OUT, got another prep on host"):
                    store.write("a.bin", b"2")
            with pytest.raises(StorageError, match="lost its lock"):
                large.close()
            with pytest.raises(StorageError, match="lost its lock"):
                one.remove("b.bin")
        assert two.names() == ["b.bin"]
        two.write("b.bin", b"3")  # the end of the first has not touched the second's lock
    assert two.names(LOCK) == []


def test_a_holder_that_cannot_renew_its_lock_stops_before_another_may_take_it(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, now = open_store(f"{bucket}/set"), lease._clock
    with store.exclusive_lock():
        monkeypatch.setattr(lease, "_clock", lambda: now() + 49)
        store.write("a.bin", b"1")
        monkeypatch.setattr(lease, "_clock", lambda: now() + 51)
        with pytest.raises(StorageError, match="got no renewal for 50 s"):
            store.write("b.bin", b"1")
        monkeypatch.setattr(lease, "_clock", now)
        with pytest.raises(StorageError, match="got no renewal for 50 s"):
            store.write("b.bin", b"1")  # once lost, for ever lost
    assert store.names() == ["a.bin"]


def test_a_renewal_that_comes_too_late_leaves_no_lock(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store, now = open_store(f"{bucket}/set"), lease._clock
    assert isinstance(store, ObjectStore)
    with store.exclusive_lock():
        before_writes(monkeypatch, lambda path: monkeypatch.setattr(lease, "_clock", lambda: now() + 70))
        store._lease._renew(store)
        assert store.names(LOCK) == []
        with pytest.raises(StorageError, match="lost its lock"):
            store.write("a.bin", b"1")


def test_a_lock_is_renewed_while_the_run_lasts_also_after_a_renewal_that_failed(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "_RENEW_S", 0.05)
    store = open_store(f"{bucket}/set")
    failed: list[str] = []

    def fail_once(path: str) -> None:
        if not failed:
            failed.append(path)
            raise OSError(errno.EIO, "connection lost")

    def renewed() -> float:
        (name,) = store.names(LOCK)
        return float(json.loads(store.read(f"{LOCK}/{name}"))["renewed"])

    with store.exclusive_lock():
        before_writes(monkeypatch, fail_once)
        deadline = time.monotonic() + 60
        while not failed and time.monotonic() < deadline:
            time.sleep(0.02)
        first = renewed()
        while renewed() == first and time.monotonic() < deadline:
            time.sleep(0.02)
        assert renewed() > first


def test_a_run_that_loses_its_lock_ends_with_one_line_and_without_a_manifest(
    bucket: str, photos: Path, prep: Prep, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = open_store(f"{bucket}/set")
    with ExitStack() as second:

        def overtake(path: str) -> None:
            if path.endswith("train-000000-32.rec") and not overtaken:
                overtaken.append(path)
                (name,) = two.names(LOCK)
                leave_lock(two, name, age_s=61)
                second.enter_context(two.exclusive_lock())

        overtaken: list[str] = []
        before_writes(monkeypatch, overtake)
        ran = prep("--src", photos, "--out", f"{bucket}/set", "--res", "32,48", "--shard-samples", 20)
        assert overtaken
        assert (ran.status, ran.err.count("\n")) == (2, 1), ran.err
        assert "this run has lost its lock on OUT" in ran.err
        assert two.size("manifest.json") is None
        assert len(two.names(LOCK)) == 1


def test_on_a_folder_the_second_writer_is_told_who_is_there(tmp_path: Path, photos: Path, prep: Prep) -> None:
    with open_store(str(tmp_path / "set")).exclusive_lock():
        ran = prep("--src", photos, "--out", tmp_path / "set", "--res", "32")
    assert (ran.status, ran.err.count("\n")) == (2, 1), ran.err
    assert f"another prep is writing here, got host {socket.gethostname()}, pid {os.getpid()}, since" in ran.err


def test_a_folder_that_cannot_be_locked_is_refused(
    tmp_path: Path, photos: Path, prep: Prep, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    ran = prep("--src", photos, "--out", tmp_path / "set", "--res", "32")
    assert (ran.status, ran.err.count("\n")) == (2, 1), ran.err
    assert "cannot be locked, got 'No locks available'" in ran.err
    assert not list((tmp_path / "set").rglob("*.tar"))


def test_what_is_being_uploaded_has_no_name_on_this_machine(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    store = open_store(f"{bucket}/set")
    at_upload: list[list[Path]] = []
    before_writes(monkeypatch, lambda path: at_upload.append(list((tmp_path / "tmp").iterdir())))
    with store.create("32/train-000000.tar") as part:
        part.write(b"x" * 100_000)
        assert list((tmp_path / "tmp").iterdir()) == []  # what a kill would leave now
    assert at_upload == [[]]
    assert store.read("32/train-000000.tar") == b"x" * 100_000


def test_uploads_that_a_killed_run_has_begun_are_aborted_and_others_are_not(
    bucket: str, photos: Path, prep: Prep
) -> None:
    fs = fsspec.filesystem("s3")
    name = bucket.removeprefix("s3://")
    ours = ("set/48/train-000001.tar", "set/index/train.npy", "set/records/train-000000-32.rec")
    others = ("set/48/notes.tar", "elsewhere/48/train-000001.tar", "settled/48/train-000001.tar")
    for key in (*ours, *others):
        fs.call_s3("create_multipart_upload", Bucket=name, Key=key)
    assert prep("--src", photos, "--out", f"{bucket}/set", "--res", "32", "--shard-samples", 20).status == 0
    left = fs.call_s3("list_multipart_uploads", Bucket=name).get("Uploads", [])
    assert sorted(upload["Key"] for upload in left) == sorted(others)


def test_a_scratch_folder_of_a_killed_process_is_deleted_and_a_used_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    killed = (
        "import os; from pipeline.storage.scratch import ScratchFolder; folder = ScratchFolder();"
        "(folder.path / 'spool').write_bytes(b'x'); os.kill(os.getpid(), 9)"
    )
    used = ScratchFolder()
    subprocess.run([sys.executable, "-c", killed], env={**os.environ, "TMPDIR": str(tmp_path / "tmp")}, check=False)
    assert len(list((tmp_path / "tmp").iterdir())) == 2
    with ScratchFolder() as folder:
        assert set((tmp_path / "tmp").iterdir()) == {folder, used.path}
    used.close()
    assert list((tmp_path / "tmp").iterdir()) == []


def test_what_a_killed_pass_over_a_source_has_left_is_deleted_by_the_next(tmp_path: Path, work: Path) -> None:
    source = tmp_path / "x.tar.gz"
    source.write_bytes(b"x")
    killed = (
        "import os, sys; from pathlib import Path; from prep.sources.scan_cache import cached_scan\n"
        "def fill(out):\n"
        "    out.add('a.jpg', 'a', b'half'); os.kill(os.getpid(), 9)\n"
        "cached_scan(Path(sys.argv[1]), sys.argv[2], 'how', fill, copies=True)"
    )
    for _ in range(3):
        subprocess.run([sys.executable, "-c", killed, work, source], check=False)
        assert len(list(work.iterdir())) == 2  # of this attempt alone
    cached_scan(work, str(source), "how", lambda out: out.add("a.jpg", "a", b"whole"), copies=True)
    assert sorted(path.suffix for path in work.iterdir()) == [".blob", ".json", ".rows"]


def test_both_stores_answer_alike(bucket: str, tmp_path: Path) -> None:
    for store in (LocalStore(tmp_path / "set"), ObjectStore(f"{bucket}/alike")):
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
        ("s3://there-is-no-such-bucket/set", "the store refused"),
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
