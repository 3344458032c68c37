"""How long do steps take on this machine? A few real ones of every stage tell, before the run.

What the loader does alone and what the model does alone are two ceilings; on a CPU they share the cores, on a GPU its
kernels, so that only live steps say what a run will take. Whether images are better decoded on the CPU or the GPU
depends on model, resolution and machine too: `choose_decode` times both and takes that with which the run is shorter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch

from pipeline.loader import Batch
from pipeline.plan import BatchSpec, Plan

from .loop import Learner

__all__ = [
    "Decode", "Pace", "Stopwatch", "Stream", "choose_decode", "measure", "restored", "stage_steps", "step_times",
    "synthetic",
]  # fmt: skip

Decode = Literal["cpu", "gpu"]
_SKIPPED, _TIMED = 8, 24  # steps of each stage: what runs ahead of the first is not what is steady
_LEAST = 2  # steps under a clock


class Stream(Protocol):
    """What is needed of a `Loader`."""

    def __next__(self) -> Batch: ...

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def stage_steps(plan: Plan) -> list[int]:
    """Training steps of each stage."""
    steps = [0] * len(plan.stages)
    for segment in plan.segments:
        steps[segment.stage] += segment.batches if segment.split == "train" else 0
    return steps


def step_times(
    plan: Plan, stream: Stream, step: Callable[[Batch], None], *, sync: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:  # fmt: skip
    """Seconds a live step of each stage takes. `step` does what training does but change weights; `sync` awaits it."""
    first = {segment.stage: segment for segment in reversed(plan.segments) if segment.split == "train"}
    times = []
    for stage in range(len(plan.stages)):
        segment = first[stage]
        skipped = min(_SKIPPED, segment.batches // 2)
        timed = min(_TIMED, segment.batches - skipped)
        stream.load_state_dict({"next_batch": segment.first})
        for _ in range(skipped):
            step(next(stream))
        sync()
        began = clock()
        for _ in range(timed):
            step(next(stream))
        sync()
        times.append((clock() - began) / timed)
    return times


def choose_decode(
    plan: Plan, open_stream: Callable[[Decode], AbstractContextManager[Stream]], step: Callable[[Batch], None], *,
    sync: Callable[[], None], choices: Iterable[Decode] = ("gpu", "cpu"),
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Decode, dict[Decode, Any]]:  # fmt: skip
    """The faster one over the whole run, and seconds a step of each stage by choice."""
    measured: dict[Decode, Any] = {}
    for decode in choices:
        with open_stream(decode) as stream:
            measured[decode] = step_times(plan, stream, step, sync=sync, clock=clock)
    steps = stage_steps(plan)
    whole = {decode: sum(n * s for n, s in zip(steps, times, strict=True)) for decode, times in measured.items()}
    return min(whole, key=lambda decode: whole[decode]), measured


def synthetic(spec: BatchSpec, *, device: torch.device, dtype: torch.dtype, times: float = 1.0) -> Batch:
    """A batch of random images in the place of `spec`'s, with `times` as many of them."""
    count = round(times * len(spec))
    labels = torch.zeros(count, dtype=torch.int64, device=device)
    images = torch.randn(count, 3, spec.res, spec.res, dtype=dtype, device=device)
    return Batch(
        images=images.to(memory_format=torch.channels_last), labels=labels, partner_labels=labels,
        lam=torch.ones(count, device=device),
        spec=dataclasses.replace(spec, ids=np.resize(spec.ids, count), global_size=round(times * spec.global_size)),
    )  # fmt: skip


@contextlib.contextmanager
def restored(learner: Learner) -> Iterator[None]:
    """Whatever the block does to weights, averages, optimizer and random numbers is undone at its end."""
    kept = io.BytesIO()
    torch.save(learner.state_dict(), kept)
    try:
        yield
    finally:
        kept.seek(0)
        learner.load_state_dict(torch.load(kept, map_location="cpu", weights_only=True))


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What was measured of a stage; images/s are over all ranks."""

    loader_images_per_s: float  # alone
    model_images_per_s: float  # training steps on one batch of random numbers
    live_images_per_s: float  # training steps on what the loader delivers
    stall_frac: float  # part of the live time in which the host was blocked for a batch
    eval_images_per_s: float | None  # live validation; None where the stage has none
    memory_bytes: int  # as `memory` tells after the live steps


@dataclass(frozen=True, kw_only=True)
class Stopwatch:
    """Times steps; `sync` awaits what they started, `agree` gives all ranks the first one's number of them."""

    sync: Callable[[], None]
    agree: Callable[[int], int] = int
    clock: Callable[[], float] = time.perf_counter

    def steps(
        self, source: Callable[[], Batch], work: Callable[[Batch], object], count: int
    ) -> tuple[float, float, float]:
        """(images/s, part of the time in which the host waited for the next batch, s) of `count` steps."""
        images, waited, began = 0, 0.0, self.clock()
        for _ in range(count):
            asked = self.clock()
            batch = source()
            waited += self.clock() - asked
            work(batch)
            images += batch.spec.global_size
        self.sync()
        elapsed = self.clock() - began
        return images / elapsed, waited / elapsed, elapsed

    def rate(
        self, source: Callable[[], Batch], work: Callable[[Batch], object], *, about_s: float, most: int = 1_000_000
    ) -> tuple[float, float]:
        """(images/s, part of waiting) of steady steps, in about `about_s` s; no more than `most` steps in all."""
        self.steps(source, work, 1)
        step_s = self.steps(source, work, 1)[2]
        count = max(1, min(self.agree(max(_LEAST, round(about_s / step_s))), (most - 2) * 2 // 3))
        self.steps(source, work, min(_SKIPPED, count // 2))
        return self.steps(source, work, count)[:2]


def measure(
    plan: Plan, stream: Stream, stage: int, watch: Stopwatch, *, train: Callable[[Batch], object],
    validate: Callable[[Batch], object], made: Batch, memory: Callable[[], int], about_s: float = 5.0,
) -> Pace:  # fmt: skip
    """The pace of a stage, in `about_s` s or what a few steps of each kind take. `made`: a batch of random numbers."""

    def live(split: str, work: Callable[[Batch], object], share: float) -> tuple[float, float]:
        segment = next(s for s in plan.segments if (s.split, s.stage) == (split, stage))
        stream.load_state_dict({"next_batch": segment.first})
        if segment.batches >= 4:
            return watch.rate(lambda: next(stream), work, about_s=share * about_s, most=segment.batches)
        watch.steps(lambda: next(stream), work, 1)
        stream.load_state_dict({"next_batch": segment.first})
        return watch.steps(lambda: next(stream), work, segment.batches)[:2]

    loader, _ = live("train", lambda batch: None, 0.15)
    model, _ = watch.rate(lambda: made, train, about_s=0.2 * about_s)
    together, stall = live("train", train, 0.4)
    used = memory()
    validated = any((s.split, s.stage) == ("val", stage) for s in plan.segments)
    return Pace(
        loader_images_per_s=loader, model_images_per_s=model, live_images_per_s=together, stall_frac=stall,
        eval_images_per_s=live("val", validate, 0.1)[0] if validated else None, memory_bytes=used,
    )  # fmt: skip
