"""Trains on a table of several labels or numbers with torchvision, Pillow and timm alone, to compare final metrics.

    python -m resolute.benchmarks.training.plain_targets TABLE --recipe train/recipes/labels_cpu.toml [--json FILE]

TABLE is a folder of `benchmarks.training.photo_tables`. Of the recipe, which `resolute train` runs on the same
photos for the comparison, it reads the model, [optim] lr, weight_decay and momentum (SGD with Nesterov momentum),
augment.scale, precision.amp and the stages; the schedule is torch's OneCycleLR with the recipe's defaults, the losses
are BCE (loss.sum_classes) and MSE of standardised values, and the photos are decoded from the files in every epoch. It
prints mAP, or R², RMSE and MAE of each value, of the last epoch's weights on val.txt. Of Resolute it uses only the
recipe's file format and its choice of autocast.
"""

from __future__ import annotations

import argparse
import csv
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from resolute.pipeline.plan.stage import Augment
from resolute.train.loop import autocast_dtype
from resolute.train.recipe.schema import Precision

__all__ = ["average_precision", "main", "train"]

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class _Table(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, folder: Path, rows: Sequence[tuple[str, list[float]]], transform: Any) -> None:
        self.folder, self.rows, self.transform = folder, rows, transform

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        name, target = self.rows[index]
        return self.transform(Image.open(self.folder / name).convert("RGB")), torch.tensor(target)


def _read(table: Path) -> tuple[list[str], dict[str, list[tuple[str, list[float]]]], bool]:
    """Names of the outputs, {split: (file, target) of each sample}, and whether the targets are labels."""
    with (table / "labels.csv").open(newline="") as file:
        head, *lines = csv.reader(file)
    val = set((table / "val.txt").read_text().split())
    are_labels = head[1] == "labels"
    names = sorted({name for line in lines for name in line[1].split("|")}) if are_labels else head[1:]
    rows: dict[str, list[tuple[str, list[float]]]] = {"train": [], "val": []}
    for name, *cells in lines:
        target = [float(c in cells[0].split("|")) for c in names] if are_labels else [float(cell) for cell in cells]
        rows["val" if name in val else "train"].append((name, target))
    return names, rows, are_labels


def average_precision(scores: np.ndarray[Any, Any], positives: np.ndarray[Any, Any]) -> float:
    """Mean of the precision at each positive, of samples in order of falling score (ties in the order of the array)."""
    ordered = positives[np.argsort(-scores, kind="stable")]
    return float((ordered.cumsum() / np.arange(1, len(ordered) + 1))[ordered > 0].mean())


def train(table: Path, recipe: dict[str, Any], *, seed: int, workers: int) -> dict[str, Any]:
    """Train the recipe's stages; returns the metrics of the last epoch's weights on the validation samples."""
    names, rows, are_labels = _read(table)
    torch.manual_seed(seed)
    optim, stages = {"lr": 0.5, "weight_decay": 5e-5, "momentum": 0.9, **recipe.get("optim", {})}, recipe["stages"]
    model = timm.create_model(recipe["model"]["name"], num_classes=len(names), **recipe["model"].get("kwargs", {}))
    decays = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.SGD([{"params": decays, "weight_decay": optim["weight_decay"]}, {"params": others}],
                                lr=optim["lr"], momentum=optim["momentum"], nesterov=True)  # fmt: skip
    steps = sum(stage["epochs"] * -(-len(rows["train"]) // stage["batch_size"]) for stage in stages)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, optim["lr"], total_steps=steps, pct_start=0.25, div_factor=10, final_div_factor=1e3,
        base_momentum=0.85, max_momentum=optim["momentum"],
    )  # fmt: skip
    loss_keys = {"kind": "auto", "sum_classes": False, **recipe.get("loss", {})}
    if loss_keys["kind"] not in ("auto", "bce" if are_labels else "mse"):
        raise SystemExit(f"loss.kind: got {loss_keys['kind']}, expected bce for labels, mse for values; change it")
    sum_classes = loss_keys["sum_classes"]
    dtype = autocast_dtype(Precision(**recipe.get("precision", {})), torch.device("cpu"))
    truth = torch.tensor([target for _, target in rows["train"]], dtype=torch.float64)
    mean, std = truth.mean(0).float(), truth.std(0, correction=0).float()
    end = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(_MEAN, _STD)]
    for stage in stages:
        scale = {**recipe.get("augment", {}), **stage.get("augment", {})}.get("scale", Augment.scale)
        crop = v2.RandomResizedCrop(stage["res"], scale=tuple(scale), antialias=True)
        data = _Table(table / "photos", rows["train"], v2.Compose([crop, v2.RandomHorizontalFlip(), *end]))
        loader = DataLoader(data, stage["batch_size"], shuffle=True, num_workers=workers)
        for _ in range(stage["epochs"]):
            model.train()
            for images, targets in loader:
                with torch.autocast("cpu", dtype, enabled=dtype is not None):
                    outputs = model(images.to(memory_format=torch.channels_last)).float()
                if are_labels:
                    terms = functional.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
                    loss = (terms.sum(1) if sum_classes else terms.mean(1)).mean()
                else:
                    loss = functional.mse_loss(outputs, (targets - mean) / std)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
    res = stages[-1]["res"]
    whole = v2.Compose([v2.Resize(round(res * 8 / 7), antialias=True), v2.CenterCrop(res), *end])
    model.eval()
    outputs, targets = [], []
    with torch.inference_mode():
        for images, target in DataLoader(_Table(table / "photos", rows["val"], whole), 64, num_workers=workers):
            outputs.append(model(images))
            targets.append(target)
    out, true = torch.cat(outputs).double().numpy(), torch.cat(targets).double().numpy()
    if are_labels:
        aps = [average_precision(out[:, c], true[:, c]) for c in range(len(names)) if true[:, c].any()]
        return {"mAP": float(np.mean(aps))}
    errors = out * std.double().numpy() + mean.double().numpy() - true
    r2 = 1 - (errors**2).mean(0) / true.var(0)
    return {"r2": float(r2.mean()), "columns": [
        {"name": name, "r2": float(r2[d]), "rmse": float(np.sqrt((errors[:, d] ** 2).mean())),
         "mae": float(np.abs(errors[:, d]).mean())} for d, name in enumerate(names)
    ]}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m resolute.benchmarks.training.plain_targets",
                                     description=(__doc__ or "").partition("\n")[0])  # fmt: skip
    parser.add_argument("table", type=Path, metavar="TABLE")
    parser.add_argument("--recipe", type=Path, required=True, metavar="FILE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(arguments)
    recipe = tomllib.loads(args.recipe.read_text(encoding="utf-8"))
    result = {"seed": args.seed, **train(args.table, recipe, seed=args.seed, workers=args.workers)}
    print(json.dumps(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
