"""The tools that `whole` compares: their settings, how each is called, and what its log says."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from resolute.errors import ResoluteError
from resolute.train.recipe.schema import Recipe

__all__ = [
    "CASES",
    "TOOLS",
    "Case",
    "Curve",
    "Job",
    "call",
    "described",
    "kind",
    "prepare",
    "prepared",
    "run",
    "run_curve",
    "timed",
]

_ONCE = "-once"  # of a tool that trains on photos resized once
TOOLS = ("ours", "ours-224", "plain", "plain-once", "ffcv", "timm", "timm-once", "timm-sizes", "timm-sizes-once")
# Freed memory stays with the process, as `resolute train` sets it for itself on a CPU. Source: mallopt(3)
_MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_TOP_PAD_": str(64 << 20)}
_FIRST_STEP = "Train: 0 ["  # in timm's output
_ROOT = Path(__file__).resolve().parents[2]  # with the package, for other interpreters
_POLL_S = 0.1  # how often timm's log is looked at
_FEW = 2  # epochs that each tool trains before it is measured
# [{"elapsed_s", "top1"}] after each epoch with a validation, also "ema_top1" if there is an EMA of the weights
Curve = list[dict[str, float]]
Log = tuple[float, Curve]  # seconds from the start of the command to the first training step, and the curve


@dataclass(frozen=True, kw_only=True)
class Case:
    """The network and the training settings that all tools share."""

    model: str
    model_kwargs: dict[str, Any]
    stages: tuple[tuple[int, int], ...]  # (px, epochs)
    lr: float = 0.3
    weight_decay: float = 5e-4
    label_smoothing: float = 0.1
    scale: tuple[float, float] = (0.35, 1.0)
    batch_size: int = 64
    eval_batch_size: int = 240
    warmup_epochs: int = 1

    @property
    def epochs(self) -> int:
        return sum(epochs for _, epochs in self.stages)

    @property
    def largest(self) -> int:
        return max(res for res, _ in self.stages)

    def shortened(self, epochs: int) -> Case:
        """The case with `epochs` in all, at least 1: stages shrink alike; those left without one go, never the last."""
        ends = [epochs * sum(each for _, each in self.stages[: i + 1]) // self.epochs for i in range(len(self.stages))]
        lengths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        stages = tuple((res, length) for (res, _), length in zip(self.stages, lengths, strict=True) if length)
        return replace(self, stages=stages, warmup_epochs=min(self.warmup_epochs, epochs - 1))


_STAGES = ((96, 6), (128, 3), (160, 2), (224, 1))
_NARROW: dict[str, Any] = {"channels": [16, 32, 64, 128], "stem_width": 8, "stem_type": "deep"}
_WIDE: dict[str, Any] = {"channels": [32, 64, 128, 256], "stem_width": 16, "stem_type": "deep"}
CASES = {
    "small": Case(model="resnet10t", model_kwargs=_NARROW, stages=_STAGES),
    "large": Case(model="resnet10t", model_kwargs=_WIDE, stages=_STAGES),
}


def kind(tool: str) -> str:
    """The program that a tool trains with: "ours" (also for the name of a recipe), "plain", "ffcv" or "timm"."""
    return tool.partition("-")[0] if tool in TOOLS else "ours"


def prepared(tool: str) -> str:
    """The prepared files that a tool trains on: "ours", "ffcv" or "once"; "" for the original photos."""
    if tool in TOOLS and tool.endswith(_ONCE):
        return "once"
    return kind(tool) if kind(tool) in ("ours", "ffcv") else ""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training."""

    case: Case
    tool: str  # one of `TOOLS`, or the name of a recipe
    seed: int
    lr: float
    workers: int
    threads: int
    bf16: bool
    photos: Path  # with train/ and val/
    shards: Path
    timm: Path | None  # a checkout
    ffcv_python: str | None
    folder: Path  # of its own output
    device: str = "cpu"  # or cuda
    recipe: Path | None = None  # instead of the case
    sizes: tuple[int, ...] = ()  # px of the set of shards (default: those of the case)
    scale_epochs: float = 1.0  # of the recipe

    @property
    def betons(self) -> Path:
        return self.photos.parent / "betons"

    @property
    def classes(self) -> int:
        return sum(1 for path in (self.photos / "train").iterdir() if path.is_dir())

    @property
    def source(self) -> Path:
        """The photos that peers read, with train/ and val/."""
        return self.photos.parent / "once" if prepared(self.tool) == "once" else self.photos

    @property
    def files(self) -> Path:
        """The folder that the tool trains on."""
        return {"ours": self.shards, "ffcv": self.betons}.get(prepared(self.tool), self.source)

    @property
    def python(self) -> str:
        return (self.ffcv_python or "") if self.tool == "ffcv" else sys.executable

    @property
    def stages(self) -> tuple[tuple[int, int], ...]:
        fixed = self.tool in ("ours-224", "timm", "timm-once")
        return ((self.case.largest, self.case.epochs),) if fixed else self.case.stages

    @property
    def epochs(self) -> int:
        return Recipe.load(self.recipe).total_epochs if self.recipe else self.case.epochs

    def short(self) -> Job:
        """The same with two epochs; a recipe has at least one in each stage, so perhaps more."""
        if not self.recipe:
            return replace(self, case=self.case.shortened(_FEW))
        recipe = Recipe.load(self.recipe)
        can_shrink = recipe.total_epochs > _FEW and any(stage.epochs > 1 for stage in recipe.stages)
        return replace(self, scale_epochs=_FEW / recipe.total_epochs if can_shrink else 1.0)


