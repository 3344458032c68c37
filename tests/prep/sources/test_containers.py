"""An archive is the one that was listed, at every read: replaced, rewritten and touched archives are told apart."""

from __future__ import annotations

import gzip
import os
import shutil
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from resolute.errors import ResoluteError
from resolute.prep import build as building
from resolute.prep.run.stats import RunStats
from resolute.prep.settings import Settings
from resolute.prep.sources import fetch as fetching
from resolute.prep.sources.archives.containers import container_stamps
from resolute.prep.sources.fetch import fetch_many
from resolute.prep.sources.image_ref import ByteRange
from tests.support.http_server import RangeHandler, serving
from tests.support.s3 import s3_server  # noqa: F401  # a fixture
from tests.support.source_formats import jpeg, list_source, pack_samples, pack_tar

CHANGED = "changed since it was listed, got .*; wait until nothing writes to it, then run the same command again"


def pack_zip(path: Path, files: list[tuple[str, bytes]]) -> Path:
    """Of equal bytes for equal files, whenever it is made."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files:
            archive.writestr(zipfile.ZipInfo(name), data)
    return path


PACK = {"zip": pack_zip, "tar": pack_tar}


def members(shift: int) -> list[tuple[str, bytes]]:
    """Photos of equal sizes, so that archives of any `shift` have the same layout, but for a zip's checksums."""
    return [(f"{'ab'[n % 2]}/{n:03d}.jpg", jpeg((n + shift) % 40).ljust(3000, b"\0")) for n in range(200)]


def places(path: Path | str, work: Path) -> list[ByteRange]:
    return [place for _, place in list_source(work, path).places()]


def rename(path: Path, data: bytes) -> None:
    other = path.with_name(f"other-{path.name}")
    other.write_bytes(data)
    other.replace(path)


def rename_with_times(path: Path, data: bytes) -> None:
    other = path.with_name(f"other-{path.name}")
    other.write_bytes(data)
    shutil.copystat(path, other)
    other.replace(path)


def overwrite(path: Path, data: bytes) -> None:
    with path.open("r+b") as file:
        file.write(data)


def overwrite_with_times(path: Path, data: bytes) -> None:
    info = path.stat()
    overwrite(path, data)
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


CHANGES = [rename, rename_with_times, overwrite, overwrite_with_times]


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("how", ["zip", "tar"])
def test_no_photo_of_another_archive_is_read(
    tmp_path: Path, work: Path, how: str, change: Callable[[Path, bytes], None], opened: bool
) -> None:
    path, other = PACK[how](tmp_path / f"p.{how}", members(0)), PACK[how](tmp_path / f"q.{how}", members(1))
    asked = places(path, work)
    assert path.stat().st_size == other.stat().st_size
    fetching._container.cache_clear()
    if opened:
        assert fetch_many(asked[:1]) == [members(0)[0][1]]
    change(path, other.read_bytes())
    with pytest.raises(ResoluteError, match=f"p.{how}: {CHANGED}"):
        fetch_many(asked)


