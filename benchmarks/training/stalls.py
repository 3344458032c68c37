"""Training time lost to loading: the real training step on three kinds of batches.

live       batches from the loader, as in a run
cached     the loader's first batches, kept in memory and reused: loading is free
synthetic  a single random batch

stall     fraction of the live time in which the host was blocked in `next()`. On a GPU the host runs ahead of the
          device, so a stall shows only when that lead is used up: there, the headspace is the better measure.
headspace cached / live images/s: the speed-up with an infinitely fast loader.

On a CPU, loader and model share the cores, so the headspace includes the work of decoding.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import torch

from resolute.benchmarks.cli import repeated, show_progress, spread, text_table
from resolute.benchmarks.loaders.child import synchronise
from resolute.benchmarks.loaders.ours import full_batches, training_plan
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.batch import Batch
from resolute.pipeline.loader.loader import Loader
from resolute.pipeline.plan.stage import Stage
from resolute.train.devices.memory import keep_freed_memory
from resolute.train.learner import Learner, autocast_dtype
from resolute.train.recipe.schema import Recipe
from resolute.train.warmup import warm_up

__all__ = ["measure", "table"]

_CACHED = 8  # number of cached batches
_WARM_UP = {"live": 5, "cached": 2, "synthetic": 2}  # steps before timing; live: enough to use up prefetched batches
_FASTEST = 50_000  # images/s; upper bound, so that no loader runs out of batches


def small_recipe(*stages: Stage, model: str, compiled: bool = False) -> Recipe:
    """A recipe with these stages of `model`, default values, and a learning rate too low to diverge."""
    tables = [
        {"res": stage.res, "epochs": stage.epochs, "batch_size": stage.batch_size, "fraction": stage.fraction}
        for stage in stages
    ]
    return Recipe.parse(
        {"model": {"name": model}, "optim": {"lr": 1e-3}, "precision": {"compile": compiled}, "stages": tables},
        name="benchmark",
    )


def measure(
    shards: ShardSet,
    *,
    device: torch.device,
    threads: int,
    batch_size: int,
    seconds: float,
    rounds: int,
    model: str,
    compiled: bool = False,
) -> dict[str, Any]:
    """{"amp", "res": [{"res", "images_per_s": {kind: …}, "stall_frac", "headspace"}]}, values `repeated`.

    Each measurement lasts about `seconds` s and at least one step.
    """
    if device.type == "cpu":
        keep_freed_memory()
        torch.set_num_threads(threads)
    else:
        torch.backends.cudnn.benchmark = True  # each shape is autotuned once, in the warm-up
    results = []
    for res in shards.resolutions:
        count = _CACHED + rounds * (_WARM_UP["live"] + round(seconds * _FASTEST / batch_size) + 1)
        stage = full_batches(shards, res, batches=count, batch_size=batch_size)
        recipe = small_recipe(stage, model=model, compiled=compiled)
        plan = training_plan(shards, list(recipe.stages))
        learner = Learner(recipe, classes=len(shards.classes), total_steps=plan.total_steps, device=device)
        warm_up(learner, [("train", res, batch_size)])
        measured: dict[str, list[dict[str, float]]] = {"live": [], "cached": [], "synthetic": []}
        with Loader(plan, device=device, num_threads=threads, dtype=learner.image_dtype) as loader:
            first = list(itertools.islice(loader, _CACHED))
            sources: dict[str, Iterator[Batch]] = {
                "live": loader,
                "cached": itertools.cycle(first),
                "synthetic": itertools.repeat(synthetic(first[0], classes=len(shards.classes))),
            }
            for number in range(rounds):
                for kind, batches in sources.items():
                    show_progress(f"training: {res} px, {kind}, round {number + 1} of {rounds}")
                    measured[kind].append(train_for(learner, batches, seconds=seconds, steps_before=_WARM_UP[kind]))
        rates = {kind: [each["images_per_s"] for each in values] for kind, values in measured.items()}
        results.append(
            {
                "res": res,
                "images_per_s": {kind: repeated(values) for kind, values in rates.items()},
                "stall_frac": repeated([each["stall_frac"] for each in measured["live"]]),
                "headspace": repeated(
                    [cached / live for cached, live in zip(rates["cached"], rates["live"], strict=True)]
                ),
            }
        )
    amp = str(autocast_dtype(recipe.precision, device) or "off").removeprefix("torch.")
    return {"amp": amp, "model": model, "device": device.type, "threads": threads, "res": results}


def synthetic(like: Batch, *, classes: int) -> Batch:
    """A batch of random numbers with the shape, dtype, memory format and device of `like`."""
    n, device = len(like.labels), like.labels.device
    labels = torch.randint(classes, (n,), device=device)
    return Batch(
        images=torch.randn_like(like.images),
        targets=labels,
        partner_labels=labels,
        lam=torch.ones_like(like.lam),
        keys=like.keys,
        spec=like.spec,
    )


def train_for(learner: Learner, batches: Iterator[Batch], *, seconds: float, steps_before: int) -> dict[str, float]:
    """Train for `seconds` s after `steps_before` steps; returns images/s and the fraction blocked in `next()`."""
    for batch in itertools.islice(batches, steps_before):
        learner.train_step(batch)
    synchronise(learner.device)
    images, waited_s, started = 0, 0.0, time.perf_counter()
    before = started
    while before - started < seconds or not images:
        batch = next(batches)
        waited_s += time.perf_counter() - before
        learner.train_step(batch)
        images += len(batch.labels)
        before = time.perf_counter()
    synchronise(learner.device)
    elapsed_s = time.perf_counter() - started
    return {"images_per_s": images / elapsed_s, "stall_frac": waited_s / elapsed_s}


def table(result: dict[str, Any]) -> str:
    rows = [
        [
            f"{entry['res']} px",
            *(spread(entry["images_per_s"][kind]) for kind in ("live", "cached", "synthetic")),
            f"{100 * entry['stall_frac']['median']:.1f} %",
            f"{entry['headspace']['median']:.2f}",
        ]
        for entry in result["res"]
    ]
    title = f"training {result['model']}, amp {result['amp']}: images/s"
    if result["device"] == "cpu":
        title += f" (loader and model share {result['threads']} CPU threads)"
    return text_table(title, ["", "live", "cached", "synthetic", "stall", "headspace"], rows)
