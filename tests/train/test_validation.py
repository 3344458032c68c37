"""The metrics of a validation equal their definitions, whatever the batches and the number of ranks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from resolute.pipeline.dataset.target import Target
from resolute.pipeline.plan.batching import rank_bounds
from resolute.train.devices.distributed import Ranks
from resolute.train.model.outputs import Outputs
from resolute.train.score import METRICS
from resolute.train.validation import Validation, metrics_of, score_batch

N, C = 57, 5


def average_precision_oracle(scores: np.ndarray, positives: np.ndarray) -> float:
    """Sum over distinct thresholds of (increase of recall) * precision."""
    ap = recall = 0.0
    for threshold in sorted(set(scores.tolist()), reverse=True):
        taken = scores >= threshold
        now = (taken & positives).sum() / positives.sum()
        ap += (now - recall) * (taken & positives).sum() / taken.sum()
        recall = now
    return ap


def best_f1_oracle(scores: np.ndarray, positives: np.ndarray) -> float:
    return max(2 * ((scores >= t) & positives).sum() / ((scores >= t).sum() + positives.sum()) for t in scores)


class OneOf(Ranks):
    """A rank whose partners' tensors are known in advance: `sum` returns what all ranks together would have."""

    def __init__(self, rank: int, world_size: int, others: list[list[torch.Tensor]]) -> None:
        super().__init__(rank=rank, world_size=world_size)
        self.others, self.calls, self.own = others, 0, list[torch.Tensor]()

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        self.own.append(values.clone())
        for other in self.others:
            values = values + other[self.calls]
        self.calls += 1
        return values

    def broadcast(self, value: Any) -> Any:
        return value


def outcome(
    head: Outputs,
    outputs: torch.Tensor,
    targets: torch.Tensor,
    *,
    batch: int,
    world_size: int,
    related: np.ndarray | None = None,
) -> Any:
    """Metrics and details of rank 0, with batches of `batch` samples over `world_size` ranks."""
    parts: list[list[torch.Tensor]] = []
    for rank in reversed(range(world_size)):
        ranks = OneOf(rank, world_size, parts if rank == 0 else [])
        validation = Validation(head, ranks=ranks, related=related)
        for start in range(0, len(outputs), batch):
            end = min(start + batch, len(outputs))
            low, high = rank_bounds(start, end, rank=rank, world_size=world_size, pairs=False)
            scores = score_batch(head, {"raw": outputs[low:high]}, targets[low:high])
            validation.add(scores, global_size=end - start)
        result = validation.finish()
        parts.append(ranks.own)
    return result


CLASS = Outputs(target=Target(kind="class", names=tuple("abcde")), loss="ce")
MANY = Outputs(target=Target(kind="labels", names=(*"abcd", "never")), loss="bce")
VALUES = Outputs(
    target=Target(kind="values", names=("x", "y"), units=("m", "")), loss="mse", mean=(3.0, -1e3), std=(2.0, 50.0)
)


def of_kind(head: Outputs) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    outputs = torch.randn(N, len(head.target), generator=generator)
    if head is CLASS:
        return outputs, torch.randint(0, C, (N,), generator=generator)
    if head is MANY:
        targets = (torch.rand(N, C, generator=generator) < torch.tensor([0.1, 0.3, 0.5, 0.9, 0.0])).float()
        return outputs.round(decimals=1), targets  # with equal scores
    mean, std = head.scale(torch.device("cpu"))
    return outputs, (outputs + 0.5 * torch.randn(N, 2, generator=generator)) * std + mean


@pytest.mark.parametrize("head", [CLASS, MANY, VALUES], ids=lambda head: head.target.kind)
def test_ranks_and_batches_do_not_change_any_metric(head: Outputs) -> None:
    outputs, targets = of_kind(head)
    metrics, details = outcome(head, outputs, targets, batch=N, world_size=1)
    for batch, world_size in ((10, 1), (10, 3)):
        got, more = outcome(head, outputs, targets, batch=batch, world_size=world_size)
        assert more == details
        for name, value in metrics.items():
            assert got[name] == (None if value is None else pytest.approx(value, rel=1e-6))
            if value is not None and name != "eval_loss":
                assert got[name] == value


