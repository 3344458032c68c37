"""The synthetic set of the index benchmark opens like a real one, and its figures are plausible."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from resolute.benchmarks.storage import index
from resolute.pipeline.dataset.shard_set import ShardSet


def test_a_synthetic_set_opens_with_the_expected_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "CHUNK", 7000)
    index.make_set(tmp_path / "s", 25_000)
    split = ShardSet.open(tmp_path / "s").splits["train"]
    assert (len(split), len(split.shards)) == (25_000, 3)
    np.testing.assert_array_equal(split.samples["key"], np.arange(25_000))
    for res in index.RESOLUTIONS:
        np.testing.assert_array_equal(split.stored[res]["shard"], np.arange(25_000) // 10_000)


@pytest.mark.parametrize("order", ["full", "block"])
def test_opening_and_batches_are_measured(tmp_path: Path, order: index.Order) -> None:
    index.make_set(tmp_path / "s", 25_000)
    result = index.measure(tmp_path / "s", order, cold=False, batches=20)
    assert result["samples"] == 25_000
    assert 0 < result["again_us"] <= result["again_p95_us"]
    assert result["unchecked_us"] > 0
    assert result["own_mib_open"] < 50
    assert len(index.table([result]).splitlines()) == 4
