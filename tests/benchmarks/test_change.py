"""The switch cost equals its definition, and every loader, consumer and kind of change is reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from resolute.benchmarks.change import around_s, cost_s, first_batches, main, measure, steady_s, table
from resolute.benchmarks.loaders.job import Job
from resolute.benchmarks.loaders.registry import LOADERS
from resolute.benchmarks.loaders.run import Runner

STEADY = [2.0] * 30


@pytest.mark.parametrize(("workers", "first"), [(1, 5), (2, 6), (4, 8), (5, 5), (16, 16)])
def test_the_first_batches_are_whole_rounds_of_the_workers(workers: int, first: int) -> None:
    assert first_batches(workers) == first


def test_the_cost_equals_an_example_calculated_by_hand() -> None:
    times = [7.0, 3.0, 2.0, 2.0, 1.0, *([2.0] * 10), *([9.0] * 5)]  # the next change slows the last five
    assert steady_s(times, 1) == 2.0
    assert cost_s(times, 1) == 15.0 - 5 * 2.0


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_steady_stage_costs_nothing(workers: int) -> None:
    assert cost_s([0.25] * 60, workers) == around_s([0.5] * 60, [0.25] * 60, workers) == 0


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_bursts_of_workers_have_no_cost(workers: int) -> None:
    """Workers that finish together deliver one slow batch and then fast ones."""
    burst = [12.0] + [0.0] * (workers - 1)
    assert cost_s(burst * 20, workers) == pytest.approx(0)
    late = [20.0, *(burst * 20)[1:]]
    assert cost_s(late, workers) == pytest.approx(8)


def test_a_single_stall_in_the_steady_part_does_not_change_the_cost() -> None:
    times = [5.0, *STEADY]
    hiccup = times.copy()
    hiccup[15] += 100
    assert cost_s(hiccup, 1) == cost_s(times, 1) == 3.0


def test_time_lost_before_the_change_counts_in_around_only() -> None:
    before = [1.0] * 25 + [1.0, 1.0, 1.0, 2.0, 4.0]
    assert cost_s([6.0, *STEADY], 1) == 4.0
    assert around_s(before, [6.0, *STEADY], 1) == 4.0 + 4.0


def test_an_early_batch_has_a_negative_cost() -> None:
    assert cost_s([0.5, *STEADY], 1) == -1.5


def runner(*loaders: str) -> Runner:
    return Runner(job=Job(shards="", resolutions=(32, 64), workers=1), loaders=loaders, rounds=2)


def test_drained_and_paced_consumers_are_measured_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = {"ours": [[9.0, *([1.0] * 29)], [4.0, *STEADY[1:]]], "pillow": [[3.0] * 30, [8.0, *([4.0] * 29)]]}
    paces: list[Any] = []

    def run(self: Runner, name: str, **settings: Any) -> list[list[float]]:
        paces.append(settings["steps_s"])
        return stages[name]

    monkeypatch.setattr(Runner, "run", run)
    result = measure(runner("ours", "pillow"), batches=30)
    assert paces == [()] * 4 + [pytest.approx((1.3 * 3.0, 1.3 * 4.0))] * 4  # of the slower loader
    for consumer in result["consumers"].values():
        (change,) = consumer["changes"]
        assert change["loaders"]["ours"]["cost_s"]["raw"] == [cost_s(stages["ours"][1], 1)] * 2 == [2.0] * 2
        assert change["loaders"]["pillow"]["slowest_ratio"]["median"] == 2.0
    text = table(result)
    assert text.count("32 -> 64 px") == 4
    assert text.count(LOADERS["pillow"].title) == 2
    assert "3900 / 5200 ms" in text


def test_a_loader_that_did_not_change_its_resolution_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "run", lambda self, name, **settings: [[1.0] * 60])
    with pytest.raises(AssertionError, match="ours"):
        measure(runner("ours"), batches=30)


@pytest.mark.slow
def test_every_kind_of_change_is_measured(
    shard_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "changes.json"
    words = ["--shards", shard_root, "--kinds", "--batch-size", 8, "--rounds", 1, "--workers", 1, "--out", out]
    assert main([str(word) for word in words]) == 0
    result = json.loads(out.read_text())
    kinds = {change["kind"] for change in result["changes"]}
    assert len(kinds) == 14
    for kind in ("epoch to epoch", "training to validation", "augmentation on", "order, full to block", "all at once"):
        assert kind in kinds
    printed = capsys.readouterr().out
    assert all(kind in printed for kind in kinds)
    assert all(wait >= 0 for wait in result["waits_s"][0])
