"""Photos to accuracy, whole commands: Resolute beside timm's train.py, FFCV and a plain PyTorch loop.

    python -m resolute.benchmarks.whole --photos FOLDER --val-list FILE --timm CHECKOUT --ffcv-python PY
                              [--case small] [--seeds 0,1,2] [--lr TOOL=0.5 …] [--same-time] [--out FILE]
    python -m resolute.benchmarks.whole … --rates 0.1,0.3,1      # on other photos: prints the best rates for --lr

FOLDER holds native-size photos in class folders; the photos that FILE lists are validated on. All tools train the same
network with the same optimizer, schedule (a cosine after one epoch of warm-up), number of epochs, batch size, crops and
label smoothing, and validate after each epoch at the largest size. They have the same cores and threads, and malloc
keeps freed memory in all of them. Each is one command per seed, timed from its start to its end; tools take turns, seed
by seed. Preparing files (ours, ffcv, photos resized once) happens once; its time is shown, and added to each training.
With --same-time, peers also train with as many epochs as fit in the time that ours takes.

ours             `resolute shards`, then `resolute train`: 96, 128, 160, 224 px, in stages
ours-224         the same with all epochs at 224 px
plain            `whole_loop.py`: one persistent DataLoader, the same stages
plain-once       the same on photos that `resize_once.py` has resized: short side 256 px, JPEG of quality 90
ffcv             the same loop on FFCV's batches (`whole_ffcv.py`), the same stages
timm             train.py of a checkout of timm, all epochs at 224 px
timm-once        the same on photos resized once
timm-sizes       train.py with its own schedule of the same sizes (`--train-size-schedule progressive`)
timm-sizes-once  the same on photos resized once

Each tool trains two epochs before, peers with N and with N + 1 workers for N cores, of which they then have the faster
number. `--case small` has a network so small that reading photos is the limit; `--case large` one that is the limit.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import argparse
import contextlib
import csv
import itertools
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from resolute.errors import ResoluteError
from resolute.machine import available_cpus

from .cli import Parser, chosen, command, parse_factors, parse_seeds, show_progress, text_table
from .record import check_writable, header, write

__all__ = [
    "CASES",
    "TOOLS",
    "Case",
    "Job",
    "main",
    "mean_and_error",
    "prepare",
    "run",
    "run_curve",
    "table",
    "time_to",
    "write_photos",
]

_ONCE = "-once"  # of a tool that trains on photos resized once
TOOLS = ("ours", "ours-224", "plain", "plain-once", "ffcv", "timm", "timm-once", "timm-sizes", "timm-sizes-once")
# Freed memory stays with the process, as `resolute train` sets it for itself on a CPU. Source: mallopt(3)
_MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_TOP_PAD_": str(64 << 20)}
_FIRST_STEP = "Train: 0 ["  # in timm's output
_ROOT = Path(__file__).resolve().parents[1]  # with the package, for other interpreters
_POLL_S = 0.1  # how often timm's log is looked at
Curve = list[dict[str, float]]  # [{"elapsed_s", "top1"}] after each epoch
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
CASES = {
    "small": Case(
        model="resnet10t",
        model_kwargs={"channels": [16, 32, 64, 128], "stem_width": 8, "stem_type": "deep"},
        stages=_STAGES,
    ),
    "large": Case(
        model="resnet10t",
        model_kwargs={"channels": [32, 64, 128, 256], "stem_width": 16, "stem_type": "deep"},
        stages=_STAGES,
    ),
}


def write_photos(folders: Sequence[Path], held_out: Callable[[str], bool], out: Path) -> tuple[int, int]:
    """Links to the photos in `out`/train/CLASS and `out`/val/CLASS, as timm and the plain loop read them.

    folders: each with class folders. held_out: whether a photo CLASS/NAME is validated on. Returns how many photos are
    trained on and validated on. Raises `ResoluteError` if two have the same name.
    """
    counts = {"train": 0, "val": 0}
    for photos in folders:
        for path in sorted(photos.glob("*/*")):
            name = f"{path.parent.name}/{path.name}"
            part = "val" if held_out(name) else "train"
            folder = out / part / path.parent.name
            folder.mkdir(parents=True, exist_ok=True)
            try:
                (folder / path.name).symlink_to(path.resolve())
            except FileExistsError:
                raise ResoluteError(f"{path}: a second photo {name}, expected one; name fewer folders") from None
            counts[part] += 1
    return counts["train"], counts["val"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training."""

    case: Case
    tool: str
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

    @property
    def betons(self) -> Path:
        return self.photos.parent / "betons"

    @property
    def classes(self) -> int:
        return sum(1 for path in (self.photos / "train").iterdir() if path.is_dir())

    @property
    def source(self) -> Path:
        """The photos that peers read, with train/ and val/."""
        return self.photos.parent / "once" if self.tool.endswith(_ONCE) else self.photos

    @property
    def python(self) -> str:
        return (self.ffcv_python or "") if self.tool == "ffcv" else sys.executable

    @property
    def stages(self) -> tuple[tuple[int, int], ...]:
        fixed = self.tool in ("ours-224", "timm", "timm-once")
        return ((self.case.largest, self.case.epochs),) if fixed else self.case.stages


