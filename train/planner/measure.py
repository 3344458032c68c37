"""Measures a run's throughput on this machine with a few training steps, before it starts.

Three rates per stage: the loader alone and the model alone are ceilings; loader and model compete for CPU cores or the
GPU, so only the live rate, measured with both, predicts the run. `choose_decode` measures whether decoding on the CPU
or the GPU is faster, which depends on model, resolution and machine.
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

from pipeline import cuda
from pipeline.loader.loader import Batch, Loader
from pipeline.plan.plan import BatchSpec, Plan
from train.logs.hardware import peak_memory_bytes, reset_peak_memory
from train.loop import Learner

__all__ = ["Decode", "Pace", "Stopwatch", "Stream", "choose_decode", "measure", "measure_stages", "restored",
           "synthetic", "synthetic_batch"]  # fmt: skip

Decode = Literal["cpu", "gpu"]
_SKIPPED, _TIMED = 8, 24  # steps per stage: the skipped ones use prefetched batches and are not representative
_RUNNING_AHEAD = 4  # batches that a loader prefetches when it is opened
_MIN_STEPS = 2  # minimum number of timed steps


class Stream(Protocol):
    """The part of `Loader` that is used here."""

    def __next__(self) -> Batch: ...

    def load_state_dict(self, state: dict[str, int]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Stopwatch:
    """Times steps. `sync` waits for the device; `broadcast` gives all ranks rank 0's number of steps."""

    sync: Callable[[], None]
    broadcast: Callable[[int], int] = int
    clock: Callable[[], float] = time.perf_counter

    @classmethod
    def of(cls, learner: Learner) -> Stopwatch:
        """A stopwatch for the steps of `learner`."""

        def sync() -> None:
            if learner.device.type == "cuda":
                cuda.synchronize(learner.device)  # sync: ends the timed interval

        return cls(sync=sync, broadcast=learner.ranks.broadcast)

    def steps(
        self, source: Callable[[], Batch], work: Callable[[Batch], object], count: int
    ) -> tuple[float, float, float]:
        """(images/s, fraction of the time waiting for batches, elapsed seconds) of `count` steps."""
        images, waited, began = 0, 0.0, self.clock()
        for _ in range(count):
            wait_began = self.clock()
            batch = source()
            waited += self.clock() - wait_began
            work(batch)
            images += batch.spec.global_size
        self.sync()
        elapsed = self.clock() - began
        return images / elapsed, waited / elapsed, elapsed

    def rate(
        self, source: Callable[[], Batch], work: Callable[[Batch], object], *, about_s: float,
        max_steps: int = 1_000_000,
    ) -> tuple[float, float]:  # fmt: skip
        """(images/s, fraction of waiting) in steady state; takes about `about_s` s and at most `max_steps` steps."""
        self.steps(source, work, 1)
        step_s = self.steps(source, work, 1)[2]
        count = max(1, min(self.broadcast(max(_MIN_STEPS, round(about_s / step_s))), (max_steps - 2) * 2 // 3))
        self.steps(source, work, min(_SKIPPED, count // 2))
        return self.steps(source, work, count)[:2]


def choose_decode(
    plan: Plan, open_stream: Callable[[Decode, int], AbstractContextManager[Stream]], step: Callable[[Batch], object],
    watch: Stopwatch, *, choices: Sequence[Decode] = ("gpu", "cpu"), about_s: float = 5.0,
) -> tuple[Decode, dict[Decode, float]]:  # fmt: skip
    """The faster place to decode, and the seconds per live step with each; takes about `about_s` s in total.

    Measured in the stage with the most pixels, where a run spends most of its time. `open_stream(decode, batch)` opens
    a loader at a batch; `step` is a training step.
    """
    training = [pass_ for pass_ in plan.passes if pass_.split == "train"]
    pixels: dict[int, int] = defaultdict(int)
    for pass_ in training:
        pixels[pass_.stage] += pass_.samples * pass_.res**2
    heaviest = max(pixels, key=lambda stage: pixels[stage])
    first = next(pass_ for pass_ in training if pass_.stage == heaviest)
    skipped = min(_RUNNING_AHEAD, first.batches // 2)
    measured: dict[Decode, float] = {}
    for decode in choices:
        with open_stream(decode, first.first) as stream:
            # why not counted: the first batches are prefetched
            ahead_s = [watch.steps(stream.__next__, step, 1)[2] for _ in range(skipped)]
            left_s = about_s / len(choices) - sum(ahead_s)
            fitting = int(left_s / max(ahead_s)) if any(ahead_s) else _TIMED
            count = watch.broadcast(min(max(_MIN_STEPS, fitting), _TIMED, first.batches - skipped))
            measured[decode] = watch.steps(stream.__next__, step, count)[2] / count
    return min(measured, key=lambda decode: measured[decode]), measured


def synthetic(spec: BatchSpec, *, device: torch.device, dtype: torch.dtype, times: float = 1.0) -> Batch:
    """A batch of random images (N, 3, res, res) like that of `spec`, with `times` as many samples."""
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
    """Restore the learner's weights, EMA, optimizer and random states at the end of the block."""
    state = io.BytesIO()
    torch.save(learner.state_dict(), state)
    try:
        yield
    finally:
        state.seek(0)
        learner.load_state_dict(torch.load(state, map_location="cpu", weights_only=True))


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Measurements of one stage; images/s are over all ranks."""

    loader_images_per_s: float  # loader alone
    model_images_per_s: float  # training steps on a synthetic batch
    live_images_per_s: float  # training steps on the loader's batches
    stall_frac: float  # fraction of the live time in which the host was blocked waiting for a batch
    eval_images_per_s: float | None  # live validation; None if the stage has none
    memory_bytes: int  # peak memory after the live steps


def measure(
    plan: Plan, stream: Stream, stage: int, watch: Stopwatch, *, train: Callable[[Batch], object],
    validate: Callable[[Batch], object], synthetic_batch: Batch, memory: Callable[[], int], about_s: float = 5.0,
) -> Pace:  # fmt: skip
    """Measure a stage in about `about_s` s, or the time of a few steps of each kind if that is longer.

    `train` and `validate` run a step; `memory` returns the peak memory in bytes.
    """

    def live(split: str, work: Callable[[Batch], object], share: float) -> tuple[float, float]:
        pass_ = next(s for s in plan.passes if (s.split, s.stage) == (split, stage))
        stream.load_state_dict({"next_batch": pass_.first})
        if pass_.batches >= 4:
            return watch.rate(lambda: next(stream), work, about_s=share * about_s, max_steps=pass_.batches)
        watch.steps(lambda: next(stream), work, 1)
        stream.load_state_dict({"next_batch": pass_.first})
        return watch.steps(lambda: next(stream), work, pass_.batches)[:2]

    loader, _ = live("train", lambda batch: None, 0.15)
    model, _ = watch.rate(lambda: synthetic_batch, train, about_s=0.2 * about_s)
    together, stall = live("train", train, 0.4)
    used = memory()
    validated = any((s.split, s.stage) == ("val", stage) for s in plan.passes)
    return Pace(
        loader_images_per_s=loader, model_images_per_s=model, live_images_per_s=together, stall_frac=stall,
        eval_images_per_s=live("val", validate, 0.1)[0] if validated else None, memory_bytes=used,
    )  # fmt: skip


def measure_stages(plan: Plan, loader: Loader, learner: Learner) -> list[Pace]:
    """Measure every stage. The learner's state is restored; the loader's position is not."""
    paces = []
    for stage in range(len(plan.stages)):
        reset_peak_memory(learner.device)
        with restored(learner):
            paces.append(measure(
                plan, loader, stage, Stopwatch.of(learner), train=learner.train_step, validate=learner.eval_step,
                synthetic_batch=synthetic_batch(learner, plan, stage),
                memory=lambda: peak_memory_bytes(learner.device),
            ))  # fmt: skip
    return paces


def synthetic_batch(learner: Learner, plan: Plan, stage: int, times: float = 1.0) -> Batch:
    """A batch of random images, `times` as large as the first training batch of `stage`."""
    first = next(s.first for s in plan.passes if (s.split, s.stage) == ("train", stage))
    spec = plan.batch(first, rank=learner.ranks.rank, world_size=learner.ranks.world_size)
    return synthetic(spec, device=learner.device, dtype=learner.image_dtype, times=times)
