"""What does a teacher say? Knowledge distillation from a trained network that sees the same images."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pipeline.errors import ResoluteError
from train.recipe.schema import Data, Distill, Model

from .models import build_model

__all__ = ["Teacher", "build_teacher", "distilled"]


def build_teacher(
    distill: Distill, data: Data, *, classes: int, channels_last: bool, device: torch.device,
    resolutions: Collection[int] = (),
) -> Teacher | None:  # fmt: skip
    """The recipe's teacher, or None. Raises `ResoluteError` as `build_model` does, and for one of other classes."""
    if not distill.teacher:
        return None
    return Teacher(
        distill, classes=classes, mean=data.mean, std=data.std, channels_last=channels_last, device=device,
        resolutions=resolutions,
    )  # fmt: skip


class Teacher(nn.Module):
    """A trained network of the run's classes, in eval mode and without gradients, whatever the student does."""

    def __init__(
        self, distill: Distill, *, classes: int, mean: Sequence[float], std: Sequence[float], channels_last: bool,
        device: torch.device, resolutions: Collection[int] = (),
    ) -> None:  # fmt: skip
        """`mean`, `std`: of the run's images, and of a teacher's whose weights are not timm's. `resolutions` (px): of
        the images it will see."""
        super().__init__()
        model = Model(name=distill.teacher, weights=distill.weights, options=distill.options)
        try:
            self.network = build_model(
                model, classes=classes, channels_last=channels_last, device=device, same_head=True,
                resolutions=resolutions,
            )  # fmt: skip
        except ResoluteError as error:
            raise ResoluteError(f"distill: {error}") from None
        self.requires_grad_(False).eval()
        cfg: Any = self.network.pretrained_cfg if distill.weights == "pretrained" else {"mean": mean, "std": std}
        scale = [ours / other for ours, other in zip(std, cfg["std"], strict=True)]
        shift = [(m - other) / s for m, other, s in zip(mean, cfg["mean"], cfg["std"], strict=True)]
        self.scale, self.shift = (torch.tensor(v, device=device).view(1, 3, 1, 1) for v in (scale, shift))
        self.as_is = all(s == 1 for s in scale) and not any(shift)

    def train(self, mode: bool = True) -> Teacher:
        return super().train(False)

    @torch.no_grad()
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits (N, C) of images (N, 3, H, W) as the student gets them, normalised as the teacher's were."""
        found: torch.Tensor = self.network(images if self.as_is else images * self.scale + self.shift)
        return found


def distilled(losses: torch.Tensor, logits: torch.Tensor, taught: torch.Tensor, distill: Distill) -> torch.Tensor:
    """(1 - alpha) of the labels' `losses` (N,) plus alpha T^2 KL(teacher || student), both softened by T.

    Source: Hinton et al., arXiv 1503.02531, section 2.
    """
    soft, soft_taught = (functional.log_softmax(x.float() / distill.temperature, dim=1) for x in (logits, taught))
    apart = functional.kl_div(soft, soft_taught, reduction="none", log_target=True).sum(1)
    return (1 - distill.alpha) * losses + distill.alpha * distill.temperature**2 * apart
