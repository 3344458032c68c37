"""Photos to accuracy, whole commands: Resolute beside timm's train.py, FFCV and a plain PyTorch loop.

    python -m resolute.benchmarks.whole --photos FOLDER --val-list FILE --timm CHECKOUT --ffcv-python PY
                              [--case small] [--seeds 0,1,2] [--lr TOOL=0.5,…] [--out FILE]
    python -m resolute.benchmarks.whole … --rates 0.1,0.3,1      # on other photos: prints the best rates for --lr
    python -m resolute.benchmarks.whole --photos FOLDER --val-hash 10 --recipes a.toml,b.toml      # our recipes alone

FOLDER holds native-size photos in class folders; those that FILE lists are validated on, or one of N by a hash. All
tools train the same network with the same optimizer, schedule (a cosine after one epoch of warm-up), number of epochs,
batch size, crops and label smoothing, and validate after each epoch at the largest size. They have the same cores and
threads, and malloc keeps freed memory in all of them. Each is one command per seed, timed from its start to its end;
tools take turns, seed by seed. Preparing files (ours, ffcv, photos resized once) happens once, so that its time is a
single measurement; it is shown, and added to each training.

ours             `resolute shards`, then `resolute train`: 96, 128, 160, 224 px, in stages
ours-224         the same with all epochs at 224 px
plain            `loop.py`: one persistent DataLoader, the same stages
plain-once       the same on photos that `resize_once.py` has resized: short side 256 px, JPEG of quality 90
ffcv             the same loop on FFCV's batches (`ffcv.py`), the same stages
timm             train.py of a checkout of timm, all epochs at 224 px
timm-once        the same on photos resized once
timm-sizes       train.py with its own schedule of the same sizes (`--train-size-schedule progressive`)
timm-sizes-once  the same on photos resized once
a recipe         `resolute train` with its own settings, called by the name of its file

Each tool trains two epochs before, peers with N and with N + 1 workers for N cores, of which they then have the faster
number. `--case small` has a network so small that reading photos is the limit; `--case large` one that is the limit.

The result is written after each training. The same command of the same commit on the same machine continues it with the
trainings that are missing, as long as the prepared files are in the folder `--work`; else it starts anew.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from resolute.benchmarks.cli import chosen, default_file, show_progress
from resolute.benchmarks.record import check_writable, digest, header, write
from resolute.cli import program
from resolute.errors import ResoluteError
from resolute.machine import available_cpus
from resolute.settings import setting, settings
from resolute.train.recipe.schema import Recipe

from .photos import hash_rule, photo_links, write_photos
from .summary import best_rates, table
from .tools import CASES, TOOLS, Case, Job, kind, prepare, prepared, run

__all__ = ["WholeOptions", "main"]

_SETUP = "setup.txt"  # in the folder to work in: for which setup its files were prepared


@settings("")
class WholeOptions:
    photos: Annotated[
        tuple[str, ...],
        Field(
            description="native-size photos in class folders; may be given several times",
            min_length=1,
            json_schema_extra={"metavar": "FOLDER"},
        ),
    ]
    val_list: Path | None = setting(None, "file with the photos to validate on: CLASS/NAME, one a line")
    val_hash: int | None = setting(
        None, "or validate on one photo of so many: those whose SHA-256 of `whole/CLASS/NAME` is divisible by it", ge=2
    )
    tools: tuple[str, ...] = setting((), "tools to train (default: all, or none with --recipes)")
    recipes: tuple[Path, ...] = setting((), "recipes of ours to train, TOML files; they keep their learning rate")
    timm: Path | None = setting(None, "checkout of timm; without it, its tools are left out")
    ffcv_python: str | None = setting(None, "interpreter with FFCV; without it, ffcv is left out", min_length=1)
    case: Literal["small", "large"] = setting("small", "network that the tools train")
    epochs: tuple[str, ...] = setting((), "PX=EPOCHS of each stage instead of the case's")
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = setting((0,), "each trains all tools", min_length=1)
    lr: tuple[str, ...] = setting((), "TOOL=RATE, tuned on other photos (default: the case's)")
    lr_from: Path | None = setting(None, "result of --rates with the learning rates to take")
    rates: tuple[Annotated[float, Field(gt=0)], ...] = setting(
        (), "learning rates to try with every tool, to choose the best for --lr"
    )
    bf16: bool = setting(False, "train in bf16, if the CPU has its instructions")
    work: Path = setting(Path("whole"), "folder to work in, which is emptied first unless the command continues")
    out: Path | None = setting(None, "JSON file to write (default: bench/whole.json)")


def _named(recipes: Sequence[Path]) -> dict[str, Path]:
    """{name: file} of the recipes."""
    named = {path.stem: path.resolve() for path in recipes}
    if len(named) < len(recipes) or not named.keys().isdisjoint(TOOLS):
        raise ResoluteError(
            f"--recipes: got {','.join(path.name for path in recipes)}, expected different names, none of a tool; "
            "rename one"
        )
    return named


def _chosen_tools(options: WholeOptions) -> list[str]:
    given = {"timm": options.timm, "ffcv": options.ffcv_python}  # a tool that needs one of them is left out without it
    wanted = options.tools or (() if options.recipes else TOOLS)
    tools = [tool for tool in chosen(wanted, TOOLS, setting="--tools") if given.get(kind(tool), True)]
    if not tools and not options.recipes:
        raise ResoluteError(
            f"--tools: got {','.join(wanted)} without what they need, expected a tool; add --timm or --ffcv-python"
        )
    return tools


def _case(options: WholeOptions) -> Case:
    case = CASES[options.case]
    if not options.epochs:
        return case
    if not all(re.fullmatch(r"[1-9]\d*=[1-9]\d*", word) for word in options.epochs):
        raise ResoluteError(f"--epochs: got {','.join(options.epochs)}, expected PX=EPOCHS,…; write it as 96=3,128=1")
    stages = tuple((int(res), int(epochs)) for res, _, epochs in (word.partition("=") for word in options.epochs))
    return replace(case, stages=stages)


def _held_out(options: WholeOptions) -> Callable[[str], bool]:
    if (options.val_list is None) == (options.val_hash is None):
        raise ResoluteError("--val-list, --val-hash: got both or none, expected one of them; correct it")
    if options.val_hash is not None:
        return hash_rule(options.val_hash)
    assert options.val_list is not None
    lines = options.val_list.read_text(encoding="utf-8").splitlines()
    return {line.split()[0] for line in lines if line.strip()}.__contains__


def _rates(options: WholeOptions, tools: Sequence[str], case: Case) -> dict[str, list[float]]:
    """{tool: learning rates to train with}."""
    if options.rates:
        if len({*options.rates}) < max(2, len(options.rates)) or options.recipes or options.lr or options.lr_from:
            raise ResoluteError(
                "--rates: got equal rates, a single one, or --recipes, --lr or --lr-from with it, expected different "
                "rates as 0.1,0.3,1 for tools alone; correct it"
            )
        return {tool: [*options.rates] for tool in tools}
    tuned = {}
    if options.lr_from:
        try:
            best = json.loads(options.lr_from.read_text(encoding="utf-8"))["best"]
            tuned = {tool: float(best[tool]["lr"]) for tool in tools}
        except (ValueError, KeyError, TypeError) as error:
            raise ResoluteError(
                f"{options.lr_from}: got {error!r}, expected a finished result of --rates with the tools "
                f"{','.join(tools)}; name another file"
            ) from None
    for word in options.lr:
        tool, _, rate = word.partition("=")
        try:
            tuned[chosen([tool], TOOLS, setting="--lr")[0]] = float(rate)
        except ValueError:
            raise ResoluteError(f"--lr: got {word}, expected TOOL=RATE; correct it") from None
    return {tool: [tuned.get(tool, case.lr)] for tool in tools}


def _run(options: WholeOptions) -> None:
    out = options.out or default_file("whole")
    check_writable(out)
    if len({*options.seeds}) < len(options.seeds):
        raise ResoluteError(f"--seeds: got {','.join(map(str, options.seeds))}, expected different ones; correct it")
    tools, recipes, case = _chosen_tools(options), _named(options.recipes), _case(options)
    loaded = {name: Recipe.load(path) for name, path in recipes.items()}
    rates = _rates(options, tools, case) | {name: [recipe.optim.lr] for name, recipe in loaded.items()}
    folders, held_out, work = [Path(folder) for folder in options.photos], _held_out(options), options.work.resolve()
    links = photo_links(folders, held_out)
    if {link.partition("/")[0] for link in links} != {"train", "val"}:
        raise ResoluteError(
            f"--photos: got {','.join(options.photos)} without photos CLASS/NAME both to train and to validate on, "
            "expected both; correct it, or --val-list or --val-hash"
        )
    sizes = {res for recipe in loaded.values() for res in recipe.resolutions}
    if any(tool.startswith("ours") for tool in tools):
        sizes |= {res for res, _ in case.stages}
    jobs = {
        tool: Job(
            case=case,
            tool=tool,
            seed=0,
            lr=lr,
            workers=available_cpus(),
            threads=available_cpus(),
            bf16=options.bf16,
            photos=work / "photos",
            shards=work / "shards",
            timm=options.timm and options.timm.resolve(),
            ffcv_python=options.ffcv_python,
            folder=work / tool,
            recipe=recipes.get(tool),
            sizes=tuple(sorted(sizes)),
        )
        for tool, (lr, *_) in rates.items()
    }
    result: dict[str, Any] = header(rounds=len(options.seeds), packages=["webdataset"]) | {
        "case": asdict(case),
        "bf16": options.bf16,
        "threads": available_cpus(),
        "rates": rates,
        "recipes": {name: path.read_text(encoding="utf-8") for name, path in recipes.items()},
    }
    same = ("command", "commit", "versions", "case", "threads", "rates", "recipes")
    setup = digest({name: result[name] for name in same} | {"cpu": result["machine"]["cpu"], "links": links})
    before = _unfinished(out, setup)
    if before and _content(work / _SETUP) == setup and all(job.files.exists() for job in jobs.values()):
        result = before
    else:
        shutil.rmtree(work, ignore_errors=True)
        result["setup"] = setup
        result["photos"], result["validated"] = write_photos(folders, held_out, work / "photos")
        makers = {prepared(tool): jobs[tool] for tool in reversed(jobs)}  # the first of those with the same files
        result["prep_s"] = {name: prepare(job) for name, job in makers.items() if name}
        result["workers"] = {tool: _faster_workers(job) for tool, job in jobs.items()}
        result["runs"] = []
        (work / _SETUP).write_text(setup, encoding="utf-8")
    _train(result, options, jobs, out)
    show_progress("")
    print(table(result))
    if best := result.get("best"):
        print("--lr", ",".join(f"{tool}={each['lr']:g}" for tool, each in best.items()))
    print(f"\nwritten: {out}")


def _content(path: Path) -> str:
    """Of a text file; "" if it does not exist."""
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _unfinished(out: Path, setup: str) -> dict[str, Any] | None:
    """The result in `out`, if it was begun with the same setup and is unchanged since it was written; else None."""
    try:
        result: dict[str, Any] = json.loads(_content(out))
        return result if (result["setup"], result["digest"]) == (setup, digest(result)) else None
    except (ValueError, LookupError, TypeError):
        return None


def _faster_workers(job: Job) -> int:
    """The number of workers of a tool: for peers the faster one of two, each with two epochs.

    Ours trains them too: what it compiles is compiled once per installation.
    """
    counts = (job.threads,) if kind(job.tool) == "ours" else (job.threads, job.threads + 1)
    show_progress(f"{job.tool}, two epochs before the measurement")
    tried = [run(replace(job.short(), workers=count)) for count in counts]
    return int(min(tried, key=lambda each: float(each["wall_s"]))["workers"])


def _train(result: dict[str, Any], options: WholeOptions, jobs: Mapping[str, Job], out: Path) -> None:
    """Add the trainings that the result lacks, and write it after each: a benchmark of hours may be stopped.

    "missing" is the number of those that it still lacks.
    """
    rates, runs = result["rates"], result["runs"]
    tried = range(max(map(len, rates.values())))
    todo = [(tool, rates[tool][number], seed) for number in tried for seed in options.seeds for tool in rates]
    done = {(each["tool"], each["lr"], each["seed"]) for each in runs}

    def save() -> None:
        result["missing"] = len(todo) - len(runs)
        if options.rates and not result["missing"]:
            result["best"] = best_rates(result)
        write(out, result, quiet=True)

    if not runs:
        save()
    for tool, lr, seed in (each for each in todo if each not in done):
        show_progress(f"{tool}, seed {seed}, learning rate {lr:g}")
        runs.append(run(replace(jobs[tool], seed=seed, lr=lr, workers=result["workers"][tool])))
        save()


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    name, help = "python -m resolute.benchmarks.whole", (__doc__ or "").partition("\n\n")[0]
    return program(name, WholeOptions, _run, words, help=help)


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