def _ours(job: Job) -> tuple[list[str], Callable[[float], Log]]:
    case, recipe = job.case, job.folder / "recipe.toml"
    kwargs = ", ".join(f"{name} = {json.dumps(value)}" for name, value in case.model_kwargs.items())
    stages = "".join(
        f"[[stages]]\nres = {res}\nepochs = {epochs}\nbatch_size = {case.batch_size}\neval_res = {case.largest}\n"
        for res, epochs in job.stages
    )
    recipe.write_text(
        f'seed = {job.seed}\n[model]\nname = "{case.model}"\nkwargs = {{ {kwargs} }}\n[optim]\nlr = {job.lr}\n'
        f'weight_decay = {case.weight_decay}\n[schedule]\nkind = "cosine"\n'
        f"warmup_epochs = {case.warmup_epochs}\n[loss]\nlabel_smoothing = {case.label_smoothing}\n"
        f'[augment]\nscale = {list(case.scale)}\n[precision]\namp = "{"bf16" if job.bf16 else "off"}"\n'
        f"[eval]\nbatch_size = {case.eval_batch_size}\n{stages}",
        encoding="utf-8",
    )
    words = [
        "-m",
        "resolute",
        "train",
        "--shards",
        str(job.shards),
        "--recipe",
        str(recipe),
        "--run",
        "run",
        "--runs",
        str(job.folder),
        "--threads",
        str(job.threads),
        "--device",
        job.device,
    ]

    log = job.folder / "run/run.jsonl"
    return words, lambda began: (run_start(log, began), run_curve(log, began))


def run_start(log: Path, began: float) -> float:
    """Seconds from `began` to the first training step of one of our runs, by its log."""
    records = map(json.loads, log.read_text(encoding="utf-8").splitlines())
    first = next(record for record in records if record["kind"] == "epoch")
    return float(first["unix_s"] - first["train_s"] - first["eval_s"] - began)


def run_curve(log: Path, began: float) -> Curve:
    """The curve in the log of one of our runs, of epochs with a validation. `began`: when its command was started.

    With an EMA of the weights, the better of both counts, as for the file of the best weights.
    """
    records = map(json.loads, log.read_text(encoding="utf-8").splitlines())
    return [
        {"elapsed_s": record["unix_s"] - began, "top1": max(record["top1"], record.get("ema_top1") or 0.0)}
        for record in records
        if record["kind"] == "epoch" and record["top1"] is not None
    ]


def _settings(job: Job) -> Path:
    """The file that `whole_loop` and `whole_ffcv` read."""
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
    settings = _settings(job)

    def read(began: float) -> Log:
        lines = (job.folder / "out.log").read_text(encoding="utf-8").splitlines()
        start, *epochs = [json.loads(line) for line in lines if line.startswith(('{"start"', '{"epoch"'))]
        curve = [{"elapsed_s": epoch["unix_s"] - began, "top1": epoch["top1"]} for epoch in epochs]
        return start["start"] - began, curve

    return ["-m", "resolute.benchmarks.whole_loop", str(settings)], read


