"""How is prep run from a shell? `python -m prep --src photos --out shards --res 128,160,224`"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from pipeline.errors import ResoluteError

from .settings import MARGIN, Settings, parse_resolutions
from .sources import Sources

__all__ = ["main"]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ResoluteError(f"command line: {message}; see `python -m prep --help`")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m prep",
        description="Turn folders of photos into pre-resized WebDataset shards: every photo is decoded once, "
        "resized to every resolution, and written in one shuffled order.",
        epilog="Running it again is safe: a finished set is recognised, an unfinished one is redone. "
        "Exit status: 0 done, 2 for a problem that the one line on stderr explains, 130 interrupted.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--src", type=Path, required=True, metavar="DIR", help="folder of class folders (images may nest)")
    val = parser.add_mutually_exclusive_group()
    val.add_argument("--val", type=Path, metavar="DIR", help="separate validation folder of class folders")
    val.add_argument("--val-list", type=Path, metavar="FILE", help="paths below SRC to hold out, one a line")
    val.add_argument("--val-frac", type=float, default=0.1, metavar="F",
                     help="part of every class to hold out, 0..1 (default: 0.1)")  # fmt: skip
    add("--out", type=Path, required=True, metavar="DIR", help="where the shards go")
    add("--res", required=True, metavar="PX,PX", help="resolutions to train at, ascending: 128,160,224")
    add("--margin", type=float, default=MARGIN, metavar="X",
        help="stored short side = res * margin (default: 256/224)")  # fmt: skip
    add("--quality", type=int, default=90, metavar="Q", help="JPEG quality, 1..100 (default: %(default)s)")
    add("--workers", type=int, default=0, metavar="N", help="worker processes (default: one per CPU core)")
    add("--max-bad", type=float, default=0.01, metavar="F",
        help="part of the images that may be unusable (default: %(default)s)")  # fmt: skip
    add("--shard-samples", type=int, default=4096, metavar="N", help="samples a shard (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="of the order and the held-out part (default: 0)")
    add("--rebuild", action="store_true", help="replace a finished set made with other settings")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status. Prints one line to stderr for a `ResoluteError`."""
    try:
        args = vars(_parser().parse_args(argv))
        resolutions = parse_resolutions(args.pop("res"))
        settings = Settings(resolutions=resolutions, **args)
        _run(settings)
    except ResoluteError as error:
        # why: file names may hold bytes that are no text; a message about them has to come through
        print(f"prep: {error}".encode(errors="backslashreplace").decode(), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("prep: interrupted, no manifest written; run the same command again", file=sys.stderr)
        return 130
    return 0


def _run(settings: Settings) -> None:
    # why: --help and mistakes on the command line need not wait for these
    from .build import build
    from .summary import summary

    with ExitStack() as stack:
        bar: Any = None  # opened only when there is work to show
        rejected = 0

        def found(sources: Sources) -> None:
            nonlocal bar
            # why: disable=None keeps logs that are not a terminal free of progress bars
            bar = stack.enter_context(
                tqdm(total=sources.count, unit=" images", disable=None, dynamic_ncols=True, smoothing=0.1)
            )

        def progress(finished: int, bad: int) -> None:
            nonlocal rejected
            rejected += bad
            bar.set_postfix(rejects=rejected, refresh=False)
            bar.update(finished)

        built = build(settings, found=found, progress=progress)
    print(summary(settings, built).encode(errors="backslashreplace").decode())


if __name__ == "__main__":
    sys.exit(main())
