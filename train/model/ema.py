"""`WeightAverage`: the moving average of a network's weights (EMA), or their plain mean over the last epochs (SWA)."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn

from resolute.pipeline.plan.plan import BatchSpec
from resolute.train.recipe.schema import Ema

__all__ = ["WeightAverage"]


class WeightAverage:
    """Averages a network's parameters and floating-point buffers (norm statistics) after each step.

    `module` is the averaged network, in eval mode. Its other buffers, such as counts of batches, are the network's as
    of the last `copy_counts`.
    """

    def __init__(self, ema: Ema, network: nn.Module, *, epoch_steps: Sequence[float]) -> None:
        """`epoch_steps`: optimizer steps of each epoch. `network` may load weights, but not replace its tensors."""
        self.module = copy.deepcopy(network).requires_grad_(False).eval()
        self._decays = [_decay(ema, steps) for steps in epoch_steps]
        self._mean_from = round(sum(epoch_steps[: -ema.last_epochs])) if ema.last_epochs else None
        self._warms_up = ema.warmup
        # why lists: looking the tensors up by name in every step takes longer than averaging them
        pairs = [*zip(self.module.state_dict().values(), network.state_dict().values(), strict=True)]
        self._averages = [average for average, _ in pairs if average.is_floating_point()]
        self._sources = [source for _, source in pairs if source.is_floating_point()]
        self._counts = [pair for pair in pairs if not pair[0].is_floating_point()]

    def decay(self, spec: BatchSpec) -> float:
        """The weight of the previous average in the update after the step of `spec`."""
        if self._mean_from is not None:
            # Source: Izmailov et al., arXiv 1803.05407, algorithm 1: the mean of n + 1 models
            n = max(0, spec.step - self._mean_from)
            return n / (n + 1)
        # Source of the warm-up: timm's ModelEmaV3; the first step starts the average
        warm = 1 - (1 + spec.step) ** (-2 / 3) if self._warms_up else float(spec.step > 0)
        return min(self._decays[spec.epoch], warm)

    @torch.no_grad()
    def update(self, spec: BatchSpec) -> None:
        """Average the network's weights after the step of `spec` (no sync)."""
        torch._foreach_lerp_(self._averages, self._sources, weight=1.0 - self.decay(spec))

    @torch.no_grad()
    def copy_counts(self) -> None:
        """Copy the buffers that are not averaged, before `module` is used or saved."""
        for count, source in self._counts:
            count.copy_(source)  # no sync: within the device


def _decay(ema: Ema, epoch_steps: float) -> float:
    """The weight of the previous average per optimizer step, in an epoch of `epoch_steps` steps."""
    half_life = ema.half_life_steps or ema.half_life_epochs * epoch_steps
    return 0.5 ** (1 / half_life) if half_life else ema.decay
