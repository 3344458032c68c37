"""What do the examples have in common? Their flags, and targets that know of mixing."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import one_hot

from pipeline import Batch

__all__ = ["Flags", "flags", "soft_targets"]


@dataclass(frozen=True, kw_only=True)
class Flags:
    shards: str
    resolutions: tuple[int, ...]  # px, one a stage
    epochs: int  # of each stage
    batch_size: int  # over all processes
    checkpoint: Path
    stop: int | None  # after so many epochs, to go on another time


def flags(argv: Sequence[str] | None, description: str | None) -> Flags:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", metavar="SHARDS")
    parser.add_argument("--res", dest="resolutions", default="128,160", help="px, one a stage (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=2, help="of each stage (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, help="over all processes (default: %(default)s)")
    parser.add_argument("--checkpoint", type=Path, default=Path("run"), help="(default: %(default)s)")
    parser.add_argument("--stop", type=int, metavar="N", help="after N epochs in all, to go on another time")
    given = vars(parser.parse_args(argv))
    resolutions = tuple(int(res) for res in given.pop("resolutions").split(","))
    return Flags(resolutions=resolutions, **given)


def soft_targets(batch: Batch, classes: int) -> torch.Tensor:
    """(N, classes) float32: the weights of each image's own label and of the one that was mixed in."""
    own, other = one_hot(batch.labels, classes), one_hot(batch.partner_labels, classes)
    return torch.lerp(other.float(), own.float(), batch.lam[:, None])
