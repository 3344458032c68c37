"""`resolute eval RUN --shards SHARDS`: the exact metrics of a run at one or more resolutions.

Every sample of the split counts exactly once. The results are printed and written to eval.json.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from resolute.console import counted
from resolute.files import check_output, output_file
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.train.devices.device import pick_device
from resolute.train.learner import eval_logits
from resolute.train.options import EvalOptions
from resolute.train.run_folder import existing_run
from resolute.train.score import METRICS, UNRELATED, Metric, shown_metrics
from resolute.train.validation import Validation, score_batch

from .saved_run import (
    SavedRun,
    left_out_note,
    open_eval_set,
    open_saved_run,
    related_to_training,
    training_overlap,
    validation_loader,
)

__all__ = ["evaluate", "main"]


def evaluate(
    saved: SavedRun,
    shards: ShardSet,
    resolutions: list[int],
    *,
    device: torch.device,
    threads: int,
    flip: bool = False,
    split: str = "val",
    related: NDArray[np.bool_] | None = None,
) -> list[dict[str, Any]]:
    """One row per resolution (px) and kind of weights: {"res", "weights", metrics …, "samples", "details"}.

    The metrics are those of the set's kind (`score.METRICS`), fractions in 0 to 1; `details` is as in
    `Validation.finish`. Every sample of the split counts once. With `related` (N,), from `related_to_training`, rows
    have the deciding metric of the other samples too, such as "top1_unrelated", and their number: "samples_unrelated".
    Raises `ResoluteError` if the targets differ from the
    run's or the shards are stored at too low a resolution.
    """
    saved.head.check_fits(shards.target, shards.root, str(saved.path), advice="use a set with these")
    networks = {which: saved.network(which, device, resolutions=resolutions) for which in saved.weights}
    validations = [Validation(saved.head, related=related) for _ in resolutions]
    with validation_loader(saved, shards, resolutions, split=split, device=device, threads=threads) as loader:
        for batch in loader:
            outputs: dict[str, torch.Tensor] = {
                which: eval_logits(network, batch.images, saved.recipe.precision, flip=flip)
                for which, network in networks.items()
            }
            scores = score_batch(saved.head, outputs, batch.targets)
            validations[batch.spec.stage].add(scores, global_size=batch.spec.global_size)
    rows = []
    for res, validation in zip(resolutions, validations, strict=True):
        metrics, details = validation.finish()
        for which in networks:
            prefix = "" if which == "raw" else "ema_"
            reported = METRICS[saved.head.target.kind]
            reported += () if related is None else (reported[0].unrelated,)
            values = {metric.key: metrics[prefix + metric.key] for metric in reported}
            counts = {"samples": validation.samples}
            if related is not None:
                counts["samples_unrelated"] = int((~related).sum())
            rows.append({"res": res, "weights": which, **values, **counts, "details": details[which]})
    return rows


def main(args: EvalOptions) -> None:
    """Run the command."""
    saved = open_saved_run(existing_run(args.run))
    path = args.json or saved.path.parent / "eval.json"
    check_output(path, setting="--json", suffixes=(".json",), named=args.json is not None)
    res = args.res or (saved.res,)
    shards = open_eval_set(args.shards, saved, fold=args.fold)
    device, flip = pick_device(args.device, threads=args.threads), args.flip or saved.recipe.eval.flip
    related = related_to_training(saved, shards, split=args.split, fold=args.fold)
    rows = evaluate(
        saved, shards, list(res), device=device, threads=args.threads, flip=flip, split=args.split, related=related
    )
    overlap = training_overlap(saved, shards, split=args.split, fold=args.fold)
    about = {
        "checkpoint": str(saved.path),
        "step": saved.step,
        "recipe_hash": saved.recipe.hash,
        "shards": shards.hash,
        "split": args.split,
        "flip": flip,
        "note": overlap,
    }
    with output_file(path) as file:
        file.write((json.dumps({**about, "rows": rows}, indent=1) + "\n").encode())
    print(
        f"{saved.path} (step {saved.step}), {counted(rows[0]['samples'], 'sample')} of {shards.root}, {args.split}, "
        f"flip {'on' if flip else 'off'}"
    )
    target = saved.head.target
    metrics = shown_metrics(target.kind, outputs=len(target), units=target.units)
    unrelated = None
    if related is not None:
        metrics += (metrics[0].unrelated,)
        count = f"{rows[0]['samples_unrelated']:,} of {rows[0]['samples']:,}"
        unrelated = f"{metrics[-1].title}: of the {count} photos {UNRELATED} of the run"
    print("  res  weights " + " ".join(metric.title.rjust(_width(metric)) for metric in metrics))
    for row in rows:
        values = (_number(metric, row[metric.key]) for metric in metrics)
        print(f"{row['res']:5d}  {row['weights']:7s} {' '.join(values)}")
    for line in _table(rows[-1]["details"]):
        print(line)
    for note in filter(None, (unrelated, overlap, left_out_note(shards))):
        print(f"note: {note}")
    print(path)


def _width(metric: Metric) -> int:
    return max(7, len(metric.title)) if metric.percent else 10


def _number(metric: Metric, value: float | None) -> str:
    text = "-" if value is None else f"{100 * value:.3f}" if metric.percent else f"{value:.5g}"
    return text.rjust(_width(metric))


def _table(details: dict[str, Any]) -> list[str]:
    """Lines of the metrics of each value; none for classes and labels, whose tables are in the JSON file."""

    def number(value: float | None, digits: str) -> str:
        return "-" if value is None else f"{value:{digits}}"  # None: not finite

    return [
        f"  {column['name']}: MAE {number(column['mae'], '.5g')}, RMSE {number(column['rmse'], '.5g')}"
        f"{column['unit'] and ' '}{column['unit']}, R² {number(column['r2'], '.4f')}"
        for column in details.get("columns", ())
    ]
