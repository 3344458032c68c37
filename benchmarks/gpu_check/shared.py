"""Helpers of the parts: plans, loaders, learners and trainings of the check's sizes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .result import Settings

if TYPE_CHECKING:
    from resolute.pipeline.dataset.shard_set import ShardSet
    from resolute.pipeline.plan.plan import Plan
    from resolute.pipeline.plan.stage import Stage
    from resolute.train.learner import Learner

__all__ = [
    "AUGMENTS",
    "Resumed",
    "cpu_seconds",
    "kill_and_resume",
    "last_line",
    "loader_options",
    "open_set",
    "plan_of",
    "recipe_of",
    "stage_of",
    "step_losses",
    "step_records",
    "synchronise",
    "tiny_recipe",
    "train",
    "train_command",
    "training",
]

_EPOCH_STEPS = 12
_MIXING = {"mixup_alpha": 0.2, "cutmix_alpha": 1.0}
AUGMENTS: dict[str, dict[str, Any]] = {  # keys of [augment]
    "plain": {},
    "mixing": _MIXING,
    "policy": {**_MIXING, "policy": "randaugment", "random_erasing_prob": 0.25, "mixup_mode": "elem"},
}


def open_set(settings: Settings) -> ShardSet:
    from resolute.pipeline.dataset.shard_set import ShardSet

    return dataclasses.replace(ShardSet.open(settings.shards), resolutions=settings.resolutions)


def stage_of(
    shards: ShardSet, res: int, *, batches: int, batch_size: int, augment: dict[str, Any] | None = None
) -> Stage:
    """A stage of at least `batches` full training batches, of all training photos if the set has fewer."""
    from resolute.benchmarks.loaders.ours import full_batches
    from resolute.pipeline.plan.stage import Augment

    size = min(batch_size, len(shards.splits["train"]))
    stage = full_batches(shards, res, batches=batches, batch_size=size)
    return dataclasses.replace(stage, augment=Augment(**augment or {}))


def plan_of(settings: Settings, shards: ShardSet, *, batches: int, augment: dict[str, Any]) -> Plan:
    """A stage of training batches at each resolution."""
    from resolute.benchmarks.loaders.ours import training_plan

    return training_plan(
        shards,
        [
            stage_of(shards, res, batches=batches, batch_size=settings.train_batch_size, augment=augment)
            for res in settings.resolutions
        ],
    )


def loader_options(settings: Settings) -> dict[str, Any]:
    import torch

    return {
        "device": settings.device,
        "num_threads": settings.threads,
        "dtype": torch.float16 if settings.on_gpu else torch.float32,
    }


def recipe_of(
    settings: Settings, stages: Sequence[Stage], *, augment: dict[str, Any] | None = None, **precision: Any
) -> Any:
    from resolute.train.recipe.schema import Recipe

    tables = [{"res": s.res, "epochs": s.epochs, "batch_size": s.batch_size, "fraction": s.fraction} for s in stages]
    return Recipe.parse(
        {
            "model": {"name": settings.model},
            "optim": {"lr": 1e-3},
            "augment": augment or {},
            "stages": tables,
            "precision": precision,
            "eval": {"every_epochs": 1000},
        },
        name="gpu-check",
    )


@contextlib.contextmanager
def training(
    settings: Settings, *, steps: int, res: int, augment: dict[str, Any] | None = None, **precision: Any
) -> Iterator[tuple[Iterator[Any], Learner]]:
    """(training batches, learner) for `steps` steps at `res` px, warmed up as a run is."""
    import torch

    from resolute.pipeline.loader.loader import Loader
    from resolute.train.learner import Learner
    from resolute.train.warmup import capture_graphs, shapes, warm_up

    shards = open_set(settings)
    stage = stage_of(shards, res, batches=steps, batch_size=settings.train_batch_size, augment=augment)
    recipe = recipe_of(settings, [stage], augment=augment, **precision)
    plan = recipe.plan(shards)
    torch.backends.cudnn.benchmark = settings.on_gpu
    learner = Learner(
        recipe, classes=len(shards.classes), total_steps=plan.total_steps, device=torch.device(settings.device)
    )
    warm_up(learner, [shape for shape in shapes(plan) if shape[0] == "train"])
    capture_graphs(learner, plan)
    with Loader(plan, **loader_options(settings)) as batches:
        yield (batch for batch in batches if batch.spec.split == "train"), learner


def tiny_recipe(
    settings: Settings, name: str, *, batch_size: int | str | None = None, epochs: int = 3, **changed: Any
) -> Path:
    """A recipe file: two stages of a tiny model, or one with the `model` and `res` of `changed`.

    `batch_size`: None for about `_EPOCH_STEPS` steps an epoch.
    """
    if batch_size is None:
        batch_size = max(8, len(open_set(settings).splits["train"]) // _EPOCH_STEPS)
    sizes = [changed["res"]] if "res" in changed else settings.resolutions[:2]
    stages = "".join(
        f"[[stages]]\nres = {res}\nepochs = {epochs}\nbatch_size = {json.dumps(batch_size)}\n" for res in sizes
    )
    path = Path(settings.folder, f"{name}.toml")
    path.write_text(
        f'[model]\nname = "{changed.get("model", "test_resnet")}"\n[precision]\namp = "off"\n[eval]\nbatch_size = 32\n'
        f"{stages}",
        encoding="utf-8",
    )
    return path


def train_command(settings: Settings, recipe: Path, runs: Path, run: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "resolute",
        "train",
        "--shards",
        settings.shards,
        "--recipe",
        str(recipe),
        "--run",
        run,
        "--runs",
        str(runs),
        "--device",
        settings.device,
        "--threads",
        str(settings.threads),
        "--save-every-steps",
        "5",
    ]


def train(settings: Settings, recipe: Path, runs: Path, run: str, *more: str) -> subprocess.CompletedProcess[str]:
    """Train in a process of its own; what it prints goes to the part's log too."""
    command = [*train_command(settings, recipe, runs, run), *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(f"$ {' '.join(command)}\n{done.stdout}{done.stderr}", flush=True)
    return done


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """A run that was killed and resumed."""

    losses: dict[int, float]  # by step
    problem: str  # "" if each step was done once


def kill_and_resume(
    settings: Settings,
    recipe: Path,
    run: str,
    *,
    environment: dict[str, str] | None = None,
    more: Sequence[str] = (),
) -> Resumed:
    """Train, kill all processes of the run in its middle, and train again. `more`: words after `resolute train`."""
    from resolute.train.recipe.schema import Recipe

    runs = Path(settings.folder, "runs")
    log, steps = runs / run / "run.jsonl", Recipe.load(recipe).plan(open_set(settings)).total_steps
    command = [*train_command(settings, recipe, runs, run), *more]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment, start_new_session=True
    )
    try:
        # why by lines: the log is written at each checkpoint, so some of its steps are saved and later ones are not
        while process.poll() is None and not (log.exists() and log.read_bytes().count(b'"kind": "step"') >= steps // 2):
            time.sleep(0.02)
    finally:
        killed = process.poll() is None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if not killed:
        return Resumed(losses={}, problem="the run ended before it could be killed")
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    print(f"$ {' '.join(command)}\n{done.stdout}{done.stderr}", flush=True)
    records, losses = step_records(runs / run), step_losses(runs / run)
    if done.returncode:
        return Resumed(losses=losses, problem=f"status {done.returncode}: {last_line(done.stderr)}")
    if sorted(record["step"] for record in records) != list(range(steps)):
        return Resumed(losses=losses, problem=f"{len(records)} steps in the log, expected {steps}, each once")
    return Resumed(losses=losses, problem="")


def step_records(run: Path) -> list[dict[str, Any]]:
    """The records of the training steps in a run's log."""
    from resolute.train.logs.metrics import read_log

    return [record for record in read_log(run / "run.jsonl") if record["kind"] == "step"]


def step_losses(run: Path) -> dict[int, float]:
    """{step: loss} in a run's log."""
    return {record["step"]: record["loss"] for record in step_records(run)}


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1]


def synchronise(settings: Settings) -> None:
    if settings.on_gpu:
        import torch

        from resolute import cuda

        cuda.synchronize(torch.device("cuda"))  # sync: ends a timed interval


def cpu_seconds() -> dict[str, float]:
    """CPU time so far of this process's threads, in s: "main", "read", "DALI" and "other"."""
    ticks, used = os.sysconf("SC_CLK_TCK"), dict.fromkeys(("main", "read", "DALI", "other"), 0.0)
    main = threading.main_thread().native_id
    readers = {thread.native_id for thread in threading.enumerate() if thread.name.startswith("resolute-read")}
    for folder in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            name, _, fields = (folder / "stat").read_text().rpartition(")")
            number, words = int(folder.name), fields.split()
            group = "main" if number == main else "read" if number in readers else "DALI" if "DALI" in name else "other"
            used[group] += (int(words[11]) + int(words[12])) / ticks
    return used
