"""The schedule, the optimizer's groups and the loss equal their textbook forms."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipeline.recipe import Optim, Schedule
from train.optim import OneCycle, build_optimizer, mixed_cross_entropy


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("steps", [10, 137])
def test_one_cycle_equals_torchs(name: str, steps: int) -> None:
    optim = Optim(name=name, lr=0.7, momentum=0.95, betas=(0.95, 0.99))
    schedule = Schedule(warmup_frac=0.3, start_div=25.0, final_div=100.0, momentum_low=0.85)
    network = nn.Linear(3, 2)
    theirs = build_optimizer(optim, network)
    oracle = torch.optim.lr_scheduler.OneCycleLR(
        theirs, max_lr=0.7, total_steps=steps, pct_start=0.3, div_factor=25.0, final_div_factor=100.0,
        base_momentum=0.85, max_momentum=0.95,
    )  # fmt: skip
    ours = build_optimizer(optim, network)
    cycle = OneCycle(schedule, optim, total_steps=steps)
    for step in range(steps):
        lr = cycle.apply(ours, step, lr_scale=1.0)
        for mine, expected in zip(ours.param_groups, theirs.param_groups, strict=True):
            assert mine["lr"] == pytest.approx(expected["lr"], rel=1e-9, abs=1e-12) == lr
            key = "momentum" if name == "sgd" else "betas"
            assert mine[key] == pytest.approx(expected[key], rel=1e-9)
        if step + 1 < steps:
            theirs.step()
            oracle.step()


def test_lr_scale_is_a_factor_on_the_rate_alone() -> None:
    optim = Optim(lr=0.5)
    cycle, optimizer = OneCycle(Schedule(), optim, total_steps=100), build_optimizer(optim, nn.Linear(2, 2))
    full = cycle.apply(optimizer, 40, lr_scale=1.0)
    momentum = optimizer.param_groups[0]["momentum"]
    assert cycle.apply(optimizer, 40, lr_scale=0.25) == pytest.approx(full / 4)
    assert optimizer.param_groups[1]["lr"] == pytest.approx(full / 4)
    assert optimizer.param_groups[0]["momentum"] == momentum


def test_norms_and_biases_have_no_weight_decay() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    decayed, free = build_optimizer(Optim(weight_decay=0.1), network).param_groups
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.1, 0.0)
    assert {id(p) for p in decayed["params"]} == {id(network[0].weight), id(network[3].weight)}
    assert len(free["params"]) == 4


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_mixed_loss_equals_cross_entropy_with_soft_targets(smoothing: float) -> None:
    torch.manual_seed(0)
    logits, lam = torch.randn(9, 5, dtype=torch.bfloat16), torch.rand(9)
    labels, partners = torch.randint(0, 5, (9,)), torch.randint(0, 5, (9,))
    soft = lam[:, None] * functional.one_hot(labels, 5) + (1 - lam[:, None]) * functional.one_hot(partners, 5)
    soft = soft * (1 - smoothing) + smoothing / 5
    expected = -(soft * functional.log_softmax(logits.float(), dim=1)).sum(1)
    torch.testing.assert_close(mixed_cross_entropy(logits, labels, partners, lam, smoothing=smoothing), expected)


def test_plain_sgd_without_momentum_is_allowed() -> None:
    optim = dataclasses.replace(Optim(), momentum=0.0)
    optimizer = build_optimizer(optim, nn.Linear(2, 2))
    OneCycle(Schedule(), optim, total_steps=10).apply(optimizer, 3, lr_scale=1.0)
    assert optimizer.param_groups[0]["momentum"] == 0.0
