"""Decodes any supported image file to upright 8-bit RGB, or raises `Reject` with the reason.

Plain JPEGs go through libjpeg-turbo in strict mode, everything else through Pillow. A JPEG that libjpeg-turbo reports
as damaged is not tried again with Pillow, which would accept it with grey or garbled parts. An image that cannot be
decoded completely is a `Reject`; other exceptions are bugs and are not caught here.
"""

from __future__ import annotations

import io
import re
import warnings
from dataclasses import dataclass, replace

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from resolute.prep.sources.image_ref import MAX_BYTES
from resolute.prep.sources.reject import Reject

from .file_kinds import file_kind
from .jpeg_markers import BROKEN, JpegMarkers, jpeg_markers, scans_and_end, without_profile
from .pixels import (
    DEEP_BITS,
    FROM_BOTTOM,
    FROM_RIGHT,
    UNCONVERTED,
    Conversion,
    UnreadableError,
    apply_orientation,
    conversion_of,
    orientation_of,
    read_rgb,
)

__all__ = [
    "MAX_BYTES",
    "MAX_PIXELS",
    "MAX_SCANS",
    "JpegHeader",
    "Photo",
    "Reject",
    "decode",
    "decode_reduced",
    "jpeg_header",
]

# With 8192 x 8192 pixels, at up to 13 bytes each, a worker stays below 1 GiB for any file (benchmarks/results/LOG.md).
# Small files can be decompression bombs in two ways: by their pixels, and by the scans of a progressive JPEG, each over
# all pixels.
MAX_PIXELS = 1 << 26  # unless the set has another limit
MAX_SCANS = 100
MAX_SIDE_PX = 65_500  # Source: libjpeg-turbo's JPEG_MAX_DIMENSION, which the stored JPEGs have to fit too
_WEBP_SIDE_PX = 16_383  # limit of the format, applied to all frames of an animation together
_DECODER_COPIES = {"WEBP": 2}  # memory factor: the WebP decoder holds two canvases, and Pillow copies one twice
# BI_RLE8 and BI_RLE4. Refused because Pillow silently fills in pixels that the runs of a damaged file leave out.
_BMP_RUN_LENGTH = (1, 2)
JpegHeader = tuple[int, int, str, str]  # height, width, colorspace and subsampling of `simplejpeg.decode_jpeg_header`


@dataclass(frozen=True, kw_only=True)
class Photo:
    """A decoded image, upright, perhaps at a fraction of its size.

    `pixels` is (H, W, 3) uint8, C-contiguous; each is the mean of `averaged` x `averaged` pixels of the full image,
    which is `width` x `height` px. `box` (left, top, width, height) is where that image lies in `pixels`, in px of it:
    if its size is no multiple of `averaged`, it extends beyond them by a fraction of a pixel. `conversion` makes
    the pixels sRGB, once they are resized, which takes less time; `largest` is as in `RgbImage`.
    """

    pixels: NDArray[np.uint8]
    width: int
    height: int
    averaged: int
    box: tuple[float, float, float, float]
    conversion: Conversion = UNCONVERTED
    largest: int | None = None

    @classmethod
    def full(cls, pixels: NDArray[np.uint8]) -> Photo:
        height, width, _ = pixels.shape
        return cls(pixels=pixels, width=width, height=height, averaged=1, box=(0.0, 0.0, width, height))


def decode(data: bytes, max_pixels: int = MAX_PIXELS, *, bits: int = DEEP_BITS) -> NDArray[np.uint8]:
    """Decode the bytes of an image file to (height, width, 3) uint8 sRGB, C-contiguous, EXIF orientation applied.

    Embedded colour profiles are applied, alpha is composited over white, CMYK converted, 16-bit samples, 0 to
    2**`bits` - 1, scaled to 8 bits (`pixels.py`); of several frames the first is used. Raises `Reject` unless `data`
    holds a complete image of at most `max_pixels`.
    """
    photo = decode_reduced(data, 1, max_pixels=max_pixels, bits=bits)
    return photo.conversion.of_pixels(photo.pixels)


def jpeg_header(data: bytes) -> JpegHeader | None:
    """The header of a JPEG; None if libjpeg-turbo cannot read it. Reading it takes 0.02 ms."""
    try:
        return _read_header(data)
    except ValueError:
        return None


def _read_header(data: bytes) -> JpegHeader:
    try:
        header: JpegHeader = simplejpeg.decode_jpeg_header(data)
        return header
    except KeyError:  # a subsampling that libjpeg-turbo decodes and simplejpeg has no name for, such as 4:4:1
        at = jpeg_markers(data).frame
        colorspace = {1: "Gray", 3: "YCbCr"}.get(data[at + 5], "CMYK")
        return data[at + 1] << 8 | data[at + 2], data[at + 3] << 8 | data[at + 4], colorspace, "other"


