"""PSNR of a peer's resized images against Pillow's."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

__all__ = ["SAME_DB", "psnr_db", "reference"]

SAME_DB = 99.0  # reported for identical images


def reference(jpegs: Sequence[bytes], windows: NDArray[np.int64], res: int) -> list[NDArray[np.uint8]]:
    """Pillow's antialiased bilinear resize of each window (N, 4) x, y, w, h in px to (res, res, 3) uint8."""
    return [
        np.asarray(
            Image.open(io.BytesIO(jpeg)).convert("RGB").crop((x, y, x + w, y + h)).resize(
                (res, res), Image.Resampling.BILINEAR
            )
        )
        for jpeg, (x, y, w, h) in zip(jpegs, windows.tolist(), strict=True)
    ]  # fmt: skip


def psnr_db(image: NDArray[np.float32], exact: NDArray[np.uint8]) -> float:
    """Peak signal to noise of two images of levels 0..255, at most `SAME_DB`."""
    error = float(np.mean((image.astype(np.float64) - exact) ** 2))
    return min(SAME_DB, 10 * float(np.log10(255**2 / error))) if error else SAME_DB
