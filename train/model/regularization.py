"""Dropout, stochastic depth, label smoothing and weight decay of each stage and resolution.

All of them are functions of the recipe, the stage and the resolution alone: exact after a resume, equal on all ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import torch
from timm.layers import DropPath
from torch import nn

from resolute.errors import ResoluteError
from resolute.train.recipe.schema import Recipe

__all__ = ["Regularizer", "strongest"]

_RATES = {"drop_rate": "dropout", "drop_path_rate": "stochastic depth"}
_Place = tuple[nn.Module, str, float]  # module, attribute, its value / the model's rate


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

    Network and optimizer are built with the values of `strongest`; nothing is rebuilt. Each of timm's modules gets the
    fraction of a rate that it was built with: stochastic depth rises linearly with the depth. Parameters without weight
    decay stay without it.
    """

    def __init__(self, recipe: Recipe, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Raises `ResoluteError` for a rate that has no effect on the network."""
        self._recipe, self._optimizer = recipe, optimizer
        self._decays = [group["weight_decay"] > 0 for group in optimizer.param_groups]
        by_stage = {name for stage in recipe.stages for name in stage.regularization.strengths}
        self._sets_decay = "weight_decay" in by_stage
        self._places: dict[str, list[_Place]] = {}
        built = strongest(recipe).model
        for name, what in _RATES.items():
            if not (rate := getattr(built, name)) or not (name in by_stage or name == "drop_rate"):
                continue
            places = [*_places(network, name, rate)]
            if not places:
                section = "regularization" if name in by_stage else "model"
                raise ResoluteError(f"{section}.{name}: without effect, {recipe.model.name} has no {what}; remove it")
            if name in by_stage:
                self._places[name] = places
        self._set: dict[str, float] = {}  # the rates that the network has

    def rates(self, stage: int) -> tuple[tuple[int, tuple[float, ...]], ...]:
        """Resolutions of the stage with the rates that the network gets at them; empty if they never change."""
        resolutions = self._recipe.stages[stage].resolutions if self._places else ()
        values = [(res, self._recipe.regularization_at(stage, res)) for res in resolutions]
        return tuple((res, tuple(each[name] for name in self._places)) for res, each in values)

    def apply_to_network(self, stage: int, res: int) -> None:
        """Give the network the rates of `stage` at `res` px."""
        values = self._recipe.regularization_at(stage, res)
        for name, places in self._places.items():
            if self._set.get(name) != values[name]:
                self._set[name] = values[name]
                for module, attribute, share in places:
                    setattr(module, attribute, share * values[name])

    def apply_to_optimizer(self, stage: int, res: int) -> None:
        """Give the optimizer the weight decay of `stage` at `res` px."""
        decay = self._recipe.regularization_at(stage, res)["weight_decay"]
        for group, decays in zip(self._optimizer.param_groups, self._decays, strict=True):
            if decays and self._sets_decay:
                group["weight_decay"] = decay


def _places(network: nn.Module, name: str, rate: float) -> Iterator[_Place]:
    """The modules and attributes in which timm's `network` stores the `rate` that it was built with.

    Stochastic depth: the `drop_prob` of `DropPath` modules. Dropout: the `p` of torch's modules, and the attribute
    `drop_rate` of networks that call the function.
    """
    for module in network.modules():
        if name == "drop_path_rate":
            if isinstance(module, DropPath) and module.drop_prob:
                yield module, "drop_prob", module.drop_prob / rate
        elif isinstance(module, nn.modules.dropout._DropoutNd):
            if module.p == rate:  # why: others are those of `model.kwargs`, such as `attn_drop_rate`
                yield module, "p", 1.0
        elif getattr(module, "drop_rate", None) == rate:
            yield module, "drop_rate", 1.0
