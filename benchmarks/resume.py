"""Checks that a run killed many times, with every feature enabled, ends like an uninterrupted run.

    python -m benchmarks.resume --shards shards --res 64,96

Enabled: torch.compile, bf16, EMA, unfreezing, Lookahead, accumulation, clipping, mixup and cutmix, RandAugment,
dropout, label smoothing. A single rank killed at random steps must give bit-identical losses and weights. Two ranks,
killed, then one, killed, then two again must give equal ones within rounding; that case is without bf16, dropout and
batch statistics, which depend on how samples are divided among the ranks. Each rank records the samples it trained on.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from pipeline.cli import guard_process

    guard_process()

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from pipeline.cli import Parser
from pipeline.dataset.shard_set import ShardSet
from pipeline.errors import ResoluteError
from pipeline.plan.plan import Plan
from train.logs.metrics import read_log
from train.recipe.schema import Recipe

from .shell import command, header, ready_to_write, write

__all__ = ["main"]

_RECIPE = """
seed = 7
[model]
name = "{model}"
kwargs = {{ drop_rate = {drop} }}
[optim]
name = "sgd"
lr = 0.05
clip_norm = 1.0
grad_accum_steps = 2
lookahead = 5
[loss]
label_smoothing = 0.1
[precision]
amp = "{amp}"
compile = true
[ema]
decay = 0.95
[augment]
policy = "randaugment"
mixup_alpha = 0.2
cutmix_alpha = 1.0
mixup_prob = 0.7
mixup_mode = "elem"
[eval]
batch_size = 64
[freeze]
mode = "unfreeze"
"""
_STAGE = """[[stages]]
res = {}
epochs = 2
batch_size = 64
fraction = {}
"""
_ONE = {"model": "test_resnet", "drop": 0.2, "amp": "bf16", "layer": "layer2"}
_MANY = {"model": "test_convnext", "drop": 0.0, "amp": "off", "layer": "stages.2"}
_EVERY = 4  # steps between checkpoints
_ATTEMPT_S = 1800  # timeout of an attempt


class Run:
    """A run of `recipe` over one or more attempts."""

    def __init__(self, folder: Path, shards: Path, recipe: Path) -> None:
        self.folder, self._recipe = folder / "run", recipe
        self._words = ["--shards", str(shards), "--recipe", str(recipe), "--runs", str(folder), "--run", "run",
                       "--device", "cpu", "--save-every-steps", str(_EVERY)]  # fmt: skip
        self._seen = folder / "seen"
        folder.mkdir(parents=True)

    def go(self, ranks: int, *, until: int | None = None) -> float:
        """Train on `ranks` ranks, killing all when one begins step `until`; returns the seconds taken.

        Raises `ResoluteError` if the training ends otherwise.
        """
        several = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", "--"]
        words = [sys.executable, "-m", *(several if ranks > 1 else []), __spec__.name, "--rank-of", str(self._seen),
                 *self._words]  # fmt: skip
        began = time.perf_counter()
        with tempfile.TemporaryFile("w+") as stderr:
            process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=stderr)
            while process.poll() is None and time.perf_counter() - began < _ATTEMPT_S:
                if until is not None and any(line[0] >= until for line in self._lines()):
                    self._kill(process)
                    for file in self._files():  # why: only lines of the next attempt count
                        file.rename(file.with_suffix(f".{len(list(file.parent.glob('*.old*')))}.old"))
                    return time.perf_counter() - began
                time.sleep(0.02)
            if process.poll() is None:
                self._kill(process)
            if process.wait() or until is not None:
                stderr.seek(0)
                last = (stderr.read().strip().splitlines() or ["nothing on stderr"])[-1]
                expected = "0" if until is None else f"to be killed at step {until}"
                raise ResoluteError(
                    f"{self._recipe.stem}: ended with status {process.returncode}, expected {expected}: {last}"
                )
        return time.perf_counter() - began

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        """Kill torchrun first, which would restart its ranks, then the ranks."""
        process.kill()
        process.wait()
        for pid in {line[2] for line in self._lines()} - {process.pid}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _files(self) -> list[Path]:
        return [file for file in self._seen.parent.glob(f"{self._seen.name}.*") if file.suffix != ".old"]

    def _lines(self, old: bool = False) -> Iterable[list[Any]]:
        files = self._seen.parent.glob(f"{self._seen.name}.*") if old else self._files()
        for file in files:
            yield from (json.loads(line) for line in file.read_text().splitlines(keepends=True) if line[-1] == "\n")

    def samples(self) -> dict[int, list[frozenset[int]]]:
        """Step -> the sample ids that each rank of each attempt trained on."""
        samples: dict[int, list[frozenset[int]]] = {}
        for step, ids, _ in self._lines(old=True):
            samples.setdefault(step, []).append(frozenset(ids))
        return samples

    def losses(self) -> dict[int, float]:
        return {r["step"]: r["loss"] for r in read_log(self.folder / "run.jsonl") if r["kind"] == "step"}

    def weights(self) -> dict[str, torch.Tensor]:
        state = torch.load(self.folder / "last.pt", weights_only=True)
        return {f"{part}.{name}": value for part in ("model", "ema") for name, value in state[part].items()}


def as_rank(seen: str, words: Sequence[str]) -> int:
    """Run `python -m train train` in this process, recording the samples of each step before it runs."""
    from train import loop
    from train.__main__ import main as train

    step, file = loop.Learner.train_step, Path(f"{seen}.{os.environ.get('RANK', '0')}")

    def noting(learner: loop.Learner, batch: Any) -> tuple[torch.Tensor, float]:
        with file.open("a", encoding="utf-8") as lines:
            print(json.dumps([batch.spec.step, batch.spec.ids.tolist(), os.getpid()]), file=lines)
        return step(learner, batch)

    loop.Learner.train_step = noting  # type: ignore[assignment, method-assign]
    return train(["train", *words])


def compared(run: Run, expected: Run, planned: dict[int, frozenset[int]]) -> dict[str, Any]:
    """Differences of a run from the uninterrupted one; 0.0 means bit-identical."""
    weights, expected_weights, losses, expected_losses = (
        run.weights(), expected.weights(), run.losses(), expected.losses()
    )  # fmt: skip
    seen = run.samples()
    return {
        "steps": len(losses), "same_steps": losses.keys() == expected_losses.keys(),
        "loss_apart_max_frac": max(abs(losses[step] - expected_losses[step]) / expected_losses[step]
                                   for step in losses.keys() & expected_losses),
        "weights_apart_max": max(float((weights[n].double() - value.double()).abs().max())
                                 for n, value in expected_weights.items()),
        "weights_max": max(float(value.double().abs().max()) for name, value in expected_weights.items()
                           if "track" not in name),
        # a step may have several attempts: each rank's samples are part of the planned batch, and all together equal it
        "planned_samples": seen.keys() == planned.keys() and all(
            frozenset().union(*parts) == planned[step] for step, parts in seen.items()),
    }  # fmt: skip


def _recipe(small: int, large: int, fraction: float, values: dict[str, Any]) -> str:
    first, second = (_STAGE.format(res, fraction) for res in (small, large))
    return f'{_RECIPE.format(**values)}{first}unfreeze_to = "{values["layer"]}"\n{second}'


def measure(shards: ShardSet, root: Path, folder: Path, *, small: int, large: int, steps: int, kills: int,
            seed: int) -> dict[str, Any]:  # fmt: skip
    """Both comparisons, each with about `steps` training steps in four epochs."""
    fraction = min(1.0, steps / 4 * 64 / len(shards.splits["train"]))
    results: dict[str, Any] = {}
    for name, values in (("one_rank", _ONE), ("two_one_two", _MANY)):
        recipe = folder / f"{name}.toml"
        recipe.write_text(_recipe(small, large, fraction, values), encoding="utf-8")
        parsed = Recipe.load(recipe)
        plan = Plan(shards, parsed.stages, seed=parsed.seed, eval_batch_size=64)
        planned = {spec.step: frozenset(spec.ids.tolist()) for spec in map(plan.batch, range(plan.total_batches))
                   if spec.split == "train"}  # fmt: skip
        change = next(s.first_step for s in plan.passes if (s.stage, s.split) == (1, "train"))
        uninterrupted, cut = Run(folder / name / "whole", root, recipe), Run(folder / name / "cut", root, recipe)
        took = [uninterrupted.go(1)]
        print(f"{name}: {len(planned)} steps, uninterrupted in {took[0]:.0f} s", flush=True)
        if name == "one_rank":
            drawn = random.Random(seed).sample([s for s in range(2, len(planned)) if abs(s - change) > 1], kills - 2)
            cues = [(1, step) for step in sorted([*drawn, change, change + 1])]
        else:
            cues = [(2, change // 2), (1, change + 2)]
        for ranks, step in cues:
            took.append(cut.go(ranks, until=step))
            print(f"{name}: {ranks} rank(s) killed at step {step}, after {took[-1]:.0f} s", flush=True)
        took.append(cut.go(1 if name == "one_rank" else 2))
        results[name] = {"recipe": recipe.read_text(encoding="utf-8"), "killed": cues, "took_s": took,
                         **compared(cut, uninterrupted, planned)}  # fmt: skip
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["--rank-of"]:  # `Run.go` starts the ranks with this flag
        return as_rank(words[1], words[2:])
    parser = Parser(prog="python -m benchmarks.resume", description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--shards", type=Path, required=True, metavar="DIR", help="folder written by `make shards`")
    add("--res", default="64,96", metavar="PX,PX", help="resolutions of the two stages (default: %(default)s)")
    add("--steps", type=int, default=48, metavar="N", help="approximate training steps (default: %(default)s)")
    add("--kills", type=int, default=6, metavar="N", help="of the single rank, two at the stage change (%(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the steps to kill at (default: %(default)s)")
    add("--out", type=Path, default=Path("benchmarks/results/resume.json"), metavar="FILE")
    return command(parser, _run, words)


def _run(args: argparse.Namespace) -> None:
    small, large = (int(word) for word in args.res.split(","))
    shards = ShardSet.open(args.shards, resolutions=(small, large))
    ready_to_write(args.out)
    head = header("resolute-resume-1")
    with tempfile.TemporaryDirectory() as folder:
        results = measure(shards, args.shards, Path(folder), small=small, large=large, steps=args.steps,
                          kills=args.kills, seed=args.seed)  # fmt: skip
    write(args.out, {**head, **results})
    for name, one in results.items():
        print(f"{name}: {len(one['killed'])} kills, {one['steps']} steps; planned samples: {one['planned_samples']}; "
              f"largest relative difference of losses {one['loss_apart_max_frac']:.1e}, largest difference of "
              f"weights {one['weights_apart_max']:.1e} (largest weight {one['weights_max']:.1f})")  # fmt: skip
    print(f"written: {args.out}")


if __name__ == "__main__":
    from pipeline.cli import run_main

    run_main(main)
