"""Measures what a run's steps take on this machine, before it starts: a few real ones.

What the loader does alone and what the model does alone are two ceilings; on a CPU they share the cores, on a GPU its
kernels, so that only live steps say what a run will take. Whether images are better decoded on the CPU or the GPU
depends on model, resolution and machine too: `choose_decode` times both, once a run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch

from pipeline.loader.loader import Batch
from pipeline.plan.plan import BatchSpec, Plan
from train.loop import Learner

__all__ = ["Decode", "Pace", "Stopwatch", "Stream", "choose_decode", "measure", "restored", "synthetic"]

Decode = Literal["cpu", "gpu"]
_SKIPPED, _TIMED = 8, 24  # steps of each stage: what runs ahead of the first is not what is steady
_RUNNING_AHEAD = 4  # batches that a loader has ready, or nearly, when it is opened
_MIN_STEPS = 2  # steps under a clock


class Stream(Protocol):
    """What is needed of a `Loader`."""

    def __next__(self) -> Batch: ...

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def choose_decode(
    plan: Plan, open_stream: Callable[[Decode, int], AbstractContextManager[Stream]], step: Callable[[Batch], None], *,
    sync: Callable[[], None], broadcast: Callable[[int], int] = int, choices: Sequence[Decode] = ("gpu", "cpu"),
    about_s: float = 5.0, clock: Callable[[], float] = time.perf_counter,
) -> tuple[Decode, dict[Decode, float]]:  # fmt: skip
    """The faster place to decode, and the seconds of a live step with each, in about `about_s` s of steps in all.

    Steps are those of the stage that has the most pixels, where a run spends most of its time. `open_stream` opens a
    loader at a batch; `step` does what training does but change weights, and `sync` waits for it; `agree` gives all
    ranks the first one's number of steps.
    """
    training = [segment for segment in plan.segments if segment.split == "train"]
    pixels: dict[int, int] = defaultdict(int)
    for segment in training:
        pixels[segment.stage] += segment.samples * segment.res**2
    heaviest = max(pixels, key=lambda stage: pixels[stage])
    first = next(segment for segment in training if segment.stage == heaviest)
    skipped = min(_RUNNING_AHEAD, first.batches // 2)
    measured: dict[Decode, float] = {}
    for decode in choices:
        with open_stream(decode, first.first) as stream:

            def timed(count: int, stream: Stream = stream) -> float:
                began = clock()
                for _ in range(count):
                    step(next(stream))
                sync()
                return clock() - began

            # why not counted: the first batches were decoded before anybody asked for them
            ahead_s = [timed(1) for _ in range(skipped)]
            left_s = about_s / len(choices) - sum(ahead_s)
            fitting = int(left_s / max(ahead_s)) if any(ahead_s) else _TIMED
            count = broadcast(min(max(_MIN_STEPS, fitting), _TIMED, first.batches - skipped))
            measured[decode] = timed(count) / count
    return min(measured, key=lambda decode: measured[decode]), measured


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
    broadcast: Callable[[int], int] = int
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
        self, source: Callable[[], Batch], work: Callable[[Batch], object], *, about_s: float, max_steps: int = 1_000_000
    ) -> tuple[float, float]:
        """(images/s, part of waiting) of steady steps, in about `about_s` s; no more than `most` steps in all."""
        self.steps(source, work, 1)
        step_s = self.steps(source, work, 1)[2]
        count = max(1, min(self.broadcast(max(_MIN_STEPS, round(about_s / step_s))), (max_steps - 2) * 2 // 3))
        self.steps(source, work, min(_SKIPPED, count // 2))
        return self.steps(source, work, count)[:2]


def measure(
    plan: Plan, stream: Stream, stage: int, watch: Stopwatch, *, train: Callable[[Batch], object],
    validate: Callable[[Batch], object], synthetic_batch: Batch, memory: Callable[[], int], about_s: float = 5.0,
) -> Pace:  # fmt: skip
    """The pace of a stage, in `about_s` s or what a few steps of each kind take. `made`: a batch of random numbers."""

    def live(split: str, work: Callable[[Batch], object], share: float) -> tuple[float, float]:
        segment = next(s for s in plan.segments if (s.split, s.stage) == (split, stage))
        stream.load_state_dict({"next_batch": segment.first})
        if segment.batches >= 4:
            return watch.rate(lambda: next(stream), work, about_s=share * about_s, max_steps=segment.batches)
        watch.steps(lambda: next(stream), work, 1)
        stream.load_state_dict({"next_batch": segment.first})
        return watch.steps(lambda: next(stream), work, segment.batches)[:2]

    loader, _ = live("train", lambda batch: None, 0.15)
    model, _ = watch.rate(lambda: synthetic_batch, train, about_s=0.2 * about_s)
    together, stall = live("train", train, 0.4)
    used = memory()
    validated = any((s.split, s.stage) == ("val", stage) for s in plan.segments)
    return Pace(
        loader_images_per_s=loader, model_images_per_s=model, live_images_per_s=together, stall_frac=stall,
        eval_images_per_s=live("val", validate, 0.1)[0] if validated else None, memory_bytes=used,
    )  # fmt: skip