def _ours(job: Job) -> tuple[list[str], Callable[[float], Log]]:
    options = {
        "--shards": job.shards,
        "--recipe": job.recipe or _written_recipe(job),
        "--run": "run",
        "--runs": job.folder,
        "--threads": job.threads,
        "--device": job.device,
    }
    words = ["-m", "resolute", "train", *_words(options), "--set", f"seed={job.seed}"]
    if job.scale_epochs != 1.0:
        words += ["--set", f"scale_epochs={job.scale_epochs}"]
    log = job.folder / "run/run.jsonl"
    return words, lambda began: (_run_start(log, began), run_curve(log, began))


def _words(options: Mapping[str, Any]) -> list[str]:
    """The options of a command line; a list has several values, and None is a flag without one."""
    words = []
    for name, value in options.items():
        values = value if isinstance(value, list) else [] if value is None else [value]
        words += [name, *map(str, values)]
    return words


def _written_recipe(job: Job) -> Path:
    case, recipe = job.case, job.folder / "recipe.toml"
    kwargs = ", ".join(f"{name} = {json.dumps(value)}" for name, value in case.model_kwargs.items())
    stages = "".join(
        f"[[stages]]\nres = {res}\nepochs = {epochs}\nbatch_size = {case.batch_size}\neval_res = {case.largest}\n"
        for res, epochs in job.stages
    )
    recipe.write_text(
        f'[model]\nname = "{case.model}"\nkwargs = {{ {kwargs} }}\n[optim]\nlr = {job.lr}\n'
        f'weight_decay = {case.weight_decay}\n[schedule]\nkind = "cosine"\n'
        f"warmup_epochs = {case.warmup_epochs}\n[loss]\nlabel_smoothing = {case.label_smoothing}\n"
        f'[augment]\nscale = {list(case.scale)}\n[precision]\namp = "{"bf16" if job.bf16 else "off"}"\n'
        f"[eval]\nbatch_size = {case.eval_batch_size}\n{stages}",
        encoding="utf-8",
    )
    return recipe


def _run_start(log: Path, began: float) -> float:
    """Seconds from `began` to the first training step of one of our runs, by its log."""
    records = map(json.loads, log.read_text(encoding="utf-8").splitlines())
    first = next(record for record in records if record["kind"] == "epoch")
    return float(first["unix_s"] - first["train_s"] - first["eval_s"] - began)


