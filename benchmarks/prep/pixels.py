"""The PSNR of prep's pixels, before JPEG compression, to resize filters computed in float64."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from resolute.prep.convert.decode import Reject, decode
from resolute.prep.convert.resize import fit, resize

__all__ = ["measure_psnr"]

FILTERS = {"bicubic": -0.5, "lanczos": None}


def _axis(length: int, shorter: int, a: float | None) -> NDArray[np.float64]:
    """(shorter, length): an antialiased cubic of that `a`, or Lanczos-3 for None; Pillow's support."""
    scale = max(length / shorter, 1.0)
    reach = (3 if a is None else 2) * scale
    centres = ((np.arange(shorter) + 0.5) * length / shorter)[:, None]
    taps = np.arange(length)[None]
    inside = (taps >= np.floor(np.maximum(centres - reach + 0.5, 0))) & (taps < np.floor(centres + reach + 0.5))
    x = np.abs(taps + 0.5 - centres) / scale
    if a is None:
        weights = np.where(x < 3, np.sinc(x) * np.sinc(x / 3), 0)
    else:
        near, far = ((a + 2) * x - (a + 3)) * x * x + 1, (((x - 5) * x + 8) * x - 4) * a
        weights = np.where(x < 1, near, np.where(x < 2, far, 0))
    weights = np.where(inside, weights, 0)
    return weights / weights.sum(1, keepdims=True)


def measure_psnr(photos: Sequence[Path], short_sides: Sequence[int]) -> dict[str, dict[int, float]]:
    """PSNR of our pixels, before JPEG, to float64 filters: {filter: {side: mean in dB of all photos that shrink}}."""
    results: dict[str, dict[int, list[float]]] = {name: {side: [] for side in short_sides} for name in FILTERS}
    for path in photos:
        try:
            pixels = decode(path.read_bytes())
        except Reject:
            continue
        h, w, _ = pixels.shape
        for side in short_sides:
            width, height = fit(w, h, side)
            if (width, height) == (w, h):
                continue
            small = resize(pixels, width, height)
            for name, a in FILTERS.items():
                rows = (_axis(h, height, a) @ pixels.reshape(h, -1).astype(np.float64)).reshape(height, w, 3)
                exact = np.clip(np.matmul(_axis(w, width, a), rows), 0, 255)
                results[name][side].append(float(10 * np.log10(255**2 / np.mean((small - exact) ** 2))))
    return {
        name: {side: statistics.fmean(values) for side, values in sides.items() if values}
        for name, sides in results.items()
    }
