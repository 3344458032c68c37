"""`resolute compare RUN RUN …`: one page about several runs, from their logs; imports neither torch nor DALI.

Accuracy against time and epochs, losses, step times, tables, and the settings in which the runs differ. A run of folds
stands for its folds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from resolute.errors import ResoluteError
from resolute.files import output_file
from resolute.report.charts import Chart, Series, chart
from resolute.report.page import figures_page
from resolute.train.logs.run_log import RunLogReader, format_duration
from resolute.train.logs.score import Metric, best_score
from resolute.train.options import CompareOptions
from resolute.train.run_folder import existing_run, page_file

from .curves import metrics_of, time_unit
from .diagnosis import stage_rows

__all__ = ["ComparedRun", "differences", "first_reached_s", "main", "open_runs", "page"]

_COLOURS = "abcd"
_MAX_RUNS = 8  # colours, each as a full and as a dashed line
_BINS = 300  # points per run of the step times
_ROWS = 200  # settings that differ, at most
_LEVELS = (0.5, 0.75, 0.9, 0.95, 1.0)  # of the best score of the run whose best is lowest
# keys of a log's first record that are no settings, or are compared apart from the others
_APART = ("kind", "recipe", "recipe_hash", "recipe_text", "recipe_values", "class_names", "class_samples", "machine")
_HARDWARE = ("device", "cpu", "threads", "cores", "gpu")  # in which runs differ whose times are not comparable


@dataclass(frozen=True)
class ComparedRun:
    """A run's log with at least one validated epoch; `name` is unique on the page."""

    name: str
    log: RunLogReader

    @cached_property
    def epochs(self) -> list[dict[str, Any]]:
        return self.log.epochs

    @cached_property
    def stages(self) -> list[dict[str, Any]]:
        return stage_rows(self.log)

    @property
    def metric(self) -> Metric:
        return metrics_of(self.epochs)[0]

    @cached_property
    def scores(self) -> list[tuple[dict[str, Any], float]]:
        """Validated epochs, each with the better score of raw and averaged weights."""
        return [(epoch, score) for epoch in self.epochs if (score := best_score(epoch)) is not None]

    @cached_property
    def best_epoch(self) -> dict[str, Any]:
        """The epoch whose weights the run keeps as its best."""
        best = self.log.best_epoch
        assert best is not None  # why: `open_runs` refuses runs without a validation
        return best

    @cached_property
    def best(self) -> float:
        score = best_score(self.best_epoch)
        assert score is not None
        return score


def open_runs(targets: Sequence[str]) -> list[ComparedRun]:
    """The runs of RUN arguments. Raises `ResoluteError` if they cannot be compared."""
    logs: dict[Path, RunLogReader] = {}
    for target in targets:
        folder = existing_run(target)
        for part in [folder] if (folder / "run.jsonl").exists() else sorted(folder.glob("fold-*")) or [folder]:
            if not any(part.resolve() == listed.resolve() for listed in logs):
                logs[part] = RunLogReader(part / "run.jsonl")
                logs[part].read()
    if not 2 <= len(logs) <= _MAX_RUNS:
        raise ResoluteError(f"RUN: got {len(logs)} {'run' if len(logs) == 1 else 'runs'}, expected 2 to {_MAX_RUNS} "
                            "different ones; name others")  # fmt: skip
    runs = [ComparedRun(name, log) for name, log in zip(_names([*logs]), logs.values(), strict=True)]
    for run in runs:
        if not run.epochs or not run.scores:
            raise ResoluteError(f"{run.log.path}: no validated epoch yet, expected at least one; leave this run out")
        if run.metric != runs[0].metric:
            raise ResoluteError(f"{run.log.path}: scored by {run.metric.title}, expected {runs[0].metric.title} as for "
                                f"{runs[0].name}; compare runs of one kind of target")  # fmt: skip
    return runs


def _names(folders: Sequence[Path]) -> list[str]:
    """The last parts of the paths, as many as make them unique."""
    for count in range(1, max(len(folder.parts) for folder in folders)):
        names = ["/".join(folder.parts[-count:]) for folder in folders]
        if len({*names}) == len(names):
            return [f"{folder.parent.name}/{name}" if count == 1 and name.startswith("fold-") else name
                    for folder, name in zip(folders, names, strict=True)]  # fmt: skip
    return [str(folder) for folder in folders]


def first_reached_s(run: ComparedRun, score: float) -> float | None:
    """Seconds from the run's start, validations included, to the end of the first epoch with at least `score`."""
    return next((epoch["elapsed_s"] for epoch, own in run.scores if own >= score), None)


