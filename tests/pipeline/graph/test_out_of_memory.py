"""A GPU whose memory is exhausted inside DALI is reported like one inside torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.graph import graph
from resolute.pipeline.loader.loader import Loader
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import Stage
from resolute.train.planner.batch_size import out_of_memory

IN_AN_OPERATOR = """Error in MIXED operator `nvidia.dali.fn.decoders.image`,
encountered:

CUDA allocation failed
Can't allocate 51380224 bytes on device 0.
Current pipeline object is no longer valid."""


class Pipe:
    """A pipeline one of whose methods fails once."""

    def __init__(self, pipe: Any, method: str, error: Exception) -> None:
        self._pipe, self._method, self._error = pipe, method, error

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            self._method = ""

            def fail(*_: Any, **__: Any) -> Any:
                raise self._error

            return fail
        return getattr(self._pipe, name)


def raised(shards: ShardSet, error: Exception) -> BaseException:
    """Return the exception that the loader raises, and check that it continues with the same batch."""
    plan = Plan(shards, [Stage(res=32, epochs=2, batch_size=16)], seed=1)
    with Loader(plan) as loader:
        next(loader)
        loader._graph._pipe = Pipe(loader._graph._pipe, "share_outputs", error)
        with pytest.raises((RuntimeError, MemoryError)) as info:
            for _ in loader:
                pass
        position = loader.position
        assert next(loader).spec.index == position
    return info.value


@pytest.mark.parametrize("error", [
    RuntimeError(IN_AN_OPERATOR), MemoryError("CUDA allocation failed"),
    RuntimeError("CUDA runtime API error cudaErrorMemoryAllocation (2):\nout of memory"),
])  # fmt: skip
def test_memory_that_dali_cannot_allocate_on_a_gpu_is_torch_s_error(shard_set: ShardSet, error: Exception) -> None:
    got = raised(shard_set, error)
    assert isinstance(got, torch.OutOfMemoryError)
    assert out_of_memory(got)
    assert str(got).startswith("CUDA out of memory in DALI: C")
    assert "\n" not in str(got)


def test_other_errors_of_dali_stay_as_they_are(shard_set: ShardSet) -> None:
    error = MemoryError("Can't allocate 51380224 bytes on host.")
    assert raised(shard_set, error) is error


def test_a_graph_that_does_not_fit_at_the_start_is_torch_s_error(
    monkeypatch: pytest.MonkeyPatch, shard_set: ShardSet
) -> None:
    define = graph._graph
    monkeypatch.setattr(graph, "_graph", lambda **keys: Pipe(define(**keys), "build", RuntimeError(IN_AN_OPERATOR)))
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory in DALI: CUDA allocation failed$"):
        Loader(Plan(shard_set, [Stage(res=32, epochs=1, batch_size=16)]))
