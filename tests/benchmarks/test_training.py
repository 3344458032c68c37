"""The training benchmark: runs are interleaved and compared per seed, and every figure is that of the logs."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from resolute.benchmarks.training.__main__ import main
from resolute.benchmarks.training.runs import Side, figures, measure, train
from resolute.benchmarks.training.summary import summary
from resolute.errors import ResoluteError
from resolute.train.planner.estimate import Forecast, StageForecast
from resolute.train.planner.estimate import to_json as plan_to_json
from resolute.train.planner.measure import Throughput
from resolute.train.recipe.schema import Recipe
from tests import ROOT

# 2 epochs of 150 images at 10 images/s, each validated in 5 s and saved in 0.5 s: 30 + 10 + 1 s, and 9 s to start
FORECAST = Forecast(
    stages=(
        StageForecast(
            stage=0,
            res=64,
            batch_size=10,
            epochs=2,
            images=150,
            eval_images=50,
            throughput=Throughput(
                loader_images_per_s=30.0,
                model_images_per_s=15.0,
                live_images_per_s=10.0,
                stall_frac=0.1,
                eval_images_per_s=10.0,
                memory_bytes=0,
            ),
        ),
    ),
    eval_every=1,
    start_s=9.0,
    save_s=0.5,
    save_every_s=300.0,
)
RECIPES = ROOT / "benchmarks" / "recipes"
TINY = """[model]
name = "test_resnet"
[optim]
lr = 0.1
[eval]
batch_size = 8
{stages}"""


def tiny(folder: Path, name: str, stages: Sequence[tuple[int, int]]) -> Path:
    """A recipe with stages of (res, epochs)."""
    text = "".join(f"[[stages]]\nres = {res}\nepochs = {epochs}\nbatch_size = 16\n" for res, epochs in stages)
    path = folder / f"{name}.toml"
    path.write_text(TINY.format(stages=text))
    return path


def write_log(
    path: Path, stages: Sequence[tuple[int, float]], *, top1: float, ema: float | None = None, fraction: float = 1.0
) -> None:
    """A log of two epochs of 8 steps per stage (res, seconds per step); a stage's first two steps take 1 s more.

    The first epoch begins 7 s after `began_unix_s`, now.
    """
    began_unix_s = time.time()
    records: list[dict[str, Any]] = [{"kind": "start", "recipe_hash": "abc"}]
    elapsed_s, epoch = 0.0, 0
    for stage, (res, step_s) in enumerate(stages):
        for each in range(2):
            times = [step_s + (each == 0 and number < 2) for number in range(int(8 * fraction))]
            records += [
                {
                    "kind": "step",
                    "step": 0,
                    "epoch": epoch,
                    "stage": stage,
                    "res": res,
                    "samples": 10,
                    "wait_s": 0.25 * time_s,
                    "compute_s": 0.75 * time_s,
                }
                for time_s in times
            ]
            elapsed_s += sum(times) + 2.0
            validated = epoch % 2 == 1
            records.append(
                {
                    "kind": "epoch",
                    "epoch": epoch,
                    "stage": stage,
                    "res": res,
                    "eval_res": res,
                    "unix_s": began_unix_s + 7.0 + elapsed_s,
                    "samples": 10 * len(times),
                    "train_s": sum(times),
                    "wait_s": 0.25 * sum(times),
                    "eval_s": 2.0,
                    "images_per_s": 10 * len(times) / sum(times),
                    "loss": 2.0 - 0.1 * epoch,
                    "top1": top1 if validated else None,
                    "ema_top1": ema if validated else None,
                }
            )
            epoch += 1
    records.append({"kind": "end", "elapsed_s": elapsed_s, "best_top1": top1 + 0.01})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


class FakeTrainer:
    """Writes the log that belongs to the recipe's name and seed, and records the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, bool]] = []

    def __call__(self, words: Sequence[str]) -> None:
        options = {a: b for a, b in pairwise(words) if a.startswith("--")}
        recipe = Recipe.load(options["--recipe"])
        self.calls.append((recipe.name, recipe.seed, words[0] == "plan"))
        if words[0] == "plan":
            Path(options["--json"]).write_text(json.dumps(plan_to_json(FORECAST, None, [])))
        else:
            assert options["--run"] == f"{recipe.name}-seed{recipe.seed}"
            write_log(Path(options["--runs"]) / options["--run"] / "run.jsonl", **three(recipe.name, recipe.seed))


