"""Measures accuracy and time of complete trainings of several sides, relative to the first one.

    python -m resolute.benchmarks.training --shards shards --recipes benchmarks/recipes/fixed224.toml,… --seeds 0,1
    python -m resolute.benchmarks.training --split FOLDER --report --tune-lr 0.5,1,2 --recipes a.toml,b.toml --runs RUNS

A side is a recipe, and a shard set of its own if it has one (`new.toml=other_shards`); all sets validate on the same
photos. Each seed trains all sides one after another (a b c, a b c, …). Accuracies are means ± standard errors over the
seeds, of the weights and of their average (EMA) separately. Times are medians: of the whole command, from its start to
its exit, and of its parts. Differences and ratios are taken within a seed, so that a temporarily slow machine affects
both runs. With --runs, the same command continues an unfinished table of the same commit.

With --split, each set is checked against a division of the photos (`benchmarks.training.split`). Runs validate on the
part tune, or on choose (--part choose) or report (--report). Each run is logged beside the
division; the result names the part and the number of runs before. With --tune-lr, each side is trained with the same
factors on its learning rate on the part tune first, and the table uses the best factor of each.

"Final epoch" is the time per image in the epochs at the last resolution, which should not depend on how a run got
there. With --plan, `resolute plan` forecasts every run.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import argparse
import dataclasses
import datetime
import math
import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from resolute.benchmarks.cli import Parser, command, parse_factors, parse_seeds, show_progress
from resolute.benchmarks.record import check_writable, find_device, header, read_into_cache, write
from resolute.errors import ResoluteError
from resolute.files import check_output
from resolute.machine import available_cpus
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.train.recipe.schema import Recipe

from .runs import Runner, Side, measure, train
from .split import PARTS, Parts, source_digests
from .summary import TARGETS, draw, summary, tables

__all__ = ["best_factors", "main"]

_RULE = "highest mean top-1 of the last epoch (EMA if the recipe has one); of equal ones the factor closest to 1"


def best_factors(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """{side: {"top1": mean by factor, "best": factor, "at_edge": no factor beyond it was tried}} of tuning runs.

    Each run's `recipe` is SIDE-lrFACTOR.
    """
    accuracies: dict[str, dict[float, list[float]]] = {}
    for run in runs:
        by_factor = accuracies.setdefault(run["recipe"].rpartition("-lr")[0], {})
        by_factor.setdefault(run["lr_factor"], []).append(run["final_top1"])
    results = {}
    for name, by_factor in accuracies.items():
        means = {factor: statistics.fmean(values) for factor, values in by_factor.items()}
        best = max(means, key=lambda factor: (means[factor], -abs(math.log(factor))))
        results[name] = {
            "top1": {f"{factor:g}": mean for factor, mean in means.items()},
            "best": best,
            "at_edge": best in (min(means), max(means)),
        }
    return results


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m resolute.benchmarks.training",
        description="Train several recipes with several seeds, and compare accuracy and time with the first recipe.",
        epilog="Takes as long as all trainings together. With --runs the runs are kept, and finished ones are not "
        "repeated after an interruption. Exit status: 0 done, 2 for a problem that the one line on stderr explains, "
        "130 interrupted.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--recipes",
        required=True,
        metavar="FILE[=DIR],…",
        help="TOML files, each with its own shard set if it has one; the first is the baseline",
    )
    add(
        "--shards",
        metavar="DIR",
        help="folder written by `make shards`; {part} in it stands for the part of --split "
        "(default with --split: FOLDER/{part})",
    )
    add("--seeds", default="0,1,2", metavar="N,…", help="each trains all sides (default: %(default)s)")
    add("--split", type=Path, metavar="FOLDER", help="division by `python -m resolute.benchmarks.training.split`")
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--part", choices=PARTS[1:-1], help="of --split, to validate on (default: tune)")
    part.add_argument("--report", action="store_true", help="validate on the reported part of --split")
    add(
        "--tune-lr",
        metavar="X,…",
        help="with --split: factors on optim.lr; trains each side with all of them on the "
        "part tune first, and uses its best one",
    )
    add("--tune-seeds", default="0", metavar="N,…", help="seeds of the runs of --tune-lr (default: %(default)s)")
    add(
        "--threads",
        type=int,
        default=available_cpus(),
        metavar="N",
        help="CPU threads per run (default: all, %(default)s)",
    )
    add("--device", default="auto", metavar="auto|cpu|cuda", help="a GPU if there is one (default: %(default)s)")
    add("--plan", action="store_true", help="forecast every run before it, and compare the forecast with the outcome")
    add("--runs", type=Path, metavar="FOLDER", help="folder to keep the runs in (default: they are deleted)")
    add(
        "--charts",
        type=Path,
        metavar="FILE",
        help="draw top-1 against time and loss against the epoch into an .html "
        "page; `python -m resolute.benchmarks.training.summary` draws it later",
    )
    add(
        "--out",
        type=Path,
        metavar="FILE",
        help="JSON to write (default: training-<name of the shards' folder>.json in benchmarks/results)",
    )
    return parser


def _sides(args: argparse.Namespace, part: str) -> list[Side]:
    """The sides of --recipes, on their sets of `part` ("" without --split)."""
    sides = []
    for word in args.recipes.split(","):
        recipe, _, own = word.strip().partition("=")
        root = own or args.shards or (f"{args.split}/{{part}}" if part else "")
        if not root or ("{part}" in root and not part):
            raise ResoluteError(f"--shards: got {root or 'none'} for {recipe}, expected a set, or --split; add it")
        root = root.replace("{part}", part)
        name = Path(recipe).stem + (f"-{Path(root).resolve().name}" if own else "")
        sides.append(Side(name=name, recipe=Path(recipe), shards=root))
    if len({side.name for side in sides}) < len(sides):
        raise ResoluteError(f"--recipes: got {args.recipes}, expected files of different names; rename one")
    return sides


def _opened(args: argparse.Namespace, parts: Parts | None, part: str) -> tuple[list[Side], dict[str, ShardSet]]:
    """The sides, with the hashes of their sets, and the sets by root.

    Raises `ResoluteError` early if a resolution or fold of a recipe is missing, or a set holds photos that it must not.
    """
    sides, sets, folds_before = [], {}, None
    for side in _sides(args, part):
        recipe = Recipe.load(side.recipe)
        fold, folds = recipe.data.fold, recipe.data.folds
        folds_before = folds_before or (fold, folds)
        ShardSet.open(side.shards, resolutions=recipe.resolutions, fold=fold, folds=folds)
        if (fold, folds) != folds_before:
            raise ResoluteError(
                f"{side.recipe}: got data.fold = {fold} of {folds}, expected {folds_before[0]} of "
                f"{folds_before[1]} as in the first recipe; use the same"
            )
        if parts and folds:
            raise ResoluteError(f"{side.recipe}: got data.folds = {folds} with --split, expected none; leave one out")
        if side.shards not in sets:
            sets[side.shards] = opened = ShardSet.open(side.shards, fold=fold, folds=folds)
            if opened.target.kind != "class":
                raise ResoluteError(
                    f"{side.shards}: got samples with {opened.target.kind}, expected one class each; name another set"
                )
            if parts:
                parts.check(side.shards, part)
        sides.append(dataclasses.replace(side, shards_hash=sets[side.shards].hash))
    if len(sets) > 1 and not parts:
        photos = {root: (each.classes, frozenset(source_digests(root, "val").tolist())) for root, each in sets.items()}
        for root, own in photos.items():
            if own != photos[sides[0].shards]:
                raise ResoluteError(
                    f"{root}: got classes or validation photos other than those of {sides[0].shards}, "
                    "expected the same; make it from the same lists"
                )
    return sides, sets


def _logged(parts: Parts, part: str, commit: str | None, run: dict[str, Any]) -> None:
    """Append a run to the division's log."""
    names = ("recipe", "recipe_hash", "seed", "lr_factor", "top1", "ema_top1", "final_top1", "wall_s", "elapsed_s")
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    parts.log(part=part, **{name: run[name] for name in names}, commit=commit, date=today)


