"""Tests the proposals of `make plan SUGGEST=FILE`: trains each one, and compares its forecast with the outcome.

    python -m resolute.benchmarks.training.plan_outcomes --budgets 3m,11m --cases recipe.toml=shards,other.toml=shards2

For every case (a base recipe and a set) and budget, `resolute plan --suggest` measures and writes a recipe, and
`resolute train` trains it, each in its own process. `ratio` is the forecast divided by the wall time of the
complete training command; `used` is that wall time divided by the budget.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from resolute.benchmarks.cli import Parser, check_numbers, command, text_table
from resolute.benchmarks.record import check_writable, find_device, header, write
from resolute.benchmarks.training.runs import Runner, figures, train
from resolute.errors import ResoluteError
from resolute.machine import available_cpus
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.train.planner.estimate import parse_duration
from resolute.train.recipe.schema import Recipe

__all__ = ["main", "outcome", "table"]

TARGET = 0.1  # largest error of a forecast
_FIGURES = ("elapsed_s", "train_s", "eval_s", "final_top1", "stages", "epochs")


def outcome(
    base: Path, shards: Path, budget: str, *, settings: Sequence[str], folder: Path, run: Runner
) -> dict[str, Any]:
    """Propose a recipe for `budget`, train it, and return forecast and outcome, times in s. `folder` must be empty.

    `settings`: arguments of both commands, such as --threads.
    """
    recipe, file = folder / "proposal.toml", folder / "plan.json"
    words = ["--shards", str(shards), "--runs", str(folder / "runs"), *settings]
    began = time.perf_counter()
    run(["plan", *words, "--recipe", str(base), "--budget", budget, "--suggest", str(recipe), "--json", str(file)])
    plan_s, load, began = time.perf_counter() - began, os.getloadavg()[0], time.perf_counter()
    run(["train", *words, "--recipe", str(recipe), "--run", "run"])
    wall_s, forecast = time.perf_counter() - began, json.loads(file.read_text(encoding="utf-8"))
    del forecast["advice"]  # why: it names a temporary folder
    measured = figures(folder / "runs" / "run" / "run.jsonl")
    trained_s = {"training": measured["train_s"], "validation": measured["eval_s"]}
    return {
        "base": base.stem, "set": shards.name, "budget_s": forecast["budget_s"], "plan_s": plan_s,
        "load_before": round(load, 2), "forecast_s": forecast["total_s"], "wall_s": wall_s,
        "ratio": forecast["total_s"] / wall_s, "used": wall_s / forecast["budget_s"],
        "parts_ratio": {name: forecast["parts_s"][name] / value for name, value in trained_s.items()},
        **{name: measured[name] for name in _FIGURES}, "forecast": forecast,
        "recipe": recipe.read_text(encoding="utf-8"),
    }  # fmt: skip


def table(runs: Sequence[dict[str, Any]]) -> str:
    """One row per run, and the largest error of the forecasts."""
    worst = max(abs(run["ratio"] - 1) for run in runs)
    rows = text_table(
        "proposals and outcomes",
        ["base", "set", "budget s", "px x epochs", "forecast s", "wall s", "forecast / wall", "wall / budget",
         "top-1 %"],
        [[run["base"], run["set"], f"{run['budget_s']:g}",
          " ".join(f"{stage['res']}x{stage['epochs']}" for stage in run["forecast"]["stages"]),
          f"{run['forecast_s']:.1f}", f"{run['wall_s']:.1f}", f"{run['ratio']:.3f}", f"{run['used']:.3f}",
          f"{100 * run['final_top1']:.2f}"] for run in runs],
    )  # fmt: skip
    verdict = "met" if worst <= TARGET else "missed"
    return f"{rows}\nlargest error {100 * worst:.1f} %, target {100 * TARGET:.0f} %: {verdict}"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m resolute.benchmarks.training.plan_outcomes",
        description="Train the recipes that `make plan SUGGEST=FILE` proposes, and compare forecast and outcome.",
        epilog="Takes the sum of the budgets for each case. Exit status: 0 done, 2 for a problem that the one line on "
        "stderr explains, 130 interrupted.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--cases", required=True, metavar="RECIPE=DIR,…", help="base recipes and their sets (classes)")
    add("--budgets", required=True, metavar="TIME,…", help="such as 3m,6m,11m")
    add("--threads", type=int, default=available_cpus(), metavar="N", help="CPU threads (default: all, %(default)s)")
    add("--device", default="auto", metavar="auto|cpu|cuda", help="a GPU if there is one (default: %(default)s)")
    add("--out", type=Path, default=Path("benchmarks/results/plan-outcomes.json"), metavar="FILE", help="%(default)s")
    return parser


def _cases(text: str) -> list[tuple[Path, Path]]:
    """The recipe and the set of each case. Raises `ResoluteError` early, for what a run would refuse after hours."""
    cases = [tuple(map(Path, word.strip().split("="))) for word in text.split(",")]
    if not all(len(case) == 2 for case in cases):
        raise ResoluteError(f"--cases: got {text}, expected recipe.toml=shards, separated by commas; correct it")
    for recipe, shards in cases:
        ShardSet.open(shards, resolutions=Recipe.load(recipe).resolutions)
    return [(recipe, shards) for recipe, shards in cases]


def _run(args: argparse.Namespace, run: Runner) -> None:
    check_numbers(args, threads=1)
    budgets = [word.strip() for word in args.budgets.split(",")]
    for budget in budgets:
        parse_duration(budget, setting="--budgets")
    device = find_device(args.device)
    check_writable(args.out)
    cases = _cases(args.cases)
    result: dict[str, Any] = {
        **header(rounds=1, device=device), "target": TARGET,
        "settings": {"threads": args.threads, "device": device.type, "budgets": budgets}, "runs": [],
    }  # fmt: skip
    settings = ["--threads", str(args.threads), "--device", device.type]
    for base, shards in cases:
        for budget in budgets:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    done = outcome(base, shards, budget, settings=settings, folder=Path(folder), run=run)
                except ResoluteError as error:
                    raise ResoluteError(f"{base.stem}, {shards.name}, {budget}: {error}") from None
            result["runs"].append(done)
            result["summary"] = _summary(result["runs"])
            write(args.out, result)  # why after each: a later case may fail
            print(f"{base.stem}, {shards.name}, {budget}: forecast {done['forecast_s']:.1f} s, wall "
                  f"{done['wall_s']:.1f} s", flush=True)  # fmt: skip
    print(f"\n{table(result['runs'])}")


def _summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {name: {"median": statistics.median(run[name] for run in runs),
                   "extremes": [pick(run[name] for run in runs) for pick in (min, max)]}
            for name in ("ratio", "used")}  # fmt: skip


def main(argv: Sequence[str] | None = None, *, run: Runner = train) -> int:
    """Run the command line; returns the exit status. Prints one line to stderr for a `ResoluteError`."""
    return command(_parser(), lambda args: _run(args, run), argv)


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
