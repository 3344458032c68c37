"""Compares sampling by class and class weights on an artificially unbalanced set, by the accuracy of rare classes.

    python -m resolute.benchmarks.training.imbalance --photos imagenette224,more --val-list val.txt --work FOLDER

The number of training photos falls exponentially from class to class, from --largest to --largest / --ratio. The order
of the classes and the choice of photos are drawn with a fixed seed. The
validation photos are those of the list, equally many of each class. `prep` makes the set. Then each seed trains the
recipe as it is, and with `data.sampling` "sqrt", "balanced", and `loss.class_weights = "balanced"`, one after another;
differences are taken within a seed. Head and tail: the three largest and the three smallest classes.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import argparse
import csv
import shutil
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from resolute.benchmarks.cli import Parser, check_numbers, command, text_table
from resolute.benchmarks.record import check_writable, find_device, header, write
from resolute.benchmarks.training.__main__ import parse_seeds
from resolute.benchmarks.training.runs import Runner, Side, measure, train
from resolute.errors import ResoluteError
from resolute.machine import available_cpus
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.prep.sources.names import is_image
from resolute.train.recipe.schema import Recipe

__all__ = ["VARIANTS", "accuracies", "class_sizes", "main", "select", "summary"]

# lines that are added to the recipe: {section: line}
VARIANTS = {
    "uniform": ("", ""),
    "sqrt": ("data", 'sampling = "sqrt"'),
    "balanced": ("data", 'sampling = "balanced"'),
    "weights": ("loss", 'class_weights = "balanced"'),
}
_GROUP = 3  # classes in the head and in the tail
_RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "imbalance.toml"


def class_sizes(classes: Sequence[str], *, largest: int, ratio: float, seed: int) -> dict[str, int]:
    """Training photos of each class, in a random order of the classes: from `largest` to `largest` / `ratio`."""
    order = np.random.default_rng(seed).permutation(sorted(classes)).tolist()
    steps = max(1, len(order) - 1)
    return {name: max(1, round(largest * ratio ** (-k / steps))) for k, name in enumerate(order)}


def select(
    folders: Sequence[Path], val_list: Path, *, largest: int, ratio: float, seed: int
) -> tuple[dict[str, list[Path]], dict[str, int]]:
    """The photos of each class, {class: files}, those of the list included, and the number of training photos.

    Each of `folders` has one folder of photos per class. Raises `ResoluteError` if a class has too few.
    """
    held_out = set(val_list.read_text(encoding="utf-8").split("\n")) - {""}
    found: dict[str, dict[str, Path]] = defaultdict(dict)  # {class: {CLASS/NAME: file}}
    for folder in folders:
        for file in sorted(folder.glob("*/*")):
            if is_image(file.name):
                found[file.parent.name].setdefault(f"{file.parent.name}/{file.name}", file)
    missing = held_out - {name for files in found.values() for name in files}
    if missing or not found:
        raise ResoluteError(
            f"--val-list: got {sorted(missing)[0] if missing else 'no photos'}, expected photos of --photos; correct it"
        )
    if empty := found.keys() - {name.partition("/")[0] for name in held_out}:
        raise ResoluteError(f"--val-list: got no photo of {sorted(empty)[0]}, expected some of each class; add them")
    sizes = class_sizes([*found], largest=largest, ratio=ratio, seed=seed)
    chosen = {}
    for name, size in sizes.items():
        training = [key for key in found[name] if key not in held_out]
        if len(training) < size:
            raise ResoluteError(
                f"--largest: got {size} photos for {name}, expected at most {len(training)}; lower it"
            )
        kept = np.random.default_rng([seed, size]).permutation(training)[:size].tolist()
        chosen[name] = [found[name][key] for key in (*sorted(kept), *(key for key in found[name] if key in held_out))]
    return chosen, sizes


def make_set(args: argparse.Namespace) -> tuple[Path, dict[str, int]]:
    """Write the set with `prep`, unless an earlier call did; returns its folder and the training photos per class."""
    folders = [Path(word) for word in args.photos.split(",")]
    chosen, sizes = select(folders, args.val_list, largest=args.largest, ratio=args.ratio, seed=args.set_seed)
    photos, out = args.work / "photos", args.work / "shards"
    resolutions = ",".join(map(str, Recipe.load(args.recipe).resolutions))
    for name, files in chosen.items():
        (photos / name).mkdir(parents=True, exist_ok=True)
        for file in files:
            if not (photos / name / file.name).exists():
                shutil.copyfile(file, photos / name / file.name)
    got = {str(path.relative_to(photos)) for path in photos.glob("*/*")}
    if len(got) != sum(map(len, chosen.values())):
        raise ResoluteError(f"{photos}: got photos of other settings, expected its own; choose another --work")
    words = ["--src", photos, "--out", out, "--res", resolutions, "--val-list", args.val_list.resolve()]
    done = subprocess.run(
        [sys.executable, "-m", "resolute", "shards", *map(str, words)], cwd=_RECIPE.parents[2], capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["nothing on stderr"]
        raise ResoluteError(f"prep ended with status {done.returncode}, expected 0: {lines[-1]}")
    return out, sizes


def variant(text: str, section: str, line: str) -> str:
    """The recipe `text` with `line` in `section`."""
    if not section:
        return text
    head = f"[{section}]\n"
    return text.replace(head, f"{head}{line}\n", 1) if head in text else f"{text}\n{head}{line}\n"


def accuracies(predictions: Path, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Accuracy (0 to 1) of each class, and means over all classes, the head and the tail, from `train predict`'s file.
    """
    right, total = Counter[str](), Counter[str]()
    with predictions.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            total[row["label"]] += 1
            right[row["label"]] += row["label"] == row["class1"]
    each = {name: right[name] / total[name] for name in sorted(sizes, key=lambda name: -sizes[name])}
    values = list(each.values())
    return {"overall": sum(right.values()) / sum(total.values()), "head": statistics.mean(values[:_GROUP]),
            "middle": statistics.mean(values[_GROUP:-_GROUP] or values), "tail": statistics.mean(values[-_GROUP:]),
            "classes": each}  # fmt: skip


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """{variant: {overall, head, middle, tail: mean, deviation over the seeds, and mean difference to uniform}}."""
    by_seed = {(run["recipe"], run["seed"]): run for run in runs}
    out: dict[str, dict[str, dict[str, float]]] = {}
    for name in dict.fromkeys(run["recipe"] for run in runs):
        own = [run for run in runs if run["recipe"] == name]
        out[name] = {}
        for part in ("overall", "head", "middle", "tail"):
            values = [run[part] for run in own]
            gains = [run[part] - by_seed["uniform", run["seed"]][part] for run in own]
            out[name][part] = {
                "mean": statistics.mean(values), "deviation": statistics.stdev(values) if len(values) > 1 else 0.0,
                "gain": statistics.mean(gains), "gain_deviation": statistics.stdev(gains) if len(gains) > 1 else 0.0,
            }  # fmt: skip
    return out


