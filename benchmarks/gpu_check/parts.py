"""The parts of the check, each of which runs in a process of its own.

    python -m resolute.benchmarks.gpu_check.parts NAME FOLDER      # reads FOLDER/settings.json, writes FOLDER/NAME.json

A part returns a `Result`; an exception is a failure that its message explains. Targets apply to a GPU only: on a CPU
the same code runs at sizes that say nothing about speed.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import contextlib
import dataclasses
import itertools
import json
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .result import Part, Result, Settings

if TYPE_CHECKING:

    from resolute.pipeline.dataset.shard_set import ShardSet
    from resolute.pipeline.plan.plan import Plan
    from resolute.pipeline.plan.stage import Stage
    from resolute.train.loop import Learner

__all__ = ["PARTS", "busy_and_gaps", "run", "switch_costs"]

# images/s of the loader at each resolution on one H200, and live training relative to synthetic batches
_TARGETS = {128: 24_000, 160: 15_000, 224: 8_000}
_LIVE_FRAC = 0.99
_HW_LOADS = (0.65, 0.9, 1.0)
_FIRST = 5  # steps after a switch
_STEPS = 20  # without any synchronisation
_TRACED = 10
_GAP_US = 100.0  # shorter pauses of the device are not counted

PARTS = (
    Part(name="device", title="Device and driver", limit_s=30),
    Part(name="tests", title="GPU tests", limit_s=120),
    Part(name="pixels", title="Pixels against the CPU's", limit_s=60),
    Part(name="loader", title="Loader alone", limit_s=150),
    Part(name="sync", title="20 steps without a synchronisation", limit_s=40),
    Part(name="trace", title="Profile of 10 steps", limit_s=40),
    Part(name="training", title="Live against synthetic batches", limit_s=150),
    Part(name="switch", title="Cost of a stage switch", limit_s=60),
    Part(name="resume", title="Kill and resume", limit_s=90),
    Part(name="memory", title="Out of memory, and batch_size = auto", limit_s=60),
    Part(name="ranks", title="Two ranks", limit_s=60),
)


def _augments() -> dict[str, dict[str, Any]]:
    """Keys of [augment] by name."""
    mixing = {"mixup_alpha": 0.2, "cutmix_alpha": 1.0}
    policy = {**mixing, "policy": "randaugment", "random_erasing_prob": 0.25, "mixup_mode": "elem"}
    return {"plain": {}, "mixing": mixing, "policy": policy}


# ---- the parts -------------------------------------------------------------------------------------------------------


def device(settings: Settings) -> Result:
    import torch

    from resolute.benchmarks.record import machine, versions

    facts: dict[str, Any] = {**machine(torch.device(settings.device)), **versions([])}
    if settings.on_gpu:
        queried = "name,driver_version,pcie.link.gen.max,pcie.link.width.max,power.limit"
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            facts["nvidia-smi"] = subprocess.run(
                ["nvidia-smi", f"--query-gpu={queried}", "--format=csv,noheader"], capture_output=True, text=True,
                timeout=15, check=True,
            ).stdout.strip()  # fmt: skip
        facts |= {"CUDA of torch": torch.version.cuda, "cuDNN": torch.backends.cudnn.version()}
        for i in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(i)
            facts[f"cuda:{i}"] = (
                f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, {gpu.total_memory / 2**30:.1f} GiB, "
                f"{gpu.multi_processor_count} multiprocessors"
            )
    rows = [[name, str(value)] for name, value in facts.items()]
    summary = str(facts["gpu"] or facts["cpu"])
    return Result(verdict="passed", summary=summary, tables=[(["", ""], rows)], values=facts)


def tests(settings: Settings) -> Result:
    root = Path(__file__).resolve().parents[2]
    if not (root / "tests/gpu").is_dir():
        return Result(verdict="skipped", summary="no tests/gpu beside benchmarks: not a checkout")
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-n", "0", "-p", "no:cacheprovider", "tests/gpu"]
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    print(done.stdout)
    lines = done.stdout.strip().splitlines() or ["no output"]
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|error)", lines[-1])}
    if "No module named pytest" in done.stdout:
        return Result(verdict="skipped", summary="pytest is not installed: `make test` installs it")
    if done.returncode == 0 and not counts.get("passed"):
        return Result(verdict="skipped", summary=f"{counts.get('skipped', 0)} tests need a CUDA device", values=counts)
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return Result.judged(done.returncode == 0, "; ".join([lines[-1].strip("= "), *failures[:3]]), values=counts)


def pixels(settings: Settings) -> Result:
    """Both decodes and all recipes against the loader on the CPU: mean within 1.5 levels of 255 for half the images."""
    from resolute.pipeline.loader.loader import Loader

    rows, good, values = [], True, {}
    for name, keys in _augments().items():
        plan = _plan(settings, _shards(settings), batches=2, augment=keys)
        for decode in _decodes(settings):
            errors: list[float] = []
            with Loader(plan) as ours, Loader(plan, device=settings.device, decode=decode) as theirs:
                for expected, got in zip(ours, itertools.islice(theirs, 4), strict=False):
                    levels = (got.images.float().cpu() - expected.images).abs().mean(dim=(1, 2, 3)) * 0.226 * 255
                    errors += levels.tolist()
            median, high = statistics.median(errors), sorted(errors)[int(0.9 * len(errors))]
            good &= median < 1.5 and high < 8
            values[f"{name} {decode}"] = errors
            rows.append([name, f"decode {decode}", f"{median:.3f}", f"{high:.3f}", f"{max(errors):.3f}"])
    worst = max(float(row[2]) for row in rows)
    return Result.judged(
        good, f"median error of an image at most {worst:.3f} levels of 255 (allowed: 1.5; 8 for nine of ten images)",
        tables=[(["recipe", "decode", "median#", "9 of 10#", "largest#"], rows)], values=values,
    )  # fmt: skip


def loader(settings: Settings) -> Result:
    """Images/s of the loader for each resolution, recipe and decode; `hw_decoder_load` for the plain recipe."""
    import torch

    device, rows, rates = torch.device(settings.device), [], []
    shards = _shards(settings)
    for res, (name, keys), decode in itertools.product(settings.resolutions, _augments().items(), _decodes(settings)):
        loads: Sequence[float | None] = [None]
        if decode == "gpu":
            loads = _HW_LOADS if name == "plain" else _HW_LOADS[:1]
        for load in loads:
            rate, host_us = _loader_rate(settings, shards, res, keys, decode=decode, hw_decoder_load=load)
            rates.append({"res": res, "recipe": name, "decode": decode, "hw_decoder_load": load, "images_per_s": rate,
                          "host_us_per_image": host_us})  # fmt: skip
            rows.append([f"{res} px", name, decode, "" if load is None else f"{load:g}", f"{rate:,.0f}",
                         f"{host_us:.2f}"])  # fmt: skip
            print(rows[-1], flush=True)
    best = {res: max(r["images_per_s"] for r in rates if (r["res"], r["recipe"]) == (res, "plain"))
            for res in settings.resolutions}  # fmt: skip
    summary = ", ".join(f"{rate:,.0f} images/s at {res} px" for res, rate in best.items())
    held = device.type == "cuda" and "H200" in torch.cuda.get_device_name(device)
    if held:
        summary += " (targets: " + ", ".join(f"{_TARGETS.get(res, 0):,}" for res in best) + ")"
    return Result.judged(
        not held or all(rate >= _TARGETS.get(res, 0) for res, rate in best.items()), f"plain: {summary}",
        tables=[(["", "recipe", "decode", "hw_decoder_load", "images/s#", "host us/image#"], rows)],
        values={"rates": rates},
    )  # fmt: skip


def sync(settings: Settings) -> Result:
    """Loader and optimizer steps under torch's check for synchronisations of the host with the device."""
    import torch

    with _training(settings, steps=_STEPS + 10, augment=_augments()["policy"]) as (batches, learner):
        for batch in itertools.islice(batches, 5):
            learner.train_step(batch)
        if settings.on_gpu:
            torch.cuda.set_sync_debug_mode("error")
        try:
            for batch in itertools.islice(batches, _STEPS):
                learner.train_step(batch)
        finally:
            if settings.on_gpu:
                torch.cuda.set_sync_debug_mode("default")
    if not settings.on_gpu:
        return Result(verdict="skipped", summary=f"a CPU does not run ahead; {_STEPS} steps ran")
    return Result(verdict="passed", summary=f"{_STEPS} steps without a synchronisation")


