"""Photos that the sources hold twice: the same file in SRC and VAL, and exact copies, which are files of equal bytes.

Copies are found before the conversion. Only photos of equal size are read: a piece of each, and then all of those with
equal pieces.

Tables hold, while copies are looked for, a row for each photo: `equal_sizes` those that may have a copy, with the
columns source (UTINYINT, its number), position, path, offset, nbytes, stored_as and size_bytes as in `Photos.rows`;
`pieces` and `wholes` those that were read, with source, position and digest (UBIGINT; 0: the photo is rejected).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resolute.errors import ResoluteError
from resolute.prep.sources.fetch import fetch
from resolute.prep.sources.image_ref import MISSING, UNSEEN, ZIPPED, ByteRange
from resolute.prep.sources.reject import Reject
from resolute.prep.storage.thread_map import thread_map
from resolute.urls import is_url, without_credentials

from .database import Database
from .photos import Photos

__all__ = ["ExactCopies", "check_not_across", "find_copies", "leaders", "refuse_same_files"]

_PIECE_BYTES = 4096
_THREADS = 8
_PER_CALL = 256  # photos of which a thread reads pieces
_CHUNK = 1 << 14
_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class ExactCopies:
    """Groups of photos with equal bytes: `groups` maps each source to (N,) i8, -1 for a photo without a copy."""

    groups: Mapping[str, NDArray[np.int64]]

    @property
    def extra(self) -> int:
        """The number of photos beyond the first of each group."""
        numbers = np.concatenate(list(self.groups.values()))
        return int((numbers >= 0).sum() - (numbers.max(initial=-1) + 1))


def refuse_same_files(train: Photos, val: Photos, src: str, val_src: str) -> None:
    """Raise `ResoluteError` if the sources share files: the same path, however it is written, or archive member."""
    in_val = {location: position for position, location in _locations(val)}
    shared = {in_val[location] for _, location in _locations(train) if location in in_val}
    if shared:
        raise ResoluteError(
            f"{val_src}: holds photos of SRC, got {len(shared)} files that are also in {src}, such as "
            f"{_first_names(val, sorted(shared))}, expected none; leave them out of SRC or VAL"
        )


def _locations(photos: Photos) -> Iterator[tuple[int, tuple[str, int]]]:
    """Position, real path and offset of each photo (-1: an entire file); links to files are not followed."""
    real = lru_cache(1 << 16)(_real)
    for position, place in photos.places():
        folder, slash, name = place.path.rpartition("/")
        path = f"{real(folder or slash)}/{name}" if place.offset < 0 else real(place.path)
        yield position, (path, place.offset)


def _real(path: str) -> str:
    return without_credentials(path) if is_url(path) else os.path.realpath(path)


def find_copies(sources: Mapping[str, Photos], *, remote: bool = False) -> ExactCopies | None:
    """The exact copies among all photos; None if these are behind URLs, unless `remote`: then they are read too."""
    is_remote = any(photos.is_remote for photos in sources.values())
    if is_remote and not remote:
        return None
    database = next(iter(sources.values())).database
    rows = " UNION ALL ".join(
        f'SELECT {n}::UTINYINT AS source, position, path, "offset", nbytes, stored_as, size_bytes FROM {photos.rows}'
        for n, photos in enumerate(sources.values())
    )
    database.run(
        f"CREATE OR REPLACE TABLE equal_sizes AS SELECT * FROM ({rows}) "
        f"WHERE (size_bytes > 0 AND stored_as <> {MISSING}) OR stored_as = {UNSEEN} "
        "QUALIFY count(*) OVER (PARTITION BY size_bytes) > 1"
    )
    # why: a piece of packed bytes says nothing, so that photos of this size have to be read
    whole = "true" if is_remote else (f"size_bytes IN (SELECT size_bytes FROM equal_sizes WHERE stored_as = {ZIPPED})")
    stamps = {path: stamp for photos in sources.values() for path, stamp in photos.stamps.items()}
    servers = [url for photos in sources.values() for url in photos.servers] if is_remote else []
    _digest_photos(database, "pieces", f"NOT {whole}", stamps, servers, _piece, _PER_CALL)
    _digest_photos(
        database,
        "wholes",
        f"{whole} OR (source, position) IN (SELECT (source, position) FROM {_recurring('pieces')})",
        stamps,
        servers,
        _whole,
        1,
    )
    found = database.arrays(f"SELECT * FROM {_recurring('wholes')}")
    numbers = np.unique(found["digest"], return_inverse=True)[1]
    groups = {}
    for n, (name, photos) in enumerate(sources.items()):
        groups[name] = np.full(len(photos), -1, np.int64)
        own = found["source"] == n
        groups[name][found["position"][own]] = numbers[own]
    for table in ("equal_sizes", "pieces", "wholes"):
        database.run(f"DROP TABLE {table}")
    return ExactCopies(groups=groups)


def _recurring(table: str) -> str:
    """The rows of `table` whose digest is that of another row too; 0 is none."""
    return f"(SELECT * FROM {table} WHERE digest > 0 QUALIFY count(*) OVER (PARTITION BY digest) > 1)"


def _digest_photos(
    database: Database,
    table: str,
    chosen: str,
    stamps: Mapping[str, str],
    servers: Sequence[str],
    digest: Callable[[ByteRange, Sequence[str]], int],
    per_call: int,
) -> None:
    """Make `table` of (source, position, digest) of the `chosen` rows of `equal_sizes`, `per_call` in a call.

    `stamps` are the states of the archives, as in `Photos`, and `servers` as for `fetch`.
    """
    database.run(f"CREATE OR REPLACE TABLE {table} (source UTINYINT, position UINTEGER, digest UBIGINT)")
    photos = database.rows(
        f'SELECT source, position, path, "offset", nbytes, stored_as, size_bytes FROM equal_sizes WHERE {chosen} '
        "ORDER BY source, position"
    )

    def work(block: Sequence[tuple[Any, ...]]) -> list[tuple[int, int, int]]:
        digests = []
        for source, at, path, offset, nbytes, stored_as, size_bytes in block:
            file = os.fsdecode(path)
            place = ByteRange(file, offset, nbytes, stored_as, size_bytes, stamps.get(file, ""))
            digests.append((source, at, digest(place, servers)))
        return digests

    digested = chain.from_iterable(thread_map(work, _batched(photos, per_call), _THREADS))
    for block in _batched(digested, _CHUNK):
        sources, positions, digests = (np.array(column, np.uint64) for column in zip(*block, strict=True))
        database.run_on(
            {"source": sources, "position": positions, "digest": digests},
            f"INSERT INTO {table} SELECT source, position, digest FROM columns",
        )


def _batched(items: Iterator[Any], count: int) -> Iterator[list[Any]]:
    while batch := list(islice(items, count)):
        yield batch


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little")


def _piece(place: ByteRange, servers: Sequence[str]) -> int:
    """The digest of a few kB from the middle of a photo; 0 if it is rejected.

    Raises `StorageError` for unavailable storage: a photo that is skipped here could have its copy in another split.
    """
    start = max(0, place.offset) + max(0, place.nbytes - _PIECE_BYTES) // 2
    nbytes = min(_PIECE_BYTES, place.nbytes)
    if place.offset < 0 and not is_url(place.path):  # as nearly always, and several times as fast
        with suppress(OSError):  # which `fetch` repeats and judges
            data = _read_local(place.path, nbytes, start)
            if len(data) == nbytes:
                return _digest(b"%d " % place.nbytes + data)
    piece = place._replace(offset=start, nbytes=nbytes, size_bytes=nbytes)
    try:
        return _digest(b"%d " % place.nbytes + fetch(piece, servers=servers))
    except Reject:
        return 0


def _read_local(path: str, nbytes: int, offset: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # why: a list may name a pipe
    try:
        return os.pread(descriptor, nbytes, offset)
    finally:
        os.close(descriptor)


def _whole(place: ByteRange, servers: Sequence[str]) -> int:
    """The digest of a photo; 0 if it is rejected. Raises `StorageError` for unavailable storage."""
    try:
        return _digest(fetch(place, servers=servers))
    except Reject:
        return 0


def leaders(groups: NDArray[np.int64], known: NDArray[np.bool_] | None = None) -> NDArray[np.int64]:
    """(n,) the position of the first photo with the same bytes, of those that are `known` if there are any.

    It is its own for a photo without a copy.
    """
    first = np.arange(len(groups))
    copied = np.flatnonzero(groups >= 0)
    if known is not None:
        copied = copied[np.argsort(~known[copied], kind="stable")]
    _, begins, inverse = np.unique(groups[copied], return_index=True, return_inverse=True)
    first[copied] = copied[begins[inverse]]
    return first


def check_not_across(where: str, val: Photos, train_groups: NDArray[np.int64], val_groups: NDArray[np.int64]) -> None:
    """Raise `ResoluteError` if photos of val have copies in train.

    `val_groups` (N,) are the groups of the photos of the source `val`, -1 also for those that are not in val.
    """
    shared = np.flatnonzero((val_groups >= 0) & np.isin(val_groups, train_groups)).tolist()
    if shared:
        raise ResoluteError(
            f"{where}: photos of val are in train too, got {len(shared)} with exact copies there, such as "
            f"{_first_names(val, shared)}, expected none; leave the copies out of train with DUPLICATES=drop "
            "(--duplicates drop), or accept them with DUPLICATES=keep"
        )


def _first_names(images: Photos, positions: Sequence[int]) -> str:
    return ", ".join(images.names(positions[:_NAMED])) + (", …" if len(positions) > _NAMED else "")
