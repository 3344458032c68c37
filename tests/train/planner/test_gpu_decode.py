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
from resolute.train.planner.gpu_decode import difference
from tests.support import trials
from tests.support.gpu_on_cpu import GpuLoader

SETTINGS: dict[str, Any] = {"res": 48, "batch_size": 16, "device": "cuda:0", "threads": 1}


def test_decoders_that_differ_by_rounding_agree(shard_set: ShardSet) -> None:
    assert trials.in_simulation(shard_set, **SETTINGS) is None


@pytest.mark.parametrize("damaged", [slice(0, 1), slice(None)], ids=["one image of each batch", "all images"])
@pytest.mark.parametrize("change", [lambda images: images + 0.2, lambda images: images * math.nan, torch.zeros_like])
def test_other_images_than_those_of_the_cpu_are_a_difference(
    monkeypatch: pytest.MonkeyPatch, shard_set: ShardSet, damaged: slice, change: Callable[[Any], Any]
) -> None:
    """0.2 are 12 levels of 255."""

    def damage(loader: GpuLoader) -> Batch:
        batch = Loader.__next__(loader)
        batch.images[damaged] = change(batch.images[damaged])
        return batch

    monkeypatch.setattr(GpuLoader, "__next__", damage)
    found = trials.in_simulation(shard_set, **SETTINGS)
    assert found is not None
    assert found.startswith("images differ from the CPU's by ")
    assert "\n" not in found


@pytest.mark.slow
def test_the_trial_runs_in_a_child_process(shard_set: ShardSet) -> None:
    assert trial_fault(partial(trials.in_simulation, shard_set, **SETTINGS)) is None


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_trial_without_a_gpu_answers_with_the_error(shard_set: ShardSet) -> None:
    assert "no CUDA device found" in str(trial_fault(partial(difference, shard_set, **SETTINGS)))


def test_a_shard_set_is_sent_to_the_child_without_its_records(shard_set: ShardSet) -> None:
    assert len(pickle.dumps(shard_set)) < 100_000
