"""Resolute on a GPU, compared with what people use: loaders, live training, changes of size, whole trainings.

    python -m resolute.benchmarks.gpu --photos PHOTOS --training-photos PHOTOS[,PHOTOS …]
                          [--timm CHECKOUT] [--ffcv-python PY] [--minutes 9] [--only PART,…] [--out FILE]

PHOTOS are folders of original-size photos in class folders: the first is stored at 128, 160 and 224 px and feeds
loaders; the others, Imagenette's, are trained on, but for a tenth that a hash of the names holds out. CHECKOUT is a
clone of timm's repository. The result FILE holds rows, each written when it has been measured. The same command
continues with the rows that are missing, until --minutes are over; it repeats failed ones only at another commit. All
rows of a file are of one machine and the same versions of packages, and a digest shows that nobody edited them.

feed      a loader alone, and ResNet-50 and ResNet-18 on its batches and on one synthetic batch, with 2 to 16 cores;
          ours decodes on the CPU and on the GPU (`--decode gpu`)
change    training steps across the changes of size
training  photos to accuracy, whole commands: ours, a plain DataLoader on photos that were resized once, timm's
          train.py; 16 epochs to 160 px, the same settings for all, none of them tuned on a GPU; and the included
          recipe `imagenette_cpu_whole`
ranks     our training with one process, two, and one for each GPU; where there are fewer GPUs, processes share one

`--device cpu` is a trial with tiny sizes, whose figures mean nothing.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import contextlib
import dataclasses
import datetime
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from resolute.cli import program
from resolute.errors import ResoluteError
from resolute.files import check_output
from resolute.machine import available_cpus
from resolute.settings import described, setting, settings
from resolute.train.recipe import RECIPES
from resolute.train.recipe.schema import Recipe

from . import change
from .cli import chosen, default_file, repeated, spread, text_table
from .loaders.job import Job
from .loaders.registry import GPU_LOADERS
from .loaders.run import Runner
from .record import commit, digest, find_device, header, write
from .whole import tools as whole
from .whole.photos import hash_rule, write_photos
from .whole.summary import table as trainings_table
from .whole.tools import call, timed

__all__ = ["PARTS", "Sizes", "main", "missing", "rows", "tables"]

Row = dict[str, Any]  # "part", and what it measures: the name of a row, and all that its measurement depends on
PARTS = ("feed", "change", "training", "ranks")
_LIMITS_S = {"feed": 240, "change": 120, "training": 400, "ranks": 240}
_PREPARATION_S = 120
_LEAST_S = 15  # no row begins with less time left
_HELD_OUT = hash_rule(10)  # a tenth of the photos is validated on
_SPAWN = multiprocessing.get_context("spawn")  # why: CUDA does not work in a forked process


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of all measurements."""

    resolutions: tuple[int, ...]
    copies: int  # of each photo in the set that feeds loaders
    models: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    cores: tuple[int, ...]
    seconds: float  # of each measurement
    change_batch_size: int
    seeds: tuple[int, ...]
    case: whole.Case
    recipe: Path
    scale_epochs: float  # of the recipe
    processes: tuple[int, ...]  # of `ranks`

    @classmethod
    def for_device(cls, device: str) -> Sizes:
        here = available_cpus()
        case = whole.Case(
            model="resnet18",
            model_kwargs={},
            stages=((96, 6), (128, 6), (160, 4)),
            lr=0.5,
            batch_size=256,
            eval_batch_size=512,
        )
        if device == "cpu":
            return cls(
                resolutions=(32, 48),
                copies=1,
                models=("test_resnet",),
                batch_sizes=(8,),
                cores=(1,),
                seconds=0.05,
                change_batch_size=8,
                seeds=(0,),
                case=dataclasses.replace(case, stages=((32, 1), (48, 1)), batch_size=16, eval_batch_size=16, lr=0.1),
                recipe=RECIPES / "imagenette_cpu_quick.toml",
                scale_epochs=0.2,
                processes=(2,),
            )
        import torch  # why here: command line errors should not wait for the import

        return cls(
            resolutions=(128, 160, 224),
            copies=13,
            models=("resnet50", "resnet18"),
            batch_sizes=(1024, 256),
            cores=tuple(sorted({min(here, count) for count in (2, 4, 8, 16)})),
            seconds=1.5,
            change_batch_size=256,
            seeds=(0, 1, 2),
            case=case,
            recipe=RECIPES / "imagenette_cpu_whole.toml",
            scale_epochs=1.0,
            processes=tuple(sorted({1, 2, max(1, torch.cuda.device_count())})),
        )


