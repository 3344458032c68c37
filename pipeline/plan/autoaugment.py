"""Operation tables of the augmentation policies: RandAugment, TrivialAugment, AutoAugment, 3-Augment.

An operation is a kind (one of the constants below, which are compiled into `pipeline.graph.kernels.augment`) and a row
of six float32 values:

    AFFINE                  2 x 3 matrix from output px to input px; (0, 0) is the corner of the first pixel
    BRIGHTNESS, SATURATION, CONTRAST, SHARPNESS     factor: 0 gives black, grey, flat grey, smoothed; 1 is the identity
    POINT                   threshold, mask: x becomes (255 - x if x >= threshold else x) & mask
    AUTOCONTRAST, EQUALIZE  unused
    BLUR                    sigma in px
    HUE                     rotation in sixths of the colour circle
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .stage import BINS, SIZED_AT

__all__ = [
    "AFFINE",
    "AUTOAUGMENT",
    "AUTOCONTRAST",
    "BLUR",
    "BRIGHTNESS",
    "CONTRAST",
    "EQUALIZE",
    "HUE",
    "NONE",
    "OPERATIONS",
    "POINT",
    "SATURATION",
    "SHARPNESS",
    "VALUES",
    "WITH_TABLE",
    "operations",
]

# Compiled into the kernels: `pipeline.jit` compiles them again when this file changes, since it contains that word.
(NONE, AFFINE, BRIGHTNESS, SATURATION, CONTRAST, SHARPNESS, POINT, AUTOCONTRAST, EQUALIZE, BLUR, HUE) = range(11)
VALUES = 6

# In torchvision's order; the policies draw an index into it. Only AutoAugment uses Invert.
OPERATIONS = (
    "Identity",
    "ShearX",
    "ShearY",
    "TranslateX",
    "TranslateY",
    "Rotate",
    "Brightness",
    "Color",
    "Contrast",
    "Sharpness",
    "Posterize",
    "Solarize",
    "AutoContrast",
    "Equalize",
    "Invert",
)
_KIND = {
    "Identity": NONE,
    "ShearX": AFFINE,
    "ShearY": AFFINE,
    "TranslateX": AFFINE,
    "TranslateY": AFFINE,
    "Rotate": AFFINE,
    "Brightness": BRIGHTNESS,
    "Color": SATURATION,
    "Contrast": CONTRAST,
    "Sharpness": SHARPNESS,
    "Posterize": POINT,
    "Solarize": POINT,
    "AutoContrast": AUTOCONTRAST,
    "Equalize": EQUALIZE,
    "Invert": POINT,
}
# Maximum magnitudes: shear, translation (fraction of the side, or px), degrees, enhancement, bits removed.
# Source: torchvision.transforms.v2 RandAugment, TrivialAugmentWide, AutoAugment: _AUGMENTATION_SPACE.
_SPACES: dict[str, dict[str, Any]] = {
    "randaugment": {"bins": BINS, "shear": 0.3, "side": 150 / 331, "degrees": 30.0, "factor": 0.9, "bits": 4},
    "trivialaugment": {"bins": BINS, "shear": 0.99, "side": 32 / SIZED_AT, "degrees": 135.0, "factor": 0.99, "bits": 6},
    "autoaugment": {"bins": 10, "shear": 0.3, "side": 150 / 331, "degrees": 30.0, "factor": 0.9, "bits": 4},
}
WITH_TABLE = frozenset(_SPACES)  # policies that `operations` knows

# The 25 sub-policies for ImageNet: two times (operation, probability, magnitude).
# Source: Cubuk et al., arXiv 1805.09501, table 9, as in torchvision's AutoAugmentPolicy.IMAGENET.
AUTOAUGMENT = (
    (("Posterize", 0.4, 8), ("Rotate", 0.6, 9)),
    (("Solarize", 0.6, 5), ("AutoContrast", 0.6, None)),
    (("Equalize", 0.8, None), ("Equalize", 0.6, None)),
    (("Posterize", 0.6, 7), ("Posterize", 0.6, 6)),
    (("Equalize", 0.4, None), ("Solarize", 0.2, 4)),
    (("Equalize", 0.4, None), ("Rotate", 0.8, 8)),
    (("Solarize", 0.6, 3), ("Equalize", 0.6, None)),
    (("Posterize", 0.8, 5), ("Equalize", 1.0, None)),
    (("Rotate", 0.2, 3), ("Solarize", 0.6, 8)),
    (("Equalize", 0.6, None), ("Posterize", 0.4, 6)),
    (("Rotate", 0.8, 8), ("Color", 0.4, 0)),
    (("Rotate", 0.4, 9), ("Equalize", 0.6, None)),
    (("Equalize", 0.0, None), ("Equalize", 0.8, None)),
    (("Invert", 0.6, None), ("Equalize", 1.0, None)),
    (("Color", 0.6, 4), ("Contrast", 1.0, 8)),
    (("Rotate", 0.8, 8), ("Color", 1.0, 2)),
    (("Color", 0.8, 8), ("Solarize", 0.8, 7)),
    (("Sharpness", 0.4, 7), ("Invert", 0.6, None)),
    (("ShearX", 0.6, 5), ("Equalize", 1.0, None)),
    (("Color", 0.4, 0), ("Equalize", 0.6, None)),
    (("Equalize", 0.4, None), ("Solarize", 0.2, 4)),
    (("Solarize", 0.6, 5), ("AutoContrast", 0.6, None)),
    (("Invert", 0.6, None), ("Equalize", 1.0, None)),
    (("Color", 0.6, 4), ("Contrast", 1.0, 8)),
    (("Equalize", 0.8, None), ("Equalize", 0.6, None)),
)


@functools.cache
def operations(policy: str, res: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """All operations of a policy at `res` px: kinds (15,) int32 and values (15, bins, 2, 6) float32, read-only.

    The third axis is the sign: 0 positive, 1 negative; operations without a sign have the same values for both.
    """
    space = _SPACES[policy]
    bins = space["bins"]
    kinds = np.array([_KIND[name] for name in OPERATIONS], np.int32)
    values = np.zeros((len(OPERATIONS), bins, 2, VALUES), np.float32)
    for row, name in enumerate(OPERATIONS):
        for k in range(bins):
            for s, sign in enumerate((1.0, -1.0)):
                values[row, k, s] = _values(name, k / (bins - 1), sign, space, res)
    values.flags.writeable = kinds.flags.writeable = False
    return kinds, values


def _values(name: str, strength: float, sign: float, space: dict[str, Any], res: int) -> list[float]:
    """The six values of an operation at `strength` (0..1) of its maximum magnitude."""
    if name == "ShearX":
        return [1, sign * strength * space["shear"], 0, 0, 1, 0]
    if name == "ShearY":
        return [1, 0, 0, sign * strength * space["shear"], 1, 0]
    if name in ("TranslateX", "TranslateY"):
        reach = space["side"] * res
        px = float(int(np.float32(sign * strength * reach)))  # whole px, as torchvision
        return [1, 0, -px, 0, 1, 0] if name == "TranslateX" else [1, 0, 0, 0, 1, -px]
    if name == "Rotate":
        turn = np.deg2rad(sign * strength * space["degrees"])
        c, s, middle = np.cos(turn), np.sin(turn), res / 2
        return [c, -s, middle - c * middle + s * middle, s, c, middle - s * middle - c * middle]
    if _KIND[name] in (BRIGHTNESS, SATURATION, CONTRAST, SHARPNESS):
        return [1 + sign * strength * space["factor"], 0, 0, 0, 0, 0]
    if name == "Posterize":
        bits = 8 - round(strength * space["bits"])  # halves to even, as torch rounds
        return [256, 256 - 2 ** (8 - bits), 0, 0, 0, 0]
    if name == "Solarize":
        return [255 * (1 - strength), 255, 0, 0, 0, 0]
    if name == "Invert":
        return [0, 255, 0, 0, 0, 0]
    return [0] * VALUES
