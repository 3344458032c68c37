"""`StepGraphs`: forward and backward pass of a training step as CUDA graphs, one per stage and batch size.

A small network launches its kernels more slowly than the GPU runs them; a graph launches all of them at once. Captured
in thread-local mode, because the loader's threads call CUDA meanwhile. Optimizer, clipping and EMA stay eager.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from resolute import cuda
from resolute.errors import ResoluteError
from resolute.pipeline.loader.batch import Batch
from resolute.train.recipe.schema import Recipe

__all__ = ["StepGraphs", "check_cuda_graphs"]

_EAGER_STEPS = 3  # before a capture, which must find everything allocated and initialised. Source: torch's CUDA notes
_TENSORS = ("images", "targets", "partner_labels", "lam")


def check_cuda_graphs(recipe: Recipe, *, device: torch.device, world_size: int) -> None:
    """Raise `ResoluteError`, naming the key, for what `precision.cuda_graphs` cannot capture."""

    def refuse(got: str, expected: str) -> ResoluteError:
        return ResoluteError(f"precision.cuda_graphs: got true {got}, expected {expected}; remove the key")

    if device.type != "cuda":
        raise refuse(f"on a {device.type.upper()}", "a GPU")
    if world_size > 1:
        raise refuse(f"with {world_size} ranks", "one GPU")
    if recipe.optim.grad_accum_steps > 1:
        raise refuse(f"with optim.grad_accum_steps = {recipe.optim.grad_accum_steps}", "1")
    if recipe.model.grad_checkpointing:
        raise refuse("with model.grad_checkpointing", "false")
    for number, stage in enumerate(recipe.stages):
        if len({*stage.shapes}) > 1:
            sizes = ", ".join(f"{shape.batch_size} of {shape.res} px" for shape in stage.shapes)
            raise refuse(f"with several shapes in stages[{number}] ({sizes})", "one res and batch_size per stage")


@dataclass
class _Captured:
    graph: Any
    batch: Batch  # whose tensors the graph reads
    loss: torch.Tensor
    gradients: list[tuple[nn.Parameter, torch.Tensor]]


class StepGraphs:
    """Runs `forward_backward(batch)` of a learner through the graph of the batch's stage and size, if there is one."""

    def __init__(self, network: nn.Module, forward_backward: Callable[[Batch], torch.Tensor]) -> None:
        self._network, self._forward_backward = network, forward_backward
        self._captured: dict[tuple[int, int, int], _Captured] = {}
        self._pool: Any = None  # of memory, shared by all graphs: only one runs at a time

    def capture(self, batch: Batch) -> None:
        """Capture the graph for batches like `batch`; a no-op if there is one.

        Weights and the optimizer are unchanged afterwards; norm statistics and random state are not. Raises
        `torch.OutOfMemoryError`.
        """
        if (key := _key(batch)) in self._captured:
            return
        device = batch.images.device
        batch = dataclasses.replace(batch, **{name: getattr(batch, name).clone() for name in _TENSORS})
        with cuda.side_stream(device):
            for _ in range(_EAGER_STEPS):
                self._network.zero_grad(set_to_none=True)
                self._forward_backward(batch)
        self._network.zero_grad(set_to_none=True)  # why: backward then allocates the gradients in the graph's pool
        graph, loss = cuda.captured_graph(lambda: self._forward_backward(batch), pool=self._pool)
        self._pool = self._pool or graph.pool()
        gradients = [
            (parameter, parameter.grad) for parameter in self._network.parameters() if parameter.grad is not None
        ]
        self._captured[key] = _Captured(graph=graph, batch=batch, loss=loss, gradients=gradients)
        self._network.zero_grad(set_to_none=True)

    def __call__(self, batch: Batch) -> torch.Tensor:
        """The batch's loss, a new tensor; the gradients are in the parameters' `grad` until the next call (no sync)."""
        captured = self._captured.get(_key(batch))
        if captured is None:  # the last batch of an epoch, if it is smaller
            return self._forward_backward(batch)
        for name in _TENSORS:
            getattr(captured.batch, name).copy_(getattr(batch, name), non_blocking=True)
        captured.graph.replay()
        for parameter, gradient in captured.gradients:
            parameter.grad = gradient
        return captured.loss.clone()


def _key(batch: Batch) -> tuple[int, int, int]:
    return batch.spec.stage, batch.spec.res, len(batch.images)