def decode_reduced(
    data: bytes,
    factor: int,
    header: JpegHeader | None = None,
    *,
    max_pixels: int = MAX_PIXELS,
    bits: int = DEEP_BITS,
) -> Photo:
    """Decode like `decode`, but a plain JPEG to the means of `factor` x `factor` pixels; `factor` is 1, 2, 4 or 8.

    `header` is that of a JPEG, if it has been read already. The same files are rejected for the same reasons with any
    `factor`. Sides are at least `factor` px.
    """
    if not data:
        raise Reject("empty file")
    if len(data) > MAX_BYTES:
        raise Reject(f"too many bytes: {len(data)}")
    if data[:2] == b"\xff\xd8":
        markers = jpeg_markers(data)
        if markers.is_lossless or markers.bits != 8:
            kind = "lossless" if markers.is_lossless else f"{markers.bits}-bit"
            raise Reject(f"{kind} JPEG: not supported, convert it to PNG")
        profile = markers.profile
        if profile == BROKEN:  # why: libjpeg-turbo calls the whole file corrupt
            data = without_profile(data, markers)
            markers = jpeg_markers(data)
        decoded = _decode_jpeg(data, factor, header, max_pixels, markers)
        if decoded is not None:
            pixels, (height, width, colorspace, _) = decoded
            photo = _upright(pixels, width, height, factor, _jpeg_orientation(data) if markers.has_exif else 1)
            return replace(photo, conversion=conversion_of(profile, "L" if colorspace == "Gray" else "RGB"))
        photo = _decode_with_pillow(data, max_pixels, bits)
        return replace(photo, conversion=conversion_of(profile, "")) if profile == BROKEN else photo
    return _decode_with_pillow(data, max_pixels, bits)


def _decode_jpeg(
    data: bytes, factor: int, header: JpegHeader | None, max_pixels: int, markers: JpegMarkers
) -> tuple[NDArray[np.uint8], JpegHeader] | None:
    """The pixels from libjpeg-turbo, and the header; None if Pillow has to try.

    Raises `Reject` for damage and for exceeded limits.
    """
    scans, _ = scans_and_end(data, markers.first_scan) if markers.is_progressive else (1, 0)
    if scans > MAX_SCANS:
        raise Reject(f"too many scans: {scans}")
    try:
        header = header or _read_header(data)
        height, width, colorspace, _ = header
        _check_size(int(width), int(height), max_pixels)
        if colorspace not in ("YCbCr", "Gray", "RGB"):
            simplejpeg.decode_jpeg(data, "CMYK")
            return None  # why: Pillow knows which CMYK files are inverted
        least = {"min_height": -(-height // factor), "min_width": -(-width // factor)} if factor > 1 else {}
        return simplejpeg.decode_jpeg(data, "RGB", **least), header
    except (ValueError, LookupError) as error:
        complaint = str(error)
        # why: the first scan of a progressive file covers the whole picture, so a file that breaks off later is
        # only less sharp. Source of the message texts: libjpeg-turbo's jerror.h
        harmless = scans > 1 or _only_padding(data, complaint, markers)
        if "Corrupt JPEG data" in complaint and not harmless:
            raise Reject(f"damaged: {complaint}") from None
        return None


def _only_padding(data: bytes, complaint: str, markers: JpegMarkers) -> bool:
    """Whether the bytes that libjpeg-turbo skipped before the end of the image are mere padding."""
    extra = re.search(r"(\d+) extraneous bytes before marker 0xd9", complaint)
    _, end = scans_and_end(data, markers.first_scan)
    return extra is not None and not data[end - int(extra[1]) : end].strip(b"\0\xff")


def _jpeg_orientation(data: bytes) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # why: broken EXIF is no reason to reject the image
        try:
            with Image.open(io.BytesIO(data), formats=("JPEG",)) as image:
                return orientation_of(image)
        except Exception:  # why: the pixels are fine, and Pillow raises many types on broken metadata
            return 1


def _decode_with_pillow(data: bytes, max_pixels: int, bits: int) -> Photo:
    def check(image: Image.Image) -> None:
        _check_size(*image.size, max_pixels // _DECODER_COPIES.get(image.format or "", 1))
        if image.format == "BMP" and image.info.get("compression") in _BMP_RUN_LENGTH:
            raise Reject("compression not supported: run-length encoded BMP")
        if image.format == "WEBP" and image.n_frames * image.height > _WEBP_SIDE_PX:  # type: ignore[attr-defined]
            raise Reject(f"too many frames: {image.n_frames}")  # type: ignore[attr-defined]

    try:
        image = read_rgb(data, bits=bits, check=check)
    except (Reject, MemoryError):
        raise
    except UnreadableError as error:
        raise Reject(str(error)) from None
    except Image.UnidentifiedImageError:
        raise Reject(file_kind(data)) from None
    except Image.DecompressionBombError:  # Pillow's own limit, which workers lift
        raise Reject("too many pixels") from None
    except Exception as error:  # why: Pillow's plugins raise many types on damaged files
        text = " ".join(str(error).split())
        kind = "truncated" if "truncated" in text.lower() else "cannot be decoded"
        raise Reject(f"{kind}: {text or type(error).__name__}") from None
    return replace(Photo.full(image.pixels), conversion=Conversion(image.profile), largest=image.largest)


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise Reject(f"too many pixels: {width}x{height}")
    if min(width, height) < 1 or max(width, height) > MAX_SIDE_PX:
        raise Reject(f"side out of range: {width}x{height}")


def _upright(pixels: NDArray[np.uint8], width: int, height: int, factor: int, orientation: int) -> Photo:
    """`pixels` of libjpeg, `factor` times smaller than `width` x `height`, as a `Photo`."""
    if factor == 1:
        return Photo.full(apply_orientation(pixels, orientation))
    # why: a pixel that is only partly inside the image is the mean of whatever the encoder has put beyond its edge
    inside = np.ascontiguousarray(pixels[: height // factor, : width // factor])
    pixels = apply_orientation(inside, orientation)
    if orientation >= 5:
        width, height = height, width
    across, down = width / factor, height / factor
    left = pixels.shape[1] - across if orientation in FROM_RIGHT else 0.0
    top = pixels.shape[0] - down if orientation in FROM_BOTTOM else 0.0
    return Photo(pixels=pixels, width=width, height=height, averaged=factor, box=(left, top, across, down))
