"""Accuracy and time of complete trainings with several recipes, interleaved, relative to the first recipe.

    python -m benchmarks.compare --shards shards --recipes benchmarks/recipes/fixed224.toml,… --seeds 0,1,2

Each seed trains all recipes in turn (a b c, a b c, …), each in its own process. Differences are taken within a seed, so
that a temporarily slow machine affects both runs. "Final epoch" is the time per image in the epochs at the last
resolution, which should not depend on how a run got there. With --plan, `python -m train --plan` forecasts every run.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from pipeline.cli import guard_process

    guard_process()

import argparse
import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.cli import Parser
from pipeline.cpu_count import available_cpus
from pipeline.dataset.shard_set import ShardSet
from pipeline.errors import ResoluteError
from train.logs.run_log import RunLogReader, best_top1, switch_costs
from train.recipe.schema import Recipe

from .compare_table import ASKED, check_picture, draw, summary, tables
from .machine import find_device, read_into_cache
from .shell import command, header, ready_to_write, write

__all__ = ["FORMAT", "Runner", "figures", "main", "measure", "seeded", "train"]

FORMAT = "resolute-compare-1"
_EPOCH = ("epoch", "stage", "res", "eval_res", "samples", "train_s", "wait_s", "eval_s", "images_per_s", "lr", "loss",
          "eval_loss", "top1", "ema_top1")  # fmt: skip
_NOTE = "compare.json"  # in the folder of a finished run: the benchmark's own record of it

Runner = Callable[[Sequence[str]], None]  # takes the arguments of `python -m train`


def train(words: Sequence[str]) -> None:
    """Run `python -m train` in its own process. Raises `ResoluteError` with its last line on stderr if it fails."""
    # why: use this checkout's code whatever the working directory is
    places = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "train", *words], env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["nothing on stderr"]
        raise ResoluteError(f"training ended with status {done.returncode}, expected 0: {lines[-1]}")


def seeded(recipe: Path, seed: int, folder: Path) -> Path:
    """A copy of the recipe in `folder` with the same name and values except the seed."""
    text = recipe.read_text(encoding="utf-8")
    first_table = re.search(r"(?m)^\s*\[", text)
    end = first_table.start() if first_table else len(text)
    path = folder / str(seed) / recipe.name
    path.parent.mkdir(parents=True, exist_ok=True)
    own = re.sub(r"(?m)^\s*seed\s*=.*\n?", "", text[:end])
    path.write_text(f"seed = {seed}\n{own}{text[end:]}", encoding="utf-8")
    if Recipe.load(path) != dataclasses.replace(Recipe.load(recipe), seed=seed):
        raise ResoluteError(f"{recipe}: its seed cannot be changed, expected a line `seed = 0` at the top; add it")
    return path


def figures(path: Path) -> dict[str, Any]:
    """Results from a finished run's log: times in s, accuracies 0 to 1 (None without validation)."""
    log = RunLogReader(path)
    log.read()
    epochs, ends = log.epochs, log.kind("end")
    if not ends:
        raise ResoluteError(f"{path}: not finished, expected the log of a finished run; remove its folder and repeat")
    last, steps = epochs[-1], log.steps
    final = [epoch for epoch in epochs if epoch["res"] == last["res"]]
    at_final = steps["res"] == last["res"]
    train_s = sum(epoch["train_s"] for epoch in epochs)
    return {
        "recipe_hash": log.start["recipe_hash"],
        "elapsed_s": ends[-1]["elapsed_s"], "train_s": train_s, "eval_s": sum(epoch["eval_s"] for epoch in epochs),
        "wait_frac": sum(epoch["wait_s"] for epoch in epochs) / train_s,
        "top1": last["top1"], "ema_top1": last["ema_top1"], "final_top1": best_top1(last),
        "best_top1": ends[-1]["best_top1"], "stopped_early": ends[-1].get("stopped_early", ""),
        "final_res": last["res"],
        "final_image_s": float(np.median([epoch["train_s"] / epoch["samples"] for epoch in final])),
        "final_step_image_s": float(np.median(steps["time_s"][at_final] / steps["samples"][at_final])),
        "stages": _stages(log),
        "epochs": [{name: epoch.get(name) for name in _EPOCH} for epoch in epochs],
    }  # fmt: skip


