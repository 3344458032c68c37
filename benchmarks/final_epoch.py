"""Epoch time at the last resolution: a progressive run against a run at that resolution throughout. Target: equal.

    python -m benchmarks.final_epoch --shards shards

A regression once made these epochs take 2.8 instead of 1.8 min. Two trainings alternate by epochs, each including its
validation: one stays at the last resolution, the other first trains an epoch at each smaller one. While one works, the
other is paused, so that a temporarily slow machine affects both, and the ratio shows only the effect of the changes.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from pipeline.cli import guard_process

    guard_process()

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.cli import Parser
from pipeline.cpu_count import available_cpus
from pipeline.dataset.shard_set import ShardSet
from pipeline.errors import ResoluteError
from pipeline.plan.plan import BatchSpec
from train import trainer as runs
from train.logs.run_log import RunLogReader

from .machine import find_device, read_into_cache
from .shell import command, header, ready_to_write, show_progress, write
from .table import repeated, spread, text_table

__all__ = ["main", "paired", "take_turns"]

_RECIPE = Path(__file__).parent / "recipes" / "fixed224.toml"
_TURN = "turn is over"
_COLUMNS = ("train_s", "wait_s", "eval_s")


def take_turns(words: Sequence[str]) -> int:
    """Run `python -m train train` in this process; after each epoch it prints a marker and waits for a line."""
    from train.__main__ import main as train

    after = runs._Session._after

    def waiting(session: Any, spec: BatchSpec) -> bool:
        continues = after(session, spec)
        if spec.last and spec.split == "val" and continues and spec.index + 1 < session.plan.total_batches:
            print(_TURN, flush=True)
            sys.stdin.readline()
        return continues

    runs._Session._after = waiting  # type: ignore[assignment, method-assign]
    return train(["train", *words])


def recipe(resolutions: Sequence[int], epochs: Sequence[int], *, model: str, batch_size: int) -> str:
    """The text of benchmarks/recipes/fixed224.toml with these stages and this model."""
    head = _RECIPE.read_text(encoding="utf-8").partition("[[stages]]")[0].replace('"test_resnet"', f'"{model}"')
    stages = zip(resolutions, epochs, strict=True)
    return head + "".join(f"[[stages]]\nres = {r}\nepochs = {n}\nbatch_size = {batch_size}\n" for r, n in stages)


def paired(stepped: Sequence[dict[str, Any]], fixed: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Time ratios of epochs at the last resolution, stepped / fixed, each pair measured one after the other."""
    pairs = [(a, b) for a, b in zip(stepped, fixed, strict=True) if a["res"] == b["res"]]
    seconds = {
        name: {"stepped": [a[name] for a, _ in pairs], "fixed": [b[name] for _, b in pairs]} for name in _COLUMNS
    }
    ratios = [a / b for a, b in zip(*seconds["train_s"].values(), strict=True)]
    return {"pairs": len(pairs), "ratio": repeated(ratios), "seconds": seconds}


