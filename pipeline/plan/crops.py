"""Crop boxes in px of the stored image: random crops for training, centre crops for validation.

All functions are compiled and return one box: x, y, width, height, int64.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from resolute.pipeline.jit import compiled

__all__ = ["CROP_UNIFORMS", "centre_crop", "random_crop", "simple_crop"]

_TRIES = 10  # Source: torchvision RandomResizedCrop.get_params
CROP_UNIFORMS = 2 + 2 * _TRIES  # uniforms per crop: position x, y, then one area per try, then one ratio per try


@compiled
def random_crop(
    u: Any, width: int, height: int, area_low: float, area_high: float, ratio_low: float, ratio_high: float
) -> Any:
    """The random resized crop for uniforms `u` (CROP_UNIFORMS,) of an image of `width` x `height` px.

    Source: torchvision RandomResizedCrop.get_params: ten tries of (area, log ratio), else a centre crop.
    """
    log_low, log_high = math.log(ratio_low), math.log(ratio_high)
    for k in range(_TRIES):
        area = width * height * (area_low + (area_high - area_low) * u[2 + k])
        ratio = math.exp(log_low + (log_high - log_low) * u[2 + _TRIES + k])
        w, h = np.rint(math.sqrt(area * ratio)), np.rint(math.sqrt(area / ratio))
        if 1 <= w <= width and 1 <= h <= height:
            return math.floor(u[0] * (width - w + 1)), math.floor(u[1] * (height - h + 1)), int(w), int(h)
    # elongated images: the largest centred crop with an allowed ratio
    limited = min(max(width / height, ratio_low), ratio_high)
    w = max(1.0, min(float(width), np.rint(height * limited)))
    h = max(1.0, min(float(height), np.rint(width / limited)))
    return int((width - w) // 2), int((height - h) // 2), int(w), int(h)


@compiled
def simple_crop(u: Any, width: int, height: int) -> Any:
    """A square as large as the short side, at the place that the uniforms u[0], u[1] choose.

    Source: torchvision's RandomCrop after a resize of the short side (Touvron et al., DeiT III, arXiv 2204.07118,
    section 3).
    """
    side = min(width, height)
    return math.floor(u[0] * (width - side + 1)), math.floor(u[1] * (height - side + 1)), side, side


@compiled
def centre_crop(width: int, height: int, frac: float) -> Any:
    """The centred square with side `frac` of the short side, for validation."""
    side = max(1, int(np.rint(min(width, height) * frac)))
    return int(np.rint((width - side) / 2)), int(np.rint((height - side) / 2)), side, side
