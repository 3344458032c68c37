"""Warm-up covers every shape of a run and leaves no trace."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from resolute.cli import main
from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import Stage
from resolute.train.devices.distributed import Ranks
from resolute.train.loop import Learner
from resolute.train.recipe.schema import Recipe
from resolute.train.warmup import check_micro_batches, enough_for_a_cpu, shapes, warm_up
from tests.train.conftest import stages, train_words

STAGES = (Stage(res=32, epochs=2, batch_size=16), Stage(res=(40, 48), res_schedule="random", epochs=1,
                                                       batch_size=20, fraction=0.5))  # fmt: skip


class Spy(nn.Module):
    """A network with batch norm and dropout that records the shapes of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1))
        self.seen: list[tuple[bool, int, int]] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.seen.append((self.training, images.shape[2], images.shape[0]))
        out: torch.Tensor = self.body(images).flatten(1)
        return out


def _warm_up(network: nn.Module, plan: Plan, grad_accum_steps: int = 1, ema: Any = None) -> None:
    table = {"stages": [{"res": 32, "epochs": 1, "batch_size": 8}], "optim": {"grad_accum_steps": grad_accum_steps}}
    learner = object.__new__(Learner)
    learner.__dict__.update(network=network, device=torch.device("cpu"), ema=ema, teacher=None, ranks=Ranks(),
                            recipe=Recipe.parse(table, name="x"),
                            enter=lambda stage, res, training=True: network.train(training))  # fmt: skip
    warm_up(learner, shapes(plan))


def test_warm_up_covers_all_shapes_of_the_run_or_of_some_stages(shard_set: ShardSet) -> None:
    plan = Plan(shard_set, STAGES, eval_batch_size=7)
    specs = [plan.batch(index) for index in range(plan.total_batches)]
    assert set(shapes(plan)) == {(spec.split, spec.res, len(spec)) for spec in specs}
    assert set(shapes(plan, stages=[1])) == {(spec.split, spec.res, len(spec)) for spec in specs if spec.stage == 1}


def test_on_a_cpu_each_training_resolution_warms_up_its_largest_batch_and_validation_one_sample() -> None:
    todo = [("val", 64, 40), ("train", 64, 8), ("train", 64, 3), ("val", 64, 7), ("train", 32, 16)]
    assert enough_for_a_cpu(todo) == [("val", 64, 1), ("train", 64, 8), ("train", 32, 16)]


@pytest.mark.parametrize("grad_accum_steps", [1, 3])
def test_every_shape_is_warmed_up_and_those_of_the_validation_with_the_averaged_network(
    shard_set: ShardSet, grad_accum_steps: int
) -> None:
    plan, network, average = Plan(shard_set, STAGES, eval_batch_size=7), Spy(), Spy().eval()
    _warm_up(network, plan, grad_accum_steps, ema=SimpleNamespace(module=average))
    for index in range(plan.total_batches):
        spec = plan.batch(index)
        train = spec.split == "train"
        for part in torch.empty(len(spec)).chunk(grad_accum_steps if train else 1):
            assert (train, spec.res, len(part)) in network.seen
    assert set(average.seen) == {(False, res, size) for split, res, size in shapes(plan) if split == "val"}


def test_warm_up_does_not_change_weights_statistics_gradients_and_random_state(shard_set: ShardSet) -> None:
    network = Spy().eval()
    before: dict[str, Any] = {name: value.clone() for name, value in network.state_dict().items()}
    random = torch.get_rng_state()
    _warm_up(network, Plan(shard_set, STAGES, eval_batch_size=7))
    assert network.seen
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(parameter.grad is None for parameter in network.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    assert not network.training


def check(shard_set: ShardSet, model: str = "test_resnet", ranks: int = 1, micro: int = 1, **stage: Any) -> None:
    table = {"model": {"name": model}, "optim": {"grad_accum_steps": micro},
             "stages": [{"res": 64, "epochs": 1, "batch_size": 16}, {"res": 32, "epochs": 1, **stage}]}  # fmt: skip
    recipe = Recipe.parse(table, name="x")
    plan = Plan(shard_set, recipe.stages, eval_batch_size=8)
    learner = Learner(recipe, classes=3, total_steps=plan.total_steps, device=torch.device("cpu"))
    learner.ranks = Ranks(rank=0, world_size=ranks)
    before = {name: value.clone() for name, value in learner.network.state_dict().items()}
    try:
        check_micro_batches(plan, learner)
    finally:
        assert all(value.equal(before[name]) for name, value in learner.network.state_dict().items())


@pytest.mark.parametrize(("keys", "message"), [
    ({"batch_size": 8, "micro": 8}, "optim.grad_accum_steps: 8 micro-batches of the 8 samples per step"),
    ({"batch_size": 2}, "stages[1].batch_size: 2 leaves a last batch of a single sample of the epoch's 75"),
])  # fmt: skip
def test_a_batch_norm_with_a_single_sample_is_refused_by_key(
    shard_set: ShardSet, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ResoluteError) as error:
        check(shard_set, **keys)
    assert message in str(error.value)
    assert "got 1 sample, expected at least 2 for the batch norms of test_resnet at 32 px" in str(error.value)


def test_a_run_with_single_sample_batch_norms_is_refused_before_warm_up(
    shard_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.toml").write_text(f'[model]\nname = "test_resnet"\n{stages((32, 1, 1))}')
    assert main(train_words(shard_root, tmp_path / "one.toml", tmp_path)) == 2
    captured = capsys.readouterr()
    assert "stages[0].batch_size: 1 is a single sample per step: got 1 sample, expected at least 2" in captured.err
    assert captured.err.count("\n") == 1
    assert "warmed up" not in captured.out


def test_single_samples_are_accepted_without_batch_norms_or_with_larger_feature_maps(shard_set: ShardSet) -> None:
    check(shard_set, batch_size=1, model="test_convnext")
    check(shard_set, batch_size=1, res=64)
