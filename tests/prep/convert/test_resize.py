"""Stored images: their size, the accuracy of the resize, and the JPEG parameters."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile

from resolute.prep.convert.decode import Photo
from resolute.prep.convert.resize import EncodedJpeg, fit, resize, resize_and_encode, resize_photo
from resolute.prep.convert.resize_kernel import resample_weights

Scene = Callable[..., NDArray[np.uint8]]


def filtered(length: int, shorter: int) -> NDArray[np.float64]:
    """(shorter, length): one axis of an antialiased cubic with a = -0.57; the slow oracle."""
    scale, a = max(length / shorter, 1.0), -0.57
    centres = (np.arange(shorter) + 0.5) * length / shorter
    weights = np.zeros((shorter, length))
    for i, centre in enumerate(centres):
        taps = np.arange(max(0, int(centre - 2 * scale + 0.5)), min(length, int(centre + 2 * scale + 0.5)))
        x = np.abs((taps + 0.5 - centre) / scale)
        near, far = ((a + 2) * x - (a + 3)) * x * x + 1, (((x - 5) * x + 8) * x - 4) * a
        weights[i, taps] = np.where(x < 1, near, np.where(x < 2, far, 0))
    return weights / weights.sum(1, keepdims=True)


def exact(pixels: NDArray[np.uint8], width: int, height: int) -> NDArray[np.float64]:
    h, w, _ = pixels.shape
    down, across = filtered(h, height), filtered(w, width)
    return np.clip(np.einsum("yh,hwc,xw->yxc", down, pixels.astype(np.float64), across, optimize=True), 0, 255)


def store(pixels: NDArray[np.uint8], short_sides: Sequence[int], quality: int) -> list[EncodedJpeg]:
    return resize_and_encode([Photo.full(pixels)] * len(short_sides), short_sides, quality)


@pytest.mark.parametrize("size", [(201, 317), (146, 600), (71, 72), (5, 900), (1, 400), (900, 5), (800, 600)])
def test_resized_pixels_equal_exact_arithmetic_within_rounding(scene: Scene, size: tuple[int, int]) -> None:
    pixels = scene(1, *size)
    w, h = size
    for width, height in (fit(w, h, 70), fit(w, h, 3), (max(1, w // 2), h), (w, max(1, h // 3)), (1, 1)):
        small = resize(pixels, width, height)
        assert (small.shape, small.dtype, small.flags.c_contiguous) == ((height, width, 3), np.uint8, True)
        assert np.abs(small - exact(pixels, width, height)).max() < 0.6


def sums(values: NDArray[np.int64], length: int, shift: int) -> NDArray[np.int64]:
    """`values` (n, …) resized to (length, …): rounded sums of integer products, one output at a time."""
    starts, weights = resample_weights(len(values), length, 0.0, len(values), 1)
    rows = [np.tensordot(w.astype(np.int64), values[s : s + len(w)], 1) for s, w in zip(starts, weights, strict=True)]
    return (np.stack(rows) + (1 << shift >> 1)) >> shift


@pytest.mark.parametrize("size", [(1, 1), (31, 33), (32, 9), (901, 700), (9_000, 33)])
def test_resized_pixels_are_exactly_sums_of_integers_for_any_size_of_image(size: tuple[int, int]) -> None:
    """Photos above 0.35 megapixels are resized a few rows, and wide ones a few columns, at a time."""
    w, h = size
    rng = np.random.default_rng(h)
    for pixels in (rng.integers(0, 2, (h, w, 3)) * 255, rng.integers(0, 256, (h, w, 3))):
        for width, height in {fit(w, h, 146), fit(w, h, 19), (w, max(1, h // 3)), (max(1, w // 2), h), (1, 1)}:
            across = sums(sums(pixels, height, 8).swapaxes(0, 1), width, 20).swapaxes(0, 1)
            small = resize(pixels.astype(np.uint8), width, height)
            assert np.array_equal(small, pixels if (width, height) == size else across.clip(0, 255))


def test_photos_that_are_resized_by_turns_keep_their_own_pixels(scene: Scene) -> None:
    photos = [Photo.full(scene(number, 120, 90)) for number in (1, 2)]
    alone = [resize(photo.pixels.copy(), 60, 45) for photo in photos]
    reused = photos[0].pixels.copy()
    for photo, expected in [*zip(photos, alone, strict=True)] * 2:
        assert np.array_equal(resize_photo(photo, 60, 45), expected)
        reused[:] = photo.pixels
        assert np.array_equal(resize(reused, 60, 45), expected)


def test_flat_images_stay_flat_and_overshoot_is_clipped() -> None:
    for level in (0, 1, 127, 254, 255):
        for scale in (1.01, 3.3, 45.0):
            flat = np.full((int(70 * scale) + 1, int(50 * scale) + 1, 3), level, np.uint8)
            assert (resize(flat, 50, 70) == level).all()
    stripes = np.zeros((200, 300, 3), np.uint8)
    stripes[:, ::40] = stripes[:, 1::40] = stripes[:, 2::40] = stripes[::30] = 255
    assert np.abs(resize(stripes, 150, 100) - exact(stripes, 150, 100)).max() < 0.6


def test_pixels_do_not_depend_on_memory_around_them(scene: Scene) -> None:
    """The kernel reads whole vectors: nothing but the image itself may get into the result."""
    pixels = scene(3, 43, 150)
    expected = resize(pixels, 20, 70)
    for filler in (0, 255):
        buffer = np.full(pixels.size + 4096, filler, np.uint8)
        inner = buffer[2048 : 2048 + pixels.size].reshape(pixels.shape)
        inner[:] = pixels
        assert np.array_equal(resize(inner, 20, 70), expected)
        assert (buffer[:2048] == filler).all()
        assert (buffer[2048 + pixels.size :] == filler).all()


def test_the_short_side_is_as_requested_and_images_are_never_enlarged() -> None:
    assert fit(500, 375, 146) == (195, 146)
    assert fit(375, 500, 146) == (146, 195)
    assert fit(400, 400, 146) == (146, 146)
    for size in ((100, 80), (1, 500), (146, 200)):
        assert fit(*size, 146) == size


def test_every_size_is_resized_from_the_full_image_and_small_ones_keep_theirs(scene: Scene) -> None:
    pixels = scene(2, 300, 240)
    assert store(pixels, (40, 60, 90), 90) == [store(pixels, (side,), 90)[0] for side in (40, 60, 90)]
    stored = store(scene(5, 50, 60), (55, 70, 90), 90)
    assert [(width, height) for _, width, height in stored] == [(50, 60)] * 3
    assert stored[0][0] == stored[2][0]


def test_stored_jpegs_are_baseline_420_without_metadata_and_quality_is_on_libjpegs_scale(scene: Scene) -> None:
    pixels = scene(3, 123, 77)
    for data, width, height in store(pixels, (40, 200), 77):
        image = Image.open(io.BytesIO(data))
        assert (image.size, image.mode, image.format) == ((width, height), "RGB", "JPEG")
        assert isinstance(image, JpegImageFile)
        assert not image.info.get("progressive")
        assert not image.getexif()
        assert "icc_profile" not in image.info
        assert [part[1:3] for part in image.layer] == [(2, 2), (1, 1), (1, 1)]  # 4:2:0
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "JPEG", quality=77)
        expected = Image.open(buffer)
        assert isinstance(expected, JpegImageFile)
        assert image.quantization == expected.quantization
