"""Photos to accuracy, whole commands: Resolute beside timm's train.py and a plain PyTorch loop.

    python -m resolute.benchmarks.whole --photos FOLDER --val-list FILE --timm CHECKOUT [--case small] [--seeds 0,1,2]
                              [--tools ours,ours-224,plain,timm,timm-sizes] [--lr TOOL=0.5,…] [--out FILE]

FOLDER holds native-size photos in class folders; the photos that FILE lists are validated on. All tools train the same
network with the same optimizer, schedule (a cosine after one epoch of warm-up), number of epochs, batch size, crops and
label smoothing, and validate after each epoch at the size that they train at (timm-sizes at 224 px). Each is one
command per seed, timed from its start to its end; tools take turns, seed by seed, on the same cores.

ours        `resolute shards`, then `resolute train`: 96, 128, 160, 224 px, in stages; prep's time is shown and added
ours-224    the same with all epochs at 224 px
plain       `whole_loop.py`: one persistent DataLoader, the same stages
timm        train.py of a checkout of timm, all epochs at 224 px
timm-sizes  train.py with its own schedule of the same sizes (`--train-size-schedule progressive`)

Peers have N and N + 1 workers for N cores, and stand with the faster. `--case small` has a network so small that
reading photos is the limit; `--case large` has one that is the limit itself.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import argparse
import csv
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from resolute.errors import ResoluteError
from resolute.machine import available_cpus

from .cli import Parser, chosen, command, show_progress, text_table
from .record import check_writable, header, write

__all__ = ["CASES", "TOOLS", "Case", "main", "mean_and_error", "time_to", "write_photos"]

TOOLS = ("ours", "ours-224", "plain", "timm", "timm-sizes")
_POLL_S = 0.1  # how often timm's log is looked at
Curve = list[dict[str, float]]  # [{"elapsed_s", "top1"}] after each epoch


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


_STAGES = ((96, 6), (128, 3), (160, 2), (224, 1))
CASES = {
    "small": Case(model="resnet10t", model_kwargs={"channels": [16, 32, 64, 128], "stem_width": 8,
                                                   "stem_type": "deep"}, stages=_STAGES),
    "large": Case(model="resnet18", model_kwargs={}, stages=_STAGES),
}  # fmt: skip


def write_photos(photos: Path, val_list: Path, out: Path) -> None:
    """Links to the photos in `out`/train/CLASS and `out`/val/CLASS, as timm and the plain loop read them."""
    held_out = {line.split()[0] for line in val_list.read_text(encoding="utf-8").splitlines() if line.strip()}
    files = [path for folder in sorted(photos.iterdir()) if folder.is_dir() for path in sorted(folder.iterdir())]
    for path in files:
        part = "val" if f"{path.parent.name}/{path.name}" in held_out else "train"
        folder = out / part / path.parent.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / path.name).symlink_to(path.resolve())
    if not (out / "val").is_dir():
        raise ResoluteError(f"{val_list}: got no photo of {photos}, expected CLASS/NAME, one a line; correct it")


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
    folder: Path  # of its own output

    @property
    def stages(self) -> tuple[tuple[int, int], ...]:
        fixed = self.tool in ("ours-224", "timm")
        return ((self.case.largest, self.case.epochs),) if fixed else self.case.stages


def _ours(job: Job) -> tuple[list[str], Callable[[float], Curve]]:
    case, recipe = job.case, job.folder / "recipe.toml"
    kwargs = ", ".join(f"{name} = {json.dumps(value)}" for name, value in case.model_kwargs.items())
    stages = "".join(f"[[stages]]\nres = {res}\nepochs = {epochs}\nbatch_size = {case.batch_size}\n"
                     for res, epochs in job.stages)  # fmt: skip
    recipe.write_text(
        f'seed = {job.seed}\n[model]\nname = "{case.model}"\nkwargs = {{ {kwargs} }}\n[optim]\nlr = {job.lr}\n'
        f"weight_decay = {case.weight_decay}\n[schedule]\nkind = \"warmup_cosine\"\n"
        f"warmup_epochs = {case.warmup_epochs}\n[loss]\nlabel_smoothing = {case.label_smoothing}\n"
        f"[augment]\nscale = {list(case.scale)}\n[precision]\namp = \"{'bf16' if job.bf16 else 'off'}\"\n"
        f"[eval]\nbatch_size = {case.eval_batch_size}\n{stages}", encoding="utf-8",
    )  # fmt: skip
    words = ["-m", "resolute", "train", "--shards", str(job.shards), "--recipe", str(recipe), "--run", "run", "--runs",
             str(job.folder), "--threads", str(job.threads), "--device", "cpu"]  # fmt: skip

    def curve(began: float) -> Curve:
        lines = (job.folder / "run/run.jsonl").read_text(encoding="utf-8").splitlines()
        epochs = [record for record in map(json.loads, lines) if record["kind"] == "epoch"]
        return [{"elapsed_s": epoch["unix_s"] - began, "top1": epoch["top1"]} for epoch in epochs]

    return words, curve


def _plain(job: Job) -> tuple[list[str], Callable[[float], Curve]]:
    settings = job.folder / "settings.json"
    settings.write_text(json.dumps({
        **asdict(job.case), "stages": job.stages, "lr": job.lr, "seed": job.seed, "workers": job.workers,
        "threads": job.threads, "bf16": job.bf16, "photos": str(job.photos),
    }), encoding="utf-8")  # fmt: skip

    def curve(began: float) -> Curve:
        lines = (job.folder / "out.log").read_text(encoding="utf-8").splitlines()
        epochs = [json.loads(line) for line in lines if line.startswith('{"epoch"')]
        return [{"elapsed_s": epoch["unix_s"] - began, "top1": epoch["top1"]} for epoch in epochs]

    return ["-m", "resolute.benchmarks.whole_loop", str(settings)], curve


def _timm(job: Job) -> tuple[list[str], Callable[[float], Curve]]:
    case = job.case
    assert job.timm is not None
    kwargs = [f"{name}={value}" for name, value in case.model_kwargs.items()]
    words = [
        str(job.timm / "train.py"), "--data-dir", str(job.photos), "--val-split", "val", "--model", case.model,
        "--num-classes", str(len(list((job.photos / "train").iterdir()))), "--img-size", str(case.largest),
        "--device", "cpu", "--channels-last", "--opt", "sgd", "--momentum", "0.9", "--lr", str(job.lr),
        "--weight-decay", str(case.weight_decay), "--sched", "cosine", "--sched-on-updates", "--epochs",
        str(case.epochs), "--warmup-epochs", str(case.warmup_epochs), "--warmup-lr", str(job.lr / 10), "-b",
        str(case.batch_size), "-vb", str(case.eval_batch_size), "--smoothing", str(case.label_smoothing), "--scale",
        *map(str, case.scale), "--color-jitter", "0", "--train-interpolation", "bilinear", "--interpolation",
        "bilinear", "--crop-pct", "0.875", "--workers", str(job.workers), "--seed", str(job.seed), "--output",
        str(job.folder), "--experiment", "run", "--checkpoint-hist", "1",
    ]  # fmt: skip
    if kwargs:
        words += ["--model-kwargs", *(word.replace(" ", "") for word in kwargs)]
    if job.bf16:
        words += ["--amp", "--amp-dtype", "bfloat16"]
    if job.tool == "timm-sizes":
        words += ["--train-img-sizes", *(str(res) for res, _ in case.stages), "--train-size-schedule", "progressive"]
    seen: dict[int, float] = {}  # rows of its log: when each was there
    log, ended = job.folder / "run/summary.csv", threading.Event()

    def watch() -> None:
        while not ended.wait(_POLL_S):
            if log.exists():
                rows = log.read_text(encoding="utf-8").count("\n") - 1
                for row in range(rows):
                    seen.setdefault(row, time.time())

    threading.Thread(target=watch, daemon=True).start()

    def curve(began: float) -> Curve:
        ended.set()
        with log.open(newline="") as file:
            rows = list(csv.DictReader(file))
        return [{"elapsed_s": seen.get(i, time.time()) - began, "top1": float(row["eval_top1"]) / 100}
                for i, row in enumerate(rows)]  # fmt: skip

    return words, curve


_COMMANDS = {"ours": _ours, "ours-224": _ours, "plain": _plain, "timm": _timm, "timm-sizes": _timm}


def run(job: Job) -> dict[str, Any]:
    """{"tool", "seed", "lr", "workers", "wall_s", "curve", "top1"} of one training.

    Raises `ResoluteError` with its last line if it fails.
    """
    shutil.rmtree(job.folder, ignore_errors=True)
    job.folder.mkdir(parents=True)
    words, curve = _COMMANDS[job.tool](job)
    log = job.folder / "out.log"
    environment = {**os.environ, "OMP_NUM_THREADS": str(job.threads)}
    if job.timm is not None:  # its own package, not the installed one: train.py is of the same commit
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(job.timm) if "timm" in job.tool else "", os.environ.get("PYTHONPATH", "")])
        )
    began, timer = time.time(), time.perf_counter()
    with log.open("wb") as output:
        status = subprocess.run([sys.executable, *words], stdout=output, stderr=subprocess.STDOUT, env=environment,
                                check=False).returncode  # fmt: skip
    wall_s = time.perf_counter() - timer
    if status:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"]
        raise ResoluteError(f"{job.tool}, seed {job.seed}: got status {status}, expected 0: {lines[-1][:300]}")
    points = curve(began)
    return {"tool": job.tool, "seed": job.seed, "lr": job.lr, "workers": job.workers, "wall_s": wall_s,
            "curve": points, "top1": points[-1]["top1"]}  # fmt: skip


def time_to(curve: Curve, top1: float) -> float | None:
    """Seconds until the accuracy was first reached, None if it was not."""
    return next((point["elapsed_s"] for point in curve if point["top1"] >= top1), None)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error; 0 for a single value."""
    if len(values) < 2:
        return values[0], 0.0
    return statistics.fmean(values), statistics.stdev(values) / len(values) ** 0.5


