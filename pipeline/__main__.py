"""What does the stream do from a shell? It draws what a model sees, lists a recipe's keys, and indexes others' tars.

    python -m pipeline show shards --recipe train/recipes/demo.toml
    python -m pipeline keys
    python -m pipeline index imagenet/ --val '*validation*'
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from pipeline.cli import guard_process

    guard_process()

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from .cli import Parser, number
from .either import open_either
from .errors import ResoluteError
from .recipe import Recipe
from .storage.atomic_file import check_output

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0, or 2 with one line on stderr for a `ResoluteError`."""
    parser = Parser(prog="python -m pipeline", description="Draw the stream, index tars.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="draw what the model sees, a row a stage, with labels and mix weights")
    show.add_argument("shards", metavar="SHARDS", help="folder or URL of a shard set, or tars that others made")
    show.add_argument("--val", metavar="PATTERN|PART", help="of tars: those that validate, or a part of all samples")
    show.add_argument("--classes", metavar="FILE", help="of tars: names of the classes, one a line")
    show.add_argument("--recipe", type=Path, required=True, metavar="FILE")
    show.add_argument("--out", type=Path, default=Path("seen.png"), metavar="FILE", help="default: %(default)s")
    show.add_argument("--count", type=number(1, 1000), default=10, metavar="N",
        help="images a row (default: %(default)s)")  # fmt: skip
    commands.add_parser("keys", help="all keys of a recipe, a Markdown table")
    index = commands.add_parser("index", help="look at all samples of a WebDataset once, for pipeline.open_webdataset")
    index.add_argument("source", nargs="+", metavar="SOURCE", help="a folder, tars, a pattern, a URL with {000..146}")
    index.add_argument("--val", metavar="PATTERN|PART", help="tars that are validation, or a part of all samples")
    index.add_argument("--image", metavar="EXT,...", help="extensions of the images (default: jpg,jpeg,png,webp,bmp)")
    index.add_argument("--label", metavar="EXT,...", help="extensions of the labels; json:KEY (default: cls,json)")
    index.add_argument("--classes", metavar="FILE", help="names of the classes, one a line")
    index.add_argument("--index", metavar="FOLDER", help="default: .resolute-index beside the tars, or the cache")
    index.add_argument("--threads", type=number(1, 1024), metavar="N", help="that decode (default: one a core)")
    try:
        args = parser.parse_args(argv)
        if args.command == "index":
            return _index(args)
        if args.command == "keys":
            from .keys import table

            print(table())
            return 0
        check_output(args.out, setting="--out", suffixes=(".png", ".jpg", ".jpeg", ".svg", ".pdf"))
        from .show import draw, seen  # why: --help need not wait for DALI

        recipe = Recipe.load(args.recipe)
        shards = open_either(
            args.shards, resolutions=recipe.resolutions, fold=recipe.data.fold, val=args.val, classes=args.classes
        )
        rows = seen(shards, recipe, count=args.count)
        draw(rows, args.out)
        print(f"{args.out}: {len(rows)} rows of what the model sees")
    except ResoluteError as error:
        print(f"pipeline: {error}".encode(errors="backslashreplace").decode(), file=sys.stderr)
        return 2
    return 0


def _index(args: argparse.Namespace) -> int:
    val = args.val
    with suppress(TypeError, ValueError):  # not a part but a pattern, or none
        val = float(args.val)
    given = {name: value.split(",") for name in ("image", "label") if (value := getattr(args, name)) is not None}
    from .foreign import open_webdataset

    shards = open_webdataset(
        args.source, val=val, classes=args.classes, threads=args.threads, index=args.index, **given
    )
    parts = ", ".join(f"{name} {len(split)}" for name, split in shards.splits.items())
    used = len(np.unique(np.concatenate([split.samples["label"] for split in shards.splits.values()])))
    print(f"{shards.root}: {parts}; {len(shards.classes)} classes, {used} of them used ({shards.hash})")
    shards.close()
    return 0


if __name__ == "__main__":
    from pipeline.cli import run_main

    run_main(main)
