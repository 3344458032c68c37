"""Command line of prep: `python -m resolute.prep --src photos --out shards --res 128,160,224`.

`python -m resolute.prep plan`, `shards` and `finalize` make the same set by separate commands, on any number of machines.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    import gc
    import os

    from resolute.console import guard_process

    guard_process()
    gc.set_threshold(50_000)  # why: collecting garbage takes a tenth of the imports' time
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # why: its threads, which nothing here uses, take 60 ms to start

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from resolute.console import Parser, number, print_error
from resolute.errors import ResoluteError, from_os_error, strip_credentials
from resolute.machine import available_cpus
from resolute.prep.execute.process_pool import start_fork_server

from .config import MARGIN, RESOLUTIONS, Settings, parse_resolutions

if TYPE_CHECKING:
    from resolute.prep.execute.stats import RunStats

    from .prepare import BuildResult

__all__ = ["main"]

_PLAN = (
    "First of three commands that make a set by separate jobs: list the photos and write a plan to OUT, for `python -m "
    "prep shards` and `finalize`."
)
_SHARDS = (
    "Convert a range of the planned shards, except those that are finished. Shards are numbered from 0: those of "
    "train, then those of val. Any number of these jobs may run at the same time, in any order, on any machines that "
    "see OUT and the photos under the same names; each may be killed and repeated, and ranges may overlap."
)
_FINALIZE = "Complete the set when all shards are converted: index, lists, report, and the manifest last."
_OUT = "where `python -m resolute.prep plan` has written the plan: a folder, or a URL such as s3://bucket/set"
_WORKERS = "worker processes (default: one per CPU core)"


def _parser(*, plan: bool = False) -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m resolute.prep plan" if plan else "python -m resolute.prep",
        description=_PLAN if plan else "Turn photos into pre-resized WebDataset shards: each photo is decoded once, "
        "resized to every resolution and written in one shuffled order.",
        epilog="Repeated plans keep finished shards." if plan else
        "It is safe to run the same command again: an unfinished run resumes, and a finished set is left as it "
        "is, except that missing resolutions are added, and shards rebuilt that `python -m resolute.prep.verify` found "
        "damaged. "
        "`python -m resolute.prep plan`, `shards` and `finalize` (each has a --help) make the same set by separate jobs. "
        "Exit status: 0 success, 2 error (explained in one line on stderr), 130 interrupted.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--src", default="", metavar="SRC",
        help="folder of class folders; flat folder with --labels; list file of paths and labels; zip or tar of "
        "class folders; WebDataset tars or Parquet files (file, folder, pattern); or a URL of these")  # fmt: skip
    add("--kind", default="auto", metavar="KIND",
        choices=["auto", "folders", "table", "listing", "archive", "webdataset", "parquet"],
        help="format of SRC, if it is not detected: %(choices)s")  # fmt: skip
    add("--labels", metavar="FILE", help="CSV or TSV with one row per image, for a folder without class folders")
    add("--columns", metavar="ID,LABEL",
        help="image and target columns of a table, list or Parquet file, also several: id,first..last; 0,1 for a table "
        "without a header")  # fmt: skip
    add("--target", metavar="KIND",
        help="what the target columns hold, if it is not recognised: class (one per image), labels (any number, also "
        "labels:space, comma, semicolon, bar or list: how a cell separates them) or values (numbers)")  # fmt: skip
    add("--classes", metavar="FILE", help="class names, one per line; line n (from 0) names class n")
    add("--val", metavar="SRC", help="separate validation source, of the same kind as SRC")
    add("--val-labels", metavar="FILE", help="table for --val, if --labels does not cover its images too")
    add("--val-list", metavar="FILE", help="images of SRC to hold out, one name per line")
    add("--val-frac", type=float, metavar="F", help="fraction of every class to hold out, 0..1 (default: 0.1); 0: none")
    add("--out", required=True, metavar="DIR", help="where to write the shards: a folder, or a URL such as s3://bucket/set")
    add("--res", metavar="PX,PX", help=f"resolutions to train at, ascending (default: {RESOLUTIONS})")
    add("--margin", type=float, default=MARGIN, metavar="X",
        help="stored short side = res * margin (default: 256/224)")  # fmt: skip
    add("--quality", type=int, default=90, metavar="Q", help="JPEG quality, 1..100 (default: %(default)s)")
    add("--max-bad", type=float, default=0.01, metavar="F",
        help="fraction of the images that may be unusable (default: %(default)s)")  # fmt: skip
    add("--duplicates", choices=["together", "drop", "keep"],
        help="photos with equal bytes: kept in one split (the default, and an error if --val or --val-list puts them "
        "into two), one of them stored, preferably in val, or all kept where they are")  # fmt: skip
    add("--unlabelled", default="refuse", choices=["refuse", "drop"],
        help="photos whose label is empty or -1: an error, or left out and counted (default: %(default)s)")  # fmt: skip
    add("--shard-samples", type=int, default=4096, metavar="N", help="samples per shard (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the order and of the held-out images (default: 0)")
    add("--rebuild", action="store_true", help="start over and replace what prep wrote to OUT before")
    add("--extend", action="store_true",
        help="add the photos that have come since the set was finished; old shards keep every byte")  # fmt: skip
    add("--drop", action="store_true",
        help="with --extend: leave out photos that are gone or have changed, and add the new versions")  # fmt: skip
    if plan:
        return parser
    add("--workers", type=int, default=0, metavar="N", help=_WORKERS)
    add("--engine", default="local", choices=["local", "ray"], help="this machine or a Ray cluster (default: local)")
    add("--ray-address", metavar="HOST:PORT", help="of the Ray cluster; by default Ray finds or starts one itself")
    add("--dry-run", action="store_true", help="write nothing: count images, convert some, estimate bytes and time")
    return parser


def _shards_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m resolute.prep shards", description=_SHARDS, allow_abbrev=False)
    parser.add_argument("--out", required=True, metavar="DIR", help=_OUT)
    parser.add_argument("--range", required=True, metavar="A:B",
        help="shards A to B - 1; either may be left out, and B may be more than there are")  # fmt: skip
    parser.add_argument("--workers", type=number(0, 4096), default=0, metavar="N", help=_WORKERS)
    return parser


def _finalize_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m resolute.prep finalize", description=_FINALIZE, allow_abbrev=False)
    parser.add_argument("--out", required=True, metavar="DIR", help=_OUT)
    return parser


def main(argv: Sequence[str] | None = None, *, before_work: Callable[[], None] = lambda: None) -> int:
    """Run the command line and return the exit status; a `ResoluteError` becomes one line on stderr and status 2.

    `before_work` is called as soon as the arguments show that this machine will convert images.
    """
    argv = sys.argv[1:] if argv is None else argv
    commands = {"plan": _plan, "shards": _shards, "finalize": _finalize}
    try:
        is_build = not argv or argv[0] not in commands
        text = _build(argv, before_work) if is_build else commands[argv[0]](argv[1:], before_work)
        # why: messages quote file names, which may hold bytes that are not valid text
        print(strip_credentials(text).encode(errors="backslashreplace").decode())
    except (ResoluteError, OSError) as error:
        message = from_os_error(error) if isinstance(error, OSError) else error
        print_error(message, prefix="prep")
        return 2
    except KeyboardInterrupt:
        print("prep: interrupted; run the same command again to resume", file=sys.stderr)
        return 130
    return 0


def _settings(args: dict[str, Any]) -> Settings:
    res_text = args.pop("res")
    resolutions = _default_resolutions(args) if res_text is None else parse_resolutions(res_text)
    if not args["src"]:
        raise _missing_source(args["out"], () if res_text is None else resolutions, extend=args["extend"])
    return Settings(resolutions=resolutions, **args)


def _default_resolutions(args: dict[str, Any]) -> tuple[int, ...]:
    """Those of the set to be extended (px), otherwise those of a new set."""
    if args["extend"] and args["out"]:
        from resolute.prep.storage.output import open_store

        # why not `open_existing`: its imports are slow; whether the set can be extended is checked later
        with suppress(FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
            stored = json.loads(open_store(args["out"]).read("manifest.json"))["resolutions"]
            if stored:
                return tuple(sorted(int(res) for res in stored))
    return parse_resolutions(RESOLUTIONS)


def _missing_source(out: str, resolutions: tuple[int, ...], *, extend: bool) -> ResoluteError:
    from resolute.prep.shards.source_record import missing_source_error
    from resolute.prep.storage.output import open_store

    return missing_source_error(open_store(out), resolutions, extend=extend)


def _build(argv: Sequence[str], before_work: Callable[[], None]) -> str:
    args = vars(_parser().parse_args(argv))
    is_dry_run = args.pop("dry_run")
    settings = _settings(args)
    if settings.engine == "local":
        before_work()
    if is_dry_run:
        from .estimate import dry_run

        return dry_run(settings)
    # why: these imports are slow, and neither --help nor a wrong argument needs them
    from .prepare import build

    with _progress_bar() as (on_start, progress):
        result = build(settings, describe=_describe, on_start=on_start, progress=progress)
    return _report(settings.out, result, settings.worker_count)


def _plan(argv: Sequence[str], before_work: Callable[[], None]) -> str:
    settings = _settings({**vars(_parser(plan=True).parse_args(argv)), "engine": "jobs"})
    from .jobs import plan_jobs

    result = plan_jobs(settings, _describe)
    return result if isinstance(result, str) else _report(settings.out, result)


def _shards(argv: Sequence[str], before_work: Callable[[], None]) -> str:
    args = _shards_parser().parse_args(argv)
    from .jobs import convert_range, parse_range

    selected = parse_range(args.range)
    before_work()
    with _progress_bar() as (on_start, progress):
        return convert_range(
            args.out, selected, workers=args.workers or available_cpus(), on_start=on_start, progress=progress
        )


def _finalize(argv: Sequence[str], before_work: Callable[[], None]) -> str:
    args = _finalize_parser().parse_args(argv)
    from .jobs import finalize_jobs

    return _report(args.out, finalize_jobs(args.out))


def _describe(line: str) -> None:
    print(strip_credentials(f"prep: {line}").encode(errors="backslashreplace").decode(), file=sys.stderr)


@contextmanager
def _progress_bar() -> Iterator[tuple[Callable[[int, int], None], Callable[[RunStats], None]]]:
    """The functions `on_start` and `progress` of a conversion, which draw a bar on a terminal."""
    bar: Any = None  # opened when the number of images is known
    started_at = perf_counter()

    def on_start(images: int, kept_shards: int) -> None:
        nonlocal bar, started_at
        if kept_shards:
            what = "1 shard is" if kept_shards == 1 else f"{kept_shards} shards are"
            print(f"prep: {what} there already", file=sys.stderr)
        # why: disable=None shows the bar only on a terminal
        bar = tqdm(total=images, unit=" images", disable=None, dynamic_ncols=True, smoothing=0.1)
        started_at = perf_counter()

    def progress(stats: RunStats) -> None:
        rate = stats.read_bytes / 1e6 / max(1e-9, perf_counter() - started_at)
        bar.set_postfix({"MB/s": f"{rate:.0f}", "rejects": stats.rejects}, refresh=False)
        bar.update(stats.images - bar.n)

    try:
        yield on_start, progress
    finally:
        if bar is not None:
            bar.close()


def _report(out: str, result: BuildResult, workers: int = 0) -> str:
    """The summary of a set that is finished; writes its report."""
    from resolute.prep.report.report import write_report
    from resolute.prep.report.summary import summary
    from resolute.prep.storage.output import open_store

    store = open_store(out)
    text = summary(result, store, workers=workers)
    if result.stats is not None:
        text += f"\n  report: {write_report(store, result)}"
    return text


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(lambda: main(before_work=start_fork_server), teardown=False)
