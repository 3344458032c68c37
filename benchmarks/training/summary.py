"""Summary of compared trainings: means over seeds, ratios to the first recipe, text tables and charts."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cli import repeated, spread, text_table
from pipeline.report.charts import Chart, Series, chart
from pipeline.report.page import figures_page
from pipeline.storage.atomic_file import output_file
from train.logs.score import best_score

__all__ = ["TARGETS", "charts", "draw", "summary", "tables"]

# targets of a progressive recipe against one at its final resolution: top-1 points lost, and time ratios
TARGETS = {"points": -1.0, "time_ratio": 0.65, "final_epoch_ratio": 1.01}
_MEANS = ("top1", "ema_top1", "final_top1", "best_top1", "elapsed_s", "train_s", "eval_s", "wait_frac")

Run = dict[str, Any]


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """{"baseline": name, "recipes": {name: figures}}, of runs as `measure` returns them.

    Means and deviations are over seeds; `against` holds differences and ratios to the baseline's run of the same
    seed, None for the baseline itself.
    """
    names = list(dict.fromkeys(run["recipe"] for run in runs))
    by_name = {name: [run for run in runs if run["recipe"] == name] for name in names}
    base = by_name[names[0]]
    results = {name: _figures(own) | {"against": _against(own, base) if own is not base else None}
             for name, own in by_name.items()}  # fmt: skip
    return {"baseline": names[0], "seeds": [run["seed"] for run in base], "recipes": results}


def _figures(runs: Sequence[Run]) -> dict[str, Any]:
    stages = []
    for each in zip(*(run["stages"] for run in runs), strict=False):  # why not strict: runs may have stopped early
        names = ("step_s", "image_s", "switch_cost_s", "switch_slowest_ratio")
        same = {name: each[0][name] for name in ("stage", "res", "batch_size")}
        stages.append(same | {name: _repeated([stage[name] for stage in each]) for name in names})
    plans = [run["plan"] for run in runs]
    ratios = ("ratio", "training_ratio", "total_ratio")
    return {
        **{name: _mean([run[name] for run in runs]) for name in _MEANS},
        "epochs": repeated([len(run["epochs"]) for run in runs]),
        "final_res": runs[0]["final_res"],
        **{name: repeated([run[name] for run in runs]) for name in ("final_image_s", "final_step_image_s")},
        "stages": stages,
        "plan": {name: repeated([plan[name] for plan in plans]) for name in ratios} if all(plans) else None,
    }


def _against(runs: Sequence[Run], base: Sequence[Run]) -> dict[str, Any]:
    pairs = list(zip(runs, base, strict=True))

    def ratio(name: str) -> dict[str, Any]:
        return repeated([run[name] / against[name] for run, against in pairs])

    comparable = all(run["final_res"] == against["final_res"] for run, against in pairs)
    results: dict[str, Any] = {
        "points": _mean([100 * (run["final_top1"] - against["final_top1"]) for run, against in pairs]),
        "time_ratio": ratio("elapsed_s"),
        "final_epoch_ratio": ratio("final_image_s") if comparable else None,
        "final_step_ratio": ratio("final_step_image_s") if comparable else None,
        "paired_epoch_ratio": _paired_epochs(pairs),
    }
    final = results["final_epoch_ratio"]
    results["missed"] = [
        name for name, bad in (
            ("accuracy", results["points"]["mean"] < TARGETS["points"]),
            ("time", results["time_ratio"]["median"] > TARGETS["time_ratio"]),
            ("final epoch", final is None or final["median"] > TARGETS["final_epoch_ratio"]),
        ) if bad
    ]  # fmt: skip
    return results


def _paired_epochs(pairs: Sequence[tuple[Run, Run]]) -> dict[str, Any] | None:
    """Ratios of the training times of epochs with the same number, resolution and samples; of any seed."""
    if any(run["wall_s"] is not None for run, _ in pairs):
        return None  # why: minutes lie between the epochs of a pair unless the runs took turns
    ratios = [
        epoch["train_s"] / baseline["train_s"]
        for run, against in pairs
        for epoch, baseline in zip(run["epochs"], against["epochs"], strict=False)
        if (epoch["res"], epoch["samples"]) == (baseline["res"], baseline["samples"])
    ]
    return repeated(ratios) if ratios else None


def _mean(raw: Sequence[float | None]) -> dict[str, Any] | None:
    """All seeds' values, mean and sample standard deviation (None for one seed); None if a value is missing."""
    values = [value for value in raw if value is not None]
    if len(values) < len(raw):
        return None
    return {"raw": values, "mean": statistics.fmean(values), "sd": statistics.stdev(values) if len(raw) > 1 else None}


def _repeated(raw: Sequence[float | None]) -> dict[str, Any] | None:
    values = [value for value in raw if value is not None]
    return repeated(values) if len(values) == len(raw) else None


