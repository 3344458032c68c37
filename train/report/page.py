"""`resolute report RUN` and `resolute compare RUN RUN …`: one page about one run or several, from their logs.

A run of folds stands for its folds. Training draws RUN/report.html after every epoch. The page is self-contained and
needs no network; this module imports neither torch nor DALI.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from resolute.console import counted
from resolute.errors import ResoluteError
from resolute.files import output_file
from resolute.report.charts import Chart, Series, chart, short
from resolute.report.page import render
from resolute.train.logs.run_log import (
    SWITCH_STEPS,
    Columns,
    RunLogReader,
    change_text,
    format_duration,
    is_measurable,
    noise_s,
)
from resolute.train.options import CompareOptions, ReportOptions
from resolute.train.recipe.schema import Recipe
from resolute.train.recipe.toml import recipe_text
from resolute.train.run_folder import existing_run, page_file
from resolute.train.score import (
    METRICS,
    UNRELATED,
    Metric,
    best_score,
    main_metric,
    shown_metrics,
    unrelated_photos,
    unrelated_score,
)

from .classes import HEADS, class_counts, class_rows, with_bars
from .curves import regularization, schedule_charts
from .diagnosis import Finding, diagnose, stage_rows
from .validation import errors_of_values, read_validation, sections

__all__ = ["REPORT", "Run", "compare", "differences", "first_reached_s", "open_runs", "page", "report", "write_page"]

REPORT = "report.html"
_TEMPLATE = Path(__file__).with_name("template.html")
_BINS = 600  # points per curve; more would be below a pixel each
_ROWS = 300  # of a table, at most
_STYLES = [(colour, kind) for kind in ("line", "dash", "dots") for colour in "abcd"]  # of the runs of a page
_LEVELS = (0.5, 0.75, 0.9, 0.95, 1.0)  # of the best score of the run whose best is lowest
# keys of a log's first record that are no settings, or are compared apart from the others
_APART = ("kind", "recipe", "recipe_hash", "recipe_text", "recipe_values", "class_names", "class_samples", "machine")
_SHOWN_ABOVE = ("kind", "recipe", "recipe_hash", "recipe_text", "val_majority")  # in the report of one run
_TILES = 4  # errors of values at the head of a report, at most
_HARDWARE = ("device", "cpu", "threads", "cores", "gpu")  # in which runs differ whose times are not comparable

Section = dict[str, Any]  # values of the template's loop
Table = tuple[str, Sequence[str], Sequence[Sequence[Any]]]  # (heading, heads as the macro takes them, rows)


@dataclass(frozen=True)
class Run:
    """A run's log; `name` is unique on the page. `folds`: the name of the run of which it is a fold."""

    name: str
    log: RunLogReader
    folds: str = ""

    @cached_property
    def epochs(self) -> list[dict[str, Any]]:
        return self.log.epochs

    @cached_property
    def stages(self) -> list[dict[str, Any]]:
        return stage_rows(self.log)

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The metrics of the run's kind of target that are shown; the first decides."""
        start, kind = self.log.start, next(kind for kind, all_ in METRICS.items() if all_[0] == self.metric)
        units = start.get("units", ())
        return shown_metrics(kind, outputs=start.get("classes") or len(units) or 1, units=units)

    @property
    def metric(self) -> Metric:
        return main_metric(self.epochs[0])

    @cached_property
    def scores(self) -> list[tuple[dict[str, Any], float]]:
        """Validated epochs, each with the better score of raw and averaged weights."""
        return [(epoch, score) for epoch in self.epochs if (score := best_score(epoch)) is not None]

    @cached_property
    def best(self) -> tuple[dict[str, Any], float]:
        """The epoch whose weights the run keeps as its best, and its score; the run has `scores`."""
        return next(each for each in self.scores if each[0] is self.log.best_epoch)

    def text(self, score: float) -> str:
        """A score of the run, with the interval that its number of validation samples gives."""
        return self.metric.text(score, self.log.start.get("val_samples", 0))

    @property
    def unrelated_photos(self) -> int:
        """The number of validation photos without a near copy or group-mate in training; 0 if none is related."""
        return unrelated_photos(self.log.start)

    def unrelated_text(self, epoch: Mapping[str, Any]) -> str:
        """The score of an epoch on the `unrelated_photos`, as `text`; "-" if it is not known."""
        score = unrelated_score(epoch)
        return "-" if score is None else self.metric.text(score, self.unrelated_photos)


