"""How does a run start, go on after a cut, and end? One folder a run: log, checkpoints, curves."""

from __future__ import annotations

import dataclasses
import itertools
import json
import platform
import signal
import time
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import timm
import torch
from tqdm import tqdm

from pipeline.errors import ResoluteError
from pipeline.loader import Loader
from pipeline.memory import keep_freed_memory
from pipeline.order import Order
from pipeline.plan import BatchSpec, Plan
from pipeline.probe import choose_order
from pipeline.recipe import Recipe
from pipeline.shards import ShardSet

from . import checkpoint
from .calibrate import Decode, choose_decode
from .loop import Learner, run_batches
from .meters import Meter, RunLog
from .report import EPOCH_HEADER, draw_curves, epoch_line, summary
from .warmup import rehearsal, shapes, warm_up

__all__ = ["Options", "run"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What does not change results: paths, device, threads, how often to save."""

    shards: str | Path  # a folder, or a URL that is read through a cache
    recipe: Path
    folder: Path
    device: str = "auto"
    threads: int = 2
    decode: Literal["auto", "cpu", "gpu"] = "auto"  # on a GPU: where JPEGs are decoded; auto times real steps
    save_every_s: float = 300.0
    save_every_steps: int = 0  # 0 = by time alone


def run(options: Options) -> int:
    """Train, or go on training, until the recipe is done. Returns 0, or 128 + the signal that stopped the run."""
    recipe = Recipe.load(options.recipe)
    device = _device(options.device)
    shards = ShardSet.open(options.shards, resolutions=recipe.resolutions, fold=recipe.data.fold)
    plan = Plan(
        shards, recipe.stages, seed=recipe.seed, order=_order(recipe, shards, options.folder),
        fraction_mode=recipe.data.fraction_mode,
        eval_batch_size=recipe.eval.batch_size, eval_every_epochs=recipe.eval.every_epochs,
        eval_crop_frac=recipe.eval.crop_frac,
    )  # fmt: skip
    if device.type == "cpu":
        keep_freed_memory()
        torch.set_num_threads(options.threads)
    else:
        torch.backends.cudnn.benchmark = True  # each shape is tuned once, in the warm-up
    learner = Learner(recipe, classes=len(shards.classes), total_steps=plan.total_steps, device=device)
    session = _Session(options, recipe, shards, plan, learner)
    try:
        return session.go()
    finally:
        session.log.close()


def _order(recipe: Recipe, shards: ShardSet, folder: Path) -> Order:
    """The order to read in. "auto" is measured once: a run that goes on keeps what its checkpoint says."""
    if recipe.data.order != "auto":
        return recipe.data.order
    kept = checkpoint.peek(folder / "last.pt", "order")
    if kept is not None:
        return typing.cast(Order, kept)
    found = choose_order(shards, recipe.stages[0].res)
    print(found)
    return found.order


def _device(wanted: str) -> torch.device:
    if wanted == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        print("no GPU found: training on the CPU")
        return torch.device("cpu")
    kind, _, number = wanted.partition(":")
    if kind not in ("cpu", "cuda") or not (number or "0").isdigit() or (kind == "cpu" and number):
        raise ResoluteError(f"--device: got {wanted}, expected auto, cpu, cuda or cuda:N; choose one")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise ResoluteError(
            f"--device {wanted}: got {torch.cuda.device_count()} CUDA devices, expected that one; use --device cpu"
        )
    return torch.device(wanted)


class _Session:
    """One process's share of a run: opens its folder, resumes, saves, prints."""

    def __init__(self, options: Options, recipe: Recipe, shards: ShardSet, plan: Plan, learner: Learner) -> None:
        self.options, self.recipe, self.plan, self.learner = options, recipe, plan, learner
        self.last, self.best = options.folder / "last.pt", options.folder / "best.pt"
        values = dataclasses.asdict(recipe)
        del values["name"]
        self.identity = {"recipe": json.loads(json.dumps(values)), "shards": shards.hash}
        state = None
        try:
            options.folder.mkdir(parents=True, exist_ok=True)
            if self.last.exists():
                state = checkpoint.load(self.last, expect=self.identity)
            elif any(options.folder.glob("*.pt")):
                raise ResoluteError(f"{self.last}: not found beside other checkpoints, expected it; use another RUN")
            self.log = RunLog(options.folder / "run.jsonl", keep_bytes=state["meter"]["log_bytes"] if state else 0)
        except OSError as error:
            raise ResoluteError(
                f"{options.folder}: {error.strerror}, expected a folder to write; choose another RUN"
            ) from None
        self.meter = Meter(self.log, device=learner.device)
        self.position, self.best_top1 = 0, -1.0
        if state:
            learner.load_state_dict(state)
            self.meter.load_state_dict(state["meter"])
            self.position, self.best_top1 = state["position"], state["best_top1"]
        else:
            self._write_start(shards)
        self.saved_at, self.saved_step = time.monotonic(), 0
        self.stopped_by = 0
        self.bar: tqdm[Any] | None = None
        self.skipped: Mapping[tuple[str, int, int], str] = {}  # the loader's: samples that others stand in for
        self.told = 0

    def go(self) -> int:
        plan, folder = self.plan, self.options.folder
        if self.position >= plan.total_batches:
            print(f"{folder}: this run is finished; RUN=another starts a new one")
            print(summary(self.log.path, folder))
            return 0
        began = time.perf_counter()
        done = f"resuming at batch {self.position} of {plan.total_batches}" if self.position else "starting"
        print(f"{folder}: {done} ({self.recipe.name} {self.recipe.hash}, {self.learner.device})", flush=True)
        before = {which: signal.signal(which, self._stop) for which in (signal.SIGINT, signal.SIGTERM)}
        try:
            with self._loader(self._decode(), start=self.position) as loader:
                self._warm_up()
                print(f"warmed up every shape in {time.perf_counter() - began:.1f} s\n{EPOCH_HEADER}", flush=True)
                self.skipped = loader.skipped
                finished = run_batches(loader, self.learner, self.meter, self._after)
        finally:
            for which, handler in before.items():
                signal.signal(which, handler)
            if self.bar is not None:
                self.bar.close()
        if not finished:
            self._save()
            name = signal.Signals(self.stopped_by).name
            print(f"{folder}: stopped by {name} and saved at batch {self.position}; the same command goes on")
            return 128 + self.stopped_by
        draw_curves(self.log.path, folder / "curves.png")
        print(summary(self.log.path, folder))
        return 0

    def _loader(self, decode: Decode | None, *, start: int = 0) -> Loader:
        return Loader(
            self.plan, device=self.learner.device, decode=decode, threads=self.options.threads, start=start,
            mean=self.recipe.data.mean, std=self.recipe.data.std, on_bad_sample=self.recipe.data.on_bad_sample,
            dtype=torch.float16 if self._half() else torch.float32,
        )  # fmt: skip

    def _decode(self) -> Decode | None:
        device, wanted = self.learner.device, self.options.decode
        if device.type == "cpu":
            if wanted == "gpu":
                raise ResoluteError("--decode: got gpu with device cpu, expected cpu; leave it out")
            return None
        if wanted != "auto":
            return wanted
        self._warm_up()  # why: a step that tunes its kernels says nothing about decoding
        with rehearsal(self.learner.network, self.learner.gradients) as step:
            found, times = choose_decode(
                self.plan, self._loader, step, sync=lambda: torch.cuda.synchronize(device)  # sync: the clock's
            )
        told = "; ".join(f"on the {name.upper()} " + ", ".join(f"{1e3 * s:.1f}" for s in each) + " ms a step"
                         for name, each in times.items())  # fmt: skip
        print(f"decoding: {told} (a stage each); taken: {found.upper()}", flush=True)
        return found

    def _half(self) -> bool:
        """Half-precision images: only where autocast would make them half anyway, on a GPU."""
        return self.learner.device.type == "cuda" and self.recipe.precision.amp != "off"

    def _warm_up(self) -> None:
        warm_up(
            self.learner.network, shapes(self.plan), device=self.learner.device,
            dtype=torch.float16 if self._half() else torch.float32,
            channels_last=self.recipe.precision.channels_last, accumulate=self.recipe.optim.accumulate,
            autocast=self.learner.autocast(),
        )  # fmt: skip

    def _after(self, spec: BatchSpec) -> bool:
        """Bookkeeping between batches, outside the clocks. False once a signal asked to stop."""
        segment = self.plan.segment(spec.index)
        # a cut validation starts again: the weights are the same, the counts are not saved
        self.position = spec.index + 1 if spec.split == "train" or spec.last else segment.first
        self._progress(spec, segment.batches)
        for (split, res, sample), reason in itertools.islice(self.skipped.items(), self.told, None):
            self.log.write({"kind": "skipped", "split": split, "res": res, "sample": sample, "reason": reason})
            tqdm.write(f"skipped, another sample in its place: {reason}")
        self.told = len(self.skipped)
        following = self.plan.segment(spec.index + 1) if spec.index + 1 < self.plan.total_batches else None
        if spec.last and (following is None or following.split == "train"):
            self._end_epoch(spec)
        elif spec.split == "train" and self._due(spec.step):
            self._save()
        return not self.stopped_by

    def _due(self, step: int) -> bool:
        every = self.options.save_every_steps
        return bool(every and (step + 1) % every == 0) or time.monotonic() - self.saved_at > self.options.save_every_s

    def _end_epoch(self, spec: BatchSpec) -> None:
        stage = self.recipe.stages[spec.stage]
        record = self.meter.end_epoch(spec, res=stage.res, batch_size=stage.batch_size)
        tqdm.write(epoch_line(record))
        top1 = max(record["top1"] or 0.0, record["ema_top1"] or 0.0)
        is_best = record["top1"] is not None and top1 > self.best_top1
        self.best_top1 = max(self.best_top1, top1) if record["top1"] is not None else self.best_top1
        if spec.index + 1 == self.plan.total_batches:
            self.log.write({"kind": "end", "elapsed_s": self.meter.elapsed_s, "best_top1": self.best_top1})
        self._save()
        if is_best:
            checkpoint.mark_best(self.last, self.best)

    def _save(self) -> None:
        state = {
            **self.identity, **self.learner.state_dict(), "meter": self.meter.state_dict(),
            "position": self.position, "best_top1": self.best_top1, "order": self.plan.order,
        }  # fmt: skip
        checkpoint.save(self.last, state)
        self.saved_at = time.monotonic()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.stopped_by:
            raise KeyboardInterrupt
        self.stopped_by = number

    def _progress(self, spec: BatchSpec, batches: int) -> None:
        if self.bar is None or spec.index == self.plan.segment(spec.index).first:
            if self.bar is not None:
                self.bar.close()
            title = f"epoch {spec.epoch} {spec.split} {spec.res} px"
            self.bar = tqdm(total=batches, desc=title, unit="batch", leave=False, disable=None)
        self.bar.update()

    def _write_start(self, shards: ShardSet) -> None:
        self.log.write({
            "kind": "start", "recipe": self.recipe.name, "recipe_hash": self.recipe.hash, "shards_hash": shards.hash,
            "classes": len(shards.classes), "train_samples": len(shards.splits["train"]),
            "val_samples": len(shards.splits["val"]), "stages": self.identity["recipe"]["stages"],
            "order": self.plan.order, "total_steps": self.plan.total_steps, "device": _device_name(self.learner.device),
            "python": platform.python_version(), "torch": torch.__version__, "timm": timm.__version__,
        })  # fmt: skip


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