def tables(results: dict[str, Any]) -> str:
    """All tables of a `summary`."""
    base, recipes, seeds = results["baseline"], results["recipes"], len(results["seeds"])
    many = f"{seeds} seeds, mean ± deviation" if seeds > 1 else "one seed"
    parts = [text_table(
        f"complete trainings, {many}",
        ["recipe", "epochs", "top-1 %", "EMA %", "better %", "best %", "total s", "training s", "validation s",
         "waiting %"],
        [[name, _middle(values["epochs"]), *(_pm(values[key], 2, 100) for key in _MEANS[:4]),
          *(_pm(values[key], 1) for key in _MEANS[4:7]), _pm(values["wait_frac"], 2, 100)]
         for name, values in recipes.items()],
    )]  # fmt: skip
    compared = {name: values["against"] for name, values in recipes.items() if values["against"]}
    if compared:
        parts.append(text_table(
            f"against {base}, seed by seed (points: mean ± deviation, ratios: median)",
            ["recipe", "points", "each", "time", "final epoch", "final step", "epochs in turns", "target"],
            [[name, _pm(values["points"], 2, sign="+"), " ".join(f"{each:+.2f}" for each in values["points"]["raw"]),
              *(_ratio(values[f"{key}_ratio"]) for key in ("time", "final_epoch", "final_step", "paired_epoch")),
              f"missed: {', '.join(values['missed'])}" if values["missed"] else "met"]
             for name, values in compared.items()],
        ))  # fmt: skip
        parts.append(f"  targets of progressive recipes: points at least {TARGETS['points']:+.1f}, time at most "
                     f"{TARGETS['time_ratio']:.2f}x, final epoch at most {TARGETS['final_epoch_ratio']:.2f}x; final "
                     "epoch, step: time of an image at the last resolution")  # fmt: skip
    parts.append("\n" + text_table(
        "stages (medians of steps, then of seeds)",
        ["recipe", "stage", "res", "batch", "ms per step", "ms per image", "lost at the change ms", "slowest / median"],
        [[name, str(stage["stage"]), str(stage["res"]), str(stage["batch_size"]), _spread(stage["step_s"], 1, 1e3),
          _spread(stage["image_s"], 2, 1e3), _spread(stage["switch_cost_s"], 0, 1e3),
          _spread(stage["switch_slowest_ratio"], 2)] for name, values in recipes.items() for stage in values["stages"]],
    ))  # fmt: skip
    planned = {name: values["plan"] for name, values in recipes.items() if values["plan"]}
    if planned:
        parts.append("\n" + text_table(
            "plan / outcome (median of seeds; the command also starts, warms up and saves)",
            ["recipe", "training and validation", "training", "complete command"],
            [[name, *map(_ratio, plan.values())] for name, plan in planned.items()],
        ))  # fmt: skip
    return "\n".join(parts)


def _pm(value: dict[str, Any] | None, digits: int, factor: float = 1.0, *, sign: str = "") -> str:
    if value is None:
        return "-"
    mean = f"{factor * value['mean']:{sign},.{digits}f}"
    return mean if value["sd"] is None else f"{mean} ± {factor * value['sd']:,.{digits}f}"


def _middle(value: dict[str, Any]) -> str:
    return f"{value['median']:g}"


def _spread(value: dict[str, Any] | None, digits: int, factor: float = 1.0) -> str:
    return "-" if value is None else spread(value, digits, factor)


def _ratio(value: dict[str, Any] | None) -> str:
    if value is None:
        return "-"
    middle, _, extremes = spread(value, 3).partition(" ")
    return f"{middle}x {extremes}".rstrip()


def charts(runs: Sequence[Run]) -> list[Chart | None]:
    """Top-1 (of raw or averaged weights, whichever is better) and training loss against the epoch, mean of seeds."""
    top1, losses, borders = [], [], set()
    for number, name in enumerate(dict.fromkeys(run["recipe"] for run in runs)):
        epochs = list(zip(*(run["epochs"] for run in runs if run["recipe"] == name), strict=False))
        numbered = [(each[0]["epoch"] + 1, each) for each in epochs]
        validated = [(at, each) for at, each in numbered if each[0]["top1"] is not None]
        colour, kind = "abcd"[number % 4], "dots" if number < 4 else "dash"
        top1.append(Series(
            name=name, colour=colour, kind=kind, x=[at for at, _ in validated],
            y=[100 * statistics.fmean(best_score(epoch) or 0.0 for epoch in each) for _, each in validated],
        ))  # fmt: skip
        losses.append(Series(
            name=name, colour=colour, kind=kind, x=[at for at, _ in numbered],
            y=[statistics.fmean(epoch["loss"] for epoch in each) for _, each in numbered],
        ))  # fmt: skip
        borders |= {at - 0.5 for at, (before, each) in enumerate(itertools.pairwise(epochs), start=2)
                    if before[0]["stage"] != each[0]["stage"]}  # fmt: skip
    marks, x_name = [(border, "") for border in sorted(borders)], "epoch (dashed: stage change)"
    return [
        chart("Top-1 at the stage's resolution", top1, unit="%", marks=marks, zero=False, x_name=x_name, wide=True),
        chart("Training loss", losses, unit="", marks=marks, zero=False, x_name=x_name, wide=True),
    ]


def draw(runs: Sequence[Run], path: Path) -> None:
    """Write a page of `charts` to `path`. Raises `ResoluteError` if it cannot be written."""
    names = ", ".join(dict.fromkeys(run["recipe"] for run in runs))
    with output_file(path) as file:
        file.write(figures_page(title="Compared trainings", subtitle=f"{names}; mean of seeds", charts=charts(runs)))