@pytest.mark.parametrize("head", [CLASS, MANY, VALUES], ids=lambda head: head.target.kind)
def test_the_unrelated_metric_is_that_of_the_other_samples_alone(head: Outputs) -> None:
    outputs, targets = of_kind(head)
    related = np.random.default_rng(2).random(N) < 0.4
    metrics, details = outcome(head, outputs, targets, batch=10, world_size=3, related=related)
    plain, plain_details = outcome(head, outputs, targets, batch=10, world_size=3)
    kept = torch.from_numpy(~related)
    alone, _ = outcome(head, outputs[kept], targets[kept], batch=10, world_size=1)
    key = METRICS[head.target.kind][0].key
    assert metrics.pop(f"{key}_unrelated") == pytest.approx(alone[key], rel=1e-12)
    assert metrics.pop(f"ema_{key}_unrelated") is None  # there are no averaged weights
    assert (metrics, details) == (plain, plain_details)
    everything = outcome(head, outputs, targets, batch=10, world_size=1, related=np.ones(N, np.bool_))[0]
    assert everything[f"{key}_unrelated"] is None


def test_the_metrics_of_classes_equal_a_count() -> None:
    outputs, labels = of_kind(CLASS)
    metrics, details = outcome(CLASS, outputs, labels, batch=16, world_size=2)
    predicted = outputs.argmax(1)
    assert metrics["top1"] == (predicted == labels).sum().item() / N
    matrix = [[int(((labels == i) & (predicted == j)).sum()) for j in range(C)] for i in range(C)]
    raw = details["raw"]
    assert raw["confusion"] == {"classes_per_cell": 1, "counts": matrix}
    assert [row["accuracy"] for row in raw["classes"]] == [row[i] / sum(row) for i, row in enumerate(matrix)]
    assert sum(pair["count"] for pair in raw["confused"]) == int((predicted != labels).sum())
    assert [pair["count"] for pair in raw["confused"]] == sorted((p["count"] for p in raw["confused"]), reverse=True)
    names = CLASS.target.names
    for pair in raw["confused"]:
        assert {(names[labels[sample]], names[predicted[sample]]) for sample in pair["samples"]} == {
            (pair["label"], pair["predicted"])
        }


def test_the_metrics_of_labels_equal_their_definitions() -> None:
    logits, targets = of_kind(MANY)
    metrics, details = outcome(MANY, logits, targets, batch=16, world_size=2)
    scores, positives = logits.numpy(), targets.numpy() > 0
    aps = [average_precision_oracle(scores[:, c], positives[:, c]) for c in range(4)]
    assert metrics["mAP"] == pytest.approx(np.mean(aps), abs=1e-12)  # without the class that has no positives
    taken = 1 / (1 + np.exp(-scores.astype(np.float64))) >= 0.5
    f1 = [2 * (taken & positives)[:, c].sum() / (taken[:, c].sum() + positives[:, c].sum()) for c in range(4)]
    assert metrics["f1_macro"] == pytest.approx(np.mean(f1), abs=1e-7)
    both = 2 * (taken & positives).sum() / (taken.sum() + positives.sum())
    assert metrics["f1_micro"] == pytest.approx(both, abs=1e-7)
    rows = details["raw"]["classes"]
    assert [row["ap"] for row in rows[:4]] == pytest.approx(aps)
    for c, row in enumerate(rows[:4]):
        assert row["best_f1"] == pytest.approx(best_f1_oracle(scores[:, c], positives[:, c]))
        above = 1 / (1 + np.exp(-scores[:, c])) >= row["threshold"] - 1e-6
        assert row["best_f1"] == pytest.approx(2 * (above & positives[:, c]).sum() / (above.sum() + row["samples"]))
    assert rows[4] == {"name": "never", "samples": 0, "ap": None, "f1": None, "best_f1": None, "threshold": None}


