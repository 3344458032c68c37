"""`python -m benchmarks.runs RUN …`: compares finished training runs from their logs.

Shows accuracy and time of each run, its time relative to the first run, the spread of epoch times within a stage, and
the cost of its stage changes.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from pipeline.cli import guard_process

    guard_process()

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.cli import Parser
from pipeline.errors import ResoluteError
from train.logs.run_log import RunLogReader, switch_costs

from .machine import machine, versions
from .shell import command, ready_to_write, write
from .table import text_table

__all__ = ["main", "measure"]


def measure(folder: Path) -> dict[str, Any]:
    """Results of a finished run. Times in s, accuracies 0 to 1."""
    log = RunLogReader(folder / "run.jsonl")
    log.read()
    ends, epochs, steps = log.kind("end"), log.epochs, log.steps
    if not ends:
        raise ResoluteError(f"{folder}: not finished, expected a finished run; repeat the same `make train`")
    spreads = []
    for stage in sorted({epoch["stage"] for epoch in epochs}):
        times = [epoch["train_s"] for epoch in epochs if epoch["stage"] == stage]
        spreads.append((max(times) - min(times)) / statistics.median(times))
    start, last = log.start, epochs[-1]
    train_s = sum(epoch["train_s"] for epoch in epochs)
    return {
        "run": folder.name, "recipe": start["recipe"], "recipe_hash": start["recipe_hash"],
        "shards_hash": start["shards_hash"], "device": start["device"], "torch": start["torch"],
        "epochs": len(epochs), "train_s": train_s, "eval_s": sum(epoch["eval_s"] for epoch in epochs),
        "total_s": last["elapsed_s"], "stall_frac": sum(epoch["wait_s"] for epoch in epochs) / train_s,
        "top1": last["top1"], "ema_top1": last["ema_top1"], "best_top1": ends[-1]["best_top1"],
        "epoch_spread_frac": spreads, "switches": switch_costs(steps["stage"], steps["time_s"]),
        "epoch_records": epochs,
    }  # fmt: skip


def show(runs: Sequence[dict[str, Any]]) -> str:
    rows = []
    for run in runs:
        ratios = " ".join(f"{switch['slowest_ratio']:.2f}" for switch in run["switches"]) or "-"
        rows.append([
            run["run"], f"{run['epochs']}", f"{100 * run['top1']:.2f}",
            "-" if run["ema_top1"] is None else f"{100 * run['ema_top1']:.2f}", f"{run['total_s']:.1f}",
            f"{run['train_s'] / runs[0]['train_s']:.2f}x", f"{100 * run['stall_frac']:.1f} %", ratios,
            " ".join(f"{100 * spread:.1f}" for spread in run["epoch_spread_frac"]),
        ])  # fmt: skip
    heads = ["run", "epochs", "top-1 %", "EMA %", "total s", "training", "stall",
             "slowest of 5 after a switch / median", "epoch spread, a stage %"]  # fmt: skip
    return text_table("training runs", heads, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = Parser(prog="python -m benchmarks.runs", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders; the first is the baseline")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON to write")
    return command(parser, _run, argv)


def _run(args: argparse.Namespace) -> None:
    if args.out:
        ready_to_write(args.out)
    runs = [measure(folder) for folder in args.runs]
    print(show(runs))
    if args.out:
        write(args.out, {"machine": machine(), "versions": versions(), "runs": runs})


if __name__ == "__main__":
    from pipeline.cli import run_main

    run_main(main)