def run_curve(log: Path, began: float) -> Curve:
    """The curve in the log of one of our runs. `began`: when its command was started, in s since 1970."""
    records = map(json.loads, log.read_text(encoding="utf-8").splitlines())
    return [
        {
            "elapsed_s": record["unix_s"] - began,
            **{name: record[name] for name in ("top1", "ema_top1") if record.get(name) is not None},
        }
        for record in records
        if record["kind"] == "epoch" and record["top1"] is not None
    ]


def described(job: Job) -> Path:
    """Write the file that `loop` and `ffcv` read."""
    settings = job.folder / "settings.json"
    settings.write_text(
        json.dumps(
            {
                **asdict(job.case),
                "tool": job.tool,
                "classes": job.classes,
                "stages": job.stages,
                "lr": job.lr,
                "seed": job.seed,
                "workers": job.workers,
                "threads": job.threads,
                "bf16": job.bf16,
                "device": job.device,
                "eval_res": job.case.largest,
                "photos": str(job.source),
                "betons": str(job.betons),
            }
        ),
        encoding="utf-8",
    )
    return settings


def _loop(job: Job) -> tuple[list[str], Callable[[float], Log]]:
    settings = described(job)

    def read(began: float) -> Log:
        lines = (job.folder / "out.log").read_text(encoding="utf-8").splitlines()
        start, *epochs = [json.loads(line) for line in lines if line.startswith(('{"start"', '{"epoch"'))]
        curve = [{"elapsed_s": epoch["unix_s"] - began, "top1": epoch["top1"]} for epoch in epochs]
        return start["start"] - began, curve

    return ["-m", "resolute.benchmarks.whole.loop", str(settings)], read


def _timm(job: Job) -> tuple[list[str], Callable[[float], Log]]:
    case = job.case
    assert job.timm is not None
    options: dict[str, Any] = {
        "--data-dir": job.source,
        "--val-split": "val",
        "--model": case.model,
        "--num-classes": job.classes,
        "--img-size": case.largest,
        "--device": job.device,
        "--channels-last": None,
        "--opt": "sgd",
        "--momentum": 0.9,
        "--lr": job.lr,
        "--weight-decay": case.weight_decay,
        "--sched": "cosine",
        "--sched-on-updates": None,
        "--epochs": case.epochs,
        "--warmup-epochs": case.warmup_epochs,
        "--warmup-lr": job.lr / 10,
        "-b": case.batch_size,
        "-vb": case.eval_batch_size,
        "--smoothing": case.label_smoothing,
        "--scale": [*case.scale],
        "--color-jitter": 0,
        "--train-interpolation": "bilinear",
        "--interpolation": "bilinear",
        "--crop-pct": 0.875,
        "--workers": job.workers,
        "--seed": job.seed,
        "--output": job.folder,
        "--experiment": "run",
        "--checkpoint-hist": 1,
    }
    if case.model_kwargs:
        options["--model-kwargs"] = [f"{name}={value}".replace(" ", "") for name, value in case.model_kwargs.items()]
    if job.bf16:
        options |= {"--amp": None, "--amp-dtype": "bfloat16"}
    if job.device != "cpu":
        options["--pin-mem"] = None
    if job.tool.startswith("timm-sizes"):
        options |= {"--train-img-sizes": [res for res, _ in case.stages], "--train-size-schedule": "progressive"}
    seen: dict[int, float] = {}  # rows of its log: when each was there
    output, log, ended = job.folder / "out.log", job.folder / "run/summary.csv", threading.Event()
    starts: list[float] = []  # when the first step was printed

    def watch() -> None:
        while not ended.wait(_POLL_S):
            if not starts and output.exists() and _FIRST_STEP in output.read_text(encoding="utf-8", errors="replace"):
                starts.append(time.time())
            if log.exists():
                rows = log.read_text(encoding="utf-8").count("\n") - 1
                for row in range(rows):
                    seen.setdefault(row, time.time())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()

    def read(began: float) -> Log:
        ended.set()
        watcher.join()  # the next run of this tool deletes the log
        with log.open(newline="") as file:
            rows = list(csv.DictReader(file))
        curve = [
            {"elapsed_s": seen.get(i, time.time()) - began, "top1": float(row["eval_top1"]) / 100}
            for i, row in enumerate(rows)
        ]
        return (starts or [began])[0] - began, curve

    return [str(job.timm / "train.py"), *_words(options)], read


