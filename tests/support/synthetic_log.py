"""A synthetic run log of any length, in the trainer's format."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

STAGES = ((128, 64, 3), (160, 64, 3), (224, 32, 2))  # res, batch size, epochs
GPU = {"gpu": "Some GPU", "gpu_memory_bytes": 24 * 2**30, "cuda": "13.0"}
STEPS = 40  # an epoch


def write_log(
    folder: Path,
    *,
    steps: int = STEPS,
    waits: tuple[float, ...] = (0.02, 0.02, 0.02),
    calibrated: bool = False,
    machine: dict[str, Any] | None = None,
    switch_s: float = 0.0,
    ema: bool = True,
    epochs_of_last: int = STAGES[-1][2],
) -> list[dict[str, Any]]:
    """Write folder/run.jsonl and return its records. `waits`: fraction of the step time spent waiting, per stage."""
    rng = random.Random(0)
    stages = (*STAGES[:-1], (*STAGES[-1][:2], epochs_of_last))
    total = steps * sum(epochs for _, _, epochs in stages)
    records: list[dict[str, Any]] = [
        {
            "kind": "start",
            "recipe": "made_up",
            "recipe_hash": "0123456789ab",
            "shards_hash": "ab",
            "classes": 10,
            "train_samples": 64 * steps,
            "val_samples": 100,
            "order": "shuffled",
            "total_steps": total,
            "device": "CPU, 2 threads",
            "python": "3.11.2",
            "torch": "2.14.1",
            "timm": "1.0.31",
            "machine": {
                "system": "Linux",
                "cpu": "A <CPU> & more",
                "threads": 2,
                "cores": 4,
                "ram_bytes": 2**34,
                **dict.fromkeys(GPU),
                **(machine or {}),
            },
            "recipe_text": "# as written\nseed = 1\n",
            "recipe_values": {
                "seed": 1,
                "optim": {"lr": 0.5, "betas": [0.9, 0.999]},
                "data": {"fold": None},
                "stages": [
                    {"res": r, "epochs": e, "batch_size": b, "augment": {"mixup_alpha": 0.2}} for r, b, e in stages
                ],
            },
        }
    ]
    if calibrated:
        records += [
            {
                "kind": "calibration",
                "stage": s,
                "loader_images_per_s": 900.0 - 100 * s,
                "model_images_per_s": 1000.0 - 250 * s,
            }
            for s in range(3)
        ]
    step = epoch = 0
    elapsed = 0.0
    for stage, (res, batch, epochs) in enumerate(stages):
        for number in range(epochs):
            sums = {"wait": 0.0, "train": 0.0, "loss": 0.0}
            for k in range(steps):
                time_s = batch * (res / 128) ** 2 / 700 * rng.uniform(0.97, 1.05)
                wait_s = waits[stage] * time_s * rng.uniform(0.5, 1.5)
                time_s += switch_s if stage and number == k == 0 else 0.0
                loss = 2.3 * math.exp(-2 * step / total) + rng.uniform(-0.1, 0.1)
                done = step / total
                records.append(
                    {
                        "kind": "step",
                        "index": step,
                        "step": step,
                        "stage": stage,
                        "epoch": epoch,
                        "res": res,
                        "samples": batch,
                        "lr": 0.5 * math.sin(math.pi * (done + 0.01)),
                        "momentum": 0.95 - 0.1 * done,
                        "wait_s": wait_s,
                        "compute_s": time_s - wait_s,
                        "loss": loss,
                    }
                )
                sums = {"wait": sums["wait"] + wait_s, "train": sums["train"] + time_s, "loss": sums["loss"] + loss}
                step += 1
            elapsed += sums["train"] + 0.5
            top1 = 0.9 * (1 - math.exp(-(epoch + 1) / 3))
            records.append(
                {
                    "kind": "epoch",
                    "epoch": epoch,
                    "stage": stage,
                    "res": res,
                    "batch_size": batch,
                    "eval_res": res,
                    "samples": batch * steps,
                    "steps": steps,
                    "train_s": sums["train"],
                    "wait_s": sums["wait"],
                    "eval_s": 0.5,
                    "elapsed_s": elapsed,
                    "images_per_s": batch * steps / sums["train"],
                    "stall_frac": sums["wait"] / sums["train"],
                    "lr": records[-1]["lr"],
                    "loss": sums["loss"] / steps,
                    "top1": top1,
                    "top5": min(1.0, top1 + 0.08),
                    "eval_loss": 2.2 - 1.4 * top1,
                    "ema_top1": top1 - 0.04 + epoch / 100 if ema else None,
                    "ema_top5": 0.9 if ema else None,
                    "ema_eval_loss": 2.3 - 1.5 * top1 if ema else None,
                    "memory_bytes": 3 * 2**30,
                    "gpu_frac": 0.7 if machine else None,
                }
            )
            epoch += 1
    records.append({"kind": "end", "elapsed_s": elapsed, "best_top1": 0.9})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return records
