"""The storage benchmark: its clock, delayed files and slow store behave as configured, and its command line runs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from resolute.benchmarks.proc import evict_files
from resolute.benchmarks.storage.__main__ import Delayed, main, paced
from resolute.benchmarks.storage.object_store import store
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.reader import Reader
from resolute.pipeline.storage.base import open_files
from resolute.pipeline.storage.cache import CacheSettings


@pytest.mark.timing
def test_waits_are_counted_per_epoch_without_compute_time() -> None:
    def batches() -> Iterator[tuple[int, int]]:
        for epoch, waits_s in enumerate([(0.2, 0.0, 0.1, 0.0), (0.05, 0.0)]):
            for wait_s in waits_s:
                time.sleep(wait_s)
                yield epoch, 8

    first, second = paced(batches(), step_s=0.05, began=time.perf_counter())
    assert 0.2 <= first["start_s"] < 0.3
    assert 0.1 <= first["slowest_s"] < 0.2
    assert first["stall_frac"] == pytest.approx(0.1 / 0.3, abs=0.1)  # not the first batch's 0.2 s
    assert second["stall_frac"] == pytest.approx(0.05 / 0.15, abs=0.15)
    assert second["images_per_s"] == pytest.approx(16 / 0.15, rel=0.3)


def test_delayed_files_return_the_same_bytes_after_the_delay(shard_root: Path) -> None:
    files = open_files(shard_root)
    slow, name = Delayed(files, 0.03), "32/train-000000.tar"
    began = time.perf_counter()
    assert slow.read(name, 7, 100) == files.read(name, 7, 100)
    assert time.perf_counter() - began >= 0.03
    assert (slow.root, slow.size(name), slow.local(name)) == (files.root, files.size(name), files.local(name))
    with closing(Reader(ShardSet.open(shard_root, files=slow))) as reader:  # type: ignore[arg-type]
        began = time.perf_counter()
        assert not reader.submit("train", 32, np.arange(2)).result().errors
        assert time.perf_counter() - began >= 0.03
    evict_files([shard_root / name])
    assert slow.read(name, 7, 100) == files.read(name, 7, 100)


def test_the_store_has_the_configured_latency_and_sends_the_files(shard_root: Path, tmp_path: Path) -> None:
    name = "32/train-000000.tar"
    data = (shard_root / name).read_bytes()
    with store(shard_root, latency_s=0.02, bytes_per_s=1e6, total_bytes_per_s=1e9) as url:
        for number, root in enumerate((url, f"{os.environ['AWS_ENDPOINT_URL']}/bucket/set")):
            settings = CacheSettings(folder=tmp_path / str(number))
            with open_files(root, cache=settings) as files:  # type: ignore[attr-defined]
                assert files.size(name) == len(data)
                assert files.size("gone") is None
                began = time.perf_counter()
                assert files.read(name, 0, len(data)) == data
                assert time.perf_counter() - began >= 0.9 * (0.02 + len(data) / 1e6)


def test_the_command_line_measures_and_writes(
    shard_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--shards", shard_root, "--res", 32, "--pace", 400, "--seconds", 0.1, "--batch-size", 8,
             "--latency-ms", 1, "--only", "cold,store", "--out", tmp_path / "s.json"]  # fmt: skip
    assert main([str(word) for word in words]) == 0
    result = json.loads((tmp_path / "s.json").read_text())
    assert [(row["name"], row["order"]) for row in result["rows"]] == [
        ("cold disk", "full"), ("cold disk", "block"), *(("store, empty cache", order) for order in ("full", "block")),
    ]  # fmt: skip
    for row in result["rows"]:
        assert len(row["epochs"]) == 2
        assert all(0 <= epoch["stall_frac"] < 1 for epoch in row["epochs"])
    assert str(shard_root.parent) not in (tmp_path / "s.json").read_text()
    assert "a consumer that computes" in capsys.readouterr().out
    assert main(["--shards", str(shard_root), "--only", "tape"]) == 2
    assert "got tape" in capsys.readouterr().err
