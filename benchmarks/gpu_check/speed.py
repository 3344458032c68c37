"""The parts that measure: loader, training, stage switches, decoders, a profile, and two ranks."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import shared
from .result import Report, Result, Settings

__all__ = [
    "busy_and_gaps",
    "compiled",
    "decoder",
    "decoders",
    "loader",
    "overlap",
    "ranks",
    "switch",
    "trace",
    "training",
]

# images/s of the loader at each resolution on one H100 or H200, and live training relative to synthetic batches
_TARGETS = {128: 24_000, 160: 15_000, 224: 8_000}
_LIVE_FRAC = 0.99
_DECODED = 256  # images per batch of `decoders`
_DECODER_S = 25  # time limit of each decoder
_IN_FLIGHT = 2  # batches in each decoder
_TRACED = 10
_GAP_US = 100.0  # shorter pauses of the device are not counted
_RANK_STEPS = 6
_RANK_BATCH = 64
_RANK_DIFFERENCE = 1e-3  # of the losses of two ranks and of one, in float32


def loader(settings: Settings, report: Report) -> Result:
    """Images/s of the loader alone at each resolution, and the cores that it takes."""
    import torch

    shards, best = shared.open_set(settings), {}
    report.table(
        "", "recipe", "images/s#", "cores#", "main ms/batch#", "read ms/batch#", "DALI ms/batch#", "other ms/batch#"
    )
    for res, name in itertools.product(settings.resolutions, ("plain", "policy")):
        rate, cpu_s, batches, elapsed_s = _loader_rate(settings, shards, res, shared.AUGMENTS[name])
        groups = [f"{1e3 * used_s / batches:.1f}" for used_s in cpu_s.values()]
        cores = sum(cpu_s.values()) / elapsed_s
        report.row(f"{res} px", name, f"{rate:,.0f}", f"{cores:.1f}", *groups)
        report.values[f"{res} {name}"] = {"images_per_s": rate, "cores": cores, "batches": batches, "cpu_s": cpu_s}
        if name == "plain":
            best[res] = rate
    summary = ", ".join(f"{rate:,.0f} images/s at {res} px" for res, rate in best.items())
    held = settings.on_gpu and any(name in torch.cuda.get_device_name() for name in ("H100", "H200"))
    if held:
        summary += " (targets: " + ", ".join(f"{_TARGETS.get(res, 0):,}" for res in best) + ")"
    good = not held or all(rate >= _TARGETS.get(res, 0) for res, rate in best.items())
    return Result.judged(good, f"plain: {summary}")


def _loader_rate(
    settings: Settings, shards: Any, res: int, augment: dict[str, Any]
) -> tuple[float, dict[str, float], int, float]:
    """(images/s, CPU seconds by group of threads, batches, seconds) of the loader alone."""
    from resolute.benchmarks.loaders.ours import training_plan
    from resolute.pipeline.loader.loader import Loader

    count = 8 + int(settings.seconds * 50_000 / settings.batch_size)
    stage = shared.stage_of(shards, res, batches=count, batch_size=settings.batch_size, augment=augment)
    with Loader(training_plan(shards, [stage]), **shared.loader_options(settings)) as batches:
        for _ in range(6):
            next(batches)
        shared.synchronise(settings)
        images = number = 0
        before, began = shared.cpu_seconds(), time.perf_counter()
        for batch in batches:
            images, number = images + len(batch.spec), number + 1
            if time.perf_counter() - began > settings.seconds:
                break
        shared.synchronise(settings)
        elapsed_s = time.perf_counter() - began
        cpu_s = {group: used_s - before[group] for group, used_s in shared.cpu_seconds().items()}
    return images / elapsed_s, cpu_s, number, elapsed_s


def training(settings: Settings, report: Report) -> Result:
    """Training on the loader's batches, on cached ones and on a synthetic one, in turns, as in a run."""
    return _training(settings, report, settings.resolutions, compiled=False)


