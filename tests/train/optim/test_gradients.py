"""Gradient shaping equals the formulas of the papers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2
from torch import nn

from resolute.errors import ResoluteError
from resolute.train.optim.optimizer import build_gradient_steps, build_optimizer
from resolute.train.recipe.schema import Optim


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    network = timm.create_model("test_resnet", num_classes=5)
    network(torch.randn(4, 3, 32, 32)).square().sum().backward()
    return network


def _gradient(network: nn.Module, name: str) -> torch.Tensor:
    gradient = network.get_parameter(name).grad
    assert gradient is not None
    return gradient


def _shaped(network: nn.Module, **optim: Any) -> dict[str, torch.Tensor]:
    """Gradients by name after the recipe's shaping; those of `network` do not change."""
    other = copy.deepcopy(network)
    for mine, theirs in zip(other.parameters(), network.parameters(), strict=True):
        mine.grad = None if theirs.grad is None else theirs.grad.clone()
    shape = build_gradient_steps(Optim(**optim), other)
    assert shape is not None
    shape()
    return {name: p.grad for name, p in other.named_parameters() if p.grad is not None}


def test_clip_norm_scales_all_gradients_by_one_factor_and_clip_value_clamps_each_element(network: nn.Module) -> None:
    assert build_gradient_steps(Optim(), network) is None
    before = torch.cat([_gradient(network, name).flatten() for name, _ in network.named_parameters()])
    assert before.norm() > 0.25
    for optim, expected in (
        ({"clip_norm": 0.25}, before / before.norm() * 0.25),
        ({"clip_value": 1e-3}, before.clamp(-1e-3, 1e-3)),
    ):
        got = torch.cat([g.flatten() for g in _shaped(network, **optim).values()])
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-7)
    with pytest.raises(ResoluteError, match="expected one way to clip"):
        Optim(clip_norm=1.0, clip_agc=0.01)


@pytest.mark.parametrize("name", ["lamb", "lambc", "lambw"])
def test_lamb_clips_as_timms_does_unless_the_recipe_says_otherwise(name: str) -> None:
    """timm's clips the norm of all gradients to 1 inside its step."""
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    theirs, images = copy.deepcopy(ours), torch.randn(8, 5)
    assert Optim(name=name).clip_norm == 1.0
    assert Optim(name=name, clip_norm=0.0).clip_norm == Optim(name=name, clip_agc=0.01).clip_norm == 0.0
    optim = Optim(name=name, lr=0.1)
    optimizers = build_optimizer(optim, ours), create_optimizer_v2(theirs, opt=name, lr=0.1, weight_decay=5e-5)
    steps = build_gradient_steps(optim, ours)
    assert steps is not None
    for factor in (100.0, 1.0, 0.01):  # above the bound, and below it
        for network in (ours, theirs):
            (factor * network(images).square().sum()).backward()
        steps()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for mine, timms in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, timms, rtol=1e-4, atol=1e-6)


def test_agc_bounds_the_gradient_of_each_unit_by_its_weights_except_in_the_head(network: nn.Module) -> None:
    got, clipped = _shaped(network, clip_agc=0.01), 0
    for name, parameter in network.named_parameters():
        expected = _gradient(network, name).clone()
        if not name.startswith("fc."):
            for unit in range(len(parameter) if parameter.ndim > 1 else 1):
                part = (unit,) if parameter.ndim > 1 else ...
                bound = 0.01 * max(float(parameter.detach()[part].norm()), 1e-3)  # Brock et al., equation 3
                length = float(expected[part].norm())
                if length > bound:
                    expected[part] *= bound / length
                    clipped += 1
        torch.testing.assert_close(got[name], expected, rtol=1e-4, atol=1e-8)
    assert clipped


def test_gradient_centralization_removes_the_mean_of_each_unit(network: nn.Module) -> None:
    got = _shaped(network, gradient_centralization=True)
    for name, parameter in network.named_parameters():
        expected = _gradient(network, name)
        if parameter.ndim > 1:
            expected = expected - expected.flatten(1).mean(1).view(-1, *[1] * (parameter.ndim - 1))
        torch.testing.assert_close(got[name], expected, rtol=1e-3, atol=1e-6)


def test_gradient_normalization_gives_each_layer_the_norm_1(network: nn.Module) -> None:
    """A layer is the parameters of one module: the weight and the bias of a norm together."""
    _gradient(network, "bn1.weight").zero_()
    _gradient(network, "bn1.bias").zero_()
    got, zeros = _shaped(network, gradient_normalization=True), 0
    for prefix, module in network.named_modules():
        own = [f"{prefix}.{name}" if prefix else name for name, _ in module.named_parameters(recurse=False)]
        if not own:
            continue
        before = torch.cat([_gradient(network, name).flatten() for name in own])
        norm = before.norm()
        expected = before / norm if norm else before
        torch.testing.assert_close(torch.cat([got[name].flatten() for name in own]), expected)
        zeros += int(norm == 0)
    assert zeros


def test_gradients_are_normalised_after_centralisation_and_before_clipping(network: nn.Module) -> None:
    got = _shaped(network, gradient_centralization=True, gradient_normalization=True, clip_value=0.01)
    centred = _shaped(network, gradient_centralization=True)["conv1.0.weight"]
    expected = (centred / centred.norm()).clamp(-0.01, 0.01)
    torch.testing.assert_close(got["conv1.0.weight"], expected)


def test_frozen_parameters_are_skipped(network: nn.Module) -> None:
    network.get_parameter("conv1.0.weight").grad = None
    for optim in (
        {"gradient_centralization": True},
        {"gradient_normalization": True},
        {"clip_agc": 0.01},
        {"clip_value": 0.1},
    ):
        assert "conv1.0.weight" not in _shaped(network, **optim)