def measure(folder: Path, recipes: dict[str, str], words: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """The epoch records of each run. Raises `ResoluteError` if a run fails."""
    turns, processes = deque(recipes), dict[str, subprocess.Popen[str]]()
    try:
        while turns:
            name = turns.popleft()
            if name in processes:
                print(file=processes[name].stdin, flush=True)
            else:
                (folder / f"{name}.toml").write_text(recipes[name], encoding="utf-8")
                own = ["--recipe", str(folder / f"{name}.toml"), "--runs", str(folder), "--run", name]
                processes[name] = subprocess.Popen(
                    [sys.executable, "-m", __spec__.name, "--take-turns", *words, *own],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                )  # fmt: skip
            if _wait_for_turn(name, processes[name]):
                turns.append(name)
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()
    logs = {name: RunLogReader(folder / name / "run.jsonl") for name in recipes}
    for log in logs.values():
        log.read()
    return {name: log.epochs for name, log in logs.items()}


def _wait_for_turn(name: str, process: subprocess.Popen[str]) -> bool:
    """Wait for the end of the process's turn; returns whether it has another one."""
    assert process.stdout
    assert process.stderr
    for line in process.stdout:
        if line.strip() == _TURN:
            return True
        show_progress(f"{name}: {line.strip()[:60]}")
    if process.wait():
        last = (process.stderr.read().strip().splitlines() or ["nothing on stderr"])[-1]
        raise ResoluteError(f"{name}: ended with status {process.returncode}, expected 0: {last}")
    return False


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["--take-turns"]:  # `measure` starts the trainings with this flag
        return take_turns(words[1:])
    parser = Parser(prog="python -m benchmarks.final_epoch", description=(__doc__ or "").splitlines()[0],
                    allow_abbrev=False)  # fmt: skip
    add = parser.add_argument
    add("--shards", type=Path, required=True, metavar="DIR", help="folder written by `make shards`")
    add("--res", default="128,160,224", metavar="PX,…", help="resolutions; compared at the last (default: %(default)s)")
    add("--epochs", type=int, default=10, metavar="N", help="epochs at the last resolution (default: %(default)s)")
    add("--model", default="test_resnet", metavar="NAME", help="timm model (default: %(default)s)")
    add("--batch-size", type=int, default=64, metavar="N", help="default: %(default)s")
    add("--threads", type=int, default=available_cpus(), metavar="N",
        help="CPU threads per run (default: all, %(default)s)")  # fmt: skip
    add("--device", default="auto", metavar="auto|cpu|cuda", help="a GPU if there is one (default: %(default)s)")
    add("--out", type=Path, default=Path("benchmarks/results/final-epoch.json"), metavar="FILE")
    return command(parser, _run, words)


def _run(args: argparse.Namespace) -> None:
    device = find_device(args.device)
    words = args.res.split(",")
    if args.epochs < 1 or len(words) < 2 or not all(word.isdigit() for word in words):
        raise ResoluteError(f"--epochs, --res: got {args.epochs} and {args.res}, expected at least 1, and at least 2 "
                            "resolutions as 128,160,224; correct them")  # fmt: skip
    *smaller, last = map(int, words)
    shards = ShardSet.open(args.shards, resolutions=(*smaller, last))
    ready_to_write(args.out)
    head = header("resolute-final-epoch-1", device=device)
    read_into_cache(shards)
    of = {"model": args.model, "batch_size": args.batch_size}
    recipes = {
        "stepped": recipe([*smaller, last], [*([1] * len(smaller)), args.epochs], **of),
        "fixed": recipe([last], [len(smaller) + args.epochs], **of),
    }
    with tempfile.TemporaryDirectory() as folder:
        results = paired(**measure(Path(folder), recipes, [
            "--shards", str(args.shards), "--device", device.type, "--threads", str(args.threads)
        ]))  # fmt: skip
    show_progress("")
    settings = {**of, "epochs": args.epochs, "threads": args.threads, "resolutions": [*smaller, last]}
    about = {"name": args.shards.resolve().name, "hash": shards.hash, "train_samples": len(shards.splits["train"])}
    write(args.out, {**head, "settings": settings, "shards": about, "recipes": recipes, **results})
    rows = [[name, *(f"{statistics.median(results['seconds'][column][name]):.2f}" for column in _COLUMNS)]
            for name in recipes]  # fmt: skip
    print(text_table(f"an epoch at {last} px, {results['pairs']} pairs in turns, medians",
                     ["run", "training s", "of it waiting s", "validation s"], rows))  # fmt: skip
    before = ", ".join(map(str, smaller))
    print(f"  after {before} px it takes {spread(results['ratio'], 3)} of its time in a run at {last} px all along "
          f"(asked: at most 1.01)\nwritten: {args.out}")  # fmt: skip


if __name__ == "__main__":
    from pipeline.cli import run_main

    run_main(main)