def trace(settings: Settings) -> Result:
    """Trace of some steps for chrome://tracing, and the pauses between kernels (on a CPU: between operations)."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * settings.on_gpu
    with _training(settings, steps=_TRACED + 10, augment=_augments()["policy"]) as (batches, learner):
        for batch in itertools.islice(batches, 5):
            learner.train_step(batch)
        _synchronize(settings)
        with profile(activities=activities) as profiler:
            for batch in itertools.islice(batches, _TRACED):
                learner.train_step(batch)
            _synchronize(settings)
    path = Path(settings.folder, "trace.json.gz")
    profiler.export_chrome_trace(str(path))
    kind = "CUDA" if settings.on_gpu else "CPU"
    spans = [(event.time_range.start, event.time_range.end) for event in profiler.events()
             if event.device_type.name == kind and (settings.on_gpu or event.cpu_parent is None)]  # fmt: skip
    busy, gaps = busy_and_gaps(spans)
    gaps.sort(reverse=True)
    longest = [f"{gap / 1e3:.2f} ms" for gap in gaps[:5]]
    what = "GPU" if settings.on_gpu else "torch"
    return Result.judged(
        bool(spans), f"{what} busy {100 * busy:.1f} % of the time, {len(gaps)} pauses above {_GAP_US / 1e3:g} ms in "
        f"{_TRACED} steps, longest {longest[0] if longest else 'none'}; {path.name}",
        tables=[(["longest pauses"], [[gap] for gap in longest])], values={"busy_frac": busy, "gaps_us": gaps},
    )  # fmt: skip


def training(settings: Settings) -> Result:
    """Training on the loader's batches, on cached and on synthetic ones, in bf16 and channels_last."""
    import torch

    from resolute.benchmarks.training import stalls

    shards, rows, values, good = _shards(settings), [], {}, True
    for compiled in (False, True) if settings.on_gpu else (False,):
        # why one size: compiling takes half a minute per shape
        sizes = settings.resolutions[-1:] if compiled else settings.resolutions
        measured = stalls.measure(
            dataclasses.replace(shards, resolutions=sizes), device=torch.device(settings.device),
            threads=settings.threads, batch_size=settings.train_batch_size, seconds=2 * settings.seconds, rounds=1,
            model=settings.model, compiled=compiled,
        )  # fmt: skip
        values["compiled" if compiled else "eager"] = measured
        for entry in measured["res"]:
            rates = {kind: entry["images_per_s"][kind]["median"] for kind in ("live", "cached", "synthetic")}
            part = rates["live"] / rates["synthetic"]
            good &= part >= _LIVE_FRAC or not settings.on_gpu
            rows.append([f"{entry['res']} px", "compiled" if compiled else "eager",
                         *(f"{rate:,.0f}" for rate in rates.values()), f"{part:.3f}",
                         f"{100 * entry['stall_frac']['median']:.2f} %"])  # fmt: skip
            print(rows[-1], flush=True)
    amp = values["eager"]["amp"]
    worst = min(float(row[5]) for row in rows)
    limit = f" (at least {_LIVE_FRAC})" if settings.on_gpu else ""
    return Result.judged(
        good, f"{settings.model}, amp {amp}, batch {settings.train_batch_size}: live at least {worst:.3f} of "
        f"synthetic{limit}",
        tables=[(["", "", "live#", "cached#", "synthetic#", "live / synthetic#", "stall#"], rows)], values=values,
    )  # fmt: skip


