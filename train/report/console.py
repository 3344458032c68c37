"""A run's output, all derived from run.jsonl: the epoch table, the final summary and the HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from resolute.errors import as_typed
from resolute.pipeline.dataset.target import TargetKind
from resolute.train.logs.run_log import SWITCH_STEPS, RunLogReader, switch_costs, switch_noise
from resolute.train.score import METRICS, Metric, best_score, main_metric

from .page import write_page

__all__ = ["Reports", "epoch_header", "epoch_line", "summary"]

_WIDTH = 8  # of a metric's column; top-1 and top-5 are narrower


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


def epoch_header(kind: TargetKind) -> str:
    """The head of the console's epoch table, for a set's kind of target."""
    names = "".join(metric.title.rjust(width + 1) for metric, width in _columns(kind))
    return (
        "epoch stage  res batch  images/s  stall %  wait s  compute s  eval s      lr   loss  "
        f"val loss{names}  EMA: loss{names}    GiB  GPU %"
    )


def _columns(kind: str) -> list[tuple[Metric, int]]:
    return [(metric, 6 if kind == "class" else _WIDTH) for metric in METRICS[kind]]


def epoch_line(record: dict[str, Any]) -> str:
    """The row of the console's epoch table for an epoch record, under `epoch_header`."""

    def number(key: str, width: int, digits: int, scale: float = 1.0) -> str:
        value = record.get(key)
        return "-".rjust(width) if value is None else f"{scale * value:{width}.{digits}f}"

    def metrics(prefix: str = "") -> list[str]:
        return [
            number(prefix + metric.key, width, 2, 100)
            if metric.percent
            else _short(record.get(prefix + metric.key)).rjust(width)
            for metric, width in columns
        ]

    columns = _columns(next(kind for kind, known in METRICS.items() if known[0] == main_metric(record)))
    return " ".join(
        [
            f"{record['epoch']:5d} {record['stage']:5d} {record['res']:4d} {record['batch_size']:5d}",
            number("images_per_s", 9, 1),
            number("stall_frac", 8, 2, 100),
            number("wait_s", 7, 2),
            f"{record['train_s'] - record['wait_s']:10.2f}",
            number("eval_s", 7, 2),
            f"{record['lr']:7.4f}",
            number("loss", 6, 3),
            number("eval_loss", 9, 3),
            *metrics(),
            number("ema_eval_loss", 10, 3),
            *metrics("ema_"),
            number("memory_bytes", 6, 2, 2**-30),
            number("gpu_frac", 6, 0, 100),
        ]
    )


def summary(run: RunLogReader, folder: Path) -> str:
    """The closing lines of a run: accuracy, time, cost of each stage change, files."""
    epochs, steps = run.epochs, run.steps
    train_s, wait_s = sum(e["train_s"] for e in epochs), sum(e["wait_s"] for e in epochs)
    last, best = epochs[-1], run.best_epoch or epochs[-1]
    metric = main_metric(last)
    ended, top = (_score(metric, epoch) for epoch in (last, best))
    lines = [
        f"\n{metric.title} {ended} at the end, best {top} (epoch {best['epoch']})",
        f"{last['elapsed_s']:.1f} s: training {train_s:.1f} s, validation {sum(e['eval_s'] for e in epochs):.1f} s; "
        f"waiting for data {100 * wait_s / train_s:.2f} % of training",
    ]
    for cost in switch_costs(steps["stage"], steps["time_s"], steps["res"]):
        what = f"{cost['res']} px in stage {cost['stage']}" if cost["in_stage"] else f"stage {cost['stage']}"
        lines.append(
            f"switch to {what}: cost {cost['cost_s'] / cost['median_s']:+.1f} steps of usually "
            f"{1e3 * cost['median_s']:,.0f} ms in the first {SWITCH_STEPS} ({switch_noise(cost)})"
        )
    files = f"{folder}: report.html, run.jsonl, validation.json, best.pt, last.pt"
    more = {"run": str(folder), "more_epochs": str(sum(epoch["stage"] == last["stage"] for epoch in epochs))}
    return "\n".join(
        [
            *lines,
            files,
            f"to train on from here: {as_typed('train', more)}",
            f"next: {as_typed('eval', {'run': str(folder)})}",
        ]
    )


def _score(metric: Metric, epoch: dict[str, Any]) -> str:
    score = best_score(epoch)
    return "unknown" if score is None else metric.text(score)


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
