"""`Stage` and `Augment`: validated settings of a run's stages, and which of them would have no effect.

Order of the operations: crop, resize, flips; shift; policy; jitter; greyscale; blur; erase; mix; normalise. Images are
uint8 until they are normalised; operations do to them what torchvision.transforms.v2 does to 8-bit images.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Final, Literal

from pydantic import Field

from resolute.errors import check
from resolute.settings import described, setting, settings

__all__ = [
    "AUTO",
    "MAX_BATCH",
    "MAX_EPOCHS",
    "OTHER_STAGE_NAMES",
    "SIZED_AT",
    "Augment",
    "BatchShape",
    "BatchSize",
    "Count",
    "Fraction",
    "Index",
    "Positive",
    "Probability",
    "Seed",
    "Stage",
    "unused_augment_keys",
]

AUTO: Final = "auto"  # batch size that is measured before training
# Sanity limits: larger values would fail in a library or never finish starting.
_MAX_RES, MAX_BATCH, MAX_EPOCHS = 16_384, 2**20, 100_000

OTHER_STAGE_NAMES = {
    "bs": "stages.batch_size",
    **dict.fromkeys(("size", "resolution", "image_size", "img_size", "input_size", "train_crop_size"), "stages.res"),
    **dict.fromkeys(("eval_size", "val_size", "val_resize_size"), "stages.eval_res"),
}

Res = Annotated[int, Field(ge=1, le=_MAX_RES)]
BatchSize = Annotated[int, Field(ge=1, le=MAX_BATCH)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
Count = Annotated[int, Field(ge=1)]
Index = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Probability = Annotated[float, Field(ge=0, le=1)]
# why at most 8: the blur's kernel extends to 3 sigma and must stay smaller than the image it is mirrored in
_Sigma = Annotated[float, Field(gt=0, le=8)]
_Part = Annotated[float, Field(gt=0, lt=1)]

_THREE_AUGMENT_JITTER = (0.3, 0.3, 0.3, 0.0)  # Source: Touvron et al., DeiT III, arXiv 2204.07118, section 3
SIZED_AT = 224  # px: side of the images for which translations and blurs in px are meant
BINS = 31  # magnitudes of RandAugment and TrivialAugment: 0 to 30. Source: torchvision


@settings(
    "augment",
    other_names={
        "crop_area": "augment.scale",
        "crop_ratio": "augment.ratio",
        "policy_ops": "augment.num_ops",
        "policy_magnitude": "augment.magnitude",
        "erase_prob": "augment.random_erasing_prob",
        "erase_area": "augment.random_erasing_scale",
        "erase_ratio": "augment.random_erasing_ratio",
        "erase_fill": "augment.random_erasing_fill",
        "mix_prob": "augment.mixup_prob",
        "cutmix_prob": "augment.mixup_switch_prob",
        "mix_per": "augment.mixup_mode",
        # of timm and torchvision
        **dict.fromkeys(("aa", "auto_augment", "three_augment", "trivial_augment_wide"), "augment.policy"),
        "hflip": "augment.flip_prob",
        "vflip": "augment.vflip_prob",
        "gray": "augment.grey_prob",
        "grayscale": "augment.grey_prob",
        "reprob": "augment.random_erasing_prob",
        "random_erase": "augment.random_erasing_prob",
        "remode": "augment.random_erasing_fill",
    },
)
class Augment:
    """Training augmentation: `[augment]`, with single keys overridden per stage by `[stages.augment]`.

    Names and meanings as in torchvision's RandomResizedCrop, RandomErasing and RandAugment and timm's Mixup. Every
    `_prob` is per sample, except `mixup_prob` and `mixup_switch_prob` (see `mixup_mode`). Operations that are off in
    all stages are not built into the graph.
    """

    scale: tuple[Fraction, Fraction] = setting(
        (0.25, 1.0), "random resized crop: range of its area / the stored image's area"
    )
    ratio: tuple[Positive, Positive] = setting((3 / 4, 4 / 3), "range of the crop's width / height")
    crop_mode: Literal["resized", "simple"] = setting(
        "resized",
        "resized: random resized crop; simple: a square as large as the image's short side, at a random "
        "place (DeiT III's simple random crop, with `shift_px` = 4)",
    )
    shift_px: int = setting(
        0,
        "pad and shift: random translation by up to this many px of the model's input in x and y, black outside; "
        "0 = off",
        ge=0,
        le=64,
    )
    flip_prob: float = setting(0.5, "probability of a horizontal flip", ge=0, le=1)
    flip_mode: Literal["random", "alternate"] = setting(
        "random", "alternate: each sample is flipped in every other epoch, half of them in the even ones"
    )
    vflip_prob: float = setting(0.0, "probability of a vertical flip", ge=0, le=1)
    policy: Literal["none", "randaugment", "trivialaugment", "autoaugment", "3-augment"] = setting(
        "none",
        "3-augment: one of greyscale, solarize and blur per sample, plus a colour jitter of 0.3 unless `jitter` is set "
        "(off: jitter_prob = 0). What moves in from outside is black. Translations and blur have the same "
        "size in an image at every resolution: those of "
        "trivialaugment reach 32 of 224 px",
    )
    num_ops: int = setting(2, "randaugment: operations per sample", ge=1, le=4)
    magnitude: int = setting(9, "randaugment: strength of its operations", ge=0, le=BINS - 1)
    op_prob: Probability = setting(
        1.0, "randaugment: probability that each of its operations is applied; timm's is 0.5"
    )
    magnitude_std: float = setting(
        0.0,
        "randaugment: standard deviation of each operation's magnitude, rounded and clipped to 0 to 30; timm's "
        "mstd0.5 is 1.5",
        ge=0,
        le=BINS - 1,
    )
    jitter: tuple[Probability, Probability, Probability, Probability] = setting(
        (0.0, 0.0, 0.0, 0.0), "brightness, contrast, saturation, hue (at most 0.5); 0 = off"
    )
    jitter_prob: float = setting(1.0, "probability of colour jitter", ge=0, le=1)
    grey_prob: float = setting(0.0, "probability of greyscale", ge=0, le=1)
    blur_prob: float = setting(0.0, "probability of Gaussian blur", ge=0, le=1)
    blur_sigma: tuple[_Sigma, _Sigma] = setting(
        (0.1, 2.0), "range of the blur's sigma, px of an input of 224 px; it shrinks and grows with the resolution"
    )
    random_erasing_prob: float = setting(0.0, "probability of random erasing: one rectangle is filled", ge=0, le=1)
    random_erasing_scale: tuple[_Part, _Part] = setting(
        (0.02, 1 / 3), "range of the rectangle's area / the image's area"
    )
    random_erasing_ratio: tuple[Positive, Positive] = setting((0.3, 3.3), "range of the rectangle's height / width")
    random_erasing_fill: Literal["mean", "noise"] = setting(
        "mean", "fill with the mean of `data.normalize`, or with normal noise per pixel"
    )
    mixup_alpha: float = setting(0.0, "mixup weight ~ Beta(alpha, alpha); 0 = off", ge=0, le=4)
    cutmix_alpha: float = setting(
        0.0, "cutmix weight ~ Beta(alpha, alpha), of a box with even sides as in timm; 0 = off", ge=0, le=4
    )
    mixup_prob: float = setting(1.0, "probability that a batch (or sample, see mixup_mode) is mixed", ge=0, le=1)
    mixup_switch_prob: float = setting(
        0.5, "with mixup and cutmix on: probability of cutmix for what is mixed", ge=0, le=1
    )
    mixup_mode: Literal["batch", "elem"] = setting(
        "batch", "draw kind, weight and box once per batch, or for each sample"
    )

    def __post_init__(self) -> None:
        for name in ("scale", "ratio", "blur_sigma", "random_erasing_scale", "random_erasing_ratio"):
            low, high = getattr(self, name)
            check(low <= high, f"augment.{name}", [low, high], "low <= high")
        expected = "[brightness, contrast, saturation, hue] with a hue of at most 0.5"
        check(self.jitter[3] <= 0.5, "augment.jitter", list(self.jitter), expected)

    @property
    def mixes(self) -> bool:
        """Whether any batch can be mixed."""
        return bool((self.mixup_alpha or self.cutmix_alpha) and self.mixup_prob)

    @property
    def has_sizes(self) -> bool:
        """Whether it translates or blurs by px that scale with the resolution."""
        return self.policy in ("trivialaugment", "3-augment") or self.blur_prob > 0

    @property
    def jitters(self) -> tuple[float, float, float, float]:
        """Effective strengths of brightness, contrast, saturation and hue; all 0 = off."""
        if self.policy == "3-augment" and not any(self.jitter):
            return _THREE_AUGMENT_JITTER
        return self.jitter if self.jitter_prob else (0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class BatchShape:
    """A resolution in px, and the number of samples (global) of the batches that have it."""

    res: int
    batch_size: int


@settings("stages", other_names=OTHER_STAGE_NAMES)
class Stage:
    """A number of epochs with the same settings; one `[[stages]]` table of a recipe.

    A stage may have several resolutions: one after another (a ramp), or drawn for each batch. Without `augment`, it has
    that of its `Plan`.
    """

    res: Annotated[
        Res | tuple[Res, ...],
        described(
            "side of the model's square input, px; any up to the largest stored one; or several, see `res_schedule`"
        ),
    ]
    epochs: Annotated[int, described("number of epochs in this stage", ge=1, le=MAX_EPOCHS)]
    batch_size: Annotated[
        BatchSize | tuple[BatchSize, ...] | Literal["auto", "constant_pixels"],
        described(
            'samples per optimizer step, over all ranks; "auto": the largest that fits into the GPU; several: one for '
            'each resolution; "constant_pixels": base_batch_size * (largest res / res)^2, as many pixels at all '
            "resolutions"
        ),
    ]
    res_step: int | None = setting(
        None, "with res = [first, last]: difference between consecutive resolutions, px; none: no others", ge=1
    )
    res_schedule: Literal["epoch", "step", "random"] | None = setting(
        None,
        "with several resolutions: for how long each is used. epoch: for an equal number of epochs, in their "
        "order; step: for an equal number of samples, in their order; random: each is drawn equally often, anew for "
        "each step; none: epoch",
    )
    base_batch_size: int | None = setting(
        None,
        "constant_pixels: batch size at the stage's largest resolution; none: as many pixels per step as in the "
        "stage before, or else the next one",
        ge=1,
        le=MAX_BATCH,
    )
    fraction: float = setting(1.0, "fraction of the training samples per epoch", gt=0, le=1)
    order: Literal["shuffled", "windowed"] | None = setting(None, "read order in this stage; none: `data.order`")
    eval_res: int | None = setting(
        None, "validation resolution, px (FixRes); none: `res`, of several the largest", ge=1, le=_MAX_RES
    )
    augment: Augment | None = setting(None, "overrides keys of [augment] in this stage: { mixup_prob = 0.0 }")

    def __post_init__(self) -> None:
        several = isinstance(self.res, tuple)
        listed = self.res if isinstance(self.res, tuple) else (self.res,)
        good = len({*listed}) == len(listed) > several
        check(good, "stages.res", list(listed), "a number, or at least two different ones in a list")
        if self.res_step is not None:
            gap = abs(listed[-1] - listed[0])
            check(len(listed) == 2, "stages.res_step", f"{self.res_step} with res = {self.res}", "res = [first, last]")
            near = max(step for step in range(1, min(gap, self.res_step) + 1) if gap % step == 0)
            expected = f"a divisor of {gap}, the difference of the two in res, such as {near}"
            check(gap % self.res_step == 0, "stages.res_step", self.res_step, expected)
        check(
            several or self.res_schedule is None,
            "stages.res_schedule",
            f"{self.res_schedule} with a single res",
            "several, such as res = [128, 160, 192]; or leave it out",
        )
        count = len(self.resolutions)
        enough = not several or self.res_schedule in ("step", "random") or self.epochs >= count
        check(
            enough, "stages.epochs", self.epochs, f'at least {count}, one for each resolution, or res_schedule = "step"'
        )
        self._check_batch_size()

    def _check_batch_size(self) -> None:
        name, size, count = "stages.batch_size", self.batch_size, len(self.resolutions)
        if isinstance(size, tuple):
            sizes = "a number" if count == 1 else f"a number, or {count}, one for each resolution"
            check(len(size) == count, name, list(size), sizes)
        check(size != "constant_pixels" or count > 1, name, f"{size!r} with {count} resolution", "a number")
        check(
            size == "constant_pixels" or self.base_batch_size is None,
            "stages.base_batch_size",
            self.base_batch_size,
            'none, since it has an effect only with batch_size = "constant_pixels"',
        )

    @property
    def resolutions(self) -> tuple[int, ...]:
        """All its training resolutions in px, in their order."""
        if not isinstance(self.res, tuple):
            return (self.res,)
        if self.res_step is None:
            return self.res
        first, last = self.res
        sign = 1 if last > first else -1
        return tuple(range(first, last + sign, sign * self.res_step))

    @property
    def min_epochs(self) -> int:
        """The fewest epochs it can have: one, or one for each resolution of a ramp by epoch."""
        return len(self.resolutions) if self.res_schedule in (None, "epoch") else 1

    @property
    def max_res(self) -> int:
        """Its largest training resolution, px."""
        return max(self.resolutions)

    @property
    def validation_res(self) -> int:
        """The resolution of its validations, px."""
        return self.eval_res or self.max_res

    @property
    def shapes(self) -> tuple[BatchShape, ...]:
        """The resolutions with their batch sizes (0 if they are AUTO). Raises `ResoluteError` without a base size."""
        if isinstance(self.batch_size, tuple):
            return tuple(map(BatchShape, self.resolutions, self.batch_size))
        if self.batch_size == AUTO:
            return tuple(BatchShape(res, 0) for res in self.resolutions)
        if isinstance(self.batch_size, int):
            return tuple(BatchShape(res, self.batch_size) for res in self.resolutions)
        if self.base_batch_size is None:
            check(
                False,
                "stages.base_batch_size",
                "none",
                f"the batch size at {self.max_res} px, since batch_size is "
                '"constant_pixels" and no other stage has a number',
            )
        base = (self.base_batch_size or 0) * self.max_res**2
        return tuple(BatchShape(res, min(MAX_BATCH, max(1, round(base / res**2)))) for res in self.resolutions)

    def batch_size_at(self, res: int) -> int:
        """The batch size at `res` px, one of its resolutions."""
        return next(shape.batch_size for shape in self.shapes if shape.res == res)

    @functools.cached_property
    def augments(self) -> dict[int, Augment]:
        """The augmentation at each of its resolutions."""
        return dict.fromkeys(self.resolutions, self.augment or Augment())

    @property
    def batch_text(self) -> str:
        """The batch sizes as text: "64", or "196 to 64"."""
        sizes = [shape.batch_size for shape in self.shapes]
        return str(sizes[0]) if len({*sizes}) == 1 else f"{sizes[0]} to {sizes[-1]}"

    @property
    def res_text(self) -> str:
        """The resolutions as text: "160 px", "128 to 224 px" for a ramp, or "128, 160 or 224 px" if they are drawn."""
        words = list(map(str, self.resolutions))
        if self.res_schedule == "random":
            return f"{', '.join(words[:-1])} or {words[-1]} px"
        rises = [after > before for before, after in pairwise(self.resolutions)]
        ramp = len({*rises}) == 1
        return f"{words[0]} to {words[-1]} px" if ramp else f"{', '.join(words)} px"


def unused_augment_keys(augments: Sequence[Augment]) -> dict[str, str]:
    """Augmentation keys that have no effect in any of `augments`, with the reason."""
    simple = all(a.crop_mode == "simple" for a in augments) and "crop_mode is simple"
    reasons = {
        "scale": simple,
        "ratio": simple,
        "flip_prob": all(a.flip_mode == "alternate" for a in augments) and "flip_mode is alternate",
        "magnitude_std": not any(a.policy == "randaugment" for a in augments) and "policy is not randaugment",
        "num_ops": not any(a.policy == "randaugment" for a in augments) and "policy is not randaugment",
        "op_prob": not any(a.policy == "randaugment" for a in augments) and "policy is not randaugment",
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
