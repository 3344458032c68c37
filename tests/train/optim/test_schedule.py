"""Every learning rate schedule equals torch's own class step for step; batch size rules are factors."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from resolute.cli import main
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.plan.plan import Plan
from resolute.train.optim.optimizer import build_optimizer
from resolute.train.optim.schedule import Rates, epoch_samples, epoch_steps
from resolute.train.plot_lr import Curve
from resolute.train.recipe.schema import Optim, Recipe, Schedule
from resolute.train.recipe.sections import (
    CosineSchedule,
    FlatCosineSchedule,
    LinearSchedule,
    OneCycleSchedule,
    StepSchedule,
)
from resolute.train.recipe.stages import RecipeStage

STAGES = (
    RecipeStage(res=32, epochs=3, batch_size=8),
    RecipeStage(res=48, epochs=2, batch_size=16, optim={"lr_scale": 0.5}),
)
STEPS = [7, 7, 7, 5, 5]
OPTIM = Optim(lr=0.7, momentum=0.95)
Oracle = Callable[[torch.optim.Optimizer], Any]


def _rates(schedule: Schedule, steps: list[int] = STEPS, optim: Optim = OPTIM) -> Rates:
    return Rates(schedule, optim, STAGES, total_steps=sum(steps), epoch_steps=steps)


def _torch_rates(*parts: tuple[Oracle, int]) -> list[float]:
    """The learning rates of so many steps by each of torch's schedulers, with the peak as the base."""
    rates = []
    for oracle, steps in parts:
        optimizer = build_optimizer(OPTIM, nn.Linear(2, 2))
        scheduler = oracle(optimizer)
        for _ in range(steps):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
    return rates


def _rise(steps: int) -> tuple[Oracle, int]:
    return partial(lr_scheduler.LinearLR, start_factor=1 / 20, total_iters=steps), steps


def _flat(steps: int) -> tuple[Oracle, int]:
    return partial(lr_scheduler.ConstantLR, factor=1.0), steps


def _fall(steps: int, last: float) -> tuple[Oracle, int]:
    return partial(lr_scheduler.CosineAnnealingLR, T_max=steps, eta_min=last), steps


@pytest.mark.parametrize(("name", "steps", "key"), [("sgd", 137, "momentum"), ("adamw", 10, "betas")])
def test_one_cycle_equals_torchs(name: Any, steps: int, key: str) -> None:
    optim = Optim(name=name, lr=0.7, momentum=0.95, betas=(0.95, 0.99))
    schedule = OneCycleSchedule(pct_start=0.3, first_lr=0.7 / 25, last_lr=0.7 / 2500, base_momentum=0.85)
    ours, theirs = (build_optimizer(optim, nn.Linear(3, 2)) for _ in range(2))
    oracle = lr_scheduler.OneCycleLR(
        theirs,
        max_lr=0.7,
        total_steps=steps,
        pct_start=0.3,
        div_factor=25.0,
        final_div_factor=100.0,
        base_momentum=0.85,
        max_momentum=0.95,
    )
    rates = Rates(schedule, optim, STAGES, total_steps=steps)
    for step in range(steps):
        lr = rates.apply(ours, step, stage=0)
        for mine, expected in zip(ours.param_groups, theirs.param_groups, strict=True):
            assert mine["lr"] == pytest.approx(expected["lr"], rel=1e-9, abs=1e-12) == lr
            assert mine[key] == pytest.approx(expected[key], rel=1e-9)
        if step + 1 < steps:
            theirs.step()
            oracle.step()


def test_one_cycle_by_stage_is_a_complete_cycle_per_stage() -> None:
    rates = _rates(OneCycleSchedule(restart_each_stage=True))
    for first, steps in ((0, 21), (21, 10)):
        whole = Rates(OneCycleSchedule(), OPTIM, STAGES, total_steps=steps)
        assert [rates.at(first + step) for step in range(steps)] == [whole.at(step) for step in range(steps)]


