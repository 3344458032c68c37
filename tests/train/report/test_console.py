"""Figures printed to the console are those of the log."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from resolute.train.logs.run_log import RunLogReader, switch_costs
from resolute.train.report.console import epoch_header, epoch_line, summary

# of a run of 10 steps at 32 px and 25 at 64 px
TIMES_S = [0.1] * 10 + [0.6, 0.2, 0.2, 0.2, 0.2] + [0.2] * 20
STEPS = [{"kind": "step", "step": i, "stage": int(i >= 10), "epoch": int(i >= 10), "res": 32 if i < 10 else 64,
          "samples": 8, "lr": 0.1, "loss": 2.0 - i / 40, "wait_s": t / 10, "compute_s": 0.9 * t}
         for i, t in enumerate(TIMES_S)]  # fmt: skip
EPOCHS = [{
    "kind": "epoch", "epoch": epoch, "stage": epoch, "res": 32, "batch_size": 8, "samples": 80, "train_s": 4.0,
    "wait_s": 1.0, "eval_s": 0.5, "elapsed_s": 4.5 * (epoch + 1), "images_per_s": 20.0, "stall_frac": 0.25,
    "lr": 0.1, "loss": 1.5, "top1": top1, "top5": 0.9, "ema_top1": 0.3, "ema_top5": 0.8, "eval_loss": 1.25,
    "ema_eval_loss": 1.75, "memory_bytes": 3 * 2**29, "gpu_frac": None,
} for epoch, top1 in enumerate((0.4, 0.35))]  # fmt: skip


def test_the_switch_cost_is_the_excess_of_the_first_steps_beside_what_later_ones_vary_by() -> None:
    stages = np.repeat([0.0, 1.0], [10, 25])
    (cost,) = switch_costs(stages, np.array(TIMES_S), 32 + stages)
    assert cost["stage"] == 1
    assert (cost["cost_s"], cost["median_s"], cost["slowest_ratio"]) == pytest.approx((0.4, 0.2, 3.0))
    later = np.repeat([0.1, 0.2, 0.3, 0.2], 5)  # groups of 5 steps that take 0.5 s less to 0.5 s more
    times = np.concatenate([[0.1] * 10, [0.2] * 5, later])
    (cost,) = switch_costs(stages, times, 32 + stages)
    assert cost["cost_s"] == pytest.approx(0.0)
    assert cost["noise_s"] == pytest.approx([-0.425, 0.425])
    (short,) = switch_costs(stages[:29], times[:29], 32 + stages[:29])
    assert short["noise_s"] is None


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


def test_an_epochs_line_is_aligned_with_its_header_and_shows_dashes_for_missing_values() -> None:
    line = epoch_line(EPOCHS[1])
    assert line.split() == ["1", "1", "32", "8", "20.0", "25.00", "1.00", "3.00", "0.50", "0.1000", "1.500", "1.250",
                            "35.00", "90.00", "1.750", "30.00", "80.00", "1.50", "-"]  # fmt: skip
    assert len(line) == len(epoch_header("class"))
    none = dict.fromkeys(("top1", "top5", "ema_top1", "ema_top5", "eval_loss", "ema_eval_loss"))
    assert epoch_line({**EPOCHS[1], **none}).split()[11:17] == ["-"] * 6
