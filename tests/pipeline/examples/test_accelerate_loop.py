"""The Accelerate example: the number of processes changes nothing, not even in the middle of a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeline.examples import accelerate_loop
from tests import ROOT

WORDS = ["--res", "32,48", "--epochs", "1", "--batch-size", "25"]


@pytest.mark.slow
def test_accelerate_goes_on_with_another_number_of_processes(
    shard_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes to the first checkpoint, then one: the weights that one gets alone, but for the order of sums."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    words = [str(shard_root), *WORDS, "--checkpoint"]
    one = accelerate_loop.main([*words, str(tmp_path / "one")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
               accelerate_loop.__name__, *words, str(tmp_path / "two"), "--stop", "1"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("epoch 0 32 px: top-1 ")
    two = accelerate_loop.main([*words, str(tmp_path / "two")])
    for name, weights in one.items():
        torch.testing.assert_close(two[name], weights, rtol=1e-3, atol=1e-4)
