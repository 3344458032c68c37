"""Shared code of the examples: flags, the plan and exit statuses."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from resolute import Augment, Plan, ResoluteError, ShardSet, Stage, cuda
from resolute.console import Parser, run_main, say

__all__ = ["flags", "open_plan", "run"]


def flags(argv: Sequence[str] | None, description: str | None, *, resumes: bool = True) -> argparse.Namespace:
    """Parse the command line, with --checkpoint and --stop if the example `resumes`.

    Raises `ResoluteError` if it is invalid, or if the device is not available.
    """
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("shards", metavar="SHARDS")
    add("--res", type=_resolutions, metavar="PX,PX", help="one per stage (default: the two smallest of the set)")
    add("--device", default="cpu", help="cpu, cuda or cuda:N (default: %(default)s)")
    add("--epochs", type=int, default=2, help="of each stage (default: %(default)s)")
    add("--batch-size", type=int, default=64, help="over all processes (default: %(default)s)")
    if resumes:
        add(
            "--checkpoint",
            type=Path,
            default=Path("example-run"),
            help="to write after each epoch, and to resume from if it exists (default: %(default)s)",
        )
        add("--stop", type=int, metavar="N", help="end after N epochs; a later run continues")
    args = parser.parse_args(argv)
    args.device = cuda.resolve_device(args.device)
    return args


def _resolutions(text: str) -> tuple[int, ...]:
    if not all(word.isdecimal() and int(word) for word in text.split(",")):
        raise argparse.ArgumentTypeError(f"got {text}, expected px such as 128,160")
    return tuple(int(word) for word in text.split(","))


def open_plan(args: argparse.Namespace) -> Plan:
    """A plan with a stage for each resolution of the command line.

    Raises `ResoluteError` if the set lacks one, or has labels or values instead of classes.
    """
    shards = ShardSet.open(args.shards, resolutions=args.res)
    if shards.target.kind != "class":
        raise ResoluteError(
            f"{args.shards}: got {shards.target.kind} as targets, expected a class per sample; the "
            "examples train classifiers: use `make train`, or another set"
        )
    resolutions = args.res or shards.resolutions[:2]
    stages = [Stage(res=res, epochs=args.epochs, batch_size=args.batch_size) for res in resolutions]
    return Plan(shards, stages, augment=Augment(mixup_alpha=0.2, cutmix_alpha=1.0))


def run(main: Callable[[], Any]) -> NoReturn:
    """Call `main` and exit; a `ResoluteError` is printed as one line on stderr, with status 2."""

    def status() -> int:
        try:
            main()
        except ResoluteError as error:
            say(error)
            return 2
        return 0

    run_main(status)
