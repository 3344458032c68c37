"""The stored pixels of any photo change only together with `PIXELS`, by which a set refuses to mix them."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from resolute.prep.convert.codecs import PIXELS, codec_versions
from resolute.prep.convert.reduced import decode_for_sizes
from resolute.prep.convert.resize import fit, resize_and_encode, resize_photo
from tests.prep.convert.test_decode import encoded

SIDES = (32, 146, 256)
# Those with which the digests of JPEGs, and of what is stored, were made.
LIBRARIES = {
    "simplejpeg": "1.9.0",
    "libjpeg-turbo in simplejpeg": "3.1.2",
    "Pillow": "13.0.0",
    "libjpeg-turbo in Pillow": "3.2.0",
    "libwebp in Pillow": "1.6.0",
    "libavif in Pillow": "1.4.2",
    "LittleCMS in Pillow": "2.19",
}
# `PIXELS`, and {photo: digest of its pixels at all sizes}; the last one is of a stored JPEG.
GOLDEN = (
    3,
    {
        "alpha": "68bf19761b04575e",
        "palette with a transparent colour": "c4539d587692445d",
        "16 bit grey": "55cb8ba70fbcf763",
        "smaller than stored": "a81fbf0ccbdf2ed2",
        "4:2:0": "b817df9ee73db68b",
        "4:4:4, progressive, turned": "d79698208ed68a14",
        "grey JPEG": "704b336be84625bb",
        "CMYK": "973a70e83ced5f1c",
        "decoded at a half": "3c18edf213bd719e",
        "stored": "780bdcae69071593",
    },
)


def wave(width: int, height: int, bands: int = 3) -> NDArray[np.uint8]:
    """A smooth pattern by integers alone, so that it is the same everywhere: (height, width, bands) uint8."""
    y, x, band = np.ogrid[:height, :width, :bands]
    return np.abs((x * x // (60 + 20 * band) + y * (7 + band) + x * y // 90) % 510 - 255).astype(np.uint8)


def jpegs() -> dict[str, bytes]:
    rgb, turned = Image.fromarray(wave(341, 257)), Image.Exif()
    turned[0x0112] = 6
    return {
        "4:2:0": encoded(rgb, "JPEG", quality=92, subsampling="4:2:0"),
        "4:4:4, progressive, turned": encoded(rgb, "JPEG", subsampling="4:4:4", progressive=True, exif=turned),
        "grey JPEG": encoded(rgb.convert("L"), "JPEG"),
        "CMYK": encoded(Image.fromarray(wave(160, 120, 4), "CMYK"), "JPEG"),
        "decoded at a half": encoded(Image.fromarray(wave(1501, 1437) // 8 * 2 + 90), "JPEG", subsampling="4:2:0"),
    }


def exact() -> dict[str, bytes]:
    """Photos whose formats define each pixel, whatever library decodes them."""
    palette = Image.fromarray(wave(150, 301, 1)[..., 0] // 16)
    palette.putpalette([level for n in range(16) for level in (16 * n, 255 - 9 * n, 40 + 5 * n)])
    y, x = np.ogrid[:300, :160]
    deep = (x * 409 + y * 7).astype(np.uint16)
    return {
        "alpha": encoded(Image.fromarray(wave(150, 201, 4)), "PNG"),
        "palette with a transparent colour": encoded(palette, "PNG", transparency=3),
        "16 bit grey": encoded(Image.fromarray(deep), "PNG"),
        "smaller than stored": encoded(Image.fromarray(wave(41, 29)), "BMP"),
    }


def digest(data: bytes) -> str:
    sha = hashlib.sha256()
    for photo, side in zip(decode_for_sizes(data, SIDES), SIDES, strict=True):
        sha.update(resize_photo(photo, *fit(photo.width, photo.height, side)).tobytes())
    return sha.hexdigest()[:16]


def stored(data: bytes) -> str:
    ((jpeg, _, _),) = resize_and_encode(decode_for_sizes(data, SIDES[:1]), SIDES[:1], 90)
    return hashlib.sha256(jpeg).hexdigest()[:16]


def test_changed_pixels_need_a_new_version_of_the_pixel_code() -> None:
    got = {name: digest(data) for name, data in exact().items()}
    version, expected = GOLDEN
    libraries = {name: version for name, version in codec_versions().items() if not name.startswith("Resolute")}
    if libraries == LIBRARIES:
        got |= {name: digest(data) for name, data in jpegs().items()} | {"stored": stored(exact()["alpha"])}
    else:  # why: other decoders give other pixels, which their own versions tell
        expected = {name: expected[name] for name in got}
    assert (PIXELS, got) == (version, expected), (
        f"if you meant to change pixels, raise prep.convert.codecs.PIXELS and write GOLDEN again: {(PIXELS, got)}"
    )
    assert decode_for_sizes(jpegs()["decoded at a half"], SIDES)[0].averaged == 2