def _timm(job: Job) -> tuple[list[str], Callable[[float], Log]]:
    case = job.case
    assert job.timm is not None
    kwargs = [f"{name}={value}" for name, value in case.model_kwargs.items()]
    words = [
        str(job.timm / "train.py"),
        "--data-dir",
        str(job.source),
        "--val-split",
        "val",
        "--model",
        case.model,
        "--num-classes",
        str(job.classes),
        "--img-size",
        str(case.largest),
        "--device",
        job.device,
        "--channels-last",
        "--opt",
        "sgd",
        "--momentum",
        "0.9",
        "--lr",
        str(job.lr),
        "--weight-decay",
        str(case.weight_decay),
        "--sched",
        "cosine",
        "--sched-on-updates",
        "--epochs",
        str(case.epochs),
        "--warmup-epochs",
        str(case.warmup_epochs),
        "--warmup-lr",
        str(job.lr / 10),
        "-b",
        str(case.batch_size),
        "-vb",
        str(case.eval_batch_size),
        "--smoothing",
        str(case.label_smoothing),
        "--scale",
        *map(str, case.scale),
        "--color-jitter",
        "0",
        "--train-interpolation",
        "bilinear",
        "--interpolation",
        "bilinear",
        "--crop-pct",
        "0.875",
        "--workers",
        str(job.workers),
        "--seed",
        str(job.seed),
        "--output",
        str(job.folder),
        "--experiment",
        "run",
        "--checkpoint-hist",
        "1",
    ]
    if kwargs:
        words += ["--model-kwargs", *(word.replace(" ", "") for word in kwargs)]
    if job.bf16:
        words += ["--amp", "--amp-dtype", "bfloat16"]
    if job.device != "cpu":
        words.append("--pin-mem")
    if job.tool.startswith("timm-sizes"):
        words += ["--train-img-sizes", *(str(res) for res, _ in case.stages), "--train-size-schedule", "progressive"]
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

    return words, read


_COMMANDS = {
    "ours": _ours,
    "ours-224": _ours,
    "plain": _loop,
    "plain-once": _loop,
    "ffcv": _loop,
    **dict.fromkeys(("timm", "timm-once", "timm-sizes", "timm-sizes-once"), _timm),
}


def _prepared(tool: str) -> str:
    """Whose files a tool trains on: "ours", "ffcv", "once"; "" for photos as they are."""
    if tool.endswith(_ONCE):
        return "once"
    return next((name for name in ("ours", "ffcv") if tool.startswith(name)), "")


def run(job: Job, *, limit_s: float | None = None) -> dict[str, Any]:
    """{"tool", "seed", "lr", "workers", "epochs", "wall_s", "start_s", "curve", "top1"} of one training.

    Raises `ResoluteError` with its last line if it fails, or takes longer than `limit_s` s.
    """
    shutil.rmtree(job.folder, ignore_errors=True)
    job.folder.mkdir(parents=True)
    words, read = _COMMANDS[job.tool](job)
    began = time.time()
    wall_s = _time(job, words, job.folder / "out.log", limit_s=limit_s)
    start_s, points = read(began)
    if not points:
        raise ResoluteError(f"{job.tool}, seed {job.seed}: got no epoch in its log, expected {job.case.epochs}")
    return {
        "tool": job.tool,
        "seed": job.seed,
        "lr": job.lr,
        "workers": job.workers,
        "epochs": job.case.epochs,
        "wall_s": wall_s,
        "start_s": start_s,
        "curve": points,
        "top1": points[-1]["top1"],
    }


def prepare(job: Job) -> float:
    """Write the files that the job's tool trains on; returns the seconds. Raises `ResoluteError` if it fails."""
    job.folder.mkdir(parents=True, exist_ok=True)
    if _prepared(job.tool) == "once":
        words = ["-m", "resolute.benchmarks.resize_once", str(job.photos), str(job.source)]
    elif _prepared(job.tool) == "ffcv":
        words = ["-m", "resolute.benchmarks.whole_ffcv", str(_settings(job))]
    else:
        sizes = ",".join(str(res) for res, _ in job.case.stages)
        words = [
            "-m",
            "resolute",
            "shards",
            "--src",
            str(job.photos / "train"),
            "--val",
            str(job.photos / "val"),
            "--out",
            str(job.shards),
            "--res",
            sizes,
        ]
    return _time(job, words, job.folder / "out.log")


