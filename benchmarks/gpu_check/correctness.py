"""The parts that check what a GPU computes: kernels, pixels, memory of batches, synchronisation, resuming."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from . import shared
from .result import Report, Result, Settings

__all__ = ["buffers", "graphs", "kernels", "memory", "pixels", "resume", "sanitizer", "sync", "tests"]

_STEPS = 20  # training steps of `sync` and `graphs`
_KERNEL_IMAGES, _KERNEL_RES = 64, 67  # a size at which a program ends within a block
_JITTER_AFTER_BLUR = ("3-augment",)
_SLEEP_CYCLES = 200_000_000  # of the GPU's clock: about 0.1 s
_LATE_EVERY = 6  # batches from one pause of the GPU to the next: more than are in flight
_LOSS_LIMIT = 0.05  # of the losses of captured and of eager steps
_SANITIZED_S = 45  # time limit of each tool


def tests(settings: Settings, report: Report) -> Result:
    """The tests in tests/gpu, if this is a checkout with pytest."""
    if not settings.on_gpu:
        return Result(verdict="skipped", summary="they need a CUDA device")
    root = Path(__file__).resolve().parents[2]
    if not (root / "tests/gpu").is_dir():
        return Result(verdict="skipped", summary="no tests/gpu beside benchmarks: not a checkout")
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-n", "0", "-p", "no:cacheprovider", "tests/gpu"]
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    print(done.stdout)
    lines = done.stdout.strip().splitlines() or ["no output"]
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|error)", lines[-1])}
    report.values |= counts
    if "No module named pytest" in done.stdout:
        return Result(verdict="skipped", summary="pytest is not installed: `make test` installs it")
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    good = done.returncode == 0 and counts.get("passed", 0) > 0
    return Result.judged(good, "; ".join([lines[-1].strip("= "), *failures[:3]]))


def kernels(settings: Settings, report: Report) -> Result:
    """Every Triton kernel on random uint8 images against the CPU's compiled functions: at most one level of 255 apart.

    Two where jitter follows a blur, whose weights are computed in float32 on a GPU and in float64 on the CPU: the
    jitter enlarges the difference. On a CPU, Triton's interpreter runs the kernels.
    """
    if not settings.on_gpu:
        os.environ["TRITON_INTERPRET"] = "1"
    import numpy as np
    import torch

    from resolute.pipeline.graph.gpu_augment import GpuAugment
    from resolute.pipeline.plan.augment_params import erase_noise, used_ops
    from resolute.pipeline.plan.stage import Augment

    count, res = (_KERNEL_IMAGES, _KERNEL_RES) if settings.on_gpu else (4, 19)
    mean, std, rng = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), np.random.default_rng(0)
    noise, good, worst = erase_noise(mean, std), True, 0
    report.table("augmentation", "largest difference#", "values that differ, %#")
    recipes: dict[str, dict[str, Any]] = {
        "randaugment": {"policy": "randaugment", "num_ops": 3},
        "trivialaugment": {"policy": "trivialaugment"},
        "autoaugment": {"policy": "autoaugment"},
        "3-augment": {"policy": "3-augment"},
        "jitter, grey, blur": {"jitter": (0.4, 0.4, 0.4, 0.1), "grey_prob": 0.3, "blur_prob": 0.3},
        "erasing, mixup, cutmix": {
            "random_erasing_prob": 0.7,
            "random_erasing_fill": "noise",
            "mixup_alpha": 0.5,
            "cutmix_alpha": 1.0,
        },
    }
    for name, keys in recipes.items():
        augment = Augment(**keys)
        images = rng.integers(0, 256, (count, res, res, 3), dtype=np.uint8)
        images[::4] //= 16  # faint ones, on which contrast and equalisation act strongly
        ops, spec = used_ops([augment]), _spec(augment, count, res)
        finish = GpuAugment(
            ops,
            mean=mean,
            std=std,
            noise=noise,
            dtype=torch.float32,
            as_bytes=True,
            device=torch.device(settings.device),
        )
        got = finish(torch.from_numpy(images).to(settings.device), *finish.rows(spec)).cpu().numpy()
        finish.close()
        difference = np.abs(got.astype(int) - _on_cpu(images, spec, noise=noise, mean=mean))
        worst, allowed = max(worst, int(difference.max())), 2 if name in _JITTER_AFTER_BLUR else 1
        good &= int(difference.max()) <= allowed
        report.row(name, difference.max(), f"{100 * (difference > 0).mean():.4f}")
    return Result.judged(good, f"at most {worst} of 255 apart on equal images (allowed: 1, with jitter after a blur 2)")


def _spec(augment: Any, count: int, res: int) -> Any:
    """A batch of `count` images whose parameters are drawn as in a run; a third each mixup, cutmix and neither."""
    import numpy as np

    from resolute.pipeline.dataset.format import STORED
    from resolute.pipeline.plan.augment_params import CUTMIX, MIXUP, used_ops
    from resolute.pipeline.plan.plan import BatchSpec
    from resolute.pipeline.plan.rows import train_rows

    ids, stored = np.arange(count), np.zeros(count, STORED)
    stored["width"] = stored["height"] = res
    numbers = {"seed": 0, "epoch": 0, "res": res, "batch": 0, "index": 0}
    rows = train_rows(augment, used_ops([augment]).slots, ids=ids, counters=ids, stored=stored, **numbers)
    rows["partner"], rows["mode"] = ids[::-1], ids % 3 * bool(augment.mixup_alpha)
    rows["lam"] = np.where(rows["mode"] == MIXUP, np.linspace(0.2, 0.8, count), 1)
    rows["box"] = np.where((rows["mode"] == CUTMIX)[:, None], (3, 5, 8, 9), 0)
    return BatchSpec(
        index=0,
        split="train",
        epoch=0,
        stage=0,
        res=res,
        stored_res=res,
        step=0,
        last=False,
        global_size=count,
        ids=ids,
        rows=rows,
    )


def _on_cpu(images: Any, spec: Any, *, noise: Any, mean: tuple[float, ...]) -> Any:
    """`images` (N, res, res, 3) uint8 after the operations, erasing and mixing of a batch, computed on the CPU."""
    import numpy as np

    from resolute.pipeline.graph.kernels.augment import apply_ops, blend
    from resolute.pipeline.plan.augment_params import CUTMIX, MIXUP, NOISE_PX

    out = images.copy()
    for image, row in zip(out, spec.rows, strict=True):
        apply_ops(image, row["kinds"], row["values"])
        (x, y, w, h), (top, left) = row["erase"], row["origin"]
        lines, columns = (top + np.arange(h)) % NOISE_PX, (left + np.arange(w)) % NOISE_PX
        image[y : y + h, x : x + w] = [round(255 * m) for m in mean] if top < 0 else noise[lines][:, columns]
    mixed = out.copy()
    for i, (mode, partner) in enumerate(zip(spec.modes, spec.partners, strict=True)):
        if mode == MIXUP:
            blend(out[i].reshape(-1), out[partner].reshape(-1), spec.lam[i], mixed[i].reshape(-1))
        elif mode == CUTMIX:
            x, y, w, h = spec.boxes[i]
            mixed[i, y : y + h, x : x + w] = out[partner, y : y + h, x : x + w]
    return mixed


def pixels(settings: Settings, report: Report) -> Result:
    """The loader's batches against those of a loader on the CPU: the resize rounds differently, and nothing else."""
    from resolute.pipeline.loader.loader import Loader

    good, worst = True, 0.0
    report.table("recipe", "median#", "9 of 10#", "largest#")
    for name, augment in shared.AUGMENTS.items():
        plan = shared.plan_of(settings, shared.open_set(settings), batches=1, augment=augment)
        errors: list[float] = []
        with Loader(plan) as ours, Loader(plan, device=settings.device) as theirs:
            for expected, got in zip(ours, theirs, strict=True):
                levels = (got.images.float().cpu() - expected.images).abs().mean(dim=(1, 2, 3)) * 0.226 * 255
                errors += levels.tolist()
        errors.sort()
        median, high = statistics.median(errors), errors[int(0.9 * len(errors))]
        good &= median < 1.5 and high < 8
        worst = max(worst, median)
        report.values[name] = {"median": median, "9 of 10": high, "largest": errors[-1]}
        report.row(name, f"{median:.3f}", f"{high:.3f}", f"{errors[-1]:.3f}")
    return Result.judged(
        good, f"median error of an image at most {worst:.3f} levels of 255 (allowed: 1.5; 8 for nine of ten images)"
    )


