"""Bounded memory: prep never reads an image of more than `MAX_BYTES`, whatever a source contains."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from resolute.prep.convert.batch import Batch, EncodeOptions
from resolute.prep.convert.decode import Reject
from resolute.prep.run import worker
from resolute.prep.sources.detect import open_source
from resolute.prep.sources.fetch import fetch_many
from resolute.prep.sources.image_ref import MAX_BYTES, UNSEEN, ZIPPED, ByteRange
from resolute.prep.sources.targets import TargetSetting
from tests import ROOT
from tests.support.source_formats import contents, jpeg, list_source

Prep = Callable[..., Any]
HUGE = MAX_BYTES + (64 << 20)

# The peak of this process's own memory: getrusage's would be that of its parent, if that is larger.
PEAK = """
def peak_mib():
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))) >> 10
"""
LISTING = PEAK + """
import resource, sys
from pathlib import Path
from resolute.errors import ResoluteError
from resolute.prep.sources.detect import open_source
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
try:
    source = open_source(sys.argv[1], scan_cache=Path(sys.argv[2]))
    print([(image.name, image.nbytes) for image in source], dict(source.ignored))
except ResoluteError as error:
    print(error)
print("MiB:", peak_mib(), file=sys.stderr)
"""


def listed_within_a_gigabyte(src: Path, scan_cache: Path) -> str:
    """The listing of `src` by a process limited to 1 GiB of addresses, which must use less than 300 MiB."""
    command = [sys.executable, "-c", LISTING, str(src), str(scan_cache)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr[-600:]
    assert int(done.stderr.rpartition("MiB:")[2]) < 300, done.stderr
    return done.stdout


class Zeros(io.RawIOBase):
    """A file of `nbytes` zero bytes that are not held in memory."""

    def __init__(self, nbytes: int) -> None:
        self._left = nbytes

    def readable(self) -> bool:
        return True

    def read(self, nbytes: int = -1) -> bytes:
        data = bytes(min(self._left, 1 << 20 if nbytes < 0 else nbytes))
        self._left -= len(data)
        return data


def header(name: str, nbytes: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = nbytes, kind
    return info.tobuf(tarfile.GNU_FORMAT)


def write_tar(path: Path, members: list[tuple[str, int | bytes, bytes]]) -> Path:
    """A tar, compressed if its name says so; contents are bytes, or a number of zeros."""
    with gzip.open(path, "wb", compresslevel=1) if path.suffix == ".gz" else path.open("wb") as file:
        for name, content, kind in members:
            nbytes = content if isinstance(content, int) else len(content)
            file.write(header(name, nbytes, kind))
            source = Zeros(content) if isinstance(content, int) else io.BytesIO(content)
            while data := source.read(1 << 20):
                file.write(data)
            file.write(bytes(-nbytes % 512))
        file.write(bytes(1024))
    return path


PLAIN = tarfile.REGTYPE


def test_a_huge_member_of_a_compressed_tar_is_skipped_and_rejected(tmp_path: Path, work: Path) -> None:
    path = write_tar(tmp_path / "a.tar.gz", [
        ("p/cat/1.jpg", jpeg(1), PLAIN), ("p/cat/huge.jpg", HUGE, PLAIN), ("p/dog/2.jpg", jpeg(2), PLAIN),
    ])  # fmt: skip
    listing = listed_within_a_gigabyte(path, work)
    assert f"('cat/huge.jpg', {HUGE})" in listing
    got = list_source(work, path)
    datas = contents(got)
    assert [datas[0], str(datas[1]), datas[2]] == [jpeg(1), f"too large: {HUGE} bytes", jpeg(2)]


def test_huge_members_of_webdataset_samples_are_skipped_and_rejected(tmp_path: Path, work: Path) -> None:
    path = write_tar(tmp_path / "a.tar.gz", [
        ("1.jpg", jpeg(1), PLAIN), ("1.cls", b"0", PLAIN),
        ("2.jpg", HUGE, PLAIN), ("2.cls", b"1", PLAIN),
        ("3.jpg", 200 << 20, PLAIN), ("3.png", 200 << 20, PLAIN), ("3.webp", 200 << 20, PLAIN), ("3.cls", b"1", PLAIN),
    ])  # fmt: skip
    source = open_source(str(path), scan_cache=work)
    assert [(image.name, image.nbytes) for image in source] == [
        ("a.tar.gz/1.jpg", len(jpeg(1))), ("a.tar.gz/2.jpg", HUGE),
    ]  # fmt: skip
    assert source.ignored == {"samples with several images": 1}


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE])
@pytest.mark.parametrize("name", ["a.tar.gz", "a.tar"])
def test_a_huge_tar_header_is_refused_unread(tmp_path: Path, work: Path, kind: bytes, name: str) -> None:
    small = 3 << 20 if name == "a.tar" else HUGE
    path = write_tar(tmp_path / name, [
        ("p/cat/1.jpg", jpeg(1), PLAIN), ("././@LongLink", small, kind), ("p/dog/2.jpg", jpeg(2), PLAIN),
    ])  # fmt: skip
    listing = listed_within_a_gigabyte(path, work)
    assert "the header of a member takes more than 1048576 bytes" in listing
    assert str(path) in listing


def test_an_endless_sparse_map_in_a_tar_is_refused_unread(tmp_path: Path, work: Path) -> None:
    info = bytearray(header("p/cat/sparse.jpg", 0, tarfile.GNUTYPE_SPARSE))
    info[482] = 1  # its map continues in the next block
    block = (b"%011o\0" % 1) * 42 + b"\1" + bytes(7)
    checksum = sum(info[:148]) + sum(info[156:512]) + 8 * ord(" ")
    info[148:156] = b"%06o\0 " % checksum
    with gzip.open(tmp_path / "a.tar.gz", "wb", compresslevel=1) as file:
        file.write(header("p/cat/1.jpg", 0) + bytes(info))
        for _ in range(2_000):
            file.write(block * 256)
    assert "the header of a member takes more than" in listed_within_a_gigabyte(tmp_path / "a.tar.gz", work)


def test_long_names_and_pax_headers_of_usual_size_are_read(tmp_path: Path, work: Path) -> None:
    for layout in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        with tarfile.open(tmp_path / "a.tar.gz", "w:gz", format=layout) as tar:
            for i, label in enumerate(("cat", "d\u00f6g" * 40)):
                info = tarfile.TarInfo(f"p/{label}/{'x' * 200}{i}.jpg")
                info.size = len(jpeg(i))
                tar.addfile(info, io.BytesIO(jpeg(i)))
        got = list_source(work, tmp_path / "a.tar.gz")
        assert contents(got) == [jpeg(0), jpeg(1)]


def test_large_files_are_not_read_ahead(tmp_path: Path) -> None:
    for name, nbytes in (("small", 10), ("large", 2_000)):
        (tmp_path / name).write_bytes(bytes(nbytes))
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("large", bytes(2_000))
    places = [ByteRange(str(tmp_path / name)) for name in ("small", "large")]
    places.append(ByteRange(str(tmp_path / "large"), 0, 1_500))
    places.append(ByteRange(str(tmp_path / "a.zip"), 0, 10, ZIPPED, 2_000))
    assert fetch_many(places, ahead_bytes=1_000) == [bytes(10), None, None, None]


class Ranges:
    """A store of zeros that sends the ranges it is asked for, and remembers them."""

    async_impl = True

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes, self.asked = sizes, [(0, 0)]

    def cat_ranges(self, paths: list[str], starts: list[Any], ends: list[Any], on_error: str) -> list[bytes]:
        self.asked += zip(starts, ends, strict=True)
        return [bytes(min(self.sizes[path], end) - start) for path, start, end in zip(paths, starts, ends, strict=True)]


def test_reads_of_a_url_of_unknown_size_are_bounded_by_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Ranges({"small": 10, "large": 2_000, "edge": 1_000, "huge": MAX_BYTES + 5})
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda url, **_: (store, url.removeprefix("far://")))
    places = [ByteRange(f"far://{name}", packed=UNSEEN) for name in store.sizes]
    assert fetch_many(places, ahead_bytes=1_000) == [bytes(10), None, bytes(1_000), None]
    assert max(end for _, end in store.asked) == 1_001
    assert fetch_many([places[1]]) == [bytes(2_000)]
    assert str(fetch_many([places[3]])[0]) == f"too large: {MAX_BYTES + 1} bytes"


WORKER = PEAK + """
import json, sys
import numpy as np
from resolute.prep.run import worker
from resolute.prep.convert.batch import Batch, EncodeOptions
from resolute.prep.sources.image_ref import ByteRange
class Connection:
    def __init__(self, task):
        self.tasks, self.results = [task] * 2, []
    def recv(self):
        if not self.tasks: raise EOFError
        return len(self.tasks), EncodeOptions(quality=90, label_digits=1), None, self.tasks.pop()
    def send(self, answer):
        self.results.append(answer[1])
