"""`resolute report RUN`: writes RUN/report.html from run.jsonl and validation.json.

Training does so after every epoch. The page is self-contained and needs no network.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from resolute.errors import ResoluteError
from resolute.files import output_file
from resolute.report.charts import Chart, Series, chart, short
from resolute.report.page import render
from resolute.train.logs.run_log import Columns, RunLogReader, format_duration
from resolute.train.logs.score import best_score, main_metric
from resolute.train.options import ReportOptions
from resolute.train.recipe.schema import Recipe
from resolute.train.recipe.toml import recipe_text
from resolute.train.run_folder import existing_run

from .classes import HEADS, class_counts, class_rows
from .curves import metric_series, metrics_of, schedule_charts, time_unit
from .diagnosis import diagnose, stage_rows
from .validation import read_validation, sections

__all__ = ["REPORT", "write_page"]

REPORT = "report.html"
_TEMPLATE = Path(__file__).with_name("template.html")
_BINS = 600  # points per curve; more would be below a pixel each
_ROWS = 300  # maximum rows of the epoch table


def write_page(run: RunLogReader, folder: Path) -> Path:
    """Write the page for the records read so far, atomically. Raises `ResoluteError` if it cannot be written."""
    path = folder / REPORT
    page = _page(run, folder.name, sections(read_validation(folder), run.epochs))
    with output_file(path) as file:
        file.write(page)
    return path


def _page(run: RunLogReader, name: str, validation: dict[str, Any] | None) -> bytes:
    start, done = run.start, run.kind("end")
    rows, bins = stage_rows(run), run.binned(_BINS)
    steps, total = sum(row["steps"] for row in rows), start.get("total_steps", 0)
    counts = class_counts(run)
    state = "finished" if done else f"{steps:,} of {total:,} steps done"
    return render(
        _TEMPLATE,
        title=f"Run {name}",
        subtitle=f"{start.get('recipe', '')} {start.get('recipe_hash', '')} · {start.get('device', '')} · {state}",
        headline=_headline(run, rows),
        findings=diagnose(run),
        skipped=len(run.kind("skipped")),
        charts=filter(None, _charts(run, bins, rows)),
        schedule=[*filter(None, _schedule(run, bins, rows))] if rows else [],
        validation=validation,
        stages=_stages(rows),
        epochs=_epochs(run.epochs),
        class_chart=counts and counts.chart(),
        class_heads=HEADS,
        class_rows=class_rows(counts.names, counts.samples, counts.seen) if counts else (),
        recipe=start.get("recipe_text", ""),
        recipe_values=recipe_text(start.get("recipe_values", {})),
        facts=_facts(run),
    )


def _headline(run: RunLogReader, rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    epochs = run.epochs
    train_s = sum(row["train_s"] for row in rows)
    tiles = []
    scores = [score for epoch in epochs if (score := best_score(epoch)) is not None]
    if scores and (best := run.best_epoch) is not None:
        metric = main_metric(best)
        tiles += [(metric.text(scores[-1]), f"{metric.title} at the end"),
                  (metric.text(best_score(best) or 0.0), f"best {metric.title}, epoch {best['epoch']}")]  # fmt: skip
    if epochs:
        count = f"{len(epochs)} {'epoch' if len(epochs) == 1 else 'epochs'}"
        tiles.append((format_duration(epochs[-1]["elapsed_s"]), f"for {count}, validation included"))
    if rows:
        images = sum(row["images_per_s"] * row["train_s"] for row in rows)
        tiles += [
            (f"{images / train_s:,.0f}", "images/s in training"),
            (f"{100 * sum(row['wait_s'] for row in rows) / train_s:.2f} %", "of training spent waiting for data"),
        ]
    memory = max((epoch.get("memory_bytes") or 0 for epoch in epochs), default=0)
    if memory:
        tiles.append((f"{memory / 2**30:.2f} GiB", "peak memory"))
    used = [epoch["gpu_frac"] for epoch in epochs if epoch.get("gpu_frac") is not None]
    if used:
        tiles.append((f"{100 * np.mean(used):.0f} %", "GPU utilisation"))
    return tiles


def _charts(run: RunLogReader, bins: Columns, rows: list[dict[str, Any]]) -> Iterator[Chart | None]:
    x = bins["step"].tolist()
    if not x:
        return
    ends = np.cumsum([row["steps"] for row in rows])
    marks = _marks(bins, rows)
    ms = {name: (1e3 * bins[name]).tolist() for name in ("wait_s", "compute_s", "time_s", "time_s_max", "wait_s_max")}
    single = bool(bins["count"].max() == 1)
    usual = float(np.median(ms["time_s"]))
    longest = int(np.argmax(ms["time_s_max"]))
    top = max(4 * usual, 1.5 * float(np.quantile(ms["time_s"], 0.98)))
    where = f"step {x[longest]:,.0f}"
    if not single:
        where = f"one of the {bins['count'][longest]:,.0f} steps from {x[longest]:,.0f} on"
    note = f"Longest step: {ms['time_s_max'][longest]:,.0f} ms, {where}"
    note += f"; the axis ends at {top:,.0f} ms." if ms["time_s_max"][longest] > top else "."
    peak = [] if single else [Series(name="longest of each bin", colour="soft", x=x, y=ms["time_s_max"])]
    yield chart("Step time", [
        Series(name="compute", colour="a", kind="area", x=x, y=ms["compute_s"]),
        Series(name="wait for data", colour="b", kind="area", x=x, base=ms["compute_s"], y=ms["time_s"],
               tooltip=ms["wait_s"]),
        *peak,
    ], unit="ms", marks=marks, top=top, note=note, wide=True)  # fmt: skip
    yield chart("Throughput", [
        Series(name="images/s", colour="a", x=x, y=bins["images_per_s"].tolist()),
        *(Series(name=f"{who}'s ceiling", colour=colour, kind="dash", **_levels(rows, ends, f"{who}_images_per_s"))
          for who, colour in (("loader", "b"), ("model", "c"))),
    ], unit="images/s", marks=marks, note="" if any(row["model_images_per_s"] for row in rows) else
        "The ceilings of loader and model alone were not measured in this run (--calibrate).")  # fmt: skip
    yield chart("Stalls", [
        Series(name="mean wait", colour="b", kind="area", x=x, y=ms["wait_s"]),
        *([] if single else [Series(name="longest wait of each bin", colour="soft", x=x, y=ms["wait_s_max"])]),
    ], unit="ms per step", marks=marks)  # fmt: skip
    at = (x[0] + np.cumsum([epoch["steps"] for epoch in run.epochs]) - 1).tolist()
    yield chart("Loss", [
        Series(name="training", colour="a", x=x, y=bins["loss"].tolist()),
        *metric_series(
            run.epochs, at, (("eval_loss", "validation", "d"), ("ema_eval_loss", "validation, EMA", "c")), 1.0
        ),
    ], unit="", marks=marks, zero=False)  # fmt: skip
    unit, unit_s = time_unit(run.epochs[-1]["elapsed_s"] if run.epochs else 0.0)
    times = [epoch["elapsed_s"] / unit_s for epoch in run.epochs]
    if run.epochs:
        metric, second = metrics_of(run.epochs)[:2]
        curves = [(metric.key, metric.title, "d"), (f"ema_{metric.key}", f"{metric.title}, EMA", "c")]
        if metric.percent:
            curves.append((second.key, second.title, "soft"))
        yield chart(
            "Accuracy against time" if metric.key == "top1" else f"{metric.title} against time",
            metric_series(run.epochs, times, curves, metric.scale), unit="%" if metric.percent else "", x_name=unit,
            start=0.0, marks=_changes(run.epochs, times), zero=metric.percent,
        )  # fmt: skip


def _schedule(run: RunLogReader, bins: Columns, rows: list[dict[str, Any]]) -> list[Chart | None]:
    """Learning rate, momentum, resolution and regularisation over the steps so far."""
    strengths: list[dict[str, float]] = []
    with contextlib.suppress(ResoluteError):  # why: a log of another version may have keys that this one does not know
        recipe = Recipe.from_values(run.start.get("recipe_values", {}), name="run")
        strengths = [recipe.regularization_at(int(stage), int(res))
                     for stage, res in zip(bins["stage"], bins["res"], strict=True)]  # fmt: skip
    columns = {name: bins[key].tolist() for name, key in
               (("lrs", "lr"), ("momenta", "momentum"), ("sizes", "res"))}  # fmt: skip
    return schedule_charts(bins["step"].tolist(), **columns, strengths=strengths, marks=_marks(bins, rows))


def _marks(bins: Columns, rows: list[dict[str, Any]]) -> list[tuple[float, str]]:
    """(first step, resolution) of each stage."""
    return [(float(bins["step"][bins["stage"] == row["stage"]][0]), f"{row['res']} px") for row in rows]


def _levels(rows: list[dict[str, Any]], ends: Any, key: str) -> dict[str, list[float]]:
    """A horizontal line per stage, from its first to its last step."""
    x = [float(at) for row, end in zip(rows, ends, strict=True) for at in (end - row["steps"], end - 1)]
    return {"x": x, "y": [row[key] or np.nan for row in rows for _ in range(2)]}


def _changes(epochs: list[dict[str, Any]], ended: list[float]) -> list[tuple[float, str]]:
    """(time, label) of the start of each stage; `ended`: the end of each epoch."""
    starts = zip([0.0, *ended], epochs, [{"stage": None}, *epochs], strict=False)
    return [(at, f"{epoch['res']} px") for at, epoch, before in starts if epoch["stage"] != before["stage"]]


def _stages(rows: list[dict[str, Any]]) -> dict[str, Any]:
    heads = ("stage", "px#", "batch#", "epochs#", "steps#", "images/s#", "loader alone#", "model alone#", "waiting %#",
             "median step ms#", "99 % below ms#", "change cost ms#", "train s#")  # fmt: skip
    return {"heads": heads, "rows": [(
        row["stage"], row["res"], row["batch_size"], len(row["epochs"]), f"{row['steps']:,}",
        f"{row['images_per_s']:,.1f}", _or_dash(row["loader_images_per_s"], 0), _or_dash(row["model_images_per_s"], 0),
        f"{100 * row['stall_frac']:.2f}", f"{1e3 * row['median_s']:,.1f}", f"{1e3 * row['p99_s']:,.1f}",
        f"{1e3 * row['switch']['cost_s']:+,.0f}" if row["switch"] else "-", f"{row['train_s']:,.2f}",
    ) for row in rows]}  # fmt: skip


def _or_dash(value: float | None, digits: int, scale: float = 1.0) -> str:
    return "-" if value is None else f"{scale * value:,.{digits}f}"


def _epochs(epochs: list[dict[str, Any]]) -> dict[str, Any]:
    keys = (("images/s", "images_per_s", 1, 1.0), ("waiting %", "stall_frac", 2, 100.0), ("train s", "train_s", 2, 1.0),
            ("eval s", "eval_s", 2, 1.0), ("loss", "loss", 3, 1.0), ("eval loss", "eval_loss", 3, 1.0),
            *_metric_columns(epochs, ""), ("EMA loss", "ema_eval_loss", 3, 1.0), *_metric_columns(epochs, "ema_"),
            ("GiB", "memory_bytes", 2, 2.0**-30), ("GPU %", "gpu_frac", 0, 100.0))  # fmt: skip
    shown = [key for key in keys if any(epoch.get(key[1]) is not None for epoch in epochs)]
    every = -(-len(epochs) // _ROWS) if epochs else 1
    sampled = [epoch for number, epoch in enumerate(epochs, 1) if number % every == 0 or number == len(epochs)]
    return {
        "every": every,
        "heads": ["epoch", "stage#", "px#", "batch#", *(f"{key[0]}#" for key in shown), "LR#"],
        "rows": [
            (epoch["epoch"], epoch["stage"], epoch["res"], epoch["batch_size"],
             *(_or_dash(epoch.get(name), digits, scale) for _, name, digits, scale in shown), short(epoch["lr"]))
            for epoch in sampled
        ],
    }  # fmt: skip


def _metric_columns(epochs: list[dict[str, Any]], prefix: str) -> list[tuple[str, str, int, float]]:
    name = "EMA " if prefix else ""
    return [(f"{name}{metric.title}", f"{prefix}{metric.key}", 2 if metric.percent else 4, metric.scale)
            for metric in (metrics_of(epochs) if epochs else ())]  # fmt: skip


def _facts(run: RunLogReader) -> list[tuple[str, object]]:
    start = run.start
    facts = {**start.get("machine", {}), **{k: v for k, v in start.items() if not isinstance(v, (dict, list))}}
    facts = {key: facts[key] for key in facts if facts[key] is not None and key not in ("kind", "recipe_text")}
    for key in [key for key in facts if key.endswith("_bytes")]:
        facts[key.removesuffix("_bytes")] = f"{facts.pop(key) / 2**30:.1f} GiB"
    return [(key.replace("_", " "), str(value)) for key, value in facts.items()]


def main(args: ReportOptions) -> None:
    """Run the command."""
    folder = existing_run(args.run)
    run = RunLogReader(folder / "run.jsonl")
    if not run.read():
        raise ResoluteError(f"{run.path}: no complete record, expected the log of a run; name another RUN")
    print(write_page(run, folder))
