"""Warm-up covers every shape of a run and leaves no trace."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import nn

from resolute.cli import main
from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import Stage
from resolute.train import trainer
from resolute.train.devices.distributed import Ranks
from resolute.train.learner import Learner
from resolute.train.recipe.schema import Recipe
from resolute.train.warmup import _check_equal_parts, announce_compilation, shapes, warm_up
from tests.train.conftest import stages, train_words

STAGES = (
    Stage(res=32, epochs=2, batch_size=16),
    Stage(res=(40, 48), res_schedule="random", epochs=1, batch_size=20, fraction=0.5),
)


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
    learner.__dict__.update(
        network=network,
        device=torch.device("cpu"),
        ema=ema,
        teacher=None,
        ranks=Ranks(),
        recipe=Recipe.parse(table, name="x"),
        enter=lambda stage, training=True: network.train(training),
    )
    warm_up(learner, shapes(plan))


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


def test_a_run_with_single_sample_batch_norms_is_refused_before_warm_up(
    shard_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.toml").write_text(f'[model]\nname = "test_resnet"\n{stages((32, 1, 1))}')
    assert main(train_words(shard_root, tmp_path / "one.toml", tmp_path)) == 2
    captured = capsys.readouterr()
    assert "stages[0].batch_size: 1 is a single sample per step: got 1 sample, expected at least 2" in captured.err
    assert captured.err.count("\n") == 1
    assert "warmed up" not in captured.out


@pytest.mark.parametrize("name", ["levit_128s", "efficientformer_l1", "coatnet_nano_rw_224", "test_vit"])
def test_a_network_that_fails_at_another_size_is_refused_in_one_line(name: str) -> None:
    table = {"model": {"name": name}, "stages": [{"res": 192, "epochs": 1, "batch_size": 2}]}
    if name == "test_vit":
        table["model"] = {"name": name, "kwargs": {"dynamic_img_size": False}}
    learner = Learner(Recipe.parse(table, name="x"), classes=3, total_steps=1, device=torch.device("cpu"))
    with pytest.raises(ResoluteError, match="the network refuses images of 192 px"):
        warm_up(learner, [("train", 192, 2)])


def test_a_network_that_fails_at_every_size_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe.parse(
        {"model": {"name": "test_resnet"}, "stages": [{"res": 32, "epochs": 1, "batch_size": 2}]}, name="x"
    )
    learner = Learner(recipe, classes=3, total_steps=1, device=torch.device("cpu"))

    def fail(*_: Any) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(learner.network, "forward", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        warm_up(learner, [("train", 32, 2)])


@pytest.mark.parametrize(("parts", "refused"), [(12, False), (13, True)])
def test_synchronised_norms_need_as_many_parts_on_each_rank(shard_set: ShardSet, parts: int, refused: bool) -> None:
    plan = Plan(shard_set, [Stage(res=32, epochs=1, batch_size=25)], eval_batch_size=None)  # 13 and 12 photos
    if refused:
        with pytest.raises(ResoluteError, match=r"grad_accum_steps: got 13 with .* batch of 25 samples on 2 processes"):
            _check_equal_parts(plan, parts, world_size=2)
    else:
        _check_equal_parts(plan, parts, world_size=2)


@pytest.mark.parametrize(
    ("limit_s", "warmed"),
    [
        (99.0, [("train", 32), ("train", 64), ("train", 128), ("val", 32), ("val", 128)]),
        (20.0, [("train", 32), ("train", 64), ("val", 32), ("val", 128)]),
        (0.0, [("train", 32)]),
    ],
)
def test_a_limited_warm_up_leaves_out_shapes_that_would_take_too_long(
    limit_s: float, warmed: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock: Any = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    done: list[tuple[str, int]] = []

    def step(learner: Any, todo: list[tuple[str, int, int]], *_: Any, stage: int) -> None:
        for split, res, size in todo:
            clock.now += size * res**2 / 8192  # 1, 4 and 16 s for batches of 8
            done.append((split, res))

    monkeypatch.setattr(trainer, "time", clock)
    monkeypatch.setattr(trainer, "warm_up", step)
    todo = [("train", 128, 8), ("train", 64, 8), ("train", 32, 8), ("val", 128, 1), ("val", 32, 1)]
    session: Any = SimpleNamespace(_pixel_s=0.0, ranks=Ranks(), learner=None, _check_stop=None)
    trainer._Session._warm_up_within(session, limit_s, todo, stage=0)
    assert list(dict.fromkeys(done)) == warmed
    assert done.count(("train", 32)) == 2  # the first step of all is slow
    assert session._pixel_s == pytest.approx(1 / 8192)


def test_compilation_is_announced_only_if_it_will_happen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*, device: str = "cpu", decode: Literal["cpu", "gpu"] = "cpu", cached: bool, keeps: bool = True) -> str:
        monkeypatch.setattr("resolute.train.warmup.is_cached", lambda function: cached)
        monkeypatch.setattr("resolute.train.warmup.has_cache", lambda function: keeps)
        announce_compilation(torch.device(device), decode=decode)
        return capsys.readouterr().out

    assert said(cached=False) == (
        "compiling the loader's kernels (about 25 s), once; later runs take them from the cache\n"
    )
    assert "(about 10 s), once" in said(device="cuda", cached=False)  # those that decode
    assert "at every start: no cache folder is writable; set NUMBA_CACHE_DIR" in said(cached=False, keeps=False)
    assert said(cached=True) == said(device="cuda", decode="gpu", cached=False) == ""
