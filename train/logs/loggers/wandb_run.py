"""Logger `wandb`: a run of Weights & Biases, online with an API key, else offline in RUN/wandb (`wandb sync` sends it).

The environment variables of wandb apply, such as WANDB_PROJECT (default: resolute), WANDB_ENTITY and WANDB_MODE.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence

import wandb

from .base import Point, Run, SentPoints, configuration

__all__ = ["WandbLogger"]


class WandbLogger:
    """One run of W&B, which all processes of the training continue."""

    def __init__(self, run: Run) -> None:
        self._sent = SentPoints("wandb", run)
        # why no console and git: they replace the streams of the process and start programs
        settings = wandb.Settings(silent=True, console="off", disable_git=True, init_timeout=60.0, finish_timeout=15.0)
        wandb.setup(settings)
        is_offline = "WANDB_MODE" not in os.environ and not wandb.login(prompt=False)  # why: never wait for input
        self._run = wandb.init(
            id=self._sent.id or uuid.uuid4().hex[:12], resume="allow", dir=run.folder, name=run.folder.name,
            project=os.environ.get("WANDB_PROJECT", "resolute"), config=configuration(run.start),
            mode="offline" if is_offline else None, settings=settings,
        )  # fmt: skip
        self._sent.store(self._run.id)
        self.place = self._run.url or f"wandb sync {run.folder}/wandb/offline-run-*"

    def add(self, new: Sequence[Point]) -> None:
        for point in self._sent.unsent(new):
            self._run.log(point.values, step=point.step)
        self._sent.store(self._run.id)

    def close(self, *, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)
