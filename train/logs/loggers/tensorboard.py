"""Logger `tensorboard`: event files in RUN/tb with the scalars of run.jsonl at the same steps."""

from __future__ import annotations

import json
from collections.abc import Sequence

from torch.utils.tensorboard import SummaryWriter

from .base import Point, Run, configuration

__all__ = ["TensorBoardLogger"]


class TensorBoardLogger:
    """Writes the event files of a process."""

    def __init__(self, run: Run) -> None:
        folder = run.folder / "tb"
        # why purge_step: every process rewrites all points; those of steps that a resume repeats must disappear
        self._writer = SummaryWriter(str(folder), purge_step=0)
        self.place = f"tensorboard --logdir {folder}"
        self._writer.add_text("recipe", _code(run.start.get("recipe_text", "")), 0)
        environment = configuration(run.start)["environment"]
        self._writer.add_text("environment", _code(json.dumps(environment, indent=1)), 0)

    def add(self, new: Sequence[Point]) -> None:
        for point in new:
            for name, value in point.values.items():
                self._writer.add_scalar(name, value, point.step)
        self._writer.flush()

    def close(self, *, finished: bool) -> None:
        self._writer.close()


def _code(text: str) -> str:
    """`text` as Markdown that is shown as it is."""
    return "".join(f"    {line}\n" for line in text.splitlines())
