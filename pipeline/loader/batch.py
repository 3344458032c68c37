"""`Batch`: the images of a batch with their targets, as a training loop gets them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from resolute.errors import ResoluteError, check
from resolute.pipeline.plan.plan import BatchSpec

__all__ = ["Batch"]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A batch on its device; N is the local batch size. The tensors stay valid as long as they are referenced."""

    # (N, 3, res, res) in channels_last memory: normalised float32, float16 or bfloat16; or uint8, not normalised
    images: torch.Tensor
    # By the kind of the set's `Target`; class: (N,) int64, see `labels`. labels: (N, C) float32 in 0..1, values:
    # (N, D) float32, both already mixed: lam times the sample's own target plus 1 - lam times the partner's. Labels
    # that are ignored (see `Target`) are -1, mixed ones if either image ignores them: leave them out of the loss.
    targets: torch.Tensor
    partner_labels: torch.Tensor  # class: (N,) int64, label of the image mixed in, or the own one; else: (0,) int64
    lam: torch.Tensor  # (N,) float32: weight of the sample's own image and target; that of the partner is 1 - lam
    keys: NDArray[np.int64]  # (N,): key of each sample in its set, which names its files in the tars
    spec: BatchSpec

    def __repr__(self) -> str:
        return f"Batch{repr(self.spec).removeprefix('BatchSpec')}, {self.images.device}"

    @property
    def labels(self) -> torch.Tensor:
        """(N,) int64: the class of each sample. Raises `ResoluteError` unless the set's targets are classes."""
        if self.targets.dim() > 1:
            raise ResoluteError(
                "Batch.labels: got a set whose targets are several labels or values, expected one class per sample; "
                "use Batch.targets"
            )
        return self.targets

    def soft_targets(self, classes: int, smoothing: float = 0.0) -> torch.Tensor:
        """(N, `classes`) float32: the class probabilities that the images show, for a loss such as cross-entropy.

            loss = cross_entropy(model(batch.images), batch.soft_targets(classes, smoothing=0.1))

        `lam` for the own label plus 1 - `lam` for the partner's; `smoothing`, from 0 to 1, is the part that is spread
        over all classes, as torch's `label_smoothing`. Labels and values, which are mixed already, are returned as they
        are, for losses such as binary cross-entropy and the squared error (ignored labels as -1, see `targets`);
        `smoothing` of them raises `ResoluteError`.
        """
        check(0 <= smoothing <= 1, "smoothing", smoothing, "0 to 1")
        if self.targets.dim() > 1 and not smoothing:
            return self.targets
        labels = self.labels
        soft = torch.full((len(labels), classes), smoothing / classes, dtype=torch.float32, device=labels.device)
        for label, share in ((labels, self.lam), (self.partner_labels, 1 - self.lam)):
            soft.scatter_add_(1, label[:, None], (1 - smoothing) * share[:, None])
        return soft
