"""The CPU resize equals exact arithmetic and Pillow, also mirrored and fused with normalisation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from PIL import Image

from resolute.pipeline.graph.kernels.resize import resize

SIZES = [(125, 150, 128), (100, 128, 128), (47, 33, 48), (900, 70, 64), (64, 64, 64), (1, 7, 33), (3, 400, 7)]
SCALE, SHIFT = np.array([0.5, 2, 3], np.float32), np.array([-1, 0, 4], np.float32)  # of the three channels


def photo(height: int, width: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (math.ceil(height / 3), math.ceil(width / 3), 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
    return np.where(rng.random((height, width, 1)) < 0.2, rng.integers(0, 256, smooth.shape), smooth).astype(np.uint8)


def exact(image: np.ndarray, res: int) -> np.ndarray:
    """The antialiased triangle in float64, one output at a time: (res, res, 3), not rounded."""

    def matrix(length: int) -> np.ndarray:
        out, scale = np.zeros((res, length)), length / res
        reach = max(scale, 1.0)
        for i in range(res):
            centre = (i + 0.5) * scale
            for k in range(max(0, int(centre - reach + 0.5)), min(length, int(centre + reach + 0.5))):
                out[i, k] = max(0.0, 1 - abs(k + 0.5 - centre) / reach)
            out[i] /= out[i].sum()
        return out

    rows, columns = matrix(image.shape[0]), matrix(image.shape[1])
    return np.einsum("yh,hwc,xw->yxc", rows, image.astype(np.float64), columns, optimize=True)


def run(
    image: np.ndarray, res: int, *, mirrored: bool = False, upturned: bool = False, dtype: type = np.uint8
) -> np.ndarray:
    out: np.ndarray = np.full((res, res, 3), 77, dtype)
    height, width = image.shape[:2]
    resize(image.reshape(-1), 3 * width, height, width, mirrored, upturned, out, SCALE, SHIFT)
    return out


@pytest.mark.parametrize(("height", "width", "res"), SIZES)
def test_every_value_is_the_exact_sum_rounded_once_and_within_one_level_of_pillow(
    height: int, width: int, res: int
) -> None:
    image = photo(height, width)
    expected = exact(image, res)
    error = np.abs(run(image, res) - expected)
    assert error.max() < 0.51  # half a level, and the error of weights of 14 bits
    other = np.asarray(Image.fromarray(image).resize((res, res), Image.Resampling.BILINEAR), np.int64)
    assert np.abs(run(image, res) - other).max() <= 1  # Pillow rounds between its passes too


@pytest.mark.parametrize(("height", "width", "res"), SIZES)
def test_mirrored_and_normalised_values_equal_the_plain_ones(height: int, width: int, res: int) -> None:
    image = photo(height, width, 1)
    plain = run(image, res)
    fused = run(image, res, dtype=np.float32)
    np.testing.assert_array_equal(fused, plain * SCALE + SHIFT)
    np.testing.assert_array_equal(run(image, res, upturned=True)[::-1], plain)
    # why: sums of the mirrored windows run the other way, so a value that lies on a half may round to its other side
    error = np.abs(run(image, res, mirrored=True)[:, ::-1].astype(int) - plain)
    assert error.max() <= 1
    assert (error > 0).mean() < 1e-3


def test_bytes_beyond_the_image_do_not_affect_the_result() -> None:
    """The loads at an image's end reach past it; what lies there must weigh nothing."""
    for width in (1, 2, 5, 33):
        block = np.full((20 * width * 3 + 64,), 255, np.uint8)
        image = block[: 20 * width * 3].reshape(20, width, 3)
        image[:] = 10
        assert (run(image, 24) == 10).all()


def test_what_is_written_past_the_caches_is_the_same() -> None:
    """That needs an aligned address and rows of 32 values; shifted by one value, the same image is written as usual."""
    image, values = photo(150, 170), 128 * 128 * 3
    memory = np.zeros(values + 32, np.float32)
    first = -memory.ctypes.data % 64 // 4
    outs = [memory[first + shift :][:values].reshape(128, 128, 3) for shift in (0, 1)]
    results = []
    for out in outs:
        resize(image.reshape(-1), 3 * 170, 150, 170, True, False, out, SCALE, SHIFT)
        results.append(out.copy())
    assert [out.ctypes.data % 64 for out in outs] == [0, 4]
    np.testing.assert_array_equal(results[0], results[1])
