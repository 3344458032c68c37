"""Summary of compared trainings: means over seeds with standard errors, ratios to the first side, tables and charts.

python -m resolute.benchmarks.training.summary RESULT.json [--charts page.html]     # of a result file, again
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from resolute.benchmarks.cli import Parser, command, repeated, spread, text_table
from resolute.errors import ResoluteError
from resolute.files import check_output, output_file
from resolute.report.charts import Chart, Series, chart
from resolute.report.page import figures_page

__all__ = ["TARGETS", "charts", "draw", "main", "summary", "tables"]

# targets of a progressive recipe against one at its final resolution: top-1 points lost, and time ratios
TARGETS = {"points": -0.5, "time_ratio": 0.5, "final_step_ratio": 1.01}
_MEANS = ("top1", "ema_top1", "final_top1", "best_top1")
_TIMES = ("wall_s", "elapsed_s", "train_s", "eval_s", "wait_frac")

Run = dict[str, Any]


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """{"baseline": name, "recipes": {name: figures}}, of runs as `measure` returns them.

    Accuracies are means over the seeds with standard errors, times are medians; `against` holds differences and ratios
    to the baseline's run of the same seed, None for the baseline itself.
    """
    names = list(dict.fromkeys(run["recipe"] for run in runs))
    by_name = {name: [run for run in runs if run["recipe"] == name] for name in names}
    base = by_name[names[0]]
    results = {
        name: _figures(own) | {"against": _against(own, base) if own is not base else None}
        for name, own in by_name.items()
    }
    return {"baseline": names[0], "seeds": [run["seed"] for run in base], "recipes": results}


def _figures(runs: Sequence[Run]) -> dict[str, Any]:
    stages = []
    for each in zip(*(run["stages"] for run in runs), strict=False):  # why not strict: runs may have stopped early
        names = ("step_s", "image_s", "switch_cost_s", "switch_noise_s", "switch_slowest_ratio")
        same = {name: each[0][name] for name in ("stage", "res", "batch_size")}
        stages.append(same | {name: _repeated([stage.get(name) for stage in each]) for name in names})
    plans = [run["plan"] for run in runs]
    ratios = ("ratio", "training_ratio", "total_ratio")
    return {
        **{name: _mean([run[name] for run in runs]) for name in _MEANS},
        **{name: repeated([run[name] for run in runs]) for name in _TIMES},
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

    def points(name: str) -> dict[str, Any] | None:
        are_known = all(each[name] is not None for pair in pairs for each in pair)
        return _mean([100 * (run[name] - against[name]) for run, against in pairs]) if are_known else None

    comparable = all(run["final_res"] == against["final_res"] for run, against in pairs)
    results: dict[str, Any] = {
        "points": points("final_top1"),
        "raw_points": points("top1"),
        "ema_points": points("ema_top1"),
        "wall_ratio": ratio("wall_s"),
        "time_ratio": ratio("elapsed_s"),
        "final_epoch_ratio": ratio("final_image_s") if comparable else None,
        "final_step_ratio": ratio("final_step_image_s") if comparable else None,
    }
    steps = results["final_step_ratio"]
    results["missed"] = [
        name
        for name, bad in (
            ("accuracy", results["points"]["mean"] < TARGETS["points"]),
            ("time", results["wall_ratio"]["median"] > TARGETS["time_ratio"]),
            ("final step", not steps or steps["median"] > TARGETS["final_step_ratio"]),
        )
        if bad
    ]
    return results


def _mean(raw: Sequence[float | None]) -> dict[str, Any] | None:
    """All n seeds' values, mean, standard deviation and error (None for one seed); None if a value is missing."""
    values = [value for value in raw if value is not None]
    if len(values) < len(raw):
        return None
    sd = statistics.stdev(values) if len(values) > 1 else None
    return {
        "raw": values,
        "n": len(values),
        "mean": statistics.fmean(values),
        "sd": sd,
        "se": None if sd is None else sd / math.sqrt(len(values)),
    }


def _repeated(raw: Sequence[float | None]) -> dict[str, Any] | None:
    values = [value for value in raw if value is not None]
    return repeated(values) if len(values) == len(raw) else None