LOW, LOWEST = 0.7 / 50, 0.7 / 20 / 50
ENDS: dict[str, Any] = {"first_lr": 0.7 / 20, "last_lr": LOWEST}


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (CosineSchedule(kind="cosine", restart_each_stage=True, last_lr=LOW), [_fall(21, LOW), _fall(10, LOW)]),
        (CosineSchedule(kind="cosine", pct_start=0.35, **ENDS), [_rise(11), _fall(20, LOWEST)]),
        (
            LinearSchedule(kind="linear", warmup_epochs=2.0, **ENDS),
            [
                _rise(14),
                (partial(lr_scheduler.LinearLR, start_factor=1.0, end_factor=LOWEST / OPTIM.lr, total_iters=17), 17),
            ],
        ),
        # a fraction of an epoch is that fraction of its own steps
        (CosineSchedule(kind="cosine", warmup_epochs=0.5, **ENDS), [_rise(4), _fall(27, LOWEST)]),
        (CosineSchedule(kind="cosine", warmup_epochs=3.8, **ENDS), [_rise(25), _fall(6, LOWEST)]),
        (FlatCosineSchedule(kind="flat_cosine", flat_until=0.6, last_lr=LOW), [_flat(19), _fall(12, LOW)]),
        (
            FlatCosineSchedule(kind="flat_cosine", flat_until=0.6, warmup_epochs=1.0, **ENDS),
            [_rise(7), _flat(12), _fall(12, LOWEST)],
        ),
        (
            FlatCosineSchedule(kind="flat_cosine", flat_until=0.1, warmup_epochs=4.0, **ENDS),
            [_rise(26), _fall(5, LOWEST)],
        ),
        (
            StepSchedule(kind="step", milestone_epochs=(1, 4), gamma=0.2),
            [(partial(lr_scheduler.MultiStepLR, milestones=[7, 26], gamma=0.2), 31)],
        ),
    ],
)
def test_a_schedule_equals_torchs_in_steps(schedule: Schedule, expected: list[tuple[Oracle, int]]) -> None:
    """Epochs of 7, 7, 7, 5 and 5 steps."""
    got = [_rates(schedule).at(step) for step in range(31)]
    assert [lr for lr, _ in got] == pytest.approx(_torch_rates(*expected), rel=1e-6, abs=1e-9)
    assert {momentum for _, momentum in got} == {OPTIM.momentum}


def test_one_cycle_with_a_warm_up_in_epochs_equals_that_with_their_fraction() -> None:
    by_epochs, by_fraction = _rates(OneCycleSchedule(warmup_epochs=2.0)), _rates(OneCycleSchedule(pct_start=14 / 31))
    for step in range(31):
        assert by_epochs.at(step) == pytest.approx(by_fraction.at(step))


@pytest.mark.parametrize(
    ("rule", "base", "factors"),
    [
        ("none", None, (1.0, 0.5)),
        ("linear", None, (1.0, 1.0)),
        ("sqrt", None, (1.0, 0.5 * 2**0.5)),
        ("linear", 4, (2.0, 2.0)),
    ],
)
def test_the_learning_rate_is_scaled_by_batch_rule_and_lr_scale_and_momentum_is_not(
    rule: Any, base: int | None, factors: tuple[float, float]
) -> None:
    rates, plain = _rates(OneCycleSchedule(batch_rule=rule, base_batch=base)), _rates(OneCycleSchedule())
    assert tuple(rates.factor(stage) for stage in (0, 1)) == pytest.approx(factors)
    optimizer = build_optimizer(OPTIM, nn.Linear(2, 2))
    lr, momentum = plain.at(3)
    assert rates.apply(optimizer, 3, stage=1) == pytest.approx(lr * factors[1])
    for group in optimizer.param_groups:
        assert (group["lr"], group["momentum"]) == pytest.approx((lr * factors[1], momentum))