def compiled(settings: Settings, report: Report) -> Result:
    """The same with `precision.compile`, at the largest resolution: compiling takes half a minute."""
    return _training(settings, report, settings.resolutions[-1:], compiled=True)


def _training(settings: Settings, report: Report, resolutions: Sequence[int], *, compiled: bool) -> Result:
    import torch

    from resolute.benchmarks.training import stalls

    shards, ratios, amp = shared.open_set(settings), {}, ""
    report.table("", "live images/s#", "cached#", "synthetic#", "live / synthetic#", "from#", "to#", "stall#")
    for res in resolutions:
        size = min(settings.train_batch_size, len(shards.splits["train"]))
        measured = stalls.measure(
            dataclasses.replace(shards, resolutions=(res,)),
            device=torch.device(settings.device),
            threads=settings.threads,
            batch_size=size,
            seconds=settings.seconds,
            rounds=settings.rounds,
            model=settings.model,
            compiled=compiled,
        )
        (entry,), amp = measured["res"], measured["amp"]
        report.values[str(res)] = entry
        rates = entry["images_per_s"]
        each = [live / free for live, free in zip(rates["live"]["raw"], rates["synthetic"]["raw"], strict=True)]
        ratios[res] = each
        report.row(
            f"{res} px",
            *(f"{rates[kind]['median']:,.0f}" for kind in ("live", "cached", "synthetic")),
            f"{statistics.median(each):.3f}",
            f"{min(each):.3f}",
            f"{max(each):.3f}",
            f"{100 * entry['stall_frac']['median']:.2f} %",
        )
    # within the spread: a round reached it
    good = not settings.on_gpu or all(max(each) >= _LIVE_FRAC for each in ratios.values())
    listed = ", ".join(
        f"{statistics.median(each):.3f} ({min(each):.3f} to {max(each):.3f}) at {res} px"
        for res, each in ratios.items()
    )
    limit = f" (at least {_LIVE_FRAC} in one of {settings.rounds} rounds)" if settings.on_gpu else ""
    return Result.judged(
        good, f"{settings.model}, amp {amp}, batch {settings.train_batch_size}: live / synthetic {listed}{limit}"
    )