def log_entry(result: Mapping[str, Any]) -> str:
    """The results as a table for benchmarks/results/LOG.md."""
    parts = ("overall", "head", "middle", "tail")
    lines = [f"| | {' | '.join(parts)} |", f"|---|{'---|' * len(parts)}"]
    for name, row in result["summary"].items():
        cells = [f"{100 * row[part]['mean']:.1f} ± {100 * row[part]['deviation']:.1f}" + (
            "" if name == "uniform" else f" ({100 * row[part]['gain']:+.1f} ± {100 * row[part]['gain_deviation']:.1f})"
        ) for part in parts]  # fmt: skip
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m resolute.benchmarks.training.imbalance",
        description="Train with uniform, sqrt and balanced sampling and with class weights on an unbalanced set.",
        epilog="Finished runs in --work are not repeated. Exit status: 0 done, 2 for a problem that the one line on "
        "stderr explains, 130 interrupted.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--photos", required=True, metavar="DIR,…", help="folders with one folder of photos per class")
    add("--val-list", type=Path, required=True, metavar="FILE", help="photos to validate on, CLASS/NAME per line")
    add("--work", type=Path, required=True, metavar="FOLDER", help="for the photos, the set and the runs; kept")
    add("--recipe", type=Path, default=_RECIPE, metavar="FILE", help="default: benchmarks/recipes/imbalance.toml")
    add("--largest", type=int, default=780, metavar="N", help="training photos of the largest class (%(default)s)")
    add("--ratio", type=float, default=50.0, metavar="X", help="largest / smallest class (default: %(default)s)")
    add("--set-seed", type=int, default=0, metavar="N", help="of the choice of photos (default: %(default)s)")
    add("--seeds", default="0,1,2", metavar="N,…", help="each trains all variants (default: %(default)s)")
    add("--only", default=",".join(VARIANTS), metavar="NAME,…", help="variants; uniform is always trained")
    add("--threads", type=int, default=available_cpus(), metavar="N", help="CPU threads per run (%(default)s)")
    add("--device", default="auto", metavar="auto|cpu|cuda", help="a GPU if there is one (default: %(default)s)")
    add("--out", type=Path, default=Path("benchmarks/results/imbalance.json"), metavar="FILE", help="%(default)s")
    return parser


