"""Complete trainings as processes, one after another, and the figures of their logs.

A side is a recipe and its shard set. `measure` trains each side with each seed, in rounds (a b c, a b c, …), each as
`resolute train` in its own process; runs that an earlier call finished are reused.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import resolute
from resolute.errors import ResoluteError
from resolute.files import atomic_write
from resolute.train.logs.run_log import RunLogReader, noise_s, switch_costs
from resolute.train.recipe.schema import Recipe

__all__ = ["Runner", "Side", "changed", "figures", "measure", "train"]

_EPOCH = (
    "epoch",
    "stage",
    "res",
    "eval_res",
    "unix_s",
    "samples",
    "train_s",
    "wait_s",
    "eval_s",
    "images_per_s",
    "lr",
    "loss",
    "eval_loss",
    "top1",
    "ema_top1",
)
_NOTE = "compare.json"  # in the folder of a run: the benchmark's own record, with `wall_s` once it is finished

Runner = Callable[[Sequence[str]], None]  # takes the arguments of `resolute`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """A row of the table: a recipe, whose `optim.lr` is multiplied by `lr_factor`, and its shard set, with its hash."""

    name: str
    recipe: Path
    shards: str
    shards_hash: str = ""
    lr_factor: float = 1.0


def train(words: Sequence[str]) -> None:
    """Run `resolute` in its own process. Raises `ResoluteError` with its last line on stderr if it fails."""
    # why: use this checkout's code whatever the working directory is
    folders = [str(Path(resolute.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    # after a Ctrl-C that only this process gets, `subprocess.run` kills the training, which would else go on unseen
    done = subprocess.run(
        [sys.executable, "-m", "resolute", *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["nothing on stderr"]
        raise ResoluteError(f"training ended with status {done.returncode}, expected 0: {lines[-1]}")


def changed(recipe: Path, path: Path, *, seed: int, lr_factor: float = 1.0) -> Path:
    """Write a copy of the recipe to `path`, with the same values but for the seed, and `optim.lr` x `lr_factor`."""
    text, original = recipe.read_text(encoding="utf-8"), Recipe.load(recipe)
    first_table = re.search(r"(?m)^\s*\[", text)
    end = first_table.start() if first_table else len(text)
    without_seed = re.sub(r"(?m)^\s*seed\s*=.*\n?", "", text[:end])
    text = f"seed = {seed}\n{without_seed}{text[end:]}"
    optim = dataclasses.replace(original.optim, lr=original.optim.lr * lr_factor)
    if lr_factor != 1:
        before, header, after = re.split(r"(?m)(^\s*\[optim\].*\n)", f"{text}\n[optim]\n", maxsplit=1)
        own = re.match(r"(?s).*?(?=^\s*\[|\Z)", after, re.MULTILINE)
        assert own
        without_lr = re.sub(r"(?m)^\s*lr\s*=.*\n?", "", own[0])
        rest = after[own.end() :].removesuffix("\n[optim]\n")
        text = f"{before}{header}lr = {optim.lr!r}\n{without_lr}{rest}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    if Recipe.load(path) != dataclasses.replace(original, name=path.stem, seed=seed, optim=optim):
        raise ResoluteError(
            f"{recipe}: its seed or learning rate cannot be changed, expected lines `seed = 0` at the top and `lr = …` "
            "in [optim]; add them"
        )
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
        "elapsed_s": ends[-1]["elapsed_s"],
        "train_s": train_s,
        "eval_s": sum(epoch["eval_s"] for epoch in epochs),
        "wait_frac": sum(epoch["wait_s"] for epoch in epochs) / train_s,
        "top1": last["top1"],
        "ema_top1": last["ema_top1"],
        # why not the better of both: which weights count is decided before the run
        "final_top1": last["top1"] if last["ema_top1"] is None else last["ema_top1"],
        "best_top1": ends[-1]["best_top1"],
        "stopped_early": ends[-1].get("stopped_early", ""),
        "final_res": last["res"],
        "final_image_s": float(np.median([epoch["train_s"] / epoch["samples"] for epoch in final])),
        "final_step_image_s": float(np.median(steps["time_s"][at_final] / steps["samples"][at_final])),
        "stages": _stages(log),
        "epochs": [{name: epoch.get(name) for name in _EPOCH} for epoch in epochs],
    }


def _stages(log: RunLogReader) -> list[dict[str, Any]]:
    """Medians of each stage's steps, and the extra cost of its first steps; None for the first stage.

    `ramp_changes`: the costs of changes of resolution inside the stage, see `switch_costs`.
    """
    steps = log.steps
    changes = switch_costs(steps["stage"], steps["time_s"], steps["res"])
    costs = {cost["stage"]: cost for cost in changes if not cost["in_stage"]}
    stages = []
    for stage in map(int, np.unique(steps["stage"])):
        own = steps["stage"] == stage
        cost = costs.get(stage, {})
        stages.append(
            {
                "stage": stage,
                "res": int(steps["res"][own][0]),
                "batch_size": int(steps["samples"][own].max()),
                "steps": int(own.sum()),
                "step_s": float(np.median(steps["time_s"][own])),
                "image_s": float(np.median(steps["time_s"][own] / steps["samples"][own])),
                "switch_cost_s": cost.get("cost_s"),
                "switch_noise_s": noise_s(cost) if cost else None,
                "switch_slowest_ratio": cost.get("slowest_ratio"),
                "ramp_changes": [change for change in changes if change["stage"] == stage and change["in_stage"]],
            }
        )
    return stages


def measure(
    sides: Sequence[Side],
    seeds: Sequence[int],
    *,
    runs: Path,
    settings: Sequence[str],
    plan: bool = False,
    may_diverge: bool = False,
    run: Runner = train,
    expect: Mapping[str, Any] | None = None,
    on_run: Callable[[dict[str, Any]], None] = lambda result: None,
) -> list[dict[str, Any]]:
    """The results of every run, in the order of training. `settings`: arguments of every training, such as --threads.

    A run that an earlier call finished in `runs` under the same `expect` is reused, and one that it did not finish is
    repeated. With `may_diverge`, a run whose loss is not finite has an accuracy of 0 instead of raising
    `ResoluteError`. `on_run` is called with the result of each new run that did not diverge.
    """
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            copies = {
                f"{side.name}-seed{seed}": (
                    side,
                    changed(
                        side.recipe, Path(folder) / str(seed) / f"{side.name}.toml", seed=seed, lr_factor=side.lr_factor
                    ),
                )
                for side in sides
            }
            for name, (side, copy) in copies.items():
                key = {
                    **(expect or {}),
                    "shards": side.shards_hash,
                    "recipe_hash": Recipe.load(copy).hash,
                    "words": list(settings),
                    "plan": plan,
                }
                words = ["--shards", side.shards, *settings, "--recipe", str(copy), "--runs", str(runs), "--run", name]
                earlier = _earlier(runs / name, key)
                try:
                    note = earlier or _timed(words, runs / name, key, plan=plan, run=run)
                except ResoluteError as error:
                    if may_diverge and (runs / name / "not_finite.json").exists():
                        print(f"{side.name}, seed {seed}: diverged, counts as top-1 0 %", flush=True)
                        results.append(
                            {
                                "recipe": side.name,
                                "seed": seed,
                                "lr_factor": side.lr_factor,
                                "final_top1": 0.0,
                                "diverged": True,
                            }
                        )
                        continue
                    raise ResoluteError(f"{side.name}, seed {seed}: {error}") from None
                result = {
                    "recipe": side.name,
                    "seed": seed,
                    "lr_factor": side.lr_factor,
                    **figures(runs / name / "run.jsonl"),
                }
                result |= {"wall_s": note["wall_s"], "load_before": note["load_before"]}
                result["curve"] = _curve(result["epochs"], note["began_unix_s"])
                result["plan"] = _against_plan(note["forecast"], result) if plan else None
                if earlier is None:
                    on_run(result)
                    atomic_write(runs / name / _NOTE, json.dumps(note | {"key": key}))
                print(
                    f"{side.name}, seed {seed}: top-1 {100 * result['final_top1']:.2f} % in {result['elapsed_s']:.1f}"
                    f" s{', of an earlier call' if earlier else ''}",
                    flush=True,
                )
                results.append(result)
    return results


def _curve(epochs: Sequence[dict[str, Any]], began_unix_s: float) -> list[dict[str, Any]]:
    """Accuracy at each validation against the seconds since the command's start."""
    return [
        {
            "wall_s": epoch["unix_s"] - began_unix_s,
            "res": epoch["eval_res"],
            "top1": epoch["top1"],
            "ema_top1": epoch["ema_top1"],
        }
        for epoch in epochs
        if epoch["top1"] is not None
    ]