def _time(job: Job, words: list[str], log: Path, *, limit_s: float | None = None) -> float:
    """Seconds of a command. Raises `ResoluteError` with the last line of `log` if it fails or takes too long."""
    environment = {**os.environ, **_MALLOC, "OMP_NUM_THREADS": str(job.threads)}
    paths = [os.environ.get("PYTHONPATH", "")]
    if job.tool == "ffcv":
        paths.insert(0, str(_ROOT))
        environment["NUMBA_NUM_THREADS"] = str(max(job.workers, job.threads))  # why: by default no more than cores
    elif "timm" in job.tool:  # its own package, not the installed one: train.py is of the same commit
        paths.insert(0, str(job.timm))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    began = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [job.python, *words], stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise ResoluteError(f"{job.tool}, seed {job.seed}: no result after {limit_s:.0f} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):  # its workers too
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    wall_s = time.perf_counter() - began
    if status:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"]
        raise ResoluteError(f"{job.tool}, seed {job.seed}: got status {status}, expected 0: {lines[-1][:300]}")
    return wall_s


def time_to(curve: Curve, top1: float) -> float | None:
    """Seconds until the accuracy was first reached, None if it was not."""
    return next((point["elapsed_s"] for point in curve if point["top1"] >= top1), None)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error; 0 for a single value."""
    if len(values) < 2:
        return values[0], 0.0
    return statistics.fmean(values), statistics.stdev(values) / len(values) ** 0.5


def summary(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """[{"tool", "epochs", "top1", "wall_s", "prep_s", "start_s", "equal_s", "lr", "workers", "seeds"}] of each tool and
    length.

    top1 (in %), wall_s (with prep) and equal_s are (mean, standard error). equal_s: seconds, with prep, until the mean
    accuracy that timm at 224 px has at its end was first reached; None if a seed did not reach it.
    """
    runs = result["runs"]
    goal = statistics.fmean([each["top1"] for each in runs if each["tool"] == "timm" and each["round"] == 0] or [1.0])
    rows = []
    for tool, number in dict.fromkeys((each["tool"], each["round"]) for each in runs):
        own = [each for each in runs if (each["tool"], each["round"]) == (tool, number)]
        prep_s = result["prep_s"].get(_prepared(tool), 0.0)
        reached = [prep_s + (time_to(each["curve"], goal) or math.inf) for each in own]
        rows.append(
            {
                "tool": tool,
                "epochs": own[0]["epochs"],
                "top1": mean_and_error([100 * each["top1"] for each in own]),
                "wall_s": mean_and_error([each["wall_s"] + prep_s for each in own]),
                "prep_s": prep_s,
                "start_s": mean_and_error([each["start_s"] for each in own]) if "start_s" in own[0] else None,
                "equal_s": None if math.inf in reached else mean_and_error(reached),
                "lr": own[0]["lr"],
                "workers": own[0]["workers"],
                "seeds": len(own),
            }
        )
    return rows


def table(result: Mapping[str, Any]) -> str:
    rows = []
    for row in summary(result):
        (top1, top1_error), (wall_s, wall_error), equal = row["top1"], row["wall_s"], row["equal_s"]
        rows.append(
            [
                row["tool"],
                str(row["epochs"]),
                f"{top1:.1f} ± {top1_error:.1f}",
                f"{wall_s:.1f} ± {wall_error:.1f}",
                f"{row['prep_s']:.1f}" if row["prep_s"] else "",
                "" if row["start_s"] is None else f"{row['start_s'][0]:.1f}",
                "" if equal is None else f"{equal[0]:.1f} ± {equal[1]:.1f}",
                f"{row['lr']:g}",
                str(row["workers"]),
                str(row["seeds"]),
            ]
        )
    names = ["", "epochs", "top-1, %", "wall s", "of it prep", "start", "s to timm's top-1", "lr", "workers", "seeds"]
    return text_table(f"{result['case']['model']}, {result['photos']} photos", names, rows)


def _tuned(text: Sequence[str]) -> dict[str, float]:
    """{tool: learning rate} of `--lr TOOL=LR` words."""
    rates = {}
    for word in text:
        tool, _, rate = word.partition("=")
        try:
            rates[chosen(tool, TOOLS, setting="--lr")[0]] = float(rate)
        except ValueError:
            raise ResoluteError(f"--lr: got {word}, expected TOOL=RATE; correct it") from None
    return rates


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = Parser(prog="python -m resolute.benchmarks.whole", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--photos", type=Path, required=True, help="native-size photos in class folders")
    parser.add_argument("--val-list", type=Path, required=True, help="photos to validate on: CLASS/NAME, one a line")
    parser.add_argument("--timm", type=Path, help="checkout of timm; without it, its tools are left out")
    parser.add_argument("--ffcv-python", metavar="PY", help="interpreter with FFCV; without it, ffcv is left out")
    parser.add_argument("--case", choices=sorted(CASES), default="small")
    parser.add_argument("--tools", default=",".join(TOOLS), help="(default: %(default)s)")
    parser.add_argument("--seeds", default="0", help="(default: %(default)s)")
    parser.add_argument("--lr", nargs="*", default=[], metavar="TOOL=LR", help="tuned on other photos")
    parser.add_argument("--rates", metavar="LR,…", help="try these with every tool, and print the best for --lr")
    parser.add_argument("--same-time", action="store_true", help="peers in the time of ours, too")
    parser.add_argument("--epochs", help="PX=EPOCHS,… instead of the case's stages")
    parser.add_argument("--bf16", action="store_true", help="if the CPU has its instructions")
    parser.add_argument("--work", type=Path, default=Path("whole"), help="folder to work in")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/whole.json"), metavar="FILE")
    return command(parser, _run, argv)


def _run(args: argparse.Namespace) -> None:
    check_writable(args.out)
    given = {"timm": args.timm, "ffcv": args.ffcv_python}  # a tool that needs one of them is left out without it
    tools = [tool for tool in chosen(args.tools, TOOLS, setting="--tools") if given.get(tool.partition("-")[0], True)]
    case, tuned, threads = CASES[args.case], _tuned(args.lr), available_cpus()
    if args.epochs:
        words = args.epochs.split(",")
        if not all(re.fullmatch(r"\d+=\d+", word) for word in words):
            raise ResoluteError(f"--epochs: got {args.epochs}, expected PX=EPOCHS,…; write it as 96=3,128=1")
        stages = tuple((int(res), int(epochs)) for res, _, epochs in (word.partition("=") for word in words))
        case = replace(case, stages=stages)
    seeds = parse_seeds(args.seeds)
    if args.same_time and ("ours" not in tools or args.rates):
        raise ResoluteError("--same-time: got --rates, or no ours in --tools, expected ours without --rates; change it")
    result = header(rounds=len(seeds), packages=["webdataset"])
    work = args.work.resolve()
    shutil.rmtree(work, ignore_errors=True)
    held_out = {line.split()[0] for line in args.val_list.read_text(encoding="utf-8").splitlines() if line.strip()}
    trained, validated = write_photos([args.photos], held_out.__contains__, work / "photos")
    if not validated:
        raise ResoluteError(
            f"{args.val_list}: got no photo of {args.photos}, expected CLASS/NAME, one a line; correct it"
        )
    workers: dict[str, int] = {}
    runs: list[dict[str, Any]] = []

    def job(tool: str, **values: Any) -> Job:
        common: dict[str, Any] = {
            "case": case,
            "tool": tool,
            "seed": 0,
            "lr": tuned.get(tool, case.lr),
            "threads": threads,
            "workers": workers.get(tool, threads),
            "bf16": args.bf16,
            "photos": work / "photos",
            "shards": work / "shards",
            "timm": args.timm and args.timm.resolve(),
            "ffcv_python": args.ffcv_python,
            "folder": work / tool,
        }
        return Job(**{**common, **values})

    first = {_prepared(tool): tool for tool in reversed(tools)}  # of the tools that train on the same files
    prep_s = {name: prepare(job(tool)) for name, tool in first.items() if name}

    def train(number: int, tool: str, values: dict[str, Any]) -> None:
        show_progress(f"{tool}, {', '.join(f'{name} {value}' for name, value in values.items() if name != 'case')}")
        runs.append({**run(job(tool, **values)), "round": number})

    for tool in tools:  # ours too: what it compiles is compiled once per installation
        counts = (threads,) if tool.startswith("ours") else (threads, threads + 1)
        tried = [run(job(tool, case=case.shortened(2), workers=count)) for count in counts]
        workers[tool] = min(tried, key=lambda each: float(each["wall_s"]))["workers"]
    result |= {
        "case": asdict(case),
        "prep_s": prep_s,
        "bf16": args.bf16,
        "threads": threads,
        "runs": runs,
        "photos": trained,
    }
    rates = parse_factors(args.rates, "--rates") if args.rates else [None]
    for (number, rate), seed in itertools.product(enumerate(rates), seeds):
        for tool in tools:
            train(number, tool, {"seed": seed} if rate is None else {"seed": seed, "lr": rate})
        write(args.out, result)  # after each seed: a benchmark of hours may be stopped
    if args.same_time:
        means = {row["tool"]: row for row in summary(result)}
        ours_s = means["ours"]["wall_s"][0]
        peers = {}
        for tool in tools:
            if "ours" not in tool:
                prep, wall_s = means[tool]["prep_s"], means[tool]["wall_s"][0]
                peers[tool] = max(1, int(case.epochs * (ours_s - prep) / (wall_s - prep)))
        for seed, (tool, epochs) in itertools.product(seeds, peers.items()):
            train(1, tool, {"seed": seed, "case": case.shortened(epochs)})
    show_progress("")
    print(table(result))
    if args.rates:
        rows = summary(result)
        best = {tool: max((row for row in rows if row["tool"] == tool), key=lambda row: row["top1"]) for tool in tools}
        print("--lr", *(f"{tool}={row['lr']:g}" for tool, row in best.items()))
    write(args.out, result)


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
