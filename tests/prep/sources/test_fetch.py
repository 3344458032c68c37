"""Fetching the bytes of images: complete, or rejected with a reason; a failing store is an error."""

from __future__ import annotations

import io
import os
import random
import socket
import ssl
import zipfile
from pathlib import Path
from typing import Any

import fsspec
import pytest

from resolute.errors import StorageError
from resolute.prep.convert.decode import Reject
from resolute.prep.sources import fetch as fetching
from resolute.prep.sources.archives.zip_directory import zip_members
from resolute.prep.sources.fetch import fetch, fetch_many
from resolute.prep.sources.image_ref import MISSING, PLAIN, UNSEEN, ZIPPED, ByteRange
from tests.support.s3 import s3_server  # noqa: F401  # a fixture


def reject_reason(location: ByteRange) -> str:
    with pytest.raises(Reject) as reject:
        fetch(location)
    return str(reject.value)


def test_unreadable_files_are_rejected_with_a_reason(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "short").write_bytes(b"1234")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(fetching.MAX_BYTES + 1)
    for place, reason in (
        (ByteRange(f"{tmp_path}/gone", stored_as=MISSING), "not there: no such file when"),
        (ByteRange(f"{tmp_path}/pipe"), "unreadable: not a regular file"),
        (ByteRange(str(tmp_path)), "unreadable: Is a directory"),
        (ByteRange(f"{tmp_path}/loop"), "unreadable: Too many levels"),
        (ByteRange(f"{tmp_path}/short", 2, 4), "truncated: its archive ends after 2 of 4 bytes"),
        (ByteRange(f"{tmp_path}/huge"), f"too large: {fetching.MAX_BYTES + 1} bytes"),
        (ByteRange(f"{tmp_path}/huge", 0, 9, ZIPPED, 1 << 40), "too large"),
    ):
        assert reject_reason(place).startswith(reason)


def make_zip(path: Path, files: dict[str, bytes], **options: Any) -> list[ByteRange]:
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return places(path)


def places(path: Path) -> list[ByteRange]:
    with path.open("rb") as file:
        return [ByteRange(str(path), m.offset, m.packed_bytes, ZIPPED, m.size_bytes) for m in zip_members(file)]


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_zip_members_equal_those_of_the_standard_library(tmp_path: Path, method: int) -> None:
    rng = random.Random(1)
    files = {
        f"{'d/' * (i % 3)}ä{i}" + "x" * rng.randrange(200): rng.randbytes(rng.randrange(4_000)) * 2 for i in range(300)
    }
    path = tmp_path / "a.zip"
    assert fetch_many(make_zip(path, files, compression=method)) == list(files.values())
    with path.open("rb") as file, zipfile.ZipFile(path) as theirs:
        for ours, info in zip(zip_members(file), theirs.infolist(), strict=True):
            assert ours[:4] == (info.filename, info.header_offset, info.compress_size, info.file_size)
    path.write_bytes(b"#!/bin/sh in front of it" + path.read_bytes())
    assert fetch_many(places(path)) == list(files.values())


class Stream(io.BytesIO):
    """A file that cannot seek, for which zipfile writes data descriptors."""

    def tell(self) -> int:
        raise OSError


def test_data_descriptors_and_members_beyond_4_gib_are_read(tmp_path: Path) -> None:
    stream = Stream()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("a", "b"):
            with archive.open(name, "w", force_zip64=True) as member:
                member.write(name.encode() * 1000)
    (tmp_path / "s.zip").write_bytes(stream.getvalue())
    assert fetch_many(places(tmp_path / "s.zip")) == [b"a" * 1000, b"b" * 1000]
    with (tmp_path / "big.zip").open("wb") as file, zipfile.ZipFile(file, "w", allowZip64=True) as archive:
        archive.writestr("first", b"1")
        file.seek(1 << 33)  # leaves a hole
        archive.start_dir = file.tell()
        archive.writestr("far", b"away")
    assert fetch(places(tmp_path / "big.zip")[1]) == b"away"


@pytest.mark.slow
def test_a_zip_may_have_more_members_than_16_bits_count(tmp_path: Path) -> None:
    members = make_zip(tmp_path / "many.zip", {f"{i}.jpg": bytes([i % 256]) * 50 for i in range(66_000)})
    assert fetch_many(members[::6_000]) == [bytes([i % 256]) * 50 for i in range(0, 66_000, 6_000)]


