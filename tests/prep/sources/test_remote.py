"""Every source format is read from an object store as from a local disk, and answers of web servers are told apart."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import fsspec
import pytest

from resolute.errors import ResoluteError, StorageError
from resolute.prep.convert.batch import Batch, EncodeOptions
from resolute.prep.convert.decode import Reject
from resolute.prep.run.worker import convert
from resolute.prep.sources import fetch as fetching
from resolute.prep.sources import web
from resolute.prep.sources.fetch import fetch, fetch_many
from resolute.prep.sources.image_ref import UNSEEN, ByteRange
from tests.support.http_server import RangeHandler, serving
from tests.support.s3 import s3_server  # noqa: F401
from tests.support.source_formats import (
    assert_same_images,
    contents,
    jpeg,
    list_source,
    make_tree,
    pack,
    pack_parquet,
    pack_samples,
    pack_table,
)

SAMPLES = [(f"{label}.jpg", jpeg(label), {"cls": b"%d" % label}) for label in range(2)]


def test_every_source_format_is_read_from_an_object_store(tmp_path: Path, work: Path, s3_server: str) -> None:  # noqa: F811
    files = make_tree(tmp_path / "photos")
    del files["dog/line\nbreak.jpg"]  # why: moto, not S3, loses it
    (tmp_path / "photos" / "dog" / "line\nbreak.jpg").unlink()
    packed = [pack(tmp_path, how, files, "photos/") for how in ("zip", "tar", "tar.gz")]
    packed.append(pack_samples(tmp_path / "x-0.tar", SAMPLES))
    packed.append(pack_parquet(tmp_path / "x.parquet", [(jpeg(i), "", i % 2) for i in range(4)], None))
    rows = [(f"photos/{name}", name.partition("/")[0]) for name in files]
    packed.append(pack_table(tmp_path / "list.csv", rows))
    fs = fsspec.filesystem("s3")
    for name, data in [
        *((f"photos/{name}", data) for name, data in files.items()),
        ("photos/empty/", b""),
        *((path.name, path.read_bytes()) for path in packed),
    ]:
        fs.pipe(f"{s3_server}/{name}", data)
    for src in ("photos", "p.zip", "p.tar", "p.tar.gz"):
        assert_same_images(list_source(work, f"{s3_server}/{src}"), files)
    for src, photos in (("x-{0..0}.tar", 2), ("x-*.tar", 2), ("x.parquet", 4)):
        assert len(list_source(work, f"{s3_server}/{src}")) == photos
    assert contents(list_source(work, f"{s3_server}/list.csv")) == list(files.values())


class RefusingHandler(RangeHandler):
    """Answers with the status that the name of a file begins with."""

    def do_GET(self) -> None:
        status = Path(self.path).name.partition("-")[0]
        if status.isdecimal():
            self.send_error(int(status))
        else:
            super().do_GET()


def test_a_permanent_answer_of_a_web_server_rejects_its_photo_and_one_that_may_change_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resolute.prep.sources.fetch._REMOTE_WAITS_S", (0.0, 0.0))
    with serving(tmp_path, RefusingHandler) as port:
        url = f"http://127.0.0.1:{port}"
        statuses = (400, 401, 403, 404, 410, 451)
        rejects = fetch_many([ByteRange(f"{url}/{status}-x.jpg", stored_as=UNSEEN) for status in statuses])
        assert list(map(str, rejects)) == [
            f"{'not there' if status in (404, 410) else 'refused'}: 'HTTP status {status}'" for status in statuses
        ]
        for status in (407, 408, 429, 500, 503):
            with pytest.raises(StorageError, match=f"got 'HTTP status {status}' 3 times"):
                fetch_many([ByteRange(f"{url}/{status}-x.jpg", stored_as=UNSEEN)])
        with pytest.raises(StorageError, match="got 'HTTP status 403' 3 times"):  # of an archive
            fetch_many([ByteRange(f"{url}/403-x.tar", 0, 4)])


class FailingHandler(RangeHandler):
    """Fails as `how` says: an HTTP status, "hang" until `released`, or "drop" the connection."""

    how: int | str = 503
    released = threading.Event()
    asked = 0

    def do_GET(self) -> None:
        type(self).asked += 1
        if isinstance(self.how, int):
            self.send_error(self.how)
            return
        if self.how == "hang":
            self.released.wait(30)
        self.close_connection = True


@contextmanager
def failing_server(folder: Path, how: int | str) -> Iterator[tuple[str, type[FailingHandler]]]:
    """The URL of a server that fails, "refuse" included."""
    released = threading.Event()
    handler = type("Handler", (FailingHandler,), {"how": how, "released": released, "asked": 0})
    with ExitStack() as stack:
        with ExitStack() as refused:
            port = (refused if how == "refuse" else stack).enter_context(serving(folder, handler))
        stack.callback(released.set)
        yield f"http://127.0.0.1:{port}", handler


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits for web servers, and no memory of those that failed before."""
    monkeypatch.setattr(fetching, "_REMOTE_WAITS_S", (0.0, 0.0))
    monkeypatch.setattr(fetching, "_PHOTO_S", 1.0)
    monkeypatch.setattr(web, "STALL_S", 0.1)
    fetching._failing_hosts.clear()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["refuse", "hang", "drop", 500, 503])
