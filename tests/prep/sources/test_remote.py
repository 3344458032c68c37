"""Every source format is read from an object store as from a local disk, and answers of web servers are told apart."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from resolute.errors import StorageError
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
        rejects = fetch_many([ByteRange(f"{url}/{status}-x.jpg", packed=UNSEEN) for status in statuses])
        assert list(map(str, rejects)) == [
            f"{'not there' if status in (404, 410) else 'refused'}: 'HTTP status {status}'" for status in statuses
        ]
        for status in (407, 408, 429, 500, 503):
            with pytest.raises(StorageError, match=f"got 'HTTP status {status}' 3 times"):
                fetch_many([ByteRange(f"{url}/{status}-x.jpg", packed=UNSEEN)])
        with pytest.raises(StorageError, match="got 'HTTP status 403' 3 times"):  # of an archive
            fetch_many([ByteRange(f"{url}/403-x.tar", 0, 4)])
