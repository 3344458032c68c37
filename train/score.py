"""The metrics of a validation by kind of target, as named in run.jsonl, and the one that decides which epoch is best.

Every metric is better if it is higher, or does not decide. Those of averaged weights have the prefix `ema_`. The first
metric has a second value with the suffix `_unrelated`, if the set has related photos: that of the validation photos
without a near copy or group-mate among the training photos. It does not decide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

__all__ = [
    "METRICS",
    "UNRELATED",
    "Metric",
    "best_score",
    "main_metric",
    "shown_metrics",
    "unrelated_photos",
    "unrelated_score",
    "with_interval",
]

UNRELATED = "without a near copy or group-mate among the training photos"  # which validation photos these are


@dataclass(frozen=True, kw_only=True)
class Metric:
    """`key` in records, `title` for people; fractions are shown in percent. `counted`: a fraction of the samples."""

    key: str
    title: str
    percent: bool = False
    counted: bool = False

    def text(self, value: float, samples: int = 0) -> str:
        """`value` for people; if `counted`, with ± half the 95 % interval of `samples` (0: not known)."""
        if not self.percent:
            return f"{value:.4g}"
        return f"{with_interval(value, samples) if self.counted else f'{100 * value:.2f}'} %"

    @property
    def head(self) -> str:
        """The title of a column of values without unit: "top-1 %"."""
        return f"{self.title} %" if self.percent else self.title

    @property
    def scale(self) -> float:
        return 100.0 if self.percent else 1.0

    @property
    def unrelated(self) -> Metric:
        """This metric of the `UNRELATED` validation photos: "top1_unrelated", "top-1 unrelated"."""
        return replace(self, key=f"{self.key}_unrelated", title=f"{self.title} unrelated")


# by kind of target; the first decides
METRICS: Mapping[str, tuple[Metric, ...]] = {
    "class": (
        Metric(key="top1", title="top-1", percent=True, counted=True),
        Metric(key="top5", title="top-5", percent=True, counted=True),
    ),
    "labels": (
        Metric(key="mAP", title="mAP", percent=True),
        Metric(key="f1_micro", title="micro F1", percent=True),
        Metric(key="f1_macro", title="macro F1", percent=True),
    ),
    # why R² decides: it has no unit, so that it can be averaged over columns
    "values": (Metric(key="r2", title="R²"), Metric(key="rmse", title="RMSE"), Metric(key="mae", title="MAE")),
}


_FEWEST_FOR_TOP5 = 10  # classes: with fewer, more than half of all guesses would be right


def shown_metrics(kind: str, *, outputs: int, units: Sequence[str] = ()) -> tuple[Metric, ...]:
    """The metrics of a kind of target that tell something about `outputs` classes or values.

    Without top-5 for fewer than ten classes. Without RMSE and MAE over several values that have no unit, or different
    ones: their mean would mix units.
    """
    metrics = METRICS[kind]
    if kind == "class" and outputs < _FEWEST_FOR_TOP5:
        return metrics[:1]
    has_one_unit = outputs == 1 or (len({*units}) == 1 and all(units))
    return metrics[:1] if kind == "values" and not has_one_unit else metrics


def with_interval(fraction: float, samples: int) -> str:
    """A fraction of `samples` in percent, such as "90.91 ± 7.72": with half of Wilson's 95 % interval."""
    if not samples:
        return f"{100 * fraction:.2f}"
    z2 = 1.96**2
    half = math.sqrt(z2 * (fraction * (1 - fraction) + z2 / (4 * samples)) / samples) / (1 + z2 / samples)
    return f"{100 * fraction:.2f} ± {100 * half:.2f}"


def main_metric(epoch: Mapping[str, Any]) -> Metric:
    """The metric that decides, of an epoch's record."""
    return next(metrics[0] for metrics in METRICS.values() if metrics[0].key in epoch)


def best_score(epoch: Mapping[str, Any]) -> float | None:
    """The better deciding metric of raw and averaged weights; None without a validation, or if neither is finite."""
    key = main_metric(epoch).key
    scores = [epoch[name] for name in (key, f"ema_{key}") if epoch[name] is not None]
    return max(filter(math.isfinite, scores), default=None)


def unrelated_score(epoch: Mapping[str, Any]) -> float | None:
    """The deciding metric of the `UNRELATED` photos, with the weights of `best_score`; None if it is not known."""
    metric = main_metric(epoch)
    prefix = "" if epoch[metric.key] is not None and epoch[metric.key] == best_score(epoch) else "ema_"
    score: float | None = epoch.get(prefix + metric.unrelated.key)
    return score


def unrelated_photos(start: Mapping[str, Any]) -> int:
    """The number of `UNRELATED` photos, from a log's first record; 0 if no photo is related, or all are."""
    return start["val_samples"] - start["val_related"] if start.get("val_related") else 0
