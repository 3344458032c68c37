"""A run's output, all derived from run.jsonl: the epoch table, the final summary and the HTML page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resolute.errors import as_typed
from resolute.pipeline.dataset.target import Target
from resolute.train.logs.run_log import RunLogReader, change_text, switch_costs
from resolute.train.score import (
    UNRELATED,
    Metric,
    best_score,
    main_metric,
    shown_metrics,
    unrelated_photos,
    unrelated_score,
)

from .page import write_page
from .validation import errors_of_values, read_validation

__all__ = ["EpochTable", "Reports", "summary"]

_ERRORS = 8  # of values in the summary, at most


class Reports:
    """Keeps the HTML page up to date. `on`: False on ranks that write nothing."""

    def __init__(self, folder: Path, *, on: bool) -> None:
        self._folder, self._on, self._run = folder, on, RunLogReader(folder / "run.jsonl")

    def update(self) -> None:
        """Read the log's new records and draw the page again."""
        if self._on:
            self._run.read()
            write_page(self._run, self._folder)

    def summary(self) -> str:
        self._run.read()
        return summary(self._run, self._folder)


@dataclass(frozen=True)
class EpochTable:
    """The console's table of epochs: `head`, and a row for each epoch. `has_ema`: the first metric of averaged weights.

    `has_related`: the first metric also without the validation photos that are related to training photos.
    run.jsonl and the report have more columns.
    """

    metrics: tuple[Metric, ...]
    has_ema: bool
    has_related: bool = False

    @classmethod
    def of(cls, target: Target, *, has_ema: bool, has_related: bool = False) -> EpochTable:
        return cls(shown_metrics(target.kind, outputs=len(target), units=target.units), has_ema, has_related)

    @property
    def head(self) -> str:
        titles = "".join(
            f" {prefix + metric.head:>{self._width(prefix, metric)}}" for prefix, _, metric in self._columns
        )
        return f"epoch stage   px batch   loss  val loss{titles}       lr images/s waiting % train s val s"

    def row(self, record: dict[str, Any]) -> str:
        """The row of an epoch's record in run.jsonl."""

        def number(key: str, width: int, digits: int, scale: float = 1.0) -> str:
            value = record.get(key)
            return "-".rjust(width) if value is None else f"{scale * value:{width}.{digits}f}"

        def cell(prefix: str, key: str, metric: Metric) -> str:
            width = self._width(prefix, metric)
            if metric.percent:
                return number(key + metric.key, width, 2, 100)
            return _short(record.get(key + metric.key)).rjust(width)

        return " ".join(
            [
                f"{record['epoch']:5d} {record['stage']:5d} {record['res']:4d} {record['batch_size']:5d}",
                number("loss", 6, 3),
                number("eval_loss", 9, 3),
                *(cell(*column) for column in self._columns),
                f"{record['lr']:8.3g}",
                number("images_per_s", 8, 1),
                number("stall_frac", 9, 2, 100),
                number("train_s", 7, 1),
                number("eval_s", 5, 1),
            ]
        )

    @property
    def _columns(self) -> list[tuple[str, str, Metric]]:
        """(prefix of its title, prefix of its key, metric) of each column of a metric."""
        unrelated = [self.metrics[0].unrelated] if self.has_related else []
        averaged = [self.metrics[0], *unrelated] if self.has_ema else []
        return [
            *(("", "", metric) for metric in (*self.metrics, *unrelated)),
            *(("EMA ", "ema_", metric) for metric in averaged),
        ]

    @staticmethod
    def _width(prefix: str, metric: Metric) -> int:
        return max(6, len(prefix + metric.head))


def summary(run: RunLogReader, folder: Path) -> str:
    """The closing lines of a run: accuracy, time, cost of each change of resolution, files, and how to go on."""
    epochs, steps, start = run.epochs, run.steps, run.start
    train_s, wait_s = sum(e["train_s"] for e in epochs), sum(e["wait_s"] for e in epochs)
    last, best = epochs[-1], run.best_epoch or epochs[-1]
    metric = main_metric(last)
    ended, top = (_score(metric, epoch) for epoch in (last, best))
    lines = [
        f"\n{metric.title} {ended} at the end, best {top} (epoch {best['epoch']}){_of_photos(start)}",
        *_of_unrelated(start, last, best),
        *_errors(folder),
        f"{last['elapsed_s']:.1f} s: training {train_s:.1f} s, validation {sum(e['eval_s'] for e in epochs):.1f} s; "
        f"waiting for data {100 * wait_s / train_s:.2f} % of training",
        *map(change_text, switch_costs(steps["stage"], steps["time_s"], steps["res"])),
        f"{folder}: report.html, recipe.toml, run.jsonl, validation.json, best.pt, last.pt",
    ]
    more = {"run": str(folder), "more_epochs": str(sum(epoch["stage"] == last["stage"] for epoch in epochs))}
    if run.kind("end") and not folder.name.startswith("fold-"):
        lines.append(f"more epochs: {as_typed('train', more)}")
    return "\n".join([*lines, f"next: {as_typed('eval', {'run': str(folder)})}"])


def _of_photos(start: dict[str, Any]) -> str:
    """ " of 300 photos; …": on how many photos the accuracy is measured, and that of a constant answer."""
    count, majority = start.get("val_samples"), start.get("val_majority")
    if not count:
        return ""
    constant = f"; always the most frequent class: {100 * majority:.1f} %" if majority else ""
    return f", of {count:,} photos{constant}"


def _of_unrelated(start: dict[str, Any], last: dict[str, Any], best: dict[str, Any]) -> list[str]:
    """The scores without the validation photos that are related to training photos; none if there are none."""
    if not (photos := unrelated_photos(start)):
        return []
    metric = main_metric(last).unrelated
    ended, top = (
        "unknown" if (score := unrelated_score(each)) is None else metric.text(score) for each in (last, best)
    )
    of = f"on the {photos:,} of {start['val_samples']:,} photos {UNRELATED}"
    return [f"{metric.title} {ended} at the end, {top} in epoch {best['epoch']}: {of}"]


def _errors(folder: Path) -> list[str]:
    """The RMSE of each value, in its unit, in the best validation; none for other kinds of targets."""
    table = read_validation(folder)
    errors = [] if table is None else errors_of_values(table)
    shown = [f"{name} {error}" for name, error in errors[:_ERRORS]]
    more = [f"{len(errors) - _ERRORS} more in the report"] * (len(errors) > _ERRORS)
    return [f"RMSE in epoch {table['epoch']}: {', '.join([*shown, *more])}"] if table and errors else []


def _score(metric: Metric, epoch: dict[str, Any]) -> str:
    score = best_score(epoch)
    return "unknown" if score is None else metric.text(score)


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
