"""Normalisation layers: replaced as the recipe requests, under the original parameter names."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from resolute.errors import ResoluteError
from resolute.train.model.build import build_model
from resolute.train.model.norms import GhostBatchNorm, batch_norms, set_norms
from resolute.train.recipe.schema import Model
from tests.support.networks import CPU, names_of, random_images, tiny_network


def _ghost_oracle(x: torch.Tensor, groups: int, norm: nn.BatchNorm2d) -> torch.Tensor:
    parts = []
    assert norm.running_mean is not None
    assert norm.running_var is not None
    for part in x.tensor_split(groups):
        mean, var = part.mean((0, 2, 3)), part.var((0, 2, 3), unbiased=False)
        n = part.numel() / part.shape[1]
        norm.running_mean.mul_(0.9).add_(0.1 * mean)
        norm.running_var.mul_(0.9).add_(0.1 * var * n / (n - 1))
        scaled = (part - mean[:, None, None]) / (var[:, None, None] + norm.eps).sqrt()
        parts.append(scaled * norm.weight[:, None, None] + norm.bias[:, None, None])
    return torch.cat(parts)


@pytest.mark.parametrize(("samples", "groups"), [(11, 2), (3, 1)])
def test_ghost_norms_normalise_groups_of_a_batch_and_average_their_statistics(samples: int, groups: int) -> None:
    plain = nn.BatchNorm2d(3)
    nn.init.normal_(plain.weight)
    ghost, x = GhostBatchNorm(plain, 4), torch.randn(samples, 3, 5, 5)
    with torch.no_grad():
        torch.testing.assert_close(ghost(x), _ghost_oracle(x, groups, plain), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            ghost.state_dict() | {"num_batches_tracked": 0}, plain.state_dict() | {"num_batches_tracked": 0}
        )
        torch.testing.assert_close(ghost.eval()(x), plain.eval()(x))


def test_group_norms_replace_batch_norms_and_keep_their_activations() -> None:
    plain, network = tiny_network("test_efficientnet"), tiny_network("test_efficientnet", norm="group", norm_groups=32)
    assert not batch_norms(network)
    for name, norm in plain.named_modules():
        if isinstance(norm, nn.BatchNorm2d):
            other = network.get_submodule(name)
            x = torch.randn(2, norm.num_features, 3, 3)
            groups = next(
                g for g in range(min(32, norm.num_features), 0, -1) if norm.num_features % g == 0 and 32 % g == 0
            )
            expected = norm.get_submodule("act")(functional.group_norm(x, groups, norm.weight, norm.bias, norm.eps))
            torch.testing.assert_close(other(x), expected)
    images = random_images()
    first_output = network.train()(images)[0]
    torch.testing.assert_close(network(images[:1])[0], first_output, rtol=1e-3, atol=1e-4)  # independent of the batch


def test_batch_norm_momentum_is_the_weight_of_a_batch_in_the_statistics() -> None:
    network, seen = tiny_network(bn_momentum=0.03), dict[str, torch.Tensor]()
    norm = network.get_submodule("conv1.1")
    norm.register_forward_pre_hook(lambda _, inputs: seen.update(x=inputs[0].detach()))
    network.train()(random_images())
    torch.testing.assert_close(norm.running_mean, 0.03 * seen["x"].mean((0, 2, 3)))


def test_sync_norms_keep_names_and_activations_and_are_batch_norms_on_one_device() -> None:
    plain = tiny_network("test_efficientnet")
    network = set_norms(copy.deepcopy(plain), Model(norm="sync"), ranks=2, device=torch.device("cuda"))
    assert names_of(network) == names_of(plain)
    assert all(isinstance(norm, nn.SyncBatchNorm) for norm in batch_norms(network))
    torch.testing.assert_close(network.eval()(random_images()), plain.eval()(random_images()))
    with pytest.raises(ResoluteError, match="got sync with 2 processes on cpu, expected GPUs"):
        set_norms(plain, Model(norm="sync"), ranks=2, device=CPU)
    for device in ("cuda", "cpu"):
        assert set_norms(plain, Model(norm="sync"), ranks=1, device=torch.device(device)) is plain
    assert not any(isinstance(norm, nn.SyncBatchNorm) for norm in batch_norms(plain))
    model = Model(name="test_resnet", norm="sync")
    network = build_model(model, classes=7, channels_last=True, device=CPU, for_training=False)
    assert names_of(network) == names_of(tiny_network())


def test_group_norms_load_the_weights_of_batch_norms(tmp_path: Path) -> None:
    source, path = tiny_network(), tmp_path / "weights.pth"
    weight = source.get_parameter("conv1.1.weight")
    nn.init.normal_(weight)
    torch.save(source.state_dict(), path)
    assert tiny_network(norm="group", weights=str(path)).get_parameter("conv1.1.weight").equal(weight)
