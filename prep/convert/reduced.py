"""Decodes large JPEGs at 1/2, 1/4 or 1/8 of their size where the stored images stay the same within 50 dB.

The entropy decoding takes as long as at full size, but the inverse DCT, the colour conversion and the resize take less.
libjpeg-turbo's inverse DCTs for these three sizes give the means of pixels; at the other M/8, which have no vector
code, it is slower than at full size. Source of this and of the constants: benchmarks/results/LOG.md, "large photos".

The size to decode at follows from the photo and from `_limit(short_side)`, never from the other sizes of a set: a size
that is added later or repaired alone gets the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from .decode import MAX_PIXELS, JpegHeader, Photo, decode_reduced, jpeg_header
from .pixels import DEEP_BITS
from .resize import fit, halving_error

__all__ = ["decode_for_sizes"]

_FACTORS = (8, 4, 2)
# Shorter side of the reduced image, as a multiple of the stored one's. With 2.0, a third of real photos misses 50 dB.
_MIN_REMAINING = 2.75
# A factor on that, by chroma subsampling; JPEGs with others are decoded in full. libjpeg reduces the chroma of 4:2:0 by
# half as much as the luma, so it keeps the same detail, but not if only one direction is subsampled.
_CHROMA = {"444": 1, "420": 1, "Gray": 1, "422": 1.6, "440": 1.6}
# How much the stored image must be like that from half as many pixels a side, in dB. Above this, all real photos
# measured are within 50.4 dB of the full decode's image; detail that the means would fold into the image is below it.
_MIN_HALF_DB = 41.0
_SMALLEST_LIMIT = 256


def decode_for_sizes(
    data: bytes, short_sides: Sequence[int], max_pixels: int = MAX_PIXELS, *, bits: int = DEEP_BITS
) -> list[Photo]:
    """Decode an image file: one photo per short side (px), the same one for most; `bits` is as in `decode`.

    Raises `Reject` as `decode` does.
    """
    decoded: dict[int, Photo] = {}
    header = jpeg_header(data)

    def decode_once(factor: int) -> Photo:
        if factor not in decoded:
            decoded[factor] = decode_reduced(data, factor, header, max_pixels=max_pixels, bits=bits)
        return decoded[factor]

    photos: dict[int, Photo] = {}
    for limit in {_limit(short_side) for short_side in short_sides}:
        candidates = (decode_once(factor) for factor in _candidates(header, limit))
        photos[limit] = next((photo for photo in candidates if _is_accurate(photo, limit)), None) or decode_once(1)
    return [photos[_limit(short_side)] for short_side in short_sides]


def _limit(short_side: int) -> int:
    """The largest short side (px) that is decoded like this one."""
    return max(_SMALLEST_LIMIT, 1 << (short_side - 1).bit_length())


def _candidates(header: JpegHeader | None, limit: int) -> list[int]:
    """Factors that leave enough pixels for stored short sides up to `limit` px, largest first; none below threshold."""
    if header is None:
        return []
    height, width, _, subsampling = header
    needed = _MIN_REMAINING * limit * _CHROMA.get(subsampling, float("inf"))
    return [factor for factor in _FACTORS if min(height, width) >= needed * factor]


def _is_accurate(photo: Photo, limit: int) -> bool:
    """Whether the image stored at `limit` px can be expected to be the full decode's within 50 dB."""
    if photo.averaged == 1:  # why: no plain JPEG after all
        return True
    return halving_error(photo, *fit(photo.width, photo.height, limit)) <= 255**2 / 10 ** (_MIN_HALF_DB / 10)
