"""`python -m tests.support.quick WORDS…` is `resolute WORDS…` with short measurements and starter recipes."""

from __future__ import annotations

import functools

import pytest

__all__ = ["shorten"]


def shorten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starter recipes for a CPU have one epoch of each stage; `resolute plan` measures a few steps."""
    from resolute.train.planner import new_recipe, plan
    from resolute.train.planner.measure import measure

    monkeypatch.setattr("resolute.train.recipe.starter._CPU", (1, 1, 1))
    for module in (plan, new_recipe):  # why: a worker of the tests may be half an hour old
        monkeypatch.setattr(module, "process_age_s", lambda: 1.0)
    monkeypatch.setattr("resolute.train.planner.measure.measure", functools.partial(measure, about_s=0.01))
    monkeypatch.setattr(plan, "_with_doubled_batches", functools.partial(plan._with_doubled_batches, about_s=0.01))


if __name__ == "__main__":
    from resolute.cli import run

    shorten(pytest.MonkeyPatch())
    run()