def switch(settings: Settings) -> Result:
    """Time lost at each stage switch: the first steps after it beyond as many steady ones, by events of the device."""
    import torch

    from resolute import cuda
    from resolute.pipeline.loader.loader import Loader
    from resolute.train.loop import Learner
    from resolute.train.warmup import shapes, warm_up

    device, shards = torch.device(settings.device), _shards(settings)
    stages = [_stage(settings, shards, res, batches=0) for res in settings.resolutions]
    recipe = _recipe(settings, stages, {})
    plan = recipe.plan(shards)
    learner = Learner(recipe, classes=len(shards.classes), total_steps=plan.total_steps, device=device)
    warm_up(learner, shapes(plan))
    marks: list[Any] = []
    numbers: list[int] = []

    def mark() -> None:
        marks.append(cuda.record_event(device) if settings.on_gpu else time.perf_counter())

    with Loader(plan, **_loader_options(settings)) as batches:
        for batch in batches:
            if batch.spec.split == "val":
                continue
            if not marks:
                mark()
            learner.train_step(batch)
            mark()
            numbers.append(batch.spec.stage)
        _synchronize(settings)
    between = cuda.elapsed_s if settings.on_gpu else lambda a, b: b - a
    steps_s = [between(a, b) for a, b in itertools.pairwise(marks)]
    costs = switch_costs(numbers, steps_s)
    rows = [[f"{settings.resolutions[c['stage'] - 1]} -> {settings.resolutions[c['stage']]} px",
             f"{1e3 * c['cost_s']:.1f}", f"{1e3 * c['steady_s']:.1f}", f"{c['slowest_ratio']:.2f}"]
            for c in costs]  # fmt: skip
    worst = max(c["cost_s"] / c["steady_s"] for c in costs)
    return Result.judged(
        worst <= 1 or not settings.on_gpu,
        f"at most {worst:.2f} steady steps over the first {_FIRST} (allowed: {'1' if settings.on_gpu else 'any'})",
        tables=[(["switch", "cost ms#", "steady step ms#", "slowest / steady#"], rows)],
        values={"costs": costs, "steps_s": steps_s},
    )  # fmt: skip


