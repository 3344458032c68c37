"""The run log grows during an epoch, and readers see complete records only."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import Stage
from resolute.train.logs.metrics import Meter, RunLogWriter, read_log


@pytest.fixture
def plan(shard_set: ShardSet) -> Plan:
    return Plan(shard_set, [Stage(res=32, epochs=3, batch_size=1)], eval_batch_size=15)


@contextlib.contextmanager
def open_meter(path: Path, *, keep_bytes: int = 0) -> Iterator[Meter]:
    with contextlib.closing(RunLogWriter(path, keep_bytes=keep_bytes)) as log:
        yield Meter(log, device=torch.device("cpu"))


def take(meter: Meter, plan: Plan, step: int, loss: float = 0.25) -> None:
    meter.step(plan.batch(step), torch.tensor(loss), 0.1, momentum=0.9, wait_s=0.25, compute_s=0.75)


def test_steps_are_logged_and_shown_during_an_epoch(plan: Plan, tmp_path: Path) -> None:
    with open_meter(tmp_path / "run.jsonl") as meter:
        assert meter.status == ""
        for step in range(70):
            take(meter, plan, step, loss=step)
            assert meter.status == f"loss {step:.3f}, 1 images/s"
            logged = [record["step"] for record in read_log(tmp_path / "run.jsonl")]
            assert logged == list(range((step + 1) // 50 * 50))
        assert meter.sums["loss"] == sum(range(50))
        meter.flush()
    assert [record["loss"] for record in read_log(tmp_path / "run.jsonl")] == list(range(70))


def test_a_resume_drops_records_logged_after_the_checkpoint(plan: Plan, tmp_path: Path) -> None:
    with open_meter(tmp_path / "run.jsonl") as meter:
        for step in range(10):
            take(meter, plan, step)
        state = meter.state_dict()
        for step in range(10, 70):
            take(meter, plan, step)
    assert len(read_log(tmp_path / "run.jsonl")) > 10
    with open_meter(tmp_path / "run.jsonl", keep_bytes=state["log_bytes"]) as meter:
        meter.load_state_dict(state)
        take(meter, plan, 10)
        meter.flush()
        assert meter.sums["samples"] == 11
    assert [record["step"] for record in read_log(tmp_path / "run.jsonl")] == list(range(11))


def test_the_error_of_a_full_disk_mentions_a_checkpoint_only_if_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with contextlib.closing(RunLogWriter(tmp_path / "run.jsonl")) as log:
        with pytest.raises(ResoluteError, match=r"not written \(No space left on device\); make room"):
            log.sync()
        (tmp_path / "last.pt").touch()
        with pytest.raises(ResoluteError, match=r"the last checkpoint is kept; make room"):
            log.sync()
