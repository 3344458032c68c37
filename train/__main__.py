"""`python -m resolute.train COMMAND`: train and plan runs, evaluate, use and export them, and draw what a recipe does.

This file declares all flags. The module of a command is imported only when it runs, so that `--help` and mistakes in
the command line are answered at once.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import argparse
import importlib
import os
from collections.abc import Callable
from pathlib import Path

from resolute.console import Parser, command, number
from resolute.machine import available_cpus

__all__ = ["main"]

_SHARDS = "shard set: folder written by `make shards` or URL (s3://, gs://, http://); or plain WebDataset tars"
_RUN = "name or folder of a run (its best checkpoint is used), or one of its .pt files"


def _add_tars(parser: Parser) -> None:
    parser.add_argument("--val", metavar="PATTERN|PART",
        help="plain tars only: pattern of the validation tars, or fraction of samples to hold out (0.05)")  # fmt: skip
    parser.add_argument("--classes", metavar="FILE", help="plain tars only: text file with one class name per line")
    parser.add_argument("--target", choices=("class", "labels", "values"),
        help="plain tars only: one class per sample (default), several labels (`labels` in .json) or numbers (`target` "
        "in .json)")  # fmt: skip


def _add_device(parser: Parser) -> None:
    threads = max(1, available_cpus() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    parser.add_argument("--device", default="auto",
        help="auto (a GPU if there is one), cpu, cuda, cuda:1 (default: %(default)s)")  # fmt: skip
    parser.add_argument("--threads", type=number(1, 1024), default=threads, metavar="N",
        help="CPU threads per process (default: all cores, %(default)s)")  # fmt: skip


def _add_recipe(parser: Parser) -> None:
    parser.add_argument("--recipe", type=Path, required=True, metavar="FILE", help="TOML file; see train/recipes/")


def _add_plan(parser: Parser) -> None:
    add = parser.add_argument
    add("--shards", required=True, help=_SHARDS)
    _add_tars(parser)
    _add_recipe(parser)
    add("--run", help="name of the run, or the path of its folder (default: the recipe's name)")
    add("--runs", type=Path, default=Path("runs"), help="parent of all run folders (default: %(default)s)")
    _add_device(parser)
    add("--decode", choices=("auto", "cpu", "gpu"), default="cpu",
        help="where JPEGs are decoded for a GPU; auto: there if a trial process can and steps are faster (default: "
        "%(default)s)")  # fmt: skip
    add("--save-every-s", type=number(0, 1e9, float), default=300.0, metavar="S",
        help="seconds between checkpoints (default: %(default)s)")  # fmt: skip
    add("--save-every-steps", type=number(0, 10**12), default=0, metavar="N",
        help="optimizer steps between checkpoints (default: by time only)")  # fmt: skip
    add("--folds", metavar="K", help="cross-validation: train K runs, each in RUN/fold-NUMBER with another K-th of the "
        "training split held out for validation; 0,2/K: only these two")  # fmt: skip
    add("--gpu-memory-gib", type=number(0, 1e6, float), default=0.0, metavar="GIB",
        help="limit of GPU memory for tensors, as on a smaller GPU (default: none)")  # fmt: skip


def _add_plan_output(parser: Parser) -> None:
    _add_plan(parser)
    parser.add_argument("--budget", metavar="TIME",
        help="time limit (90s, 11m, 1.5h); suggests changes if the run exceeds it")  # fmt: skip
    parser.add_argument("--suggest", type=Path, metavar="FILE",
        help="new TOML file: write the recipe with the stages and epochs that use the budget best")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the forecast to this JSON file")


def _add_train(parser: Parser) -> None:
    _add_plan(parser)
    add = parser.add_argument
    add("--keep", type=number(1, 10**6), default=2, metavar="N",
        help="number of newest checkpoints to keep, besides the best (default: %(default)s)")  # fmt: skip
    add("--from", default="last.pt", dest="from_", metavar="FILE",
        help="checkpoint of the run to resume from once; later ones are discarded (default: %(default)s)")  # fmt: skip
    add("--loggers", metavar="NAME,NAME",
        help="also log to csv (RUN/csv), tensorboard (RUN/tb), wandb, mlflow")  # fmt: skip
    add("--calibrate", action="store_true", help="measure loader and model throughput before training, for the report")


def _add_inference(parser: Parser) -> None:
    _add_tars(parser)
    add = parser.add_argument
    add("--split", default="val", help="split of a shard set (default: %(default)s)")
    add("--fold", type=int, metavar="N", help="for a run with folds and its own set: fold to use (default: the run's)")
    add("--flip", action="store_true", help="test-time flip, even if the recipe does not use it")
    _add_device(parser)


def _add_eval(parser: Parser) -> None:
    add = parser.add_argument
    add("run", metavar="RUN", help=_RUN)
    add("--shards", help=_SHARDS + ", with the same classes (default: the run's own set)")
    _add_inference(parser)
    add("--res", help="resolutions in px, separated by commas (default: that at which these weights were validated)")
    add("--json", type=Path, metavar="FILE", help="default: eval.json in the run's folder")


def _add_predict(parser: Parser) -> None:
    add = parser.add_argument
    add("run", metavar="RUN", help=_RUN + ", or the parent folder of its folds")
    add("--src", help="folder of images, single image, shard set (folder or URL), or plain tars (default: the run's "
        "own set)")  # fmt: skip
    _add_inference(parser)
    add("--out", type=Path, default=Path("pred.csv"), metavar="FILE", help="CSV file to write (default: %(default)s)")
    add("--topk", type=number(1, 10**9), metavar="K", help="classes per row, most likely first (default: 5)")
    add("--threshold", type=number(0, 1, float), metavar="P",
        help="several labels per sample: probability from which on one is predicted (default: 0.5)")  # fmt: skip
    add("--res", type=number(1, 65_535),
        help="input resolution in px (default: that at which these weights were validated)")  # fmt: skip
    add("--weights", choices=("raw", "ema"), help="default: those with the best validation")


def _add_export(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help=_RUN)
    parser.add_argument("--out", type=Path, metavar="FILE",
        help="NAME.safetensors, NAME.onnx, or a folder for the Hugging Face Hub (default: model.safetensors in the "
        "run's folder)")  # fmt: skip


def _add_report(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="name or folder of a run")


def _add_compare(parser: Parser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="name or folder of a run, or of a run's folds")
    parser.add_argument("--out", type=Path, default=Path("compare.html"), metavar="FILE", help="default: %(default)s")


def _add_lr(parser: Parser) -> None:
    _add_recipe(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--shards", help=_SHARDS)
    source.add_argument("--samples", type=int, metavar="N", help="number of training samples, instead of shards")
    _add_tars(parser)
    parser.add_argument("--out", type=Path, default=Path("lr.html"), metavar="FILE", help="default: %(default)s")


def _add_lr_find(parser: Parser) -> None:
    add = parser.add_argument
    add("--shards", required=True, help=_SHARDS)
    _add_tars(parser)
    _add_recipe(parser)
    _add_device(parser)
    add("--min-lr", type=number(1e-12, 1e6, float), metavar="LR",
        help="first learning rate (default: 0.001; 1e-5 for optimizers with betas)")  # fmt: skip
    add("--max-lr", type=number(1e-12, 1e6, float), metavar="LR",
        help="last learning rate (default: 10; 0.1 for optimizers with betas)")  # fmt: skip
    add("--steps", type=number(25, 10**6), default=200, metavar="N",
        help="optimizer steps of the sweep (default: %(default)s)")  # fmt: skip
    add("--out", type=Path, default=Path("lr-find.html"), metavar="FILE", help="default: %(default)s")


def _add_show(parser: Parser) -> None:
    parser.add_argument("shards", metavar="SHARDS", help=_SHARDS)
    _add_tars(parser)
    _add_recipe(parser)
    parser.add_argument("--out", type=Path, default=Path("seen.html"), metavar="FILE", help="default: %(default)s")
    parser.add_argument("--count", type=number(1, 1000), default=6, metavar="N",
        help="images per row (default: %(default)s)")  # fmt: skip


# name: (module whose `main` takes the parsed arguments, what adds its flags, help)
_COMMANDS: dict[str, tuple[str, Callable[[Parser], None], str]] = {
    "train": ("resolute.train.trainer", _add_train, "train a recipe on a shard set; again: resume the unfinished run"),
    "plan": ("resolute.train.planner.plan", _add_plan_output, "measure a few steps per stage and print the expected time"),
    "eval": ("resolute.train.inference.evaluate", _add_eval, "exact metrics of a run, at one or more resolutions"),
    "predict": ("resolute.train.inference.predict", _add_predict, "classes, labels or values of images, from a run or folds"),
    "export": ("resolute.train.inference.export", _add_export, "write the best weights for timm, ONNX Runtime or Hugging Face"),
    "report": ("resolute.train.report.html", _add_report, "draw RUN/report.html from its log again"),
    "compare": ("resolute.train.report.compare", _add_compare, "draw several runs on one page, and what differs in them"),
    "lr": ("resolute.train.plot_lr", _add_lr, "draw learning rate, resolution and regularisation over all steps"),
    "lr-find": ("resolute.train.lr_find", _add_lr_find, "learning rate range test on the first stage; suggests optim.lr"),
    "show": ("resolute.train.show", _add_show, "draw the model's input per stage and split, with labels and mix weights"),
    "keys": ("resolute.train.recipe.keys", lambda _: None, "print every recipe key with its type, range, default and meaning"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = Parser(prog="python -m resolute.train", description=(__doc__ or "").partition(".")[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for name, (_, add_flags, text) in _COMMANDS.items():
        description = text[0].upper() + text[1:] + "."
        add_flags(commands.add_parser(name, help=text, description=description, allow_abbrev=False))
    return command(parser, _run, arguments)


def _run(args: argparse.Namespace) -> int | None:
    status: int | None = importlib.import_module(_COMMANDS[args.command][0]).main(args)
    return status


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
