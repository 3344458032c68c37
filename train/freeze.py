"""Which weights learn in which stage? Layers in timm's own order, frozen below the one that the stage names."""

from __future__ import annotations

import difflib
import types
from collections.abc import Sequence
from typing import Any

import torch
from timm.models import group_parameters
from timm.models._manipulate import flatten_modules
from torch import nn

from pipeline.errors import ResoluteError
from pipeline.plan.stage import Stage
from train.recipe.schema import Freeze

__all__ = ["Freezer", "layers", "trainable_sets"]


def layers(network: nn.Module) -> dict[str, list[str]]:
    """Names of the parameters of each layer, from the stem to the head, by the name that a recipe calls it."""
    try:
        matcher: Any = network.group_matcher(coarse=True)  # type: ignore[operator]
    except (AttributeError, AssertionError):  # why: a few of timm's models have none, or none by layer
        children = [name for name, _ in flatten_modules(network.named_children(), module_types="container")]

        def matcher(name: str) -> int:
            return next((i for i, child in enumerate(children) if name.startswith(f"{child}.")), -1)

    groups = list(group_parameters(network, matcher).values())
    prefixes = [{prefix for name in names for prefix in _prefixes(name)} for names in groups]
    # the shortest name that no other layer shares: layer3, blocks.7
    return {next(p for p in _prefixes(names[0]) if sum(p in others for others in prefixes) == 1): names
            for names in groups}  # fmt: skip


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _learnable(network: nn.Module) -> frozenset[str]:
    return frozenset(name for name, parameter in network.named_parameters() if parameter.requires_grad)


def trainable_sets(freeze: Freeze, stages: Sequence[Stage], network: nn.Module) -> list[frozenset[str]]:
    """Names of the parameters that train in each stage, of those that require a gradient now.

    Raises `ResoluteError` for a layer that isn't there.
    """
    everything = _learnable(network)
    if freeze.mode == "none":
        return [everything] * len(stages)
    groups = layers(network)
    known, parameters = list(groups), list(groups.values())
    # what trains from nothing frozen to all but the head frozen
    first = {"none": 0, "all": len(known) - 1} if freeze.mode == "freeze" else {"all": 0, "none": len(known) - 1}
    for number in reversed(range(len(known))):  # why reversed: `blocks` means from the first of them
        first |= {prefix: number for name in parameters[number] for prefix in _prefixes(name)}
    sets = []
    for number, stage in enumerate(stages):
        wanted = stage.freeze_to if freeze.mode == "freeze" else stage.unfreeze_to
        if wanted is not None and wanted not in first:
            close = difflib.get_close_matches(wanted, known, n=1)
            raise ResoluteError(
                f"stages[{number}].{freeze.mode}_to: got {wanted!r}, expected a layer of the model "
                f"({', '.join(known)}), all or none; {f'did you mean {close[0]}?' if close else 'choose one'}"
            )
        frozen = parameters[: first[wanted] if wanted is not None else 0]
        sets.append(everything.difference(*frozen))
    return sets


class Freezer:
    """Makes each stage's trainable set the one that trains; the optimizer keeps nothing of what is frozen.

    Frozen parameters have no gradient, so that no backward pass runs below the lowest that trains, and the optimizer
    passes them by, decay included. Frozen modules are in eval mode and stay there when `network.train()` is called.
    """

    def __init__(
        self, freeze: Freeze, stages: Sequence[Stage], network: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self._network, self._optimizer = network, optimizer
        self._all = _learnable(network)
        self.sets = trainable_sets(freeze, stages, network)
        self._stage: int | None = None  # whose set the network has; None: all of it
        self._stepped: int | None = None  # whose set the optimizer has
        self._modules = [(module, self._all & {f"{name}.{parameter}" for parameter, _ in module.named_parameters()})
                         for name, module in network.named_modules()]  # fmt: skip
        if len(set(self.sets)) > 1:
            self._split_groups()

    def _split_groups(self) -> None:
        """Put what thaws at different times into groups of their own.

        why: some optimizers, such as timm's LAMB, count the steps of their bias correction by group.
        """
        when = {parameter: tuple(name in names for names in self.sets)
                for name, parameter in self._network.named_parameters()}  # fmt: skip
        parts: list[dict[str, Any]] = []
        for group in self._optimizer.param_groups:
            cohorts: dict[tuple[bool, ...], list[nn.Parameter]] = {}
            for parameter in group["params"]:
                cohorts.setdefault(when[parameter], []).append(parameter)
            parts += [{**group, "params": cohort} for cohort in cohorts.values()]
        self._optimizer.param_groups[:] = parts  # why in place: wrappers of optimizers share the list

    @property
    def stages_by_set(self) -> list[list[int]]:
        """Stages that train the same, for each trainable set, the largest set first."""
        found: dict[frozenset[str], list[int]] = {}
        for stage, trained in enumerate(self.sets):
            found.setdefault(trained, []).append(stage)
        return [found[trained] for trained in sorted(found, key=len, reverse=True)]

    def enter(self, stage: int) -> bool:
        """Let the network train what `stage` trains, and nothing else; True if that is another set than before."""
        if stage == self._stage:
            return False
        before = self.sets[self._stage] if self._stage is not None else self._all
        self._stage, trained = stage, self.sets[stage]
        if trained == before:
            return False
        for name, parameter in self._network.named_parameters():
            if name in self._all:
                parameter.requires_grad_(name in trained)
                parameter.grad = parameter.grad if name in trained else None
        for module, own in self._modules:
            module.__dict__.pop("train", None)
            if own and trained.isdisjoint(own):
                module.train = types.MethodType(_stay, module)
        self._network.train(self._network.training)
        return True

    def begin(self, stage: int) -> bool:
        """`enter`, for a step that updates weights: what froze loses its optimizer state, so what thaws has none."""
        if stage != self._stepped:
            trained, parameters = self.sets[stage], dict(self._network.named_parameters())
            for name in parameters.keys() - trained:
                self._optimizer.state.pop(parameters[name], None)
            if self._stepped is not None:
                thawed = {parameters[name] for name in trained - self.sets[self._stepped]}
                for group in self._optimizer.param_groups:
                    if not thawed.isdisjoint(group["params"]):
                        group.pop("step", None)
            self._stepped = stage
        return self.enter(stage)

    def state_dict(self) -> dict[str, int | None]:
        return {"stage": self._stepped}

    def load_state_dict(self, state: dict[str, int | None]) -> None:
        self._stepped = state["stage"]


def _stay(self: nn.Module, mode: bool = True) -> nn.Module:
    """In place of `train` of a frozen module. why a method: a copy of the module gets one of its own."""
    return nn.Module.train(self, False)
