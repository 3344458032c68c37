"""Which sample comes at which place of an epoch? Two orders, both exact, both without a list of samples anywhere.

All samples lie on a ring that is shuffled once a run; an epoch takes the next `samples` places of it (or always the
first), each exactly once. The two orders differ in the ring and in how an epoch walks through its part:

* `full`: the ring is a permutation of all samples, and so is the epoch of its part. Every read is at a random place.
* `block`: the ring is a permutation of whole blocks of neighbours as stored, and the epoch reads block after block,
  in its own random order. `WINDOW_BLOCKS` blocks are open at any time: each is cut into as many random groups, and
  slot t of the epoch (as long as a block) takes group 0 of the block that begins there, group 1 of the one before it,
  and so on, shuffled. So one block comes in and one goes out a slot, at a steady pace, and a batch is drawn from
  `WINDOW_BLOCKS * BLOCK_SAMPLES` samples. (An epoch is a circle: its first slots take groups of its last blocks, so it
  begins by opening a whole window.) Samples of no whole block (the ends of a part, the last of the set) are spread
  evenly over the epoch.

A run that uses both has one ring for all its epochs, that of blocks, so that parts follow each other and nest.
Everything is a function of the position: any place of any epoch costs the same, and nothing is remembered.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pipeline.jit import compiled

from .rng import U64, derive, half_bits, permute_index, permute, stream_key

__all__ = ["BLOCK_SAMPLES", "WINDOW_BLOCKS", "Order", "block_samples", "sample_ids"]

Order = Literal["full", "block"]

# why: 12 MB at 128 px and 30 MB at 224 px (11.6 and 29.1 kB a sample): a ranged read spends nine tenths of its time on
# bytes where a request takes 10 ms and 100 MB/s come in; the open blocks together are 0.2 to 0.5 GB of cache.
BLOCK_SAMPLES = 1024
WINDOW_BLOCKS = 16  # why: a batch of 256 holds 16 of each open block; see benchmarks/order.py for more and fewer
_LEAST_BLOCKS = 64  # of a small set: smaller blocks, so that there is still something to shuffle

_RING, _ORDER = 0, 1  # purposes of random numbers; the plan has others
_EPOCH_BLOCKS, _SLOT, _GROUPS, _REST, _SHIFT = (U64(i) for i in range(1, 6))
_RING_BLOCKS = U64(1)


def block_samples(total: int) -> int:
    """Samples of a block in a set of `total`: a power of two, 1 to `BLOCK_SAMPLES`."""
    return 1 << (max(1, min(BLOCK_SAMPLES, total // _LEAST_BLOCKS)).bit_length() - 1)


def sample_ids(
    order: Order, positions: NDArray[np.int64], *, seed: int, epoch: int, samples: int, offset: int, total: int,
    ring: Order | None = None, block: int | None = None, window: int = WINDOW_BLOCKS,
) -> NDArray[np.int64]:  # fmt: skip
    """The samples (N,) at `positions` (N,), each in [0, samples), of an epoch over ring places from `offset` on.

    `total` samples are on the ring; `ring` is that of which order, its own if None. `block` (a power of two,
    `block_samples(total)` if None) and `window` (another) are for blocks alone.
    """
    ring_key, epoch_key = stream_key(seed, _RING), stream_key(seed, _ORDER, epoch)
    size = block or block_samples(total)
    if order == "full":
        places = (offset + permute(epoch_key, positions, samples)) % total
        if ring != "block":
            return permute(ring_key, places, total)
        _ring_samples(places, size, total // size, U64(ring_key))
        return places
    runs, rest = _parts(offset, samples, total, size)
    out = np.empty(len(positions), np.int64)
    _blocks(np.ascontiguousarray(positions, np.int64), samples, size, min(window, size), runs, rest, total // size,
            U64(ring_key), U64(epoch_key), out)  # fmt: skip
    return out


def _parts(offset: int, samples: int, total: int, size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What of the ring an epoch takes: (2, 2) first and number of whole blocks, (k, 2) start and length of the rest."""
    end, whole = offset + samples, total // size
    runs, rest = [], []
    for low, high in ((offset, min(end, total)), (0, max(0, end - total))):
        first, last = -(-low // size), min(high // size, whole)
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
    """The sample at a place of the ring of blocks; what is no whole block lies at its end."""
    number, inside = divmod(place, size)
    return permute_index(key, number, blocks, half) * size + inside if number < blocks else place


@compiled
def _blocks(
    positions: Any, samples: Any, size: Any, window: Any, runs: Any, rest: Any, ring_blocks: Any, ring_key: Any,
    epoch_key: Any, out: Any,
) -> None:  # fmt: skip
    ring, chosen, slots = derive(ring_key, _RING_BLOCKS), derive(epoch_key, _EPOCH_BLOCKS), derive(epoch_key, _SLOT)
    groups, others = derive(epoch_key, _GROUPS), derive(epoch_key, _REST)
    blocks, spread, group = runs[0, 1] + runs[1, 1], rest[:, 1].sum(), size // window
    shift = np.int64(derive(epoch_key, _SHIFT) % U64(samples))
    skipped = (shift * spread + samples - 1) // samples
    half_ring, half_blocks, half_spread, half_size = (
        half_bits(ring_blocks), half_bits(blocks), half_bits(spread), half_bits(size),
    )  # fmt: skip
    for i in range(len(positions)):
        s = positions[i]
        # on the circle that begins at `shift`, the k-th of the rest comes at floor(k * samples / spread)
        turned = (s + shift) % samples
        k = (turned * spread + samples - 1) // samples
        if ((turned + 1) * spread + samples - 1) // samples > k:
            left, part = permute_index(others, k, spread, half_spread), 0
            while left >= rest[part, 1]:
                left -= rest[part, 1]
                part += 1
            place = rest[part, 0] + left
        else:
            before = k - skipped if turned >= shift else k - skipped + spread  # of the rest, before s
            slot, inside = divmod(s - before, size)
            inside = permute_index(derive(slots, U64(slot)), inside, size, half_size)
            begun = (slot - inside // group) % blocks  # the slot where that sample's block began
            inside = permute_index(derive(groups, U64(begun)), inside, size, half_size)
            number = permute_index(chosen, begun, blocks, half_blocks)
            number = runs[0, 0] + number if number < runs[0, 1] else runs[1, 0] + number - runs[0, 1]
            place = number * size + inside
        out[i] = _sample(place, size, ring_blocks, ring, half_ring)
