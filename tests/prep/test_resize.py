"""Stored images: their size, how true they are, and what kind of JPEG they are."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from prep.resize import fit, jpegs, resize

Scene = Callable[..., NDArray[np.uint8]]


def exact(pixels: NDArray[np.uint8], width: int, height: int) -> NDArray[np.float32]:
    """The oracle: Pillow's Lanczos in float, channel by channel."""
    planes = [Image.fromarray(pixels[..., c].astype(np.float32)) for c in range(3)]
    small = [np.asarray(plane.resize((width, height), Image.Resampling.LANCZOS)) for plane in planes]
    return np.clip(np.stack(small, -1), 0, 255)


def psnr_db(a: NDArray[np.uint8], b: NDArray[np.float32]) -> float:
    return float(10 * np.log10(255**2 / np.mean((a.astype(np.float64) - b) ** 2)))


@pytest.mark.parametrize("size", [(300, 200), (201, 317), (500, 90), (146, 600), (147, 148)])
def test_resized_pixels_are_those_of_a_float_lanczos(scene: Scene, size: tuple[int, int]) -> None:
    pixels = scene(1, *size)
    target = fit(*size, 70)
    small = resize(pixels, *target)
    assert small.shape == (target[1], target[0], 3)
    assert small.dtype == np.uint8
    assert small.flags.c_contiguous
    assert psnr_db(small, exact(pixels, *target)) > 50


def test_older_torch_gets_the_same_filter_from_pillow(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = scene(6, 300, 200)
    theirs = resize(pixels, 105, 70)
    monkeypatch.setattr("prep.resize._torch_has_lanczos", lambda: False)
    difference = np.abs(resize(pixels, 105, 70).astype(int) - theirs)
    assert difference.max() <= 2
    assert (difference > 0).mean() < 0.05


def test_short_side_is_met_and_aspect_kept() -> None:
    assert fit(500, 375, 146) == (195, 146)
    assert fit(375, 500, 146) == (146, 195)
    assert fit(400, 400, 146) == (146, 146)


def test_nothing_is_enlarged() -> None:
    assert fit(100, 80, 146) == (100, 80)
    assert fit(1, 500, 146) == (1, 500)
    assert fit(146, 200, 146) == (146, 200)


def test_every_size_comes_from_the_full_image(scene: Scene) -> None:
    pixels = scene(2, 300, 240)
    together = jpegs(pixels, (40, 60, 90), 90)
    alone = [jpegs(pixels, (short_side,), 90)[0] for short_side in (40, 60, 90)]
    assert together == alone


def test_stored_jpegs_are_plain(scene: Scene) -> None:
    for data, width, height in jpegs(scene(3, 123, 77), (40, 200), 90):
        image = Image.open(io.BytesIO(data))
        assert (image.size, image.mode, image.format) == ((width, height), "RGB", "JPEG")
        assert not image.info.get("progressive")
        assert not image.getexif()
        assert "icc_profile" not in image.info
        assert [part[1:3] for part in image.layer] == [(2, 2), (1, 1), (1, 1)]  # 4:2:0


def test_quality_is_libjpegs_scale(scene: Scene) -> None:
    pixels = scene(4, 64, 64)
    ours = Image.open(io.BytesIO(jpegs(pixels, (64,), 77)[0][0]))
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=77)
    assert ours.quantization == Image.open(buffer).quantization


def test_small_images_keep_their_size_at_every_resolution(scene: Scene) -> None:
    stored = jpegs(scene(5, 50, 60), (55, 70, 90), 90)
    assert [(width, height) for _, width, height in stored] == [(50, 60)] * 3
    assert stored[0][0] == stored[2][0]
