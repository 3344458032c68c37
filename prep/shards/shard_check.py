"""Checks one shard byte for byte against the index and decodes every JPEG in it."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import parent_process
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from pipeline.dataset.shard_set import key_name
from pipeline.errors import ResoluteError
from prep.storage.hashed_file import FileInfo
from prep.storage.output import Store
from prep.storage.retry import retry

from .tar_format import BLOCK_BYTES, dali_index, member, padded_bytes, tar_end

__all__ = [
    "Damage", "ShardFiles", "check_sha256", "check_shard", "check_size", "init_worker", "jpeg_fault", "read_with_retry",
]  # fmt: skip

T = TypeVar("T")
_PIECE_BYTES = 1 << 20
_BASELINE = 0xC0  # Source: ITU-T T.81, table B.1: SOF0
_NO_FRAME = (0xC4, 0xC8, 0xCC)  # DHT, JPG and DAC lie between SOF0 and SOF15; same table
_NO_DRIVER = ("builtins", "prep", "pipeline")


class Damage(Exception):
    """A file is not what it should be; `str` of it says what is wrong, got and expected."""


def read_with_retry(store: Store, name: str, work: Callable[[], T]) -> T:
    """The result of `work`, which reads the file `name`; repeated while storage is unavailable.

    Raises `Damage` if the file is missing, `ResoluteError` if storage refuses it or stays unavailable.
    """

    def attempt() -> T:
        try:
            return work()
        except FileNotFoundError:
            raise Damage("missing") from None

    try:
        return retry(f"{store.where}/{name}", attempt)
    except (Damage, ResoluteError):
        raise
    except Exception as error:
        # why: drivers of object stores raise their own types; a built-in type or ours is a bug
        if not isinstance(error, OSError) and type(error).__module__.partition(".")[0] in _NO_DRIVER:
            raise
        raise ResoluteError(
            f"{store.where}/{name}: cannot be read, got '{getattr(error, 'strerror', None) or error}', expected a "
            "readable file; correct the cause and run verify again"
        ) from None


@dataclass(frozen=True, kw_only=True)
class ShardFiles:
    """One shard at one resolution: `name` (`128/train-000000`) and what the manifest says of its two files.

    `samples` and `stored` are local index files and `rows` the shard's range in them. They are None if the index is
    damaged; the files are then only hashed.
    """

    store: Store
    name: str
    tar: FileInfo
    idx: FileInfo
    samples: Path | None
    stored: Path | None
    rows: tuple[int, int]
    label_digits: int


_stop: Any = None  # a worker's multiprocessing.Event


def init_worker(stop: Any) -> None:
    """Make this process a worker: it ignores Ctrl-C, exits with its parent, and ends early once `stop` is set."""
    global _stop
    _stop = stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def check_shard(shard: ShardFiles) -> dict[str, str]:
    """The faults of the shard's files, by name; the tar is streamed, one sample in memory at a time."""
    samples = stored = None
    if shard.samples is not None and shard.stored is not None:
        rows = slice(*shard.rows)
        samples, stored = (
            retry(str(path), lambda path=path: np.array(np.load(path, mmap_mode="r")[rows]))  # type: ignore[misc]
            for path in (shard.samples, shard.stored)
        )
    faults = {}
    for name, check in ((f"{shard.name}.tar", _check_tar), (f"{shard.name}.idx", _check_idx)):
        try:
            check(shard, name, samples, stored)
        except Damage as damage:
            faults[name] = str(damage)
    return faults


def check_size(store: Store, name: str, expected: FileInfo) -> None:
    """Raise `Damage` unless the file exists with the expected size."""
    actual = store.size(name)
    if actual is None:
        raise Damage("missing")
    if actual != expected.nbytes:
        what = "cut short" if actual < expected.nbytes else "too long"
        raise Damage(f"{what}, got {actual} bytes, expected {expected.nbytes}")


def check_sha256(actual: str, expected: FileInfo) -> None:
    """Raise `Damage` unless the SHA-256 (hex) is the expected one."""
    if actual != expected.sha256:
        raise Damage(f"changed since prep, got SHA-256 {actual[:12]}…, expected {expected.sha256[:12]}…")


