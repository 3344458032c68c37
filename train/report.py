"""What is shown of a run? The epoch table, the closing summary and the curves, all from run.jsonl."""

from __future__ import annotations

import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

from .meters import read_log

__all__ = ["EPOCH_HEADER", "draw_curves", "epoch_line", "summary", "switch_costs"]

EPOCH_HEADER = (
    "epoch stage  res batch  images/s  stall %  train s  eval s      lr   loss  top-1  top-5   EMA: top-1  top-5"
)
SWITCH_STEPS = 5


def epoch_line(record: dict[str, Any]) -> str:
    def percent(key: str) -> str:
        return "     -" if record[key] is None else f"{100 * record[key]:6.2f}"

    return (
        f"{record['epoch']:5d} {record['stage']:5d} {record['res']:4d} {record['batch_size']:5d} "
        f"{record['images_per_s']:9.1f} {100 * record['stall_frac']:8.2f} {record['train_s']:8.2f} "
        f"{record['eval_s']:7.2f} {record['lr']:7.4f} {record['loss']:6.3f} {percent('top1')} {percent('top5')} "
        f"       {percent('ema_top1')} {percent('ema_top5')}"
    )


def switch_costs(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each stage change: what the first steps cost beyond the stage's median step, and the slowest of them.

    `cost_s`: time of the first 5 steps - 5 medians; `slowest_ratio`: slowest of them / median.
    """
    stages: dict[int, list[float]] = {}
    for record in records:
        if record["kind"] == "step":
            stages.setdefault(record["stage"], []).append(record["wait_s"] + record["compute_s"])
    costs = []
    for stage, times in sorted(stages.items())[1:]:
        first, median = times[:SWITCH_STEPS], statistics.median(times)
        cost = sum(first) - len(first) * median
        costs.append({"stage": stage, "cost_s": cost, "median_s": median, "slowest_ratio": max(first) / median})
    return costs


def summary(log: Path, folder: Path) -> str:
    records = read_log(log)
    epochs = [record for record in records if record["kind"] == "epoch"]
    train_s, wait_s = sum(e["train_s"] for e in epochs), sum(e["wait_s"] for e in epochs)
    best = max((e for e in epochs if e["top1"] is not None), key=_top1)
    last = epochs[-1]
    lines = [
        f"\ntop-1 {100 * _top1(last):.2f} % at the end, best {100 * _top1(best):.2f} % (epoch {best['epoch']})",
        f"{last['elapsed_s']:.1f} s: training {train_s:.1f} s, validation {sum(e['eval_s'] for e in epochs):.1f} s; "
        f"waiting for data {100 * wait_s / train_s:.2f} % of training",
    ]
    for cost in switch_costs(records):
        lines.append(
            f"switch to stage {cost['stage']}: {1e3 * cost['cost_s']:+.0f} ms over its first {SWITCH_STEPS} steps, "
            f"slowest {cost['slowest_ratio']:.2f}x the median ({1e3 * cost['median_s']:.0f} ms)"
        )
    return "\n".join([*lines, f"{folder}: run.jsonl, curves.png, best.pt, last.pt"])


def _top1(record: dict[str, Any]) -> float:
    return max(record["top1"] or 0.0, record["ema_top1"] or 0.0)


def draw_curves(log: Path, path: Path) -> None:
    """LR, resolution, step time, stalls, loss and accuracy over the whole run, as one PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    records = read_log(log)
    steps = [r for r in records if r["kind"] == "step"]
    epochs = [r for r in records if r["kind"] == "epoch"]
    ends = [max(s["step"] for s in steps if s["epoch"] == e["epoch"]) for e in epochs]
    x = [s["step"] for s in steps]
    figure, axes = plt.subplots(3, 2, figsize=(12, 9), sharex=True, layout="constrained")
    panels = dict(zip(("lr", "res", "time", "stall", "loss", "top1"), axes.flat, strict=True))
    panels["lr"].plot(x, [s["lr"] for s in steps])
    panels["lr"].set_ylabel("learning rate")
    panels["res"].step(x, [s["res"] for s in steps], where="post")
    panels["res"].set_ylabel("resolution (px)")
    panels["time"].plot(x, [1e3 * (s["wait_s"] + s["compute_s"]) for s in steps], lw=0.7)
    panels["time"].set_ylabel("step time (ms)")
    panels["stall"].plot(x, [1e3 * s["wait_s"] for s in steps], lw=0.7)
    panels["stall"].set_ylabel("wait for data (ms)")
    panels["loss"].plot(x, [s["loss"] for s in steps], lw=0.4, alpha=0.5)
    panels["loss"].plot(ends, [e["loss"] for e in epochs], "o-", ms=3, label="epoch mean")
    panels["loss"].set_ylabel("training loss")
    for key, label in (("top1", "top-1"), ("ema_top1", "EMA top-1")):
        points = [(end, 100 * e[key]) for end, e in zip(ends, epochs, strict=True) if e[key]]
        if points:
            panels["top1"].plot(*zip(*points, strict=True), "o-", ms=3, label=label)
    panels["top1"].set_ylabel("validation accuracy (%)")
    changes = [s["step"] for before, s in pairwise(steps) if s["stage"] != before["stage"]]
    for panel in panels.values():
        panel.grid(alpha=0.3)
        for change in changes:
            panel.axvline(change, color="grey", lw=0.8, ls="--")
    for key in ("loss", "top1"):
        panels[key].legend()
    for panel in axes[-1]:
        panel.set_xlabel("optimizer step (dashed: stage change)")
    figure.savefig(path, dpi=110)
    plt.close(figure)
