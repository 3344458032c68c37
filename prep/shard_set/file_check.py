"""Checks that a file of a set still has the bytes that prep wrote, that every JPEG in it decodes, and that the targets
in its tars are those of its records.

The manifest has the SHA-256 of every file. Files whose hashes match also agree with each other, as index and tars must,
because prep derived one from the other.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import simplejpeg

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.format import key_name
from resolute.prep.storage.child import init_child
from resolute.prep.storage.hashed_file import FileInfo
from resolute.prep.storage.output import Store
from resolute.prep.storage.retry import retry

from .record import ShardRecord, record_name
from .tar_format import BLOCK_BYTES, member_bytes, padded_bytes, target_file

__all__ = ["Damage", "check_file", "init_worker", "read_with_retry"]

T = TypeVar("T")
_PIECE_BYTES = 1 << 20


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
    except OSError as error:
        raise ResoluteError(
            f"{store.where}/{name}: cannot be read, got '{error.strerror or error}', expected a readable file; correct "
            "the cause and run verify again"
        ) from None


_stop: Any = None  # a worker's multiprocessing.Event


def init_worker(stop: Any, environ: Mapping[str, str]) -> None:
    """Make this process a worker: it ignores Ctrl-C, exits with its parent, and ends early once `stop` is set.

    It has the variables `environ`: the fork server has those of its own start, without credentials set since.
    """
    global _stop
    _stop = stop
    init_child(environ)


def check_file(store: Store, name: str, expected: FileInfo) -> str | None:
    """The damage of a file, or None. Reads it once; every JPEG of a tar is decoded."""
    record = _record_of(store, name) if name.endswith(".tar") else None
    try:
        digest, fault = read_with_retry(store, name, lambda: _read_through(store, name, expected, record))
    except Damage as damage:
        return str(damage)
    if digest != expected.sha256:
        where = f"{fault}; " if fault else ""
        return f"{where}changed since prep, got SHA-256 {digest[:12]}…, expected {expected.sha256[:12]}…"
    return fault


def _record_of(store: Store, name: str) -> ShardRecord | None:
    """The record of a tar; None if it is damaged, which is reported when the record itself is checked."""
    res, _, shard = name.removesuffix(".tar").partition("/")
    record = record_name(shard, res)
    try:
        return ShardRecord.parse(read_with_retry(store, record, lambda: store.read(record)))
    except (Damage, ValueError):
        return None


def _read_through(store: Store, name: str, expected: FileInfo, record: ShardRecord | None) -> tuple[str, str | None]:
    """(SHA-256, the first JPEG's fault or None) of a file. Raises `Damage` if it is missing or of another size."""
    size = store.size(name)
    if size is None:
        raise Damage("missing")
    if size != expected.nbytes:
        what = "cut short" if size < expected.nbytes else "too long"
        raise Damage(f"{what}, got {size} bytes, expected {expected.nbytes}")
    rows = [] if record is None else zip(record.samples, record.stored.tolist(), strict=True)
    digest, pos, first_fault = hashlib.sha256(), 0, None
    with store.open(name) as file:
        for sample, (offset, nbytes, crc, *_) in rows:
            piece = file.read(offset - pos + padded_bytes(nbytes) + BLOCK_BYTES)
            content = file.read(member_bytes(piece[-BLOCK_BYTES:]))
            digest.update(piece)
            digest.update(content)
            fault = _jpeg_fault(piece[offset - pos : offset - pos + nbytes], crc) or _target_fault(content, sample)
            if fault and first_fault is None:
                first_fault = f"sample {key_name(int(sample['key']))}: {fault}"
            pos += len(piece) + len(content)
            _check_stop()
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
            _check_stop()
    return digest.hexdigest(), first_fault


def _jpeg_fault(jpeg: bytes, expected_crc: int) -> str | None:
    crc = zlib.crc32(jpeg)
    if crc != expected_crc:
        return f"its JPEG has changed, got CRC-32 {crc:08x}, expected {expected_crc:08x}"
    try:
        simplejpeg.decode_jpeg(jpeg)
    except ValueError as error:
        return f"its JPEG cannot be decoded, got '{error}', expected a whole picture"
    return None


def _target_fault(content: bytes, sample: Any) -> str | None:
    """The fault of the file of a sample's target beside its record."""
    column = sample.dtype.names[-1]
    _, expected = target_file(column, sample[column], len(content))
    if content == expected:
        return None
    return f"its target has changed, got {content[:80]!r}, expected {expected[:80]!r} as in the index"


def _check_stop() -> None:
    if _stop is not None and _stop.is_set():
        raise KeyboardInterrupt