@pytest.mark.parametrize("world_size", [1, 3])
def test_ignored_labels_are_left_out_of_all_metrics(world_size: int) -> None:
    logits, targets = of_kind(MANY)
    targets[torch.rand(N, C, generator=torch.Generator().manual_seed(2)) < 0.4] = -1.0
    targets[:16] = -1.0  # a batch without any label that counts
    metrics, details = outcome(MANY, logits, targets, batch=16, world_size=world_size)
    rows, aps, hits, sizes = details["raw"]["classes"], [], [], []
    for c in range(4):
        counted = (targets[:, c] >= 0).numpy()
        scores, positives = logits[:, c].numpy()[counted], targets[:, c].numpy()[counted] > 0
        taken = scores >= 0
        aps.append(average_precision_oracle(scores, positives))
        hits.append(2 * (taken & positives).sum())
        sizes.append(taken.sum() + positives.sum())
        assert rows[c]["samples"] == positives.sum()
        assert rows[c]["ap"] == pytest.approx(aps[-1])
        assert rows[c]["best_f1"] == pytest.approx(best_f1_oracle(scores, positives))
        above = 1 / (1 + np.exp(-scores)) >= rows[c]["threshold"] - 1e-6
        assert rows[c]["best_f1"] == pytest.approx(2 * (above & positives).sum() / (above.sum() + positives.sum()))
    assert metrics["mAP"] == pytest.approx(np.mean(aps), abs=1e-12)
    assert metrics["f1_macro"] == pytest.approx(np.mean([hit / size for hit, size in zip(hits, sizes, strict=True)]))
    counted = (targets >= 0).numpy()
    p = 1 / (1 + np.exp(-logits.double().numpy()[counted]))
    loss = -np.where(targets.numpy()[counted] > 0, np.log(p), np.log(1 - p)).mean()
    assert metrics["eval_loss"] == pytest.approx(loss, rel=1e-5)
    never = (((logits >= 0) & (targets >= 0))[:, 4]).sum().item()
    assert metrics["f1_micro"] == pytest.approx(sum(hits) / (sum(sizes) + never))
    assert metrics_of(MANY, logits.sigmoid(), targets)["mAP"] == pytest.approx(metrics["mAP"], abs=1e-6)


def test_the_metrics_of_values_are_in_their_units() -> None:
    outputs, targets = of_kind(VALUES)
    metrics, details = outcome(VALUES, outputs, targets, batch=16, world_size=2)
    predicted = outputs.double().numpy() * [2.0, 50.0] + [3.0, -1e3]
    error = predicted - targets.double().numpy()
    r2 = 1 - (error**2).sum(0) / ((targets.double().numpy() - targets.double().numpy().mean(0)) ** 2).sum(0)
    assert metrics["r2"] == pytest.approx(r2.mean(), rel=1e-4)
    assert metrics["rmse"] == pytest.approx(np.sqrt((error**2).mean(0)).mean(), rel=1e-4)
    assert metrics["mae"] == pytest.approx(np.abs(error).mean(0).mean(), rel=1e-4)
    assert [(column["name"], column["unit"]) for column in details["raw"]["columns"]] == [("x", "m"), ("y", "")]
    assert sum(details["raw"]["columns"][0]["errors"]["counts"]) == N


def test_a_single_large_error_does_not_widen_the_bins_of_the_others() -> None:
    outputs, targets = of_kind(VALUES)
    targets[0, 0] += 1e6
    columns = outcome(VALUES, outputs, targets, batch=16, world_size=1)[1]["raw"]["columns"]
    for column, outside in zip(columns, (1, 0), strict=True):
        errors = column["errors"]
        assert (sum(errors["counts"]), errors["outside"]) == (N - outside, outside)
        assert sum(count > 0 for count in errors["counts"]) > 10
    few = torch.full((3, 2), 1.0)  # of so few, none is left out
    errors = outcome(VALUES, few, torch.zeros(3, 2), batch=3, world_size=1)[1]["raw"]["columns"][0]["errors"]
    assert (sum(errors["counts"]), errors["outside"]) == (3, 0)


def test_a_metric_that_is_not_finite_is_none() -> None:
    outputs, targets = of_kind(VALUES)
    metrics, _ = outcome(VALUES, torch.full_like(outputs, math.nan), targets, batch=16, world_size=1)
    assert {metrics[name] for name in ("r2", "rmse", "mae", "eval_loss")} == {None}
    assert set(Validation(CLASS).finish()[0].values()) == {None}
