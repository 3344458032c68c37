"""Writing shards to an object store: the same bytes, complete or absent, through kills and failing uploads."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest

from resolute.errors import ResoluteError, StorageError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.storage.drivers import file_system, obstore_fs
from resolute.pipeline.storage.obstore_fs import ObstoreFS
from resolute.pipeline.storage.open_files import open_files
from resolute.prep.sources.filesystem import is_pattern, list_folder, path_kind
from resolute.prep.sources.scan_cache import cached_scan, scan_all
from resolute.prep.storage import lease
from resolute.prep.storage.bulk import read_many
from resolute.prep.storage.output import LOCK, LocalStore, OutputBucket, open_output
from resolute.scratch import ScratchFolder
from tests.support.cli import verify
from tests.support.s3 import FaultyProxy, proxy, running_s3, s3_server  # noqa: F401  # fixtures
from tests.support.trees import tree

Prep = Callable[..., Any]
NAMES = [
    "a#b",
    "a%25b",
    "a%20b",
    "a b",
    "a%2Fb",
    "a?b",
    "a+b",
    "é",
    "a&b=c",
    "a[b]",
    "a*b",
    "a{1,2}b",
    "a@b:c",
    "a'b",
    "%",
]


@pytest.fixture(scope="module")
def server() -> Iterator[None]:
    with running_s3():
        yield


@pytest.fixture
def bucket(server: None) -> str:
    """The URL of an empty bucket."""
    name = f"bucket-{uuid.uuid4().hex}"
    fsspec.filesystem("s3").mkdir(name)
    return f"s3://{name}"


def contents(url: str) -> dict[str, str]:
    """{relative name: SHA-256}, as `tree` of a folder."""
    fs, base = fsspec.core.url_to_fs(url, use_listings_cache=False)
    fs.invalidate_cache()
    files = {name.removeprefix(base).lstrip("/"): name for name in fs.find(base)}
    return {
        name: hashlib.sha256(fs.cat_file(path)).hexdigest()
        for name, path in files.items()
        if name not in ("report.html", "source.json")
    }


@pytest.mark.parametrize("kind", ["folder", "file", "s3"])
def test_what_is_written_under_any_name_is_read_under_that_name(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESOLUTE_CACHE", str(tmp_path / "cache"))
    bases = {"folder": str(tmp_path), "file": f"file://{tmp_path}"}
    base = bases[kind] if kind in bases else request.getfixturevalue("bucket")
    for number, name in enumerate(NAMES):
        out, data = f"{base}/{name}", b"%d" % number
        open_output(out).write("x.rec", data)
        assert open_output(out).read("x.rec") == data
        assert open_output(out).names() == ["x.rec"]
        with open_files(out) as files:
            assert files.size("x.rec") == len(data), name
            assert files.local("x.rec").read_bytes() == data
        assert path_kind(out) == "folder"
        assert not is_pattern(out)
        assert [(entry.name, entry.nbytes) for entry in list_folder(out)] == [("x.rec", len(data))]
    assert {*NAMES} <= {*open_output(base).folders()}


@pytest.mark.slow
def test_a_set_and_its_photos_have_names_with_signs_of_urls_on_s3_and_on_a_disk(
    photos: Path, tmp_path: Path, bucket: str, prep: Prep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESOLUTE_CACHE", str(tmp_path / "cache"))
    name = "a#b%25c%20d?e+f g{1,2}*[h]"
    for path in sorted(photos.rglob("[01]?.jpg")):
        path.rename(path.with_name(f"{path.stem}#%25 ?+.jpg"))
    shutil.copytree(photos, tmp_path / name)
    fs, root = file_system(f"{bucket}/{name}")
    for path in photos.glob("*/**/*.[jJ]*"):
        fs.pipe_file(f"{root}/{path.relative_to(photos)}", path.read_bytes())
    hashes = set()
    for src, out in (
        (str(photos), str(tmp_path / "plain")),
        (str(tmp_path / name), f"{tmp_path}/out/{name}"),
        (f"{bucket}/{name}", f"{bucket}/out/{name}"),
    ):
        ran = prep("--src", src, "--out", out, "--res", "32", "--workers", 1)
        assert ran.status == 0, ran.err
        assert verify(["--shards", out]) == 0
        with ShardSet.open(out) as shards:
            hashes.add(shards.hash)
            assert len(shards.splits["train"]) > 20
    assert len(hashes) == 1


@pytest.mark.slow
def test_a_failed_upload_leaves_no_object_and_the_resumed_set_from_photos_on_s3_equals_the_local_one(
    bucket: str, photos: Path, tmp_path: Path, prep: Prep, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in [*photos.rglob("*.JPEG")]:  # half of them will do
        path.unlink()
    fsspec.filesystem("s3").put(f"{photos}/", f"{bucket}/photos/", recursive=True)
    options = ("--res", "32,48", "--shard-samples", 20)
    argv = ("--src", f"{bucket}/photos", "--out", f"{bucket}/set", *options)
    put = ObstoreFS._put_file

    async def refuse(self: Any, local: str, remote: str, *args: Any, **kwargs: Any) -> Any:
        if remote.endswith("48/train-000001.tar"):
            raise OSError(5, "connection lost")
        return await put(self, local, remote, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(ObstoreFS, "_put_file", refuse)
        obstore_fs.cache_clear()  # why: instances keep the methods that they were made with
        ran = prep(*argv, "--workers", 4)  # so many that this process writes the three shards
    obstore_fs.cache_clear()
    assert ran.status == 2
    assert "connection lost" in ran.err
    assert "48/train-000001.tar" in ran.err
    there = contents(f"{bucket}/set")
    assert not {"manifest.json", "48/train-000001.tar"} & there.keys()
    assert not [name for name in there if name.startswith(LOCK)]
    ran = prep(*argv)
    assert ran.status == 0, ran.err
    assert re.search(r"kept \d+ shard", ran.out)
    assert prep("--src", photos, "--out", tmp_path / "s", *options).status == 0
    assert contents(f"{bucket}/set") == tree(tmp_path / "s")
    assert "already there" in prep(*argv).out


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
    whole = OutputBucket._fs
    assert isinstance(whole, property)
    get = whole.fget
    assert get is not None
    monkeypatch.setattr(OutputBucket, "_fs", property(lambda store: Hooked(get(store), hook)))


def leave_lock(store: Any, name: str, age_s: float) -> None:
    """Write the lock of a killed run, last renewed `age_s` seconds ago."""
    record = {"host": "elsewhere", "pid": 7, "since": "long ago", "token": "another's", "renewed": time.time() - age_s}
    store.put(f"{LOCK}/{name}", json.dumps(record).encode())


@pytest.mark.parametrize("left_behind", [False, True])
def test_only_one_of_two_concurrent_writers_gets_the_lock(
    bucket: str, monkeypatch: pytest.MonkeyPatch, left_behind: bool
) -> None:
    first_store, second_store = open_output(f"{bucket}/set"), open_output(f"{bucket}/set")
    if left_behind:
        leave_lock(second_store, "00000007", age_s=61)
    inside: list[str] = []
    with ExitStack() as second:

        def overtake(path: str) -> None:
            if LOCK in path and not inside:  # the first has looked, and is about to write
                inside.append("second")
                second.enter_context(second_store.exclusive_lock())

        before_writes(monkeypatch, overtake)
        message = rf"another prep is writing here, got host .*, pid {os.getpid()}, since"
        with pytest.raises(ResoluteError, match=message), first_store.exclusive_lock():
            inside.append("first")
        assert inside == ["second"]
        assert len(second_store.names(LOCK)) == 1
        second_store.write("a.bin", b"1")
    assert second_store.names(LOCK) == []


def test_a_lock_is_taken_over_only_after_it_expired(bucket: str) -> None:
    store = open_output(f"{bucket}/set")
    leave_lock(store, "00000001", age_s=10)
    message = r"got host elsewhere, pid 7, since long ago, last renewed \d+ s ago"
    with pytest.raises(ResoluteError, match=message), store.exclusive_lock():
        raise AssertionError("two writers")
    leave_lock(store, "00000001", age_s=61)
    with store.exclusive_lock():
        assert store.names(LOCK) == ["00000002"]
    assert store.names(LOCK) == []


@pytest.mark.timing
def test_a_writer_that_cannot_renew_its_lock_stops_before_it_expires(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, now = open_output(f"{bucket}/set"), lease._clock
    with store.exclusive_lock():
        monkeypatch.setattr(lease, "_clock", lambda: now() + 49)
        store.write("a.bin", b"1")
        for clock in (lambda: now() + 51, now):  # a lost lock stays lost
            monkeypatch.setattr(lease, "_clock", clock)
            with pytest.raises(StorageError, match="got no renewal for 50 s"):
                store.write("b.bin", b"1")
    assert store.names() == ["a.bin"]


def test_a_lock_is_renewed_during_the_run_even_after_a_failed_renewal(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "_RENEW_S", 0.05)
    store = open_output(f"{bucket}/set")
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
        first, deadline = renewed(), time.monotonic() + 60
        while not (failed and renewed() > first) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert failed
        assert renewed() > first


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 2])  # written by a worker, and by the main process
def test_a_run_that_loses_its_lock_ends_with_one_line_and_without_a_manifest(
    s3_server: str,  # noqa: F811
    proxy: FaultyProxy,  # noqa: F811
    photos: Path,
    prep: Prep,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    store = open_output(f"{s3_server}/set")
    written: list[str] = []  # by this process
    overtaken: list[str] = []

    def overtake(path: str) -> None:
        if path.endswith(f"train-00000{number}-32.rec") and not overtaken:
            overtaken.append(path)
            leave_lock(store, "00000001", age_s=0)  # in place of the run's own

    before_writes(monkeypatch, written.append)
    proxy.before_put = overtake
    ran = prep("--src", photos, "--out", f"{s3_server}/set", "--res", "32,48", "--shard-samples", 20)
    assert any(f"/{path}".endswith(overtaken[0]) for path in written) == (number == 2)
    assert (ran.status, ran.err.count("\n")) == (2, 1), ran.err
    assert "this run has lost its lock on OUT" in ran.err
    assert store.size("manifest.json") is None
    assert json.loads(store.read(f"{LOCK}/00000001"))["token"] == "another's"


def test_a_second_writer_of_a_folder_is_refused_with_the_name_of_the_first(
    tmp_path: Path, photos: Path, prep: Prep
) -> None:
    argv = ("--src", photos, "--out", tmp_path / "set", "--res", "32")
    with open_output(str(tmp_path / "set")).exclusive_lock():
        ran = prep(*argv)
    assert (ran.status, ran.err.count("\n")) == (2, 1), ran.err
    assert f"another prep is writing here, got host {socket.gethostname()}, pid {os.getpid()}, since" in ran.err
    assert not list((tmp_path / "set").rglob("*.tar"))
    assert prep(*argv).status == 0
    assert not (tmp_path / "set" / ".prep").exists()


def test_a_bucket_that_does_not_exist_is_reported_in_one_line(bucket: str, photos: Path, prep: Prep) -> None:
    ran = prep("--src", photos, "--out", "s3://there-is-no-such-bucket/set", "--res", "32")
    assert (ran.status, ran.err.count("\n")) == (2, 1), ran.err
    assert "s3://there-is-no-such-bucket/set" in ran.err
    assert "the store refused" in ran.err


def test_the_scratch_folder_of_a_killed_process_is_deleted_and_one_in_use_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    killed = (
        "import os; from resolute.scratch import ScratchFolder; folder = ScratchFolder();"
        "(folder.path / 'scan_cache').write_bytes(b'x'); os.kill(os.getpid(), 9)"
    )
    used = ScratchFolder()
    subprocess.run([sys.executable, "-c", killed], env={**os.environ, "TMPDIR": str(tmp_path / "tmp")}, check=False)
    assert len(list((tmp_path / "tmp").iterdir())) == 2
    with ScratchFolder() as folder:
        assert set((tmp_path / "tmp").iterdir()) == {folder, used.path}
    used.close()
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.slow
def test_partial_files_of_a_killed_source_scan_are_deleted_by_the_next(tmp_path: Path, work: Path) -> None:
    source = tmp_path / "x.tar.gz"
    source.write_bytes(b"x")
    killed = (
        "import os, sys; from pathlib import Path; from resolute.prep.sources.scan_cache import cached_scan, scan_all\n"
        "def fill(out):\n"
        "    out.add('a.jpg', ['a'], b'half'); os.kill(os.getpid(), 9)\n"
        "folder, path = Path(sys.argv[1]), sys.argv[2]\n"
        "scan_all(folder, lambda path, stop: cached_scan(folder, path, 'how', fill, unpacks=True), [path])"
    )
    for _ in range(2):
        subprocess.run([sys.executable, "-c", killed, work, source], check=False)
        assert len(list(work.iterdir())) == 2  # of this attempt alone
    fill = partial(cached_scan, work, how="how", fill=lambda out: out.add("a.jpg", ["a"], b"whole"), unpacks=True)
    scan_all(work, lambda path, stop: fill(path), [str(source)])
    assert sorted(path.suffix for path in work.iterdir()) == [".blob", ".json", ".rows"]


@pytest.mark.parametrize("kind", ["folder", "s3", "hub"])
def test_stores_behave_alike(tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> None:
    if kind == "hub":
        hub = request.getfixturevalue("hub")
        (hub.root / "user" / "set").mkdir(parents=True)
    store = open_output(
        {
            "folder": lambda: str(tmp_path / "set"),
            "s3": lambda: request.getfixturevalue("bucket") + "/alike",
            "hub": lambda: "hf://datasets/user/set/shards",
        }[kind]()
    )
    assert isinstance(store, LocalStore if kind == "folder" else OutputBucket)
    assert (store.size("a/b.bin"), store.names("a"), store.folders()) == (None, [], [])
    with pytest.raises(FileNotFoundError):
        store.read("a/b.bin")
    with store.create("a/b.bin") as part:
        part.write(b"12")
        part.write(b"345")
    assert part.info().nbytes == 5
    with store.open("a/b.bin") as file:
        file.seek(3)
        assert file.read() == b"45"
    for data in (b"12345", b"123", b""):
        store.write("a/b.bin", data)
        assert (store.size("a/b.bin"), store.read("a/b.bin")) == (len(data), data)
        assert store.local("a/b.bin", tmp_path).read_bytes() == data
    store.write("c.json", b"{}")
    half = store.create("a/half.bin")
    half.write(b"12")
    half.discard()
    assert (store.names(), store.names("a"), store.folders()) == (["c.json"], ["b.bin"], ["a"])
    with (
        store.exclusive_lock(),
        pytest.raises(ResoluteError, match="another prep is writing here"),
        open_output(store.url if isinstance(store, OutputBucket) else store.where).exclusive_lock(),
    ):
        pass
    store.remove("a/b.bin")
    store.remove("a/b.bin")
    store.remove_folder("a")
    assert (store.names(), store.names("a")) == (["c.json"], [])
    assert kind == "hub" or store.folders() == []  # why: the hub of the tests keeps empty folders
    if isinstance(store, OutputBucket):
        assert (store.put_new("d", b"1"), store.put_new("d", b"2")) == (True, False)


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_a_pinned_copy_makes_no_file_appear_once_the_file_is_another(tmp_path: Path, bucket: str, kind: str) -> None:
    store = open_output(str(tmp_path / "set") if kind == "folder" else f"{bucket}/set")
    store.write("plan", b"one")
    job = pickle.loads(pickle.dumps(store.pinned("plan")))
    job.write("a.bin", b"1")
    late = job.create("late.bin")
    late.write(b"1")
    store.write("plan", b"two")
    with pytest.raises(StorageError, match="no longer the set that this job works on, got another plan at plan"):
        late.close()
    store.remove("plan")
    with pytest.raises(StorageError, match="got no plan at plan"):
        job.write("48/b.bin", b"1")
    assert store.names() == ["a.bin"]
    assert store.folders() == []  # why: a folder made on the local disk would hide a shared one that is away


@pytest.mark.slow
def test_many_objects_are_read_by_processes_in_order(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_output(f"{bucket}/set")
    files = {f"x/{number:04d}": b"%d" % number for number in range(100)}
    for name, data in files.items():
        store.write_small(name, data)
    monkeypatch.setattr("resolute.prep.storage.bulk._MANY", 100)
    monkeypatch.setattr("resolute.prep.storage.bulk._CHUNK_FILES", 30)
    monkeypatch.setattr("resolute.prep.storage.bulk.available_cpus", lambda: 3)
    monkeypatch.setattr(OutputBucket, "read", None)  # in this process
    assert list(read_many(store, ["x/missing", *files])) == [b"", *files.values()]
