"""A training step and an epoch of the loop, driven by synthetic batches."""

from __future__ import annotations

import contextlib
import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from resolute.train.devices.distributed import Ranks, running_statistics
from resolute.train.learner import Learner
from resolute.train.logs.metrics import Meter, RunLogWriter, read_log
from resolute.train.loop import run_batches
from resolute.train.recipe.schema import Recipe
from tests.support.networks import CPU, make_batch

TABLE: dict[str, Any] = {
    "model": {"name": "test_vit", "kwargs": {"img_size": 32}},  # no batch statistics: chunks add up exactly
    "precision": {"amp": "off"},
    "optim": {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0},
    "stages": [{"res": 32, "epochs": 1, "batch_size": 8}],
}


def _learner(**optim: Any) -> Learner:
    table = {**TABLE, "optim": {**TABLE["optim"], **optim}, "ema": {"decay": 0.5, "warmup": False}}
    return Learner(Recipe.parse(table, name="x"), classes=7, total_steps=10, device=CPU)


def test_gradient_accumulation_makes_the_same_step() -> None:
    whole, parts = _learner(), _learner(grad_accum_steps=3)
    before = copy.deepcopy(whole.network.state_dict())
    loss, _ = whole.train_step(make_batch(3))
    same, _ = parts.train_step(make_batch(3))
    torch.testing.assert_close(loss, same)
    for name, value in whole.network.state_dict().items():
        torch.testing.assert_close(parts.network.state_dict()[name], value, rtol=1e-4, atol=1e-6)
    assert any(not torch.equal(before[name], value) for name, value in whole.network.state_dict().items())


def test_a_run_without_a_gradient_scaler_is_resumed_with_one() -> None:
    """On a GPU without bf16, `precision.amp = "auto"` is fp16."""
    state, learner = _learner().state_dict(), _learner()
    assert state["scaler"] == {}
    learner.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    learner.load_state_dict(state)
    assert learner.scaler.get_scale() == 4.0


def test_each_rank_gets_its_own_batch_statistics_back_or_the_mean_if_there_are_others() -> None:
    """Validation uses their mean, which would differ after a resume if all ranks began with those of one."""
    recipe = {
        "model": {"name": "test_resnet"},
        "ema": {"decay": 0.5},
        "stages": [{"res": 32, "epochs": 1, "batch_size": 8}],
    }

    def learner_of(rank: int, world_size: int) -> Learner:
        ranks = Ranks(rank=rank, world_size=world_size)
        return Learner(Recipe.parse(recipe, name="x"), classes=3, total_steps=1, device=CPU, ranks=ranks)

    of_ranks = []
    for rank in range(2):
        learner = learner_of(rank, 2)
        for network in (learner.network, learner.ema.module if learner.ema else None):
            assert network is not None
            for value in running_statistics(network).values():
                value.fill_(1.0 + rank)
        of_ranks.append(learner.statistics())
    for rank, world_size, expected in ((0, 2, 1.0), (1, 2, 2.0), (0, 1, 1.5), (2, 3, 1.5)):
        learner = learner_of(rank, world_size)
        learner.load_statistics(of_ranks)
        found = [value.unique().tolist() for each in learner.statistics() for value in each.values()]
        assert found == [[expected]] * len(found)
        assert len(found) > 4


def test_clipping_bounds_the_size_of_a_step() -> None:
    lengths = []
    for clip in (0.0, 1e-3):
        learner = _learner(clip_norm=clip)
        before = [p.detach().clone() for p in learner.network.parameters()]
        _, lr = learner.train_step(make_batch())
        moved = math.sqrt(
            sum(float((p.detach() - b).pow(2).sum()) for p, b in zip(learner.network.parameters(), before, strict=True))
        )
        lengths.append(moved / lr)
    assert lengths[0] > 0.1
    assert lengths[1] == pytest.approx(1e-3, rel=1e-2)


