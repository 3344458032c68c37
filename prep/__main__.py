"""Command line of prep: `python -m prep --src photos --out shards --res 128,160,224`."""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from pipeline.cli import guard_process

    guard_process()

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from time import perf_counter
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from pipeline.cli import Parser
from pipeline.errors import ResoluteError, from_os_error, strip_credentials
from prep.execute.process_pool import start_fork_server

from .config import MARGIN, RESOLUTIONS, Settings, parse_resolutions

if TYPE_CHECKING:
    from prep.execute.stats import RunStats
    from prep.plan.inputs import Inputs

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m prep",
        description="Turn photos into pre-resized WebDataset shards: each photo is decoded once, resized to every "
        "resolution and written in one shuffled order.",
        epilog="It is safe to run the same command again: an unfinished run resumes, and a finished set is left as it "
        "is, except that missing resolutions are added, and shards rebuilt that `python -m prep.verify` found "
        "damaged. "
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
        help="image and label column of a table, list or Parquet file; 0,1 for a table without a header")  # fmt: skip
    add("--classes", metavar="FILE", help="class names, one per line; line n (from 0) names class n")
    add("--val", metavar="SRC", help="separate validation source, of the same kind as SRC")
    add("--val-list", metavar="FILE", help="images of SRC to hold out, one name per line")
    add("--val-frac", type=float, metavar="F", help="fraction of every class to hold out, 0..1 (default: 0.1)")
    add("--folds", type=int, metavar="K", help="hold out nothing; assign K stratified folds for training to choose")
    add("--out", required=True, metavar="DIR", help="where to write the shards: a folder, or a URL such as s3://bucket/set")
    add("--res", metavar="PX,PX", help=f"resolutions to train at, ascending (default: {RESOLUTIONS})")
    add("--margin", type=float, default=MARGIN, metavar="X",
        help="stored short side = res * margin (default: 256/224)")  # fmt: skip
    add("--quality", type=int, default=90, metavar="Q", help="JPEG quality, 1..100 (default: %(default)s)")
    add("--workers", type=int, default=0, metavar="N", help="worker processes (default: one per CPU core)")
    add("--max-bad", type=float, default=0.01, metavar="F",
        help="fraction of the images that may be unusable (default: %(default)s)")  # fmt: skip
    add("--shard-samples", type=int, default=4096, metavar="N", help="samples per shard (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the order and of the held-out images (default: 0)")
    add("--rebuild", action="store_true", help="start over and replace what prep wrote to OUT before")
    add("--engine", default="local", choices=["local", "ray"], help="this machine or a Ray cluster (default: local)")
    add("--ray-address", metavar="HOST:PORT", help="of the Ray cluster; by default Ray finds or starts one itself")
    add("--dry-run", action="store_true", help="write nothing: count images, convert some, estimate bytes and time")
    return parser


def main(argv: Sequence[str] | None = None, *, before_work: Callable[[], None] = lambda: None) -> int:
    """Run the command line and return the exit status; a `ResoluteError` becomes one line on stderr and status 2.

    `before_work` is called as soon as the arguments show that this machine will convert images.
    """
    try:
        args = vars(_parser().parse_args(argv))
        is_dry_run = args.pop("dry_run")
        res_text = args.pop("res")
        resolutions = parse_resolutions(RESOLUTIONS if res_text is None else res_text)
        if not args["src"]:
            raise _missing_source(args["out"], () if res_text is None else resolutions)
        settings = Settings(resolutions=resolutions, **args)
        if settings.engine == "local":
            before_work()
        text = _dry_run(settings) if is_dry_run else _run(settings)
        # why: messages quote file names, which may hold bytes that are not valid text
        print(strip_credentials(text).encode(errors="backslashreplace").decode())
    except (ResoluteError, OSError) as error:
        message = from_os_error(error) if isinstance(error, OSError) else error
        print(strip_credentials(f"prep: {message}").encode(errors="backslashreplace").decode(), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("prep: interrupted; run the same command again to resume", file=sys.stderr)
        return 130
    return 0


def _missing_source(out: str, resolutions: tuple[int, ...]) -> ResoluteError:
    from prep.shards.source_record import missing_source_error
    from prep.storage.output import open_store

    return missing_source_error(open_store(out), resolutions)


def _run(settings: Settings) -> str:
    # why: these imports are slow, and neither --help nor a wrong argument needs them
    from prep.report.report import write_report
    from prep.report.summary import summary
    from prep.storage.output import open_store

    from .prepare import build

    with ExitStack() as stack:
        bar: Any = None  # opened when the number of images is known
        started_at = perf_counter()

        def on_start(inputs: Inputs, images: int, kept_shards: int) -> None:
            nonlocal bar, started_at
            if kept_shards:
                print(f"prep: {kept_shards} shards are there already", file=sys.stderr)
            # why: disable=None shows the bar only on a terminal
            bar = stack.enter_context(
                tqdm(total=images, unit=" images", disable=None, dynamic_ncols=True, smoothing=0.1)
            )
            started_at = perf_counter()

        def progress(stats: RunStats) -> None:
            rate = stats.read_bytes / 1e6 / max(1e-9, perf_counter() - started_at)
            bar.set_postfix({"MB/s": f"{rate:.0f}", "rejects": stats.rejects}, refresh=False)
            bar.update(stats.images - bar.n)

        result = build(settings, on_start=on_start, progress=progress)
    store = open_store(settings.out)
    text = summary(settings, result, store)
    if result.stats is not None:
        text += f"\n  report: {write_report(store, result)}"
    return text


def _dry_run(settings: Settings) -> str:
    from .estimate import dry_run

    return dry_run(settings)


if __name__ == "__main__":
    from pipeline.cli import run_main

    run_main(lambda: main(before_work=start_fork_server))
