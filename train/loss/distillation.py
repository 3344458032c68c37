"""Knowledge distillation from a trained teacher network that sees the same images as the student."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn
from torch.nn import functional

from resolute.errors import ResoluteError
from resolute.train.model.build import build_model
from resolute.train.recipe.schema import Data, Distill, Model
from resolute.train.recipe.weights import about_weights

__all__ = ["Teacher", "build_teacher", "distilled"]


def build_teacher(
    distill: Distill,
    data: Data,
    *,
    classes: int,
    names: Sequence[str] = (),
    channels_last: bool,
    device: torch.device,
    resolutions: Collection[int] = (),
) -> Teacher | None:
    """The recipe's teacher, or None. Raises `ResoluteError` as `build_model` does, and if its classes differ."""
    if not distill.teacher:
        return None
    return Teacher(
        distill,
        classes=classes,
        names=names,
        mean=data.mean,
        std=data.std,
        channels_last=channels_last,
        device=device,
        resolutions=resolutions,
    )


class Teacher(nn.Module):
    """A trained network with the run's classes, always in eval mode and without gradients."""

    def __init__(
        self,
        distill: Distill,
        *,
        classes: int,
        names: Sequence[str] = (),
        mean: Sequence[float],
        std: Sequence[float],
        channels_last: bool,
        device: torch.device,
        resolutions: Collection[int] = (),
    ) -> None:
        """`names`: of the run's classes, among which a teacher that says its own must have each. `mean`, `std`:
        normalisation of the run's images, also of a teacher that does not say its own. `resolutions` (px): input sizes
        that it must accept."""
        super().__init__()
        model = Model(name=distill.teacher, weights=distill.weights, kwargs=distill.kwargs)
        try:
            self.network = build_model(
                model,
                classes=classes,
                names=names,
                channels_last=channels_last,
                device=device,
                same_head=True,
                resolutions=resolutions,
            )
        except ResoluteError as error:
            raise ResoluteError(f"distill: {error}") from None
        self.requires_grad_(False).eval()
        known = about_weights(model).normalisation
        if known is None:
            print(f"distill: {distill.weights} does not say its mean and std; those of the run are used", flush=True)
        own_mean, own_std = known or (mean, std)
        # (x * std + mean - own_mean) / own_std, from the student's normalisation to the teacher's
        scale = [s / own for s, own in zip(std, own_std, strict=True)]
        shift = [(m - own) / s for m, own, s in zip(mean, own_mean, own_std, strict=True)]
        self.scale, self.shift = (torch.tensor(v, device=device).view(1, 3, 1, 1) for v in (scale, shift))
        self.as_is = all(s == 1 for s in scale) and not any(shift)

    def train(self, mode: bool = True) -> Teacher:
        return super().train(False)

    @torch.no_grad()
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits (N, C) for images (N, 3, H, W) with the student's normalisation."""
        logits: torch.Tensor = self.network(images if self.as_is else images * self.scale + self.shift)
        return logits


def distilled(
    losses: torch.Tensor, logits: torch.Tensor, teacher_logits: torch.Tensor, distill: Distill
) -> torch.Tensor:
    """(1 - alpha) * `losses` (N,) + alpha T^2 KL(teacher || student), with both logits (N, C) divided by T.

    Source: Hinton et al., arXiv 1503.02531, section 2.
    """
    student, teacher = (
        functional.log_softmax(x.float() / distill.temperature, dim=1) for x in (logits, teacher_logits)
    )
    divergence = functional.kl_div(student, teacher, reduction="none", log_target=True).sum(1)
    return (1 - distill.alpha) * losses + distill.alpha * distill.temperature**2 * divergence
