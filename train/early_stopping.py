"""Ends a stage or a run before the end of its plan: early stopping, and NaN or infinite losses or weights."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from resolute.console import counted
from resolute.errors import ResoluteError
from resolute.files import output_file
from resolute.pipeline.dataset.format import key_name
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import Stage
from resolute.train.recipe.schema import Stop
from resolute.train.score import best_score, main_metric

__all__ = ["BestSoFar", "NotFinite", "all_finite"]


class BestSoFar:
    """The best validation so far and early stopping; its state is part of checkpoints.

    Scores at different resolutions are not comparable: a validation at another resolution always replaces the best one,
    unless that was made at the resolution of the run's last validation. Every stage starts with its full patience.
    When it is used up, the stage ends, and with the last stage the run.
    """

    def __init__(self, stop: Stop, stages: Sequence[Stage]) -> None:
        """`stages`: those of the run."""
        self._stop = stop
        self._stages = [number for number, stage in enumerate(stages) for _ in range(stage.epochs)]  # of each epoch
        self._resolutions = [stages[number].validation_res for number in self._stages]
        self.best_score, self.best_epoch, self.best_weights = -math.inf, -1, "raw"
        self.ended = ""  # reason for ending the run early; "" if it did not
        self.stage_ended = ""  # the same of the latest epoch's stage, if others follow
        self._level, self._level_epoch = -math.inf, -1  # the last validation that improved by `min_delta`
        self._without = 0  # validations since then

    def update(self, record: dict[str, Any]) -> bool:
        """Take an epoch's record; returns whether it is the best so far, by raw or averaged weights."""
        self.stage_ended = ""
        score, metric = best_score(record), main_metric(record)
        if score is None:
            return False
        epoch = record["epoch"]
        res = self._resolutions[epoch]
        if is_best := self.best_epoch < 0 or self._is_better(score, res):
            self.best_score, self.best_epoch = score, epoch
            self.best_weights = "raw" if score == record[metric.key] else "ema"
        changed = self._level_epoch >= 0 and self._stages[epoch] != self._stages[self._level_epoch]
        if changed or score > self._level + self._stop.min_delta:
            self._level, self._level_epoch, self._without = score, epoch, 0
        else:
            self._without += 1
        following = self._stages[epoch + 1 : epoch + 2]
        if following == [self._stages[epoch]] and 0 < self._stop.patience <= self._without:
            level, without = metric.text(self._level), counted(self._without, "validation")
            reason = f"{metric.title} no better than {level} in {without}"
            if self._stages[epoch] == self._stages[-1]:
                self.ended = reason
            else:
                self.stage_ended = reason
        return is_best

    def _is_better(self, score: float, res: int) -> bool:
        """Whether a validation with this score at `res` px replaces the best one before it."""
        best_res = self._resolutions[self.best_epoch]
        return score > self.best_score if res == best_res else best_res != self._resolutions[-1]

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_stop", "_stages", "_resolutions")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class NotFinite(ResoluteError):
    """A loss, or the weights after a step, are NaN or infinite. `step`: its index, step, epoch, stage, res and lr."""

    def __init__(self, what: str, step: dict[str, Any]) -> None:
        super().__init__(f"{what} at step {step['step']} (lr {step['lr']:.4g}), expected finite numbers")
        self.what = what
        self.step = {name: step[name] for name in ("index", "step", "epoch", "stage", "res", "lr")}

    @classmethod
    def after(cls, plan: Plan, step: int, *, lr: float) -> NotFinite:
        """The error for weights that are not finite after optimizer step `step`."""
        phase = next(s for s in reversed(plan.phases) if s.split == "train" and s.first_step <= max(0, step))
        index = phase.first + step - phase.first_step
        return cls(
            "weights are not finite",
            {
                "index": index,
                "step": step,
                "epoch": phase.epoch,
                "stage": phase.stage,
                "res": plan.res_at(index)[0],
                "lr": lr,
            },
        )

    def describe(self, plan: Plan, folder: Path) -> ResoluteError:
        """The error message with what reproduces the step; writes the keys of its batch to RUN/not_finite.json.

        Any rank may be the first to read the loss, and then ends the others: each writes the same file.
        """
        keys = plan.shards.splits["train"].samples[plan.ids(self.step["index"])]["key"].tolist()
        names, path = [key_name(key) for key in keys], folder / "not_finite.json"
        with output_file(path) as file:
            file.write(json.dumps({"what": self.what, **self.step, "keys": names}, indent=1).encode())
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return ResoluteError(
            f"{folder}: {self.what} at step {self.step['step']} (epoch {self.step['epoch']}, {self.step['res']} px, lr "
            f"{self.step['lr']:.4g}, samples {', '.join(names[:3])}{more}, all in {path.name}), expected finite "
            "numbers; lower optim.lr or set optim.clip_norm, and start another RUN (the same command would resume "
            "before this step, with the same recipe)"
        )


@torch.no_grad()
def all_finite(network: nn.Module) -> bool:
    """Whether all weights are finite; one device sync."""
    maxima = torch._foreach_norm(list(network.parameters()), float("inf"))
    return bool(torch.stack(maxima).isfinite().all())  # sync: reads the result
