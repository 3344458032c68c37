"""The made-up set of the scale benchmark is a real one to whoever opens it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import scale
from pipeline.dataset.shard_set import ShardSet


def test_a_made_up_set_opens_and_its_records_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "CHUNK", 7000)
    scale.make_set(tmp_path / "s", 25_000)
    split = ShardSet.open(tmp_path / "s").splits["train"]
    assert (len(split), len(split.shards)) == (25_000, 3)
    np.testing.assert_array_equal(split.samples["key"], np.arange(25_000))
    for res in scale.RESOLUTIONS:
        np.testing.assert_array_equal(split.stored[res]["shard"], np.arange(25_000) // 10_000)


@pytest.mark.parametrize("order", ["full", "block"])
def test_it_measures_opening_and_batches(tmp_path: Path, order: scale.Order) -> None:
    scale.make_set(tmp_path / "s", 25_000)
    found = scale.measure(tmp_path / "s", order, cold=False, batches=20)
    assert found["samples"] == 25_000
    assert 0 < found["again_us"] <= found["again_p95_us"]
    assert found["unchecked_us"] > 0
    assert found["own_mib_open"] < 50
    assert len(scale.table([found]).splitlines()) == 4