def _run(args: argparse.Namespace, run: Runner) -> None:
    seeds, names = parse_seeds(args.seeds), args.only.split(",")
    check_numbers(args, largest=1, threads=1, set_seed=0)
    if args.ratio < 1:
        raise ResoluteError(f"--ratio: got {args.ratio:g}, expected at least 1; raise it")
    if unknown := [name for name in names if name not in VARIANTS]:
        raise ResoluteError(f"--only: got {unknown[0]}, expected some of {','.join(VARIANTS)}; correct it")
    device = find_device(args.device)
    check_writable(args.out)
    text = args.recipe.read_text(encoding="utf-8") if args.recipe.exists() else ""
    Recipe.load(args.recipe)
    result: dict[str, Any] = header(rounds=len(seeds), device=device)
    shards, sizes = make_set(args)
    sides, shards_hash = [], ShardSet.open(shards).hash
    (args.work / "recipes").mkdir(exist_ok=True)
    for name in dict.fromkeys(["uniform", *names]):
        recipe = args.work / "recipes" / f"{name}.toml"
        recipe.write_text(variant(text, *VARIANTS[name]), encoding="utf-8")
        sides.append(Side(name=name, recipe=recipe, shards=str(shards), shards_hash=shards_hash))
    runs = measure(
        sides, seeds, runs=args.work / "runs", run=run, expect={"commit": result["commit"]},
        settings=["--threads", str(args.threads), "--device", device.type],
    )
    # why not the better ones: they would be chosen by these photos
    weights = "ema" if Recipe.load(args.recipe).ema.on else "raw"
    for each in runs:
        folder = args.work / "runs" / f"{each['recipe']}-seed{each['seed']}"
        out = folder / "predictions.csv"
        run(["predict", str(folder / "last.pt"), "--src", str(shards), "--out", str(out), "--weights",
             weights, "--threads", str(args.threads), "--device", device.type])  # fmt: skip
        each |= accuracies(out, sizes)
    result |= {
        "settings": {"largest": args.largest, "ratio": args.ratio, "set_seed": args.set_seed, "seeds": seeds,
                     "threads": args.threads, "device": device.type},
        "sizes": sizes, "recipe": text, "runs": runs, "summary": summary(runs),
    }  # fmt: skip
    print("\n" + text_table("accuracy of each class, mean over the seeds, %", ["class", "photos", *result["summary"]], [
        [name, str(size), *(f"{100 * statistics.mean(r['classes'][name] for r in runs if r['recipe'] == each):.1f}"
                            for each in result["summary"])] for name, size in sizes.items()
    ]))  # fmt: skip
    print(f"\naccuracy, % (mean ± deviation over {len(seeds)} seeds; gain over uniform)\n{log_entry(result)}")
    write(args.out, result)


def main(argv: Sequence[str] | None = None, *, run: Runner = train) -> int:
    """Run the command line; returns the exit status. Prints one line to stderr for a `ResoluteError`."""
    return command(_parser(), lambda args: _run(args, run), argv)


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