@pytest.mark.parametrize(("kind", "progress"), [("onecycle", "samples"), ("cosine", "epochs")])
def test_progress_by_samples_or_epochs_moves_the_peak_and_keeps_the_ends(kind: Any, progress: Any) -> None:
    """30 epochs of 5 steps with 80 samples and 20 of 40 steps with 160."""
    stages = (RecipeStage(res=32, epochs=30, batch_size=16, fraction=0.5), RecipeStage(res=48, epochs=20, batch_size=4))
    samples, steps = epoch_samples(stages, 160), epoch_steps(stages, 160)
    words: dict[str, Any] = {"total_steps": sum(steps), "epoch_steps": steps, "epoch_samples": samples}

    def rates(**how: Any) -> list[float]:
        schedule = {"onecycle": OneCycleSchedule, "cosine": CosineSchedule}[kind](kind=kind, **how)
        made = Rates(schedule, OPTIM, stages, **words)
        return [made.at(step)[0] for step in range(sum(steps))]

    plain, lrs = rates(pct_start=0.25), rates(pct_start=0.25, progress=progress)
    peak = lrs.index(max(lrs))
    assert lrs == [*sorted(lrs[:peak]), *sorted(lrs[peak:], reverse=True)]
    done = {"samples": 80 * peak / 5 / (30 * 80 + 20 * 160), "epochs": peak / 5 / 50}[progress]
    assert done == pytest.approx(0.25, abs=0.01)
    assert max(lrs) == pytest.approx(OPTIM.lr, rel=0.01)
    assert (lrs[0], lrs[-1]) == pytest.approx((plain[0], plain[-1]))
    late = rates(warmup_epochs=32.0, progress=progress)
    assert late.index(max(late)) == pytest.approx(sum(steps[:32]), abs=2), "whatever the progress"


def test_a_schedule_does_not_add_momentum_to_plain_sgd() -> None:
    optim = dataclasses.replace(OPTIM, momentum=0.0)
    optimizer = build_optimizer(optim, nn.Linear(2, 2))
    _rates(OneCycleSchedule(), optim=optim).apply(optimizer, 3, stage=0)
    assert optimizer.param_groups[0]["momentum"] == 0.0


def test_steps_per_epoch_equal_those_of_the_plan(shard_set: ShardSet) -> None:
    stages = (
        *STAGES,
        RecipeStage(res=64, epochs=2, batch_size=11, fraction=0.3),
        RecipeStage(res=64, epochs=1, batch_size=75),
    )
    plan = Plan(shard_set, stages, eval_batch_size=7)
    expected = [segment.batches for segment in plan.phases if segment.split == "train"]
    assert epoch_steps(stages, len(shard_set.splits["train"])) == expected


def test_the_command_prints_and_draws_the_optimizers_learning_rates(
    shard_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, page = tmp_path / "x.toml", tmp_path / "a.html"
    path.write_text("""
schedule = { kind = "cosine", restart_each_stage = true, batch_rule = "linear" }
optim = { lr = 0.8 }
stages = [{ res = 32, epochs = 1, batch_size = 8, train_from = "layer4" }, { res = 48, epochs = 2, batch_size = 16 }]
""")
    line = ["lr", "--recipe", str(path), "--out", str(page)]
    assert main([*line, "--shards", str(shard_root)]) == 0
    printed = capsys.readouterr().out
    assert main([*line, "--samples", "75"]) == 0
    expected = [f"{page}: exists, and will be overwritten", *printed.splitlines()[:-1]]  # the last is the next command
    assert capsys.readouterr().out.splitlines() == expected
    curve = Curve(Recipe.load(path), 75)
    charts = [json.loads(data)["series"][0] for data in re.findall('json">({.*?})</script>', page.read_text())]
    for drawn, part in zip(charts, (0, 1), strict=False):  # the third is the resolution
        assert drawn["x"] == list(range(20))
        assert drawn["y"] == pytest.approx([curve.at(step // 10, step)[part] for step in range(20)], rel=1e-4)
    lasts = [curve.at(0, 9)[0], curve.at(1, 19)[0]]
    assert (
        f"stage 0: 32 px, batch 8, steps 0..9, LR 0.8 first, 0.8 peak, {lasts[0]:.4g} last; train_from layer4\n"
        f"stage 1: 48 px, batch 16, steps 10..19, LR 1.6 first, 1.6 peak, {lasts[1]:.4g} last\n"
    ) in printed
    path.write_text('[[stages]]\nres = 32\nepochs = 1\nbatch_size = "auto"\n')
    assert main([*line, "--samples", "75"]) == 2
    assert "stages.batch_size: got auto, expected a number" in capsys.readouterr().err