def tables(result: dict[str, Any]) -> str:
    """All tables of a result, which has a `summary` and, if there were any, `split` and `tuning`."""
    base, recipes, seeds = (result["summary"][key] for key in ("baseline", "recipes", "seeds"))
    many = f"mean ± standard error of n = {len(seeds)} seeds" if len(seeds) > 1 else "one seed"
    parts = []
    if "tuning" in result:
        tuning = result["tuning"]
        parts.append(
            text_table(
                f"learning rates, top-1 % on the part tune by factor ({tuning['runs_per_side']} runs per side)",
                ["side", *(f"{factor:g}" for factor in tuning["factors"]), "best"],
                [
                    [
                        name,
                        *(f"{100 * value:.2f}" for value in side["top1"].values()),
                        f"{side['best']:g}{', the last one tried' if side['at_edge'] else ''}",
                    ]
                    for name, side in tuning["sides"].items()
                ],
            )
            + "\n"
        )
    if "split" in result:
        split = result["split"]
        before = ", ".join(f"{count} on {part}" for part, count in split["runs_before"].items())
        parts.append(f"validated on the part {split['part']}; runs before: {before}")
    parts.append(
        text_table(
            f"complete trainings, {many}; medians of times",
            [
                "side",
                "epochs",
                "top-1 %",
                "EMA top-1 %",
                "whole command s",
                "training + validation s",
                "training s",
                "validation s",
                "waiting %",
            ],
            [
                [
                    name,
                    _middle(values["epochs"], 0),
                    _pm(values["top1"], 2, 100),
                    _pm(values["ema_top1"], 2, 100),
                    *(_middle(values[key], 1) for key in _TIMES[:4]),
                    _middle(values["wait_frac"], 2, 100),
                ]
                for name, values in recipes.items()
            ],
        )
    )
    compared = {name: values["against"] for name, values in recipes.items() if values["against"]}
    if compared:
        parts.append(
            "\n"
            + text_table(
                f"against {base}, seed by seed (points: {many}; ratios: median)",
                [
                    "side",
                    "points",
                    "EMA points",
                    "whole command",
                    "training + validation",
                    "final epoch",
                    "final step",
                    "target",
                ],
                [
                    [
                        name,
                        *(_pm(values[key], 2, sign="+") for key in ("raw_points", "ema_points")),
                        *(_ratio(values[f"{key}_ratio"]) for key in ("wall", "time", "final_epoch", "final_step")),
                        f"missed: {', '.join(values['missed'])}" if values["missed"] else "met",
                    ]
                    for name, values in compared.items()
                ],
            )
        )
        parts.append(
            "  final epoch, final step: time of an image at the last resolution\n"
            f"  targets of progressive recipes: at least {TARGETS['points']:+.1f} points (EMA where a recipe "
            f"has one), whole command at most {TARGETS['time_ratio']:.2f}x,\n  final step at most "
            f"{TARGETS['final_step_ratio']:.2f}x"
        )
    parts.append(
        "\n"
        + text_table(
            "stages (medians of steps, then of seeds)",
            [
                "side",
                "stage",
                "res",
                "batch",
                "ms per step",
                "ms per image",
                "change cost ms",
                "its noise ± ms",
                "slowest / median",
            ],
            [
                [
                    name,
                    str(stage["stage"]),
                    str(stage["res"]),
                    str(stage["batch_size"]),
                    _spread(stage["step_s"], 1, 1e3),
                    _spread(stage["image_s"], 2, 1e3),
                    _spread(stage["switch_cost_s"], 0, 1e3),
                    _spread(stage.get("switch_noise_s"), 0, 1e3),  # older results do not have it
                    _spread(stage["switch_slowest_ratio"], 2),
                ]
                for name, values in recipes.items()
                for stage in values["stages"]
            ],
        )
    )
    planned = {name: values["plan"] for name, values in recipes.items() if values["plan"]}
    if planned:
        parts.append(
            "\n"
            + text_table(
                "plan / outcome (median of seeds; the command also starts, warms up and saves)",
                ["side", "training and validation", "training", "complete command"],
                [[name, *map(_ratio, plan.values())] for name, plan in planned.items()],
            )
        )
    return "\n".join(parts)