def _earlier(folder: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    """The record of a run that an earlier call finished; else None, and the folder of an unfinished run is removed."""
    if not folder.exists():
        return None
    try:
        note: dict[str, Any] = json.loads((folder / _NOTE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        note = {"key": None}
    if note["key"] != key:
        raise ResoluteError(
            f"{folder}: a run that this benchmark did not start, or with other code, data or settings, expected "
            "its own; remove it or choose another --runs"
        )
    if "wall_s" in note:
        return note
    shutil.rmtree(folder)  # why not resumed: the time counts from the command's start to its end
    return None


def _timed(words: Sequence[str], folder: Path, key: dict[str, Any], *, plan: bool, run: Runner) -> dict[str, Any]:
    """Train into `folder`, with a forecast first if `plan`. Raises `ResoluteError` if either fails."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / _NOTE, json.dumps({"key": key}))
    forecast = None
    if plan:
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "plan.json"
            run(["plan", *words, "--json", str(file)])
            forecast = json.loads(file.read_text(encoding="utf-8"))
    load, began_unix_s, began = os.getloadavg()[0], time.time(), time.perf_counter()
    run(["train", *words])
    return {
        "wall_s": time.perf_counter() - began,
        "began_unix_s": began_unix_s,
        "load_before": round(load, 2),
        "forecast": forecast,
    }


def _against_plan(forecast: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Predicted / measured time: of training and validation by the run's clock, and of the complete command."""
    predicted_s = forecast["parts_s"]["training"] + forecast["parts_s"]["validation"]
    return {
        "predicted_s": predicted_s,
        "ratio": predicted_s / result["elapsed_s"],
        "training_ratio": forecast["parts_s"]["training"] / result["train_s"],
        "total_s": forecast["total_s"],
        "total_ratio": forecast["total_s"] / result["wall_s"],
        "forecast": forecast,
    }
