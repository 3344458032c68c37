"""Shared code of the examples: flags, opening shards, exit statuses, and soft targets for mixed batches."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.nn.functional import one_hot

from pipeline import Batch, ResoluteError, ShardSet
from pipeline.cli import Parser, print_error, run_main

__all__ = ["Flags", "flags", "open_shards", "run", "soft_targets"]


@dataclass(frozen=True, kw_only=True)
class Flags:
    shards: str
    resolutions: tuple[int, ...]  # px, one per stage; empty: the two smallest of the set
    device: str
    epochs: int  # of each stage
    batch_size: int  # over all processes
    checkpoint: Path
    stop: int | None  # end after this many epochs; a later run continues


def flags(argv: Sequence[str] | None, description: str | None) -> Flags:
    """Parse the command line. Raises `ResoluteError` if it is invalid."""
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", metavar="SHARDS")
    parser.add_argument("--res", dest="resolutions", default="", metavar="PX,PX",
                        help="one per stage (default: the two smallest of the set)")  # fmt: skip
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=2, help="of each stage (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, help="over all processes (default: %(default)s)")
    parser.add_argument("--checkpoint", type=Path, default=Path("run"), help="(default: %(default)s)")
    parser.add_argument("--stop", type=int, metavar="N", help="end after N epochs; a later run continues")
    values = vars(parser.parse_args(argv))
    res = values.pop("resolutions")
    if not all(word.isdecimal() and int(word) for word in res.split(",") if res):
        raise ResoluteError(f"--res: got {res}, expected px such as 128,160; correct it")
    return Flags(resolutions=tuple(int(word) for word in res.split(",") if res), **values)


def open_shards(args: Flags) -> tuple[ShardSet, tuple[int, ...]]:
    """The shard set and the resolution of each stage in px. Raises `ResoluteError` if the set lacks one of them."""
    shards = ShardSet.open(args.shards, resolutions=args.resolutions or None)
    return shards, args.resolutions or shards.resolutions[:2]


def run(main: Callable[[], Any]) -> NoReturn:
    """Call `main` and exit; a `ResoluteError` is printed as one line on stderr, with status 2."""

    def status() -> int:
        try:
            main()
        except ResoluteError as error:
            print_error(error)
            return 2
        return 0

    run_main(status)


def soft_targets(batch: Batch, classes: int) -> torch.Tensor:
    """(N, classes) float32 target distributions: `lam` for the own label, 1 - `lam` for the partner's."""
    own, partner = one_hot(batch.labels, classes), one_hot(batch.partner_labels, classes)
    return torch.lerp(partner.float(), own.float(), batch.lam[:, None])
