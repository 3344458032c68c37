"""How is prep run from a shell? `python -m prep --src photos --out shards --res 128,160,224`"""

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
        description="Turn photos into pre-resized WebDataset shards: every photo is decoded once, resized to "
        "every resolution, and written in one shuffled order.",
        epilog="Running it again is safe: an unfinished run goes on with the shards it lacks, a finished set is "
        "recognised, given the resolutions it lacks and repaired where `python -m prep.verify` found damage. "
        "Exit status: 0 done, 2 for a problem that the one line on stderr explains, 130 interrupted.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--src", default="", metavar="SRC",
        help="folder of class folders; flat folder with --labels; list file of paths and labels; zip or tar of "
        "class folders; WebDataset tars or Parquet files (file, folder, pattern); or any of them as a URL")  # fmt: skip
    add("--kind", default="auto", metavar="KIND",
        choices=["auto", "folders", "table", "listing", "archive", "webdataset", "parquet"],
        help="what SRC is, if it is not seen: %(choices)s")  # fmt: skip
    add("--labels", metavar="FILE", help="CSV or TSV with one row an image, for a folder without class folders")
    add("--columns", metavar="ID,LABEL",
        help="the two columns of a table, list or Parquet file, if names do not tell; 0,1: no header")  # fmt: skip
    add("--classes", metavar="FILE", help="class names, one a line, which fixes their numbers")
    add("--val", metavar="SRC", help="separate validation source, of SRC's kind")
    add("--val-list", metavar="FILE", help="names in SRC to hold out, one a line")
    add("--val-frac", type=float, metavar="F", help="part of every class to hold out, 0..1 (default: 0.1)")
    add("--folds", type=int, metavar="K", help="hold out nothing, number K stratified folds for training to choose")
    add("--out", required=True, metavar="DIR", help="where the shards go: a folder, or a URL such as s3://bucket/set")
    add("--res", metavar="PX,PX", help=f"resolutions to train at, ascending (default: {RESOLUTIONS})")
    add("--margin", type=float, default=MARGIN, metavar="X",
        help="stored short side = res * margin (default: 256/224)")  # fmt: skip
    add("--quality", type=int, default=90, metavar="Q", help="JPEG quality, 1..100 (default: %(default)s)")
    add("--workers", type=int, default=0, metavar="N", help="worker processes (default: one per CPU core)")
    add("--max-bad", type=float, default=0.01, metavar="F",
        help="part of the images that may be unusable (default: %(default)s)")  # fmt: skip
    add("--shard-samples", type=int, default=4096, metavar="N", help="samples a shard (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="of the order and the held-out part (default: 0)")
    add("--rebuild", action="store_true", help="start over, whatever is there of ours")
    add("--engine", default="local", choices=["local", "ray"], help="this machine or a Ray cluster (default: local)")
    add("--ray-address", metavar="HOST:PORT", help="of the cluster; without it Ray's own rules find or start one")
    add("--dry-run", action="store_true", help="write nothing: count, convert a sample, estimate bytes and time")
    return parser


def main(argv: Sequence[str] | None = None, *, before_work: Callable[[], None] = lambda: None) -> int:
    """Run the command line; returns the exit status. Prints one line to stderr for a `ResoluteError`.

    `ahead` is called as soon as it is clear that there will be work on this machine.
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
        # why: file names may hold bytes that are no text; what is said about them has to come through
        print(strip_credentials(text).encode(errors="backslashreplace").decode())
    except (ResoluteError, OSError) as error:
        message = from_os_error(error) if isinstance(error, OSError) else error
        print(strip_credentials(f"prep: {message}").encode(errors="backslashreplace").decode(), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("prep: interrupted; run the same command again to go on", file=sys.stderr)
        return 130
    return 0


def _missing_source(out: str, resolutions: tuple[int, ...]) -> ResoluteError:
    from prep.shards.source_record import missing_source_error
    from prep.storage.output import open_store

    return missing_source_error(open_store(out), resolutions)


def _run(settings: Settings) -> str:
    # why: --help and mistakes on the command line need not wait for these
    from prep.report.report import write_report
    from prep.report.summary import summary
    from prep.storage.output import open_store

    from .prepare import build

    with ExitStack() as stack:
        bar: Any = None  # opened only when there is work to show
        began = perf_counter()

        def on_start(inputs: Inputs, images: int, kept_shards: int) -> None:
            nonlocal bar, began
            if kept_shards:
                print(f"prep: {kept_shards} shards are there already", file=sys.stderr)
            # why: disable=None keeps logs that are not a terminal free of progress bars
            bar = stack.enter_context(
                tqdm(total=images, unit=" images", disable=None, dynamic_ncols=True, smoothing=0.1)
            )
            began = perf_counter()

        def progress(stats: RunStats) -> None:
            rate = stats.read_bytes / 1e6 / max(1e-9, perf_counter() - began)
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
