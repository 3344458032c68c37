"""Measures a run's throughput on this machine with a few training steps, before it starts.

Three rates per stage: the loader alone and the model alone are ceilings; loader and model compete for CPU cores or the
GPU, so only the live rate, measured with both, predicts the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from resolute import cuda
from resolute.pipeline.loader.batch import Batch
from resolute.pipeline.loader.loader import Loader
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import BatchShape
from resolute.train.devices.hardware import peak_memory_bytes, reset_peak_memory
from resolute.train.learner import Learner
from resolute.train.synthetic import synthetic_batch

__all__ = [
    "Segment",
    "Stopwatch",
    "Throughput",
    "combined",
    "expected_s",
    "measure",
    "measure_stages",
    "restored",
    "segments",
]

_SKIPPED, _TIMED = 8, 24  # steps per stage: the skipped ones use prefetched batches and are not representative
_SLOW = 4  # times the intended time: a step that takes longer is timed by itself
_ABOUT_S = 5.0  # for measuring a stage
_MIN_STEPS = 2  # minimum number of timed steps
_HURRIED_STEPS = 3  # of a slow stage: with and without the loader, and a validation
_MAX_SEGMENTS = 4  # measured in a ramp
_NOISE = 1.15  # ratio of two rates up to which they count as equal


@dataclass(frozen=True, kw_only=True)
class Stopwatch:
    """Times steps. `sync` waits for the device; `broadcast` gives all ranks rank 0's number."""

    sync: Callable[[], None]
    broadcast: Callable[[int], int] = int
    clock: Callable[[], float] = time.perf_counter
    hurried: bool = False  # time is limited: a step that takes longer than intended is the only one

    @classmethod
    def of(cls, learner: Learner, *, hurried: bool = False) -> Stopwatch:
        """A stopwatch for the steps of `learner`."""

        def sync() -> None:
            if learner.device.type == "cuda":
                cuda.synchronize(learner.device)  # sync: ends the timed interval

        return cls(sync=sync, broadcast=learner.ranks.broadcast, hurried=hurried)

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
        self,
        source: Callable[[], Batch],
        work: Callable[[Batch], object],
        *,
        about_s: float,
        max_steps: int = 1_000_000,
    ) -> tuple[float, float]:
        """(images/s, fraction of waiting) in steady state; takes about `about_s` s and at most `max_steps` steps.

        Only two steps if one takes much longer than `about_s`, or one if `hurried`.
        """
        rate, waiting, step_s = self.steps(source, work, 1)
        if self.hurried and self.broadcast(int(step_s > about_s)):
            return rate, waiting
        rate, waiting, step_s = self.steps(source, work, 1)
        agreed = self.broadcast(0 if step_s > _SLOW * about_s else max(_MIN_STEPS, round(about_s / step_s)))
        if not agreed:
            return rate, waiting
        count = max(1, min(agreed, (max_steps - 2) * 2 // 3))
        self.steps(source, work, min(_SKIPPED, count // 2))
        return self.steps(source, work, count)[:2]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A part of a stage whose batches have the same shapes, and its longest run of consecutive batches."""

    shapes: tuple[BatchShape, ...]
    samples: int  # in the whole stage
    first: int  # index of the run's first batch
    batches: int

    @property
    def pixels(self) -> float:
        """Input pixels of its samples."""
        per_group = sum(shape.batch_size * shape.res**2 for shape in self.shapes)
        return self.samples * per_group / sum(shape.batch_size for shape in self.shapes)


def segments(plan: Plan, stage: int) -> list[Segment]:
    """The segments of a stage in the order of the run: one, or, of a ramp, one for each resolution.

    Beyond `_MAX_SEGMENTS` resolutions, neighbours are grouped, and each group is measured at its middle one.
    """
    by_shapes: dict[tuple[BatchShape, ...], Segment] = {}
    for phase in plan.phases:
        if (phase.split, phase.stage) != ("train", stage):
            continue
        for sequence in phase.sequences:
            segment = by_shapes.get(sequence.shapes) or Segment(shapes=sequence.shapes, samples=0, first=0, batches=0)
            if sequence.batches > segment.batches:
                segment = dataclasses.replace(segment, first=phase.first + sequence.first, batches=sequence.batches)
            by_shapes[sequence.shapes] = dataclasses.replace(segment, samples=segment.samples + sequence.samples)
    each = list(by_shapes.values())
    groups = np.array_split(np.arange(len(each)), min(len(each), _MAX_SEGMENTS))
    return [
        dataclasses.replace(each[group[len(group) // 2]], samples=sum(each[i].samples for i in group))
        for group in groups
    ]


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
class Throughput:
    """Measurements of one stage; images/s are over all ranks."""

    loader_images_per_s: float  # loader alone
    model_images_per_s: float  # training steps on a synthetic batch
    live_images_per_s: float  # training steps on the loader's batches
    stall_frac: float  # fraction of the live time in which the host was blocked waiting for a batch
    eval_images_per_s: float | None  # live validation; None if the stage has none
    memory_bytes: int  # peak memory after the live steps; 0: not measured
    estimated_from: int | None = None  # the stage that was measured in its place, as time was up

    def at(self, times_pixels: float, *, stage: int) -> Throughput:
        """An estimate for images with `times_pixels` as many pixels as those of `stage`, where this was measured."""
        eval_rate = self.eval_images_per_s
        return dataclasses.replace(
            self,
            loader_images_per_s=self.loader_images_per_s / times_pixels,
            model_images_per_s=self.model_images_per_s / times_pixels,
            live_images_per_s=self.live_images_per_s / times_pixels,
            eval_images_per_s=None if eval_rate is None else eval_rate / times_pixels,
            memory_bytes=0,
            estimated_from=stage,
        )

    @property
    def is_possible(self) -> bool:
        """Whether training on the loader's batches was no faster than the model alone, which does the same work."""
        return self.live_images_per_s <= _NOISE * self.model_images_per_s


def measure(
    plan: Plan,
    stream: Loader,
    stage: int,
    watch: Stopwatch,
    *,
    train: Callable[[Batch], object],
    validate: Callable[[Batch], object] | None,
    synthetic_batch: Batch | Sequence[Batch],
    memory: Callable[[], int],
    about_s: float = _ABOUT_S,
    segment: Segment | None = None,
) -> Throughput:
    """Measure a segment of a stage (None: the first) in its share of about `about_s` s, or a few steps of each kind.

    If other work on the machine makes the result impossible, model and training are measured once more.

    `train` and `validate` (None: not measured) run a step; `memory` returns the peak memory in bytes. Several
    synthetic batches, one for each shape of the segment, are used in turn.
    """
    parts = segments(plan, stage)
    whole = segment or parts[0]
    about_s /= len(parts)
    synthetic_batches = itertools.cycle(synthetic_batch if isinstance(synthetic_batch, Sequence) else [synthetic_batch])

    def live(first: int, batches: int, work: Callable[[Batch], object], share: float) -> tuple[float, float]:
        stream.load_state_dict({"next_batch": first})
        if batches >= 4:
            return watch.rate(lambda: next(stream), work, about_s=share * about_s, max_steps=batches)
        watch.steps(lambda: next(stream), work, 1)
        stream.load_state_dict({"next_batch": first})
        return watch.steps(lambda: next(stream), work, batches)[:2]

    loader, _ = live(whole.first, whole.batches, lambda batch: None, 0.15)
    began = watch.clock()
    for _ in range(2):
        model, _ = watch.rate(lambda: next(synthetic_batches), train, about_s=0.2 * about_s)
        together, stall = live(whole.first, whole.batches, train, 0.4)
        throughput = Throughput(
            loader_images_per_s=loader,
            model_images_per_s=model,
            live_images_per_s=together,
            stall_frac=stall,
            eval_images_per_s=None,
            memory_bytes=memory(),
        )
        if watch.broadcast(int(throughput.is_possible or (watch.hurried and watch.clock() - began > about_s))):
            break
    if validate is not None and any((s.split, s.stage) == ("val", stage) for s in plan.phases):
        phase = plan.first_phase("val", stage)
        throughput = dataclasses.replace(
            throughput, eval_images_per_s=live(phase.first, phase.batches, validate, 0.1)[0]
        )
    return throughput


def combined(throughputs: Sequence[Throughput], samples: Sequence[int]) -> Throughput:
    """That of a stage whose segments have these `throughputs` and `samples`; its validation is that of the first."""

    def mean(rates: list[float]) -> float:
        return sum(samples) / sum(n / rate for n, rate in zip(samples, rates, strict=True))

    live = [throughput.live_images_per_s for throughput in throughputs]
    stalls = sum(
        n * throughput.stall_frac / rate for n, throughput, rate in zip(samples, throughputs, live, strict=True)
    )
    return Throughput(
        loader_images_per_s=mean([throughput.loader_images_per_s for throughput in throughputs]),
        model_images_per_s=mean([throughput.model_images_per_s for throughput in throughputs]),
        live_images_per_s=mean(live),
        stall_frac=stalls * mean(live) / sum(samples),
        eval_images_per_s=throughputs[0].eval_images_per_s,
        memory_bytes=max(throughput.memory_bytes for throughput in throughputs),
    )


def expected_s(plan: Plan, stage: int, *, pixel_s: float = 0.0) -> float:
    """Seconds that measuring a stage takes: usually five, or a few steps of `pixel_s` seconds per input pixel."""
    parts = segments(plan, stage)
    steps = [
        _HURRIED_STEPS * pixel_s * max(shape.batch_size * shape.res**2 for shape in segment.shapes) for segment in parts
    ]
    return sum(max(_ABOUT_S / len(parts), step) for step in steps)


def measure_stages(
    plan: Plan,
    loader: Loader,
    learner: Learner,
    *,
    limit_s: float | None = None,
    pixel_s: float = 0.0,
    say: Callable[[str], object] = lambda line: None,
) -> list[Throughput]:
    """Measure every stage. The learner's state is restored; the loader's position is not.

    - `limit_s`: only the stages that are expected to fit into this time are measured, or else the shortest one.
      Stages with more pixels come first, as the run spends most of its time there. The others are estimated from the
      nearest one, by their pixels
    - `pixel_s`: seconds of a training step per input pixel, from the warm-up, for these expectations
    - `say`: is given a line before each stage
    """
    watch, began = Stopwatch.of(learner, hurried=limit_s is not None), time.perf_counter()
    stages = range(len(plan.stages))
    pixels = [sum(segment.pixels for segment in segments(plan, stage)) for stage in stages]
    durations = [expected_s(plan, stage, pixel_s=pixel_s) for stage in stages]
    throughputs: dict[int, Throughput] = {}

    def measured(stage: int) -> Throughput:
        parts = segments(plan, stage)
        say(f"measuring stage {stage} at {plan.stages[stage].max_res} px, about {durations[stage]:.0f} s")
        reset_peak_memory(learner.device)
        with restored(learner):
            each = [
                measure(
                    plan,
                    loader,
                    stage,
                    watch,
                    train=learner.train_step,
                    segment=segment,
                    validate=None if number else learner.eval_step,
                    synthetic_batch=[
                        synthetic_batch(learner, plan, segment.first + k)
                        for k in range(min(len(segment.shapes), segment.batches))
                    ],
                    memory=lambda: peak_memory_bytes(learner.device),
                )
                for number, segment in enumerate(parts)
            ]
        return combined(each, [segment.samples for segment in parts]) if len(parts) > 1 else each[0]

    for stage in sorted(stages, key=lambda stage: -pixels[stage]):
        fits = limit_s is None or time.perf_counter() - began + durations[stage] <= limit_s
        if watch.broadcast(int(fits)):  # why from the first rank: all have to measure the same stages
            throughputs[stage] = measured(stage)
    if not throughputs:
        shortest = watch.broadcast(min(stages, key=durations.__getitem__))
        throughputs[shortest] = measured(shortest)

    def nearest(stage: int) -> Throughput:
        res = plan.stages[stage].max_res
        known = min(throughputs, key=lambda other: abs(plan.stages[other].max_res - res))
        return throughputs[known].at((res / plan.stages[known].max_res) ** 2, stage=known)

    return [throughputs[stage] if stage in throughputs else nearest(stage) for stage in stages]
