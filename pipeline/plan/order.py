"""Sample order: the sample at each position of an epoch, in O(1) time and memory, without any list of samples.

All samples lie on a ring that is shuffled once per run. An epoch takes a range of ring places (the next ones, or always
the first) and visits each exactly once. There are two orders:

* `shuffled`: the ring is a permutation of all samples, and an epoch is a permutation of its range. All reads are
  random.
* `windowed`: the ring is a permutation of blocks of consecutively stored samples, and an epoch reads its blocks one
  after another, in a random order of its own. `WINDOW_BLOCKS` blocks are open at any time: each block is divided into
  as many random groups, and turn t of the epoch (as long as a block) takes group 0 of the block opened in turn t,
  group 1 of the block opened in turn t - 1, and so on, shuffled. So each turn opens one block and finishes one, and a
  batch is drawn from `WINDOW_BLOCKS * BLOCK_SAMPLES` samples. (An epoch is cyclic: its first turns take groups of its
  last blocks, so it begins by opening a full window.) Samples outside complete blocks (at the ends of the range and of
  the set) are spread evenly over the epoch.

A run that uses both orders has one ring of blocks for all epochs, so that the ranges of its epochs follow each other
and nest. Everything is a pure function of the position; there is no state.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from resolute.pipeline.jit import compiled

from .permutation import stream_key
from .rng import U64, Stream, derive, half_bits, permute, permute_index

__all__ = ["BLOCK_SAMPLES", "WINDOW_BLOCKS", "Order", "block_samples", "sample_ids"]

Order = Literal["shuffled", "windowed"]

# why 1024: 12 MB at 128 px and 30 MB at 224 px (11.6 and 29.1 kB per sample), so with a latency of 10 ms and 100 MB/s
# a ranged read spends nine tenths of its time on data, and the open blocks take 0.2 to 0.5 GB of cache.
BLOCK_SAMPLES = 1024
WINDOW_BLOCKS = 16  # why 16: a batch of 256 has 16 samples of each open block (LOG.md, 2026-11-21)
_MIN_BLOCKS = 64  # small sets get smaller blocks, so that there is still something to shuffle

_EPOCH_BLOCKS, _TURN, _GROUPS, _REST, _SHIFT = (U64(i) for i in range(1, 6))
_RING_BLOCKS = U64(1)


def block_samples(total: int) -> int:
    """Samples per block in a set of `total` samples: a power of two from 1 to `BLOCK_SAMPLES`."""
    return 1 << (max(1, min(BLOCK_SAMPLES, total // _MIN_BLOCKS)).bit_length() - 1)


def sample_ids(
    order: Order,
    positions: NDArray[np.int64],
    *,
    seed: int,
    epoch: int,
    samples: int,
    offset: int,
    total: int,
    ring: Order | None = None,
    block: int | None = None,
    window: int = WINDOW_BLOCKS,
) -> NDArray[np.int64]:
    """Sample numbers (N,) int64 at `positions` (N,) of an epoch; each position is in [0, samples).

    samples, offset   length and start of the epoch's range on the ring
    total             samples on the ring
    ring              order of the ring; None: `order`
    block, window     samples per block (None: `block_samples(total)`) and open blocks; powers of two, for blocks only
    """
    ring_key, epoch_key = stream_key(seed, Stream.RING), stream_key(seed, Stream.ORDER, epoch)
    size = block or block_samples(total)
    if order == "shuffled":
        places = (offset + permute(epoch_key, positions, samples)) % total
        if ring != "windowed":
            return permute(ring_key, places, total)
        _ring_samples(places, size, total // size, U64(ring_key))
        return places
    runs, rest = _ring_ranges(offset, samples, total, size)
    out = np.empty(len(positions), np.int64)
    _blocks(
        np.ascontiguousarray(positions, np.int64),
        samples,
        size,
        min(window, size),
        runs,
        rest,
        total // size,
        U64(ring_key),
        U64(epoch_key),
        out,
    )
    return out


def _ring_ranges(offset: int, samples: int, total: int, size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """An epoch's range: (2, 2) first and count of complete blocks; (k, 2) start and length of the remainders."""
    end, complete = offset + samples, total // size
    runs, rest = [], []
    for low, high in ((offset, min(end, total)), (0, max(0, end - total))):
        first, last = -(-low // size), min(high // size, complete)
        if last > first:
            runs.append((first, last - first))
            rest += [(low, first * size - low), (last * size, high - last * size)]
        else:
            runs.append((0, 0))
            rest.append((low, high - low))
    return np.array(runs, np.int64), np.array(rest, np.int64)


@compiled
def _ring_samples(places: Any, size: Any, blocks: Any, ring_key: Any) -> None:
    key, half = derive(ring_key, _RING_BLOCKS), half_bits(blocks)
    for i in range(len(places)):
        places[i] = _sample(places[i], size, blocks, key, half)


@compiled
def _sample(place: Any, size: Any, blocks: Any, key: Any, half: Any) -> Any:
    """The sample at a place of the ring of blocks; samples outside complete blocks are at its end."""
    number, inside = divmod(place, size)
    return permute_index(key, number, blocks, half) * size + inside if number < blocks else place


@compiled
def _blocks(
    positions: Any,
    samples: Any,
    size: Any,
    window: Any,
    runs: Any,
    rest: Any,
    ring_blocks: Any,
    ring_key: Any,
    epoch_key: Any,
    out: Any,
) -> None:
    ring, chosen, turns = derive(ring_key, _RING_BLOCKS), derive(epoch_key, _EPOCH_BLOCKS), derive(epoch_key, _TURN)
    groups, rest_key = derive(epoch_key, _GROUPS), derive(epoch_key, _REST)
    blocks, spread, group = runs[0, 1] + runs[1, 1], rest[:, 1].sum(), size // window
    shift = np.int64(derive(epoch_key, _SHIFT) % U64(samples))
    skipped = (shift * spread + samples - 1) // samples
    half_ring, half_blocks, half_spread, half_size = (
        half_bits(ring_blocks),
        half_bits(blocks),
        half_bits(spread),
        half_bits(size),
    )
    for i in range(len(positions)):
        s = positions[i]
        # counted from `shift` on, the k-th remaining sample is at position floor(k * samples / spread)
        turned = (s + shift) % samples
        k = (turned * spread + samples - 1) // samples
        if ((turned + 1) * spread + samples - 1) // samples > k:
            left, row = permute_index(rest_key, k, spread, half_spread), 0
            while left >= rest[row, 1]:
                left -= rest[row, 1]
                row += 1
            place = rest[row, 0] + left
        else:
            before = k - skipped if turned >= shift else k - skipped + spread  # remaining samples before position s
            turn, inside = divmod(s - before, size)
            inside = permute_index(derive(turns, U64(turn)), inside, size, half_size)
            begun = (turn - inside // group) % blocks  # the turn in which the sample's block was opened
            inside = permute_index(derive(groups, U64(begun)), inside, size, half_size)
            number = permute_index(chosen, begun, blocks, half_blocks)
            number = runs[0, 0] + number if number < runs[0, 1] else runs[1, 0] + number - runs[0, 1]
            place = number * size + inside
        out[i] = _sample(place, size, ring_blocks, ring, half_ring)