def _stages(log: RunLogReader) -> list[dict[str, Any]]:
    """Medians of each stage's steps, and the extra cost of its first steps; None for the first stage."""
    steps = log.steps
    costs = {cost["stage"]: cost for cost in switch_costs(steps["stage"], steps["time_s"])}
    stages = []
    for stage in map(int, np.unique(steps["stage"])):
        own = steps["stage"] == stage
        cost = costs.get(stage, {})
        stages.append({
            "stage": stage, "res": int(steps["res"][own][0]), "batch_size": int(steps["samples"][own].max()),
            "steps": int(own.sum()), "step_s": float(np.median(steps["time_s"][own])),
            "image_s": float(np.median(steps["time_s"][own] / steps["samples"][own])),
            "switch_cost_s": cost.get("cost_s"), "switch_slowest_ratio": cost.get("slowest_ratio"),
        })  # fmt: skip
    return stages


def measure(
    recipes: Sequence[Path], seeds: Sequence[int], *, runs: Path, settings: Sequence[str], plan: bool = False,
    run: Runner = train, expect: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """The results of every run, in the order of training. `settings`: arguments of every training, such as --shards.

    A run that an earlier call finished in `runs` under the same `expect` is reused.
    """
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for seed, recipe in itertools.product(seeds, recipes):
            copy, name = seeded(recipe, seed, Path(folder)), f"{recipe.stem}-seed{seed}"
            words = [*settings, "--recipe", str(copy), "--runs", str(runs), "--run", name]
            key = {**(expect or {}), "recipe_hash": Recipe.load(copy).hash, "words": list(settings), "plan": plan}
            earlier = _earlier(runs / name, key)
            try:
                note = earlier or _timed(words, Path(folder), plan=plan, run=run)
            except ResoluteError as error:
                raise ResoluteError(f"{recipe.stem}, seed {seed}: {error}") from None
            result = {"recipe": recipe.stem, "seed": seed, **figures(runs / name / "run.jsonl")}
            result |= {"wall_s": note["wall_s"], "load_before": note["load_before"]}
            result["plan"] = _against_plan(note["forecast"], result) if plan else None
            if earlier is None:
                (runs / name / _NOTE).write_text(json.dumps(note | {"key": key}), encoding="utf-8")
            print(f"{recipe.stem}, seed {seed}: top-1 {100 * result['final_top1']:.2f} % in {result['elapsed_s']:.1f} s"
                  f"{', of an earlier call' if earlier else ''}", flush=True)  # fmt: skip
            results.append(result)
    return results


def _earlier(folder: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    """The benchmark's record of a run that an earlier call finished; None if the folder does not exist."""
    if not folder.exists():
        return None
    try:
        note: dict[str, Any] = json.loads((folder / _NOTE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        note = {"key": None}
    if note["key"] != key:
        raise ResoluteError(
            f"{folder}: a run that this benchmark did not finish, or of other code, data or settings, expected its "
            "own; remove it or choose another --runs"
        )
    return note


def _timed(words: Sequence[str], folder: Path, *, plan: bool, run: Runner) -> dict[str, Any]:
    """Train, with a forecast first if `plan`. Raises `ResoluteError` if either fails."""
    forecast = None
    if plan:
        file = folder / "plan.json"
        run([*words, "--plan", "--json", str(file)])
        forecast = json.loads(file.read_text(encoding="utf-8"))
    load, began = os.getloadavg()[0], time.perf_counter()
    run(words)
    return {"wall_s": time.perf_counter() - began, "load_before": round(load, 2), "forecast": forecast}


def _against_plan(forecast: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Predicted / measured time: of training and validation by the run's clock, and of the complete command."""
    predicted_s = forecast["parts_s"]["training"] + forecast["parts_s"]["validation"]
    return {
        "predicted_s": predicted_s, "ratio": predicted_s / result["elapsed_s"],
        "training_ratio": forecast["parts_s"]["training"] / result["train_s"],
        "total_s": forecast["total_s"], "total_ratio": forecast["total_s"] / result["wall_s"], "forecast": forecast,
    }  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m benchmarks.compare",
        description="Train several recipes with several seeds, and compare accuracy and time with the first recipe.",
        epilog="Takes as long as all trainings together. With --runs the runs are kept, and finished ones are not "
        "repeated after an interruption. Exit status: 0 done, 2 for a problem that the one line on stderr explains, "
        "130 interrupted.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--shards", type=Path, required=True, metavar="DIR", help="folder written by `make shards`")
    add("--recipes", required=True, metavar="FILE,…", help="TOML files; the first is the baseline")
    add("--seeds", default="0,1,2", metavar="N,…", help="each trains all recipes (default: %(default)s)")
    add("--threads", type=int, default=available_cpus(), metavar="N",
        help="CPU threads per run (default: all, %(default)s)")  # fmt: skip
    add("--device", default="auto", metavar="auto|cpu|cuda", help="a GPU if there is one (default: %(default)s)")
    add("--plan", action="store_true", help="forecast every run before it, and compare the forecast with the outcome")
    add("--runs", type=Path, metavar="FOLDER", help="folder to keep the runs in (default: they are deleted)")
    add("--picture", type=Path, metavar="FILE", help="draw top-1 and loss against the epoch into a .png, .svg or .pdf")
    add("--out", type=Path, metavar="FILE", help="JSON to write (default: compare-<name of the shards' folder>.json in "
        "benchmarks/results)")  # fmt: skip
    return parser


def _seeds(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"\d+", word) for word in words) or len({*map(int, words)}) < len(words):
        raise ResoluteError(f"--seeds: got {text}, expected different whole numbers as 0,1,2; correct it")
    return [int(word) for word in words]


def _recipes(text: str) -> list[Path]:
    paths = [Path(word.strip()) for word in text.split(",")]
    if len({path.stem for path in paths}) < len(paths):
        raise ResoluteError(f"--recipes: got {text}, expected files of different names; rename one")
    return paths


def _open(root: Path, recipes: Sequence[Recipe]) -> ShardSet:
    """Open the shards. Raises `ResoluteError` early if a resolution or fold of any recipe is missing."""
    for recipe in recipes:
        ShardSet.open(root, resolutions=recipe.resolutions, fold=recipe.data.fold)
    return ShardSet.open(root, fold=recipes[0].data.fold)


def _run(args: argparse.Namespace, run: Runner) -> None:
    recipes, seeds = _recipes(args.recipes), _seeds(args.seeds)
    if args.threads < 1:
        raise ResoluteError(f"--threads: got {args.threads}, expected at least 1; raise it")
    device = find_device(args.device)
    name = args.shards.resolve().name
    out: Path = args.out or Path(f"benchmarks/results/compare-{name}.json")
    ready_to_write(out)
    if args.picture:
        check_picture(args.picture)
    shards = _open(args.shards, [Recipe.load(path) for path in recipes])
    result: dict[str, Any] = {
        **header(FORMAT, device=device),
        "settings": {"recipes": [path.stem for path in recipes], "seeds": seeds, "threads": args.threads,
                     "device": device.type, "plan": args.plan},
        "shards": {"name": name, "hash": shards.hash, "train_samples": len(shards.splits["train"]),
                   "val_samples": len(shards.splits["val"]),
                   "page_cache": "warmed" if read_into_cache(shards) else "as found"},
        "recipes": {path.stem: path.read_text(encoding="utf-8") for path in recipes},
        "asked": ASKED,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        runs = args.runs or Path(folder)
        runs.mkdir(parents=True, exist_ok=True)
        result["runs"] = measure(
            recipes, seeds, runs=runs, plan=args.plan, run=run,
            settings=["--shards", str(args.shards), "--threads", str(args.threads), "--device", device.type],
            expect={"commit": result["commit"], "shards": shards.hash},
        )  # fmt: skip
    result["summary"] = summary(result["runs"])
    write(out, result)
    print(f"\n{tables(result['summary'])}\n\nwritten: {out}", flush=True)
    if args.picture:
        draw(result["runs"], args.picture)
        print(f"written: {args.picture}")


def main(argv: Sequence[str] | None = None, *, run: Runner = train) -> int:
    """Run the command line; returns the exit status. Prints one line to stderr for a `ResoluteError`."""
    return command(_parser(), lambda args: _run(args, run), argv)


if __name__ == "__main__":
    from pipeline.cli import run_main

    run_main(main)
