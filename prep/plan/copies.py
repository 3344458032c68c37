"""Photos that the sources hold twice: the same file in SRC and VAL, and exact copies, which are files of equal bytes.

Copies are found before the conversion. Only photos of equal size are read: a piece of each, and then all of those with
equal pieces.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resolute.errors import ResoluteError, strip_credentials
from resolute.prep.convert.reject import Reject
from resolute.prep.execute.thread_map import thread_map
from resolute.prep.sources.fetch import fetch
from resolute.prep.sources.image_ref import MISSING, UNSEEN, ZIPPED, ByteRange, is_url

from .catalog import ByteRanges, Catalog

__all__ = ["Copies", "check_not_across", "find_copies", "leaders", "refuse_same_files"]

_PIECE_BYTES = 4096
_THREADS = 8
_PER_CALL = 256  # photos of which a thread reads pieces
_CHUNK = 1 << 14
_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Groups of photos with equal bytes: `groups` maps each catalogue to (N,) i8, -1 for a photo without a copy."""

    groups: Mapping[str, NDArray[np.int64]]

    @property
    def extra(self) -> int:
        """The number of photos beyond the first of each group."""
        numbers = np.concatenate(list(self.groups.values()))
        return int((numbers >= 0).sum() - (numbers.max(initial=-1) + 1))


def refuse_same_files(train: Catalog, val: Catalog, src: str, val_src: str) -> None:
    """Raise `ResoluteError` if the catalogues share files: the same path, however it is written, or archive member."""
    hashes = [np.fromiter(map(hash, _locations(each)), np.int64, len(each)) for each in (train, val)]
    in_train, in_val = np.flatnonzero(np.isin(hashes[0], hashes[1])), np.flatnonzero(np.isin(hashes[1], hashes[0]))
    locations = set(_locations(train, in_train.tolist()))  # why: hashes may be equal by chance
    found = zip(in_val.tolist(), _locations(val, in_val.tolist()), strict=True)
    shared = [i for i, location in found if location in locations]
    if shared:
        raise ResoluteError(
            f"{val_src}: holds photos of SRC, got {len(shared)} files that are also in {src}, such as "
            f"{_first_names(val, shared)}, expected none; leave them out of SRC or VAL"
        )


def _locations(images: Catalog, positions: Iterable[int] | None = None) -> Iterator[tuple[str, int]]:
    """The real path and offset of each image (-1: an entire file); links to files are not followed."""
    ranges, real = ByteRanges(images), lru_cache(1 << 16)(_real)
    parts = (ranges[first : first + _CHUNK] for first in range(0, len(ranges), _CHUNK)) if positions is None else (
        (ranges[i],) for i in positions
    )  # fmt: skip
    for part in parts:
        for place in part:
            folder, slash, name = place.path.rpartition("/")
            yield f"{real(folder or slash)}/{name}" if place.offset < 0 else real(place.path), place.offset


def _real(path: str) -> str:
    return strip_credentials(path) if is_url(path) else os.path.realpath(path)


def find_copies(catalogs: Mapping[str, Catalog], *, remote: bool = False) -> Copies | None:
    """The exact copies among all photos; None if these are behind URLs, unless `remote`: then they are read too."""
    if any(map(_is_remote, catalogs.values())) and not remote:
        return None
    sizes, packed = (
        np.concatenate([each.entries[field] for each in catalogs.values()]) for field in ("size_bytes", "packed")
    )
    at = np.flatnonzero((sizes > 0) & (packed != MISSING) | (packed == UNSEEN))
    at = at[_recur(sizes[at])]
    places = _Places(list(catalogs.values()))
    # why: a piece of packed bytes says nothing, so that photos of this size have to be read
    whole = np.isin(sizes[at], sizes[at][packed[at] == ZIPPED]) | any(map(_is_remote, catalogs.values()))
    keys, partly = sizes[at].copy(), np.flatnonzero(~whole)
    calls = (partly[first : first + _PER_CALL] for first in range(0, len(partly), _PER_CALL))
    parts = thread_map(lambda call: [_piece(places[i]) for i in at[call].tolist()], calls, _THREADS)
    keys[partly] = np.fromiter(chain.from_iterable(parts), np.uint64, len(partly))
    at = at[_recur(keys)]
    digests = np.fromiter(thread_map(_whole, (places[i] for i in at.tolist()), _THREADS), np.uint64, len(at))
    is_copy = (digests > 0) & _recur(digests)
    numbers = np.full(len(sizes), -1, np.int64)
    numbers[at[is_copy]] = np.unique(digests[is_copy], return_inverse=True)[1]
    ends = np.cumsum([len(each) for each in catalogs.values()])
    return Copies(groups=dict(zip(catalogs, np.split(numbers, ends[:-1]), strict=True)))


class _Places:
    """The locations of the bytes of the photos of all catalogues, which are numbered one after the other."""

    def __init__(self, catalogs: Sequence[Catalog]) -> None:
        self._catalogs, self._ends = catalogs, np.cumsum([len(each) for each in catalogs])

    def __getitem__(self, i: int) -> ByteRange:
        which = int(np.searchsorted(self._ends, i, side="right"))
        return self._catalogs[which].byte_range(i - int(self._ends[which - 1] if which else 0))


def _is_remote(images: Catalog) -> bool:
    return is_url(images.root) or any(map(is_url, images.containers)) or images.names.find(b"://") >= 0


def _recur(values: NDArray[Any]) -> NDArray[np.bool_]:
    """(n,) whether each value occurs more than once."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    recurs: NDArray[np.bool_] = counts[inverse] > 1
    return recurs


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little")


def _piece(place: ByteRange) -> int:
    """The digest of a few kB from the middle of a photo; 0 if they cannot be read, which the conversion reports."""
    try:
        descriptor = os.open(place.path, os.O_RDONLY | os.O_NONBLOCK)  # why: a list may name a pipe
        try:
            start = max(0, place.offset) + max(0, place.nbytes - _PIECE_BYTES) // 2
            return _digest(b"%d " % place.nbytes + os.pread(descriptor, min(_PIECE_BYTES, place.nbytes), start))
        finally:
            os.close(descriptor)
    except OSError:
        return 0


def _whole(place: ByteRange) -> int:
    """The digest of a photo; 0 if it cannot be used."""
    try:
        return _digest(fetch(place))
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


def check_not_across(where: str, val: Catalog, train_groups: NDArray[np.int64], val_groups: NDArray[np.int64]) -> None:
    """Raise `ResoluteError` if photos of val have copies in train.

    `val_groups` (N,) are the groups of the photos of the catalogue `val`, -1 also for those that are not in val.
    """
    shared = np.flatnonzero((val_groups >= 0) & np.isin(val_groups, train_groups)).tolist()
    if shared:
        raise ResoluteError(
            f"{where}: photos of val are in train too, got {len(shared)} with exact copies there, such as "
            f"{_first_names(val, shared)}, expected none; leave the copies out of train with DUPLICATES=drop "
            "(--duplicates drop), or accept them with DUPLICATES=keep"
        )


def _first_names(images: Catalog, positions: Sequence[int]) -> str:
    return ", ".join(images.name(i) for i in positions[:_NAMED]) + (", …" if len(positions) > _NAMED else "")