def _run(args: argparse.Namespace, run: Runner) -> None:
    seeds, tune_seeds = parse_seeds(args.seeds), parse_seeds(args.tune_seeds, "--tune-seeds")
    factors = parse_factors(args.tune_lr, "--tune-lr") if args.tune_lr else []
    if args.threads < 1:
        raise ResoluteError(f"--threads: got {args.threads}, expected at least 1; raise it")
    if not args.split and (args.part or args.report or args.tune_lr):
        raise ResoluteError("--part, --report, --tune-lr: got one of them without --split, expected it; add --split")
    if args.tune_seeds != "0" and not factors:
        raise ResoluteError(f"--tune-seeds: got {args.tune_seeds} without --tune-lr, expected both; add --tune-lr")
    parts = Parts.open(args.split) if args.split else None
    part = ("report" if args.report else args.part or "tune") if parts else ""
    device = find_device(args.device)
    sides, sets = _opened(args, parts, part)
    tuned_sides, tuning_sets = _opened(args, parts, "tune") if factors else ([], {})
    out: Path = args.out or Path(f"benchmarks/results/training-{Path(sides[0].shards).resolve().name}.json")
    check_writable(out)
    if args.charts:
        check_output(args.charts, setting="--charts", suffixes=(".html",))  # first, as it is drawn after hours
    result: dict[str, Any] = {
        **header(rounds=len(seeds), device=device),
        "settings": {
            "recipes": [side.name for side in sides],
            "seeds": seeds,
            "threads": args.threads,
            "device": device.type,
            "plan": args.plan,
        },
        "shards": {side.name: _about(side, sets[side.shards]) for side in sides},
        "recipes": {side.name: side.recipe.read_text(encoding="utf-8") for side in sides},
        "targets": TARGETS,
    }
    for each in tuning_sets.values():
        read_into_cache(each)
    with tempfile.TemporaryDirectory() as folder:
        root: Path = args.runs or Path(folder)
        root.mkdir(parents=True, exist_ok=True)

        def trained(sides: Sequence[Side], seeds: Sequence[int], part: str, **how: Any) -> list[dict[str, Any]]:
            on_run: Callable[[dict[str, Any]], None] = lambda result: None  # noqa: E731
            return measure(
                sides,
                seeds,
                runs=root / part,
                run=run,
                **how,
                expect={"commit": result["commit"], "cpu": result["machine"]["cpu"]},
                settings=["--threads", str(args.threads), "--device", device.type],
                on_run=partial(_logged, parts, part, result["commit"]) if parts else on_run,
            )

        if factors:
            candidates = [
                dataclasses.replace(side, name=f"{side.name}-lr{factor:g}", lr_factor=factor)
                for factor in factors
                for side in tuned_sides
            ]
            runs = trained(candidates, tune_seeds, "tune", may_diverge=True)
            best = dict(zip((side.name for side in sides), best_factors(runs).values(), strict=True))
            result["tuning"] = {
                "rule": _RULE,
                "factors": factors,
                "seeds": tune_seeds,
                "sides": best,
                "runs": runs,
                "runs_per_side": len(factors) * len(tune_seeds),
            }
            sides = [dataclasses.replace(side, lr_factor=best[side.name]["best"]) for side in sides]
        if parts:
            result["split"] = {"part": part, "salt": parts.salt, "shares": parts.shares, "runs_before": parts.runs()}
        result["runs"] = trained(sides, seeds, part, plan=args.plan)
    show_progress("")
    result["summary"] = summary(result["runs"])
    write(out, result)
    print(f"\n{tables(result)}", flush=True)
    if args.charts:
        draw(result, args.charts)


def _about(side: Side, shards: ShardSet) -> dict[str, Any]:
    """The set of a side; reads it into the page cache if it fits."""
    return {
        "name": Path(side.shards).resolve().name,
        "hash": shards.hash,
        "page_cache": read_into_cache(shards),
        "train_samples": len(shards.splits["train"]),
        "val_samples": len(shards.splits["val"]),
    }


def main(argv: Sequence[str] | None = None, *, run: Runner = train) -> int:
    """Run the command line; returns the exit status. Prints one line to stderr for a `ResoluteError`."""
    return command(_parser(), lambda args: _run(args, run), argv)


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
