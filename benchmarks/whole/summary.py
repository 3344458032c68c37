"""What the trainings of a result come to: means over the seeds, the best learning rates, and the table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from resolute.benchmarks.cli import text_table

from .tools import TOOLS, Curve, prepared

__all__ = ["best_rates", "mean_and_error", "summary", "table", "time_to"]


def time_to(curve: Curve, top1: float) -> float | None:
    """Seconds until the accuracy was first reached, by the last or the averaged weights; None if it was not."""
    return next((point["elapsed_s"] for point in curve if max(point["top1"], point.get("ema_top1", 0.0)) >= top1), None)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error; 0 for a single value."""
    if len(values) < 2:
        return values[0], 0.0
    return statistics.fmean(values), statistics.stdev(values) / len(values) ** 0.5


def summary(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """[{"tool", "epochs", "top1", "ema_top1", "wall_s", "prep_s", "start_s", "train_s", "equal_s", "lr", "workers",
    "seeds"}] of each tool and learning rate.

    All but epochs, prep_s, lr, workers and seeds are (mean, standard error) over the seeds: accuracies in %, seconds of
    the whole with prep, of the start-up and of the rest without prep, which was measured once. ema_top1: of averaged
    weights; None without them. equal_s: seconds, with prep, until the mean accuracy that timm at 224 px has at its end
    was first reached; None if a seed did not reach it.
    """
    groups: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for each in result["runs"]:
        groups.setdefault((each["tool"], each["lr"]), []).append(each)
    ends = [statistics.fmean(each["top1"] for each in own) for (tool, _), own in groups.items() if tool == "timm"]
    goal = max(ends, default=1.0)
    rows = []
    for (tool, lr), own in groups.items():
        prep_s = result["prep_s"].get(prepared(tool), 0.0)
        reached = [prep_s + (time_to(each["curve"], goal) or math.inf) for each in own]
        averaged = all("ema_top1" in each for each in own)
        rows.append(
            {
                "tool": tool,
                "epochs": own[0]["epochs"],
                "top1": mean_and_error([100 * each["top1"] for each in own]),
                "ema_top1": mean_and_error([100 * each["ema_top1"] for each in own]) if averaged else None,
                "wall_s": mean_and_error([each["wall_s"] + prep_s for each in own]),
                "prep_s": prep_s,
                "start_s": mean_and_error([each["start_s"] for each in own]),
                "train_s": mean_and_error([each["wall_s"] - each["start_s"] for each in own]),
                "equal_s": None if math.inf in reached else mean_and_error(reached),
                "lr": lr,
                "workers": own[0]["workers"],
                "seeds": len(own),
            }
        )
    return rows


def best_rates(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """{tool: {"lr", "at_edge"}} of a result of `--rates`: the rate with the highest mean top-1.

    Of equal ones the first counts. at_edge: it is the lowest or the highest of those that were tried, so that one
    beyond it might be better.
    """
    found = {}
    for tool, rates in result["rates"].items():
        rows = [row for row in summary(result) if row["tool"] == tool]
        lr = max(rows, key=lambda row: row["top1"][0])["lr"]
        found[tool] = {"lr": lr, "at_edge": lr in (min(rates), max(rates))}
    return found


def table(result: Mapping[str, Any]) -> str:
    """The summary as text; of a result of `--rates`, the best rate of each tool is marked."""
    rows, best = summary(result), result.get("best", {})
    columns = {
        "epochs": lambda row: str(row["epochs"]),
        "top-1, %": lambda row: _text(row["top1"]),
        "EMA top-1, %": lambda row: _text(row["ema_top1"]),
        "wall s": lambda row: _text(row["wall_s"]),
        "of it prep, once": lambda row: f"{row['prep_s']:.1f}" if row["prep_s"] else "",
        "start-up": lambda row: _text(row["start_s"]),
        "training": lambda row: _text(row["train_s"]),
        "s to timm's top-1": lambda row: _text(row["equal_s"]),
        "lr": lambda row: f"{row['lr']:g}{_mark(best.get(row['tool']), row['lr'])}",
        "workers": lambda row: str(row["workers"]),
        "seeds": lambda row: str(row["seeds"]),
    }
    if not any(row["ema_top1"] for row in rows):
        del columns["EMA top-1, %"]
    cells = [[row["tool"], *(text(row) for text in columns.values())] for row in rows]
    network = f"{result['case']['model']}, " if any(row["tool"] in TOOLS for row in rows) else ""
    return text_table(f"{network}{result['photos']} photos", ["", *columns], cells)


def _text(value: tuple[float, float] | None) -> str:
    return "" if value is None else f"{value[0]:.1f} ± {value[1]:.1f}"


def _mark(best: Mapping[str, Any] | None, lr: float) -> str:
    if best is None or best["lr"] != lr:
        return ""
    return " best, at the edge" if best["at_edge"] else " best"