def switch(settings: Settings, report: Report) -> Result:
    """The cost of each change of resolution against its noise, by events of the device."""
    if len(settings.resolutions) < 2:
        return Result(verdict="skipped", summary="a set of one resolution has no switch")
    import numpy as np
    import torch

    from resolute import cuda
    from resolute.pipeline.loader.loader import Loader
    from resolute.train.learner import Learner
    from resolute.train.logs.run_log import SWITCH_STEPS, change_text, is_measurable, switch_costs
    from resolute.train.warmup import shapes, warm_up

    device, shards = torch.device(settings.device), shared.open_set(settings)
    per_epoch = len(shards.splits["train"]) // min(settings.train_batch_size, len(shards.splits["train"]))
    # why 5: the noise is that of four groups of steps after the first
    epochs = max(settings.stage_epochs, -(-5 * SWITCH_STEPS // per_epoch))
    stages = [
        dataclasses.replace(
            shared.stage_of(shards, res, batches=1, batch_size=settings.train_batch_size), epochs=epochs, fraction=1.0
        )
        for res in settings.resolutions
    ]
    recipe = shared.recipe_of(settings, stages)
    plan = recipe.plan(shards)
    torch.backends.cudnn.benchmark = settings.on_gpu
    learner = Learner(recipe, classes=len(shards.classes), total_steps=plan.total_steps, device=device)
    began = time.perf_counter()
    warm_up(learner, shapes(plan))
    shared.synchronise(settings)
    report.values["warm_up_s"] = warm_up_s = time.perf_counter() - began
    steps: list[tuple[int, Any, Any]] = []  # stage, and marks before and after a step

    def mark() -> Any:
        return cuda.record_event(device) if settings.on_gpu else time.perf_counter()

    with Loader(plan, **shared.loader_options(settings)) as batches:
        before = None
        for batch in batches:
            if batch.spec.split == "val":
                continue
            before = before or mark()
            learner.train_step(batch)
            after = mark()
            if len(batch.spec) == plan.stages[batch.spec.stage].batch_size:  # not the last of an epoch, if smaller
                steps.append((batch.spec.stage, before, after))
            before = after
        shared.synchronise(settings)
    between = cuda.elapsed_s if settings.on_gpu else lambda a, b: b - a
    steps_s = [between(before, after) for _, before, after in steps]
    numbers = np.array([stage for stage, _, _ in steps], float)
    costs = switch_costs(numbers, np.array(steps_s), np.array(settings.resolutions, float)[numbers.astype(int)])
    report.values |= {"costs": costs, "steps_s": steps_s}
    report.table("change", "slowest / usual step#")
    for cost in costs:
        report.row(change_text(cost), f"{cost['slowest_ratio']:.2f}")
    slow = [cost for cost in costs if is_measurable(cost) and cost["cost_s"] > cost["median_s"]]
    return Result.judged(
        not slow or not settings.on_gpu,
        f"{'; '.join(map(change_text, slow or costs))}{' (allowed: a usual step)' if slow else ''}; the warm-up before "
        f"took {warm_up_s:.1f} s",
    )


def trace(settings: Settings, report: Report) -> Result:
    """Trace of some steps for chrome://tracing, and the pauses between kernels (on a CPU: between operations)."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * settings.on_gpu
    with shared.training(
        settings, steps=_TRACED + 10, res=settings.resolutions[-1], augment=shared.AUGMENTS["policy"]
    ) as (batches, learner):
        for batch in itertools.islice(batches, 5):
            learner.train_step(batch)
        shared.synchronise(settings)
        with profile(activities=activities) as profiler:
            for batch in itertools.islice(batches, _TRACED):
                learner.train_step(batch)
            shared.synchronise(settings)
    path = Path(settings.folder, "trace.json.gz")
    profiler.export_chrome_trace(str(path))
    kind = "CUDA" if settings.on_gpu else "CPU"
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type.name == kind and (settings.on_gpu or event.cpu_parent is None)
    ]
    busy, gaps = busy_and_gaps(spans)
    gaps.sort(reverse=True)
    longest = [f"{gap / 1e3:.2f} ms" for gap in gaps[:5]]
    report.values |= {"busy_frac": busy, "gaps_us": gaps}
    report.table("longest pauses")
    for gap in longest:
        report.row(gap)
    what = "GPU" if settings.on_gpu else "torch"
    return Result.judged(
        bool(spans),
        f"{what} busy {100 * busy:.1f} % of the time, {len(gaps)} pauses above {_GAP_US / 1e3:g} ms in "
        f"{_TRACED} steps, longest {longest[0] if longest else 'none'}; {path.name}",
    )


def busy_and_gaps(spans_us: Iterable[tuple[float, float]]) -> tuple[float, list[float]]:
    """(fraction of the time covered by at least one span, gaps longer than `_GAP_US`); spans are (start, end) in us."""
    covered, gaps, ends, begins = 0.0, list[float](), None, None
    for start, end in sorted(spans_us):
        if ends is None or begins is None:
            begins, ends = start, start
        if start - ends > _GAP_US:
            gaps.append(start - ends)
        covered += max(0.0, end - max(start, ends))
        ends = max(ends, end)
    if ends is None or begins is None or ends == begins:
        return 0.0, gaps
    return covered / (ends - begins), gaps


# ---- decoders --------------------------------------------------------------------------------------------------------


def decoders(settings: Settings, report: Report) -> Result:
    """Every way to decode on the GPU, each in a process of its own: whole images or regions, by kernels or JPEG engine.

    Passes if whole images are decoded as on the CPU with all of them given to the engine, as `decode = "gpu"` does.
    """
    ways: list[tuple[str, float | None]] = [("cpu", None)]
    if settings.on_gpu:
        ways += [("whole", 1.0), ("whole", 0.65), ("whole", 0.0), ("region", 0.0), ("region", 1.0)]
    needed, works = ("whole", 1.0) if settings.on_gpu else ways[0], False
    report.table("decoder", "JPEG engine#", "images/s#", "cores#", "mean error#", "outcome")
    for kind, load in ways:
        folder = Path(settings.folder)
        words = [
            sys.executable,
            "-m",
            "resolute.benchmarks.gpu_check.parts",
            "decoder",
            str(folder),
            kind,
            "" if load is None else str(load),
        ]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=_DECODER_S, check=False)
        except subprocess.TimeoutExpired:
            report.row(kind, "" if load is None else load, "", "", "", f"no result after {_DECODER_S} s")
            continue
        print(done.stdout, done.stderr)
        if done.returncode:
            how = (
                signal.Signals(-done.returncode).name
                if done.returncode < 0
                else f"status {done.returncode}: {shared.last_line(done.stderr)[:200]}"
            )
            report.row(kind, "" if load is None else load, "", "", "", how)
            continue
        got = json.loads(done.stdout.strip().splitlines()[-1])
        equal = got["error"] < 1.5
        works |= equal and (kind, load) == needed
        report.values[f"{kind} {load}"] = got
        report.row(
            kind,
            "" if load is None else load,
            f"{got['images_per_s']:,.0f}",
            f"{got['cores']:.1f}",
            f"{got['error']:.3f}",
            "as on the CPU" if equal else "differs from the CPU",
        )
    outcomes = [row[-1] for row in report.tables[-1][1]]
    good = sum(outcome == "as on the CPU" for outcome in outcomes)
    advice = when_to_decode_on_the_gpu(report.values, works=works and settings.on_gpu)
    return Result.judged(works, f"{good} of {len(outcomes)} decode as the CPU does; {advice}")


def when_to_decode_on_the_gpu(rates: Mapping[str, Any], *, works: bool) -> str:
    """Whether `--decode gpu` pays. `rates`: those of `decoder`, by its kind and load; `works`: as on the CPU."""
    if not works:
        return "--decode gpu does not work here"
    on_cpu, on_gpu = rates["cpu None"], rates["whole 1.0"]
    both = (
        f"{on_gpu['images_per_s']:,.0f} images/s, against {on_cpu['images_per_s']:,.0f} by {on_cpu['cores']:.1f} cores"
    )
    if on_gpu["images_per_s"] <= on_cpu["images_per_s"]:
        return f"--decode gpu does not pay: {both}"
    return f"--decode gpu pays if the loader needs more: {both}"


def decoder(settings: Settings, kind: str, load: float | None) -> dict[str, float]:
    """Decode random crops of batches at the largest resolution with DALI alone, without a loader.

    {"images_per_s", "cores", "error"}: the error is the mean difference from DALI's decoder on the CPU, in levels.
    """
    import numpy as np
    from nvidia.dali import Pipeline, fn, types

    from resolute.benchmarks.loaders.ours import training_plan
    from resolute.pipeline.loader.reader import Reader

    shards = shared.open_set(settings)
    stage = shared.stage_of(shards, settings.resolutions[-1], batches=1, batch_size=_DECODED if settings.on_gpu else 8)
    spec, reader = training_plan(shards, [stage]).batch(0), Reader(shards)
    read = reader.submit(spec.split, spec.stored_res, spec.ids).result()
    jpegs = [np.array(image[:size]) for image, size in zip(read.images, read.nbytes, strict=True)]
    reader.close()
    inputs = {
        "jpeg": jpegs,
        "start": np.ascontiguousarray(spec.crops[:, 1::-1]),
        "shape": np.ascontiguousarray(spec.crops[:, :1:-1]),
    }

    def built(kind: str, device_id: int | None) -> Any:
        pipe = Pipeline(
            batch_size=len(jpegs),
            num_threads=settings.threads,
            device_id=device_id,
            exec_dynamic=True,
            prefetch_queue_depth=_IN_FLIGHT,
        )
        with pipe:
            jpeg = fn.external_source(name="jpeg", dtype=types.UINT8, ndim=1)
            start, shape = (fn.external_source(name=name, dtype=types.INT32, ndim=1) for name in ("start", "shape"))
            region = {"start": start, "shape": shape, "axes": [0, 1]}
            options = {"output_type": types.RGB, "jpeg_fancy_upsampling": True}
            if kind == "whole":
                images = fn.slice(fn.decoders.image(jpeg, device="mixed", hw_decoder_load=load, **options), **region)
            elif kind == "region":
                images = fn.decoders.image_slice(jpeg, device="mixed", hw_decoder_load=load, **region, **options)
            else:
                images = fn.decoders.image_slice(jpeg, device="cpu", **region, **options)
                images = images.gpu() if device_id is not None else images
            pipe.set_outputs(images)
        pipe.build()
        return pipe

    def feed(pipe: Any) -> None:
        for name, value in inputs.items():
            pipe.feed_input(name, value)

    def first_crops(pipe: Any) -> list[Any]:
        for _ in range(_IN_FLIGHT):
            feed(pipe)
        pipe.schedule_run()
        (images,) = pipe.share_outputs()
        host = images.as_cpu() if hasattr(images, "as_cpu") else images
        return [np.array(host.at(i)) for i in range(len(jpegs))]

    expected = first_crops(built("cpu", None))
    pipe = built(kind, 0 if settings.on_gpu else None)
    errors = [np.abs(got.astype(int) - want).mean() for got, want in zip(first_crops(pipe), expected, strict=True)]
    number, cpu_s, began = 0, time.process_time(), time.perf_counter()
    while time.perf_counter() - began < settings.seconds:
        pipe.release_outputs()
        feed(pipe)
        pipe.schedule_run()
        pipe.share_outputs()
        number += 1
    shared.synchronise(settings)
    elapsed_s = time.perf_counter() - began
    return {
        "images_per_s": number * len(jpegs) / elapsed_s,
        "cores": (time.process_time() - cpu_s) / elapsed_s,
        "error": float(np.mean(errors)),
    }


# ---- ranks -----------------------------------------------------------------------------------------------------------


def ranks(settings: Settings, report: Report) -> Result:
    """Two ranks: losses as with one, with and without `precision.compile`, and gradients averaged during backward.

    Then two ranks are killed, and resume. Where there is one GPU, they share it and gloo connects them, which averages
    on the CPU; NCCL needs a GPU for each.
    """
    import torch

    shared_gpu = settings.on_gpu and torch.cuda.device_count() < 2
    environment = {**os.environ, "RESOLUTE_SHARE_GPU": "1"} if shared_gpu else {**os.environ}
    good, words = True, ["both on one GPU, by gloo"] if shared_gpu else []
    report.table("", "steps#", "last loss#", "largest difference from one rank#", "averaging that overlaps, %#")
    for name in ("eager", "compiled") if settings.on_gpu else ("eager",):
        program = ["resolute.benchmarks.gpu_check.parts", "rank", settings.folder, name]
        # why --: torchrun has a --run-path
        two = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "--", *program]
        found = []
        for command in (program, two):
            done = subprocess.run(
                [sys.executable, "-m", *command], capture_output=True, text=True, check=False, env=environment
            )
            print(done.stdout, done.stderr)
            lines = [line for line in done.stdout.splitlines() if line.startswith('{"losses"')]
            if done.returncode or not lines:
                words.append(f"{name}: status {done.returncode}: {shared.last_line(done.stderr)}")
                break
            found.append(json.loads(lines[-1]))
        else:
            alone, got = found
            difference = max(abs(a - b) for a, b in zip(alone["losses"], got["losses"], strict=True))
            share = "" if got["overlap"] is None else f"{100 * got['overlap']:.0f}"
            report.values[name] = {**got, "losses_of_one_rank": alone["losses"]}
            report.row(name, len(got["losses"]), f"{got['losses'][-1]:.3f}", f"{difference:.2g}", share)
            words.append(
                f"{name}: losses of {len(got['losses'])} steps differ by at most {difference:.2g} from those of "
                f"one rank (allowed: {_RANK_DIFFERENCE})" + (f", {share} % overlaps" if share else "")
            )
            good &= difference <= _RANK_DIFFERENCE
            good &= not settings.on_gpu or shared_gpu or (got["overlap"] or 0.0) > 0.2
            continue
        good = False
    resumed = shared.kill_and_resume(
        settings, shared.tiny_recipe(settings, "ranks"), "ranks", environment=environment, more=("--gpus", "2")
    )
    report.values["resumed"] = resumed.losses
    words.append(f"killed and resumed: {resumed.problem or f'{len(resumed.losses)} steps, each once'}")
    return Result.judged(good and not resumed.problem, "; ".join(words))


def rank(settings: Settings, kind: str) -> dict[str, Any] | None:
    """One of two ranks, or the only one: train some steps under a profiler; {"losses", "overlap"} of the first rank.

    The network has no batch normalisation, which depends on the number of ranks, and computes in float32.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    from resolute.pipeline.loader.loader import Loader
    from resolute.train.devices.distributed import join
    from resolute.train.learner import Learner
    from resolute.train.warmup import shapes, warm_up

    with join(settings.device) as joined:
        device = joined.device("cuda") if settings.on_gpu else torch.device("cpu")
        shards = shared.open_set(settings)
        size = min(_RANK_BATCH, settings.train_batch_size, len(shards.splits["train"])) // 2 * 2
        stage = shared.stage_of(shards, settings.resolutions[0], batches=2 * _RANK_STEPS, batch_size=size)
        precision: dict[str, Any] = {"amp": "off", **({"tf32": "off"} if settings.on_gpu else {})}
        network = dataclasses.replace(settings, model="convnext_tiny" if settings.on_gpu else "test_convnext")
        recipe = shared.recipe_of(network, [stage], compile=kind == "compiled", **precision)
        plan, losses = recipe.plan(shards), []
        learner = Learner(
            recipe, classes=len(shards.classes), total_steps=plan.total_steps, device=device, ranks=joined
        )
        todo = shapes(plan, rank=joined.rank, world_size=joined.world_size)
        warm_up(learner, [shape for shape in todo if shape[0] == "train"])
        options = {**shared.loader_options(settings), "device": device}
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * settings.on_gpu
        with Loader(plan, rank=joined.rank, world_size=joined.world_size, **options) as batches:
            for batch in itertools.islice(batches, 3):
                learner.train_step(batch)
            with profile(activities=activities) as profiler:
                for batch in itertools.islice(batches, _RANK_STEPS):
                    losses.append(learner.train_step(batch)[0])
                if settings.on_gpu:
                    torch.cuda.synchronize()  # sync: ends the profile
        kernels = [
            (event.name, event.time_range.start, event.time_range.end)
            for event in profiler.events()
            if event.device_type.name == "CUDA"
        ]
        whole = joined.sum(torch.stack(losses)).tolist()
        return {"losses": whole, "overlap": overlap(kernels)} if joined.is_main else None


def overlap(kernels: Iterable[tuple[str, float, float]]) -> float | None:
    """Fraction of the time of NCCL's kernels (name, start, end) during which others run; None without any of NCCL's."""
    listed = sorted(kernels, key=lambda kernel: kernel[1])
    ours = [(start, end) for name, start, end in listed if "nccl" not in name.lower()]
    both = total = 0.0
    for name, start, end in listed:
        if "nccl" not in name.lower():
            continue
        total += end - start
        reached = start
        for begin, stop in ours:
            if begin >= end:
                break
            both += max(0.0, min(stop, end) - max(begin, reached))
            reached = max(reached, min(stop, end))
    return both / total if total else None