class Current: value = -1
byte_ranges = tuple(ByteRange(path) for path in sys.argv[1:])
task = Batch(first_key=0, byte_ranges=byte_ranges, labels=(0,) * 16, short_sides=(16,))
before = peak_mib()
conn = Connection(task)
worker.serve(conn, Current())
reasons = [reason for chunk in conn.results for _, reason in chunk.rejects]
print(json.dumps({"MiB": peak_mib() - before, "reasons": reasons}))
"""


@pytest.mark.slow
def test_a_worker_holds_one_large_file_at_a_time(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.jpg" for i in range(16)]
    for path in paths:
        with path.open("wb") as file:
            file.truncate(100 << 20)
    command = [sys.executable, "-c", WORKER, *map(str, paths)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr[-600:]
    report = json.loads(done.stdout)
    assert report["reasons"] == ["not an image"] * 32
    assert report["MiB"] < 250  # and not 32 times 100 MiB


def test_slow_storage_is_not_counted_as_a_hanging_decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at: list[int] = []

    def fetch(places: Sequence[ByteRange], **options: int) -> list[bytes | Reject | None]:
        if options:  # ahead of their turn
            return fetch_many(places, **options)
        at.append(current)
        return [Reject("seen")]

    def set_current(i: int) -> None:
        nonlocal current
        current = i

    current = -2
    with (tmp_path / "a.jpg").open("wb") as file:
        file.truncate(worker._AHEAD_BYTES + 1)
    monkeypatch.setattr(worker, "fetch_many", fetch)
    places = (ByteRange(str(tmp_path / "a.jpg")),) * 2
    task = Batch(first_key=0, byte_ranges=places, labels=(0, 0), short_sides=())
    chunk = worker.convert(EncodeOptions(quality=90, label_digits=1), task, set_current)
    assert at == [-1, -1]
    assert chunk.rejects == ((0, "seen"), (1, "seen"))


def test_damaged_labels_are_counted_separately(tmp_path: Path, work: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [
        ("1.jpg", jpeg(1), PLAIN), ("1.cls", b"3", PLAIN),
        ("2.jpg", jpeg(2), PLAIN), ("2.json", b"[" * 100_000, PLAIN),
        ("3.jpg", jpeg(3), PLAIN), ("3.cls", b"9" * 5_000, PLAIN),
        ("4.jpg", jpeg(4), PLAIN), ("4.json", b'{"label": ', PLAIN),
        ("5.jpg", jpeg(5), PLAIN), ("5.json", b"{}", PLAIN),
        ("6.jpg", jpeg(6), PLAIN), ("6.json", b"[" * 100_000, PLAIN), ("6.cls", b"4", PLAIN),
    ])  # fmt: skip
    source = open_source(str(path), target=TargetSetting(drop_unlabelled=True), scan_cache=work)
    assert [(image.name, image.label) for image in source] == [("a.tar/1.jpg", "3"), ("a.tar/6.jpg", "4")]
    assert source.ignored == {"damaged labels": 3, "unlabelled": 1}
