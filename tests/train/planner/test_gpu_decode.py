"""The images of a GPU's decoder are compared with the CPU's, in a child process, with the GPU simulated."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.loader import Batch, Loader
from resolute.train.devices.trial import trial_fault
from tests.support import trials
from tests.support.gpu_on_cpu import GpuLoader

SETTINGS: dict[str, Any] = {"res": 48, "batch_size": 16, "device": "cuda:0", "threads": 1}


@pytest.mark.parametrize(("damaged", "change"), [
    (slice(0), lambda images: images), (slice(1), lambda images: images + 0.2),  # 12 levels of 255
    (slice(1), torch.zeros_like), (slice(None), lambda images: images * math.nan),
], ids=["no image", "a lighter image", "a black image", "no numbers"])  # fmt: skip
def test_only_decoders_that_differ_by_more_than_rounding_are_refused(
    monkeypatch: pytest.MonkeyPatch, shard_set: ShardSet, damaged: slice, change: Callable[[Any], Any]
) -> None:
    def damage(loader: GpuLoader) -> Batch:
        batch = Loader.__next__(loader)
        batch.images[damaged] = change(batch.images[damaged])
        return batch

    monkeypatch.setattr(GpuLoader, "__next__", damage)
    found = trials.in_simulation(shard_set, **SETTINGS)
    assert (found or "").startswith("images differ from the CPU's by ") == (damaged != slice(0))
    assert "\n" not in (found or "")


@pytest.mark.slow
def test_the_trial_runs_in_a_child_process_without_the_records_of_the_set(shard_set: ShardSet) -> None:
    assert len(pickle.dumps(shard_set)) < 100_000
    assert trial_fault(partial(trials.in_simulation, shard_set, **SETTINGS)) is None
