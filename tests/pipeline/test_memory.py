"""Memory that was freed is there for the next batch without being faulted in again, and some more if asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

_CODE = """
import json, resource, sys
import numpy as np
from pipeline.memory import fault_in, keep_freed_memory

took = None if sys.argv[1] == "left" else keep_freed_memory()
counts = []
if sys.argv[1] == "more":
    np.ones(48 << 20, np.uint8)
    fault_in(72 << 20)
for _ in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones((64 if sys.argv[1] == "more" else 48) << 20, np.uint8)
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


def test_there_is_more_memory_than_was_freed_where_it_was_asked_for() -> None:
    took, counts = faults("more")
    if not took:
        pytest.skip("the C library of this machine has no mallopt; memory is left as it comes")
    assert counts[0] < faults("kept")[1][0] / 4  # 64 MiB, where 48 were freed
