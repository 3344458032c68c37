"""Dropout, stochastic depth and weight decay of each stage.

They are functions of the recipe and the stage alone: exact after a resume, equal on all ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from timm.layers import DropPath
from torch import nn

from resolute.errors import ResoluteError
from resolute.train.recipe.schema import Recipe
from resolute.train.recipe.sections import smoothing_of

__all__ = ["Regularizer", "with_largest_strengths"]

_RATES = {"drop_rate": "dropout", "drop_path_rate": "stochastic depth"}
_Place = tuple[nn.Module, str, float]  # module, attribute, its value / the model's rate


def with_largest_strengths(recipe: Recipe) -> Recipe:
    """The recipe whose [model], [loss] and [optim] have the largest values that any stage has.

    why: timm leaves out stochastic depth with a rate of 0, and groups without decay if there is no weight decay.
    """
    stages = [recipe.in_stage(number) for number in range(len(recipe.stages))]
    rates = {name: max(getattr(each.model, name) for each in stages) for name in _RATES}
    decay = max(each.optim.weight_decay for each in stages)
    loss = max((each.loss for each in stages), key=smoothing_of)
    return dataclasses.replace(
        recipe,
        model=dataclasses.replace(recipe.model, **rates),
        loss=loss,
        optim=dataclasses.replace(recipe.optim, weight_decay=decay),
    )


class Regularizer:
    """Sets the rates of a network's dropout and stochastic depth, and the weight decay of its optimizer.

    Network and optimizer are built with the values of `with_largest_strengths`; nothing is rebuilt. Each of timm's
    modules gets the fraction of a rate that it was built with: stochastic depth rises linearly with the depth.
    Parameters without weight decay stay without it.
    """

    def __init__(self, recipe: Recipe, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Raises `ResoluteError` for a rate that has no effect on the network."""
        self._recipe, self._optimizer = recipe, optimizer
        self._decays = [group["weight_decay"] > 0 for group in optimizer.param_groups]
        overridden = {name for stage in recipe.stages for name in (*stage.model, *stage.optim)}
        self._sets_decay = "weight_decay" in overridden
        self._places: dict[str, list[_Place]] = {}
        built = with_largest_strengths(recipe).model
        for name, what in _RATES.items():
            if not (rate := getattr(built, name)) or not (name in overridden or name == "drop_rate"):
                continue
            places = [*_places(network, name, rate)]
            if not places:
                where = "stages.model" if name in overridden and not getattr(recipe.model, name) else "model"
                raise ResoluteError(f"{where}.{name}: without effect, {recipe.model.name} has no {what}; remove it")
            if name in overridden:
                self._places[name] = places
        self._set: dict[str, float] = {}  # the rates that the network has

    def rates(self, stage: int) -> tuple[float, ...]:
        """The rates that the network gets in the stage; empty if they never change."""
        model = self._recipe.in_stage(stage).model
        return tuple(getattr(model, name) for name in self._places)

    def apply_to_network(self, stage: int) -> None:
        """Give the network the rates of `stage`."""
        model = self._recipe.in_stage(stage).model
        for name, places in self._places.items():
            rate = getattr(model, name)
            if self._set.get(name) != rate:
                self._set[name] = rate
                for module, attribute, share in places:
                    setattr(module, attribute, share * rate)

    def apply_to_optimizer(self, stage: int) -> None:
        """Give the optimizer the weight decay of `stage`."""
        decay = self._recipe.in_stage(stage).optim.weight_decay
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
