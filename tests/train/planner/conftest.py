"""Fixtures of the tests of the planner."""

from __future__ import annotations

import functools

import pytest

from resolute.train.planner import plan
from resolute.train.planner.measure import measure


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements of a few steps, in a process that has just started."""
    monkeypatch.setattr(plan, "process_age_s", lambda: 1.0)  # why: a worker of the tests may be half an hour old
    monkeypatch.setattr("resolute.train.planner.measure.measure", functools.partial(measure, about_s=0.01))
    monkeypatch.setattr(plan, "_with_doubled_batches", functools.partial(plan._with_doubled_batches, about_s=0.01))
