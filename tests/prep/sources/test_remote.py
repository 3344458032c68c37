"""Every source format is read from an object store and a web server as from a local disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from resolute.errors import ResoluteError, StorageError
from resolute.prep.sources.fetch import fetch_many
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


def test_every_source_format_is_read_from_an_object_store(tmp_path: Path, work: Path, s3_server: str) -> None:  # noqa: F811
    files = make_tree(tmp_path / "photos")
    del files["dog/line\nbreak.jpg"]  # why: moto, not S3, loses it
    (tmp_path / "photos" / "dog" / "line\nbreak.jpg").unlink()
    fs = fsspec.filesystem("s3")
    for name, data in files.items():
        fs.pipe(f"{s3_server}/photos/{name}", data)
    fs.pipe(f"{s3_server}/photos/empty/", b"")
    for how in ("zip", "tar", "tar.gz"):
        path = pack(tmp_path, how, files, "photos/")
        fs.pipe(f"{s3_server}/{path.name}", path.read_bytes())
    for src in ("photos", "p.zip", "p.tar", "p.tar.gz"):
        got = list_source(work, f"{s3_server}/{src}")
        assert_same_images(got, files)
    samples = pack_samples(tmp_path / "x-0.tar", [("0.jpg", jpeg(0), {"cls": b"0"}), ("1.jpg", jpeg(1), {"cls": b"1"})])
    rows = pack_parquet(tmp_path / "x.parquet", [(jpeg(i), "", i % 2) for i in range(4)], None)
    table = pack_table(tmp_path / "list.csv", [(f"photos/{name}", name.partition("/")[0]) for name in files])
    for path in (samples, rows, table):
        fs.pipe(f"{s3_server}/{path.name}", path.read_bytes())
    assert len(list_source(work, f"{s3_server}/x-{{0..0}}.tar")) == 2
    assert len(list_source(work, f"{s3_server}/x-*.tar")) == 2
    assert len(list_source(work, f"{s3_server}/x.parquet")) == 4
    got = list_source(work, f"{s3_server}/list.csv")
    assert contents(got) == list(files.values())


@pytest.fixture
def http(tmp_path: Path) -> Iterator[str]:
    with serving(tmp_path) as port:
        yield f"http://127.0.0.1:{port}"


def test_archives_are_read_from_a_web_server(tmp_path: Path, work: Path, http: str) -> None:
    files = make_tree(tmp_path / "photos")
    for how in ("zip", "tar", "tar.gz"):
        assert_same_images(list_source(work, f"{http}/{pack(tmp_path, how, files, '').name}"), files)
    pack_samples(tmp_path / "x-00.tar", [("0.jpg", jpeg(0), {"cls": b"0"}), ("1.jpg", jpeg(1), {"cls": b"1"})])
    assert len(list_source(work, f"{http}/x-{{00..00}}.tar")) == 2
    with pytest.raises(ResoluteError, match="cannot be read"):
        list_source(work, f"{http}/gone.zip")


def test_a_web_server_without_byte_ranges_is_refused_where_they_are_needed(
    tmp_path: Path, work: Path, http: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RangeHandler, "ranges", False)
    files = make_tree(tmp_path / "photos")
    assert_same_images(list_source(work, f"{http}/{pack(tmp_path, 'tar.gz', files, '').name}"), files)
    with pytest.raises(ResoluteError, match=r"p\.zip: cannot be read, got The HTTP server .* range requests"):
        assert_same_images(list_source(work, f"{http}/{pack(tmp_path, 'zip', files, '').name}"), files)


class RefusingHandler(RangeHandler):
    """Answers with the status that the name of a file begins with; the first `busy` times with 503."""

    busy = 0

    def do_GET(self) -> None:
        status = Path(self.path).name.partition("-")[0]
        if not status.isdecimal():
            return super().do_GET()
        if type(self).busy:
            type(self).busy -= 1
            status = "503"
        self.send_error(int(status))
        return None


@pytest.mark.parametrize("status", [403, 404])
def test_a_permanent_answer_of_a_web_server_rejects_its_photo_with_url_and_status(
    tmp_path: Path, prep: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    files = make_tree(tmp_path / "photos")
    monkeypatch.setattr(RefusingHandler, "busy", 1)
    with serving(tmp_path / "photos", RefusingHandler) as port:
        url = f"http://127.0.0.1:{port}"
        names = [name for name in files if name.isascii() and "\n" not in name and " " not in name]
        rows = [(f"{url}/{name}", name.partition("/")[0]) for name in names]
        table = pack_table(tmp_path / "list.csv", [*rows, (f"{url}/{status}-x.jpg?token=secret", rows[0][1])])
        ran = prep("--src", table, "--out", tmp_path / "out", "--res", "32", "--val-frac", 0, "--max-bad", 0.5)
        assert ran.status == 0, ran.err
        (row,) = map(json.loads, (tmp_path / "out" / "rejects.jsonl").read_text().splitlines())
        assert row["path"] == f"{url}/{status}-x.jpg?token=***"
        assert row["reason"].endswith(f"'HTTP status {status}'")
        ran = prep("--src", table, "--out", tmp_path / "strict", "--res", "32", "--val-frac", 0, "--max-bad", 0)
        assert (ran.status, "too many unusable images, got 1 of" in ran.err) == (2, True), ran.err


@pytest.mark.parametrize("status", [407, 408, 429, 500, 503])
def test_an_answer_that_may_change_rejects_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr("resolute.prep.sources.fetch._REMOTE_WAITS_S", (0.0, 0.0))
    with serving(tmp_path, RefusingHandler) as port:
        url = f"http://127.0.0.1:{port}"
        with pytest.raises(StorageError, match=f"got 'HTTP status {status}' 3 times"):
            fetch_many([ByteRange(f"{url}/{status}-x.jpg", packed=UNSEEN)])
        rejects = fetch_many([ByteRange(f"{url}/{each}-x.jpg", packed=UNSEEN) for each in (400, 401, 410, 451)])
        assert list(map(str, rejects)) == [
            "refused: 'HTTP status 400'", "refused: 'HTTP status 401'", "not there: 'HTTP status 410'",
            "refused: 'HTTP status 451'",
        ]  # fmt: skip
        with pytest.raises(StorageError, match="got 'HTTP status 403' 3 times"):  # of an archive
            fetch_many([ByteRange(f"{url}/403-x.tar", 0, 4)])
