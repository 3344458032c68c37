"""TIFF: tags decide what bands mean; what is not supported is rejected with a reason that says so."""

from __future__ import annotations

import itertools
from contextlib import suppress

import numpy as np
import pytest
from numpy.typing import NDArray

from resolute.prep.convert.decode import Reject, decode, decode_reduced
from tests.support.made_images import tiff

RNG = np.random.default_rng(1)
RGB = RNG.integers(0, 256, (7, 5, 3), dtype=np.uint8)
OTHER = RNG.integers(0, 256, (7, 5, 3), dtype=np.uint8)
LAYOUTS = [*itertools.product((1, 2), (False, True), "<>")]  # planar, deflate, order


def deep(bands: NDArray[np.uint8], bits: int) -> NDArray[np.generic]:
    return bands if bits == 8 else bands.astype(np.uint16) * 257


def over_white(colour: NDArray[np.uint8], alpha: NDArray[np.uint8]) -> NDArray[np.float64]:
    return colour * (alpha / 255) + 255 - alpha


def got(bands: NDArray[np.uint8], photometric: int, bits: int = 8, **options: object) -> list[NDArray[np.uint8]]:
    """The pixels in every layout; those in planes only where they are not rejected."""
    results = []
    for planar, deflate, order in LAYOUTS:
        data = tiff(deep(bands, bits), photometric, planar=planar, deflate=deflate, order=order, **options)  # type: ignore[arg-type]
        if planar == 2:
            with suppress(Reject):
                results.append(decode(data))
        else:
            results.append(decode(data))
    return results


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("marked", [True, False])
def test_bands_that_are_not_marked_as_alpha_are_ignored(bits: int, marked: bool) -> None:
    for count in (1, 2, 3) if bits == 8 else (1,):
        bands = np.concatenate([RGB, OTHER[..., :count]], -1)
        results = got(bands, 2, bits, extra=[0] * count if marked else None)
        assert len(results) == len(LAYOUTS)
        assert all(np.array_equal(pixels, RGB) for pixels in results), count
    assert all((pixels == RGB[..., :1]).all() for pixels in got(np.dstack([RGB[..., :1], OTHER[..., :1]]), 1))


def test_alpha_is_composited_over_white_whether_or_not_colours_are_multiplied_by_it() -> None:
    alpha = OTHER[..., :1]
    expected = over_white(RGB, alpha)
    multiplied = np.rint(RGB * (alpha / 255)).astype(np.uint8)
    for bits in (8, 16):
        for bands, extra in ((RGB, 2), (multiplied, 1)):
            results = got(np.dstack([bands, alpha]), 2, bits, extra=[extra])
            assert len(results) == len(LAYOUTS)
            for pixels in results:
                assert np.abs(pixels - expected).max() <= 2, (bits, extra)
    grey = got(np.dstack([RGB[..., :1], alpha]), 1, extra=[2])
    assert all(np.abs(pixels - expected[..., :1]).max() <= 2 for pixels in grey)


@pytest.mark.parametrize("bits", [8, 16])
def test_white_is_zero_is_inverted_in_every_layout(bits: int) -> None:
    for photometric, expected in ((0, 255 - RGB[..., :1]), (1, RGB[..., :1])):
        results = got(RGB[..., :1], photometric, bits)
        assert len(results) == len(LAYOUTS)
        assert all((pixels == expected).all() for pixels in results)


def test_a_palette_cmyk_and_ycbcr_are_converted_in_every_layout() -> None:
    table = [255 * 257 - 257 * i for i in range(256)] * 3
    assert all((pixels == 255 - RGB[..., :1]).all() for pixels in got(RGB[..., :1], 3, tags=[(320, 3, table)]))
    for bits in (8, 16):
        cyan = np.zeros((6, 4, 4), np.uint8)
        cyan[..., 0] = 255
        results = got(cyan, 5, bits)
        assert len(results) == len(LAYOUTS)
        assert all(np.abs(pixels.astype(int) - (0, 255, 255)).max() <= 3 for pixels in results)
    grey = np.full((6, 4, 3), (100, 128, 128), np.uint8)
    assert all(np.abs(pixels.astype(int) - 100).max() <= 1 for pixels in got(grey, 6, tags=[(530, 3, [1, 1])]))


