"""The Accelerate example: changing the number of processes in the middle of a run does not change the result."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from resolute.pipeline.examples import accelerate_loop
from tests import ROOT

WORDS = ["--res", "32,48", "--epochs", "1", "--batch-size", "25"]


@pytest.mark.slow
def test_a_run_resumed_with_another_number_of_processes_gives_the_same_weights(
    shard_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes up to the first checkpoint, then one: the weights of one process, up to the order of sums."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    words = [str(shard_root), *WORDS, "--checkpoint"]
    single = accelerate_loop.main([*words, str(tmp_path / "one")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
               accelerate_loop.__name__, *words, str(tmp_path / "two"), "--stop", "1"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("epoch 0 32 px: top-1 ")
    (tmp_path / "two" / "part").mkdir()  # what a run that is killed while it saves leaves
    resumed = accelerate_loop.main([*words, str(tmp_path / "two")])
    assert [path.name for path in (tmp_path / "two").iterdir()] == ["epoch-0001"]
    for name, weights in single.items():
        torch.testing.assert_close(resumed[name], weights, rtol=1e-3, atol=1e-4)
