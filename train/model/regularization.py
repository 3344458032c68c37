"""Dropout, stochastic depth, label smoothing and weight decay of each stage and resolution.

All of them are functions of the recipe, the stage and the resolution alone: exact after a resume, equal on all ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from resolute.errors import ResoluteError
from resolute.train.recipe.schema import Model, Recipe

from .build import without_weights

__all__ = ["Regularizer", "strongest"]

_RATES = {"drop_rate": "dropout", "drop_path_rate": "stochastic depth"}
_PROBE = 0.5  # rate at which the places of a rate are looked up


def strongest(recipe: Recipe) -> Recipe:
    """The recipe whose [model], [loss] and [optim] have the largest values that any stage has.

    why: timm leaves out stochastic depth with a rate of 0, and groups without decay if there is no weight decay.
    """
    def largest(name: str) -> float:
        return max(values[name] for values in _all_values(recipe))

    return dataclasses.replace(
        recipe,
        model=dataclasses.replace(
            recipe.model, drop_rate=largest("drop_rate"), drop_path_rate=largest("drop_path_rate")
        ),
        loss=dataclasses.replace(recipe.loss, label_smoothing=largest("label_smoothing")),
        optim=dataclasses.replace(recipe.optim, weight_decay=largest("weight_decay")),
    )


def _all_values(recipe: Recipe) -> Iterable[dict[str, float]]:
    for number, stage in enumerate(recipe.stages):
        for res in stage.resolutions:
            yield recipe.regularization_at(number, res)


class Regularizer:
    """Sets the rates of a network's dropout and stochastic depth, and the weight decay of its optimizer.

    Network and optimizer are built with the values of `strongest`; nothing is rebuilt. Rates are set on timm's modules,
    in the proportions that timm gives them: stochastic depth rises linearly with the depth. Parameters without weight
    decay stay without it.
    """

    def __init__(
        self, recipe: Recipe, network: nn.Module, optimizer: torch.optim.Optimizer, *, classes: int
    ) -> None:
        """Raises `ResoluteError` for a rate that has no effect on the model."""
        self._values = [{res: recipe.regularization_at(number, res) for res in stage.resolutions}
                        for number, stage in enumerate(recipe.stages)]  # fmt: skip
        self.smoothings = {values["label_smoothing"] for values in _all_values(recipe)}  # that occur in the run
        self._optimizer = optimizer
        self._decays = [group["weight_decay"] > 0 for group in optimizer.param_groups]
        by_stage = {name for stage in recipe.stages for name in stage.regularization.strengths}
        self._sets_decay = "weight_decay" in by_stage
        used = [name for name in _RATES if (name in by_stage or (name == "drop_rate" and recipe.model.drop_rate))
                and any(values[name] for values in _all_values(recipe))]  # fmt: skip
        places = _places(recipe.model, used, classes=classes)
        for name in used:
            if not places[name]:
                section = "regularization" if name in by_stage else "model"
                raise ResoluteError(
                    f"{section}.{name}: without effect, {recipe.model.name} has no {_RATES[name]}; remove it"
                )
        self._places = {
            name: [(network.get_submodule(path), attribute, share) for path, attribute, share in places[name]]
            for name in used if name in by_stage
        }  # fmt: skip
        self._set: dict[str, float] = {}  # the rates that the network has

    def at(self, stage: int, res: int) -> dict[str, float]:
        """Values of all keys of `regularization` at `res` px; if the stage never trains at it, at its largest one."""
        values = self._values[stage]
        return values.get(res) or values[max(values)]

    def rates(self, stage: int) -> tuple[tuple[int, tuple[float, ...]], ...]:
        """Resolutions of the stage with the rates that `enter` sets at them; empty if it sets none."""
        return tuple((res, tuple(values[name] for name in self._places))
                     for res, values in self._values[stage].items() if self._places)  # fmt: skip

    def enter(self, stage: int, res: int) -> None:
        """Give the network the rates of `stage` at `res` px."""
        values = self.at(stage, res)
        for name, places in self._places.items():
            if self._set.get(name) != values[name]:
                self._set[name] = values[name]
                for module, attribute, share in places:
                    setattr(module, attribute, share * values[name])

    def begin(self, stage: int, res: int) -> None:
        """`enter`, before a step that updates weights: also gives the optimizer the weight decay."""
        self.enter(stage, res)
        if self._sets_decay:
            for group, decays in zip(self._optimizer.param_groups, self._decays, strict=True):
                if decays:
                    group["weight_decay"] = self.at(stage, res)["weight_decay"]


def _places(model: Model, names: Sequence[str], *, classes: int) -> dict[str, list[tuple[str, str, float]]]:
    """The places where timm sets each rate: (module, attribute, its value / the rate)."""
    if not names:
        return {}
    probes = dict.fromkeys(names, _PROBE)
    full = _numbers(model, probes, classes=classes)
    places = {}
    for name in names:
        half = _numbers(model, {**probes, name: _PROBE / 2}, classes=classes)
        places[name] = [(*place, value / _PROBE) for place, value in full.items() if half.get(place) != value]
    return places


def _numbers(model: Model, rates: dict[str, float], *, classes: int) -> dict[tuple[str, str], float]:
    """Floating-point attributes of all modules of the model with `rates`, by the module's name and their own."""
    network = without_weights(dataclasses.replace(model, **rates), classes=classes)  # type: ignore[arg-type]
    return {(path, attribute): value for path, module in network.named_modules()
            for attribute, value in vars(module).items() if isinstance(value, float)}  # fmt: skip
