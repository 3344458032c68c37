"""The state of the archives that hold photos, by which each read finds out whether they are those that were listed.

The stamp of a local file is its size, its times of change (mtime and ctime, ns) and a digest of its content. If size
and times are the same, nothing is read. Otherwise the digest decides: for a zip that of its directory, which holds the
checksum of each member; for any other file that of pieces of it, and its mtime has to be the same too, since what lies
between the pieces is not compared. A zip that was touched or copied is therefore the same, a tar only if its mtime was
kept (`cp -p`, `rsync -t`). The stamp of a file in a store is `version_stamp`, such as its size and ETag.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

from resolute.errors import ResoluteError, StorageError, strip_credentials
from resolute.pipeline.storage.read_at import read_at
from resolute.prep.storage.retry import retry
from resolute.urls import is_url

__all__ = ["changed", "check_containers", "container_stamps", "content_hash", "difference"]

_PIECES, _PIECE_BYTES = 64, 4096
_BLOCK_BYTES = 1 << 20
# Source: PKWARE's APPNOTE.TXT 6.3.10: 4.3.14 and 4.3.15 zip64 end of central directory, 4.3.16 end of central directory
_END, _END_BYTES, _MAX_COMMENT_BYTES = b"PK\5\6", 22, 0xFFFF
_LOCATOR, _LOCATOR_BYTES, _END64_BYTES = b"PK\6\7", 20, 56
_DIRECTORY, _SAMPLED = "directory", "pieces"
_OTHER_CONTENT = "got another file or other content, expected the archive as it was"


def container_stamps(paths: Iterable[str], listed: Mapping[str, str]) -> dict[str, str]:
    """{path: its state}; "" for one in a store that says nothing of versions.

    `listed` {path: `version_stamp`} are the states before the archives were listed. Raises `ResoluteError` if one has
    changed since then, `StorageError` if one is unavailable.
    """
    return {path: listed.get(path, "") if is_url(path) else _local_stamp(path, listed.get(path)) for path in paths}


def _local_stamp(path: str, listed: str | None) -> str:
    def stamp() -> str:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            before, digest = os.fstat(descriptor), _digest(path, descriptor)
            is_same = _times(os.fstat(descriptor)) == _times(before) == _times(os.stat(path))  # noqa: PTH116
        finally:
            os.close(descriptor)
        if not is_same or listed not in (None, f"{before.st_size} {before.st_mtime_ns}"):
            raise changed(path, _OTHER_CONTENT)
        return f"{_times(before)} {digest}"

    return retry(path, stamp)


def difference(path: str, descriptor: int, stamp: str) -> str:
    """What tells the open file from the one with this stamp: "got …, expected …"; "" if it is that file.

    Raises `OSError`.
    """
    listed, _, digest = stamp.rpartition(" ")
    info = os.fstat(descriptor)
    if _times(info) == listed:
        return ""
    size, mtime, _ = listed.split(" ")
    if f"{info.st_size}" != size:
        return f"got {info.st_size} bytes, expected {size}"
    if digest.startswith(_SAMPLED) and f"{info.st_mtime_ns}" != mtime:
        return f"got {_date(info.st_mtime_ns)} as its time of change, expected {_date(int(mtime))}"
    return "" if _digest(path, descriptor) == digest else _OTHER_CONTENT


def _date(time_ns: int) -> str:
    text = datetime.fromtimestamp(time_ns // 10**9, UTC).strftime("%Y-%m-%d %H:%M:%S")
    return f"{text}.{time_ns % 10**9:09} UTC"


def changed(path: str, what: str = _OTHER_CONTENT) -> ResoluteError:
    """The error for an archive that is not the one that was listed; `what` is as in `difference`."""
    return ResoluteError(
        f"{strip_credentials(path)}: changed since it was listed, {what}; wait until nothing writes to it, then run "
        "the same command again"
    )


def check_containers(stamps: Mapping[str, str]) -> None:
    """Raise `StorageError` for a local archive that is missing here, or has another state than in {path: stamp}."""
    for path, stamp in stamps.items():
        if not is_url(path) and (what := _local_difference(path, stamp)):
            raise StorageError(
                f"{path}: not the archive that was planned, {what}; give this machine the same file (`cp -p` and "
                "`rsync -t` keep its time) or wait until it is copied, then run the same command again; if the archive "
                "is meant to be another one, run `resolute jobs plan` again"
            )


def _local_difference(path: str, stamp: str) -> str:
    def compare() -> str:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return difference(path, descriptor, stamp)
        finally:
            os.close(descriptor)

    return retry(path, compare)


def content_hash(stamps: Mapping[str, str]) -> str:
    """A hash of the contents of all archives, wherever they are; the times of local ones do not count."""
    contents = []
    for path, stamp in stamps.items():
        size, *_, digest = stamp.split(" ")
        contents.append(stamp if is_url(path) else f"{size} {digest}")
    return hashlib.sha256("\0".join(sorted(contents)).encode()).hexdigest()


def _times(info: os.stat_result) -> str:
    return f"{info.st_size} {info.st_mtime_ns} {info.st_ctime_ns}"


def _digest(path: str, descriptor: int) -> str:
    nbytes = os.fstat(descriptor).st_size
    start = _directory_start(descriptor, nbytes) if path.lower().endswith(".zip") else None
    digest = hashlib.sha256()
    if start is not None:
        for at in range(start, nbytes, _BLOCK_BYTES):
            digest.update(read_at(descriptor, min(_BLOCK_BYTES, nbytes - at), at))
    elif nbytes <= _PIECES * _PIECE_BYTES:
        digest.update(read_at(descriptor, nbytes, 0))
    else:
        for i in range(_PIECES):
            digest.update(read_at(descriptor, _PIECE_BYTES, (nbytes - _PIECE_BYTES) * i // (_PIECES - 1)))
    return f"{_SAMPLED if start is None else _DIRECTORY}:{digest.hexdigest()[:32]}"


def _directory_start(descriptor: int, nbytes: int) -> int | None:
    """The offset of a zip's central directory, which reaches to the end of the file; None if it is not found."""
    first = max(0, nbytes - _MAX_COMMENT_BYTES - _END_BYTES - _LOCATOR_BYTES - _END64_BYTES)
    tail = read_at(descriptor, nbytes - first, first)
    end = tail.rfind(_END)
    if end < 0 or len(tail) - end < _END_BYTES:
        return None
    (directory_bytes,) = struct.unpack_from("<I", tail, end + 12)
    at = end - _LOCATOR_BYTES - _END64_BYTES
    if at >= 0 and tail.startswith(_LOCATOR, end - _LOCATOR_BYTES):
        (directory_bytes,) = struct.unpack_from("<Q", tail, at + 40)
        end = at
    start: int = first + end - directory_bytes
    return start if start >= 0 else None
