"""Every source format is read from an object store and a web server as from a local disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from pipeline.errors import ResoluteError
from prep.sources.fetch import fetch_many
from tests.support.http_server import RangeHandler, serving
from tests.support.s3 import s3_server  # noqa: F401
from tests.support.source_formats import (
    assert_same_images,
    catalog,
    jpeg,
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
        got = catalog(work, f"{s3_server}/{src}")
        assert_same_images(got, files)
    samples = pack_samples(tmp_path / "x-0.tar", [("0.jpg", jpeg(0), {"cls": b"0"}), ("1.jpg", jpeg(1), {"cls": b"1"})])
    rows = pack_parquet(tmp_path / "x.parquet", [(jpeg(i), "", i % 2) for i in range(4)], None)
    table = pack_table(tmp_path / "list.csv", [(f"photos/{name}", name.partition("/")[0]) for name in files])
    for path in (samples, rows, table):
        fs.pipe(f"{s3_server}/{path.name}", path.read_bytes())
    assert len(catalog(work, f"{s3_server}/x-{{0..0}}.tar")) == 2
    assert len(catalog(work, f"{s3_server}/x-*.tar")) == 2
    assert len(catalog(work, f"{s3_server}/x.parquet")) == 4
    got = catalog(work, f"{s3_server}/list.csv")
    assert fetch_many([got.byte_range(i) for i in range(len(got))]) == list(files.values())


@pytest.fixture
def http(tmp_path: Path) -> Iterator[str]:
    with serving(tmp_path) as port:
        yield f"http://127.0.0.1:{port}"


def test_archives_are_read_from_a_web_server(tmp_path: Path, work: Path, http: str) -> None:
    files = make_tree(tmp_path / "photos")
    for how in ("zip", "tar", "tar.gz"):
        assert_same_images(catalog(work, f"{http}/{pack(tmp_path, how, files, '').name}"), files)
    pack_samples(tmp_path / "x-00.tar", [("0.jpg", jpeg(0), {"cls": b"0"}), ("1.jpg", jpeg(1), {"cls": b"1"})])
    assert len(catalog(work, f"{http}/x-{{00..00}}.tar")) == 2
    with pytest.raises(ResoluteError, match="cannot be read"):
        catalog(work, f"{http}/gone.zip")


def test_a_web_server_without_byte_ranges_is_refused_where_they_are_needed(
    tmp_path: Path, work: Path, http: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RangeHandler, "ranges", False)
    files = make_tree(tmp_path / "photos")
    assert_same_images(catalog(work, f"{http}/{pack(tmp_path, 'tar.gz', files, '').name}"), files)
    with pytest.raises(ResoluteError, match=r"p\.zip: its server ignores byte ranges"):
        assert_same_images(catalog(work, f"{http}/{pack(tmp_path, 'zip', files, '').name}"), files)
