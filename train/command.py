"""`resolute train`: trains or resumes a run, or one run per fold."""

from __future__ import annotations

from resolute.train.devices.distributed import join
from resolute.train.options import TrainOptions

from .cross_validation import chosen_folds, cross_validate
from .setup import Run
from .trainer import train

__all__ = ["main"]


def main(args: TrainOptions) -> int:
    """Run the command. Returns the exit status."""
    run = Run.of(args)
    with join(args.device) as ranks:
        if args.folds is None:
            return train(run, ranks)
        return cross_validate(run, *chosen_folds(args.folds), ranks)
