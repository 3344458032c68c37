"""`Outputs`: what the outputs of a run's network mean: logits of classes, or standardised values."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.dataset.target import Target
from resolute.train.recipe.schema import Distill, Loss
from resolute.train.recipe.sections import ValueLoss, smoothing_of

__all__ = ["CLASSES", "Outputs"]

_DEFAULT = {"class": "ce", "labels": "bce", "values": "mse"}
_KINDS = {"class": ("ce", "bce", "asl"), "labels": ("bce", "asl"), "values": ("mse", "l1", "huber")}
_NOUNS = {"class": "one class per sample", "labels": "several labels per sample", "values": "numbers"}


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The set's target, the kind of loss that the outputs are trained with, and the scale of values.

    `mean`, `std`: of each of the D values over the training split, of which the network predicts
    (value - mean) / std; empty for classes and labels, and for values 0 and 1 with `loss.standardize = false`.
    """

    target: Target
    loss: str  # a `loss.kind` other than "auto"
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    @classmethod
    def of(cls, shards: ShardSet, loss: Loss, distill: Distill) -> Outputs:
        """The head of a run on `shards`. Raises `ResoluteError` for settings that do not fit the set's targets, and
        if validation could not be measured."""
        target = shards.target
        kind = _DEFAULT[target.kind] if loss.kind == "auto" else loss.kind
        where, has = shards.root, f"a set with {_NOUNS[target.kind]}"
        if kind not in _KINDS[target.kind]:
            expected = ", ".join(("auto", *_KINDS[target.kind]))
            raise ResoluteError(f"loss.kind: got {kind} for {where}, {has}, expected {expected}; change the recipe")
        if smoothing_of(loss) and target.kind == "values":
            raise ResoluteError(f"loss.label_smoothing: without effect, {where} is {has}; remove it")
        standardize = not isinstance(loss, ValueLoss) or loss.standardize
        if not standardize and target.kind != "values":
            raise ResoluteError(f"loss.standardize: without effect, {where} is {has}; remove it")
        if distill.teacher and target.kind != "class":
            raise ResoluteError(
                f"distill.teacher: got a teacher for {where}, {has}, expected one class per sample; remove [distill]"
            )
        if target.kind == "labels" and not _any_label(shards):
            raise ResoluteError(
                f"{where}: no sample of split val has a label, expected some, without which there is no mAP; hold out "
                "other samples"
            )
        if target.kind != "values":
            return cls(target=target, loss=kind)
        mean, std = _moments(shards) if standardize else (np.zeros(len(target)), np.ones(len(target)))
        return cls(target=target, loss=kind, mean=tuple(mean.tolist()), std=tuple(std.tolist()))

    def predictions(self, outputs: torch.Tensor) -> torch.Tensor:
        """From outputs (N, C or D) float32: probabilities of the classes, or values in the units of the table.

        Probabilities of a class set trained with cross-entropy sum to 1; others are independent of each other.
        """
        if self.target.kind == "values":
            mean, std = self.scale(outputs.device)
            return outputs * std + mean
        return torch.softmax(outputs, dim=1) if self.loss == "ce" else torch.sigmoid(outputs)

    def scale(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """`mean` and `std`, each (D,) float32 on the device."""
        return _scale(self.mean, self.std, device)

    def to_json(self) -> dict[str, Any]:
        """As stored in checkpoints."""
        names = {"names": list(self.target.names), "units": list(self.target.units)}
        ignored = {"ignored": True} if self.target.ignored else {}
        scale = {"mean": list(self.mean), "std": list(self.std)}
        return {"kind": self.target.kind, **names, **ignored, "loss": self.loss, **scale}

    @classmethod
    def from_json(cls, table: Mapping[str, Any]) -> Outputs:
        target = Target(
            kind=table["kind"],
            names=tuple(table["names"]),
            units=tuple(table["units"]),
            ignored=bool(table.get("ignored", False)),
        )
        return cls(target=target, loss=table["loss"], mean=tuple(table["mean"]), std=tuple(table["std"]))

    def check_fits(self, target: Target, where: str, run: str, *, advice: str) -> None:
        """Raise `ResoluteError` unless a set's `target` has the same kind, names and units. `where`: the set."""
        if target.kind != self.target.kind:
            raise ResoluteError(
                f"{where}: targets differ from {run}, got {_NOUNS[target.kind]}, expected {_NOUNS[self.target.kind]}; "
                "use a set of that kind"
            )
        what = "values" if target.kind == "values" else "classes"
        got, expected = (_listed(t) for t in (target, self.target))
        if (target.names, target.units) != (self.target.names, self.target.units):
            raise ResoluteError(f"{where}: {what} differ from {run}, got {got}, expected {expected}; {advice}")


CLASSES = Outputs(target=Target(kind="class", names=()), loss="ce")  # of any number of classes


def _listed(target: Target) -> str:
    names = [f"{name} [{unit}]" if unit else name for name, unit in zip(target.names, target.units, strict=False)]
    names = names or list(target.names)
    return f"{len(names)} ({', '.join(names[:3])}{' …' if len(names) > 3 or target.kind == 'class' else ''})"


def _any_label(shards: ShardSet) -> bool:
    return "val" not in shards.splits or bool(shards.target.packed_labels(shards.splits["val"].samples[:]).any())


def _moments(shards: ShardSet) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Mean and standard deviation (D,) over all training samples, rounded to float32; 1 for a constant value."""
    values = shards.splits["train"].samples[:]["values"].astype(np.float64)
    mean = values.mean(0)
    std = np.sqrt(((values - mean) ** 2).mean(0))
    constant = values.max(0) == values.min(0)
    mean[constant] = values[0, constant]
    std[constant] = 1.0
    return mean.astype(np.float32), std.astype(np.float32)


@functools.lru_cache
def _scale(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(mean, device=device), torch.tensor(std, device=device)  # sync: once per device
