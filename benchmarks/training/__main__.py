"""Measures accuracy and time of complete trainings with several recipes, relative to the first recipe.

    python -m benchmarks.training --shards shards --recipes benchmarks/recipes/fixed224.toml,… --seeds 0,1,2

Each seed trains all recipes one after another (a b c, a b c, …), each in its own process. Differences are taken within
a seed, so that a temporarily slow machine affects both runs. "Final epoch" is the time per image in the epochs at the
last resolution, which should not depend on how a run got there. With --plan, `python -m train plan` forecasts every
run. With --turns the trainings of a seed alternate by epochs, each including its validation, and epoch n of a recipe is
compared with epoch n of the first: while one works, the others are paused, so that the ratio shows only how a run got
there, to a fraction of a percent.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from pipeline.cli import guard_process

    guard_process()

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cli import Parser, command, show_progress
from benchmarks.record import check_writable, find_device, header, read_into_cache, write
from pipeline.cpu_count import available_cpus
from pipeline.dataset.open_dataset import open_dataset
from pipeline.dataset.shard_set import ShardSet
from pipeline.errors import ResoluteError
from pipeline.storage.atomic_file import check_output
from train.logs.run_log import RunLogReader, switch_costs
from train.logs.score import best_score
from train.recipe.schema import Recipe

from .summary import TARGETS, draw, summary, tables

__all__ = ["Runner", "figures", "main", "measure", "take_turns", "train", "with_seed"]

_EPOCH = ("epoch", "stage", "res", "eval_res", "samples", "train_s", "wait_s", "eval_s", "images_per_s", "lr", "loss",
          "eval_loss", "top1", "ema_top1")  # fmt: skip
_NOTE = "compare.json"  # in the folder of a finished run: the benchmark's own record of it
# of a training that alternated with others
_NOT_TIMED: dict[str, Any] = {"wall_s": None, "load_before": None, "forecast": None}
_TURN = "turn is over"  # printed by a training that waits for its next turn

Runner = Callable[[Sequence[str]], None]  # takes the arguments of `python -m train`


def train(words: Sequence[str]) -> None:
    """Run `python -m train` in its own process. Raises `ResoluteError` with its last line on stderr if it fails."""
    process = _start(["train", *words])
    _, errors = process.communicate()
    _check(process, errors)


def _check(process: subprocess.Popen[str], errors: str, name: str = "") -> None:
    if process.returncode:
        lines = errors.strip().splitlines() or ["nothing on stderr"]
        raise ResoluteError(f"{name}training ended with status {process.returncode}, expected 0: {lines[-1]}")


def train_in_turns(runs: Mapping[str, Sequence[str]]) -> None:
    """Run one training per list of words, alternating by epochs. Raises `ResoluteError` as `train` does."""
    turns, processes = deque(runs), dict[str, subprocess.Popen[str]]()
    try:
        while turns:
            name = turns.popleft()
            if name in processes:
                print(file=processes[name].stdin, flush=True)
            else:
                processes[name] = _start([str(__package__), "--take-turns", *runs[name]])
            if _is_turn_over(name, processes[name]):
                turns.append(name)
            else:
                _check(processes[name], processes[name].communicate()[1], f"{name}: ")
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()


def _is_turn_over(name: str, process: subprocess.Popen[str]) -> bool:
    """Wait for the end of an epoch (true) or of the training (false)."""
    assert process.stdout
    for line in process.stdout:
        if line.strip() == _TURN:
            return True
        show_progress(f"{name}: {line.strip()[:60]}")
    process.wait()
    return False


def _start(words: Sequence[str]) -> subprocess.Popen[str]:
    # why: use this checkout's code whatever the working directory is
    folders = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-m", *words], env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def take_turns(words: Sequence[str]) -> int:
    """Run `python -m train train` in this process; after each epoch it prints a marker and waits for a line."""
    from train import trainer
    from train.__main__ import main as train

    after_batch = trainer._Session._after

    def wait_after_epoch(session: Any, spec: Any) -> bool:
        continues = after_batch(session, spec)
        if spec.last and spec.split == "val" and continues and spec.index + 1 < session.plan.total_batches:
            print(_TURN, flush=True)
            sys.stdin.readline()
        return continues

    trainer._Session._after = wait_after_epoch  # type: ignore[assignment, method-assign]
    return train(["train", *words])


def with_seed(recipe: Path, seed: int, folder: Path) -> Path:
    """A copy of the recipe in `folder` with the same name and the same values but for the seed."""
    text = recipe.read_text(encoding="utf-8")
    first_table = re.search(r"(?m)^\s*\[", text)
    end = first_table.start() if first_table else len(text)
    path = folder / str(seed) / recipe.name
    path.parent.mkdir(parents=True, exist_ok=True)
    without_seed = re.sub(r"(?m)^\s*seed\s*=.*\n?", "", text[:end])
    path.write_text(f"seed = {seed}\n{without_seed}{text[end:]}", encoding="utf-8")
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
        "top1": last["top1"], "ema_top1": last["ema_top1"], "final_top1": best_score(last),
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
    changes = switch_costs(steps["stage"], steps["time_s"], steps["res"])
    costs = {cost["stage"]: cost for cost in changes if not cost["in_stage"]}
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
    turns: bool = False, run: Runner = train, expect: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """The results of every run, in the order of training. `settings`: arguments of every training, such as --shards.

    A run that an earlier call finished in `runs` under the same `expect` is reused; never with `turns`.
    """
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            copies = {f"{recipe.stem}-seed{seed}": with_seed(recipe, seed, Path(folder)) for recipe in recipes}
            words = {name: [*settings, "--recipe", str(copy), "--runs", str(runs), "--run", name]
                     for name, copy in copies.items()}  # fmt: skip
            if turns:
                train_in_turns(words)
            for name, copy in copies.items():
                key = {**(expect or {}), "recipe_hash": Recipe.load(copy).hash, "words": list(settings), "plan": plan}
                earlier = None if turns else _earlier(runs / name, key)
                try:
                    note = _NOT_TIMED if turns else earlier or _timed(words[name], Path(folder), plan=plan, run=run)
                except ResoluteError as error:
                    raise ResoluteError(f"{copy.stem}, seed {seed}: {error}") from None
                result = {"recipe": copy.stem, "seed": seed, **figures(runs / name / "run.jsonl")}
                result |= {"wall_s": note["wall_s"], "load_before": note["load_before"]}
                if turns:
                    result["elapsed_s"] = result["train_s"] + result["eval_s"]  # without the pauses
                result["plan"] = _against_plan(note["forecast"], result) if plan else None
                if earlier is None:
                    (runs / name / _NOTE).write_text(json.dumps(note | {"key": key}), encoding="utf-8")
                print(f"{copy.stem}, seed {seed}: top-1 {100 * result['final_top1']:.2f} % in {result['elapsed_s']:.1f}"
                      f" s{', of an earlier call' if earlier else ''}", flush=True)  # fmt: skip
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
        run(["plan", *words, "--json", str(file)])
        forecast = json.loads(file.read_text(encoding="utf-8"))
    load, began = os.getloadavg()[0], time.perf_counter()
    run(["train", *words])
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
        prog="python -m benchmarks.training",
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
    add("--turns", action="store_true", help="alternate the trainings of a seed by epochs, for exact ratios of epochs")
    add("--runs", type=Path, metavar="FOLDER", help="folder to keep the runs in (default: they are deleted)")
    add("--charts", type=Path, metavar="FILE", help="draw top-1 and loss against the epoch into an .html page")
    add("--out", type=Path, metavar="FILE", help="JSON to write (default: training-<name of the shards' folder>.json "
        "in benchmarks/results)")  # fmt: skip
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
        open_dataset(root, resolutions=recipe.resolutions, fold=recipe.data.fold, folds=recipe.data.folds)
    return open_dataset(root, fold=recipes[0].data.fold, folds=recipes[0].data.folds)


def _run(args: argparse.Namespace, run: Runner) -> None:
    recipes, seeds = _recipes(args.recipes), _seeds(args.seeds)
    if args.threads < 1:
        raise ResoluteError(f"--threads: got {args.threads}, expected at least 1; raise it")
    if args.turns and (args.plan or args.runs):
        raise ResoluteError("--turns: got --plan or --runs, expected neither; leave one out")
    device = find_device(args.device)
    name = args.shards.resolve().name
    out: Path = args.out or Path(f"benchmarks/results/training-{name}.json")
    check_writable(out)
    if args.charts:
        check_output(args.charts, setting="--charts", suffixes=(".html",))  # first, as it is drawn after hours
    shards = _open(args.shards, [Recipe.load(path) for path in recipes])
    result: dict[str, Any] = {
        **header(args, rounds=len(seeds), device=device),
        "settings": {"recipes": [path.stem for path in recipes], "seeds": seeds, "threads": args.threads,
                     "device": device.type, "plan": args.plan, "turns": args.turns},
        "shards": {"name": name, "hash": shards.hash, "train_samples": len(shards.splits["train"]),
                   "val_samples": len(shards.splits["val"]),
                   "page_cache": read_into_cache(shards)},
        "recipes": {path.stem: path.read_text(encoding="utf-8") for path in recipes},
        "targets": TARGETS,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        runs = args.runs or Path(folder)
        runs.mkdir(parents=True, exist_ok=True)
        result["runs"] = measure(
            recipes, seeds, runs=runs, plan=args.plan, turns=args.turns, run=run,
            settings=["--shards", str(args.shards), "--threads", str(args.threads), "--device", device.type],
            expect={"commit": result["commit"], "shards": shards.hash},
        )  # fmt: skip
    show_progress("")
    result["summary"] = summary(result["runs"])
    print(f"\n{tables(result['summary'])}", flush=True)
    write(out, result)
    if args.charts:
        draw(result["runs"], args.charts)
        print(f"written: {args.charts}")


def main(argv: Sequence[str] | None = None, *, run: Runner = train) -> int:
    """Run the command line; returns the exit status. Prints one line to stderr for a `ResoluteError`."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["--take-turns"]:  # `train_in_turns` starts the trainings with this flag
        return take_turns(words[1:])
    return command(_parser(), lambda args: _run(args, run), words)


if __name__ == "__main__":
    from pipeline.cli import run_main

    run_main(main)
