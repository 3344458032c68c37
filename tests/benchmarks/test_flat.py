"""The benchmarks of changes and of memory run whole on a tiny set, and tell every kind of change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import changes, memory


@pytest.mark.slow
def test_every_kind_of_change_is_told(shard_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "c.json"
    words = ["--shards", shard_root, "--batch-size", 8, "--rounds", 1, "--threads", 1, "--out", out]
    assert changes.main([str(word) for word in words]) == 0
    found = json.loads(out.read_text())
    kinds = {border["kind"] for border in found["borders"]}
    assert len(kinds) == 14
    for kind in ("epoch to epoch", "training to validation", "augmentation on", "order, full to block", "all at once"):
        assert kind in kinds
    printed = capsys.readouterr().out
    assert all(kind in printed for kind in kinds)
    assert all(wait >= 0 for wait in found["waits_s"][0])


def test_the_curve_covers_the_run(shard_root: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.json"
    words = ["--shards", shard_root, "--batches", 60, "--changes", 3, "--threads", 1, "--out", out]
    assert memory.main([str(word) for word in words]) == 0
    found = json.loads(out.read_text())
    assert found["stages"] == 4
    assert found["batches"] >= 60
    assert [row[0] for row in found["curve"]] == list(range(found["batches"]))
    assert all(row[2] > 0 for row in found["curve"])
    assert memory.main(["--shards", str(shard_root), "--out", str(tmp_path)]) == 2
