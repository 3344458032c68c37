"""Finds the photos whose descriptors are alike, without comparing all with all.

The hashes of the whole photos are in four tables, each by 16 of their 64 bits. All hashes of a photo and of its mirror
image are looked up in these, as they are and with each single bit of the 16 changed. That finds every pair that differs
in at most 7 bits, and most of those that differ in a few more.

The hashes of the parts without a strip at one side have tables too, in which the hashes of the same part are looked up:
of two photos of which one has a bar over that strip, only these are alike.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resolute.pipeline.jit import compiled

from .descriptor import HASHES, MIRROR, has_hashes

__all__ = ["CANDIDATE", "Index", "equal_hashes"]

# `asked` and `found`: rows of photos; `bits` that differ between the hash of the `part` of the asking photo, as in
# `PARTS`, and that of the found photo, which shows it mirrored if `mirrored`: of its whole, or if `same_part` of the
# same part.
CANDIDATE = np.dtype(
    [("asked", "<i4"), ("found", "<i4"), ("bits", "u1"), ("part", "u1"), ("mirrored", "u1"), ("same_part", "u1")]
)
# Bits that may differ, by the number of photos: the more there are, the more have similar hashes by chance.
_MAX_BITS = ((50_000, 11), (200_000, 10), (2**31, 8))
_MIRRORED_PART = np.array([0, 2, 1, 3, 4])  # the part of the mirrored photo that shows the same, of parts 0 to 4
_TABLES, _TABLE_BITS = 4, 16
_KEYS = 1 << _TABLE_BITS
# Of photos that are alike by the thousand, such as products on white, only the closest candidates are compared.
MAX_FOUND = 64  # candidates of a photo
MAX_SEEN = 1 << 20  # hashes that are looked at for a photo: a millisecond
_PIECE = 4096  # photos that a thread asks for at a time


@compiled
def _table(hashes: Any, number: int) -> Any:
    """Rows by their key in a table: (start of each key, rows, hashes in the order of the rows)."""
    shift, mask = np.uint64(_TABLE_BITS * number), np.uint64(_KEYS - 1)
    starts = np.zeros(_KEYS + 1, np.int64)
    for value in hashes:
        starts[np.int64((value >> shift) & mask) + np.int64(1)] += 1
    starts = np.cumsum(starts)
    at = starts[:-1].copy()
    rows, sorted_hashes = np.empty(len(hashes), np.int32), np.empty(len(hashes), np.uint64)
    for row in range(len(hashes)):
        key = np.int64((hashes[row] >> shift) & mask)
        rows[at[key]] = row
        sorted_hashes[at[key]] = hashes[row]
        at[key] += 1
    return starts, rows, sorted_hashes


@compiled
def _bits(value: Any) -> Any:
    """The number of bits of a uint64 that are set. Source: Warren, Hacker's Delight, section 5-1."""
    value = value - ((value >> np.uint64(1)) & np.uint64(0x5555555555555555))
    value = (value & np.uint64(0x3333333333333333)) + ((value >> np.uint64(2)) & np.uint64(0x3333333333333333))
    value = (value + (value >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((value * np.uint64(0x0101010101010101)) >> np.uint64(56))


@compiled
def _look_up(
    own: Any, own_rows: Any, starts: Any, rows: Any, hashes: Any, max_bits: int, max_found: int, max_seen: int
) -> Any:
    """The candidates of photos with the hashes `own` (n, HASHES), which have the rows `own_rows` in the tables.

    The tables are those of the parts 0 to 4, (5, _TABLES, ...) each.
    Returns (m, 6) int32, columns as in CANDIDATE, and the number of photos for which not everything was looked at.
    """
    out = np.empty((1024, 6), np.int32)
    count, cut_short = 0, 0
    best = np.empty((max_found, 5), np.int32)  # of one photo: the columns from `found` on
    lookups = own.shape[1] + len(_MIRRORED_PART) - 1  # each part in the tables of the whole, then in its own
    for i in range(len(own)):
        kept, seen, lost = 0, 0, False
        for change in range(-1, _TABLE_BITS):  # why outermost: the closest hashes have the unchanged key
            for lookup in range(lookups):
                same_part = lookup >= own.shape[1]
                part = lookup - own.shape[1] + 1 if same_part else lookup
                for mirrored in range(2):
                    asked = own[i, part] ^ MIRROR if mirrored else own[i, part]
                    of = 0 if not same_part else _MIRRORED_PART[part] if mirrored else part
                    for table in range(_TABLES):
                        key = np.int64((asked >> np.uint64(_TABLE_BITS * table)) & np.uint64(_KEYS - 1))
                        if change >= 0:
                            key ^= 1 << change
                        start, stop = starts[of, table, key], starts[of, table, key + 1]
                        if seen + stop - start > max_seen:
                            lost, stop = True, min(stop, start + max(0, max_seen - seen))
                        seen += stop - start
                        for at in range(start, stop):
                            differing = _bits(hashes[of, table, at] ^ asked)
                            if differing > max_bits or rows[of, table, at] == own_rows[i]:
                                continue
                            found, place, worst = rows[of, table, at], -1, 0
                            for k in range(kept):
                                if best[k, 0] == found:
                                    place = k
                                    break
                                if best[k, 1] > best[worst, 1]:
                                    worst = k
                            if place < 0 and kept < max_found:
                                place = kept
                                kept += 1
                            elif place < 0:
                                lost = True
                                if differing >= best[worst, 1]:
                                    continue
                                place = worst
                            elif differing >= best[place, 1]:
                                continue
                            best[place, 0], best[place, 1], best[place, 2] = found, differing, part
                            best[place, 3], best[place, 4] = mirrored, same_part
        cut_short += lost
        if count + kept > len(out):
            larger = np.empty((2 * (count + kept), 6), np.int32)
            larger[:count] = out[:count]
            out = larger
        for k in range(kept):
            out[count, 0] = own_rows[i]
            out[count, 1:] = best[k]
            count += 1
    return out[:count].copy(), cut_short


@dataclass(frozen=True)
class Index:
    """The hashes of photos, (n, HASHES) uint64; rows of zeros, of photos without hashes, are never found."""

    hashes: NDArray[np.uint64]

    def candidates(self, asking: NDArray[np.int64], *, threads: int = 2) -> tuple[NDArray[np.void], int]:
        """The photos that are like those in the rows `asking`, and how many of these had too many of them.

        Returns (m,) CANDIDATE, each pair of photos once, with the smaller row of both either as `asked` or as `found`:
        whichever hash is closer; sorted by the smaller row, then by the other one. Of a photo that has more than
        `MAX_FOUND` of them, or more than `MAX_SEEN` hashes to look at, only some are found, the closest first.
        """
        max_bits = next(bits for photos, bits in _MAX_BITS if len(self.hashes) <= photos)
        present = np.flatnonzero(has_hashes(self.hashes)).astype(np.int32)
        starts = np.empty((len(_MIRRORED_PART), _TABLES, _KEYS + 1), np.int64)
        rows = np.empty((len(_MIRRORED_PART), _TABLES, len(present)), np.int32)
        hashes = np.empty(rows.shape, np.uint64)
        for part in range(len(_MIRRORED_PART)):
            own = np.ascontiguousarray(self.hashes[present, part])
            for number in range(_TABLES):
                starts[part, number], rows[part, number], hashes[part, number] = _table(own, number)
        asking_rows = np.searchsorted(present, asking).astype(np.int32)
        asking_rows = asking_rows[present[np.minimum(asking_rows, len(present) - 1)] == asking] if len(present) else []

        def look_up(first: int) -> tuple[NDArray[np.int32], int]:
            own_rows = asking_rows[first : first + _PIECE]
            own = self.hashes[present[own_rows]]
            found: tuple[NDArray[np.int32], int] = _look_up(
                own, own_rows, starts, rows, hashes, max_bits, MAX_FOUND, MAX_SEEN
            )
            return found

        with ThreadPoolExecutor(threads) as pool:
            parts = list(pool.map(look_up, range(0, len(asking_rows), _PIECE)))
        columns = np.concatenate([np.empty((0, 6), np.int32), *(part for part, _ in parts)])
        found = np.empty(len(columns), CANDIDATE)
        found["asked"], found["found"] = present[columns[:, 0]], present[columns[:, 1]]
        found["bits"], found["part"], found["mirrored"] = columns[:, 2], columns[:, 3], columns[:, 4]
        found["same_part"] = columns[:, 5]
        return _once(found), sum(cut_short for _, cut_short in parts)


def _once(found: NDArray[np.void]) -> NDArray[np.void]:
    """Each pair once, as its closest hashes found it, sorted by its rows."""
    low, high = np.minimum(found["asked"], found["found"]), np.maximum(found["asked"], found["found"])
    order = np.lexsort((found["asked"], found["part"], found["bits"], high, low))
    low, high = low[order], high[order]
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = (low[1:] != low[:-1]) | (high[1:] != high[:-1])
    return found[order[is_first]]


def equal_hashes(hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """(n,) the first row with the same hashes as each row of (n, HASHES): its own, unless there is an earlier one."""
    rows = np.ascontiguousarray(hashes).view(np.dtype((np.void, 8 * HASHES))).reshape(-1)
    _, first, inverse = np.unique(rows, return_index=True, return_inverse=True)
    return first[inverse].astype(np.int64)
