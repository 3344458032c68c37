"""Figures printed to the console are those of the log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from resolute.pipeline.dataset.target import Target, TargetKind
from resolute.train.logs.run_log import RunLogReader, change_text, is_measurable, noise_s, switch_costs
from resolute.train.report.console import EpochTable, summary

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
    assert "\nchange 32 -> 64 px cost 0.40 s: first 5 steps +0.40 s, other groups of 5 steps ±0.00 s\n" in text
    assert text.splitlines()[-1] == f"next: `resolute eval --run={tmp_path}`"


def test_the_summary_and_the_table_have_both_numbers_if_photos_are_related(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    start = {"kind": "start", "val_samples": 300, "val_related": 90, "val_majority": None}
    unrelated = {"top1_unrelated": (0.2, 0.175), "ema_top1_unrelated": (0.1, 0.1)}
    epochs = [{**epoch, **{key: values[i] for key, values in unrelated.items()}} for i, epoch in enumerate(EPOCHS)]
    log.write_text("".join(json.dumps(record) + "\n" for record in (start, *STEPS, *epochs)))
    run = RunLogReader(log)
    run.read()
    assert (
        "\ntop-1 unrelated 17.50 % at the end, 20.00 % in epoch 0: on the 210 of 300 photos without a near copy or "
        "group-mate among the training photos\n"
    ) in summary(run, tmp_path)
    target = Target(kind="class", names=("a", "b"))
    table = EpochTable.of(target, has_ema=True, has_related=True)
    assert " val loss top-1 % top-1 unrelated % EMA top-1 % EMA top-1 unrelated %  " in table.head
    assert table.row(epochs[0]).split()[6:10] == ["40.00", "20.00", "30.00", "10.00"]
    assert "unrelated" not in EpochTable.of(target, has_ema=True).head


def _costs(first_s: float, *others_s: float, rounds: int = 4) -> list[dict[str, Any]]:
    """Of a change from 32 to 64 px, after steps of 1 s: its first step takes `first_s` longer, and in each round, the
    first of each other group of 5 steps `others_s`."""
    groups = [first_s, *others_s * rounds]
    times_s = np.array([1.0] * 10 + [1.0 + extra_s * (i == 0) for extra_s in groups for i in range(5)])
    stages = (np.arange(len(times_s)) >= 10).astype(float)
    return switch_costs(stages, times_s, 32 + 32 * stages)


def test_the_noise_of_a_change_is_what_90_percent_of_the_other_groups_of_steps_stay_below() -> None:
    (cost,) = _costs(0.0, *([0.1] * 18), 9.0, 9.0, rounds=1)  # two groups of 20 are slower
    assert noise_s(cost) == 9.0
    (cost,) = _costs(0.0, *([0.1] * 39), 9.0, rounds=1)  # one of 40
    assert noise_s(cost) == pytest.approx(0.1)
    (cost,) = _costs(0.0, -0.5, 0.2)  # a group may be faster, too
    assert noise_s(cost) == pytest.approx(0.5)
    (cost,) = _costs(0.0, 0.1, rounds=3)  # too few groups
    assert noise_s(cost) is None
    assert not is_measurable(cost)


def test_a_cost_is_measurable_only_beyond_what_other_steps_differ_by() -> None:
    def text(first_s: float, *others_s: float) -> str:
        (cost,) = _costs(first_s, *others_s)
        return change_text(cost)

    others = "other groups of 5 steps"
    assert text(0.2, 0.4) == f"no measurable cost at 32 -> 64 px: first 5 steps +0.20 s, {others} ±0.40 s"
    assert text(-1.2, 0.4) == f"no measurable cost at 32 -> 64 px: first 5 steps -1.2 s, {others} ±0.4 s"
    assert text(1.3, 0.4) == f"change 32 -> 64 px cost 1.3 s: first 5 steps +1.3 s, {others} ±0.4 s"
    assert text(0.0008, 0.0012) == f"no measurable cost at 32 -> 64 px: first 5 steps +0.8 ms, {others} ±1.2 ms"
    assert text(0.3) == "change 32 -> 64 px: first 5 steps +0.30 s; too few other steps to know the noise"
    times_s, ones = np.array([1.0] * 10 + [1.5, 1.0]), np.ones(12)
    (cost,) = switch_costs((np.arange(12) >= 10).astype(float), times_s, 32 * ones)
    assert change_text(cost) == "change stage 0 -> 1: first 2 steps +0.0 ms; too few other steps to know the noise"


def test_top5_is_shown_from_ten_classes_on_and_errors_of_several_values_only_in_one_unit() -> None:
    def titles(kind: TargetKind, outputs: int, units: tuple[str, ...] = ()) -> list[str]:
        names = tuple(map(str, range(outputs)))
        table = EpochTable.of(Target(kind=kind, names=names, units=units), has_ema=True)
        assert len(table.head) <= 120
        return [metric.title for metric in table.metrics]

    assert titles("class", 9) == ["top-1"]
    assert titles("class", 10) == ["top-1", "top-5"]
    assert titles("labels", 3) == ["mAP", "micro F1", "macro F1"]
    assert titles("values", 1, ("",)) == ["R²", "RMSE", "MAE"]
    assert titles("values", 2, ("cm", "cm")) == ["R²", "RMSE", "MAE"]
    assert titles("values", 2, ("cm", "kg")) == ["R²"]
    assert titles("values", 2, ("", "")) == ["R²"]


def test_rows_stand_below_their_heads() -> None:
    table = EpochTable.of(Target(kind="class", names=tuple("0123456789")), has_ema=True)
    head, row = table.head, table.row(EPOCHS[0])
    assert len(head) == len(row)
    assert " ".join(row.split()) == "0 0 32 8 1.500 1.250 40.00 90.00 30.00 0.1 20.0 25.00 4.0 0.5"
    for title, value in (("val loss", "1.250"), ("images/s", "20.0"), ("val s", "0.5")):
        assert row[: head.index(title) + len(title)].endswith(value)
    for lr, shown in ((2e-5, "2e-05"), (0.000123456, "0.000123")):
        row = table.row({**EPOCHS[0], "lr": lr})
        assert len(row) == len(head)
        assert f" {shown} " in row


def test_the_summary_says_on_how_many_photos_and_what_a_constant_answer_would_reach(tmp_path: Path) -> None:
    start = {"kind": "start", "val_samples": 1200, "val_majority": 0.4}
    log = tmp_path / "run.jsonl"
    log.write_text("".join(json.dumps(record) + "\n" for record in (start, *STEPS, *EPOCHS, {"kind": "end"})))
    run = RunLogReader(log)
    run.read()
    text = summary(run, tmp_path)
    assert "(epoch 0), of 1,200 photos; always the most frequent class: 40.0 %" in text
    assert f"more epochs: `resolute train --run={tmp_path} --more-epochs=1`" in text
    table = {"kind": "values", "epoch": 1, "columns": [{"name": "h", "unit": "cm", "rmse": 1.5}]}
    (tmp_path / "validation.json").write_text(json.dumps(table))
    assert "\nRMSE in epoch 1: h 1.5 cm\n" in summary(run, tmp_path)
    table["columns"] = [{"name": f"v{i}", "unit": "", "rmse": i} for i in range(10)]
    (tmp_path / "validation.json").write_text(json.dumps(table))
    assert "v6 6, v7 7, 2 more in the report\n" in summary(run, tmp_path)
