"""The hashes of a photo: exact, mirrored by an exclusive or, none for a photo of one tone."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from PIL import Image

from resolute.prep.convert.decode import Photo
from resolute.prep.convert.resize import describe_and_encode, resize_and_encode
from resolute.prep.near_copies.descriptor import HASHES, MIRROR, PARTS, area_means, describe, has_hashes

from .conftest import cropped, drawn


def differing(one: np.uint64, other: np.uint64) -> int:
    return int(one ^ other).bit_count()


def shared(pixel: int, cell: int, size: Fraction) -> Fraction:
    """The length that a pixel and a cell of `size` pixels have in common."""
    start, stop = max(Fraction(pixel), cell * size), min(Fraction(pixel + 1), (cell + 1) * size)
    return max(Fraction(0), stop - start)


def test_area_means_are_exact() -> None:
    rng = np.random.default_rng(3)
    pixels = rng.integers(0, 256, (5, 7, 3), dtype=np.uint8)
    luma = pixels.astype(int) @ np.array([77, 150, 29])  # 256ths of a level
    means = area_means(pixels, 4)
    for y in range(4):
        for x in range(4):
            total = sum(
                int(luma[j, i]) * shared(j, y, Fraction(5, 4)) * shared(i, x, Fraction(7, 4))
                for j in range(5)
                for i in range(7)
            )
            mean = total / Fraction(5 * 7, 4 * 4) / 16  # in 16ths of a level
            assert int(means[y, x]) == int(mean + Fraction(1, 2))
    grey = np.ascontiguousarray(pixels[:, :, :1])
    assert (area_means(grey, 4) == area_means(np.repeat(grey, 3, axis=2), 4)).all()


def test_the_hash_of_the_mirrored_photo_is_an_exclusive_or() -> None:
    pixels = np.asarray(drawn(1))
    own, mirrored = describe(pixels), describe(np.ascontiguousarray(pixels[:, ::-1]))
    assert own.shape == (HASHES,)
    assert differing(own[0] ^ MIRROR, mirrored[0]) <= 1
    assert differing(own[1] ^ MIRROR, mirrored[2]) <= 1, "the left part of one is the right part of the other"


@pytest.mark.parametrize("part", range(len(PARTS)))
def test_a_cropped_photo_has_nearly_the_hash_of_that_part(part: int) -> None:
    image = drawn(2, 512, 384)
    left, right, top, bottom = (PARTS[part] / 64).tolist()
    copy = describe(np.ascontiguousarray(cropped(image, left, right, top, bottom)))
    assert differing(describe(np.asarray(image))[part], copy[0]) <= 2


def test_a_photo_of_one_tone_has_no_hashes() -> None:
    flat = np.full((80, 90, 3), 200, np.uint8)
    flat[10:12, 10:12] = 190
    assert not describe(flat).any()
    assert has_hashes(np.stack([describe(flat), describe(np.asarray(drawn(3)))])).tolist() == [False, True]


def test_the_described_pixels_are_those_that_are_stored() -> None:
    pixels = np.asarray(drawn(4))
    photo = Photo.full(pixels)
    jpegs, hashes = describe_and_encode([photo, photo], (48, 64), 90, 48)
    assert jpegs == resize_and_encode([photo, photo], (48, 64), 90)
    assert hashes is not None
    again = np.asarray(Image.fromarray(pixels).resize(jpegs[0][1:], Image.Resampling.LANCZOS))
    assert differing(hashes[0], describe(again)[0]) <= 3
    assert describe_and_encode([photo], (64,), 90, 48)[1] is None
