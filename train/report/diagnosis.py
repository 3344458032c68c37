"""Diagnosis of a run from its log: what limited it and what to change, by rules with figures, in plain words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from train.logs.run_log import SWITCH_STEPS, RunLogReader, best_epoch, best_top1, switch_costs

__all__ = ["Finding", "diagnose", "stage_rows", "told_time"]

_STALL_FRAC = 0.05  # of a stage's time: below, data is no limit
_BURST_FRAC = 0.5  # of a stage's waits in 1 % of its steps: single cold files, not a slow loader
_DRIFT_FRAC = 0.05  # of an epoch's time against its stage's median
_SWITCH_FRAC = 0.5  # of the first steps' usual time
_UNEVEN = 2.0  # the slowest 1 % of a stage's steps, in medians, waits left out
_EVAL_FRAC = 0.15  # of the run
_WORSE = 0.005  # top-1 that was lost again at the end


@dataclass(frozen=True)
class Finding:
    bad: bool  # something to change; else something to know
    text: str


def stage_rows(run: RunLogReader) -> list[dict[str, Any]]:
    """Sums of each stage: times in s, rates in images/s, None where nothing was measured."""
    steps, rows = run.steps, []
    ceilings = {record["stage"]: record for record in run.kind("calibration")}
    costs = {cost["stage"]: cost for cost in switch_costs(steps["stage"], steps["time_s"])}
    for stage in np.unique(steps["stage"]):
        own, ceiling = steps["stage"] == stage, ceilings.get(int(stage), {})
        wait, times = steps["wait_s"][own], np.sort(steps["time_s"][own])
        epochs = [epoch for epoch in run.epochs if epoch["stage"] == stage]
        rows.append({
            "stage": int(stage), "res": int(steps["res"][own][0]), "steps": int(own.sum()), "epochs": epochs,
            "batch_size": epochs[0]["batch_size"] if epochs else int(steps["samples"][own].max()),
            "train_s": float(times.sum()), "wait_s": float(wait.sum()), "stall_frac": float(wait.sum() / times.sum()),
            "burst_frac": float(np.sort(wait)[-max(1, len(wait) // 100) :].sum() / max(wait.sum(), 1e-9)),
            "longest_wait_s": float(wait.max()), "longest_wait_step": int(steps["step"][own][wait.argmax()]),
            "uneven": float(np.quantile(steps["compute_s"][own], 0.99) / np.median(steps["compute_s"][own])),
            "first_wait_s": float(wait[:SWITCH_STEPS].sum() - SWITCH_STEPS * np.median(wait)),
            "images_per_s": float(steps["samples"][own].sum() / times.sum()),
            "unfed_images_per_s": float(steps["samples"][own].sum() / steps["compute_s"][own].sum()),
            "median_s": float(np.median(times)), "p99_s": float(times[int(0.99 * (len(times) - 1))]),
            "loader_images_per_s": ceiling.get("loader_images_per_s"),
            "model_images_per_s": ceiling.get("model_images_per_s"), "switch": costs.get(int(stage)),
        })  # fmt: skip
    return rows


def diagnose(run: RunLogReader) -> list[Finding]:
    """The limits first, what is fine last. Empty before the first step."""
    rows = stage_rows(run)
    found = [finding for row in rows for finding in _stage(run, row)] + list(_whole(run, rows))
    return sorted(found, key=lambda finding: not finding.bad)


def _stage(run: RunLogReader, row: dict[str, Any]) -> Iterator[Finding]:
    name = f"Stage {row['stage']} ({row['res']} px)"
    if row["stall_frac"] >= _STALL_FRAC:
        told = f"{name} waited {100 * row['stall_frac']:.0f} % of its time for data ({told_time(row['wait_s'])})"
        if row["burst_frac"] >= _BURST_FRAC and row["steps"] >= 100:
            yield Finding(True, (
                f"{told}, {100 * row['burst_frac']:.0f} % of it in 1 % of the steps (longest "
                f"{told_time(row['longest_wait_s'])}, at step {row['longest_wait_step']}): cold files, not a slow "
                'loader. Read in blocks (`data.order = "block"`), or keep the shards on a local disk.'
            ))  # fmt: skip
        else:
            yield Finding(True, f"{told}: {_rates(row)} {_feed(run)}")
    cost = row["switch"]
    if cost is not None:
        usual = SWITCH_STEPS * cost["median_s"]
        bad, waited = cost["cost_s"] > _SWITCH_FRAC * usual, row["first_wait_s"]
        yield Finding(bad, (
            f"The {SWITCH_STEPS} steps after the change to {row['res']} px cost {told_time(cost['cost_s'], '+')} "
            f"beyond {SWITCH_STEPS} usual ones ({told_time(usual)}), "
            f"the slowest {cost['slowest_ratio']:.1f}x the median"
            + (f"; {told_time(max(0.0, waited))} of it for data. " + (
                "Cold files at the new resolution: more memory, or a faster disk."
                if waited > cost["cost_s"] / 2 else "What the warm-up left out, or other work on the machine."
            ) if bad else ".")
        ))  # fmt: skip
    if row["steps"] >= 100 and row["uneven"] > _UNEVEN:
        yield Finding(True, (
            f"{name}: the model took {row['uneven']:.1f}x its median time, or more, for one step in a hundred: other "
            "work on the machine."
        ))  # fmt: skip
    if len(row["epochs"]) >= 3:
        yield from _slow_start(row)


def _slow_start(row: dict[str, Any]) -> Iterator[Finding]:
    """What the first epoch of a stage took more than its others, and whether it waited or computed in that time."""
    names = ("train_s", "wait_s")
    first, *others = ([epoch[name] / epoch["samples"] for name in names] for epoch in row["epochs"])
    usual_s, usual_wait_s = np.median(others, axis=0).tolist()
    more_s, waited_s = first[0] - usual_s, first[1] - usual_wait_s
    if more_s <= _DRIFT_FRAC * usual_s:
        return
    slower = (
        f"Epoch {row['epochs'][0]['epoch']}, the first of stage {row['stage']}, was "
        f"{100 * more_s / usual_s:.0f} % slower than the others at {row['res']} px, "
    )
    if waited_s > more_s / 2:
        part = f"{100 * min(1.0, waited_s / more_s):.0f} % of that"
        yield Finding(True, f"{slower}{part} in waits for data: cold files; more memory, or a faster disk.")
    else:
        yield Finding(True, f"{slower}in computing, not in waits for data: other work on the machine.")


def _rates(row: dict[str, Any]) -> str:
    loader, model = row["loader_images_per_s"], row["model_images_per_s"]
    if loader is None or model is None:
        return f"it ran at {row['images_per_s']:,.0f} images/s, without the waits {row['unfed_images_per_s']:,.0f}."
    if loader > model:
        return (
            f"alone, the loader ({loader:,.0f} images/s) keeps up with the model ({model:,.0f}); together they share "
            "the cores, or batches come late now and then."
        )
    return f"the loader delivers {loader:,.0f} images/s, the model takes {model:,.0f}."


def _feed(run: RunLogReader) -> str:
    """What to change so that the loader keeps up, on the machine of the log."""
    machine = run.start.get("machine", {})
    threads, cores = machine.get("threads"), machine.get("cores")
    if threads and cores and threads < cores:
        return f"Use more threads: `--threads {cores}` (it ran with {threads})."
    if machine.get("gpu"):
        return "Every core is in use: decode on the GPU (`--decode gpu`), or make smaller shards (`QUALITY=…`)."
    return "Every core is in use, by the loader and the model alike: more cores, or smaller shards (`QUALITY=…`)."


def _whole(run: RunLogReader, rows: list[dict[str, Any]]) -> Iterator[Finding]:
    train_s = sum(row["train_s"] for row in rows)
    if not train_s:
        return
    wait_s, epochs = sum(row["wait_s"] for row in rows), run.epochs
    machine = run.start.get("machine", {})
    if wait_s < _STALL_FRAC * train_s:
        longest = max(rows, key=lambda row: float(row["train_s"]))
        yield Finding(False, (
            f"The model was the limit: {100 * (1 - wait_s / train_s):.1f} % of the training time was compute. Stage "
            f"{longest['stage']} ({longest['res']} px) took {100 * longest['train_s'] / train_s:.0f} % of it: fewer "
            "epochs or a smaller fraction there save most."
        ))  # fmt: skip
        use = [epoch["gpu_frac"] for epoch in epochs if epoch.get("gpu_frac") is not None]
        if use and np.mean(use) < 0.85:
            yield Finding(True, (
                f"Yet the GPU was busy only {100 * np.mean(use):.0f} % of the time: it waits for launches. Larger "
                "batches, or `precision.compile = true`."
            ))  # fmt: skip
    if not epochs:
        return
    eval_s, elapsed_s = sum(epoch["eval_s"] for epoch in epochs), epochs[-1]["elapsed_s"]
    if eval_s > _EVAL_FRAC * elapsed_s:
        yield Finding(True, (
            f"Validation took {100 * eval_s / elapsed_s:.0f} % of the run ({told_time(eval_s)}): "
            f"`eval.every_epochs = 2` would save about {told_time(eval_s / 2)}."
        ))  # fmt: skip
    memory, room = max((e.get("memory_bytes") or 0) for e in epochs), machine.get("gpu_memory_bytes")
    if room and memory < 0.6 * room:
        yield Finding(False, (
            f"Tensors held at most {memory / 2**30:.1f} of {room / 2**30:.1f} GiB of GPU memory: larger batches fit "
            '(`batch_size = "auto"` finds the largest).'
        ))  # fmt: skip
    validated = [epoch for epoch in epochs if epoch["top1"] is not None]
    if run.kind("end") and len(validated) >= 5:
        best = best_epoch(validated) or validated[-1]
        worse = best_top1(best) - best_top1(validated[-1])
        if worse > _WORSE and best["epoch"] < 0.8 * epochs[-1]["epoch"]:
            yield Finding(True, (
                f"The best top-1, {100 * best_top1(best):.2f} %, was reached in epoch {best['epoch']} of "
                f"{epochs[-1]['epoch']}; it ended at {100 * best_top1(validated[-1]):.2f} %: fewer epochs, or stronger "
                "augmentation in the late stages."
            ))  # fmt: skip


def format_duration(seconds: float, sign: str = "") -> str:
    """In the unit that suits; `sign` "+" shows both signs."""
    if abs(seconds) < 1:
        return f"{1e3 * seconds:{sign}.0f} ms"
    if abs(seconds) < 120:
        return f"{seconds:{sign}.1f} s"
    return f"{seconds / 60:{sign}.1f} min" if abs(seconds) < 7200 else f"{seconds / 3600:{sign}.1f} h"
