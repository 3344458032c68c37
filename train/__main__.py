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
        help="shard set: folder written by `make shards` or URL (s3://, gs://, http://); or plain tars")  # fmt: skip
    add("--val", help="plain tars only: pattern of the validation tars, or fraction of samples to hold out (0.05)")
    add("--classes", help="plain tars only: text file with one class name per line")
    add("--recipe", type=Path, required=True, help="TOML file; see train/recipes/")
    add("--run", help="name of the run, or the path of its folder (default: the recipe's name)")
    add("--runs", type=Path, default=Path("runs"), help="parent of all run folders (default: %(default)s)")
    add("--device", default="auto", help="auto (a GPU if there is one), cpu, cuda, cuda:1 (default: %(default)s)")
    threads = max(1, available_cpus() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    add("--threads", type=number(1, 1024), default=threads,
        help="CPU threads per process (default: all cores, %(default)s)")  # fmt: skip
    add("--decode", choices=("auto", "cpu", "gpu"), default="auto",
        help="where JPEGs are decoded for a GPU; auto times steps with each (default: %(default)s)")  # fmt: skip
    add("--save-every-s", type=number(0, 1e9, float), default=300.0,
        help="seconds between checkpoints (default: %(default)s)")  # fmt: skip
    add("--save-every-steps", type=number(0, 10**12), default=0,
        help="optimizer steps between checkpoints (default: by time only)")  # fmt: skip
    add("--keep", type=number(1, 10**6), default=2,
        help="number of newest checkpoints to keep, besides the best (default: %(default)s)")  # fmt: skip
    add("--from", default="last.pt", dest="from_", help="checkpoint of the run to resume from (default: %(default)s)")
    add("--folds", help='for shards made with FOLDS: "all" or numbers as 0,2; fold K trains in RUN/fold-K')
    add("--tensorboard", action="store_true", help="also write TensorBoard event files to RUN/tb")
    add("--gpu-memory-gib", type=number(0, 1e6, float), default=0.0,
        help="limit of GPU memory for tensors, as on a smaller GPU (default: none)")  # fmt: skip
    add("--plan", action="store_true", help="do not train: measure a few steps per stage, print the expected time")
    add("--budget", help="with --plan: time limit (90s, 11m, 1.5h); suggests changes if the run exceeds it")
    add("--json", type=Path, help="with --plan: write the forecast to this JSON file")
    add("--calibrate", action="store_true", help="measure loader and model throughput before training, for the report")
    try:
        args = parser.parse_args(arguments)
        if (args.budget or args.json) and not args.plan:
            parser.error("--budget and --json have no effect without --plan; add --plan or omit them")
        if args.json:
            check_output(args.json, setting="--json", suffixes=(".json",))
        folder = new_run(args.recipe.stem if args.run is None else args.run, runs=args.runs)
        from .distributed import join
        from .trainer import Options, run  # why: --help answers at once, without loading torch

        options = Options(
            shards=args.shards, recipe=args.recipe, folder=folder, device=args.device,
            threads=args.threads, decode=args.decode, save_every_s=args.save_every_s,
            save_every_steps=args.save_every_steps, keep=args.keep, from_=args.from_,
            gpu_memory_gib=args.gpu_memory_gib, calibrate=args.calibrate, val=args.val, classes=args.classes,
            tensorboard=args.tensorboard,
        )  # fmt: skip
        with join(args.device) as ranks:
            if args.folds is None and not args.plan:
                return run(options, ranks)
            from train.planner.plan import plan

            from .cross_validation import chosen_folds, cross_validate

            folds = [] if args.folds is None else chosen_folds(args.folds, shards=args.shards)
            if args.plan:
                return plan(options, ranks, budget=args.budget, folds=folds, file=args.json)
            return cross_validate(options, folds, ranks)
    except ResoluteError as error:
        print_error(error)
        return 2


if __name__ == "__main__":
    from pipeline.cli import run_main

    run_main(main)