@pytest.mark.parametrize("how", ["zip", "tar"])
def test_an_archive_of_another_size_is_refused_with_both_sizes(tmp_path: Path, work: Path, how: str) -> None:
    path = PACK[how](tmp_path / f"p.{how}", members(0))
    asked, size = places(path, work), path.stat().st_size
    os.truncate(path, size // 2)
    with pytest.raises(ResoluteError, match=f"got {size // 2} bytes, expected {size}; wait"):
        fetch_many(asked)


def test_an_archive_that_is_rewritten_during_a_read_is_noticed(
    tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = pack_tar(tmp_path / "p.tar", members(0)), pack_tar(tmp_path / "q.tar", members(1))
    asked = places(path, work)
    fetch_many(asked[:1])

    def read(descriptor: int, offset: int, nbytes: int) -> bytes:
        overwrite(path, other.read_bytes())
        return os.pread(descriptor, nbytes, offset)

    monkeypatch.setattr(fetching, "_pread", read)
    with pytest.raises(ResoluteError, match=CHANGED):
        fetch_many(asked[1:2])


def test_a_zip_may_be_touched_or_copied_and_a_tar_copied_with_its_time(tmp_path: Path, work: Path) -> None:
    for how in ("zip", "tar"):
        path = PACK[how](tmp_path / f"p.{how}", members(0))
        asked, expected = places(path, work), [data for _, data in sorted(members(0))]
        assert fetch_many(asked) == expected
        rename_with_times(path, path.read_bytes())
        assert fetch_many(asked) == expected
        path.chmod(0o600)  # changes the ctime alone
        assert fetch_many(asked) == expected
        path.touch()
        if how == "zip":
            assert fetch_many(asked) == expected
            rename(path, path.read_bytes())
            assert fetch_many(asked) == expected
        else:
            with pytest.raises(ResoluteError, match=r"got .* UTC as its time of change, expected .* UTC; wait"):
                fetch_many(asked)


def test_an_archive_that_changes_while_it_is_listed_is_refused(tmp_path: Path) -> None:
    path = pack_zip(tmp_path / "p.zip", members(0))
    listed = {str(path): f"{path.stat().st_size} {path.stat().st_mtime_ns}"}
    assert container_stamps([str(path)], listed)
    path.touch()
    with pytest.raises(ResoluteError, match=CHANGED):
        container_stamps([str(path)], listed)


def test_a_scan_of_an_archive_is_not_used_for_another_one_with_its_size_and_time(tmp_path: Path, work: Path) -> None:
    path = pack_zip(tmp_path / "p.zip", members(0))
    other = pack_zip(tmp_path / "q.zip", members(0)[::-1])
    assert places(path, work)
    rename_with_times(path, other.read_bytes())
    assert fetch_many(places(path, work)) == [data for _, data in sorted(members(0))]


def changing_run(settings: Settings, change: Callable[[], None]) -> str:
    """The error of a run during which `change()` is called once, when it has finished a shard."""
    pending = [change]

    def on_progress(stats: RunStats) -> None:
        if pending and any(Path(settings.out).rglob("*.rec")):
            pending.pop()()

    with pytest.raises(ResoluteError) as raised:
        building.build(settings, progress=on_progress)
    assert not pending
    return str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["zip", "tar"])
def test_a_run_whose_archive_is_replaced_ends_and_is_not_continued_with_the_other_one(tmp_path: Path, how: str) -> None:
    path, other = PACK[how](tmp_path / f"p.{how}", members(0)), PACK[how](tmp_path / f"q.{how}", members(1))
    first = path.read_bytes()
    settings = Settings(src=str(path), out=str(tmp_path / "s"), res=(8,), shard_samples=10, workers=1, val_frac=0)
    assert f"p.{how}: changed since it was listed, got " in changing_run(
        settings, lambda: rename(path, other.read_bytes())
    )
    with pytest.raises(ResoluteError, match=r"an unfinished run of other archives, .* start over with REBUILD=1"):
        building.build(settings)
    rename(path, first)  # with other times
    assert building.build(settings).kept_shards > 0
    alone = Settings(src=str(path), out=str(tmp_path / "t"), res=(8,), shard_samples=10, workers=1, val_frac=0)
    building.build(alone)
    for tar in (tmp_path / "t" / "8").glob("*.tar"):
        assert tar.read_bytes() == (tmp_path / "s" / "8" / tar.name).read_bytes()


def test_an_object_that_is_replaced_in_a_store_ends_the_run(tmp_path: Path, work: Path, s3_server: str) -> None:  # noqa: F811
    fs = fsspec.filesystem("s3")
    for how in ("zip", "tar"):
        url, data = (
            f"{s3_server}/p.{how}",
            [PACK[how](tmp_path / f"{n}.{how}", members(n)).read_bytes() for n in (0, 1)],
        )
        fs.pipe(url, data[0])
        asked = places(url, work)
        assert fetch_many(asked[:1]) == [members(0)[0][1]]
        fs.pipe(url, data[1])
        with pytest.raises(ResoluteError, match=f"p.{how}: {CHANGED}"):
            fetch_many(asked[1:3])


class Etags(RangeHandler):
    """Says the version of a file as `marks` does, in answers to HEAD, and to GET if `in_answers`."""

    in_answers = True
    heads = 0

    def send_head(self) -> Any:
        type(self).heads += 1
        return super().send_head()

    def end_headers(self) -> None:
        if self.command == "HEAD" or self.in_answers:
            path = Path(self.translate_path(self.path))
            self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
        super().end_headers()


class NoEtags(Etags):
    in_answers = False


@pytest.mark.parametrize("handler", [Etags, NoEtags])
def test_an_archive_that_is_replaced_on_a_web_server_ends_the_run(
    tmp_path: Path, work: Path, handler: type[Etags]
) -> None:
    path = pack_tar(tmp_path / "p.tar", members(0))
    other = pack_tar(tmp_path / "q.tar", members(1))
    with serving(tmp_path, handler) as port:
        asked = places(f"http://127.0.0.1:{port}/p.tar", work)
        heads = handler.heads
        assert fetch_many(asked[:3]) == [data for _, data in sorted(members(0))[:3]]
        assert handler.heads - heads == (0 if handler is Etags else 1)
        time.sleep(0.02)  # so that its time differs
        rename(path, other.read_bytes())
        with pytest.raises(ResoluteError, match=f"p.tar: {CHANGED}"):
            fetch_many(asked[:3])


def test_an_archive_of_any_other_store_is_compared_after_its_photos_were_read(tmp_path: Path, work: Path) -> None:
    fs, url = fsspec.filesystem("memory"), "memory://archives/p.tar"
    fs.pipe(url, pack_tar(tmp_path / "p.tar", members(0)).read_bytes())
    asked = places(url, work)
    assert fetch_many(asked[:2]) == [data for _, data in sorted(members(0))[:2]]
    fs.pipe(url, pack_tar(tmp_path / "p.tar", members(1)).read_bytes())
    with pytest.raises(ResoluteError, match=f"p.tar: {CHANGED}"):
        fetch_many(asked[:2])


def test_unpacked_photos_are_those_of_the_listing(tmp_path: Path, work: Path) -> None:
    path = pack_samples(tmp_path / "x.tar", [(f"{n}.jpg", jpeg(n), {"cls": b"%d" % (n % 2)}) for n in range(6)])
    packed = tmp_path / "x.tar.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    asked = places(packed, work)
    (blob,) = {place.path for place in asked}
    overwrite(Path(blob), bytes(100))
    with pytest.raises(ResoluteError, match=CHANGED):
        fetch_many(asked)
