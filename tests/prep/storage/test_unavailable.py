"""Unavailable storage never changes what is in a set: reads are retried, then the command ends with an error."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest

from resolute.errors import ResoluteError, StorageError
from resolute.prep import build as building
from resolute.prep.convert.batch import Batch, EncodeOptions
from resolute.prep.listing.copies import find_copies
from resolute.prep.listing.database import Database
from resolute.prep.listing.list_photos import list_photos
from resolute.prep.run.worker import convert
from resolute.prep.settings import Settings
from resolute.prep.shard_set.record import Records
from resolute.prep.sources.detect import open_source
from resolute.prep.sources.fetch import fetch
from resolute.prep.sources.image_ref import MISSING, ByteRange
from resolute.prep.storage import retry
from tests.conftest import make_photos
from tests.support.source_formats import list_source, pack

UNAVAILABLE = [
    errno.EIO,
    errno.EINTR,
    errno.ESTALE,
    errno.EACCES,
    errno.ENOENT,
    errno.ETIMEDOUT,
    errno.ENOTCONN,
    errno.ENODEV,
]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The delays between retries in seconds; `time.sleep` is replaced and does not wait."""
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    return waited


def failing(monkeypatch: pytest.MonkeyPatch, call: str, number: int, times: int, *, of: str = "") -> None:
    """Let `os.CALL` raise `number` for its first `times` calls, or those with the path `of` or a descriptor."""
    works, left = getattr(os, call), times

    def fail(*args: Any, **options: Any) -> Any:
        nonlocal left
        is_meant = not of or isinstance(args[0], int) or os.fspath(args[0]) == of
        left -= is_meant
        if is_meant and left >= 0:
            raise OSError(number, os.strerror(number))
        return works(*args, **options)

    monkeypatch.setattr(os, call, fail)


@pytest.mark.parametrize("call", ["open", "pread", "fstat", "stat"])
def test_an_io_error_is_retried_and_then_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, waits: list[float], call: str
) -> None:
    (tmp_path / "a.jpg").write_bytes(b"0123456789")
    place = ByteRange(str(tmp_path / "a.jpg"), *((2, 3) if call == "stat" else (-1, 10)))
    for number in UNAVAILABLE:
        waits.clear()
        with monkeypatch.context() as patch:
            failing(patch, call, number, len(retry.WAITS_S))
            assert fetch(place) == (b"234" if call == "stat" else b"0123456789")
        assert waits == list(retry.WAITS_S)
        with monkeypatch.context() as patch:
            failing(patch, call, number, 99)
            with pytest.raises(StorageError, match=r"a\.jpg: .*run the same command again"):
                fetch(place)
            task = Batch(first_key=0, byte_ranges=(place,), labels=(0,), short_sides=(16,))
            with pytest.raises(StorageError):
                convert(EncodeOptions(quality=90, label_digits=4), task)


@pytest.mark.parametrize("call", ["open", "pread", "fstat", "stat"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES, errno.ENOENT])
def test_an_outage_while_copies_are_looked_for_hides_none(
    tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch, waits: list[float], call: str, number: int
) -> None:
    for name in ("cat/0", "cat/1", "dog/0", "dog/1"):
        (tmp_path / "p" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "p" / f"{name}.jpg").write_bytes(f"{name[-1]} of equal sizes".encode() * 400)
    photos = list_source(work, tmp_path / "p")
    found = find_copies({"train": photos})
    assert found is not None
    assert sorted(found.groups["train"].tolist()) == [0, 0, 1, 1]
    with monkeypatch.context() as patch:
        failing(patch, call, number, 2, of=str(tmp_path / "p" / "cat" / "0.jpg"))
        again = find_copies({"train": photos})
    assert again is not None
    assert again.groups["train"].tolist() == found.groups["train"].tolist()
    with monkeypatch.context() as patch:
        failing(patch, call, number, 10**6, of=str(tmp_path / "p" / "cat" / "0.jpg"))
        if call == "stat":  # not needed to read a file
            again = find_copies({"train": photos})
            assert again is not None
            assert again.groups["train"].tolist() == found.groups["train"].tolist()
            return
        with pytest.raises(StorageError, match=r"\.jpg: storage is unavailable"):
            find_copies({"train": photos})


def test_a_photo_that_was_replaced_by_a_folder_has_no_copies(tmp_path: Path, work: Path) -> None:
    for name in ("cat/0", "cat/1", "dog/0"):
        (tmp_path / "p" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "p" / f"{name}.jpg").write_bytes(b"equal bytes" * 800)
    photos = list_source(work, tmp_path / "p")
    (tmp_path / "p" / "dog" / "0.jpg").unlink()
    (tmp_path / "p" / "dog" / "0.jpg").mkdir()
    found = find_copies({"train": photos})
    assert found is not None
    assert found.groups["train"].tolist() == [0, 0, -1]


def test_a_file_whose_size_changed_since_listing_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"half")
    with pytest.raises(ResoluteError, match="changed since it was listed, got 4 bytes, expected 9"):
        fetch(ByteRange(str(tmp_path / "a.jpg"), nbytes=9))