def buffers(settings: Settings, report: Report) -> Result:
    """Batches whose kernels run late, and which are dropped before: none may be overwritten by a later batch."""
    import torch

    from resolute.pipeline.loader.loader import Loader

    shards = shared.open_set(settings)
    plan = shared.plan_of(settings, shards, batches=8, augment=shared.AUGMENTS["mixing"])
    sums: list[list[Any]] = []
    for late in (False, True):
        with Loader(plan, **shared.loader_options(settings)) as batches:
            taken = []
            for number, batch in enumerate(batches):
                if late and settings.on_gpu and number % _LATE_EVERY == 0:
                    torch.cuda._sleep(_SLEEP_CYCLES)
                taken.append(batch.images.double().sum())
                del batch
                if not late:
                    shared.synchronise(settings)
            sums.append(torch.stack(taken).tolist())
    wrong = sum(a != b for a, b in zip(*sums, strict=True))
    report.values["batches"] = len(sums[0])
    return Result.judged(
        not wrong,
        f"{len(sums[0]) - wrong} of {len(sums[0])} batches as before, with the GPU "
        f"{_SLEEP_CYCLES / 1e6:.0f} million cycles behind at every {_LATE_EVERY}th and each dropped at once",
    )


def sync(settings: Settings, report: Report) -> Result:
    """Loader and training steps under torch's check for synchronisations of the host with the device."""
    import torch

    with shared.training(
        settings, steps=_STEPS + 10, res=settings.resolutions[0], augment=shared.AUGMENTS["policy"]
    ) as (batches, learner):
        for batch in itertools.islice(batches, 5):
            learner.train_step(batch)
        if settings.on_gpu:
            torch.cuda.set_sync_debug_mode("error")
        try:
            for batch in itertools.islice(batches, _STEPS):
                learner.train_step(batch)
        except RuntimeError as error:
            if learner.scaler.is_enabled() and "synchroniz" in str(error):
                return Result(
                    verdict="passed",
                    summary="fp16's gradient scaler waits for the GPU in each step, as "
                    "torch has no fused kernel of this optimizer; nothing else was checked",
                )
            raise
        finally:
            if settings.on_gpu:
                torch.cuda.set_sync_debug_mode("default")
    if not settings.on_gpu:
        return Result(verdict="skipped", summary=f"a CPU does not run ahead; {_STEPS} steps ran")
    return Result(verdict="passed", summary=f"{_STEPS} steps without a synchronisation")


