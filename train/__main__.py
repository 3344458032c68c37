"""`python -m train`: train a recipe on a shard set; the same command again resumes an unfinished run."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from pipeline.errors import ResoluteError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m train", description=__doc__)
    add = parser.add_argument
    add("--shards", required=True, help="folder that `make shards` wrote, or a URL (s3://, gs://, http://)")
    add("--recipe", type=Path, required=True, help="TOML file; see train/recipes/")
    add("--run", help="name of the run folder (default: the recipe's name)")
    add("--runs", type=Path, default=Path("runs"), help="where run folders lie (default: %(default)s)")
    add("--device", default="auto", help="auto (a GPU if there is one), cpu, cuda, cuda:1 (default: %(default)s)")
    add("--threads", type=int, default=os.cpu_count() or 2, help="CPU threads (default: all cores, %(default)s)")
    add("--decode", choices=("auto", "cpu", "gpu"), default="auto",
        help="where JPEGs are decoded with a GPU; auto times real steps with both (default: %(default)s)")  # fmt: skip
    add("--save-every-s", type=float, default=300.0, help="seconds between checkpoints (default: %(default)s)")
    add("--save-every-steps", type=int, default=0, help="steps between checkpoints (default: by time alone)")
    got = parser.parse_args(arguments)
    try:
        from .run import Options, run  # why: --help answers at once, without loading torch

        return run(Options(
            shards=got.shards, recipe=got.recipe, folder=got.runs / (got.run or got.recipe.stem), device=got.device,
            threads=got.threads, decode=got.decode, save_every_s=got.save_every_s,
            save_every_steps=got.save_every_steps,
        ))  # fmt: skip
    except ResoluteError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