def table(result: Mapping[str, Any]) -> str:
    rows, runs = [], result["runs"]
    for tool in dict.fromkeys(each["tool"] for each in runs):
        own = [each for each in runs if each["tool"] == tool]
        top1, error = mean_and_error([100 * each["top1"] for each in own])
        prep_s = result["prep_s"] if tool.startswith("ours") else 0.0
        walls = [each["wall_s"] + prep_s for each in own]
        without = f"{statistics.fmean(walls) - prep_s:.1f}" if prep_s else ""
        rows.append([tool, f"{top1:.1f} ± {error:.1f}", f"{statistics.fmean(walls):.1f}", without,
                     f"{own[0]['lr']:g}", str(own[0]["workers"]), str(len(own))])  # fmt: skip
    names = ["", "top-1, %", "wall s", "without prep", "lr", "workers", "seeds"]
    return text_table(f"{result['case']['model']}, {result['photos']} photos", names, rows)


def _tuned(text: Sequence[str]) -> dict[str, float]:
    """{tool: learning rate} of `--lr TOOL=LR` words."""
    rates = {}
    for word in text:
        tool, _, rate = word.partition("=")
        try:
            rates[chosen(tool, TOOLS)[0]] = float(rate)
        except (ValueError, IndexError):
            raise ResoluteError(f"--lr: got {word}, expected TOOL=RATE with a tool of {','.join(TOOLS)}") from None
    return rates


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = Parser(prog="python -m resolute.benchmarks.whole", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--photos", type=Path, required=True, help="native-size photos in class folders")
    parser.add_argument("--val-list", type=Path, required=True, help="photos to validate on: CLASS/NAME, one a line")
    parser.add_argument("--timm", type=Path, help="checkout of timm; without it, its tools are left out")
    parser.add_argument("--case", choices=sorted(CASES), default="small")
    parser.add_argument("--tools", default=",".join(TOOLS), help="(default: %(default)s)")
    parser.add_argument("--seeds", default="0", help="(default: %(default)s)")
    parser.add_argument("--lr", nargs="*", default=[], metavar="TOOL=LR", help="tuned on other photos")
    parser.add_argument("--epochs", help="PX=EPOCHS,… instead of the case's stages")
    parser.add_argument("--bf16", action="store_true", help="if the CPU has its instructions")
    parser.add_argument("--work", type=Path, default=Path("whole"), help="folder to work in")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/whole.json"), metavar="FILE")
    return command(parser, _run, argv)


def _run(args: argparse.Namespace) -> None:
    check_writable(args.out)
    tools = [tool for tool in chosen(args.tools, TOOLS) if args.timm or "timm" not in tool]
    case, rates, threads = CASES[args.case], _tuned(args.lr), available_cpus()
    if args.epochs:
        stages = tuple((int(res), int(epochs)) for res, _, epochs in
                       (word.partition("=") for word in args.epochs.split(",")))  # fmt: skip
        case = Case(**{**vars(case), "stages": stages})
    seeds = [int(seed) for seed in args.seeds.split(",")]
    result = header(rounds=len(seeds), packages=["webdataset"])
    work = args.work.resolve()
    shutil.rmtree(work, ignore_errors=True)
    write_photos(args.photos, args.val_list, work / "photos")
    began = time.perf_counter()
    sizes = ",".join(str(res) for res, _ in case.stages)
    prep = [sys.executable, "-m", "resolute", "shards", "--src", str(work / "photos/train"), "--val",
            str(work / "photos/val"), "--out", str(work / "shards"), "--res", sizes]  # fmt: skip
    done = subprocess.run(prep, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ResoluteError((done.stderr.strip().splitlines() or ["resolute shards: no output"])[-1])
    prep_s = time.perf_counter() - began
    common: dict[str, Any] = {"case": case, "threads": threads, "bf16": args.bf16, "photos": work / "photos",
                              "shards": work / "shards", "timm": args.timm and args.timm.resolve()}  # fmt: skip
    runs: list[dict[str, Any]] = []
    workers: dict[str, int] = {}
    for seed in seeds:
        for tool in tools:
            peer = not tool.startswith("ours")
            tried = []
            for count in [workers[tool]] if tool in workers else [threads, threads + 1] if peer else [threads]:
                show_progress(f"{tool}, seed {seed}, {count} workers")
                tried.append(run(Job(tool=tool, seed=seed, lr=rates.get(tool, case.lr), workers=count,
                                     folder=work / f"{tool}-{seed}-{count}", **common)))  # fmt: skip
            fastest = min(tried, key=lambda each: each["wall_s"])
            workers[tool] = fastest["workers"]
            runs.append(fastest)
    show_progress("")
    photos = sum(1 for path in (work / "photos/train").rglob("*") if path.is_symlink())
    result |= {"case": asdict(case), "photos": photos, "prep_s": prep_s, "bf16": args.bf16, "threads": threads,
               "runs": runs}  # fmt: skip
    print(table(result))
    write(args.out, result)


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
