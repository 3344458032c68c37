"""Freed memory is kept for the next batch without page faults, and more can be reserved."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import ROOT
from tests.support.commands import Ended

_CODE = """
import json, resource, sys
import numpy as np
from resolute.train.devices.memory import fault_in, keep_freed_memory

took = keep_freed_memory() if sys.argv[1] in ("kept", "more") else None
if sys.argv[1] == "loader":
    from resolute import Loader, Plan, ShardSet, Stage

    with Loader(Plan(ShardSet.open(sys.argv[2]), [Stage(res=32, epochs=1, batch_size=16)])) as loader:
        next(loader)
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
    done = subprocess.run([sys.executable, "-c", _CODE, way], cwd=ROOT, capture_output=True, text=True, check=True)
    took, counts = json.loads(done.stdout)
    return took, counts


@pytest.mark.slow
def test_freed_memory_causes_no_page_faults_again_and_more_can_be_reserved() -> None:
    took, counts = faults("kept")
    if not took:
        pytest.skip("the C library of this machine has no mallopt; memory is left as it comes")
    assert counts[0] > 20  # 48 MiB are some thousand pages, or two dozen huge ones
    assert max(counts[1:]) < counts[0] / 4
    assert faults("more")[1][0] < counts[0] / 4  # 64 MiB, where 48 were freed


@pytest.mark.slow
def test_a_loader_does_not_change_the_memory_settings_of_its_process(
    shard_root: Path, forked: Callable[..., Ended]
) -> None:
    """Freed memory still goes back to the system: other libraries may rely on it."""
    done = forked("tests.support.execute", _CODE, "loader", shard_root)
    assert done.status == 0, done.err
    assert min(json.loads(done.out)[1]) > 20  # faulted in each time; 48 MiB are at least two dozen huge pages


@pytest.mark.slow
@pytest.mark.parametrize(("given", "expected"), [
    ({}, "expandable_segments:True"), ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, None),
])  # fmt: skip
def test_torch_is_told_to_grow_segments_unless_the_user_says_otherwise(
    given: dict[str, str], expected: str | None
) -> None:
    code = "import os, resolute.train; print(os.environ.get('PYTORCH_ALLOC_CONF'))"
    plain = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    done = subprocess.run([sys.executable, "-c", code], env={**plain, **given}, capture_output=True, text=True,
                          check=True, cwd=ROOT)  # fmt: skip
    assert done.stdout.strip() == str(expected)
