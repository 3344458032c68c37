"""Figures shown are those of the log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from train.report import draw_curves, epoch_line, summary, switch_costs


def _records() -> list[dict[str, Any]]:
    steps = [0.1] * 10 + [0.6, 0.2, 0.2, 0.2, 0.2] + [0.2] * 20
    records: list[dict[str, Any]] = [
        {"kind": "step", "step": i, "stage": int(i >= 10), "epoch": int(i >= 10), "res": 32 if i < 10 else 64,
         "lr": 0.1, "loss": 2.0 - i / 40, "wait_s": t / 10, "compute_s": 0.9 * t}
        for i, t in enumerate(steps)
    ]  # fmt: skip
    for epoch, top1 in enumerate((0.4, 0.35)):
        records.append({
            "kind": "epoch", "epoch": epoch, "stage": epoch, "res": 32, "batch_size": 8, "samples": 80, "train_s": 4.0,
            "wait_s": 1.0, "eval_s": 0.5, "elapsed_s": 4.5 * (epoch + 1), "images_per_s": 20.0, "stall_frac": 0.25,
            "lr": 0.1, "loss": 1.5, "top1": top1, "top5": 0.9, "ema_top1": 0.3, "ema_top5": 0.8,
        })  # fmt: skip
    return records


def test_switch_cost_is_the_first_steps_beyond_their_medians() -> None:
    (cost,) = switch_costs(_records())
    assert cost["stage"] == 1
    assert cost["cost_s"] == pytest.approx(0.4)
    assert cost["median_s"] == pytest.approx(0.2)
    assert cost["slowest_ratio"] == pytest.approx(3.0)


def test_summary_and_curves_come_from_the_log(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    log.write_text("".join(json.dumps(record) + "\n" for record in _records()))
    text = summary(log, tmp_path)
    assert "top-1 35.00 % at the end, best 40.00 % (epoch 0)" in text
    assert "9.0 s: training 8.0 s, validation 1.0 s; waiting for data 25.00 %" in text
    assert "switch to stage 1: +400 ms" in text
    draw_curves(log, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_an_epoch_without_validation_shows_dashes() -> None:
    record = {**_records()[-1], "top1": None, "top5": None, "ema_top1": None, "ema_top5": None}
    assert epoch_line(record).split()[-4:] == ["-"] * 4
    assert "25.00" in epoch_line(record)
