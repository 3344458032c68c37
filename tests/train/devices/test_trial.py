"""A function that crashes, hangs or fails in a child process leaves its parent with one line that says so."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable

import pytest

from resolute.train.devices.trial import trial_fault
from tests.support import trials


@pytest.mark.parametrize(
    ("trial", "fault"),
    [
        (trials.succeed, None),
        (trials.disagree, "images differ"),
        (trials.crash, "killed by SIGSEGV"),
        (trials.leave, "ended with status 3"),
        (trials.fail, "Critical error in pipeline: Error in MIXED operator"),
    ],
)
def test_the_end_of_a_child_process_is_told_in_one_line(
    trial: Callable[[], str | None], fault: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    assert trial_fault(trial) == fault
    assert capfd.readouterr() == ("", "")
    assert multiprocessing.active_children() == []


def test_a_child_process_that_hangs_is_ended_after_the_limit() -> None:
    began = time.monotonic()
    assert trial_fault(trials.hang, limit_s=0.5) == "no end within 0.5 s"
    assert time.monotonic() - began < 20
    assert multiprocessing.active_children() == []
