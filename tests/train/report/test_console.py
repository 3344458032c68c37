"""Figures printed to the console are those of the log."""

from __future__ import annotations

import json
from pathlib import Path

from resolute.train.logs.run_log import RunLogReader
from resolute.train.report.console import summary

# of a run of 10 steps at 32 px and 25 at 64 px
TIMES_S = [0.1] * 10 + [0.6, 0.2, 0.2, 0.2, 0.2] + [0.2] * 20
STEPS = [
    {
        "kind": "step",
        "step": i,
        "stage": int(i >= 10),
        "epoch": int(i >= 10),
        "res": 32 if i < 10 else 64,
        "samples": 8,
        "lr": 0.1,
        "loss": 2.0 - i / 40,
        "wait_s": t / 10,
        "compute_s": 0.9 * t,
    }
    for i, t in enumerate(TIMES_S)
]
EPOCHS = [
    {
        "kind": "epoch",
        "epoch": epoch,
        "stage": epoch,
        "res": 32,
        "batch_size": 8,
        "samples": 80,
        "train_s": 4.0,
        "wait_s": 1.0,
        "eval_s": 0.5,
        "elapsed_s": 4.5 * (epoch + 1),
        "images_per_s": 20.0,
        "stall_frac": 0.25,
        "lr": 0.1,
        "loss": 1.5,
        "top1": top1,
        "top5": 0.9,
        "ema_top1": 0.3,
        "ema_top5": 0.8,
        "eval_loss": 1.25,
        "ema_eval_loss": 1.75,
        "memory_bytes": 3 * 2**29,
        "gpu_frac": None,
    }
    for epoch, top1 in enumerate((0.4, 0.35))
]


def test_the_summary_equals_the_log(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    log.write_text("".join(json.dumps(record) + "\n" for record in (*STEPS, *EPOCHS)))
    run = RunLogReader(log)
    run.read()
    text = summary(run, tmp_path)
    assert "top-1 35.00 % at the end, best 40.00 % (epoch 0)" in text
    assert "9.0 s: training 8.0 s, validation 1.0 s; waiting for data 25.00 %" in text
    assert "switch to stage 1: cost +2.0 steps of usually 200 ms in the first 5 (noise of 5 steps: " in text
    assert text.splitlines()[-1] == f"next: `resolute eval --run={tmp_path}`"