def report(args: ReportOptions) -> None:
    """Run `resolute report`."""
    folder = existing_run(args.run)
    runs = open_runs([args.run])
    print(_write(folder / REPORT, page(runs, read_validation(folder), title=f"Run {folder.name}")))


def compare(args: CompareOptions) -> None:
    """Run `resolute compare`."""
    with page_file(args.out, "compare.html") as out:
        runs = open_runs(args.runs)
        if len(runs) == 1:
            raise ResoluteError(f"RUN: got 1 run, expected 2 to {len(_STYLES)} different ones; name others")
        _write(out, page(runs))
        print(*(finding.text for finding in _compared(runs)), out, sep="\n")


def open_runs(targets: Sequence[str]) -> list[Run]:
    """The runs of RUN arguments, each once. Raises `ResoluteError` if they cannot stand on one page."""
    logs: dict[Path, tuple[RunLogReader, Path | None]] = {}
    for target in targets:
        folder = existing_run(target)
        folds = [] if (folder / "run.jsonl").exists() else sorted(folder.glob("fold-*/run.jsonl"), key=_fold_number)
        for path in folds or [folder / "run.jsonl"]:
            log = RunLogReader(path)
            if not log.read():
                raise ResoluteError(f"{path}: no complete record, expected the log of a run; name another RUN")
            # why: a later fold may have just begun
            if path in (*folds[:1], folder / "run.jsonl") or any(best_score(epoch) is not None for epoch in log.epochs):
                logs.setdefault(path.parent.resolve(), (log, folder if folds else None))
    if len(logs) > len(_STYLES):
        raise ResoluteError(f"RUN: got {len(logs)} runs, expected at most {len(_STYLES)}; name fewer")
    paths = [(log.path.parent, folds) for log, folds in logs.values()]
    names = [path.name if folds is None else f"{path.parent.name}/{path.name}" for path, folds in paths]
    runs = [
        Run(name if names.count(name) == 1 else str(log.path.parent), log, folds.name if folds else "")
        for name, (log, folds) in zip(names, logs.values(), strict=True)
    ]
    for run in runs if len(runs) > 1 else ():
        if not run.epochs or not run.scores:
            raise ResoluteError(f"{run.log.path}: no validated epoch yet, expected at least one; leave this run out")
        if run.metric != runs[0].metric:
            raise ResoluteError(
                f"{run.log.path}: scored by {run.metric.title}, expected {runs[0].metric.title} as for "
                f"{runs[0].name}; compare runs of one kind of target"
            )
    return runs


def _fold_number(path: Path) -> tuple[int, str]:
    return len(path.parent.name), path.parent.name


def write_page(log: RunLogReader, folder: Path) -> Path:
    """Write the page of the run in `folder` for the records read so far. Raises `ResoluteError` if it cannot."""
    return _write(folder / REPORT, page([Run(folder.name, log)], read_validation(folder)))


def _write(path: Path, content: bytes) -> Path:
    with output_file(path) as file:
        file.write(content)
    return path


def page(runs: Sequence[Run], validation: Mapping[str, Any] | None = None, *, title: str = "Compared runs") -> bytes:
    """The HTML page. `validation`: the content of RUN/validation.json, if there is one run."""
    if len(runs) > 1:
        return render(
            _TEMPLATE,
            title=title,
            subtitle=" · ".join(run.name for run in runs),
            headline=[*_folds_tiles(runs)],
            first=[],
            about="In short",
            findings=[*_compared(runs)],
            skipped=0,
            sections=[*_sections_of_several(runs)],
        )
    (run,) = runs
    start, steps = run.log.start, sum(row["steps"] for row in run.stages)
    findings = diagnose(run.log)
    state = f"{steps:,} of {start.get('total_steps', 0):,} steps done"
    for end in run.log.kind("end"):
        state = f"stopped early: {reason}" if (reason := end.get("stopped_early")) else "finished"
    if ended := run.log.kind("stage_ended"):
        state += f" · {counted(len(ended), 'stage')} ended early"
    return render(
        _TEMPLATE,
        title=f"Run {run.name}",
        subtitle=f"{start.get('recipe', '')} {start.get('recipe_hash', '')} · {start.get('device', '')} · {state}",
        headline=[*_tiles(run, validation)],
        first=[*_results(run)],
        about="What limited this run" + ", and what to change" * any(finding.bad for finding in findings),
        findings=findings,
        skipped=len(run.log.kind("skipped")),
        sections=[*_sections_of_one(run, validation)],
    )


