"""`python -m train`: train a recipe on a shard set; the same command again resumes an unfinished run."""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from pipeline.cli import guard_process

    guard_process()

import os
from pathlib import Path

from pipeline.cli import Parser, number, print_error
from pipeline.cpu_count import available_cpus
from pipeline.errors import ResoluteError
from pipeline.storage.atomic_file import check_output

from .run_folder import new_run


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m train", description=__doc__)
    add = parser.add_argument
    add("--shards", required=True,
        help="folder that `make shards` wrote, or a URL (s3://, gs://, http://); or tars that others made")  # fmt: skip
    add("--val", help="of tars that others made: a pattern for those that validate, or a part of the samples (0.05)")
    add("--classes", help="of tars that others made: a file with the name of a class on each line")
    add("--recipe", type=Path, required=True, help="TOML file; see train/recipes/")
    add("--run", help="name of the run, or the path of its folder (default: the recipe's name)")
    add("--runs", type=Path, default=Path("runs"), help="where run folders lie (default: %(default)s)")
    add("--device", default="auto", help="auto (a GPU if there is one), cpu, cuda, cuda:1 (default: %(default)s)")
    threads = max(1, available_cpus() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    add("--threads", type=number(1, 1024), default=threads,
        help="CPU threads a process (default: all cores, %(default)s)")  # fmt: skip
    add("--decode", choices=("auto", "cpu", "gpu"), default="auto",
        help="where JPEGs are decoded with a GPU; auto times real steps with both (default: %(default)s)")  # fmt: skip
    add("--save-every-s", type=number(0, 1e9, float), default=300.0,
        help="seconds between checkpoints (default: %(default)s)")  # fmt: skip
    add("--save-every-steps", type=number(0, 10**12), default=0,
        help="steps between checkpoints (default: by time alone)")  # fmt: skip
    add("--keep", type=number(1, 10**6), default=2,
        help="newest checkpoints kept, beside the best one (default: %(default)s)")  # fmt: skip
    add("--from", default="last.pt", dest="from_", help="the run's checkpoint to go on from (default: %(default)s)")
    add("--folds", help='of a set made with FOLDS: "all", or some as 0,2; each a run in RUN/fold-K')
    add("--tensorboard", action="store_true", help="event files in RUN/tb, beside run.jsonl and report.html")
    add("--gpu-memory-gib", type=number(0, 1e6, float), default=0.0,
        help="take no more of the GPU, as on a smaller one (default: all)")  # fmt: skip
    add("--plan", action="store_true", help="train nothing: measure a few steps and print what the run will take")
    add("--budget", help="with --plan: the time there is, as 90s, 11m or 1.5h; what would fit if the run does not")
    add("--json", type=Path, help="with --plan: a file for the figures")
    add("--calibrate", action="store_true", help="measure what loader and model can do before training, for the report")
    try:
        got = parser.parse_args(arguments)
        if (got.budget or got.json) and not got.plan:
            parser.error("--budget and --json are without effect in training; add --plan, or leave them out")
        if got.json:
            check_output(got.json, setting="--json", suffixes=(".json",))
        folder = new_run(got.recipe.stem if got.run is None else got.run, runs=got.runs)
        from .distributed import join
        from .trainer import Options, run  # why: --help answers at once, without loading torch

        options = Options(
            shards=got.shards, recipe=got.recipe, folder=folder, device=got.device,
            threads=got.threads, decode=got.decode, save_every_s=got.save_every_s,
            save_every_steps=got.save_every_steps, keep=got.keep, from_=got.from_,
            gpu_memory_gib=got.gpu_memory_gib, calibrate=got.calibrate, val=got.val, classes=got.classes,
            tensorboard=got.tensorboard,
        )  # fmt: skip
        with join(got.device) as ranks:
            if got.folds is None and not got.plan:
                return run(options, ranks)
            from train.planner.plan import plan

            from .cross_validation import chosen_folds, cross_validate

            folds = [] if got.folds is None else chosen_folds(got.folds, shards=got.shards)
            if got.plan:
                return plan(options, ranks, budget=got.budget, folds=folds, file=got.json)
            return cross_validate(options, folds, ranks)
    except ResoluteError as error:
        print_error(error)
        return 2


if __name__ == "__main__":
    from pipeline.cli import run_main

    run_main(main)
