"""Out of memory: which errors mean it, and what to change in the recipe."""

from __future__ import annotations

import torch

from resolute import cuda
from resolute.errors import ResoluteError
from resolute.pipeline.plan.plan import Plan
from resolute.train.recipe.schema import Recipe

__all__ = ["DoesNotFit", "out_of_memory"]

_GIB = 2**30
# Parts of the messages of RuntimeErrors that are not torch.OutOfMemoryError but have the same cause.
# Source: Accelerate's should_reduce_batch_size, and how cuBLAS and cuDNN report that they could not allocate
_NO_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "unable to find an engine to execute this computation",
)


def out_of_memory(error: Exception) -> bool:
    """Whether memory ran out, as far as torch, CUDA's libraries and DALI tell."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)
    )


class DoesNotFit(Exception):
    """A step ran out of memory."""

    def __init__(self, split: str, res: int, samples: int) -> None:
        """`samples`: batch size on this rank; `res`: px."""
        super().__init__(split, res, samples)
        self.split, self.res, self.samples = split, res, samples

    def describe(self, plan: Plan, recipe: Recipe, device: torch.device) -> ResoluteError:
        """The error for the user: which stages, the memory in use, and what to change in the recipe."""
        stages = sorted(
            {
                phase.stage
                for phase in plan.phases
                if phase.split == self.split and self.res in (shape.res for shape in phase.shapes)
            }
        )
        samples = self.samples
        if self.split == "val":
            advice = f"set eval.batch_size = {_half(recipe.eval.batch_size)}"
        else:
            micro_batches = recipe.optim.grad_accum_steps
            size = recipe.stages[stages[0]].batch_size_at(self.res)
            samples = -(-self.samples // micro_batches)
            advice = (
                f'set batch_size = {_half(size)} there ("auto" finds the largest that fits), or '
                f"optim.grad_accum_steps = {2 * micro_batches}, which keeps the batch size"
            )
        return ResoluteError(
            f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}, {self.split}: out of memory with images of "
            f"{samples}x3x{self.res}x{self.res}{_in_use(device)}, expected them to fit; {advice}"
        )


def _half(size: int) -> int:
    return size // 16 * 8 or max(1, size // 2)


def _in_use(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    values = (
        cuda.allocated_bytes(device),
        cuda.reserved_bytes(device),
        cuda.memory_limit_bytes(device),
        cuda.total_bytes(device),
    )
    used, reserved, limit, total = (f"{value / _GIB:.1f}" for value in values)
    return f" ({used} GiB in use, {reserved} GiB reserved by torch, limit {limit} GiB; the GPU has {total} GiB)"