def _pm(value: dict[str, Any] | None, digits: int, factor: float = 1.0, *, sign: str = "") -> str:
    if value is None:
        return "-"
    mean = f"{factor * value['mean']:{sign},.{digits}f}"
    return mean if value["se"] is None else f"{mean} ± {factor * value['se']:,.{digits}f}"


def _middle(value: dict[str, Any], digits: int, factor: float = 1.0) -> str:
    return f"{factor * value['median']:,.{digits}f}"


def _spread(value: dict[str, Any] | None, digits: int, factor: float = 1.0) -> str:
    return "-" if value is None else spread(value, digits, factor)


def _ratio(value: dict[str, Any] | None) -> str:
    if value is None:
        return "-"
    middle, _, extremes = spread(value, 3).partition(" ")
    return f"{middle}x {extremes}".rstrip()


def charts(runs: Sequence[Run]) -> list[Chart | None]:
    """Top-1 of raw and averaged weights against the time since the command's start, and training loss by epoch.

    Accuracies and losses are means over the seeds, times are medians.
    """
    names = list(dict.fromkeys(run["recipe"] for run in runs))
    last_s = max((point["wall_s"] for run in runs for point in run["curve"]), default=0.0)
    unit, unit_s = ("s", 1) if last_s < 120 else ("min", 60) if last_s < 7200 else ("h", 3600)
    top1, losses, borders = [], [], set()
    for number, name in enumerate(names):
        own, colour = [run for run in runs if run["recipe"] == name], "abcd"[number % 4]
        points = list(zip(*(run["curve"] for run in own), strict=False))
        x = [statistics.median(each["wall_s"] for each in point) / unit_s for point in points]
        for key, title, kind in (("top1", name, "dots"), ("ema_top1", f"{name}, EMA", "dash")):
            if points and all(each[key] is not None for point in points for each in point):
                y = [100 * statistics.fmean(each[key] for each in point) for point in points]
                top1.append(Series(name=title, colour=colour, kind=kind, x=x, y=y))
        epochs = list(zip(*(run["epochs"] for run in own), strict=False))
        losses.append(
            Series(
                name=name,
                colour=colour,
                kind="dots" if number < 4 else "dash",
                x=[each[0]["epoch"] + 1 for each in epochs],
                y=[statistics.fmean(epoch["loss"] for epoch in each) for each in epochs],
            )
        )
        borders |= {
            at - 0.5
            for at, (before, each) in enumerate(itertools.pairwise(epochs), start=2)
            if before[0]["stage"] != each[0]["stage"]
        }
    return [
        chart(
            "Top-1 at the validation's resolution",
            top1,
            unit="%",
            zero=False,
            start=0.0,
            wide=True,
            x_name=f"{unit} since the command's start",
        ),
        chart(
            "Training loss",
            losses,
            unit="",
            marks=[(border, "") for border in sorted(borders)],
            zero=False,
            x_name="epoch (dashed: stage change)",
            wide=True,
        ),
    ]


def draw(result: dict[str, Any], path: Path) -> None:
    """Write a page of the `charts` of a result to `path`, and print its name. Raises `ResoluteError` if it cannot."""
    names = ", ".join(dict.fromkeys(run["recipe"] for run in result["runs"]))
    subtitle = f"{names}; means of {len(result['settings']['seeds'])} seeds"
    with output_file(path) as file:
        file.write(figures_page(title="Compared trainings", subtitle=subtitle, charts=charts(result["runs"])))
    print(f"written: {path}")


def _run(args: argparse.Namespace) -> None:
    if args.charts:
        check_output(args.charts, setting="--charts", suffixes=(".html",))
    try:
        result = json.loads(args.result.read_text(encoding="utf-8"))
        print(tables(result))
        if args.charts:
            draw(result, args.charts)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ResoluteError(
            f"{args.result}: cannot be read, got {error!r}, expected a result of today's "
            "`python -m resolute.benchmarks.training`; name another file"
        ) from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status. Prints one line to stderr for a `ResoluteError`."""
    parser = Parser(
        prog="python -m resolute.benchmarks.training.summary",
        description="Print and draw a result file.",
        allow_abbrev=False,
    )
    parser.add_argument("result", type=Path, metavar="RESULT.json")
    parser.add_argument("--charts", type=Path, metavar="FILE", help=".html page to draw")
    return command(parser, _run, argv)


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
