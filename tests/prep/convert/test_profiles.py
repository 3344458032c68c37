"""Colour profiles: what is stored is sRGB, whatever profile a photo has and whatever format it is in."""

from __future__ import annotations

import io
import itertools
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageCms

from resolute.prep.convert.decode import decode, decode_reduced
from resolute.prep.convert.reduced import decode_for_sizes
from resolute.prep.convert.resize import fit, resize, resize_and_encode, resize_photo
from tests.prep.convert.test_decode import encoded, psnr_db
from tests.support.made_images import ADOBE_RGB, DISPLAY_P3, GREY_22, SRGB, icc_profile, tiff

Scene = Callable[..., NDArray[np.uint8]]
FORMATS: dict[str, dict[str, Any]] = {
    "JPEG": {"quality": 98, "subsampling": 0},
    "PNG": {},
    "WEBP": {"lossless": True},
    "TIFF": {},
    "AVIF": {"quality": 100, "subsampling": "4:4:4"},
}


def use_of(data: bytes) -> str:
    return decode_reduced(data, 1).conversion.use


def in_profile(pixels: NDArray[np.uint8], profile: bytes) -> Image.Image:
    """sRGB pixels with the numbers that the same colours have in another RGB profile."""
    to = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    transform = ImageCms.buildTransform(ImageCms.createProfile("sRGB"), to, "RGB", "RGB")
    return transform.apply(Image.fromarray(pixels))


@pytest.mark.parametrize("profile", [ADOBE_RGB, DISPLAY_P3, icc_profile("Adobe RGB", 1.8, padding=200_000)])
@pytest.mark.parametrize("kind", FORMATS)
def test_the_same_colours_are_the_same_pixels_in_any_profile_and_format(
    scene: Scene, kind: str, profile: bytes
) -> None:
    pixels = scene(1, 60, 40)
    data = encoded(in_profile(pixels, profile), kind, icc_profile=profile, **FORMATS[kind])
    assert use_of(data) == "converted"
    assert psnr_db(decode(data), pixels) > 38
    plain = encoded(in_profile(pixels, profile), kind, icc_profile=None, **FORMATS[kind])
    assert psnr_db(decode(plain), pixels) < 32, "the profile makes no difference"


@pytest.mark.parametrize(
    "profile",
    [
        ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes(),
        SRGB,
        icc_profile("sRGB", None, points=1024),
        icc_profile("sRGB", None, points=4096, device=b"scnr"),
    ],
)
def test_srgb_profiles_of_any_maker_change_no_byte(scene: Scene, profile: bytes) -> None:
    image = Image.fromarray(scene(2, 60, 40))
    for kind, options in FORMATS.items():
        data, plain = (encoded(image, kind, icc_profile=each, **options) for each in (profile, None))
        assert np.array_equal(decode(data), decode(plain)), kind
        assert use_of(data) == "none", kind


def test_a_profile_that_cannot_be_used_changes_nothing_and_is_reported(scene: Scene) -> None:
    image = Image.fromarray(scene(3, 60, 40))
    plain = decode(encoded(image, "JPEG"))
    broken = (
        b"junk",
        bytes(5000),
        ADOBE_RGB[:300],
        GREY_22,
        icc_profile("Adobe RGB", 2.2, device=b"link"),
        ADOBE_RGB[:16] + b"CMYK" + ADOBE_RGB[20:],
        ADOBE_RGB[:132] + b"\xff" * 200 + ADOBE_RGB[332:],
    )
    for number, profile in enumerate(broken):
        data = encoded(image, "JPEG", icc_profile=profile)
        assert np.array_equal(decode(data), plain), number
        assert use_of(data) == "unusable", number
        for kind in ("PNG", "TIFF"):
            data = encoded(image, kind, icc_profile=profile)
            assert np.array_equal(decode(data), np.asarray(image)), (number, kind)
            assert use_of(data) == "unusable", (number, kind)


def test_the_parts_of_a_profile_in_a_jpeg_may_come_in_any_order_and_none_may_be_missing(scene: Scene) -> None:
    profile = icc_profile("Adobe RGB", 2.2, padding=150_000)
    data = encoded(Image.fromarray(scene(4, 60, 40)), "JPEG", icc_profile=profile)
    begins = [at for at in range(len(data)) if data.startswith(b"ICC_PROFILE\0", at)]
    ends = [at - 4 + 2 + int.from_bytes(data[at - 2 : at], "big") for at in begins]
    parts = [data[begin - 4 : end] for begin, end in zip(begins, ends, strict=True)]
    assert len(parts) == 3
    head, tail = data[: begins[0] - 4], data[ends[-1] :]
    for order in itertools.permutations(parts):
        assert np.array_equal(decode(head + b"".join(order) + tail), decode(data))
    for kept in (parts[:2], parts[1:], [*parts, parts[0]]):
        assert use_of(head + b"".join(kept) + tail) == "unusable"


