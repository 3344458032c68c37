"""Copies of all kinds are recognised, and different photos are not."""

from __future__ import annotations

import numpy as np
import pytest
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from resolute.prep.convert.resize import fit, resize
from resolute.prep.near_copies.descriptor import describe
from resolute.prep.near_copies.index import Index
from resolute.prep.near_copies.verification import score, thumbnail

from .conftest import COPIES


def stored(image: Image.Image) -> tuple[NDArray[np.uint64], NDArray[np.int16], tuple[int, int]]:
    """Hashes, thumbnail and size of a photo, as prep stores it for 128 px."""
    size = fit(*image.size, 146)
    pixels = resize(np.ascontiguousarray(image), *size)
    return describe(pixels), thumbnail(simplejpeg.encode_jpeg(pixels, 90, "RGB", "420", False)), size


def test_copies_are_recognised_and_other_photos_are_not(originals: list[Image.Image]) -> None:
    photos = [stored(image) for image in originals]
    kinds = [""] * len(originals)
    for kind, copy in COPIES.items():
        photos += [stored(copy(image)) for image in originals]
        kinds += [kind] * len(originals)
    found, _ = Index(np.stack([hashes for hashes, _, _ in photos])).candidates(np.arange(len(photos)))
    scores: dict[tuple[int, int], float] = {}
    for asked, other, _, part, mirrored, same_part in found.tolist():
        width, height = photos[asked][2]
        scores[min(asked, other), max(asked, other)] = score(
            photos[asked][1],
            photos[other][1],
            part=part,
            same_part=bool(same_part),
            mirrored=bool(mirrored),
            width=width,
            height=height,
        )
    count = len(originals)
    false = {pair: value for pair, value in scores.items() if pair[0] % count != pair[1] % count and value >= 0.9}
    assert false == {}
    for number, kind in enumerate(COPIES, 1):
        recognised = sum(scores.get((i, number * count + i), 0.0) >= 0.95 for i in range(count))
        assert recognised >= count - 1, (kind, recognised)


@pytest.mark.parametrize("mirrored", [False, True])
def test_a_score_is_that_of_the_same_pixels_on_every_run(originals: list[Image.Image], mirrored: bool) -> None:
    one, other = stored(originals[0]), stored(COPIES["mirrored" if mirrored else "cropped by 10 %"](originals[0]))
    part = 0 if mirrored else 2
    values = {
        score(one[1], other[1], part=part, same_part=False, mirrored=mirrored, width=one[2][0], height=one[2][1])
        for _ in range(3)
    }
    assert len(values) == 1
    assert values.pop() >= 0.95


def test_flat_photos_have_no_score() -> None:
    flat = np.full((96, 96), 1000, np.int16)
    assert score(flat, flat, part=0, same_part=False, mirrored=False, width=10, height=10) == 0.0
