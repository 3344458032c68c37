"""`resolute bench`: its sentence and tables follow from its values, whatever parts were measured."""

from __future__ import annotations

import re
import statistics

import pytest

from resolute.benchmarks import bench, change
from tests.support.pages import bench_result


def test_the_sentence_names_the_resolution_where_the_loader_is_closest_to_the_model() -> None:
    result = bench_result()
    text = bench.sentence(result)
    start = "At 128 px the loader feeds up to 2,000 images/s (a DataLoader 667), resnet10t needs 1,900"
    assert text.startswith(start)
    assert "the loader is the limit at 128 px" in text
    result["training"]["res"][0]["alone"]["median"] = 1000.0
    assert bench.sentence(result).startswith("At 160 px the loader feeds up to 1,500")
    assert bench.sentence(result).endswith("the model is the limit at every resolution.")


def test_the_cost_of_a_change_is_that_of_the_worst_compared_with_the_best_dataloader() -> None:
    result = bench_result()

    def worst(name: str) -> float:
        runs = result["change"]["step_s"][name]
        return max(
            statistics.median(change.cost_s(run[i], 2) / change.steady_s(run[i], 2) for run in runs) for i in (1, 2)
        )

    assert worst("v2") == pytest.approx(0.9 / 0.03, rel=0.1)
    words = re.search(r"at most ([\d.]+) steps \(a DataLoader ([\d.]+)\)", bench.sentence(result))
    assert words is not None
    expected = [worst("ours"), worst("simplejpeg-sized")]
    assert [float(word) for word in words.groups()] == pytest.approx(expected, abs=0.051)
    heading, heads, rows, _ = bench.tables(result)[-1]
    assert (heading, heads[-1]) == ("Cost of a stage change", "DataLoader, rebuilt, steps#")
    assert float(rows[0][-1].partition(" ")[0]) == pytest.approx(worst("v2"), abs=0.051)


@pytest.mark.parametrize(
    ("part", "start"),
    [
        ("loader", "At 224 px the loader feeds up to 900 images/s (a DataLoader 300)."),
        ("training", "At 224 px resnet10t trains 426 images/s, without a loader 533."),
        ("change", "A stage change costs at most "),
    ],
)
def test_a_part_alone_has_its_sentence_its_table_and_a_page(part: str, start: str) -> None:
    result = bench_result()
    for other in {*bench.PARTS} - {part}:
        del result[other]
    assert bench.sentence(result).startswith(start)
    assert len(bench.tables(result)) == 1
    assert start.encode() in bench.page(result)


def test_tables_show_the_range_of_several_rounds() -> None:
    result = bench_result()
    result["loader"]["res"][0]["loaders"]["ours"]["images_per_s"] = {"raw": [10.0, 30.0, 20.0], "median": 20.0}
    (_, _, rows, note), *_ = bench.tables(result)
    assert rows[0][:3] == ("128", "20 (10..30)", "667 (667..667)")
    assert "DataLoader: simplejpeg" in note


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
    count, size = bench.change_steps(sample_s, 13.5, workers=workers, batch_size=64)
    assert (count, size) == expected
    assert count * size * sample_s <= 13.5 or size == 2
    assert change.steady_s([1.0] * count, workers) == 1.0