def test_the_slow_weights_of_lookahead_are_those_at_the_end_of_each_training_pass() -> None:
    """Also between two of its own updates and for the average of the weights."""
    ends = (2, 4)
    learner = _learner(lookahead=4, lookahead_alpha=0.25, momentum=0.9)
    assert learner.ema is not None
    before = [parameter.detach().clone() for parameter in learner.network.parameters()]
    for index in range(6):
        average_before = copy.deepcopy(learner.ema.module.state_dict())
        learner.train_step(make_batch(index, last=index in ends))
        at_update = index in ends or index == 3  # 3: the fourth step
        if index < min(ends):
            continue  # the slow weights begin at the end of the first pass
        slow = [state["lookahead_slow_buff"] for state in learner.optimizer.state_dict()["state"].values()]
        assert all(p.equal(s) for p, s in zip(learner.network.parameters(), slow, strict=True)) == at_update
        assert any(not s.equal(b) for s, b in zip(slow, before, strict=True)) == at_update
        before = [value.clone() for value in slow]
        if index in ends:
            for name, average in learner.ema.module.named_parameters():
                slow_weight = learner.network.get_parameter(name)
                torch.testing.assert_close(average, (average_before[name] + slow_weight) / 2)


def test_ema_equals_its_formula_and_is_evaluated_beside_the_weights() -> None:
    learner = _learner()
    assert learner.ema is not None
    expected = {n: p.detach().clone() for n, p in learner.network.named_parameters()}
    for index in range(3):
        learner.train_step(make_batch(index))
        decay = 0.0 if index == 0 else 0.5  # timm's average starts as the first step's weights
        for name, parameter in learner.network.named_parameters():
            expected[name] = decay * expected[name] + (1 - decay) * parameter.detach()
    for name, parameter in learner.ema.module.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name])
    batch = make_batch(9, n=50, split="val")
    sums = learner.eval_step(batch).sums
    for network, got in ((learner.network, sums["raw"].tolist()), (learner.ema.module, sums["ema"].tolist())):
        with torch.no_grad():
            logits = network.eval()(batch.images)
        order = logits.argsort(dim=1, descending=True)
        hits = [order[i].tolist().index(int(label)) for i, label in enumerate(batch.labels)]
        assert got[:2] == [sum(h < 1 for h in hits), sum(h < 5 for h in hits)]
        own = logits.double().softmax(dim=1)[torch.arange(50), batch.labels]
        assert got[2] == pytest.approx(-own.log().sum().item(), rel=1e-5)


def test_test_time_flip_averages_the_logits_of_image_and_mirror_image() -> None:
    recipe = Recipe.parse({**TABLE, "eval": {"flip": True}}, name="x")
    learner = Learner(recipe, classes=7, total_steps=10, device=CPU)
    batch = make_batch(9, n=300, split="val")
    plain = _learner().eval_step(batch).sums["raw"].tolist()  # the same seed: the same weights
    with torch.no_grad():
        network = learner.network.eval()
        mirrored = torch.from_numpy(batch.images.numpy()[..., ::-1].copy())
        order = ((network(batch.images) + network(mirrored)) / 2).argsort(dim=1, descending=True)
    hits = [order[i].tolist().index(int(label)) for i, label in enumerate(batch.labels)]
    got = learner.eval_step(batch).sums["raw"].tolist()
    assert got[:2] == [sum(h < 1 for h in hits), sum(h < 5 for h in hits)]
    assert got[:2] != plain[:2]


def test_the_log_holds_every_step_and_the_sums_of_the_epoch(tmp_path: Path) -> None:
    learner = _learner()
    with contextlib.closing(RunLogWriter(tmp_path / "run.jsonl")) as log:
        meter = Meter(log, device=CPU)
        batches = [make_batch(0), make_batch(1, n=4, last=True), make_batch(2, n=20, split="val", last=True)]
        assert run_batches(batches, learner, meter, lambda spec: True)
        record = meter.end_epoch(batches[-1].spec, res=32, batch_size=1000)
    assert record["batch_size"] == 12  # not more than the epoch
    steps = [r for r in read_log(tmp_path / "run.jsonl") if r["kind"] == "step"]
    assert [s["samples"] for s in steps] == [8, 4]
    assert record["samples"] == 12
    assert record["loss"] == pytest.approx(sum(s["loss"] * s["samples"] for s in steps) / 12)
    assert record["train_s"] == pytest.approx(sum(s["wait_s"] + s["compute_s"] for s in steps))
    assert 0 <= record["top1"] <= record["top5"] <= 1
    assert (record["top1"] * 20) % 1 == pytest.approx(0)