def test_photos_of_a_web_server_that_fails_are_rejected_while_another_one_answers(
    tmp_path: Path, quick: None, how: int | str
) -> None:
    (tmp_path / "a.jpg").write_bytes(b"data")
    with serving(tmp_path) as port, failing_server(tmp_path, how) as (url, handler):
        good = f"http://127.0.0.1:{port}/a.jpg"
        bad = [ByteRange(f"{url}/{i}.jpg", stored_as=UNSEEN) for i in range(3)]
        data, *rejects = fetch_many([ByteRange(good, stored_as=UNSEEN), *bad])
        assert data == b"data"
        host = url.removeprefix("http://")
        assert all(str(reject).startswith(f"unavailable host: {host}, got '") for reject in rejects), rejects
        if how not in ("refuse", "drop"):  # drop: aiohttp itself asks again
            assert handler.asked == 9
            fetch_many([ByteRange(good, stored_as=UNSEEN), *bad])
            assert handler.asked == 12  # the next photos of the server are asked for once
        # a batch of this server alone, and no server that answers
        for servers in ([], [f"{url}/x.jpg"]):
            with pytest.raises(StorageError, match="no other server answered either"):
                fetch_many(bad, servers=servers)
        assert all(isinstance(reject, Reject) for reject in fetch_many(bad, servers=[f"{url}/x.jpg", good]))
        with pytest.raises(StorageError, match="cannot be fetched"):  # of an archive
            fetch_many([ByteRange(f"{url}/x.tar", 512, 4), ByteRange(good, stored_as=UNSEEN)])


def test_a_photo_of_a_web_server_that_answers_again_is_read(tmp_path: Path, quick: None) -> None:
    (tmp_path / "a.jpg").write_bytes(b"data")
    with serving(tmp_path) as port, failing_server(tmp_path, 503) as (url, handler):
        good = ByteRange(f"http://127.0.0.1:{port}/a.jpg", stored_as=UNSEEN)
        bad = ByteRange(f"{url}/a.jpg", stored_as=UNSEEN)
        assert isinstance(fetch_many([good, bad])[1], Reject)
        handler.do_GET = RangeHandler.do_GET  # type: ignore[method-assign]
        assert fetch_many([good, bad]) == [b"data", b"data"]
        assert not fetching._failing_hosts


