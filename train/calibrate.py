"""Where should images be decoded on this machine? What a real step takes with either decides, not the loader alone.

Decoding on the GPU takes time from the model's own kernels, decoding on the CPU needs cores; which is cheaper depends
on the model, the resolution and the machine. So a few live steps of every stage are timed with both, and the run takes
the one with which all of it would take less.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

from pipeline.loader import Batch
from pipeline.plan import Plan

__all__ = ["Decode", "Stream", "choose_decode", "stage_steps", "step_times"]

Decode = Literal["cpu", "gpu"]
_SKIPPED, _TIMED = 8, 24  # steps of each stage: what runs ahead of the first is not what is steady


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
