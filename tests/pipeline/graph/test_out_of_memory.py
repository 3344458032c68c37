"""A GPU whose memory is exhausted inside DALI is reported like one inside torch."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from nvidia.dali.pipeline import Pipeline

from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.loader import Loader
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import Stage
from resolute.train.planner.batch_size import out_of_memory

IN_AN_OPERATOR = """Error in MIXED operator `nvidia.dali.fn.decoders.image`,
encountered:

CUDA allocation failed
Can't allocate 51380224 bytes on device 0.
Current pipeline object is no longer valid."""


@pytest.mark.parametrize(
    ("error", "of_the_gpu"),
    [
        (RuntimeError(IN_AN_OPERATOR), True),
        (MemoryError("CUDA allocation failed"), True),
        (RuntimeError("CUDA runtime API error cudaErrorMemoryAllocation (2):\nout of memory"), True),
        (MemoryError("Can't allocate 51380224 bytes on host."), False),
    ],
)
def test_memory_that_dali_cannot_allocate_on_a_gpu_is_torch_s_error(
    shard_set: ShardSet, error: Exception, of_the_gpu: bool
) -> None:
    """And the loader continues with the same batch."""
    with Loader(Plan(shard_set, [Stage(res=32, epochs=2, batch_size=16)], seed=1)) as loader:
        next(loader)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Pipeline, "share_outputs", Mock(side_effect=error))
            with pytest.raises((RuntimeError, MemoryError)) as caught:
                next(loader)
        assert next(loader).spec.index == 1
    if of_the_gpu:
        assert isinstance(caught.value, torch.OutOfMemoryError)
        assert out_of_memory(caught.value)
        assert str(caught.value).startswith("CUDA out of memory in DALI: C")
        assert "\n" not in str(caught.value)
    else:
        assert caught.value is error


def test_a_graph_that_does_not_fit_at_the_start_is_torch_s_error(
    monkeypatch: pytest.MonkeyPatch, shard_set: ShardSet
) -> None:
    monkeypatch.setattr(Pipeline, "build", Mock(side_effect=RuntimeError(IN_AN_OPERATOR)))
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory in DALI: CUDA allocation failed$"):
        Loader(Plan(shard_set, [Stage(res=32, epochs=1, batch_size=16)]))
