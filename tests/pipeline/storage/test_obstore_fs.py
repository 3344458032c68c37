"""The file system of object stores: complete uploads, true conditional creation, errors that say what happened."""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest

from resolute.errors import Interrupted, ResoluteError, StorageError
from resolute.pipeline.storage import obstore_fs as object_file_system
from resolute.pipeline.storage.cancel import CancelScope
from resolute.pipeline.storage.drivers import file_system, obstore_fs
from resolute.pipeline.storage.obstore_client import requests_within
from resolute.pipeline.storage.request_errors import http_status
from resolute.prep.sources.fetch import fetch_many
from resolute.prep.sources.filesystem import expand_pattern, list_folder, open_file, path_kind
from resolute.prep.sources.image_ref import ByteRange
from resolute.prep.storage.output import open_output
from tests.support.s3 import FaultyProxy, proxy, s3_server  # noqa: F401  # fixtures

NAMES = ("a b", "a%20b", "a+b", "\u00e4", "a#b?c", "[x]{y}", "~", "a&b;=@:,")


def uploads(url: str) -> list[Any]:
    """Multipart uploads that have not ended."""
    fs = fsspec.filesystem("s3")
    answer = fs.call_s3("list_multipart_uploads", Bucket=url.removeprefix("s3://"))
    return list(answer.get("Uploads") or [])


def test_files_are_listed_read_and_deleted_without_another_driver(
    s3_server: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    store = open_output(f"{s3_server}/photos")
    for name in NAMES:
        store.write(f"x/{name}", name.encode())
    assert store.names("x") == sorted(NAMES)
    assert [entry.name for entry in list_folder(f"{s3_server}/photos/x/")] == sorted(NAMES, key=str.encode)
    assert fetch_many([ByteRange(f"{s3_server}/photos/x/{name}") for name in NAMES]) == [*map(str.encode, NAMES)]
    assert [path_kind(f"{s3_server}/{path}") for path in ("photos", "photos/x/~", "photo", "")] == [
        "folder",
        "file",
        "",
        "folder",
    ]
    assert expand_pattern(f"{s3_server}/p*/x/a?b") == [f"{s3_server}/photos/x/{name}" for name in ("a b", "a+b")]
    assert store.local("x/~", tmp_path).read_bytes() == b"~"
    store.remove_all([f"x/{name}" for name in (*NAMES, "gone")])
    assert store.folders() == []


def test_an_open_file_is_read_in_blocks_as_a_local_one(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(object_file_system, "_FIRST_BLOCK_BYTES", 16)
    monkeypatch.setattr(object_file_system, "_BLOCK_BYTES", 64)
    monkeypatch.setattr(object_file_system, "_SKIPPED_BYTES", 32)
    data = os.urandom(40_000)
    store = open_output(f"{s3_server}/x")
    store.write("data", data)
    store.write("empty", b"")
    with open_file(f"{s3_server}/x/empty") as file:
        assert (file.read(), file.seek(0, io.SEEK_END)) == (b"", 0)
    with open_file(f"{s3_server}/x/data") as file:
        for at, nbytes in ((0, 10), (10, 300), (330, 9), (39_990, 30), (5, 20_000), (39_999, 1), (40_000, 1)):
            assert file.seek(at) == at
            assert file.read(nbytes) == data[at : at + nbytes]
        assert file.seek(-4, io.SEEK_END) == 39_996
        assert file.read() == data[-4:]


@pytest.mark.slow
def test_a_large_upload_is_complete_or_leaves_no_object(s3_server: str, proxy: FaultyProxy) -> None:  # noqa: F811
    """One that was refused leaves no parts either."""
    store, data = open_output(f"{s3_server}/x"), os.urandom(20 << 20)
    store.write("whole", data)
    assert store.read("whole") == data
    proxy.before_put = lambda path: 403 if "partNumber=2" in path else None
    with pytest.raises(ResoluteError, match="x/half: the store refused the request, got 'HTTP status 403'"):
        store.write("half", data)
    proxy.before_put = lambda path: None
    stop = time.monotonic() + 60
    while uploads(s3_server) and time.monotonic() < stop:  # of parts that were on their way
        time.sleep(0.5)
    assert uploads(s3_server) == []
    assert store.names() == ["whole"]


@pytest.mark.parametrize(("fault", "words"), [(503, "got 'HTTP status 503'"), (403, "got 'HTTP status 403'")])
def test_refused_and_unavailable_reads_are_one_line(
    s3_server: str,  # noqa: F811
    proxy: FaultyProxy,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    fault: int,
    words: str,
) -> None:
    monkeypatch.setattr(object_file_system, "_TRIES", 2)
    store = open_output(f"{s3_server}/x")
    store.write("a.tar", b"1234")
    proxy.faults.extend([fault] * (1 if fault == 403 else 2))
    with pytest.raises(ResoluteError, match=f"s3://bucket/x/a.tar: the store refused the request, {words}") as refused:
        store.read("a.tar")
    assert "\n" not in str(refused.value)
    assert store.read("a.tar") == b"1234"


def test_a_body_that_ends_early_is_not_taken_for_the_object(s3_server: str, proxy: FaultyProxy) -> None:  # noqa: F811
    store = open_output(f"{s3_server}/x")
    store.write("a", bytes(1000))
    proxy.faults.append("short")
    fs, path = file_system(f"{s3_server}/x/a")
    with pytest.raises(OSError, match="broke off after 400 of 800 bytes"):
        fs.cat_file(path, 0, 800)
    with pytest.raises(FileNotFoundError) as missing:
        fs.cat_file(f"{path}/b")
    assert http_status(missing.value) == 404


def test_a_store_that_does_not_answer_is_not_taken_for_an_empty_one(
    s3_server: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(object_file_system, "_TRIES", 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    obstore_fs.cache_clear()
    for read in (
        lambda: expand_pattern(f"{s3_server}/x/*/a-*.tar"),
        lambda: list_folder(f"{s3_server}/x"),
        lambda: path_kind(f"{s3_server}/x"),
    ):
        with pytest.raises(StorageError, match=r"s3://bucket/x.*: cannot be listed, got HTTP error: error sending"):
            read()


@pytest.mark.timing
def test_a_cancelled_scope_ends_its_own_requests_and_no_others(request: pytest.FixtureRequest) -> None:
    """As when one of several scans fails while something else in the process reads."""
    url, slow = request.getfixturevalue("s3_server"), request.getfixturevalue("proxy")
    open_output(f"{url}/x").write("a", b"1234")
    fs, path = file_system(f"{url}/x/a")
    scope, answers = CancelScope(), dict[str, object]()
    slow.slow_bytes_per_s = 4  # the answer takes a second

    def read(name: str, scope: CancelScope) -> None:
        with requests_within(scope):
            try:
                answers[name] = fs.cat_file(path)
            except Interrupted as error:
                answers[name] = error

    readers = [threading.Thread(target=read, args=each) for each in (("own", scope), ("other", CancelScope()))]
    for reader in readers:
        reader.start()
    while slow.max_concurrent < 2:
        time.sleep(0.01)
    scope.cancel()
    readers[0].join()
    assert isinstance(answers.pop("own"), Interrupted)
    assert answers == {}
    readers[1].join()
    assert answers == {"other": b"1234"}
    read("later", scope)
    assert isinstance(answers["later"], Interrupted)