def _section(title: str, *tables: Table, **parts: Any) -> Section:
    return {
        "title": title,
        "tables": tables,
        "matrix": None,
        "note": "",
        "charts": (),
        "sheets": (),
        "texts": (),
        **parts,
    }


# one run


def _tiles(run: Run, validation: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    epochs, rows = run.epochs, run.stages
    if run.scores:
        epoch, top = run.best
        photos, majority = run.log.start.get("val_samples"), run.log.start.get("val_majority")
        constant = f"; always the most frequent class: {100 * majority:.1f} %" if majority else ""
        of_photos = f", of {photos:,} photos{constant}" if photos else ""
        when = "at the end" if run.log.kind("end") else f"in epoch {run.scores[-1][0]['epoch']}"
        yield run.text(run.scores[-1][1]), f"{run.metric.title} {when}{of_photos}"
        yield run.text(top), f"best {run.metric.title}, epoch {epoch['epoch']}"
        if unrelated := run.unrelated_photos:
            title = f"{run.metric.title} on the {unrelated:,} photos {UNRELATED}"
            yield run.unrelated_text(run.scores[-1][0]), f"{when}: {title}"
            yield run.unrelated_text(epoch), f"best weights, epoch {epoch['epoch']}: {title}"
        if validation is not None and validation["epoch"] == epoch["epoch"]:
            for name, error in errors_of_values(validation)[:_TILES]:
                yield error, f"RMSE of {name}, epoch {epoch['epoch']}"
    if epochs:
        count = f"{len(epochs)} {'epoch' if len(epochs) == 1 else 'epochs'}"
        yield format_duration(epochs[-1]["elapsed_s"]), f"for {count}, validation included"
    if rows:
        train_s, wait_s = (sum(row[key] for row in rows) for key in ("train_s", "wait_s"))
        images = sum(row["images_per_s"] * row["train_s"] for row in rows)
        yield f"{images / train_s:,.0f}", "images/s in training"
        yield f"{100 * wait_s / train_s:.2f} %", "of training spent waiting for data"
    if memory := max((epoch.get("memory_bytes") or 0 for epoch in epochs), default=0):
        yield f"{memory / 2**30:.2f} GiB", "peak memory"
    if used := [epoch["gpu_frac"] for epoch in epochs if epoch.get("gpu_frac") is not None]:
        yield f"{100 * np.mean(used):.0f} %", "GPU utilisation"


def _results(run: Run) -> Iterator[Section]:
    if run.stages:
        title = "Loss"
        if run.epochs:
            title += f" and {'accuracy' if run.metric.key == 'top1' else run.metric.title}"
        yield _section(title, charts=[*filter(None, _learning(run, run.log.binned(_BINS)))])


def _sections_of_one(run: Run, validation: Mapping[str, Any] | None) -> Iterator[Section]:
    start, bins, counts = run.log.start, run.log.binned(_BINS), class_counts(run.log)
    if run.stages:
        changes = [change_text(row["switch"]) for row in run.stages if row["switch"]]
        yield _section(
            "Time",
            note="\n".join(f"{text[0].upper()}{text[1:]}." for text in changes),
            charts=[*filter(None, _times_of_steps(run, bins))],
        )
    if (found := sections(validation, run.epochs)) is not None:
        yield _section(**found)
    yield _stages([run])
    if epochs := run.epochs:
        yield _epochs(run, epochs)
    if run.stages:
        yield _section("Schedule", charts=[*filter(None, _schedule(run, bins))])
    if counts is not None:
        rows = class_rows(counts.names, counts.samples, counts.seen)
        is_whole = len(rows) == len(counts.names)
        yield _section(
            "Classes",
            ("", *with_bars(HEADS, rows)),
            charts=[] if is_whole else [*filter(None, [counts.chart()])],
        )
    yield _section(
        "Recipe",
        *_recipe_tables(start.get("recipe_text", "")),
        texts=[
            ("As written", start.get("recipe_text", "")),
            ("All values, including defaults", recipe_text(start.get("recipe_values", {}))),
        ],
    )
    facts = {
        key: value
        for key, value in {**start.get("machine", {}), **start}.items()
        if value is not None and not isinstance(value, (dict, list)) and key not in _SHOWN_ABOVE
    }
    yield _section(
        "Machine and data",
        (
            "",
            ("property", "value"),
            [
                (
                    key.removesuffix("_bytes").replace("_", " "),
                    f"{value / 2**30:.1f} GiB" if key.endswith("_bytes") else str(value),
                )
                for key, value in facts.items()
            ],
        ),
    )


def _recipe_tables(text: str) -> list[Table]:
    """The keys that a recipe's text sets: those of its stages, and all others."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError:  # of a log that was written by hand
        return []
    stages = table.pop("stages", [])
    keys = list(dict.fromkeys(key for stage in stages for key in stage))
    rows = [[number, *(_plain(stage.get(key, "")) for key in keys)] for number, stage in enumerate(stages)]
    others = [(key, _plain(value)) for key, value in _leaves(table)]
    return [
        ("Stages that the recipe sets", ("stage", *keys), rows),
        ("Other keys that it sets", ("key", "value"), others),
    ]


def _leaves(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of all values of nested tables."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} = {_plain(each)}" for key, each in _leaves(value))
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _times_of_steps(run: Run, bins: Columns) -> Iterator[Chart | None]:
    x, rows = bins["step"].tolist(), run.stages
    ends = np.cumsum([row["steps"] for row in rows])
    borders = [float(at) for row, end in zip(rows, ends, strict=True) for at in (end - row["steps"], end - 1)]
    marks = _marks(bins, rows)
    ms = {name: (1e3 * bins[name]).tolist() for name in ("wait_s", "compute_s", "time_s", "time_s_max", "wait_s_max")}
    single = bool(bins["count"].max() == 1)
    usual = float(np.median(ms["time_s"]))
    longest = int(np.argmax(ms["time_s_max"]))
    top = max(4 * usual, 1.5 * float(np.quantile(ms["time_s"], 0.98)))
    where = f"step {x[longest]:,.0f}"
    if not single:
        where = f"one of the {bins['count'][longest]:,.0f} steps from {x[longest]:,.0f} on"
    note = f"Longest step: {ms['time_s_max'][longest]:,.0f} ms, {where}."
    peak = [] if single else [Series(name="longest of each bin", colour="soft", x=x, y=ms["time_s_max"])]
    yield chart(
        "Step time",
        [
            Series(name="compute", colour="a", kind="area", x=x, y=ms["compute_s"]),
            Series(
                name="wait for data",
                colour="b",
                kind="area",
                x=x,
                base=ms["compute_s"],
                y=ms["time_s"],
                tooltip=ms["wait_s"],
            ),
            *peak,
        ],
        unit="ms",
        marks=marks,
        top=top,
        note=note,
        wide=True,
    )
    yield chart(
        "Throughput",
        [
            Series(name="images/s", colour="a", x=x, y=bins["images_per_s"].tolist()),
            *(
                Series(
                    name=f"{who}'s ceiling",
                    colour=colour,
                    kind="dash",
                    x=borders,
                    y=[row[f"{who}_images_per_s"] or math.nan for row in rows for _ in range(2)],
                )
                for who, colour in (("loader", "b"), ("model", "c"))
            ),
        ],
        unit="images/s",
        marks=marks,
        note=""
        if any(row["model_images_per_s"] for row in rows)
        else "The ceilings of loader and model alone were not measured in this run (--calibrate).",
        robust=True,
    )
    yield chart(
        "Stalls",
        [
            Series(name="mean wait", colour="b", kind="area", x=x, y=ms["wait_s"]),
            *([] if single else [Series(name="longest wait of each bin", colour="soft", x=x, y=ms["wait_s_max"])]),
        ],
        unit="ms per step",
        marks=marks,
        robust=True,
    )


def _learning(run: Run, bins: Columns) -> Iterator[Chart | None]:
    x, rows, epochs = bins["step"].tolist(), run.stages, run.epochs
    marks = _marks(bins, rows)

    def curves(at: Sequence[float], scale: float, *shown: tuple[str, str, str]) -> list[Series]:
        return [
            Series(
                name=name,
                colour=colour,
                kind="dots",
                x=at,
                y=[math.nan if epoch.get(key) is None else scale * epoch[key] for epoch in epochs],
            )
            for key, name, colour in shown
        ]

    last_steps = (x[0] + np.cumsum([epoch["steps"] for epoch in epochs]) - 1).tolist()
    yield chart(
        "Loss",
        [
            Series(name="training", colour="a", x=x, y=bins["loss"].tolist()),
            *curves(last_steps, 1.0, ("eval_loss", "validation", "d"), ("ema_eval_loss", "validation, EMA", "c")),
        ],
        unit="",
        marks=marks,
        zero=False,
        robust=True,
    )
    if epochs:
        metric, *others = run.metrics
        unit, unit_s = _time_unit(epochs[-1]["elapsed_s"])
        times = [epoch["elapsed_s"] / unit_s for epoch in epochs]
        shown = [
            (metric.key, metric.title, "d"),
            (f"ema_{metric.key}", f"{metric.title}, EMA", "c"),
            *([(others[0].key, others[0].title, "soft")] if metric.percent and others else []),
        ]
        if run.unrelated_photos:
            unrelated = metric.unrelated
            shown += [(unrelated.key, unrelated.title, "b"), (f"ema_{unrelated.key}", f"{unrelated.title}, EMA", "a")]
        begun = zip([0.0, *times], epochs, [{"stage": None}, *epochs], strict=False)
        yield chart(
            f"{_title(metric)} against time",
            curves(times, metric.scale, *shown),
            unit="%" if metric.percent else "",
            x_name=unit,
            start=0.0,
            zero=metric.percent,
            robust=not metric.percent,
            marks=[(at, f"{epoch['res']} px") for at, epoch, before in begun if epoch["stage"] != before["stage"]],
        )


def _title(metric: Metric) -> str:
    return "Accuracy" if metric.key == "top1" else metric.title


def _time_unit(seconds: float) -> tuple[str, float]:
    """(name, its seconds) of the unit for an axis that ends at `seconds`."""
    return ("s", 1) if seconds < 120 else ("min", 60) if seconds < 7200 else ("h", 3600)


def _schedule(run: Run, bins: Columns) -> list[Chart | None]:
    """Learning rate, momentum, resolution and regularisation over the steps so far."""
    strengths: list[dict[str, float]] = []
    with contextlib.suppress(ResoluteError):  # why: a log of another version may have keys that this one does not know
        recipe = Recipe.from_values(run.log.start.get("recipe_values", {}), name="run", exact=True)
        strengths = [regularization(recipe, int(stage)) for stage in bins["stage"]]
    columns = {name: bins[key].tolist() for name, key in (("lrs", "lr"), ("momenta", "momentum"), ("sizes", "res"))}
    return schedule_charts(bins["step"].tolist(), **columns, strengths=strengths, marks=_marks(bins, run.stages))


def _marks(bins: Columns, rows: list[dict[str, Any]]) -> list[tuple[float, str]]:
    """(first step, resolution) of each stage."""
    return [(float(bins["step"][bins["stage"] == row["stage"]][0]), f"{row['res']} px") for row in rows]


def _stages(runs: Sequence[Run]) -> Section:
    """The stages of all runs, with a column for the run if there are several."""
    heads = (
        "run",
        "stage#",
        "px#",
        "batch#",
        "epochs#",
        "steps#",
        "images/s#",
        "loader alone images/s#",
        "model alone images/s#",
        "waiting %#",
        "median step ms#",
        "99 % below ms#",
        "change cost s#",
        "train s#",
    )
    rows = [
        (
            run.name,
            row["stage"],
            row["res"],
            row["batch_size"],
            len(row["epochs"]),
            f"{row['steps']:,}",
            f"{row['images_per_s']:,.1f}",
            _or_dash(row["loader_images_per_s"]),
            _or_dash(row["model_images_per_s"]),
            f"{100 * row['stall_frac']:.2f}",
            f"{1e3 * row['median_s']:,.1f}",
            f"{1e3 * row['p99_s']:,.1f}",
            _cost(row["switch"]),
            f"{row['train_s']:,.2f}",
        )
        for run in runs
        for row in run.stages
    ]
    note = (
        f"Change cost: how much longer the first {SWITCH_STEPS} steps of a stage took than usual ones. Noise: 90 % of "
        f"the other groups of {SWITCH_STEPS} steps differ less from usual ones. A cost within its noise is not "
        "measurable."
    )
    shown = [k for k in range(len(runs) == 1, len(heads)) if any(row[k] != "-" for row in rows)]
    return _section(
        "Stages",
        ("", [heads[k] for k in shown], [[row[k] for k in shown] for row in rows]),
        note=note if any(row["switch"] for run in runs for row in run.stages) else "",
    )


def _cost(switch: dict[str, Any] | None) -> str | list[tuple[str, str]]:
    if switch is None:
        return "-"
    if (noise := noise_s(switch)) is None:
        return [(f"{switch['cost_s']:+.3f}", "noise unknown")]
    return [
        (
            f"{switch['cost_s']:+.3f}",
            f"noise ±{noise:.3f}" if is_measurable(switch) else f"not measurable, ±{noise:.3f}",
        )
    ]


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _epochs(run: Run, epochs: Sequence[Mapping[str, Any]]) -> Section:
    samples = run.log.start.get("val_samples", 0)

    def number(digits: int, scale: float = 1.0) -> Callable[[float], str]:
        return lambda value: f"{scale * value:,.{digits}f}"

    def of_metric(metric: Metric) -> Callable[[float], str]:
        return lambda value: metric.text(value).removesuffix(" %")

    metrics = (*run.metrics, run.metric.unrelated)

    def of_metrics(key: str, title: str) -> list[tuple[str, str, Callable[[float], str]]]:
        return [(f"{key}{metric.key}", f"{title}{metric.head}", of_metric(metric)) for metric in metrics]

    columns = [
        ("loss", "loss", number(3)),
        ("eval_loss", "val loss", number(3)),
        *of_metrics("", ""),
        ("ema_eval_loss", "EMA val loss", number(3)),
        *of_metrics("ema_", "EMA "),
        ("lr", "LR", short),
        ("images_per_s", "images/s", number(1)),
        ("stall_frac", "waiting %", number(2, 100)),
        ("train_s", "train s", number(2)),
        ("eval_s", "val s", number(2)),
        ("memory_bytes", "GiB", number(2, 2**-30)),
        ("gpu_frac", "GPU %", number(0, 100)),
    ]
    shown = [column for column in columns if any(epoch.get(column[0]) is not None for epoch in epochs)]
    every = -(-len(epochs) // _ROWS)
    heads = ["epoch#", "stage#", "px#", "batch#", *(f"{title}#" for _, title, _ in shown)]
    rows = [
        (
            epoch["epoch"],
            epoch["stage"],
            epoch["res"],
            epoch["batch_size"],
            *("-" if epoch.get(key) is None else text(epoch[key]) for key, _, text in shown),
        )
        for number, epoch in enumerate(epochs, 1)
        if number % every == 0 or number == len(epochs)
    ]
    note = f"Every {every}th epoch is shown; run.jsonl has all. " if every > 1 else ""
    if samples and run.metric.counted and run.scores:
        half = run.text(run.scores[-1][1]).partition("± ")[2].removesuffix(" %")
        note += (
            f"With {samples:,} photos, the last {run.metric.title} is known to ±{half} points (95 % interval, Wilson)."
        )
    if unrelated := run.unrelated_photos:
        note += f" Unrelated: of the {unrelated:,} of {samples:,} validation photos {UNRELATED}."
    return _section("Epochs", ("", heads, rows), note=note)


# several runs


def first_reached_s(run: Run, score: float) -> float | None:
    """Seconds from the run's start, validations included, to the end of the first epoch with at least `score`."""
    return next((epoch["elapsed_s"] for epoch, own in run.scores if own >= score), None)


def _of_folds(runs: Sequence[Run]) -> Iterator[tuple[str, list[Run]]]:
    """(name, folds) of each run of folds on the page."""
    return (
        (name, folds) for name, group in groupby(runs, lambda run: run.folds) if name and len(folds := list(group)) > 1
    )


def _mean(metric: Metric, scores: Sequence[float]) -> str:
    """Mean ± standard deviation of the scores of folds."""
    number = "{:.2f}" if metric.percent else "{:.4g}"
    mean, deviation = (number.format(metric.scale * f(scores)) for f in (statistics.mean, statistics.stdev))
    return f"{mean} ± {deviation}{' %' if metric.percent else ''}"


def _folds_tiles(runs: Sequence[Run]) -> Iterator[tuple[str, str]]:
    for name, folds in _of_folds(runs):
        yield (
            _mean(runs[0].metric, [run.best[1] for run in folds]),
            f"best {runs[0].metric.title} of {name}, mean and deviation of {len(folds)} folds",
        )


def _compared(runs: Sequence[Run]) -> Iterator[Finding]:
    metric, ranked = runs[0].metric, sorted(runs, key=lambda run: -run.best[1])
    best = ", ".join(f"{run.text(run.best[1])} of {run.name}" for run in ranked)
    chance = "; smaller differences than the ± may be chance" if metric.counted else ""
    yield Finding(False, f"Best {metric.title}: {best}{chance}.")
    if has_unrelated := [run for run in runs if run.unrelated_photos]:
        scores = ", ".join(f"{run.unrelated_text(run.best[0])} of {run.name}" for run in has_unrelated)
        yield Finding(False, f"The same on the validation photos {UNRELATED}: {scores}.")
    for value, what in _folds_tiles(runs):
        yield Finding(False, f"{value}: {what}.")
    common = min(run.best[1] for run in runs)
    times = sorted((first_reached_s(run, common) or 0.0, run.name) for run in runs)
    (first_s, first), (last_s, last) = times[0], times[-1]
    yield Finding(
        False,
        f"All reach {metric.text(common)}: {first} first, after {format_duration(first_s)}; {last} "
        f"last, after {format_duration(last_s)} ({last_s / first_s:.2f} times as long).",
    )
    hardware = [row[0] for row in differences([_facts(run) for run in runs]) if row[0] in _HARDWARE]
    if hardware:
        yield Finding(True, f"The times are not comparable: the runs differ in {', '.join(hardware)}.")
    for what, key in (("data", "shards_hash"), ("validation resolutions", "eval_res")):
        values = {str(run.log.start.get(key, run.scores[-1][0].get(key))) for run in runs}
        if len(values) > 1:
            yield Finding(True, f"The scores are not of the same {what}: {', '.join(sorted(values))}.")


def _sections_of_several(runs: Sequence[Run]) -> Iterator[Section]:
    title, related = runs[0].metric.title, any(run.unrelated_photos for run in runs)
    yield _section("Charts", charts=[*filter(None, _compared_charts(runs))])
    heads = (
        "run",
        "recipe",
        "device",
        "epochs#",
        f"best {title}#",
        *[f"{runs[0].metric.unrelated.title}#"] * related,
        "in epoch#",
        f"last {title}#",
        "time#",
        "training#",
        "images/s#",
        "waiting %#",
        "peak GiB#",
    )
    note = "Time includes validation, not the start of the program."
    if related:
        note += f" Unrelated: the best weights on the validation photos {UNRELATED}."
    yield _section("Runs", ("", heads, [*_rows(runs, related=related)]), note=note)
    yield _section(
        f"Time to {title}",
        ("", (title, *(f"{run.name}#" for run in runs)), [*_times(runs)]),
        note="To the end of the first epoch that reaches it.",
    )
    yield _stages(runs)
    for heading, values in (
        ("What differs in the recipes", [run.log.start.get("recipe_values", {}) for run in runs]),
        ("What differs in data, machine and versions", [_facts(run) for run in runs]),
    ):
        rows = differences(values) or [("nothing", *("" for _ in runs))]
        yield _section(
            heading,
            ("", ("setting", *(run.name for run in runs)), rows[:_ROWS]),
            note=f"The first {_ROWS} of {len(rows)}." if len(rows) > _ROWS else "",
        )


def _compared_charts(runs: Sequence[Run]) -> Iterator[Chart | None]:
    metric = runs[0].metric
    unit, unit_s = _time_unit(max(run.epochs[-1]["elapsed_s"] for run in runs))
    percent = "%" if metric.percent else ""

    def series(run: Run, x: Sequence[float], y: Sequence[float], *, stepped: bool = False) -> Series:
        colour, kind = _STYLES[runs.index(run)]
        return Series(name=run.name, colour=colour, kind=kind, x=x, y=y, stepped=stepped)

    def curves(x: str, x_scale: float, y: str | None = None, scale: float = 1.0) -> list[Series]:
        """`y` of the epochs' records, or the scores, against `x`."""
        return [
            series(run, [epoch[x] / x_scale for epoch, _ in points], [scale * value for _, value in points])
            for run in runs
            if (
                points := run.scores
                if y is None
                else [(epoch, epoch[y]) for epoch in run.epochs if epoch.get(y) is not None]
            )
        ]

    yield chart(
        f"{_title(metric)} against time",
        curves("elapsed_s", unit_s, scale=metric.scale),
        unit=percent,
        x_name=unit,
        start=0.0,
        zero=False,
        wide=True,
        robust=not metric.percent,
    )
    yield chart(
        f"{_title(metric)} against epochs",
        curves("epoch", 1, scale=metric.scale),
        unit=percent,
        x_name="epoch",
        zero=False,
        wide=True,
        robust=not metric.percent,
    )
    yield chart("Training loss", curves("epoch", 1, "loss"), unit="", x_name="epoch", zero=False, robust=True)
    yield chart("Validation loss", curves("epoch", 1, "eval_loss"), unit="", x_name="epoch", zero=False, robust=True)
    bins = [(run, run.log.binned(_BINS // 2)) for run in runs]
    times = [series(run, each["step"].tolist(), (1e3 * each["time_s"]).tolist()) for run, each in bins]
    top = max(1.5e3 * float(np.quantile(each["time_s"], 0.98)) for _, each in bins)
    yield chart(
        "Step time",
        times,
        unit="ms",
        top=top,
        wide=True,
        note="Means of consecutive steps where a run has more than can be drawn.",
    )
    sizes = [series(run, each["step"].tolist(), each["res"].tolist(), stepped=True) for run, each in bins]
    yield chart("Resolution", sizes, unit="px", zero=False, wide=True)


def _rows(runs: Sequence[Run], *, related: bool) -> Iterator[tuple[str, ...]]:
    """`related`: with a column of the scores on the unrelated photos, "-" for a run whose set has no related ones."""
    for run in runs:
        start, epochs, (epoch, top) = run.log.start, run.epochs, run.best
        train_s, wait_s, samples = (sum(each[key] for each in epochs) for key in ("train_s", "wait_s", "samples"))
        yield (
            run.name,
            str(start.get("recipe", "")),
            str(start.get("device", "")),
            f"{len(epochs)}",
            run.text(top),
            *[run.unrelated_text(epoch)] * related,
            f"{epoch['epoch']}",
            run.text(run.scores[-1][1]),
            format_duration(epochs[-1]["elapsed_s"]),
            format_duration(train_s),
            f"{samples / train_s:,.0f}",
            f"{100 * wait_s / train_s:.2f}",
            f"{max(each.get('memory_bytes') or 0 for each in epochs) / 2**30:.2f}",
        )
    for name, folds in _of_folds(runs):
        best, last = (
            _mean(runs[0].metric, scores)
            for scores in ([run.best[1] for run in folds], [run.scores[-1][1] for run in folds])
        )
        yield f"{name}: mean ± deviation", "", "", "", best, *[""] * related, "", last, *([""] * 5)


def _times(runs: Sequence[Run]) -> Iterator[tuple[str, ...]]:
    common = min(run.best[1] for run in runs)
    for level in (part * common for part in _LEVELS if common > 0):
        times = (first_reached_s(run, level) for run in runs)
        yield runs[0].metric.text(level), *("-" if s is None else format_duration(s) for s in times)


def _facts(run: Run) -> dict[str, Any]:
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
