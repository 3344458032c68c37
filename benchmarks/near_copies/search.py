"""Time and memory of the search for near copies, with descriptors that are made up."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from typing import Any

import numpy as np

from resolute.prep.near_copies.index import Index

__all__ = ["measure_search"]


def measure_search(photos: int) -> dict[str, Any]:
    """Time, and memory of a process of its own, for `photos` descriptors that are made up, of which 5 % ask."""
    # why no pool: multiprocessing starts a process that outlives it, for which `timed_with_children` would wait
    done = subprocess.run([sys.executable, "-m", __name__, str(photos)], capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _search(photos: int) -> dict[str, Any]:
    random = np.random.default_rng(0)
    hashes = np.empty((photos, 11), np.uint64)
    hashes[:, 0] = random.integers(1, 2**64, photos, dtype=np.uint64)
    for part in range(1, 11):  # a part differs from the whole in a few bits
        flips = np.zeros(photos, np.uint64)
        for _ in range(8):
            flips ^= np.uint64(1) << random.integers(0, 64, photos, dtype=np.uint64)
        hashes[:, part] = hashes[:, 0] ^ flips
    Index(hashes[:64]).candidates(np.arange(64))  # compiles
    began = time.perf_counter()
    found, _ = Index(hashes).candidates(np.arange(photos // 20))
    return {
        "photos": photos,
        "asking": photos // 20,
        "seconds": time.perf_counter() - began,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "found": len(found),
    }


if __name__ == "__main__":
    print(json.dumps(_search(int(sys.argv[1]))))
