"""Optimizers: parameter groups, kinds and lookahead equal their textbook forms."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from timm.optim.muon import _COEFFICIENTS
from torch import nn

from resolute.train.optim.muon import orthogonalize
from resolute.train.optim.optimizer import build_optimizer
from resolute.train.optim.schedule import Rates
from resolute.train.recipe.schema import Optim
from resolute.train.recipe.sections import OneCycleSchedule
from resolute.train.recipe.stages import RecipeStage


@pytest.mark.parametrize("name", ["test_vit", "swin_tiny_patch4_window7_224", "test_resnet"])
def test_norms_biases_and_what_a_model_excludes_have_no_weight_decay(name: str) -> None:
    with torch.device("meta"):
        network: Any = timm.create_model(name)
    excluded = network.no_weight_decay() if hasattr(network, "no_weight_decay") else set()
    free, decayed = build_optimizer(Optim(weight_decay=0.1), network).param_groups
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.1, 0.0)
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    assert len(names) == len(decayed["params"]) + len(free["params"])
    for parameter in decayed["params"]:
        assert parameter.ndim >= 2
        assert not any(part in names[id(parameter)] for part in excluded), names[id(parameter)]
    tables = {name for name in names.values() if "pos_embed" in name or "cls_token" in name or "bias_table" in name}
    assert tables <= {names[id(parameter)] for parameter in free["params"]}
    assert bool(tables) == (name != "test_resnet")


def lr_by_name(network: nn.Module, **optim: Any) -> dict[str, float]:
    """The learning rate of each parameter in step 3, as a part of that of the schedule."""
    recipe = Optim(lr=0.5, weight_decay=0.1, **optim)
    optimizer = build_optimizer(recipe, network)
    stages = [RecipeStage(res=32, epochs=1, batch_size=8)]
    lr = Rates(OneCycleSchedule(), recipe, stages, total_steps=10).apply(optimizer, 3, stage=0)
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    result = {names[id(p)]: group["lr"] / lr for group in optimizer.param_groups for p in group["params"]}
    assert result.keys() == set(names.values())
    matrices = {name for name, p in network.named_parameters() if p.ndim > 1} - {"pos_embed", "cls_token"}
    assert matrices == {
        names[id(p)] for group in optimizer.param_groups for p in group["params"] if group["weight_decay"]
    }, "whatever the learning rates"
    return result


def test_layer_decay_lowers_the_learning_rate_from_head_to_stem_and_the_head_has_its_own() -> None:
    network: Any = timm.create_model("test_vit", num_classes=3)
    assert set(lr_by_name(network).values()) == {1.0}
    plain = lr_by_name(network, layer_decay=0.5)
    depth = len(network.blocks)
    for number in range(depth):
        assert plain[f"blocks.{number}.attn.qkv.weight"] == pytest.approx(0.5 ** (depth - number))
    assert plain["head.weight"] == 1.0
    assert plain["patch_embed.proj.weight"] == min(plain.values())
    for decay, others in ((None, dict.fromkeys(plain, 1.0)), (0.5, plain)):
        scaled = lr_by_name(network, layer_decay=decay, head_lr_scale=10.0)
        assert scaled == pytest.approx(others | {"head.weight": 10.0, "head.bias": 10.0})


def test_muon_makes_orthogonal_steps_of_matrices() -> None:
    """The step is the orthogonal factor of the averaged gradient (Jordan, kellerjordan.github.io/posts/muon).

    It is found by five Newton-Schulz iterations, and scaled by 0.2 sqrt(max(rows, columns)) (Liu et al., arXiv
    2502.16982, equation 4).
    """
    network, average = nn.Linear(24, 16, bias=False), torch.zeros(16, 24)
    optimizer = build_optimizer(Optim(name="muon", lr=0.1, momentum=0.9, weight_decay=0.0), network)
    for number in range(3):
        before = network.weight.detach().clone()
        network.weight.grad = torch.randn(16, 24, generator=torch.Generator().manual_seed(number))
        average = 0.9 * average + 0.1 * network.weight.grad
        optimizer.step()
        left, _, right = torch.linalg.svd(average, full_matrices=False)
        expected = -0.1 * 0.2 * 24**0.5 * left @ right
        assert (network.weight.detach() - before - expected).norm() < 0.15 * expected.norm()


def test_muon_updates_vectors_by_adamw_with_the_betas_of_the_recipe() -> None:
    ours, plain = nn.Linear(3, 2), nn.Linear(3, 2)
    plain.load_state_dict(ours.state_dict())
    optimizer = build_optimizer(Optim(name="muon", lr=0.1, weight_decay=0.0, betas=(0.6, 0.8)), ours)
    oracle = torch.optim.AdamW([plain.bias], lr=0.1, betas=(0.6, 0.8), eps=1e-7, weight_decay=0.0)
    for number in range(3):
        ours.weight.grad = torch.ones(2, 3)
        ours.bias.grad = torch.randn(2, generator=torch.Generator().manual_seed(number))
        plain.bias.grad = ours.bias.grad.clone()
        optimizer.step()
        oracle.step()
        torch.testing.assert_close(ours.bias, plain.bias)


def _newton_schulz(gradient: torch.Tensor) -> torch.Tensor:
    """The textbook iteration in float64."""
    x = gradient.double() / gradient.double().norm()
    for a, b, c in _COEFFICIENTS["quintic"]:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@pytest.mark.parametrize(("shape", "rank"), [((40, 360), 10), ((360, 40), 40), ((40, 40), 1)])
def test_orthogonalisation_by_the_gram_matrix_equals_the_textbook_iteration(shape: tuple[int, int], rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    left, right = (torch.randn(side, rank, generator=generator) for side in shape)
    gradient = left * torch.logspace(0, -4, rank) @ right.T
    expected = _newton_schulz(gradient if shape[0] <= shape[1] else gradient.T)
    expected = expected if shape[0] <= shape[1] else expected.T
    batch = torch.stack([gradient, 7 * gradient])
    for got in (orthogonalize(gradient, _COEFFICIENTS["quintic"]), *orthogonalize(batch, _COEFFICIENTS["quintic"])):
        assert (got - expected).norm() < 1e-3 * expected.norm()
    assert not orthogonalize(torch.zeros(shape), _COEFFICIENTS["quintic"]).any()


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))


def _step(network: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    images = torch.randn(8, 6, generator=generator)
    optimizer.zero_grad()
    (network(images) - images[:, :3]).square().mean().backward()
    optimizer.step()


def _weights(network: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in network.parameters()]


def test_lookahead_equals_its_algorithm() -> None:
    """Zhang et al., arXiv 1907.08610, algorithm 1, from the weights after k steps on, as timm has it."""
    k, alpha = 3, 0.3
    network, oracle = _network(), _network()
    ours = build_optimizer(Optim(name="lamb", lr=0.05, lookahead=k, lookahead_alpha=alpha), network)
    plain, slow = build_optimizer(Optim(name="lamb", lr=0.05), oracle), _weights(oracle)
    for number in range(3 * k + 1):
        _step(network, ours, number)
        _step(oracle, plain, number)
        if (number + 1) % k == 0:
            slow = _weights(oracle) if number < k else slow
            slow = [old + alpha * (p.detach() - old) for old, p in zip(slow, oracle.parameters(), strict=True)]
            with torch.no_grad():
                for parameter, value in zip(oracle.parameters(), slow, strict=True):
                    parameter.copy_(value)
        for mine, expected in zip(network.parameters(), oracle.parameters(), strict=True):
            torch.testing.assert_close(mine, expected)