def test_a_worker_asks_the_servers_of_the_list_whether_the_network_works(
    tmp_path: Path, work: Path, quick: None
) -> None:
    (tmp_path / "a.jpg").write_bytes(jpeg(1))
    with serving(tmp_path) as port, failing_server(tmp_path, 503) as (url, _):
        rows = [(f"{url}/{i}.jpg", str(i % 2)) for i in range(3)] + [(f"http://127.0.0.1:{port}/a.jpg", "0")]
        photos = list_source(work, pack_table(tmp_path / "list.csv", rows))
        assert [server.rpartition("/")[0] for server in photos.servers] == [url, f"http://127.0.0.1:{port}"]
        bad = next(place for _, place in photos.places() if place.path.startswith(url))
        batch = Batch(first_key=0, byte_ranges=(bad,), labels=(0,), short_sides=(8,))
        options = EncodeOptions(quality=90, label_digits=4, servers=photos.servers)
        ((_, reason),) = convert(options, batch).rejects
        assert reason.startswith("unavailable host: ")


@pytest.mark.usefixtures("quick_retries")
def test_a_set_is_made_without_the_photos_of_a_web_server_that_is_gone(
    tmp_path: Path, prep: Callable[..., Any]
) -> None:
    for i in range(30):
        (tmp_path / f"{i}.jpg").write_bytes(jpeg(i))
    with serving(tmp_path) as port, failing_server(tmp_path, "refuse") as (url, _):
        rows = [(f"{url if i < 2 else f'http://127.0.0.1:{port}'}/{i}.jpg", str(i % 2)) for i in range(30)]
        words = ("--out", tmp_path / "s", "--res", 8, "--shard-samples", 1, "--val-frac", 0, "--max-bad", 0.1)
        ran = prep("--src", pack_table(tmp_path / "list.csv", rows), *words)
        assert ran.status == 0, ran.err
        rejects = (tmp_path / "s" / "rejects.jsonl").read_text()
        assert rejects.count(f"unavailable host: {url.removeprefix('http://')}, got ") == 2


class EndlessHandler(RangeHandler):
    """Ignores byte ranges, and sends a body without end."""

    sent = 0

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(1 << 40))
        self.end_headers()
        while True:
            self.wfile.write(bytes(1 << 20))
            type(self).sent += 1 << 20


def test_of_a_server_that_ignores_byte_ranges_no_more_is_read_than_was_asked_for(tmp_path: Path) -> None:
    EndlessHandler.sent = 0
    with serving(tmp_path, EndlessHandler) as port:
        url = f"http://127.0.0.1:{port}"
        with pytest.raises(
            ResoluteError, match=rf"x.tar: its server ignores byte ranges, got {1 << 40} bytes, expected 1000; use"
        ):
            fetch(ByteRange(f"{url}/x.tar", 512, 1000))
        assert fetch(ByteRange(f"{url}/x.zip", 0, 1000)) == bytes(1000)
        assert fetch_many([ByteRange(f"{url}/x.jpg", stored_as=UNSEEN)], ahead_bytes=10_000) == [None]
    assert EndlessHandler.sent < 64 << 20  # what sockets hold


def test_a_whole_file_of_a_server_that_ignores_byte_ranges_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"data")
    with serving(tmp_path, SimpleHTTPRequestHandler) as port:
        assert fetch(ByteRange(f"http://127.0.0.1:{port}/a.jpg", stored_as=UNSEEN)) == b"data"


def test_a_remote_file_whose_size_changed_since_listing_ends_the_run(work: Path) -> None:
    fs = fsspec.filesystem("memory")
    for i in range(2):
        fs.pipe(f"memory://photos/{i}/a.jpg", jpeg(i))
    photos = list_source(work, "memory://photos")
    assert contents(photos) == [jpeg(0), jpeg(1)]
    fs.pipe("memory://photos/1/a.jpg", b"half")
    with pytest.raises(
        ResoluteError, match=rf"1/a.jpg: changed since it was listed, got 4 bytes, expected {len(jpeg(1))}; wait"
    ):
        contents(photos)
