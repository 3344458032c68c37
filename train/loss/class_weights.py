"""The weight of each class in the loss, from `loss.class_weights` and how often the run sees each class."""

from __future__ import annotations

import difflib

import numpy as np
from numpy.typing import NDArray

from resolute.errors import ResoluteError
from resolute.pipeline.plan.plan import Plan
from resolute.train.recipe.schema import Loss
from resolute.train.recipe.sections import ClassLoss

__all__ = ["class_weights"]

_MAX_RATIO = 100.0  # of "balanced" for several labels; why: rarer classes would dominate the gradients of their batches


def class_weights(loss: Loss, plan: Plan) -> NDArray[np.float32] | None:
    """The weights (C,) float32 for `build_loss`; None for "none".

    "balanced", with N samples in an epoch of which n have the class, counted as the run samples them:

    * one class per sample: N / (classes that have samples * n), whose mean over the epoch's samples is 1.
      Source: sklearn.utils.class_weight.compute_class_weight, after King and Zeng, Political Analysis 9, 2001.
    * several classes per sample: the weight of a present class relative to an absent one, (N - n) / n, limited to
      0.01 ... 100; samples in which the class is ignored do not count in N. Source: torch.nn.BCEWithLogitsLoss,
      `pos_weight`.

    Classes without samples, or not listed in a table, have the weight 1. Raises `ResoluteError` for targets without
    classes, unknown classes, and weights without effect.
    """
    choice, shards = loss.class_weights if isinstance(loss, ClassLoss) else "none", plan.shards
    if choice == "none":
        return None
    names, where = shards.classes, shards.root
    if shards.target.kind == "values":
        raise ResoluteError(
            f"loss.class_weights: got weights, but the targets of {where} are values, expected classes; remove it"
        )
    weights = np.ones(len(names), np.float32)
    counts = plan.mean_class_counts()
    if isinstance(choice, dict):
        for name, weight in choice.items():
            weights[_number(name, names, where)] = weight
        absent = [name for name in choice if not counts[names.index(name)]]
        if absent and "fold" not in shards.digests:  # why not in a fold: the class is held out with its samples
            raise ResoluteError(
                f"loss.class_weights: without effect for {absent[0]!r}, which has no training sample in {where}; "
                "remove it"
            )
        return weights
    has = counts > 0
    if shards.target.kind == "labels":
        absent_counts = len(shards.splits["train"]) - plan.mean_ignored_counts() - counts
        weights[has] = np.clip(absent_counts[has] / counts[has], 1 / _MAX_RATIO, _MAX_RATIO)
        return weights
    if plan.sampling == "balanced":
        raise ResoluteError(
            'loss.class_weights: without effect, data.sampling = "balanced" already shows all classes equally often; '
            "remove one of them"
        )
    weights[has] = counts.sum() / (has.sum() * counts[has])
    return weights


def _number(name: str, names: tuple[str, ...], where: str) -> int:
    if name not in names:
        near = ", ".join(difflib.get_close_matches(name, names, n=3))
        hint = f"near: {near}" if near else f"such as {', '.join(names[:3])}"
        raise ResoluteError(
            f"loss.class_weights: got {name!r}, expected one of the {len(names)} classes of {where} ({hint}); "
            "correct it"
        )
    return names.index(name)
