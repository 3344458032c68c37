"""The estimate of a run from a few steps of every stage, which leave no trace, and the advice derived from it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from resolute.cli import main
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.loader import Loader
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import Stage
from resolute.train.devices.distributed import Ranks
from resolute.train.learner import Learner
from resolute.train.planner.estimate import (
    Forecast,
    StageForecast,
    advice,
    calibration,
    forecast,
    table,
)
from resolute.train.planner.measure import Stopwatch, Throughput, expected_s, measure, measure_stages
from resolute.train.planner.plan import fitting_scale
from resolute.train.recipe.schema import Recipe
from resolute.train.recipe.text import RecipeText


class Machine:
    """A clock that advances with work only; the first three batches after a jump take ten times as long."""

    def __init__(self, plan: Plan, *, load_s: float, train_s: float, eval_s: float) -> None:
        self.plan, self.load_s, self.train_s, self.eval_s = plan, load_s, train_s, eval_s
        self.now, self.at, self.since_jump = 0.0, 0, 0
        self.watch = Stopwatch(sync=lambda: None, clock=lambda: self.now)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.since_jump = state["next_batch"], 0

    def __next__(self) -> Any:
        spec = self.plan.batch(self.at)
        self.at, self.since_jump = self.at + 1, self.since_jump + 1
        self.now += self.load_s * (10 if self.since_jump <= 3 else 1)
        return SimpleNamespace(spec=spec)

    def train(self, batch: Any) -> None:
        assert batch.spec.split == "train"
        self.now += self.train_s

    def validate(self, batch: Any) -> None:
        assert batch.spec.split == "val"
        self.now += self.eval_s


def test_loader_model_and_training_are_each_timed_in_steady_state(shard_set: ShardSet) -> None:
    plan = Plan(shard_set, [Stage(res=32, epochs=2, batch_size=2)], eval_batch_size=1)
    machine = Machine(plan, load_s=0.125, train_s=0.375, eval_s=0.5)
    alone: Any = SimpleNamespace(spec=plan.batch(0))
    got = measure(
        plan,
        cast(Any, machine),
        0,
        machine.watch,
        train=machine.train,
        validate=machine.validate,
        memory=lambda: 7,
        synthetic_batch=alone,
    )
    assert got.loader_images_per_s == 2 / 0.125
    assert got.model_images_per_s == pytest.approx(2 / 0.375)
    assert got.live_images_per_s == pytest.approx(2 / 0.5)
    assert got.stall_frac == pytest.approx(0.25)
    assert got.eval_images_per_s == pytest.approx(1 / 0.625)
    assert got.memory_bytes == 7


@pytest.mark.parametrize(("hurried", "steps"), [(False, 4), (True, 2)])
def test_steps_that_take_much_longer_than_intended_are_timed_twice_at_most_and_once_if_time_is_limited(
    hurried: bool, steps: int, shard_set: ShardSet
) -> None:
    plan = Plan(shard_set, [Stage(res=32, epochs=2, batch_size=2)], eval_batch_size=1)
    machine = Machine(plan, load_s=0.125, train_s=100.0, eval_s=50.0)
    count = itertools.count()

    def train(batch: Any) -> None:
        next(count)
        machine.train(batch)

    got = measure(
        plan,
        cast(Any, machine),
        0,
        dataclasses.replace(machine.watch, hurried=hurried),
        train=train,
        validate=machine.validate,
        memory=lambda: 7,
        synthetic_batch=cast(Any, SimpleNamespace(spec=plan.batch(0))),
    )
    assert next(count) == steps
    assert got.live_images_per_s == pytest.approx(2 / 100, rel=0.02)
    assert got.eval_images_per_s == pytest.approx(1 / 50, rel=0.03)


def test_if_time_is_limited_an_impossible_rate_of_slow_steps_is_not_measured_again(shard_set: ShardSet) -> None:
    plan = Plan(shard_set, [Stage(res=32, epochs=2, batch_size=2)], eval_batch_size=1)
    machine, slowness = (
        Machine(plan, load_s=0.125, train_s=0.0, eval_s=1.0),
        itertools.chain([300.0], itertools.repeat(9)),
    )
    steps = 0

    def train(batch: Any) -> None:
        nonlocal steps
        steps, machine.now = steps + 1, machine.now + next(slowness)

    got = measure(
        plan,
        cast(Any, machine),
        0,
        dataclasses.replace(machine.watch, hurried=True),
        train=train,
        validate=None,
        memory=lambda: 7,
        synthetic_batch=cast(Any, SimpleNamespace(spec=plan.batch(0))),
    )
    assert not got.is_possible
    assert steps == 2


@pytest.mark.parametrize(
    ("limit_s", "pixel_s", "measured", "estimated_from"),
    [
        (None, 1.0, [2, 1, 0], [None, None, None]),
        (16.0, 0.0, [2, 1, 0], [None, None, None]),
        (11.0, 0.0, [2, 1], [1, None, None]),
        (0.0, 0.0, [0], [None, 0, 0]),
        (0.0, 1.0, [0], [None, 0, 0]),
        # stage 2 would take 49 s, stage 1 28 s, stage 0 12 s
        (45.0, 0.001, [1, 0], [None, None, 1]),
        (60.0, 0.001, [2], [2, 2, None]),
    ],
)
def test_stages_that_do_not_fit_into_the_limit_of_time_are_estimated_by_their_pixels(
    limit_s: float | None,
    pixel_s: float,
    measured: list[int],
    estimated_from: list[int | None],
    shard_set: ShardSet,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = Plan(shard_set, [Stage(res=res, epochs=1, batch_size=4) for res in (32, 48, 64)])
    order: list[int] = []
    lines: list[str] = []
    clock: Any = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)

    def fixed(plan: Plan, stream: Any, stage: int, watch: Stopwatch, **options: Any) -> Throughput:
        assert watch.hurried == (limit_s is not None)
        order.append(stage)
        clock.now += expected_s(plan, stage, pixel_s=pixel_s)
        return throughput(1600, 800, 400)

    monkeypatch.setattr("resolute.train.planner.measure.measure", fixed)
    monkeypatch.setattr("resolute.train.planner.measure.time", clock)
    monkeypatch.setattr("resolute.train.planner.measure.restored", contextlib.nullcontext)
    monkeypatch.setattr("resolute.train.planner.measure.synthetic_batch", lambda *args: None)
    learner: Any = SimpleNamespace(
        device=torch.device("cpu"), ranks=Ranks(), train_step=None, eval_step=None, image_dtype=None
    )
    throughputs = measure_stages(plan, cast(Any, None), learner, limit_s=limit_s, pixel_s=pixel_s, say=lines.append)
    assert order == measured
    assert [line.partition(",")[0] for line in lines] == [
        f"measuring stage {stage} at {plan.stages[stage].res} px" for stage in measured
    ]
    assert [each.estimated_from for each in throughputs] == estimated_from
    for stage, (got, known) in enumerate(zip(throughputs, estimated_from, strict=True)):
        ratio = 1 if known is None else (plan.stages[stage].max_res / plan.stages[known].max_res) ** 2
        assert got.live_images_per_s == pytest.approx(400 / ratio)
        assert (got.memory_bytes == 0) == (known is not None)


def test_the_table_marks_what_is_estimated(shard_set: ShardSet) -> None:
    plan = Plan(shard_set, [Stage(res=res, epochs=1, batch_size=4) for res in (32, 48, 64)])
    throughputs = [
        throughput(900, 800, 600).at(0.25, stage=2),
        throughput(900, 800, 600).at(0.5625, stage=2),
        throughput(900, 800, 600),
    ]
    result = forecast(plan, throughputs, eval_every=1, start_s=1, save_s=0, save_every_s=300)
    rows = table(result).splitlines()
    assert [row.count("~") for row in rows[1:4]] == [5, 5, 0]
    assert len({len(row) for row in rows[1:4]}) == 1
    assert "~ stages 0, 1: estimated from stage 2 by the number of pixels, to keep within --limit" in rows


def test_every_rank_runs_the_number_of_steps_of_rank_0(shard_set: ShardSet) -> None:
    """Otherwise a rank would wait for the gradients of another for ever."""
    plan = Plan(shard_set, [Stage(res=32, epochs=1, batch_size=2)], eval_batch_size=1)
    alone: Any = SimpleNamespace(spec=plan.batch(0))

    def steps_of(speed: float) -> int:
        machine, steps = Machine(plan, load_s=0.1 * speed, train_s=0.1 * speed, eval_s=0.1), itertools.count()
        agreed = iter([3, 5, 7, 1, 2])  # the fourth: whether the rates are possible

        def train(batch: Any) -> None:
            next(steps)
            machine.train(batch)

        measure(
            plan,
            cast(Any, machine),
            0,
            Stopwatch(sync=lambda: None, clock=lambda: machine.now, broadcast=lambda _: next(agreed)),
            train=train,
            validate=machine.validate,
            memory=lambda: 0,
            synthetic_batch=alone,
        )
        return next(steps)

    assert steps_of(1.0) == steps_of(30.0)


def throughput(loader: float, model: float, live: float, validation: float | None = 50.0) -> Throughput:
    return Throughput(
        loader_images_per_s=loader,
        model_images_per_s=model,
        live_images_per_s=live,
        stall_frac=0.1,
        eval_images_per_s=validation,
        memory_bytes=2**30,
    )


def forecast_of(*stages: tuple[int, int, int, Throughput], folds: int = 1, save_s: float = 0.0) -> Forecast:
    """A forecast of (batch size, epochs, images, throughput) a stage, validated after each epoch on 100 images."""
    return Forecast(
        stages=tuple(
            StageForecast(
                stage=i, res=32, batch_size=size, epochs=epochs, images=images, eval_images=100, throughput=throughput
            )
            for i, (size, epochs, images, throughput) in enumerate(stages)
        ),
        eval_every=1,
        start_s=2.0,
        save_s=save_s,
        save_every_s=300.0,
        folds=folds,
    )


def test_the_total_is_the_sum_over_all_passes(shard_set: ShardSet) -> None:
    stages = [Stage(res=32, epochs=3, batch_size=16, fraction=0.5), Stage(res=48, epochs=2, batch_size=8)]
    plan = Plan(shard_set, stages, eval_batch_size=7, eval_every_epochs=2)
    throughputs = [throughput(900, 30, 20, 40), throughput(900, 12, 10, 25)]
    got = forecast(plan, throughputs, eval_every=2, start_s=3, save_s=0.5, save_every_s=2.0)
    total = 3.0
    for segment in plan.phases:
        used = throughputs[segment.stage]
        rate = used.live_images_per_s if segment.split == "train" else used.eval_images_per_s
        assert rate is not None
        total += segment.samples / rate
        if segment.split == "train":
            total += 0.5 * (1 + segment.samples / rate // 2.0)
    assert got.total_s() == pytest.approx(total)
    assert [stage.steps for stage in got.stages] == [3 * 3, 2 * 10]
    assert [record["step_s"] for record in calibration(got)] == [16 / 20, 8 / 10]
    assert sum(got.parts_s().values()) == got.total_s()
    # a stage is without validation only in a plan with fewer epochs: a validation step takes a third of a training step
    assert forecast_of((8, 1, 80, throughput(900, 30, 20, None))).stages[0].eval_s == pytest.approx(100 / 90)


@pytest.mark.parametrize(
    ("loader", "model", "live", "limit"),
    [(100, 50, 48, "model"), (50, 100, 48, "loader"), (100, 90, 55, "both"), (1000, 50, 41, "model")],
)
def test_the_slower_of_loader_and_model_is_the_limit(loader: float, model: float, live: float, limit: str) -> None:
    assert forecast_of((8, 1, 80, throughput(loader, model, live))).stages[0].limit == limit


def test_advice_is_the_time_to_spare_or_what_would_save_enough() -> None:
    result = forecast_of((8, 3, 80, throughput(900, 30, 20)))  # 2 + 3 * (4 + 2) s
    spare = "fits the budget of 25.0 s: 5.0 s to spare"
    assert advice(result, 25.0, (1.0, [3]), None) == [spare]
    assert advice(result, 32.0, (1.65, [5]), None)[1:] == [
        "- more epochs: --set scale_epochs=1.65: 5 epochs instead of 3: 32.0 s"
    ]
    lines = "\n".join(advice(dataclasses.replace(result, folds=4), 45.0, (0.49, [1]), None))
    assert "35.0 s too long" in lines
    assert "fewer epochs: --set scale_epochs=0.49: 1 epochs instead of 3: 32.0 s" in lines
    assert "fewer folds: 2 of 4: 40.0 s" in lines
    lines = "\n".join(advice(dataclasses.replace(result, folds=4), 10.0, None, None))
    assert "fewer epochs: not enough, whatever scale_epochs" in lines
    assert "fewer folds: not enough, one fold takes 20.0 s" in lines


def test_the_largest_scale_of_the_epochs_fits_the_budget() -> None:
    two = forecast_of((8, 8, 80, throughput(900, 30, 20)), (16, 2, 80, throughput(900, 30, 20)))  # 2 + 10 * 6 s
    stages = "stages = [{ res = 8, epochs = 8, batch_size = 8 }, { res = 16, epochs = 2, batch_size = 8 }]"

    def scale(budget_s: float, toml: str = stages) -> tuple[float, list[int]] | None:
        return fitting_scale(RecipeText(name="x", toml=toml, where="x"), two, budget_s)

    assert scale(62.0) == (1.0, [8, 2])
    assert scale(61.9) == (0.93, [7, 2])
    assert scale(32.0) == (0.56, [4, 1])
    assert scale(14.0) == (0.18, [1, 1])
    assert scale(13.9) is None
    assert scale(122.0) == (2.05, [16, 4])
    ramp = stages.replace("res = 8, epochs", "res = [8, 12, 14], epochs")
    assert scale(32.0, ramp) == (0.56, [4, 1])
    assert scale(20.0, ramp) is None, "three resolutions need three epochs"
    assert scale(32.0, f"scale_epochs = 0.5\n{stages}") == (0.56, [4, 1]), "a scale of the recipe is replaced"


# two stages of few steps, with EMA, dropout and unfreezing
SMALL = """
model = { name = "test_resnet", kwargs = { drop_rate = 0.1 } }
precision = { amp = "off" }
ema = { decay = 0.9 }
eval = { batch_size = 8 }
stages = [
    { res = 32, epochs = 2, batch_size = 12, fraction = 0.5, train_from = "layer4" },
    { res = 48, epochs = 1, batch_size = 18 },
]
"""


@pytest.mark.usefixtures("quick")
def test_measuring_does_not_change_the_training(shard_set: ShardSet) -> None:
    recipe = Recipe.parse(tomllib.loads(SMALL), name="small")
    plan = Plan(shard_set, recipe.stages, seed=5, eval_batch_size=8)

    def losses(*, measured: bool) -> list[float]:
        learner = Learner(
            recipe,
            classes=3,
            total_steps=plan.total_steps,
            device=torch.device("cpu"),
            epoch_steps=[s.batches for s in plan.phases if s.split == "train"],
        )
        with Loader(plan, device="cpu") as loader:
            losses_ = [float(learner.train_step(next(loader))[0]) for _ in range(2)]
            if measured:
                throughputs = measure_stages(plan, loader, learner)
                assert len(throughputs) == 2
                assert all(p.live_images_per_s > 0 and p.memory_bytes > 0 for p in throughputs)
                loader.load_state_dict({"next_batch": 2})
            losses_.append(float(learner.train_step(next(loader))[0]))
            return losses_ + learner.eval_step(next(loader)).sums["raw"].tolist()

    assert losses(measured=True) == losses(measured=False)


@pytest.mark.usefixtures("quick")
def test_the_plan_command_prints_the_estimate_and_leaves_nothing(
    words: Callable[[Path], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, small = tmp_path / "plan.json", tmp_path / "small.toml"
    small.write_text(SMALL)
    line = [*words(tmp_path / "runs"), "--recipe", str(small), "--threads", "1"]
    assert main(["plan", *line[1:], "--budget", "0.1s", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "does not fit the budget of 100 ms" in out
    assert "fewer epochs" in out
    assert "larger batches: 24, 36 instead of 12, 18" in out
    got = json.loads(file.read_text())
    assert [stage["steps"] for stage in got["stages"]] == [8, 5]
    assert got["total_s"] == pytest.approx(sum(got["parts_s"].values()))
    assert not (tmp_path / "runs").exists()
    assert main(["plan", *line[1:], "--budget", "soon"]) == 2
    assert "--budget: got 'soon'" in capsys.readouterr().err