def page(runs: Sequence[ComparedRun]) -> bytes:
    """The HTML page."""
    metric = runs[0].metric
    return figures_page(
        title="Compared runs", subtitle=" · ".join(run.name for run in runs), findings=[*_findings(runs)],
        charts=_charts(runs),
        tables=[
            ("Runs", ("run", "recipe", "device", "epochs#", f"best {metric.title}#", "in epoch#",
                      f"last {metric.title}#", "time#", "training#", "images/s#", "waiting %#", "peak GiB#"),
             [_row(run) for run in runs],
             "Time includes validation, not the start of the program."),
            (f"Time to {metric.title}", (metric.title, *(f"{run.name}#" for run in runs)), [*_levels(runs)],
             "To the end of the first epoch that reaches it."),
            ("Stages", ("run", "stage#", "px#", "batch#", "epochs#", "steps#", "images/s#", "median step ms#",
                        "99 % below ms#", "change cost ms#", "waiting %#"),
             [row for run in runs for row in _stages(run)], ""),
            *((heading, ("setting", *(run.name for run in runs)), rows[:_ROWS],
               f"The first {_ROWS} of {len(rows)}." if len(rows) > _ROWS else "")
              for heading, rows in _settings(runs)),
        ],
    )  # fmt: skip


def _interval(fraction: float, samples: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a fraction of `samples`."""
    z2 = 1.96**2
    middle = fraction + z2 / (2 * samples)
    half = math.sqrt(z2 * (fraction * (1 - fraction) + z2 / (4 * samples)) / samples)
    return (middle - half) / (1 + z2 / samples), (middle + half) / (1 + z2 / samples)


def _findings(runs: Sequence[ComparedRun]) -> Iterator[str]:
    metric, best = runs[0].metric, max(runs, key=lambda run: run.best)
    yield (f"Best {metric.title}: {metric.text(best.best)} of {best.name}; "
           + ", ".join(f"{metric.text(run.best)} of {run.name}" for run in runs if run is not best) + ".")  # fmt: skip
    if metric.key == "top1":
        low, high = _interval(best.best, best.best_epoch["samples"])
        yield (f"{metric.text(best.best)} of {best.best_epoch['samples']:,} photos: a 95 % interval from "
               f"{metric.text(low)} to {metric.text(high)}; smaller differences may be chance.")  # fmt: skip
    common = min(run.best for run in runs)
    times = sorted((first_reached_s(run, common) or 0.0, run.name) for run in runs)
    (first_s, first), (last_s, last) = times[0], times[-1]
    yield (f"All reach {metric.text(common)}: {first} first, after {format_duration(first_s)}; {last} last, after "
           f"{format_duration(last_s)} ({last_s / first_s:.2f} times as long).")  # fmt: skip
    hardware = [row[0] for row in differences([_facts(run) for run in runs]) if row[0] in _HARDWARE]
    if hardware:
        yield f"The times are not comparable: the runs differ in {', '.join(hardware)}."
    for what, key in (("data", "shards_hash"), ("validation resolutions", "eval_res")):
        values = {str(run.log.start.get(key, run.scores[-1][0].get(key))) for run in runs}
        if len(values) > 1:
            yield f"The scores are not of the same {what}: {', '.join(sorted(values))}."


def _style(number: int) -> dict[str, Any]:
    return {"colour": _COLOURS[number % len(_COLOURS)], "kind": "line" if number < len(_COLOURS) else "dash"}


def _charts(runs: Sequence[ComparedRun]) -> Iterator[Chart | None]:
    metric = runs[0].metric
    unit, unit_s = time_unit(max(run.epochs[-1]["elapsed_s"] for run in runs))
    percent = "%" if metric.percent else ""
    name = "Accuracy" if metric.key == "top1" else metric.title

    def curves(x: str, x_scale: float, y: str | None = None, scale: float = 1.0) -> list[Series]:
        """`y` of the epochs' records, or the scores, against `x`."""
        return [
            Series(name=run.name, **_style(number), x=[epoch[x] / x_scale for epoch, _ in points],
                   y=[scale * value for _, value in points])
            for number, run in enumerate(runs)
            if (points := run.scores if y is None else [(epoch, epoch[y]) for epoch in run.epochs
                                                        if epoch.get(y) is not None])
        ]  # fmt: skip

    yield chart(f"{name} against time", curves("elapsed_s", unit_s, scale=metric.scale), unit=percent, x_name=unit,
                start=0.0, zero=False, wide=True)  # fmt: skip
    yield chart(f"{name} against epochs", curves("epoch", 1, scale=metric.scale), unit=percent, x_name="epoch",
                zero=False, wide=True)  # fmt: skip
    yield chart("Training loss", curves("epoch", 1, "loss"), unit="", x_name="epoch", zero=False)
    yield chart("Validation loss", curves("epoch", 1, "eval_loss"), unit="", x_name="epoch", zero=False)
    bins = [run.log.binned(_BINS) for run in runs]
    top = max(1.5e3 * float(np.quantile(each["time_s"], 0.98)) for each in bins)
    note = "Means of consecutive steps where a run has more than can be drawn."
    for title, key, scale, options in (
        ("Step time", "time_s", 1e3, {"unit": "ms", "top": top, "note": note}),
        ("Resolution", "res", 1.0, {"unit": "px", "zero": False}),
    ):
        yield chart(title, [
            Series(name=run.name, **_style(number), x=each["step"].tolist(), y=(scale * each[key]).tolist())
            for number, (run, each) in enumerate(zip(runs, bins, strict=True))
        ], wide=True, **options)  # type: ignore[arg-type]  # fmt: skip


def _row(run: ComparedRun) -> tuple[str, ...]:
    start, metric = run.log.start, run.metric
    train_s, wait_s, samples = (sum(epoch[key] for epoch in run.epochs) for key in ("train_s", "wait_s", "samples"))
    return (
        run.name, str(start.get("recipe", "")), str(start.get("device", "")), f"{len(run.epochs)}",
        metric.text(run.best), f"{run.best_epoch['epoch']}", metric.text(run.scores[-1][1]),
        format_duration(run.epochs[-1]["elapsed_s"]), format_duration(train_s), f"{samples / train_s:,.0f}",
        f"{100 * wait_s / train_s:.2f}", f"{max(epoch.get('memory_bytes') or 0 for epoch in run.epochs) / 2**30:.2f}",
    )  # fmt: skip


def _levels(runs: Sequence[ComparedRun]) -> Iterator[tuple[str, ...]]:
    common = min(run.best for run in runs)
    for level in (part * common for part in _LEVELS if common > 0):
        times = (first_reached_s(run, level) for run in runs)
        yield runs[0].metric.text(level), *("-" if s is None else format_duration(s) for s in times)


def _stages(run: ComparedRun) -> Iterator[tuple[str, ...]]:
    for row in run.stages:
        yield (
            run.name, f"{row['stage']}", row["res"], f"{row['batch_size']}", f"{len(row['epochs'])}",
            f"{row['steps']:,}", f"{row['images_per_s']:,.1f}", f"{1e3 * row['median_s']:,.1f}",
            f"{1e3 * row['p99_s']:,.1f}", f"{1e3 * row['switch']['cost_s']:+,.0f}" if row["switch"] else "-",
            f"{100 * row['stall_frac']:.2f}",
        )  # fmt: skip


def _settings(runs: Sequence[ComparedRun]) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """(heading, rows) of the tables of what differs."""
    recipes = differences([run.log.start.get("recipe_values", {}) for run in runs])
    yield "What differs in the recipes", recipes or [("nothing", *("" for _ in runs))]
    facts = differences([_facts(run) for run in runs])
    yield "What differs in data, machine and versions", facts or [("nothing", *("" for _ in runs))]


def _facts(run: ComparedRun) -> dict[str, Any]:
    start = run.log.start
    return {**start.get("machine", {}), **{key: value for key, value in start.items() if key not in _APART}}


def differences(values: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """(dotted key, value of each) of the keys whose values differ; "-" for a value that is missing or none."""
    flat = [dict(_flat(each)) for each in values]
    keys = dict.fromkeys(key for each in flat for key in each)
    rows = [(key, *(each.get(key, "-") for each in flat)) for key in keys]
    return [row for row in rows if len({*row[1:]}) > 1]


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, list) and any(isinstance(inner, Mapping) for inner in value):
        for number, inner in enumerate(value):
            yield from _flat(inner, f"{key}[{number}]")
    else:
        yield key, "-" if value is None else str(value)


def main(args: CompareOptions) -> None:
    """Run the command."""
    out = page_file(args.out, "compare.html")
    runs = open_runs(args.runs)
    with output_file(out) as file:
        file.write(page(runs))
    print(*_findings(runs), out, sep="\n")
