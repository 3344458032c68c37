"""The metrics of a validation, exact over batches and ranks, for each kind of target.

Each batch leaves sums and, per sample, what the metrics need of it, on the device and without a sync (`score_batch`).
At its end these are put together in the order of the samples (`Validation`), so the results do not depend
on the number of ranks. Pairs of a sample and a label that the set ignores, whose target is -1, are left out of all
metrics. Memory: 8 bytes per sample and weights for classes, 4 C or 4 D for labels and values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.train.devices.distributed import Ranks
from resolute.train.model.outputs import Outputs
from resolute.train.score import METRICS

__all__ = ["BatchScores", "Validation", "average_precision", "metrics_of", "related_photos", "score_batch"]

Details = tuple[dict[str, float], dict[str, Any]]  # metrics, and what the report and eval.json show

_COLUMNS = 64  # labels sorted at a time
_CELLS = 100  # rows and columns of the confusion matrix at most; more classes are put together
_PAIRS = 50  # most confused pairs kept
_EXAMPLES = 3  # samples kept of each
_POINTS = 1000  # of the scatter of each value
_BINS = 40  # of the histogram of its errors


@dataclass(frozen=True, kw_only=True)
class BatchScores:
    """Of a batch, by the name of the weights: `sums` float64, see `score_batch`, and `outputs` per sample.

    `outputs` and `targets`: (N,) int64, predicted and true class; (N, C) float32 logits and int8; or (N, D) float32
    in the units of the table.
    """

    sums: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]
    targets: torch.Tensor


@torch.inference_mode()
def score_batch(head: Outputs, outputs: Mapping[str, torch.Tensor], targets: torch.Tensor) -> BatchScores:
    """Score the `outputs` (N, C or D) float32 of each network against `Batch.targets` (no sync).

    The sums: class: hits of top-1 and of top-5, cross-entropy; labels: binary cross-entropy of the labels that are not
    ignored and their number, both divided by C; values: squared error in standard deviations of the training split,
    mean over the values.
    """
    sums, kept = {}, {}
    for name, out in outputs.items():
        if head.target.kind == "class":
            ranked = out.topk(min(5, out.shape[1]), dim=1).indices
            hits = ranked == targets[:, None]
            loss = functional.cross_entropy(out, targets, reduction="sum")
            sums[name] = torch.stack([value.double() for value in (hits[:, 0].sum(), hits.sum(), loss)])
            kept[name] = ranked[:, 0]
        elif head.target.kind == "labels":
            losses = functional.binary_cross_entropy_with_logits(out, targets, reduction="none")
            loss = losses.masked_fill(targets < 0, 0.0).mean(1).double().sum()
            sums[name], kept[name] = torch.stack([loss, (targets >= 0).sum().double() / len(head.target)]), out
        else:
            mean, std = head.scale(out.device)
            losses = (out - (targets - mean) / std) ** 2
            sums[name], kept[name] = losses.mean(1).double().sum()[None], head.predictions(out)
    targets = targets.to(torch.int8) if head.target.kind == "labels" else targets
    return BatchScores(sums=sums, outputs=kept, targets=targets)


def related_photos(shards: ShardSet) -> NDArray[np.bool_] | None:
    """(N,) which validation samples have a near copy or group-mate in the training split; None if none has."""
    related = shards.splits["val"].related(shards.splits["train"])
    return related if related.any() else None


class Validation:
    """Collects the scores of one validation, then computes its metrics.

    `related` (N,), in the order of the split: samples without which the deciding metric is computed a second time.
    """

    def __init__(self, head: Outputs, *, ranks: Ranks | None = None, related: NDArray[np.bool_] | None = None) -> None:
        self._head, self._ranks = head, ranks or Ranks()
        self._kept = None if related is None else torch.from_numpy(np.flatnonzero(~related))
        self.start()

    def start(self) -> None:
        """Forget everything, for the first batch of a validation."""
        self.samples = 0  # over all ranks
        self._sums: dict[str, torch.Tensor] = {}
        self._parts: list[tuple[int, BatchScores]] = []  # with the place of the first sample in the validation

    def add(self, scores: BatchScores, *, global_size: int) -> None:
        """Take this rank's part of a batch of `global_size` samples (no sync)."""
        first = self.samples + self._ranks.rank * global_size // self._ranks.world_size  # as `batching.rank_bounds`
        self._parts.append((first, scores))
        for name, sums in scores.sums.items():
            self._sums[name] = self._sums[name] + sums if name in self._sums else sums
        self.samples += global_size

    def finish(self) -> tuple[dict[str, float | None], dict[str, dict[str, Any]]]:
        """The metrics, as in the log, and on rank 0 the details by weights, see `_DETAILS`.

        A collective operation: all ranks call it. A metric that is not finite is None; without a validation all are,
        and there are no details.
        """
        kind, samples = self._head.target.kind, self.samples
        keys = {"class": ("top1", "top5", "eval_loss")}.get(kind, ("eval_loss",))
        metrics: dict[str, float | None] = {}
        details: dict[str, dict[str, Any]] = {}
        unrelated = METRICS[kind][0].unrelated.key
        names = [*(metric.key for metric in METRICS[kind]), *[unrelated] * (self._kept is not None), "eval_loss"]
        for weights, prefix in (("raw", ""), ("ema", "ema_")):
            values: dict[str, float] = {}
            if weights in self._sums:
                sums = self._ranks.sum(self._sums[weights].clone()).tolist()  # sync: the validation is over
                counted = sums.pop() if kind == "labels" else samples
                values = {key: value / (counted or 1.0) for key, value in zip(keys, sums, strict=True)}
                outputs, targets = self._whole(weights)
                if self._ranks.is_main:
                    more, details[weights] = _DETAILS[kind](self._head, outputs, targets)
                    values |= more
                    if self._kept is not None and len(self._kept):
                        kept = self._kept.to(outputs.device)
                        values[unrelated] = _deciding(self._head, outputs[kept], targets[kept])
            metrics |= {f"{prefix}{name}": _finite(values.get(name)) for name in names}
        return self._ranks.broadcast(metrics), details

    def _whole(self, weights: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and targets of all samples of the validation, over all ranks, in the order of the split."""
        whole = []
        for pick in (lambda scores: scores.outputs[weights], lambda scores: scores.targets):
            example = pick(self._parts[0][1])
            # why a sum: each row comes from one rank, and adding zeros to it is exact
            rows = torch.zeros(self.samples, *example.shape[1:], dtype=example.dtype, device=example.device)
            for first, scores in self._parts:
                part = pick(scores)
                rows[first : first + len(part)] = part
            whole.append(self._ranks.sum(rows))
        return whole[0], whole[1]


def _deciding(head: Outputs, outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """The first of the kind's metrics, of `BatchScores.outputs` and `BatchScores.targets`."""
    kind = head.target.kind
    if kind == "class":
        return int((outputs == targets).sum()) / len(targets)
    return _DETAILS[kind](head, outputs, targets)[0][METRICS[kind][0].key]


def metrics_of(head: Outputs, predictions: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    """The metrics of labels or values, from predictions (N, C or D) as `Outputs.predictions` and `Batch.targets`."""
    if head.target.kind == "labels":
        return _label_details(head, predictions - 0.5, targets.to(torch.int8))[0]
    return _value_details(head, predictions, targets)[0]


def _finite(value: float | None) -> float | None:
    return value if value is not None and abs(value) < float("inf") else None


def average_precision(scores: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Average precision, best F1 and the score from which on a sample counts as positive for it, each (C,) float64.

    `scores` (N, C) float32, `targets` (N, C) int8: 1, 0, or -1 for a sample that does not count for the class. Average
    precision is the sum over thresholds of precision times the increase of recall, as
    sklearn.metrics.average_precision_score: equal scores count as one threshold. All are NaN for a class without
    positives.
    """
    n = len(scores)
    # why: at the end of the order, they are after all thresholds
    values, order = scores.masked_fill(targets < 0, -torch.inf).sort(dim=0, descending=True)
    sorted_targets = targets.gather(0, order)
    true = (sorted_targets > 0).double().cumsum(0)
    taken = (sorted_targets >= 0).double().cumsum(0)
    # the last place of each group of equal scores: the places where a threshold can be
    is_end = torch.ones_like(values, dtype=torch.bool)
    is_end[:-1] = values[:-1] != values[1:]
    places = torch.arange(n, device=scores.device)[:, None].expand_as(values)
    end = torch.where(is_end, places, n - 1).flip(0).cummin(0).values.flip(0)
    total = true[-1]
    precision = (true / taken).gather(0, end)
    ap = (precision * (sorted_targets > 0)).sum(0) / total
    f1 = torch.where(is_end & (sorted_targets >= 0), 2 * true / (taken + total), -1.0)
    best, at = f1.max(dim=0)
    threshold = values.gather(0, at[None])[0].double()
    unknown = total == 0
    return (*(torch.where(unknown, torch.nan, result) for result in (ap, best, threshold)),)  # type: ignore[return-value]


def _class_details(head: Outputs, predicted: torch.Tensor, labels: torch.Tensor) -> Details:
    """Per class its samples and hits; the confusion matrix, of groups of adjacent classes if there are many; and the
    most confused pairs with samples of each."""
    predicted, labels = predicted.cpu(), labels.cpu()
    names = head.target.names or tuple(map(str, range(1 + int(max(labels.max(), predicted.max())))))
    classes = len(names)
    counts = torch.bincount(labels, minlength=classes)
    hits = torch.bincount(labels[labels == predicted], minlength=classes)
    group = -(-classes // _CELLS)
    cells = -(-classes // group)
    matrix = torch.bincount(labels // group * cells + predicted // group, minlength=cells * cells).view(cells, cells)
    wrong = (labels != predicted).nonzero()[:, 0]
    pairs, number = torch.unique(labels[wrong] * classes + predicted[wrong], return_counts=True)
    first = torch.argsort(number, descending=True, stable=True)[:_PAIRS]
    confused = []
    for pair, count in zip(pairs[first].tolist(), number[first].tolist(), strict=True):
        label, taken_for = divmod(pair, classes)
        examples = ((labels == label) & (predicted == taken_for)).nonzero()[:_EXAMPLES, 0].tolist()
        confused.append({"label": names[label], "predicted": names[taken_for], "count": count, "samples": examples})
    return {}, {
        "classes": [
            {"name": name, "samples": samples, "accuracy": hit / samples if samples else None}
            for name, samples, hit in zip(names, counts.tolist(), hits.tolist(), strict=True)
        ],
        "confusion": {"classes_per_cell": group, "counts": matrix.tolist()},
        "confused": confused,
    }


def _label_details(head: Outputs, logits: torch.Tensor, targets: torch.Tensor) -> Details:
    """Per class its positives, average precision, F1 at 0.5, and best F1 with its threshold (a probability).

    `targets` as in `average_precision`.
    """
    parts = [
        average_precision(logits[:, at : at + _COLUMNS], targets[:, at : at + _COLUMNS])
        for at in range(0, logits.shape[1], _COLUMNS)
    ]
    ap, best, threshold = (torch.cat(columns).cpu() for columns in zip(*parts, strict=True))
    predicted = (logits >= 0) & (targets >= 0)  # a probability of at least 0.5
    true = (predicted & (targets > 0)).sum(0).cpu()
    taken, total = predicted.sum(0).cpu(), (targets > 0).sum(0).cpu()
    f1 = 2 * true / (taken + total)
    known = total > 0
    metrics = {
        "mAP": float(ap[known].mean()),
        "f1_micro": float(2 * true.sum() / (taken + total).sum()),
        "f1_macro": float(f1[known].double().mean()),
    }
    columns = zip(
        head.target.names,
        total.tolist(),
        ap.tolist(),
        f1.tolist(),
        best.tolist(),
        threshold.sigmoid().tolist(),
        strict=True,
    )
    keys = ("ap", "f1", "best_f1", "threshold")
    return metrics, {
        "classes": [
            {"name": name, "samples": count, **dict(zip(keys, values if count else [None] * 4, strict=True))}
            for name, count, *values in columns
        ]
    }


def _value_details(head: Outputs, predicted: torch.Tensor, true: torch.Tensor) -> Details:
    """Metrics and details of each column: MAE and RMSE in its unit, R² (1 - squared error / variance, as
    sklearn.metrics.r2_score), points for a scatter plot, and a histogram of the errors.

    The metrics are means over the columns, that of R² over those that are not constant in the split, if any.
    """
    predicted, true = predicted.double().cpu(), true.double().cpu()
    errors = predicted - true
    mae, rmse = errors.abs().mean(0), (errors**2).mean(0).sqrt()
    variance = ((true - true.mean(0)) ** 2).mean(0)
    varies = variance > 0
    # of a constant column, as in sklearn: 1 if it is predicted exactly, else 0
    r2 = torch.where(varies, 1 - rmse**2 / variance, (rmse == 0).double())
    mean_r2 = r2[varies].mean() if bool(varies.any()) else r2.mean()
    every = -(-len(true) // _POINTS)
    columns = []
    for d, name in enumerate(head.target.names):
        counts, edges, outside = _histogram(errors[:, d])
        columns.append(
            {
                "name": name,
                "unit": (head.target.units or ("",) * len(head.target))[d],
                "mae": _finite(float(mae[d])),
                "rmse": _finite(float(rmse[d])),
                "r2": _finite(float(r2[d])),
                "points": [
                    [*pair]
                    for pair in zip(
                        true[::every, d].tolist(), map(_finite, predicted[::every, d].tolist()), strict=True
                    )
                ],
                "errors": {"counts": counts, "edges": edges, "outside": outside},
            }
        )
    return {"r2": float(mean_r2), "rmse": float(rmse.mean()), "mae": float(mae.mean())}, {"columns": columns}


def _histogram(errors: torch.Tensor) -> tuple[list[int], list[float], int]:
    """Counts and edges of the finite `errors` (N,) float64, and how many lie outside.

    The edges span the range without the lowest and highest hundredth, and without one of five errors or more at each
    end. Half of it more is added at each end. A single large error would leave all others in one bin.
    """
    ordered = errors[errors.isfinite()].sort().values
    if not len(ordered):
        return [], [], 0
    cut = max(len(ordered) // 100, int(len(ordered) >= 5))
    inner_low, inner_high = float(ordered[cut]), float(ordered[-1 - cut])
    margin = (inner_high - inner_low) / 2
    low, high = max(float(ordered[0]), inner_low - margin), min(float(ordered[-1]), inner_high + margin)
    counts, edges = torch.histogram(ordered, _BINS, range=(low, high))
    inside = int(counts.sum())
    return counts.to(torch.int64).tolist(), edges.tolist(), len(ordered) - inside


_DETAILS = {"class": _class_details, "labels": _label_details, "values": _value_details}