def graphs(settings: Settings, report: Report) -> Result:
    """`precision.cuda_graphs`: losses as without, and the time of a step at the smallest resolution."""
    if not settings.on_gpu:
        return Result(verdict="skipped", summary="CUDA graphs need a GPU")
    small = min(64, settings.train_batch_size)
    at_small = Settings(**{**vars(settings), "train_batch_size": small})
    losses, steps_s = {}, {}
    report.table("", "step ms#", "last loss#")
    for name, captured in (("eager", False), ("captured", True)):
        with shared.training(at_small, steps=3 * _STEPS, res=settings.resolutions[0], cuda_graphs=captured) as (
            batches,
            learner,
        ):
            each = [learner.train_step(batch)[0] for batch in itertools.islice(batches, _STEPS)]
            losses[name] = [float(loss) for loss in each]
            began = time.perf_counter()
            for batch in itertools.islice(batches, _STEPS):
                learner.train_step(batch)
            shared.synchronise(settings)
            steps_s[name] = (time.perf_counter() - began) / _STEPS
        report.row(name, f"{1e3 * steps_s[name]:.2f}", f"{losses[name][-1]:.4f}")
    report.values |= {"losses": losses, "steps_s": steps_s}
    difference = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    return Result.judged(
        difference <= _LOSS_LIMIT,
        f"{settings.model}, batch {small} at {settings.resolutions[0]} px: "
        f"{steps_s['eager'] / steps_s['captured']:.2f}x as fast as eager; losses of {_STEPS} steps differ by at most "
        f"{difference:.2g} (allowed: {_LOSS_LIMIT})",
    )


def resume(settings: Settings, report: Report) -> Result:
    """A run killed with SIGKILL and started again, against one that was not."""
    recipe = shared.tiny_recipe(settings, "resume")
    whole = shared.train(settings, recipe, Path(settings.folder, "runs"), "whole")
    if whole.returncode:
        return Result.judged(False, f"status {whole.returncode}: {shared.last_line(whole.stderr)}")
    resumed = shared.kill_and_resume(settings, recipe, "killed")
    expected = shared.step_losses(Path(settings.folder, "runs/whole"))
    difference = max((abs(expected[i] - resumed.losses[i]) for i in expected if i in resumed.losses), default=0.0)
    # why they may differ on a GPU: cuDNN adds in another order each time, and the steps of a tiny network amplify that
    report.values["losses"] = [list(expected.values()), list(resumed.losses.values())]
    return Result.judged(
        not resumed.problem and (settings.on_gpu or not difference),
        resumed.problem
        or f"{len(expected)} steps, each once; losses differ by {difference:.2g} at most from those of an undisturbed "
        f"run (allowed: {'any' if settings.on_gpu else 0})",
    )