def test_grey_photos_are_converted_by_profiles_of_grey_and_of_colour(scene: Scene) -> None:
    grey = Image.fromarray(scene(5, 60, 40)).convert("L")
    ramp = np.arange(256) / 255
    linear = ramp**2.2
    expected = 255 * np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    for kind, options in (("PNG", {}), ("TIFF", {}), ("JPEG", {"quality": 95})):
        before = decode(encoded(grey, kind, **options))
        for profile in (GREY_22, icc_profile("sRGB", 2.2)):
            got = decode(encoded(grey, kind, icc_profile=profile, **options))
            assert np.abs(got - expected[before]).max() <= 2, kind
    deep = Image.fromarray((np.asarray(grey).astype(np.uint16)) * 257)
    assert np.array_equal(
        decode(encoded(deep, "PNG", icc_profile=GREY_22)), decode(encoded(grey, "PNG", icc_profile=GREY_22))
    )


def test_colours_are_converted_before_they_are_composited_over_white() -> None:
    green = np.full((8, 8, 3), (60, 200, 90), np.uint8)
    other = in_profile(green, ADOBE_RGB)
    for alpha in (255, 128, 0):
        image = other.copy()
        image.putalpha(alpha)
        got = decode(encoded(image, "PNG", icc_profile=ADOBE_RGB))[0, 0].astype(int)
        expected = (green[0, 0].astype(int) * alpha + 255 * (255 - alpha)) / 255
        assert np.abs(got - expected).max() <= 2, alpha


def test_a_palette_is_converted() -> None:
    colours = np.array([(60, 200, 90), (200, 90, 60)], np.uint8)
    image = in_profile(colours[None].repeat(8, 0), ADOBE_RGB).quantize(2)
    got = decode(encoded(image, "PNG", icc_profile=ADOBE_RGB))
    assert np.abs(got[0].astype(int) - colours).max() <= 3


def test_a_lab_tiff_is_converted_by_its_tags_alone() -> None:
    lab = np.full((4, 4, 3), (128, 0, 0), np.uint8)
    for data in (tiff(lab, 8, order="<"), tiff(lab, 8, order=">")):
        assert np.abs(decode(data).astype(int) - 119).max() <= 1


@pytest.mark.parametrize("factor", [2, 4, 8])
@pytest.mark.parametrize("profile", [ADOBE_RGB, DISPLAY_P3])
def test_a_reduced_decode_is_converted_like_the_full_one(scene: Scene, factor: int, profile: bytes) -> None:
    image = Image.fromarray(scene(6, 1024, 768) // 2 + 60)
    data = encoded(image, "JPEG", quality=92, icc_profile=profile)
    photo = decode_reduced(data, factor)
    size = fit(1024, 768, 768 // (3 * factor))
    got = photo.conversion.of_pixels(resize_photo(photo, *size))
    assert psnr_db(got, resize(decode(data), *size)) > 46
    assert psnr_db(got, resize(decode(encoded(image, "JPEG", quality=92)), *size)) < 35


def test_what_is_stored_is_converted_and_does_not_depend_on_other_sizes(scene: Scene) -> None:
    data = encoded(Image.fromarray(scene(7, 1500, 1420)), "JPEG", quality=92, icc_profile=ADOBE_RGB)
    sides = (64, 256, 1500)
    photos = decode_for_sizes(data, sides)
    assert {photo.averaged for photo in photos} == {1, 2}
    jpegs = resize_and_encode(photos, sides, 95)
    for side, jpeg in zip(sides, jpegs, strict=True):
        assert resize_and_encode(decode_for_sizes(data, (side,)), (side,), 95) == [jpeg]
        assert psnr_db(decode(jpeg[0]), resize(decode(data), *fit(1500, 1420, side))) > 34


def test_a_profile_that_inflates_without_end_is_not_inflated(scene: Scene) -> None:
    image = Image.fromarray(scene(8, 20, 20))
    data = encoded(image, "PNG")
    content = b"iCCPbomb\0\0" + zlib.compress(bytes(100_000_000))
    chunk = (len(content) - 4).to_bytes(4, "big") + content + zlib.crc32(content).to_bytes(4, "big")
    data = data[:33] + chunk + data[33:]
    assert np.array_equal(decode(data), np.asarray(image))
    assert use_of(data) == "unusable"