def resume(settings: Settings) -> Result:
    """A run killed with SIGKILL and started again, against one that was not."""
    from resolute.train.logs.metrics import read_log

    runs = Path(settings.folder, "runs")
    recipe = _tiny_recipe(settings, "resume")
    whole = _train(settings, recipe, runs, "whole")
    if whole.returncode:
        return Result.judged(False, f"status {whole.returncode}: {_last_line(whole.stderr)}")
    steps = len(_steps(read_log(runs / "whole/run.jsonl")))
    log = runs / "killed/run.jsonl"
    process = subprocess.Popen(_train_command(settings, recipe, runs, "killed"), stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)  # fmt: skip
    try:
        # why by lines: the log is written at each checkpoint, so some of its steps are saved and later ones are not
        while process.poll() is None and not (log.exists() and log.read_bytes().count(b'"kind": "step"') >= steps // 2):
            time.sleep(0.02)
    finally:
        killed = process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
    resumed = _train(settings, recipe, runs, "killed")
    logs = [read_log(runs / name / "run.jsonl") for name in ("whole", "killed")]
    losses = [{record["step"]: record["loss"] for record in _steps(records)} for records in logs]
    complete = resumed.returncode == 0 and losses[0].keys() == losses[1].keys() and len(_steps(logs[1])) == steps
    difference = max((abs(losses[0][i] - losses[1][i]) for i in losses[0] if i in losses[1]), default=0.0)
    same = "losses are bit-identical" if not difference else f"losses differ by at most {difference:.2g}"
    if not killed:
        return Result(verdict="skipped", summary="the run ended before it could be killed")
    return Result.judged(
        complete and (settings.on_gpu or not difference),
        f"{steps} steps, each once; {same} to those of an undisturbed run" if complete
        else f"status {resumed.returncode}: {_last_line(resumed.stderr)}; {len(losses[1])} of {steps} steps in the log",
        values={"losses": [list(each.values()) for each in losses]},
    )  # fmt: skip


def memory(settings: Settings) -> Result:
    """A batch that does not fit is refused in one line; batch_size = "auto" finds one that does."""
    runs = Path(settings.folder, "runs")
    if not settings.on_gpu:
        refused = _train(settings, _tiny_recipe(settings, "auto", batch_size="auto"), runs, "auto")
        good = refused.returncode == 2 and "batch_size" in refused.stderr
        if good:
            return Result(verdict="skipped", summary=f"a CPU has no memory of its own: {_last_line(refused.stderr)}")
        return Result.judged(False, f"status {refused.returncode}: {_last_line(refused.stderr)}")
    big = _tiny_recipe(settings, "big", batch_size=2048, model=settings.model, res=settings.resolutions[-1], epochs=1)
    refused = _train(settings, big, runs, "big", "--gpu-memory-gib", "2")
    message = _last_line(refused.stderr)
    auto_run = _train(settings, _tiny_recipe(settings, "auto", batch_size="auto", epochs=1), runs, "auto",
                      "--gpu-memory-gib", "1")  # fmt: skip
    sizes = re.findall(r"batch_size[^\n]*", auto_run.stdout)
    good = refused.returncode == 2 and "out of memory" in message and auto_run.returncode == 0
    auto = sizes[0] if auto_run.returncode == 0 and sizes else _last_line(auto_run.stderr)
    return Result.judged(good, f"too large: {message} | auto: {auto}")


def ranks(settings: Settings) -> Result:
    import torch

    if settings.on_gpu and torch.cuda.device_count() < 2:
        return Result(verdict="skipped", summary=f"needs two devices, got {torch.cuda.device_count()}")
    from resolute.train.logs.metrics import read_log

    runs, recipe = Path(settings.folder, "runs"), _tiny_recipe(settings, "ranks", epochs=1)
    # why --: torchrun has a --run-path
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "--"]
    command = [*launch, *_train_command(settings, recipe, runs, "ranks")[2:]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    if done.returncode:
        return Result.judged(False, f"status {done.returncode}: {_last_line(done.stderr)}")
    losses = [record["loss"] for record in _steps(read_log(runs / "ranks/run.jsonl"))]
    return Result.judged(bool(losses), f"{len(losses)} steps on two ranks, last loss {losses[-1]:.3f}")


# ---- what they share -------------------------------------------------------------------------------------------------


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


def switch_costs(stages: Sequence[int], steps_s: Sequence[float]) -> list[dict[str, Any]]:
    """[{"stage", "cost_s", "steady_s", "slowest_ratio"}] of each stage but the first, from each step's stage and time.

    The cost is the time of its first `_FIRST` steps minus as many steady ones (the median of its later steps).
    """
    costs = []
    for stage in sorted(set(stages))[1:]:
        own = [step_s for number, step_s in zip(stages, steps_s, strict=True) if number == stage]
        steady = statistics.median(own[min(_FIRST, len(own) // 2) :])
        first = own[:_FIRST]
        costs.append({"stage": stage, "cost_s": sum(first) - len(first) * steady, "steady_s": steady,
                      "slowest_ratio": max(first) / steady})  # fmt: skip
    return costs


def _decodes(settings: Settings) -> tuple[Any, ...]:
    return ("cpu", "gpu") if settings.on_gpu else ("cpu",)


def _shards(settings: Settings) -> ShardSet:
    from resolute.pipeline.dataset.shard_set import ShardSet

    return dataclasses.replace(ShardSet.open(settings.shards), resolutions=settings.resolutions)


def _stage(settings: Settings, shards: ShardSet, res: int, *, batches: int, **augment: Any) -> Stage:
    """A stage of at least `batches` full training batches; 0: `stage_epochs` epochs."""
    from resolute.benchmarks.loaders.ours import full_batches
    from resolute.pipeline.plan.stage import Augment

    stage = full_batches(shards, res, batches=max(1, batches), batch_size=settings.train_batch_size)
    if not batches:
        stage = dataclasses.replace(stage, epochs=settings.stage_epochs, fraction=1.0)
    return dataclasses.replace(stage, augment=Augment(**augment))


def _plan(settings: Settings, shards: ShardSet, *, batches: int, augment: dict[str, Any]) -> Plan:
    from resolute.benchmarks.loaders.ours import training_plan

    return training_plan(shards, [_stage(settings, shards, res, batches=batches, **augment)
                                  for res in settings.resolutions])  # fmt: skip


def _loader_options(settings: Settings) -> dict[str, Any]:
    import torch

    return {"device": settings.device, "num_threads": settings.threads,
            "dtype": torch.float16 if settings.on_gpu else torch.float32}  # fmt: skip


def _loader_rate(
    settings: Settings, shards: ShardSet, res: int, augment: dict[str, Any], **options: Any
) -> tuple[float, float]:
    """(images/s, CPU time of the consumer's thread in us per image) of the loader alone."""
    from resolute.benchmarks.loaders.ours import full_batches, training_plan
    from resolute.pipeline.loader.loader import Loader
    from resolute.pipeline.plan.stage import Augment

    batch_size = min(settings.batch_size, len(shards.splits["train"]))
    batches = 8 + int(settings.seconds * 50_000 / batch_size)
    stage = full_batches(shards, res, batches=batches, batch_size=batch_size)
    plan = training_plan(shards, [dataclasses.replace(stage, augment=Augment(**augment))])
    with Loader(plan, **_loader_options(settings), **options) as batches_:
        for _ in range(6):
            next(batches_)
        _synchronize(settings)
        images, began, host = 0, time.perf_counter(), time.thread_time()
        for batch in batches_:
            images += len(batch.spec)
            if time.perf_counter() - began > settings.seconds:
                break
        _synchronize(settings)
        elapsed_s, host_s = time.perf_counter() - began, time.thread_time() - host
    return images / elapsed_s, 1e6 * host_s / images


@contextlib.contextmanager
def _training(settings: Settings, *, steps: int, augment: dict[str, Any]) -> Iterator[tuple[Any, Learner]]:
    """(batches, learner) for `steps` steps at the largest resolution, warmed up."""
    import torch

    from resolute.pipeline.loader.loader import Loader
    from resolute.train.loop import Learner
    from resolute.train.warmup import shapes, warm_up

    shards = _shards(settings)
    stage = _stage(settings, shards, settings.resolutions[-1], batches=steps, **augment)
    recipe = _recipe(settings, [stage], augment)
    plan = recipe.plan(shards)
    torch.backends.cudnn.benchmark = settings.on_gpu
    learner = Learner(recipe, classes=len(shards.classes), total_steps=plan.total_steps,
                      device=torch.device(settings.device))  # fmt: skip
    warm_up(learner, shapes(plan))
    with Loader(plan, **_loader_options(settings)) as batches:
        yield (batch for batch in batches if batch.spec.split == "train"), learner


def _recipe(settings: Settings, stages: Sequence[Stage], augment: dict[str, Any]) -> Any:
    from resolute.train.recipe.schema import Recipe

    tables = [{"res": s.res, "epochs": s.epochs, "batch_size": s.batch_size, "fraction": s.fraction} for s in stages]
    return Recipe.parse(
        {"model": {"name": settings.model}, "optim": {"lr": 1e-3}, "augment": augment, "stages": tables,
         "eval": {"every_epochs": 1000}},
        name="gpu-check",
    )  # fmt: skip


def _tiny_recipe(settings: Settings, name: str, *, batch_size: int | str = 8, epochs: int = 3, **changed: Any) -> Path:
    """A recipe file: two stages of a tiny model, or one with the `model` and `res` of `changed`."""
    sizes = [changed["res"]] if "res" in changed else settings.resolutions[:2]
    size = json.dumps(batch_size)
    stages = "".join(f"[[stages]]\nres = {res}\nepochs = {epochs}\nbatch_size = {size}\n" for res in sizes)
    amp = '[precision]\namp = "off"\n'
    path = Path(settings.folder, f"{name}.toml")
    path.write_text(f'[model]\nname = "{changed.get("model", "test_resnet")}"\n{amp}{stages}', encoding="utf-8")
    return path


def _train_command(settings: Settings, recipe: Path, runs: Path, run: str) -> list[str]:
    return [sys.executable, "-m", "resolute", "train", "--shards", settings.shards, "--recipe", str(recipe),
            "--run", run, "--runs", str(runs), "--device", settings.device, "--threads", str(settings.threads),
            "--save-every-steps", "5"]  # fmt: skip


def _train(
    settings: Settings, recipe: Path, runs: Path, run: str, *more: str
) -> subprocess.CompletedProcess[str]:
    command = [*_train_command(settings, recipe, runs, run), *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(f"$ {' '.join(command)}\n{done.stdout}{done.stderr}", flush=True)
    return done


def _steps(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if record["kind"] == "step"]


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1]


def _synchronize(settings: Settings) -> None:
    if settings.on_gpu:
        import torch

        from resolute import cuda

        cuda.synchronize(torch.device("cuda"))  # sync: ends a timed interval


_FUNCTIONS: dict[str, Callable[[Settings], Result]] = {
    "device": device, "tests": tests, "pixels": pixels, "loader": loader, "sync": sync, "trace": trace,
    "training": training, "switch": switch, "resume": resume, "memory": memory, "ranks": ranks,
}  # fmt: skip


_LIGHT = ("tests", "resume", "memory")  # parts that only start other processes


def run(name: str, settings: Settings) -> Result:
    """Run a part. An exception is a failure."""
    import traceback

    try:
        return _FUNCTIONS[name](settings)
    except Exception as error:
        traceback.print_exc()
        text = " ".join(str(error).split())
        return Result(verdict="failed", summary=f"{type(error).__name__}: {text[:500]}")


def main(argv: Sequence[str] | None = None) -> int:
    name, folder = sys.argv[1:] if argv is None else argv
    settings = Settings.load(Path(folder, "settings.json"))
    if not settings.on_gpu and name not in _LIGHT:
        import torch

        torch.set_num_threads(settings.threads)
    result = run(name, settings)
    Path(folder, f"{name}.json").write_text(json.dumps(dataclasses.asdict(result)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