def memory(settings: Settings, report: Report) -> Result:
    """A batch that does not fit is refused in one line; batch_size = "auto" finds one that does; DALI's share of both.

    DALI's memory is what a loader adds to the device beyond what torch reserves, against the share that is set aside
    for it when a batch size is searched.
    """
    runs = Path(settings.folder, "runs")
    if not settings.on_gpu:
        refused = shared.train(settings, shared.tiny_recipe(settings, "auto", batch_size="auto"), runs, "auto")
        line = shared.last_line(refused.stderr)
        if refused.returncode == 2 and "batch_size" in refused.stderr:
            return Result(verdict="skipped", summary=f"a CPU has no memory of its own: {line}")
        return Result.judged(False, f"status {refused.returncode}: {line}")
    used, reserve = _memory_of_dali(settings)
    report.table("", "MiB#")
    report.row("DALI's memory", f"{used / 2**20:.0f}")
    report.row("set aside for it", f"{reserve / 2**20:.0f}")
    big = shared.tiny_recipe(
        settings, "big", batch_size=2048, model=settings.model, res=settings.resolutions[-1], epochs=1
    )
    refused = shared.train(settings, big, runs, "big", "--gpu-memory-gib", "2")
    message = shared.last_line(refused.stderr)
    auto = shared.train(
        settings,
        shared.tiny_recipe(settings, "auto", batch_size="auto", epochs=1),
        runs,
        "auto",
        "--gpu-memory-gib",
        "1",
    )
    chosen = shared.last_line(auto.stderr)
    if auto.returncode == 0:
        steps = shared.step_records(runs / "auto")
        sizes = {step["stage"]: step["samples"] for step in reversed(steps)}  # of the first step of each stage
        chosen = f"batches of {' and '.join(str(sizes[stage]) for stage in sorted(sizes))} fit into 1 GiB"
    return Result.judged(
        refused.returncode == 2 and "out of memory" in message and auto.returncode == 0 and used <= reserve,
        f"DALI uses {used / 2**20:.0f} of {reserve / 2**20:.0f} MiB | too large: {message} | auto: {chosen}",
    )


def _memory_of_dali(settings: Settings) -> tuple[int, int]:
    """(bytes that a loader at the largest resolution takes on the GPU beside torch, bytes set aside for it)."""
    import torch

    from resolute import cuda
    from resolute.pipeline.loader.loader import Loader
    from resolute.train.planner.batch_size import loader_bytes

    shards, gpu = shared.open_set(settings), torch.device("cuda", torch.cuda.current_device())
    stage = shared.stage_of(
        shards,
        settings.resolutions[-1],
        batches=12,
        batch_size=settings.train_batch_size,
        augment=shared.AUGMENTS["policy"],
    )
    from resolute.benchmarks.loaders.ours import training_plan

    plan = training_plan(shards, [stage])
    torch.zeros(1, device=gpu)  # so that CUDA's context is there
    before = cuda.used_bytes(gpu) - cuda.reserved_bytes(gpu)
    with Loader(plan, **shared.loader_options(settings)) as batches:
        for _ in zip(range(10), batches, strict=False):
            pass
        shared.synchronise(settings)
        used = cuda.used_bytes(gpu) - cuda.reserved_bytes(gpu) - before
    spec = plan.batch(0)
    return used, loader_bytes(plan, spec, len(spec), dtype=torch.float16)


def sanitizer(settings: Settings, report: Report) -> Result:
    """NVIDIA's compute-sanitizer over our kernels: invalid addresses, and races in shared memory."""
    if not settings.on_gpu:
        return Result(verdict="skipped", summary="compute-sanitizer needs a GPU")
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return Result(verdict="skipped", summary="compute-sanitizer is not installed; it is part of CUDA's toolkit")
    good, finished, words = True, False, []
    report.table("tool", "status#", "")
    for name in ("memcheck", "racecheck"):
        folder = _subfolder(settings, name)
        command = [
            tool,
            "--tool",
            name,
            "--error-exitcode",
            "9",
            "--kernel-name",
            "kns=apply_slot",
            "--kernel-name",
            "kns=finish",
            sys.executable,
            "-m",
            "resolute.benchmarks.gpu_check.parts",
            "kernels",
            str(folder),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SANITIZED_S, check=False)
            print(done.stdout, done.stderr)
            summary = next(
                (line.strip("= ") for line in reversed(done.stdout.splitlines()) if "SUMMARY" in line),
                shared.last_line(done.stderr),
            )
            status = str(done.returncode)
            checked = Report.load(folder / "kernels.json")
            good &= done.returncode == 0 and checked is not None and checked.verdict == "passed"
            finished = True
        except subprocess.TimeoutExpired:
            status, summary = "", f"stopped after {_SANITIZED_S} s, nothing found so far"
        words.append(f"{name}: {summary}")
        report.row(name, status, summary)
    if not finished:
        return Result(verdict="skipped", summary="; ".join(words))
    return Result.judged(good, "; ".join(words))


def _subfolder(settings: Settings, name: str) -> Path:
    """A folder with the settings, for a part that runs within another."""
    folder = Path(settings.folder, name)
    folder.mkdir(exist_ok=True)
    settings.save(folder / "settings.json")
    return folder