def test_damaged_zip_members_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    (place,) = make_zip(path, {"a": bytes(range(256)) * 4}, compression=zipfile.ZIP_DEFLATED)
    whole = path.read_bytes()
    assert reject_reason(place._replace(size_bytes=2_000)) == "corrupt: less than 2000 bytes"
    assert reject_reason(place._replace(offset=3)) == "corrupt: no zip header where the directory says"
    path.write_bytes(whole[:60] + b"\xff" + whole[61:])
    assert reject_reason(place).startswith("corrupt: ")
    path.write_bytes(whole[:14] + b"\1\2\3\4" + whole[18:])
    assert reject_reason(place) == "corrupt: another CRC-32 than the archive says"
    path.write_bytes(whole[:8] + b"\x0c\0" + whole[10:])
    assert reject_reason(place) == "cannot be decompressed: zip method 12"


def test_remote_files_byte_ranges_and_zip_members_are_fetched(tmp_path: Path, s3_server: str) -> None:  # noqa: F811
    fs = fsspec.filesystem("s3")
    files = {"short": b"a" * 999, "y" * 700: b"b" * 10_000}  # the second needs a longer look at its header
    members = make_zip(tmp_path / "a.zip", files, compression=zipfile.ZIP_DEFLATED)
    for name, data in (("a.zip", (tmp_path / "a.zip").read_bytes()), ("b", b"0123456789"), ("empty", b"")):
        fs.pipe(f"{s3_server}/{name}", data)
    asked = [place._replace(path=f"{s3_server}/a.zip") for place in members]
    asked += [ByteRange(f"{s3_server}/b", *part) for part in ((), (2, 3), (1, 0), (8, 5, PLAIN))]
    asked += [ByteRange(f"{s3_server}/{name}", stored_as=UNSEEN) for name in ("b", "empty", "gone")]
    assert list(map(str, fetch_many(asked))) == [
        *map(str, files.values()),
        "b'0123456789'",
        "b'234'",
        "b''",
        "truncated: its archive ends after 2 of 5 bytes",
        "b'0123456789'",
        "b''",
        "not there: No such file or directory",
    ]


class Flaky:
    """A store that fails `times` times, then answers."""

    async_impl = True

    def __init__(self, times: int, error: Exception) -> None:
        self.times, self.error, self.asked = times, error, 0

    def cat_ranges(self, paths: list[str], starts: list[int], ends: list[int], on_error: str) -> list[object]:
        self.asked += 1
        return [self.error if self.asked <= self.times and path == "bad" else b"data" for path in paths]


@pytest.mark.parametrize(
    ("error", "got"),
    [
        (OSError("Connection reset"), "'Connection reset'"),
        (FileNotFoundError("bad"), "No such file or directory"),
    ],
)
def test_a_failing_store_is_retried_and_then_reported(
    monkeypatch: pytest.MonkeyPatch, error: Exception, got: str
) -> None:
    store = Flaky(3, error)
    waits: list[float] = []
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda url, **_: (store, url.removeprefix("far://")))
    monkeypatch.setattr(fetching.time, "sleep", waits.append)
    asked = [ByteRange("far://bad"), ByteRange("far://good")]
    assert fetch_many(asked) == [b"data", b"data"]
    assert waits == [0.5, 2.0, 8.0]
    store.times = 99
    with pytest.raises(StorageError, match=f"far://bad: cannot be fetched, got {got} 4 times"):
        fetch_many(asked)


@pytest.mark.parametrize(
    ("fault", "others_answer"), [("unknown name", True), ("certificate", True), ("unknown name", False)]
)
def test_a_server_that_is_gone_loses_its_photos_and_a_network_that_is_gone_loses_none(
    monkeypatch: pytest.MonkeyPatch, fault: str, others_answer: bool
) -> None:
    aiohttp = pytest.importorskip("aiohttp")
    key = aiohttp.client_reqrep.ConnectionKey("gone", 443, True, True, None, None, None)
    error = {
        "unknown name": aiohttp.ClientConnectorDNSError(key, socket.gaierror(socket.EAI_NONAME, "Name not known")),
        "certificate": aiohttp.ClientConnectorCertificateError(key, ssl.SSLCertVerificationError("expired")),
    }[fault]
    store = Flaky(99, error)
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda url, **_: (store, url.removeprefix("https://gone/")))
    monkeypatch.setattr(fetching.time, "sleep", lambda wait_s: None)
    fetching._failing_hosts.clear()
    other = "https://here/good" if others_answer else "https://gone/good"
    asked = [ByteRange("https://gone/bad", stored_as=UNSEEN), ByteRange(other, stored_as=UNSEEN)]
    if others_answer:
        reject, data = fetch_many(asked)
        assert str(reject).startswith("no such server: ")
        assert data == b"data"
        assert store.asked == 4 + 1  # and whether the other server still answers
    else:
        with pytest.raises(StorageError, match=r"got .* 4 times, .*; no other server answered either: check the netw"):
            fetch_many(asked)
        assert store.asked == 4
    with pytest.raises(StorageError):  # of an archive, which no answer can make a reject
        fetch_many([ByteRange("https://gone/bad", 0, 4), *asked[1:]])