_CALLS = {"ours": _ours, "plain": _loop, "ffcv": _loop, "timm": _timm}


def call(job: Job) -> tuple[list[str], Callable[[float], Log]]:
    """The words after the interpreter, and what reads the log, given when the command was started (s since 1970)."""
    return _CALLS[kind(job.tool)](job)


def run(job: Job, *, limit_s: float | None = None) -> dict[str, Any]:
    """{"tool", "seed", "lr", "workers", "epochs", "wall_s", "start_s", "curve", "top1"} of one training.

    top1: of the last weights, in the last epoch; with an EMA, "ema_top1" is that of the averaged ones. Raises
    `ResoluteError` with its last line if it fails, or takes longer than `limit_s` s.
    """
    shutil.rmtree(job.folder, ignore_errors=True)
    job.folder.mkdir(parents=True)
    words, read = call(job)
    began = time.time()
    wall_s = _time(job, words, limit_s=limit_s)
    start_s, points = read(began)
    if not points:
        raise ResoluteError(f"{job.tool}, seed {job.seed}: got no epoch in its log, expected {job.epochs}")
    return {
        "tool": job.tool,
        "seed": job.seed,
        "lr": job.lr,
        "workers": job.workers,
        "epochs": job.epochs,
        "wall_s": wall_s,
        "start_s": start_s,
        "curve": points,
        **{name: value for name, value in points[-1].items() if name != "elapsed_s"},
    }


def prepare(job: Job) -> float:
    """Write the files that the job's tool trains on; returns the seconds. Raises `ResoluteError` if it fails."""
    job.folder.mkdir(parents=True, exist_ok=True)
    if prepared(job.tool) == "once":
        words = ["-m", "resolute.benchmarks.whole.resize_once", str(job.photos), str(job.source)]
    elif prepared(job.tool) == "ffcv":
        words = ["-m", "resolute.benchmarks.whole.ffcv", str(described(job))]
    else:
        sizes = job.sizes or [res for res, _ in job.case.stages]
        options = {
            "--src": job.photos / "train",
            "--val": job.photos / "val",
            "--out": job.shards,
            "--res": ",".join(map(str, sizes)),
        }
        words = ["-m", "resolute", "shards", *_words(options)]
    return _time(job, words)


def _time(job: Job, words: Sequence[str], *, limit_s: float | None = None) -> float:
    """Seconds of a command of the job, as `timed`: all tools have the same threads and allocator."""
    environment = {**_MALLOC, "OMP_NUM_THREADS": str(job.threads)}
    first = []
    if job.tool == "ffcv":
        first = [str(_ROOT)]
        environment["NUMBA_NUM_THREADS"] = str(max(job.workers, job.threads))  # why: by default no more than cores
    elif kind(job.tool) == "timm":  # its own package, not the installed one: train.py is of the same commit
        first = [str(job.timm)]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [*first, os.environ.get("PYTHONPATH", "")]))
    name = f"{job.tool}, seed {job.seed}"
    return timed([job.python, *words], job.folder / "out.log", name=name, limit_s=limit_s, environment=environment)


def timed(
    words: Sequence[str],
    log: Path,
    *,
    name: str,
    limit_s: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> float:
    """Seconds of a command, whose output goes to `log`. `environment`: in addition to this process's.

    Raises `ResoluteError` with the last line of the log if it fails, or takes longer than `limit_s` s.
    """
    began = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise ResoluteError(f"{name}: no result after {limit_s:.0f} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):  # its workers too
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    wall_s = time.perf_counter() - began
    if status:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"]
        raise ResoluteError(f"{name}: got status {status}, expected 0: {lines[-1][:300]}")
    return wall_s
