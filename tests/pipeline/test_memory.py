"""Memory that was freed is there for the next batch without being faulted in again, where the loader asked for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

_CODE = """
import json, resource, sys
import numpy as np
from pipeline.memory import keep_freed_memory

took = keep_freed_memory() if sys.argv[1] == "kept" else None
counts = []
for _ in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(48 << 20, np.uint8)
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(json.dumps([took, counts]))
"""


def faults(way: str) -> tuple[bool | None, list[int]]:
    done = subprocess.run([sys.executable, "-c", _CODE, way], cwd=Path(__file__).parents[2], capture_output=True,
                          text=True, check=True)  # fmt: skip
    took, counts = json.loads(done.stdout)
    return took, counts


def test_the_second_batch_of_a_size_costs_no_page_faults() -> None:
    took, counts = faults("kept")
    if not took:
        pytest.skip("the C library of this machine has no mallopt; memory is left as it comes")
    assert counts[0] > 20  # 48 MiB are some thousand pages, or two dozen huge ones
    assert max(counts[1:]) < counts[0] / 4
