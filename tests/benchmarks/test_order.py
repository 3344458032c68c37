"""The measures of orders equal slow counts, and distinguish good from bad orders."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from resolute.benchmarks.storage.order import class_distance, fetches, kept_pairs, main, measure
from resolute.pipeline.dataset.shard_set import ShardSet


def test_kept_pairs_equal_a_count_pair_by_pair() -> None:
    rng = np.random.default_rng(0)
    before, after = rng.permutation(50), rng.permutation(50)

    def pairs(ids: np.ndarray) -> set[tuple[int, int]]:  # type: ignore[type-arg]
        return {(a, b) for i in range(0, 50, 8) for a, b in itertools.permutations(ids[i : i + 8].tolist(), 2)}

    part = len(pairs(before) & pairs(after)) / len(pairs(before))
    chance = len(pairs(after)) / (50 * 49)
    assert kept_pairs(before, after, 8) == pytest.approx(part / chance)
    assert kept_pairs(before, before, 8) == pytest.approx(1 / chance)


def test_class_distance_is_zero_for_even_batches_and_largest_for_sorted_ones() -> None:
    labels = np.arange(60) % 4
    assert class_distance(np.arange(60), labels, 4) == pytest.approx(0.0)
    assert class_distance(np.argsort(labels, kind="stable"), labels, 15) == pytest.approx(0.75)


def test_evicted_blocks_are_fetched_again() -> None:
    ids = np.asarray([0, 1, 10, 20, 2, 11, 30, 21])
    assert fetches(ids, 10, 4) == 4
    assert fetches(ids, 10, 1) == 7
    assert fetches(ids, 10, 2) == 7


def test_full_mixes_best_and_block_saves_reads() -> None:
    labels = np.random.default_rng(0).permutation(np.arange(20_000) % 10)
    rows = {row["order"]: row for row in measure(labels, 100, 3)}
    full, block, none = (rows[name] for name in ("full", "block, window 16", "as stored"))
    assert full["kept_pairs"] == pytest.approx(1, abs=0.1)
    assert full["class_mix_sorted"] == pytest.approx(1, abs=0.05)
    assert block["class_mix_shuffled"] == pytest.approx(1, abs=0.05)
    assert block["kept_pairs"] < 2 < 100 < none["kept_pairs"]
    assert 1 < block["class_mix_sorted"] < none["class_mix_sorted"]
    assert block["reads_per_1000"] < full["reads_per_1000"] / 50
    assert block["blocks_per_batch"] < 20 < full["blocks_per_batch"]


def test_every_order_is_in_the_table_and_in_the_file(
    shard_set: ShardSet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "order.json"
    words = ["--shards", shard_set.root, "--batch-size", "16", "--out", str(out)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    result = json.loads(out.read_text())
    assert (result["samples"], result["classes"]) == (75, 3)
    assert [row["order"] for row in result["orders"]] == [line.split("  ")[1] for line in printed.splitlines()[3:9]]
    assert main([*words, "--batch-size", "76"]) == 2
