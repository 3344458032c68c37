"""Figures of finished runs are those of their logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.runs import main


def _run(folder: Path, *, seconds: float, finished: bool = True) -> Path:
    folder.mkdir()
    records: list[dict[str, Any]] = [{
        "kind": "start", "recipe": folder.name, "recipe_hash": "abc", "shards_hash": "def", "device": "CPU",
        "torch": "2",
    }]  # fmt: skip
    for epoch in range(4):
        stage = epoch // 2
        records += [{"kind": "step", "stage": stage, "wait_s": 0.0, "compute_s": 1.0 + stage}] * 6
        records.append({
            "kind": "epoch", "epoch": epoch, "stage": stage, "train_s": seconds * (1 + 0.1 * epoch),
            "wait_s": seconds / 20, "eval_s": 1.0, "elapsed_s": 5.0 * seconds, "top1": 0.1 * epoch, "ema_top1": None,
        })  # fmt: skip
    if finished:
        records.append({"kind": "end", "best_top1": 0.3})
    (folder / "run.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_runs_are_compared_with_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [_run(tmp_path / "fixed", seconds=10.0), _run(tmp_path / "progressive", seconds=5.0)]
    out = tmp_path / "out.json"
    assert main([*map(str, runs), "--out", str(out)]) == 0
    rows = capsys.readouterr().out.splitlines()[-2:]
    assert rows[0].split()[:3] == ["fixed", "4", "30.00"]
    assert "1.00x" in rows[0]
    assert "0.50x" in rows[1]
    fixed, progressive = json.loads(out.read_text())["runs"]
    assert fixed["epoch_spread_frac"] == pytest.approx([1 / 10.5, 1 / 12.5])
    assert progressive["switches"][0]["slowest_ratio"] == pytest.approx(1.0)
    assert progressive["stall_frac"] == pytest.approx(4 * 0.05 / 4.6)
    assert str(tmp_path) not in out.read_text()


def test_unfinished_and_missing_runs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(_run(tmp_path / "cut", seconds=1.0, finished=False))]) == 2
    assert "cut: not finished" in capsys.readouterr().err
    assert main([str(tmp_path / "none")]) == 2
    assert "none/run.jsonl: no run log" in capsys.readouterr().err
