"""Freezes and unfreezes layers per stage. Layers are in timm's order, from the stem to the head.

Frozen layers are in eval mode: no updates, fixed norm statistics, no dropout.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Sequence
from typing import Any

import torch
from timm.models import group_parameters
from timm.models._manipulate import flatten_modules
from torch import nn

from resolute.errors import ResoluteError
from resolute.train.recipe.stages import RecipeStage

__all__ = ["Freezer", "layers", "trainable_sets"]


def layers(network: nn.Module) -> dict[str, list[str]]:
    """Parameter names of each layer, from the stem to the head; the keys are the layer names that recipes use."""
    try:
        matcher: Any = network.group_matcher(coarse=True)  # type: ignore[operator]
    except (AttributeError, AssertionError):  # why: some timm models have no matcher, or none by layer
        children = [name for name, _ in flatten_modules(network.named_children(), module_types="container")]

        def matcher(name: str) -> int:
            return next((i for i, child in enumerate(children) if name.startswith(f"{child}.")), -1)

    groups = list(group_parameters(network, matcher).values())
    prefixes = [{prefix for name in names for prefix in _prefixes(name)} for names in groups]
    # a layer's name is the shortest prefix that no other layer shares: layer3, blocks.7
    return {
        next(p for p in _prefixes(names[0]) if sum(p in layer for layer in prefixes) == 1): names for names in groups
    }


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _learnable(network: nn.Module) -> frozenset[str]:
    return frozenset(name for name, parameter in network.named_parameters() if parameter.requires_grad)


def trainable_sets(stages: Sequence[RecipeStage], network: nn.Module) -> list[frozenset[str]]:
    """Names of the parameters that train in each stage; a subset of those that require a gradient now.

    Raises `ResoluteError` for an unknown layer.
    """
    everything = _learnable(network)
    if all(stage.train_from is None for stage in stages):
        return [everything] * len(stages)
    groups = layers(network)
    known, parameters = list(groups), list(groups.values())
    first = {"head": len(known) - 1}  # {name of a layer, or prefix of names: number of the first layer that it means}
    for number in reversed(range(len(known))):  # why reversed: `blocks` means its first layer
        first |= {prefix: number for name in parameters[number] for prefix in _prefixes(name)}
    sets = []
    for number, stage in enumerate(stages):
        layer = stage.train_from
        if layer is not None and layer not in first:
            close = difflib.get_close_matches(layer, known, n=1)
            raise ResoluteError(
                f"stages[{number}].train_from: got {layer!r}, expected a layer of the model ({', '.join(known)}) or "
                f"head; {f'did you mean {close[0]}?' if close else 'choose one'}"
            )
        frozen = parameters[: first[layer] if layer is not None else 0]
        sets.append(everything.difference(*frozen))
    return sets


class Freezer:
    """Applies each stage's trainable set; the optimizer keeps no state of frozen parameters.

    Frozen parameters have no gradient: the backward pass stops at the lowest trainable layer, and the optimizer skips
    them, weight decay included. Frozen modules stay in eval mode even when `network.train()` is called.
    """

    def __init__(self, stages: Sequence[RecipeStage], network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._network, self._optimizer = network, optimizer
        self._all = _learnable(network)
        self.sets = trainable_sets(stages, network)
        self._network_is_at: int | None = None  # stage whose set it has; None: all trainable
        self._optimizer_is_at: int | None = None  # stage whose set it has
        self._modules = [
            (module, self._all & {f"{name}.{parameter}" for parameter, _ in module.named_parameters()})
            for name, module in network.named_modules()
        ]
        if len(set(self.sets)) > 1:
            self._split_groups()

    def _split_groups(self) -> None:
        """Give parameters that unfreeze at different times separate parameter groups.

        why: some optimizers, such as timm's LAMB, count the steps for their bias correction per group.
        """
        when = {
            parameter: tuple(name in names for names in self.sets)
            for name, parameter in self._network.named_parameters()
        }
        parts: list[dict[str, Any]] = []
        for group in self._optimizer.param_groups:
            cohorts: dict[tuple[bool, ...], list[nn.Parameter]] = {}
            for parameter in group["params"]:
                cohorts.setdefault(when[parameter], []).append(parameter)
            parts += [{**group, "params": cohort} for cohort in cohorts.values()]
        self._optimizer.param_groups[:] = parts  # why in place: optimizer wrappers share the list

    @property
    def stages_by_set(self) -> list[list[int]]:
        """Lists of stages with the same trainable set, the largest set first."""
        stages: dict[frozenset[str], list[int]] = {}
        for stage, trained in enumerate(self.sets):
            stages.setdefault(trained, []).append(stage)
        return [stages[trained] for trained in sorted(stages, key=len, reverse=True)]

    def apply_to_network(self, stage: int) -> None:
        """Make exactly the trainable set of `stage` trainable; the modules keep their mode, except frozen ones."""
        before = self.sets[self._network_is_at] if self._network_is_at is not None else self._all
        self._network_is_at, trained = stage, self.sets[stage]
        if trained == before:
            return
        for name, parameter in self._network.named_parameters():
            if name in self._all:
                parameter.requires_grad_(name in trained)
                parameter.grad = parameter.grad if name in trained else None
        for module, own in self._modules:
            module.__dict__.pop("train", None)
            if own and trained.isdisjoint(own):
                module.train = types.MethodType(_stay, module)
        self._network.train(self._network.training)

    def apply_to_optimizer(self, stage: int) -> None:
        """Before a step that updates weights: drop the optimizer's state of newly frozen parameters."""
        if stage == self._optimizer_is_at:
            return
        trained, parameters = self.sets[stage], dict(self._network.named_parameters())
        for name in parameters.keys() - trained:
            self._optimizer.state.pop(parameters[name], None)
        if self._optimizer_is_at is not None:
            thawed = {parameters[name] for name in trained - self.sets[self._optimizer_is_at]}
            for group in self._optimizer.param_groups:
                if not thawed.isdisjoint(group["params"]):
                    group.pop("step", None)
        self._optimizer_is_at = stage

    def state_dict(self) -> dict[str, int | None]:
        return {"stage": self._optimizer_is_at}

    def load_state_dict(self, state: dict[str, int | None]) -> None:
        self._optimizer_is_at = state["stage"]


def _stay(self: nn.Module, mode: bool = True) -> nn.Module:
    """Replaces `train` of a frozen module. why a method: a deep copy of the module gets its own."""
    return nn.Module.train(self, False)
