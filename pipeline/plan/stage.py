"""`Stage` and `Augment`: the validated settings of a run's stages, and which of them would have no effect.

Order of the operations: crop, resize, flips; policy; jitter; greyscale; blur; erase; mix; normalise. Images are uint8
until they are normalised; operations do to them what torchvision.transforms.v2 does to 8-bit images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from pipeline.errors import check

__all__ = ["AUTO", "BATCH_SIZES", "MAX_BATCH", "MAX_EPOCHS", "Augment", "Stage", "without_effect"]

AUTO = 0  # batch size "auto": measured before training
# Sanity limits: larger values would fail in a library or never finish starting.
_MAX_RES, MAX_BATCH, MAX_EPOCHS = 16_384, 2**20, 100_000
BATCH_SIZES = f'an integer from 1 to {MAX_BATCH}, or "auto"'

_THREE_AUGMENT_JITTER = (0.3, 0.3, 0.3, 0.0)  # Source: Touvron et al., DeiT III, arXiv 2204.07118, section 3
BINS = 31  # magnitudes of RandAugment and TrivialAugment: 0 to 30. Source: torchvision


@dataclass(frozen=True, kw_only=True)
class Augment:
    """Training augmentation: `[augment]`, with single keys overridden per stage by `[stages.augment]`.

    Names and meanings as in torchvision's RandomResizedCrop, RandomErasing and RandAugment and timm's Mixup. Every
    `_prob` is per sample, except `mixup_prob` and `mixup_switch_prob` (see `mixup_mode`). Operations that are off in
    all stages are not built into the graph.
    """

    scale: tuple[float, float] = (0.25, 1.0)  # random resized crop: range of its area / the stored image's area
    ratio: tuple[float, float] = (3 / 4, 4 / 3)  # range of the crop's width / height
    flip_prob: float = 0.5  # probability of a horizontal flip
    vflip_prob: float = 0.0  # probability of a vertical flip
    # 3-augment: one of greyscale, solarize and blur per sample, plus a colour jitter of 0.3 unless `jitter` is set
    policy: Literal["none", "randaugment", "trivialaugment", "autoaugment", "3-augment"] = "none"
    num_ops: int = 2  # randaugment: operations per sample, 1 to 4
    magnitude: int = 9  # randaugment: strength, 0 (none) to 30
    jitter: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)  # brightness, contrast, saturation, hue; 0 = off
    jitter_prob: float = 1.0  # probability of colour jitter
    grey_prob: float = 0.0  # probability of greyscale
    blur_prob: float = 0.0  # probability of Gaussian blur
    blur_sigma: tuple[float, float] = (0.1, 2.0)  # range of the blur's sigma, px of the model's input, above 0 to 8
    random_erasing_prob: float = 0.0  # probability of random erasing: one rectangle is filled
    random_erasing_scale: tuple[float, float] = (0.02, 1 / 3)  # range of the rectangle's area / the image's area
    random_erasing_ratio: tuple[float, float] = (0.3, 3.3)  # range of the rectangle's height / width
    random_erasing_fill: Literal["mean", "noise"] = "mean"  # fill with `data.mean`, or with normal noise per pixel
    mixup_alpha: float = 0.0  # mixup weight ~ Beta(alpha, alpha), 0 to 4; 0 = off
    cutmix_alpha: float = 0.0  # cutmix weight ~ Beta(alpha, alpha), 0 to 4; 0 = off
    mixup_prob: float = 1.0  # probability that a batch (or sample, see mixup_mode) is mixed
    mixup_switch_prob: float = 0.5  # with mixup and cutmix on: probability of cutmix for what is mixed
    mixup_mode: Literal["batch", "elem"] = "batch"  # draw kind, weight and box once per batch, or for each sample

    def __post_init__(self) -> None:
        lo, hi = self.scale
        check(0 < lo <= hi <= 1, "augment.scale", list(self.scale), "0 < low <= high <= 1")
        lo, hi = self.random_erasing_scale
        check(0 < lo <= hi < 1, "augment.random_erasing_scale", list(self.random_erasing_scale), "0 < low <= high < 1")
        for name in ("ratio", "random_erasing_ratio"):
            lo, hi = getattr(self, name)
            check(0 < lo <= hi, f"augment.{name}", [lo, hi], "0 < low <= high")
        lo, hi = self.blur_sigma
        # why at most 8: the kernel extends to 3 sigma and must stay smaller than the image it is mirrored in
        check(0 < lo <= hi <= 8, "augment.blur_sigma", [lo, hi], "0 < low <= high <= 8")
        for name in ("flip_prob", "vflip_prob", "jitter_prob", "grey_prob", "blur_prob", "random_erasing_prob",
                     "mixup_prob", "mixup_switch_prob"):  # fmt: skip
            value = getattr(self, name)
            check(0 <= value <= 1, f"augment.{name}", value, "a probability, 0 to 1")
        for name in ("mixup_alpha", "cutmix_alpha"):
            value = getattr(self, name)
            check(0 <= value <= 4, f"augment.{name}", value, "0 (off) to 4")
        good = all(0 <= value <= 1 for value in self.jitter) and self.jitter[3] <= 0.5
        check(good, "augment.jitter", list(self.jitter), "[brightness, contrast, saturation, hue], 0 to 1 (hue: 0.5)")
        check(1 <= self.num_ops <= 4, "augment.num_ops", self.num_ops, "1 to 4")
        magnitude = self.magnitude
        check(0 <= magnitude < BINS, "augment.magnitude", magnitude, f"0 to {BINS - 1}")

    @property
    def mixes(self) -> bool:
        """Whether any batch can be mixed."""
        return bool((self.mixup_alpha or self.cutmix_alpha) and self.mixup_prob)

    @property
    def jitters(self) -> tuple[float, float, float, float]:
        """Effective strengths of brightness, contrast, saturation and hue; all 0 = off."""
        if self.policy == "3-augment" and not any(self.jitter):
            return _THREE_AUGMENT_JITTER
        return self.jitter if self.jitter_prob else (0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A number of epochs at one resolution and batch size; one `[[stages]]` table of a recipe."""

    res: int  # side of the model's square input, px
    epochs: int  # number of epochs in this stage
    batch_size: int  # samples per optimizer step, over all ranks; "auto": the largest that fits into the GPU
    fraction: float = 1.0  # fraction of the training samples per epoch, above 0 to 1
    lr_scale: float = 1.0  # factor on the learning rate of the schedule, above 0
    order: Literal["full", "block"] | None = None  # read order in this stage; none: `data.order`
    eval_res: int | None = None  # validation resolution, px (FixRes); none: `res`
    unfreeze_to: str | None = None  # freeze.mode unfreeze: train this layer and those above; "none": only the head
    freeze_to: str | None = None  # freeze.mode freeze: freeze all layers below this one; "all": all but the head
    augment: Augment = field(default_factory=Augment)

    def __post_init__(self) -> None:
        for name, maximum in (("res", _MAX_RES), ("epochs", MAX_EPOCHS)):
            value = getattr(self, name)
            check(1 <= value <= maximum, f"stages.{name}", value, f"an integer from 1 to {maximum}")
        good = 1 <= self.batch_size <= MAX_BATCH or self.batch_size == AUTO
        check(good, "stages.batch_size", self.batch_size, BATCH_SIZES)
        check(0 < self.fraction <= 1, "stages.fraction", self.fraction, "above 0, at most 1")
        check(self.lr_scale > 0, "stages.lr_scale", self.lr_scale, "above 0")
        eval_res = self.eval_res
        good = eval_res is None or 1 <= eval_res <= _MAX_RES
        check(good, "stages.eval_res", eval_res, f"an integer from 1 to {_MAX_RES}")


def without_effect(augments: Sequence[Augment]) -> dict[str, str]:
    """Augmentation keys that have no effect in any of `augments`, with the reason."""
    reasons = {
        "num_ops": not any(a.policy == "randaugment" for a in augments) and "policy is not randaugment",
        "magnitude": not any(a.policy == "randaugment" for a in augments) and "policy is not randaugment",
        "jitter_prob": not any(any(a.jitter) or a.policy == "3-augment" for a in augments) and "jitter is off",
        "blur_sigma": not any(a.blur_prob for a in augments) and "blur_prob is 0, off",
        "mixup_prob": not any(a.mixup_alpha or a.cutmix_alpha for a in augments) and "no mixing is on",
        "mixup_mode": not any(a.mixes for a in augments) and "no mixing is on",
        "mixup_switch_prob": not any(a.mixup_alpha and a.cutmix_alpha for a in augments)
        and "it chooses between mixup and cutmix, and not both are on",
    } | {
        key: not any(a.random_erasing_prob for a in augments) and "random_erasing_prob is 0, off"
        for key in ("random_erasing_scale", "random_erasing_ratio", "random_erasing_fill")
    }
    return {key: reason for key, reason in reasons.items() if reason}