def test_a_run_stops_as_soon_as_max_bad_is_exceeded(photos: Path, tmp_path: Path) -> None:
    for path in photos.rglob("*.JPEG"):
        path.write_bytes(b"junk")
    done: list[int] = []
    settings = Settings(src=str(photos), out=str(tmp_path / "s"), res=(32,), shard_samples=1, max_bad=0.05, workers=1)
    with pytest.raises(ResoluteError, match=r"too many unusable images, got 4 of 60 so far \(4 text\)"):
        building.build(settings, progress=lambda tally: done.append(tally.images))
    assert 4 <= done[-1] < 20
    assert len((tmp_path / "s" / ".prep" / "rejects.jsonl").read_text().splitlines()) == 4
    # those of kept shards count; a worker may have finished a few more shards than were counted
    with pytest.raises(ResoluteError, match=r"too many unusable images, got \d+ of 60"):
        building.build(settings)


@pytest.mark.parametrize("form", ["relative", "absolute", "file://"])
def test_a_missing_file_of_a_list_is_a_reject_and_a_missing_folder_is_unavailable(
    tmp_path: Path, waits: list[float], form: str
) -> None:
    root = {"relative": "", "absolute": f"{tmp_path}/", "file://": f"file://{tmp_path}/"}[form]
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "a.jpg").write_bytes(b"1234")
    (tmp_path / "list.txt").write_text(f"{root}p/a.jpg 0\n{root}p/gone.jpg 1\n{root}p/a.jpg/b.jpg 1\n")
    source = open_source(str(tmp_path / "list.txt"), scan_cache=tmp_path)
    listed = {image.name.rpartition("p/")[2] or image.name: (image.nbytes, image.stored_as) for image in source}
    assert listed == {"a.jpg": (4, 0), "gone.jpg": (0, MISSING), "a.jpg/b.jpg": (0, 0)}
    _, place = next(list_photos(source, Database(tmp_path), "photos").places())
    assert fetch(place) == b"1234"
    (tmp_path / "p").rename(tmp_path / "away")  # as a lost mount does
    with pytest.raises(StorageError, match=r"p/a\.jpg: storage is unavailable"):
        fetch(place)
    with pytest.raises(StorageError, match=r"got '\S*p/a\.jpg' in line 1, .*there is no folder \S+/p, expected"):
        list(open_source(str(tmp_path / "list.txt"), scan_cache=tmp_path))


@pytest.mark.parametrize(("call", "number"), [("scandir", errno.ESTALE), ("stat", errno.EACCES)])
def test_listing_a_folder_is_retried_and_then_ends_the_run(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: list[float], call: str, number: int
) -> None:
    listed = [image.name for image in open_source(str(photos), scan_cache=tmp_path)]
    with monkeypatch.context() as patch:
        failing(patch, call, number, 2)
        assert [image.name for image in open_source(str(photos), scan_cache=tmp_path)] == listed
    with monkeypatch.context() as patch:
        failing(patch, call, number, 999)
        with pytest.raises(StorageError, match=re.escape(os.strerror(number))):
            list(open_source(str(photos), scan_cache=tmp_path))


@pytest.mark.parametrize(
    ("how", "call", "number"),
    [
        ("zip", "open", errno.EIO),
        ("zip", "pread", errno.ESTALE),
        ("tar", "pread", errno.EIO),
        ("tar.gz", "open", errno.ESTALE),
        ("tar.gz", "pread", errno.EIO),
    ],
)
def test_scanning_an_archive_bridges_a_short_outage_and_a_longer_one_ends_the_run(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: list[float], how: str, call: str, number: int
) -> None:
    files = {str(path.relative_to(photos)): path.read_bytes() for path in sorted(photos.rglob("[!.]*.jpg"))}
    archive = str(pack(tmp_path, how, files, ""))
    listed = [image.name for image in open_source(archive, scan_cache=tmp_path / "whole")]
    assert len(listed) == len(files)
    with monkeypatch.context() as patch:
        failing(patch, call, number, len(retry.WAITS_S), of=archive)
        assert [image.name for image in open_source(archive, scan_cache=tmp_path / "bridged")] == listed
    with monkeypatch.context() as patch:
        failing(patch, call, number, 999, of=archive)
        with pytest.raises(StorageError, match=re.escape(os.strerror(number))):
            list(open_source(archive, scan_cache=tmp_path / "lost"))


def test_no_manifest_is_written_if_the_folder_was_replaced_during_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A volume that is unmounted leaves an empty mount point, which must not be taken for the set."""
    out, away = tmp_path / "out", tmp_path / "away"
    drop_lost = Records.drop_lost

    def replace_folder(records: Any) -> None:
        drop_lost(records)
        if records._entries and not away.exists():
            out.rename(away)
            out.mkdir()
            (out / ".prep").mkdir()

    monkeypatch.setattr(Records, "drop_lost", replace_folder)
    photos = make_photos(tmp_path / "photos", each=6)
    settings = Settings(src=str(photos), out=str(out), res=(32,), workers=1)
    with pytest.raises(StorageError, match="replaced while prep was writing"):
        building.build(settings)
    assert not (out / "manifest.json").exists()
    away.rename(out)
    monkeypatch.undo()
    assert building.build(settings).kept_shards > 0
