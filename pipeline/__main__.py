"""How is the stream looked at from a shell? `python -m pipeline show shards --recipe train/recipes/demo.toml`"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from .command import Parser
from .errors import ResoluteError
from .recipe import Recipe
from .shards import ShardSet

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0, or 2 with one line on stderr for a `ResoluteError`."""
    parser = Parser(prog="python -m pipeline", description="Look at the stream of a run.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="draw what the model sees, a row a stage, with labels and mix weights")
    show.add_argument("shards", type=Path, metavar="SHARDS")
    show.add_argument("--recipe", type=Path, required=True, metavar="FILE")
    show.add_argument("--out", type=Path, default=Path("seen.png"), metavar="FILE", help="default: %(default)s")
    show.add_argument("--count", type=int, default=10, metavar="N", help="images a row (default: %(default)s)")
    try:
        args = parser.parse_args(argv)
        if args.count < 1:
            raise ResoluteError(f"--count: out of range, got {args.count}, expected at least 1; choose another")
        from .show import draw, seen  # why: --help need not wait for DALI

        recipe = Recipe.load(args.recipe)
        shards = ShardSet.open(args.shards, resolutions=recipe.resolutions, fold=recipe.data.fold)
        rows = seen(shards, recipe, count=args.count)
        draw(rows, args.out)
        print(f"{args.out}: {len(rows)} rows of what the model sees")
    except ResoluteError as error:
        print(f"pipeline: {error}".encode(errors="backslashreplace").decode(), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
