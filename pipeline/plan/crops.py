"""Crop boxes in px of the stored image: random crops for training, centre crops for validation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resolute.pipeline.jit import compiled

from .stage import Augment

__all__ = ["CROP_UNIFORMS", "centre_crops", "random_crops"]

_TRIES = 10  # Source: torchvision RandomResizedCrop.get_params
CROP_UNIFORMS = 2 + 2 * _TRIES  # uniforms per crop: position x, y, then one area per try, then one ratio per try


def random_crops(sizes: NDArray[np.int64], u: NDArray[np.float64], augment: Augment) -> NDArray[np.int32]:
    """Random crops (N, 4) int32 x, y, w, h for `sizes` (N, 2) w, h and uniforms `u` (N, CROP_UNIFORMS).

    Source: torchvision RandomResizedCrop.get_params: ten tries of (area, log ratio), else a centre crop; `simple`: as
    torchvision's RandomCrop after a resize of the short side (Touvron et al., DeiT III, arXiv 2204.07118, section 3).
    """
    if augment.crop_mode == "simple":
        side = np.repeat(sizes.min(axis=1, keepdims=True), 2, axis=1)
        corner = np.floor(u[:, :2] * (sizes - side + 1))
        return np.concatenate([corner, side], axis=1).astype(np.int32)
    out = np.empty((len(sizes), 4), np.int32)
    _random_crops(sizes, u, *augment.scale, *augment.ratio, out)
    return out


@compiled
def _random_crops(sizes: Any, u: Any, area_low: Any, area_high: Any, ratio_low: Any, ratio_high: Any, out: Any) -> None:
    log_low, log_high = math.log(ratio_low), math.log(ratio_high)
    for i in range(len(sizes)):
        width, height = sizes[i, 0], sizes[i, 1]
        fits = False
        for k in range(_TRIES):
            area = width * height * (area_low + (area_high - area_low) * u[i, 2 + k])
            ratio = math.exp(log_low + (log_high - log_low) * u[i, 2 + _TRIES + k])
            w, h = np.rint(math.sqrt(area * ratio)), np.rint(math.sqrt(area / ratio))
            if 1 <= w <= width and 1 <= h <= height:
                fits = True
                break
        if fits:
            x, y = math.floor(u[i, 0] * (width - w + 1)), math.floor(u[i, 1] * (height - h + 1))
        else:  # elongated images: the largest centred crop with an allowed ratio
            limited = min(max(width / height, ratio_low), ratio_high)
            w = max(1.0, min(float(width), np.rint(height * limited)))
            h = max(1.0, min(float(height), np.rint(width / limited)))
            x, y = (width - w) // 2, (height - h) // 2
        out[i, 0], out[i, 1], out[i, 2], out[i, 3] = x, y, w, h


def centre_crops(sizes: NDArray[np.int64], frac: float) -> NDArray[np.int32]:
    """Validation crops (N, 4) int32 x, y, w, h: centred squares with side `frac` of the short side."""
    side = np.maximum(1, np.rint(sizes.min(axis=1) * frac)).astype(np.int64)
    corner = np.rint((sizes - side[:, None]) / 2)
    return np.concatenate([corner, side[:, None], side[:, None]], axis=1).astype(np.int32)
