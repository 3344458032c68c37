"""The short benchmark: its sentence follows from its figures, and it keeps to its time."""

from __future__ import annotations

import re

import pytest

from resolute.benchmarks import brief, change
from tests.support.pages import bench_result


def test_the_sentence_names_the_resolution_where_the_loader_is_closest_to_the_model() -> None:
    result = bench_result()
    text = brief.sentence(result)
    start = "At 128 px the loader feeds up to 2,000 images/s (a torch DataLoader 667), resnet10t needs 1,900"
    assert text.startswith(start)
    assert "the loader is the limit at 128 px" in text
    result["model"][128] = 1000.0
    assert brief.sentence(result).startswith("At 160 px the loader feeds up to 1,500")
    assert brief.sentence(result).endswith("the model is the limit at every resolution.")


def test_the_cost_of_a_change_is_that_of_the_worst_in_steady_steps() -> None:
    result = bench_result()
    figures = brief.Figures.of(result)
    for i, (_, costs_s, costs) in enumerate(figures.changes, start=1):
        for name, cost_s, cost in zip(("ours", "pillow"), costs_s, costs, strict=True):
            times = result["steps"]["step_s"][name][i]
            assert (cost_s, cost) == (change.cost_s(times, 2), cost_s / change.steady_s(times, 2))
    worst = [max(costs[i] for _, _, costs in figures.changes) for i in range(2)]
    assert worst[1] == pytest.approx(0.9 / 0.03, rel=0.1)
    words = re.search(r"at most ([\d.]+) steps \(a rebuilt DataLoader ([\d.]+)\)", brief.sentence(result))
    assert words is not None
    assert [float(word) for word in words.groups()] == pytest.approx(worst, abs=0.051)
    assert figures.training[224][0] == pytest.approx(32 / 0.06, rel=0.02)


@pytest.mark.parametrize(
    ("sample_s", "workers", "expected"),
    [
        (1e-4, 2, (60, 64)),  # a fast model: as many steps as are drawn
        (0.05, 2, (14, 19)),  # as few as a cost can be computed from, and smaller batches
        (100.0, 2, (14, 2)),
    ],
)
def test_training_across_the_changes_keeps_to_its_time(
    sample_s: float, workers: int, expected: tuple[int, int]
) -> None:
    count, size = brief.change_steps(sample_s, 13.5, workers=workers, batch_size=64)
    assert (count, size) == expected
    assert count * size * sample_s <= 13.5 or size == 2
    assert change.steady_s([1.0] * count, workers) == 1.0
