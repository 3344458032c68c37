"""`python -m resolute.pipeline index SOURCE`: index third-party WebDataset tars, as the first run on them would.

    python -m resolute.pipeline index imagenet/ --val '*validation*'
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import argparse
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from resolute.console import Parser, command, number

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = Parser(prog="python -m resolute.pipeline", description="Index WebDataset tars.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    index = commands.add_parser("index", help="check and index all samples of a WebDataset")
    index.add_argument("source", nargs="+", metavar="SOURCE", help="a folder, tars, a pattern, a URL with {000..146}")
    index.add_argument("--val", metavar="PATTERN|FRACTION", help="validation: a pattern, or a fraction of samples")
    index.add_argument("--image", metavar="EXT,...", help="extensions of the images (default: jpg,jpeg,png,webp,bmp)")
    index.add_argument("--label", metavar="EXT,...", help="extensions of the labels; json:KEY (default: cls,json)")
    index.add_argument("--target", choices=("class", "labels", "values"), default="class",
        help="what a label is: a number, a list of class numbers or names (labels in .json), or numbers (target in "
        ".json) (default: %(default)s)")  # fmt: skip
    index.add_argument("--classes", metavar="FILE", help="class names, or names of the values, one per line")
    index.add_argument("--index", metavar="FOLDER", help="default: .resolute-index beside the tars, or the cache")
    index.add_argument("--threads", type=number(1, 1024), metavar="N", help="decoding threads (default: one per core)")
    return command(parser, _index, argv)


def _index(args: argparse.Namespace) -> None:
    val = args.val
    with suppress(TypeError, ValueError):  # not a fraction but a pattern, or None
        val = float(args.val)
    fields = {name: value.split(",") for name in ("image", "label") if (value := getattr(args, name)) is not None}
    from resolute.pipeline.dataset.webdataset.open import open_webdataset

    shards = open_webdataset(
        args.source, val=val, classes=args.classes, target=args.target, threads=args.threads, index=args.index, **fields
    )
    splits = ", ".join(f"{name} {len(split)}" for name, split in shards.splits.items())
    if shards.target.kind == "values":
        print(f"{shards.root}: {splits}; {len(shards.target)} values ({shards.hash})")
    else:
        used = np.any([shards.target.counts(split.samples) > 0 for split in shards.splits.values()], axis=0).sum()
        print(f"{shards.root}: {splits}; {len(shards.classes)} classes, {used} of them used ({shards.hash})")
    shards.close()


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