def three(name: str, seed: int) -> dict[str, Any]:
    """Fixed, progressive and slow runs; each seed's machine is slower than the one before, and its runs better."""
    slower, better = 1.0 + seed, 0.05 * seed
    return {
        "fixed": {"stages": [(64, 4 * slower)], "top1": 0.6 + better},
        "steps": {"stages": [(32, slower), (64, 4 * slower)], "top1": 0.5, "ema": 0.61 + better},
        "slow": {"stages": [(64, 4.4 * slower)], "top1": 0.55 + better, "fraction": 0.5},
    }[name]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[FakeTrainer, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("compare")
    fixed, slow = (tiny(folder, name, [(64, 2)]) for name in ("fixed", "slow"))
    steps = tiny(folder, "steps", [(32, 2), (64, 2)])
    trainer = FakeTrainer()
    sides = [side(path) for path in (fixed, steps, slow)]
    results = measure(sides, [0, 1], runs=folder / "runs", settings=[], plan=True, run=trainer)
    for result in results:  # why: this trainer takes no time
        assert 0 < result["wall_s"] < 1
        assert result["plan"]["total_ratio"] == pytest.approx(50.0 / result["wall_s"])
        result["wall_s"] = result["elapsed_s"] + 9.0
    return trainer, results


def side(path: Path, **more: Any) -> Side:
    values: dict[str, Any] = {"name": path.stem, "recipe": path, "shards": "shards"}
    return Side(**values | more)


def test_runs_are_interleaved_and_estimated_just_before(measured: tuple[FakeTrainer, Any]) -> None:
    runs = [(name, seed) for seed in (0, 1) for name in ("fixed", "steps", "slow")]
    assert measured[0].calls == [(*run, planned) for run in runs for planned in (True, False)]
    assert [(run["recipe"], run["seed"]) for run in measured[1]] == runs
    for run in measured[1]:  # with the run, without its start
        assert run["plan"]["predicted_s"] == 40.0
        assert run["plan"]["ratio"] == pytest.approx(40.0 / run["elapsed_s"])
        assert run["plan"]["training_ratio"] == pytest.approx(30.0 / run["train_s"])


def test_figures_equal_those_of_the_log(tmp_path: Path) -> None:
    write_log(tmp_path / "run.jsonl", [(32, 1.0), (64, 4.0)], top1=0.5, ema=0.6)
    result = figures(tmp_path / "run.jsonl")
    train_s = 16 + 64 + 4  # two epochs of eight steps a stage, four steps that take a second more
    assert result["train_s"] == train_s
    assert (result["eval_s"], result["elapsed_s"]) == (8.0, train_s + 8.0)
    assert result["wait_frac"] == pytest.approx(0.25)
    assert (result["top1"], result["ema_top1"], result["final_top1"], result["best_top1"]) == (0.5, 0.6, 0.6, 0.51)
    assert result["final_res"] == 64
    assert result["final_image_s"] == pytest.approx(statistics.median([34 / 80, 32 / 80]))
    assert result["final_step_image_s"] == pytest.approx(0.4)
    first, second = result["stages"]
    assert (first["res"], first["steps"], first["step_s"], first["switch_cost_s"]) == (32, 16, 1.0, None)
    assert (second["switch_cost_s"], second["switch_slowest_ratio"]) == pytest.approx((2.0, 1.25))
    assert (first["switch_noise_s"], second["switch_noise_s"]) == (None, None)  # too few groups of steps
    assert [epoch["top1"] for epoch in result["epochs"]] == [None, 0.5, None, 0.5]
    lines = (tmp_path / "run.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run.jsonl").write_text("".join(lines[:-1]))
    with pytest.raises(ResoluteError, match="not finished"):
        figures(tmp_path / "run.jsonl")


def test_a_change_of_resolution_inside_a_stage_has_its_own_cost(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write_log(path, [(32, 1.0)], top1=0.5)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    slow, usual = (
        [record for record in records if record["kind"] == "step" and record["epoch"] == epoch] for epoch in (0, 1)
    )
    others = [record for record in records if record["kind"] != "step"]
    ramp = [*usual, *(record | {"res": 64} for record in slow)]  # why: the first epoch's first steps are slow
    path.write_text("".join(json.dumps(record) + "\n" for record in (others[0], *ramp, *others[1:])))
    (stage,) = figures(path)["stages"]
    (change,) = stage["ramp_changes"]
    assert (change["res"], change["cost_s"], change["slowest_ratio"]) == (64, 2.0, 2.0)
    assert stage["switch_cost_s"] is None


def test_a_diverged_tuning_run_counts_as_0_and_ends_other_tables(tmp_path: Path) -> None:
    def diverge(words: Sequence[str]) -> None:
        (Path(words[words.index("--runs") + 1]) / words[words.index("--run") + 1] / "not_finite.json").write_text("{}")
        raise ResoluteError("training ended with status 2, expected 0: error: loss is nan")

    sides = [side(tiny(tmp_path, "fixed", [(64, 2)]))]
    (run,) = measure(sides, [0], runs=tmp_path / "a", settings=[], run=diverge, may_diverge=True)
    assert (run["final_top1"], run["diverged"]) == (0.0, True)
    with pytest.raises(ResoluteError, match="fixed, seed 0: training ended with status 2"):
        measure(sides, [0], runs=tmp_path / "b", settings=[], run=diverge)


def test_differences_are_taken_within_a_seed(measured: tuple[Any, list[dict[str, Any]]]) -> None:
    result = summary(measured[1])
    assert (result["baseline"], result["seeds"]) == ("fixed", [0, 1])
    fixed, steps, slow = result["recipes"].values()
    assert fixed["final_top1"]["raw"] == pytest.approx([0.6, 0.65])
    assert fixed["final_top1"]["mean"] == pytest.approx(0.625)
    assert fixed["final_top1"]["sd"] == pytest.approx(np.std([0.6, 0.65], ddof=1))
    assert fixed["final_top1"]["se"] == pytest.approx(np.std([0.6, 0.65], ddof=1) / 2**0.5)
    # 0.61 and 0.66, the averages, against 0.60 and 0.65
    assert steps["against"]["points"]["raw"] == pytest.approx([1.0, 1.0])
    assert steps["against"]["points"]["sd"] == pytest.approx(0.0, abs=1e-9)
    assert steps["against"]["raw_points"]["raw"] == pytest.approx([-10.0, -15.0])
    assert steps["against"]["ema_points"] is None
    for name, key in (("wall_ratio", "wall_s"), ("time_ratio", "elapsed_s")):
        ratios = [a / b for a, b in zip(steps[key]["raw"], fixed[key]["raw"], strict=True)]
        assert steps["against"][name] == {"raw": ratios, "median": statistics.median(ratios)}
    assert steps["against"]["final_epoch_ratio"]["median"] == pytest.approx(1.0)
    assert steps["against"]["missed"] == ["time"]
    # half of the images an epoch: the time of an image counts, not that of an epoch
    assert slow["against"]["final_step_ratio"]["raw"] == pytest.approx([1.1, 1.1])
    assert all(1.05 < ratio < 1.2 for ratio in slow["against"]["final_epoch_ratio"]["raw"])
    assert slow["against"]["missed"] == ["accuracy", "time", "final step"]


def test_finished_runs_are_not_repeated_and_runs_of_other_code_refused(tmp_path: Path) -> None:
    recipe, runs = tiny(tmp_path, "fixed", [(64, 2)]), tmp_path / "runs"
    trainer = FakeTrainer()
    new: list[tuple[str, int]] = []

    def call(seeds: Sequence[int], commit: str = "a", run: Any = trainer, **more: Any) -> list[dict[str, Any]]:
        return measure(
            [side(recipe, **more)],
            seeds,
            runs=runs,
            settings=[],
            run=run,
            expect={"commit": commit},
            on_run=lambda result: new.append((result["recipe"], result["seed"])),
        )

    first = call([0])
    again = call([0, 1])
    assert again[0] == first[0]
    assert [seed for _, seed, _ in trainer.calls] == [0, 1]
    assert new == [("fixed", 0), ("fixed", 1)]
    for more in ({"commit": "b"}, {"shards_hash": "other"}):
        with pytest.raises(ResoluteError, match="fixed-seed0: a run that this benchmark did not start, or with oth"):
            call([0], **more)

    def killed(words: Sequence[str]) -> None:
        trainer(words)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call([3], run=killed)
    (runs / "fixed-seed3" / "left").touch()
    assert call([3])[0]["top1"] == pytest.approx(0.75)  # again, from its start
    assert not (runs / "fixed-seed3" / "left").exists()
    assert new[2:] == [("fixed", 3)]


def test_bad_arguments_are_reported_before_any_training(
    shard_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error_of(recipes: Sequence[Path], *more: str) -> str:
        words = ["--shards", str(shard_root), "--recipes", ",".join(map(str, recipes)), "--device", "cpu", *more]
        assert main([*words, "--out", str(tmp_path / "o.json")], run=FakeTrainer()) == 2
        return capsys.readouterr().err

    good, other = tiny(tmp_path, "good", [(64, 1)]), tiny(tmp_path, "other", [(96, 1)])
    for recipes, more, message in (
        ([good, other], [], "no shards at 96 px"),
        ([tmp_path / "none.toml"], [], "no readable recipe"),
        ([good], ["--seeds", "1,1"], "got 1,1, expected different whole numbers"),
        ([good], ["--report"], "got one of them without --split, expected it; add --split"),
        ([good], ["--split", str(tmp_path / "none")], "cannot be read"),
    ):
        assert message in error_of(recipes, *more)


def test_a_failed_run_ends_the_benchmark_with_its_error(
    shard_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny(tmp_path, "some", [(32, 1)])
    words = [
        "--shards",
        shard_root,
        "--recipes",
        recipe,
        "--seeds",
        "4",
        "--device",
        "cpu",
        "--out",
        tmp_path / "o.json",
    ]
    monkeypatch.chdir(tmp_path)  # the trainer can be started from any folder
    # of several lines on stderr, the usage first
    assert main([str(word) for word in words], run=lambda arguments: train([*arguments, "--keep", "many"])) == 2
    err = capsys.readouterr().err
    assert ": some, seed 4: training ended with status 2, expected 0: " in err
    assert "--keep: got 'many', expected integer" in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "o").exists()


def test_comparison_recipes_differ_only_in_the_named_property() -> None:
    def load(name: str) -> Recipe:
        return Recipe.load(RECIPES / f"{name}.toml")

    fixed, progressive = load("fixed224"), load("progressive")
    assert (
        replace(
            fixed,
            name="progressive",
            stages=progressive.stages,
            schedule=progressive.schedule,
        )
        == progressive
    )
    for recipe in (fixed, progressive):
        assert (recipe.total_epochs, recipe.stages[-1].res) == (12, 224)
