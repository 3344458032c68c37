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
    for name, data in [*((f"photos/{name}", data) for name, data in files.items()), ("photos/empty/", b""),
                       *((path.name, path.read_bytes()) for path in packed)]:  # fmt: skip
        fs.pipe(f"{s3_server}/{name}", data)
    for src in ("photos", "p.zip", "p.tar", "p.tar.gz"):
        assert_same_images(list_source(work, f"{s3_server}/{src}"), files)
    for src, photos in (("x-{0..0}.tar", 2), ("x-*.tar", 2), ("x.parquet", 4)):
        assert len(list_source(work, f"{s3_server}/{src}")) == photos
    assert contents(list_source(work, f"{s3_server}/list.csv")) == list(files.values())


@pytest.fixture
def http(tmp_path: Path) -> Iterator[str]:
    with serving(tmp_path) as port:
        yield f"http://127.0.0.1:{port}"


def test_archives_are_read_from_a_web_server(tmp_path: Path, work: Path, http: str) -> None:
    files = make_tree(tmp_path / "photos")
    for how in ("zip", "tar", "tar.gz"):
        assert_same_images(list_source(work, f"{http}/{pack(tmp_path, how, files, '').name}"), files)
    pack_samples(tmp_path / "x-00.tar", SAMPLES)
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
    """Answers with the status that the name of a file begins with."""

    def do_GET(self) -> None:
        status = Path(self.path).name.partition("-")[0]
        if status.isdecimal():
            self.send_error(int(status))
        else:
            super().do_GET()


def test_a_permanent_answer_of_a_web_server_rejects_its_photo_with_url_and_status(
    tmp_path: Path, prep: Callable[..., Any]
) -> None:
    files = make_tree(tmp_path / "photos")
    names = [name for name in files if name.isascii() and "\n" not in name and " " not in name]
    with serving(tmp_path / "photos", RefusingHandler) as port:
        url = f"http://127.0.0.1:{port}"
        rows = [(f"{url}/{name}", name.partition("/")[0]) for name in names]
        table = pack_table(tmp_path / "list.csv", [*rows, (f"{url}/404-x.jpg?token=secret", "cat")])
        ran = prep("--src", table, "--out", tmp_path / "out", "--res", "32", "--val-frac", 0, "--max-bad", 0.5)
    assert ran.status == 0, ran.err
    (row,) = map(json.loads, (tmp_path / "out" / "rejects.jsonl").read_text().splitlines())
    assert row["path"] == f"{url}/404-x.jpg?token=***"
    assert row["reason"].endswith("'HTTP status 404'")


def test_an_answer_that_may_change_rejects_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resolute.prep.sources.fetch._REMOTE_WAITS_S", (0.0, 0.0))
    with serving(tmp_path, RefusingHandler) as port:
        url = f"http://127.0.0.1:{port}"
        for status in (407, 408, 429, 500, 503):
            with pytest.raises(StorageError, match=f"got 'HTTP status {status}' 3 times"):
                fetch_many([ByteRange(f"{url}/{status}-x.jpg", packed=UNSEEN)])
        rejects = fetch_many([ByteRange(f"{url}/{status}-x.jpg", packed=UNSEEN) for status in (400, 401, 410, 451)])
        assert list(map(str, rejects)) == [
            "refused: 'HTTP status 400'", "refused: 'HTTP status 401'", "not there: 'HTTP status 410'",
            "refused: 'HTTP status 451'",
        ]  # fmt: skip
        with pytest.raises(StorageError, match="got 'HTTP status 403' 3 times"):  # of an archive
            fetch_many([ByteRange(f"{url}/403-x.tar", 0, 4)])
