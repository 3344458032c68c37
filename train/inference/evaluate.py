"""`python -m train eval RUN --shards SHARDS`: exact top-1 and top-5 of a run at one or more resolutions.

Every sample of the split counts exactly once. The results are printed and written to eval.json.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

from pipeline.dataset.shard_set import ShardSet
from pipeline.errors import ResoluteError
from pipeline.storage.atomic_file import check_output, output_file
from train.device import pick_device
from train.loop import eval_logits
from train.run_folder import existing_run

from .saved_run import (
    SavedRun,
    open_eval_set,
    open_saved_run,
    training_overlap,
    validation_loader,
)

__all__ = ["evaluate", "main"]


def evaluate(
    saved: SavedRun, shards: ShardSet, resolutions: list[int], *, device: torch.device, threads: int,
    flip: bool = False, split: str = "val",
) -> list[dict[str, Any]]:  # fmt: skip
    """One row per resolution (px) and kind of weights: {"res", "weights", "top1", "top5", "samples"}, top-k in 0 to 1.

    Every sample of the split counts once. Raises `ResoluteError` if the classes differ from the run's or the shards are
    stored at too low a resolution.
    """
    if list(shards.classes) != saved.classes:
        got, expected = (f"{len(names)} ({', '.join(names[:3])} …)" for names in (shards.classes, saved.classes))
        advice = "name them with --classes" if shards.single_resolution else "use a set with these classes"
        raise ResoluteError(
            f"{shards.root}: classes differ from {saved.path}, got {got}, expected {expected}; {advice}"
        )
    networks = {which: saved.network(which, device, resolutions=resolutions) for which in saved.weights}
    counts = torch.zeros(len(resolutions), len(networks), 2, dtype=torch.int64, device=device)
    with validation_loader(saved, shards, resolutions, split=split, device=device, threads=threads) as loader:
        for batch in loader:
            for i, network in enumerate(networks.values()):
                out = eval_logits(network, batch.images, saved.recipe.precision, flip=flip)
                hits = out.topk(min(5, len(saved.classes)), dim=1).indices == batch.labels[:, None]
                counts[batch.spec.stage, i] += torch.stack([hits[:, 0].sum(), hits.sum()])
    samples = len(shards.splits[split])
    return [
        {"res": res, "weights": which, "top1": top1 / samples, "top5": top5 / samples, "samples": samples}
        for res, of_res in zip(resolutions, counts.tolist(), strict=True)
        for which, (top1, top5) in zip(networks, of_res, strict=True)
    ]


def main(args: argparse.Namespace) -> None:
    """Run the command."""
    saved = open_saved_run(existing_run(args.run))
    path = args.json or saved.path.parent / "eval.json"
    check_output(path, setting="--json", suffixes=(".json",))
    res = (args.res or str(saved.res)).split(",")
    if not all(word.isdigit() and int(word) for word in res):
        raise ResoluteError(f"--res: got {args.res}, expected px separated by commas; write it as 160,208,224")
    shards = open_eval_set(args.shards, saved, fold=args.fold, val=args.val, classes=args.classes)
    device, flip = pick_device(args.device, threads=args.threads), args.flip or saved.recipe.eval.flip
    rows = evaluate(saved, shards, [int(word) for word in res], device=device, threads=args.threads, flip=flip,
                    split=args.split)  # fmt: skip
    overlap = training_overlap(saved, shards, split=args.split, fold=args.fold)
    about = {"checkpoint": str(saved.path), "step": saved.step, "recipe_hash": saved.recipe.hash,
             "shards": shards.hash, "split": args.split, "flip": flip,
             "note": overlap and overlap.text}  # fmt: skip
    with output_file(path) as file:
        file.write((json.dumps({**about, "rows": rows}, indent=1) + "\n").encode())
    print(f"{saved.path} (step {saved.step}), {rows[0]['samples']} samples, flip {'on' if flip else 'off'}")
    print("  res  weights   top-1   top-5")
    for row in rows:
        print(f"{row['res']:5d}  {row['weights']:7s} {100 * row['top1']:7.3f} {100 * row['top5']:7.3f}")
    if overlap is not None:
        print(f"note: {overlap.text}")
    print(path)