@pytest.mark.parametrize(
    ("dtype", "sample_format", "reason"),
    [
        (np.float32, 3, "float TIFF: 32 bits, not supported, convert it to 8 or 16 bits"),
        (np.float64, 3, "float TIFF: 64 bits"),
        (np.float16, 3, "float TIFF: 16 bits"),
        (np.int16, 2, "signed TIFF: 16 bits"),
        (np.int8, 2, "signed TIFF: 8 bits"),
        (np.int32, 2, "signed TIFF: 32 bits"),
        (np.uint32, 1, "32-bit TIFF: not supported"),
        (np.uint32, None, "32-bit TIFF: not supported"),
    ],
)
def test_samples_of_other_kinds_are_rejected_by_name(
    dtype: type[np.generic], sample_format: int | None, reason: str
) -> None:
    for bands, photometric in ((1, 1), (3, 2)):
        with pytest.raises(Reject, match=f"^{reason}"):
            decode(tiff(np.ones((4, 4, bands), dtype), photometric, sample_format=sample_format))


def test_what_a_file_does_not_say_or_pillow_cannot_read_is_rejected() -> None:
    many = np.concatenate([RGB, OTHER, OTHER], -1)
    raw = "^camera raw: "
    for data, reason in (
        (tiff(RGB[..., :1], None), "^TIFF not supported: no PhotometricInterpretation"),
        (tiff(RGB, 9), "^TIFF not supported: 3 x 8 bits, ICCLab"),
        (tiff(many, 2), "^TIFF not supported: 9 x 8 bits, RGB"),
        (tiff(RGB[..., :2], 2), "^TIFF not supported: 2 x 8 bits, RGB"),
        (tiff(np.dstack([RGB, OTHER[..., :2]]), 2, extra=[0, 2]), "^TIFF not supported: .*alpha after other bands"),
        (tiff(RGB[..., :1], 32803), raw),
        (tiff(RGB, 2, tags=[(50706, 1, [1, 4, 0, 0])]), raw),
        (tiff(RGB, 2, tags=[(254, 4, [1]), (330, 4, [8])]), raw),
    ):
        with pytest.raises(Reject, match=reason):
            decode(data)
    huge = tiff(RGB, 2).replace(b"\x15\x01\x03\0\1\0\0\0\3\0\0\0", b"\x15\x01\x04\0\1\0\0\0\0\0\0\xf0")
    with pytest.raises(Reject, match=r"^TIFF not supported: 4026531840 x 8 bits"):
        decode(huge)


def test_metadata_of_a_tiff_decide_nothing() -> None:
    for tags in (
        [(34665, 4, [999_999])],
        [(34665, 4, [8])],
        [(34853, 4, [10])],
        [(700, 1, [65] * 3_000_000)],
        [(34675, 7, [65] * 3_000_000)],
    ):
        assert np.array_equal(decode(tiff(RGB, 2, tags=tags)), RGB)


def test_fewer_bits_than_16_are_scaled_to_white_and_what_is_above_is_clipped() -> None:
    ramp = np.arange(4096, dtype=np.uint16).reshape(64, 64, 1)
    expected = np.rint(ramp[..., 0] / 4095 * 255)
    for planar, deflate, order in LAYOUTS:
        layout = {"planar": planar, "deflate": deflate, "order": order}
        for photometric, pixels in ((1, expected), (0, 255 - expected)):
            data = tiff(ramp, photometric, **layout)  # type: ignore[arg-type]
            assert np.abs(decode(data, bits=12)[..., 0] - pixels).max() <= 0.51
            assert decode_reduced(data, 1).largest == 4095
        rgb = tiff(np.dstack([ramp, ramp[::-1], ramp]), 2, **layout)  # type: ignore[arg-type]
        if planar == 2:
            with pytest.raises(Reject, match=r"^16-bit RGB in planes not supported: .*GREY_RANGE"):
                decode(rgb, bits=12)
        else:
            pixels = decode(rgb, bits=12)
            assert np.abs(pixels - np.dstack([expected, expected[::-1], expected])).max() <= 0.51
        assert decode(rgb).max() == 15
        assert decode_reduced(rgb, 1).largest == 4095
    assert decode(tiff(ramp, 1), bits=10)[-1, -1].tolist() == [255] * 3
    assert (decode(tiff(ramp, 1), bits=8)[0, :, 0] == np.arange(64)).all()


def test_a_file_that_says_12_bits_needs_no_setting() -> None:
    data = tiff(RNG.integers(0, 256, (4, 6, 1), dtype=np.uint8), 1)  # 6 bytes a row: four samples of 12 bits
    data = data.replace(b"\0\1\4\0\1\0\0\0\6", b"\0\1\4\0\1\0\0\0\4").replace(
        b"\2\1\3\0\1\0\0\0\x08\0", b"\2\1\3\0\1\0\0\0\x0c\0"
    )
    photo = decode_reduced(data, 1)
    packed = np.frombuffer(data[8:14], np.uint8).astype(int)
    first = packed[0] << 4 | packed[1] >> 4
    assert photo.pixels.shape == (4, 4, 3)
    assert photo.pixels[0, 0, 0] == round(first / 4095 * 255)
    assert photo.largest is None