def _check_tar(shard: ShardFiles, name: str, samples: NDArray[Any] | None, stored: NDArray[Any] | None) -> None:
    def work() -> tuple[str, str, int]:
        check_size(shard.store, name, shard.tar)
        with shard.store.open(name) as file:
            digest = hashlib.sha256()
            first, count = "", 0
            if samples is not None and stored is not None:
                for fault in _sample_faults(file, digest, samples, stored, shard.label_digits):
                    first, count = first or fault, count + 1
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
                _check_stop()
        return digest.hexdigest(), first, count

    digest, first, count = read_with_retry(shard.store, name, work)
    if first:
        more = f", and {count - 1} more places" if count > 1 else ""
        raise Damage(f"{first}{more}")
    check_sha256(digest, shard.tar)


def _sample_faults(
    file: BinaryIO, digest: Any, samples: NDArray[Any], stored: NDArray[Any], label_digits: int
) -> Iterator[str]:
    """Yield the fault of each damaged sample and of the tar's end; all bytes go through `digest`."""
    pos = 0
    for (key, label, _), (offset, nbytes, crc, _, width, height) in zip(samples.tolist(), stored.tolist(), strict=True):
        _check_stop()
        assert offset == pos + BLOCK_BYTES, (key, offset, pos)  # why: `check_stored` has checked the index
        name = key_name(key)
        piece = file.read(BLOCK_BYTES + padded_bytes(nbytes) + BLOCK_BYTES + padded_bytes(label_digits))
        digest.update(piece)
        jpeg = piece[BLOCK_BYTES : BLOCK_BYTES + nbytes]
        actual = zlib.crc32(jpeg)
        expected = member(f"{name}.jpg", jpeg) + member(f"{name}.cls", b"%0*d" % (label_digits, label))
        if actual != crc:
            yield f"sample {name}: its JPEG has changed, got CRC-32 {actual:08x}, expected {crc:08x}"
        elif piece != expected:
            yield f"sample {name}: {_first_difference(piece, expected, pos)}"
        elif fault := jpeg_fault(jpeg, width, height):
            yield f"sample {name}: {fault}"
        pos += len(expected)
    expected = tar_end(pos)
    tail = file.read(len(expected))
    digest.update(tail)
    if tail != expected:
        yield f"its end: {_first_difference(tail, expected, pos)}"


def _check_idx(shard: ShardFiles, name: str, samples: NDArray[Any] | None, stored: NDArray[Any] | None) -> None:
    def work() -> bytes:
        check_size(shard.store, name, shard.idx)
        return shard.store.read(name)

    actual = read_with_retry(shard.store, name, work)
    if samples is not None and stored is not None:
        expected = dali_index(samples, stored, shard.label_digits)
        if actual != expected:
            raise Damage(f"not the index of its tar: {_first_difference(actual, expected, 0)}")
    check_sha256(hashlib.sha256(actual).hexdigest(), shard.idx)


def jpeg_fault(jpeg: bytes, width: int, height: int) -> str | None:
    """The fault of a stored JPEG, or None: it must decode to (height, width) px and be baseline colour."""
    try:
        rows, columns, colour, _ = simplejpeg.decode_jpeg_header(jpeg)
        simplejpeg.decode_jpeg(jpeg)
    except ValueError as error:
        return f"its JPEG cannot be decoded, got '{error}', expected a whole picture"
    if (columns, rows) != (width, height):
        return f"other pixels than the index says, got {columns}x{rows}, expected {width}x{height}"
    if colour not in ("RGB", "YCbCr"):
        return f"not in colour, got {colour}, expected YCbCr or RGB"
    frame = _sof_marker(jpeg)
    return None if frame == _BASELINE else f"not a baseline JPEG, got SOF{frame - _BASELINE}, expected SOF0"


def _sof_marker(jpeg: bytes) -> int:
    """The marker that starts the frame, 0xC0..0xCF, of a valid JPEG. Source: ITU-T T.81, annex B."""
    pos = 2
    while not (0xC0 <= jpeg[pos + 1] <= 0xCF and jpeg[pos + 1] not in _NO_FRAME):
        pos += 2 + int.from_bytes(jpeg[pos + 2 : pos + 4], "big")
    return jpeg[pos + 1]


def _first_difference(actual: bytes, expected: bytes, pos: int) -> str:
    """Describe the first difference between two byte strings that start at offset `pos`."""
    short = min(len(actual), len(expected))
    pair = np.frombuffer(actual, np.uint8, short) != np.frombuffer(expected, np.uint8, short)
    i = int(pair.argmax()) if pair.any() else short
    values = [f"0x{data[i]:02x}" if i < len(data) else "the end" for data in (actual, expected)]
    return f"byte {pos + i} has changed, got {values[0]}, expected {values[1]}"


def _check_stop() -> None:
    if _stop is not None and _stop.is_set():
        raise KeyboardInterrupt