def rows(sizes: Sizes, *, loaders: Sequence[str], tools: Sequence[str]) -> list[Row]:
    """All rows, the most telling first: time on a GPU is short."""
    feeds, small, large = [name for name in loaders if GPU_LOADERS[name].has_rate], min(sizes.cores), max(sizes.cores)
    middle = sizes.cores[len(sizes.cores) // 2 - 1]

    def feed(batch_size: int, cores: Sequence[int], names: Sequence[str] = feeds, compiled: bool = False) -> list[Row]:
        models = sizes.models[:1] if compiled else sizes.models
        values = {"batch_size": batch_size, "models": [*models], "compile": compiled}
        return [{"part": "feed", "loader": name, "cores": count, **values} for count in cores for name in names]

    def training(seed: int) -> list[Row]:
        pairs = itertools.product(reversed(sizes.models), tools)
        compared = [{"part": "training", "tool": tool, "model": model, "seed": seed} for model, tool in pairs]
        return [*compared, {"part": "training", "tool": sizes.recipe.stem, "seed": seed}]

    changes = [
        {
            "part": "change",
            "loader": name,
            "workers": large,
            "batch_size": sizes.change_batch_size,
            "model": sizes.models[0],
            "steps": 4 * change.first_batches(large),
            "round": number,
        }
        for number in range(3)
        for name in ("ours", "v2", "v2-sized")
    ]
    big, *others = sizes.batch_sizes
    rest = [count for count in sizes.cores if count not in (middle, large)]
    ordered = [
        *feed(big, [large, *({middle} - {large})]),
        *training(sizes.seeds[0]),
        *changes,
        *(
            {"part": "ranks", "model": sizes.models[0], "batch_size": big, "processes": count}
            for count in sizes.processes
        ),
        *feed(big, sorted(rest, key=lambda count: count == small)),
        *itertools.chain.from_iterable(training(seed) for seed in sizes.seeds[1:]),
        *itertools.chain.from_iterable(feed(size, sizes.cores[::-1]) for size in others),
        *feed(big, [large], [name for name in ("ours", "v2") if name in feeds], compiled=True),
    ]
    return ordered


# ---- the result file -------------------------------------------------------------------------------------------------


def missing(result: Mapping[str, Any], todo: Sequence[Row]) -> list[Row]:
    """The rows that have no result yet; those that failed only if another commit was running."""
    here = commit()
    done = [each["row"] for each in result["rows"] if "failed" not in each or each["commit"] == here]
    return [row for row in todo if row not in done]


def _opened(out: Path, settings: dict[str, Any], device: Any) -> dict[str, Any]:
    """The result in `out`, or a new one. Raises `ResoluteError` if it is another machine's, or was edited."""
    new = {**header(device=device, packages=["webdataset"]), "settings": settings, "rows": []}
    if not out.exists():
        return new
    try:
        result = json.loads(out.read_text(encoding="utf-8"))
        held = result["digest"]
    except (ValueError, KeyError, TypeError):
        raise ResoluteError(f"{out}: not a result of this command; name another --out") from None
    if held != digest(result):
        raise ResoluteError(f"{out}: changed since it was written; restore it, or name another --out")
    now = json.loads(json.dumps(new))
    for field in ("machine", "versions", "settings"):
        for name, here in now[field].items():
            there = result[field].get(name)
            if there != here and name not in ("load_before", "load_after"):
                raise ResoluteError(f"{out}: measured with {name} {there}, got {here} here; name another --out")
    return {**result, "command": new["command"]}


# ---- measuring -------------------------------------------------------------------------------------------------------


class _Worker:
    """A process that runs `serve(connection, log, setup)`, started when it is needed, and again after a failed row."""

    def __init__(self, serve: Callable[..., None], setup: Any, log: Path) -> None:
        self._serve, self._setup, self._log = serve, setup, log
        self._process: Any = None

    def measure(self, row: Row, limit_s: float) -> dict[str, Any]:
        """Raises `ResoluteError` if the row fails or takes longer."""
        if self._process is None:
            self._connection, theirs = _SPAWN.Pipe()
            self._process = _SPAWN.Process(target=self._serve, args=(theirs, self._log, self._setup))
            self._process.start()
            theirs.close()  # so that the end of the process ends the connection
        try:
            self._connection.send(row)
            if self._connection.poll(limit_s):
                return dict(self._connection.recv())
            problem = f"no result after {limit_s:.0f} s"
        except (EOFError, OSError):  # the process has ended; its log says why
            lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"]
            problem = lines[-1][:300]
        self.close()
        raise ResoluteError(problem)

    def close(self) -> None:
        """End the process and those that it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):  # why both: it may not lead a group yet
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
            self._process.join()
            self._connection.close()
            self._process = None


class _Bench:
    """Measures the rows of a command in its folder."""

    def __init__(self, options: GpuOptions, sizes: Sizes, device: str) -> None:
        self._options, self._sizes, self._device = options, sizes, device
        self.work = options.work.resolve()
        self.work.mkdir(parents=True, exist_ok=True)
        from . import gpu_rows  # why here: --help should not wait for slow imports

        setup = gpu_rows.Setup(
            shards=str(self._set("feed")), device=device, resolutions=sizes.resolutions, seconds=sizes.seconds
        )
        self._worker = _Worker(gpu_rows.serve, setup, self.work / "rows.log")

    def close(self) -> None:
        self._worker.close()

    def measure(self, row: Row, limit_s: float) -> dict[str, Any]:
        """The result of a row. Raises `ResoluteError` if it fails or takes longer."""
        if row["part"] == "training":
            return self._training(row, limit_s)
        if row["part"] == "ranks":
            return self._ranks(row, limit_s)
        self._feed_set()
        if row.get("loader") == "ffcv":
            return self._ffcv(row, limit_s)
        return self._worker.measure(row, limit_s)

    # ---- files

    def _set(self, name: str) -> Path:
        return self.work / name / "shards"

    def _once(self, name: str, make: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        """The result of `make`, which makes the folder `name` once."""
        done = self.work / name / "made.json"
        if not done.exists():
            shutil.rmtree(done.parent, ignore_errors=True)
            done.parent.mkdir(parents=True)
            made = make(done.parent)
            done.write_text(json.dumps(made), encoding="utf-8")
        return dict(json.loads(done.read_text(encoding="utf-8")))

    def _feed_set(self) -> None:
        def make(folder: Path) -> dict[str, Any]:
            for path, copy in itertools.product(sorted(self._options.photos.glob("*/*")), range(self._sizes.copies)):
                link = folder / "photos" / path.parent.name / f"{path.stem}-{copy}{path.suffix}"
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(path.resolve())
            res = ",".join(map(str, self._sizes.resolutions))
            words = ["shards", f"--src={folder / 'photos'}", f"--out={folder / 'shards'}", f"--res={res}"]
            command = [sys.executable, "-m", "resolute", *words]
            return {"prep_s": timed(command, folder / "prep.log", name="prep", limit_s=_PREPARATION_S)}

        self._once("feed", make)

    def _training_sets(self) -> dict[str, Any]:
        """{"photos", "validated", "prep_s": {tool: s}} of the photos that are trained on."""

        def make(folder: Path) -> dict[str, Any]:
            trained, validated = write_photos(self._options.training_photos, _HELD_OUT, folder / "photos")
            prep_s = {
                name: whole.prepare(self._job({"tool": tool, "model": "", "seed": 0}))
                for name, tool in (("ours", "ours"), ("once", "plain-once"))
            }
            # why: kernels are compiled once per machine
            short = {"tool": "ours", "model": self._sizes.models[-1], "seed": 0}
            whole.run(dataclasses.replace(self._job(short), case=self._sizes.case.shortened(2)))
            return {"photos": trained, "validated": validated, "prep_s": prep_s}

        return self._once("training", make)

    # ---- parts

    def _job(self, row: Row) -> whole.Job:
        """The training of a row; one without a model is that of the recipe."""
        case, folder, recipe = self._sizes.case, self.work / "training", None
        if "model" in row:
            case = dataclasses.replace(case, model=row["model"])
        else:
            recipe = Recipe.load(self._sizes.recipe)
        return whole.Job(
            case=case,
            tool=row["tool"],
            seed=row["seed"],
            lr=recipe.optim.lr if recipe else case.lr,
            workers=available_cpus(),
            threads=available_cpus(),
            bf16=self._device != "cpu",
            photos=folder / "photos",
            shards=self._set("recipe" if recipe else "training"),
            timm=self._options.timm and self._options.timm.resolve(),
            ffcv_python=None,
            folder=folder / row["tool"],
            device=self._device,
            recipe=self._sizes.recipe if recipe else None,
            sizes=recipe.resolutions if recipe else (),
            scale_epochs=self._sizes.scale_epochs if recipe else 1.0,
        )

    def _training(self, row: Row, limit_s: float) -> dict[str, Any]:
        made, job = self._training_sets(), self._job(row)
        if job.recipe:
            made |= self._once("recipe", lambda _: {"prep_s": {"ours": whole.prepare(job)}})
        return {**whole.run(job, limit_s=limit_s), **made}

    def _ranks(self, row: Row, limit_s: float) -> dict[str, Any]:
        """{"devices", "wall_s", "images_per_s": {px: [epoch]}} of a training with some processes, in all."""
        # why here: --help should not wait for slow imports
        import torch

        from resolute.train.logs.metrics import read_log

        self._training_sets()
        count, devices = row["processes"], torch.cuda.device_count() if self._device != "cpu" else 0
        ours = self._job({"tool": "ours", "model": row["model"], "seed": 0})
        job = dataclasses.replace(
            ours,
            case=dataclasses.replace(ours.case, batch_size=row["batch_size"]),
            threads=max(1, ours.threads // count),  # of each process
            folder=self.work / "training/ranks",
        )
        shutil.rmtree(job.folder, ignore_errors=True)
        job.folder.mkdir(parents=True)
        command = [sys.executable, *call(job)[0], f"--gpus={count}"]
        shared = {"RESOLUTE_SHARE_GPU": "1"} if 0 < devices < count else {}
        wall_s = timed(command, job.folder / "out.log", name="ranks", limit_s=limit_s, environment=shared)
        rates: dict[str, list[float]] = {}
        for record in read_log(job.folder / "run/run.jsonl"):
            if record["kind"] == "epoch":
                rates.setdefault(str(record["res"]), []).append(record["images_per_s"])
        return {"devices": min(devices, count), "wall_s": wall_s, "images_per_s": rates}

    def _ffcv(self, row: Row, limit_s: float) -> dict[str, Any]:
        """FFCV alone: its interpreter cannot import the training step."""
        scratch = self.work / "ffcv"
        scratch.mkdir(exist_ok=True)
        runner = Runner(
            job=Job(
                shards=str(self._set("feed")),
                scratch=str(scratch),
                resolutions=self._sizes.resolutions,
                batches=20 + int(2 * self._sizes.seconds * 100_000 / row["batch_size"]),
                batch_size=row["batch_size"],
                workers=row["cores"],
                device=self._device,
                dtype="float16" if self._device != "cpu" else "float32",
                warm_up=4,
                seconds=self._sizes.seconds,
            ),
            loaders=("ffcv",),
            rounds=1,
            known=GPU_LOADERS,
            ffcv_python=self._options.ffcv_python,
            cores=row["cores"],
            spare_s=limit_s / (1 + len(self._sizes.resolutions)),  # for the file, and each size
        )
        if not all((scratch / f"{res}.beton").exists() for res in self._sizes.resolutions):
            runner.run("ffcv", task="prepare")
        alone = {str(res): {"alone": runner.run("ffcv", resolutions=(res,))} for res in self._sizes.resolutions}
        return {"workers": row["cores"], "tried": {}, "res": alone}


# ---- tables ----------------------------------------------------------------------------------------------------------


def tables(result: Mapping[str, Any]) -> str:
    """Text tables of all rows that were measured, and a line for each that failed."""
    machine = result["machine"]
    texts = [
        f"{machine['gpu'] or machine['cpu']}, {machine['cores']} cores of {machine['cpu']}, "
        f"commits {', '.join(sorted({str(each['commit']) for each in result['rows']}))}",
        *_feed_tables(result),
        *_change_table(result),
        *_training_tables(result),
        *_ranks_table(result),
        *(f"failed: {_name(each['row'])}: {each['failed']}" for each in result["rows"] if "failed" in each),
    ]
    return "\n\n".join(texts)


def _measured(result: Mapping[str, Any], part: str) -> list[tuple[Row, dict[str, Any]]]:
    return [
        (each["row"], each["result"]) for each in result["rows"] if each["row"]["part"] == part and "result" in each
    ]


def _feed_tables(result: Mapping[str, Any]) -> Iterator[str]:
    feeds, resolutions = _measured(result, "feed"), result["settings"]["resolutions"]
    feeds.sort(key=lambda each: ([*GPU_LOADERS].index(each[0]["loader"]), each[0]["cores"]))
    kinds = {(row["batch_size"], row["compile"]) for row, _ in feeds}
    for batch_size, compiled in sorted(kinds, key=lambda kind: (-kind[0], kind[1])):
        own = [each for each in feeds if (each[0]["batch_size"], each[0]["compile"]) == (batch_size, compiled)]
        if not compiled:
            title = f"loader alone, batches of {batch_size}: images/s, CPU s per 1 000 images"
            yield _feed_table(title, resolutions, own, ("{} px", "CPU s, {}"), _alone)
        trained = [each for each in own if each[0]["loader"] != "ffcv"]  # which is measured alone
        for model in dict.fromkeys(model for row, _ in trained for model in row["models"]):
            title = f"{model}{', compiled' * compiled}, batches of {batch_size}: images/s, live ÷ synthetic, busy cores"
            yield _feed_table(title, resolutions, trained, ("{} px", "ratio {}", "busy {}"), partial(_live, model))


def _feed_table(
    title: str,
    resolutions: Sequence[int],
    measured: Sequence[tuple[Row, dict[str, Any]]],
    heads: Sequence[str],
    texts: Callable[[dict[str, Any]], tuple[str, ...]],
) -> str:
    """`heads`: with {} for the resolution, one for each of the `texts` of the values at a resolution."""
    lines = []
    for row, outcome in measured:
        columns = zip(*(texts(outcome["res"][str(res)]) for res in resolutions), strict=True)
        first = (GPU_LOADERS[row["loader"]].title, str(row["cores"]), str(outcome["workers"]))
        lines.append([*first, *itertools.chain.from_iterable(columns)])
    names = [head.format(res) for head in heads for res in resolutions]
    return text_table(title, ["loader", "cores", "workers", *names], lines)


def _alone(values: dict[str, Any]) -> tuple[str, ...]:
    return f"{values['alone']['images_per_s']:,.0f}", f"{values['alone']['cpu_s_per_1000']:.2f}"


def _live(model: str, values: dict[str, Any]) -> tuple[str, ...]:
    live, synthetic = values[model]["live"], statistics.fmean(values[model]["synthetic"])  # before and after
    rate = live["images_per_s"]
    return f"{rate:,.0f}", f"{rate / synthetic:.3f}", f"{live['cores_busy']:.1f}"


def _change_table(result: Mapping[str, Any]) -> Iterator[str]:
    measured = _measured(result, "change")
    if not measured:
        return
    raw: dict[str, list[Any]] = {}
    for row, outcome in measured:
        raw.setdefault(row["loader"], []).append(outcome["step_s"])
    first, lines = measured[0][0], []
    for each in change.summary(raw, result["settings"]["resolutions"], first["workers"]):
        for name, values in each["loaders"].items():
            lines.append(
                [
                    f"{each['from_res']} -> {each['to_res']} px",
                    GPU_LOADERS[name].title,
                    GPU_LOADERS[name].at_change,
                    spread(values["cost_s"], 1, 1e3),
                    f"{1e3 * values['steady_s']['median']:.1f}",
                ]
            )
    title = (
        f"{first['model']}, batches of {first['batch_size']}: ms lost in the first "
        f"{change.first_batches(first['workers'])} steps after a change of size"
    )
    yield text_table(title, ["change", "loader", "at the change", "ms lost", "usual step, ms"], lines, left=3)


def _training_tables(result: Mapping[str, Any]) -> Iterator[str]:
    measured = _measured(result, "training")
    for model in dict.fromkeys(row.get("model") for row, _ in measured):
        runs = [outcome for row, outcome in measured if row.get("model") == model]
        yield trainings_table(
            {"case": {"model": model}, "photos": runs[0]["photos"], "prep_s": runs[0]["prep_s"], "runs": runs}
        )


def _ranks_table(result: Mapping[str, Any]) -> Iterator[str]:
    measured = sorted(_measured(result, "ranks"), key=lambda each: each[0]["processes"])
    if measured:
        row, outcome = measured[0]
        sizes = [*outcome["images_per_s"]]
        lines = [
            [
                str(row["processes"]),
                str(outcome["devices"] or "CPU"),
                *(spread(repeated(outcome["images_per_s"][res])) for res in sizes),
                f"{outcome['wall_s']:.1f}",
            ]
            for row, outcome in measured
        ]
        title = f"{row['model']}, batches of {row['batch_size']} over all processes: images/s of all, epoch by epoch"
        yield text_table(title, ["processes", "GPUs", *(f"{res} px" for res in sizes), "s"], lines)


def _name(row: Row) -> str:
    return " ".join(str(value) for name, value in row.items() if name not in ("models", "compile", "steps", "workers"))


# ---- command ---------------------------------------------------------------------------------------------------------


@settings("")
class GpuOptions:
    photos: Annotated[Path, described("original-size photos in class folders, to feed loaders")]
    training_photos: Annotated[tuple[Path, ...], described("photos in class folders, to train", min_length=1)]
    timm: Path | None = setting(None, "checkout of timm; without it, its tools are left out")
    ffcv_python: str | None = setting(None, "interpreter with FFCV; without it, ffcv is left out")
    minutes: float = setting(60.0, "no row begins later", ge=0)
    only: tuple[str, ...] = setting((), "parts to measure (default: all)")
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "auto: a GPU if there is one")
    work: Path = setting(Path("gpu-work"), "folder to work in, kept for the next time")
    out: Path | None = setting(None, "JSON file to write (default: bench/gpu-NAME.json)")


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    help = (__doc__ or "").partition("\n\n")[0]
    return program("python -m resolute.benchmarks.gpu", GpuOptions, _run, words, help=help)


def _run(options: GpuOptions) -> None:
    began, device = time.monotonic(), find_device(options.device)
    parts = chosen(options.only or PARTS, PARTS)
    for folder in (options.photos, *options.training_photos):
        if not any(folder.glob("*/*")):
            raise ResoluteError(f"{folder}: got no CLASS/PHOTO, expected a folder of class folders; correct it")
    sizes = Sizes.for_device(device.type)
    loaders = [
        name
        for name in GPU_LOADERS
        if (name != "ffcv" or options.ffcv_python) and (device.type == "cuda" or name not in ("ours-gpu", "dali"))
    ]
    tools = ["ours", "plain-once", *(["timm-once", "timm-sizes-once"] if options.timm else [])]
    todo = [row for row in rows(sizes, loaders=loaders, tools=tools) if row["part"] in parts]
    name = header(device=device)["machine"]["gpu"] or "cpu"
    out = options.out or default_file("gpu", name)
    check_output(out, setting="--out", suffixes=(".json",), named=options.out is not None)
    about = {
        "device": device.type,
        "photos": options.photos.resolve().name,
        "training_photos": [folder.resolve().name for folder in options.training_photos],
        "resolutions": sizes.resolutions,
        "seconds": sizes.seconds,
        "case": dataclasses.asdict(sizes.case),
        "recipe": sizes.recipe.read_text(encoding="utf-8"),
    }
    result = _opened(out, about, device)
    bench = _Bench(options, sizes, device.type)
    try:
        for row in missing(result, todo):
            left_s = 60 * options.minutes - (time.monotonic() - began)
            if left_s < _LEAST_S:
                break
            measured = _measure(bench, row, left_s)
            if measured is None:  # the time is over
                break
            others = [each for each in result["rows"] if each["row"] != row]
            result = {**result, "rows": [*others, measured]}
            write(out, result, quiet=True)
            print(f"{_name(row)}: {measured.get('failed', 'measured')} ({measured['took_s']:.0f} s)", flush=True)
    finally:
        bench.close()
    print(tables(result))
    left = missing(result, todo)
    print(f"\n{len(todo) - len(left)} of {len(todo)} rows; {out}")
    if left:
        print(f"missing: {'; '.join(map(_name, left))}; the same command continues")


def _measure(bench: _Bench, row: Row, left_s: float) -> dict[str, Any] | None:
    """The row with its result, or with what failed; None if the time was over."""
    load, began = os.getloadavg()[0], time.monotonic()
    limit_s = min(_LIMITS_S[row["part"]], left_s)
    outcome: dict[str, Any]
    try:
        outcome = {"result": bench.measure(row, limit_s)}
    except ResoluteError as error:
        if time.monotonic() - began >= left_s - 1:
            return None
        outcome = {"failed": str(error)}
    return {
        "row": row,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "load_before": round(load, 2),
        "load_after": round(os.getloadavg()[0], 2),
        "took_s": round(time.monotonic() - began, 1),
        **outcome,
    }


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
