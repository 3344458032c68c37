"""Decodes any supported image file to upright 8-bit RGB, or raises `Reject` with the reason.

Plain JPEGs go through libjpeg-turbo in strict mode, everything else through Pillow. A JPEG that libjpeg-turbo reports
as damaged is not tried again with Pillow, which would accept it with grey or garbled parts. An image that cannot be
decoded completely is a `Reject`; other exceptions are bugs and are not caught here.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from resolute.prep.sources.image_ref import MAX_BYTES
from resolute.prep.sources.reject import Reject

__all__ = ["MAX_BYTES", "MAX_PIXELS", "MAX_SCANS", "JpegHeader", "Photo", "Reject", "decode", "decode_reduced"]

# With 8192 x 8192 pixels, at up to 13 bytes each, a worker stays below 1 GiB for any file (benchmarks/results/LOG.md).
# Small files can be decompression bombs in two ways: by their pixels, and by the scans of a progressive JPEG, each over
# all pixels.
MAX_PIXELS = 1 << 26  # unless the set has another limit
MAX_SCANS = 100
MAX_SIDE_PX = 65_500  # Source: libjpeg-turbo's JPEG_MAX_DIMENSION, which the stored JPEGs have to fit too
_ORIENTATION = 0x0112  # Source: Exif 2.32, section 4.6.4
_FROM_RIGHT, _FROM_BOTTOM = (2, 3, 6, 7), (3, 4, 7, 8)  # orientations to be mirrored, after being transposed
_SCAN, _APP1, _PROGRESSIVE = 0xDA, 0xE1, (0xC2, 0xCA)  # Source: ITU-T T.81, table B.1
_WEBP_SIDE_PX = 16_383  # limit of the format, applied to all frames of an animation together
_BAND_PIXELS = 1 << 20
_DECODER_COPIES = {"WEBP": 2}  # memory factor: the WebP decoder holds two canvases, and Pillow copies one twice
# BI_RLE8 and BI_RLE4. Refused because Pillow silently fills in pixels that the runs of a damaged file leave out.
_BMP_RUN_LENGTH = (1, 2)
JpegHeader = tuple[int, int, str, str]  # height, width, colorspace and subsampling of `simplejpeg.decode_jpeg_header`
_DEEP_GREY = ("I;16", "I;16L", "I;16B", "I;16N")

Image.init()  # why: `Image.open(formats=...)` accepts only loaded plugins
_WANTED_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "AVIF")
_FORMATS: tuple[str, ...] = tuple(name for name in _WANTED_FORMATS if name in Image.OPEN)  # AVIF may be missing


@dataclass(frozen=True, kw_only=True)
class Photo:
    """A decoded image, upright, perhaps at a fraction of its size.

    `pixels` is (H, W, 3) uint8 RGB, C-contiguous; each is the mean of `averaged` x `averaged` pixels of the full image,
    which is `width` x `height` px. `box` (left, top, width, height) is where that image lies in `pixels`, in px of it:
    if its size is no multiple of `averaged`, it extends beyond them by a fraction of a pixel.
    """

    pixels: NDArray[np.uint8]
    width: int
    height: int
    averaged: int
    box: tuple[float, float, float, float]

    @classmethod
    def full(cls, pixels: NDArray[np.uint8]) -> Photo:
        height, width, _ = pixels.shape
        return cls(pixels=pixels, width=width, height=height, averaged=1, box=(0.0, 0.0, width, height))


def decode(data: bytes, max_pixels: int = MAX_PIXELS) -> NDArray[np.uint8]:
    """Decode the bytes of an image file to (height, width, 3) uint8 RGB, C-contiguous, EXIF orientation applied.

    Alpha is composited over white, CMYK converted, 16-bit grey scaled to 8 bits; of several frames the first is used.
    Colour profiles are ignored. Raises `Reject` unless `data` holds a complete image of at most `max_pixels`.
    """
    return decode_reduced(data, 1, max_pixels=max_pixels).pixels


def decode_reduced(
    data: bytes, factor: int, header: JpegHeader | None = None, *, max_pixels: int = MAX_PIXELS
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
        segments = _segments(data)
        progressive = any(marker in _PROGRESSIVE for marker, _ in segments)
        decoded = _decode_jpeg(data, factor, header, max_pixels, progressive=progressive)
        if decoded is not None:
            return _upright(*decoded, factor, _jpeg_orientation(data, segments))
    return Photo.full(_decode_with_pillow(data, max_pixels))


def _segments(data: bytes) -> list[tuple[int, int]]:
    """(marker, offset of its content) of a JPEG's segments up to the first scan; stops at the first malformed one."""
    segments, pos = [], 2
    while pos + 4 <= len(data) and data[pos] == 0xFF:
        marker = data[pos + 1]
        if marker == 0xFF:  # a fill byte
            pos += 1
            continue
        segments.append((marker, pos + 4))
        if marker == _SCAN:
            break
        pos += 2 + (data[pos + 2] << 8 | data[pos + 3])
    return segments


def _decode_jpeg(
    data: bytes, factor: int, header: JpegHeader | None, max_pixels: int, *, progressive: bool
) -> tuple[NDArray[np.uint8], int, int] | None:
    """(pixels, full width, full height) from libjpeg-turbo; None if Pillow has to try.

    Raises `Reject` for damage and for exceeded limits.
    """
    scans = data.count(b"\xff%c" % _SCAN) if progressive else 1
    if scans > MAX_SCANS:
        raise Reject(f"too many scans: {scans}")
    try:
        height, width, colorspace, _ = header or simplejpeg.decode_jpeg_header(data)
        _check_size(int(width), int(height), max_pixels)
        direct = colorspace in ("YCbCr", "Gray", "RGB")
        if not direct:
            simplejpeg.decode_jpeg(data, "CMYK")
            return None  # why: Pillow knows which CMYK files are inverted
        least = {"min_height": -(-height // factor), "min_width": -(-width // factor)} if factor > 1 else {}
        return simplejpeg.decode_jpeg(data, "RGB", **least), width, height
    except ValueError as error:
        complaint = str(error)
        # why: the first scan of a progressive file covers the whole picture, so a file that breaks off later is
        # only less sharp. Source of the message texts: libjpeg-turbo's jerror.h
        harmless = scans > 1 or _only_padding(data, complaint)
        if "Corrupt JPEG data" in complaint and not harmless:
            raise Reject(f"damaged: {complaint}") from None
        return None


def _only_padding(data: bytes, complaint: str) -> bool:
    """Whether the bytes that libjpeg-turbo skipped before the end of the image are mere padding."""
    extra = re.search(r"(\d+) extraneous bytes before marker 0xd9", complaint)
    end = data.rfind(b"\xff\xd9")
    return extra is not None and not data[end - int(extra[1]) : end].strip(b"\0\xff")


def _jpeg_orientation(data: bytes, segments: list[tuple[int, int]]) -> int:
    if not any(marker == _APP1 and data.startswith(b"Exif\0\0", pos) for marker, pos in segments):
        return 1  # why: most training photos have no EXIF, and asking Pillow costs 0.3 ms
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # why: broken EXIF is no reason to reject the image
        try:
            with Image.open(io.BytesIO(data), formats=("JPEG",)) as image:
                return _orientation(image)
        except Exception:  # why: the pixels are fine, and Pillow raises many types on broken metadata
            return 1


def _decode_with_pillow(data: bytes, max_pixels: int) -> NDArray[np.uint8]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
                _check_size(*image.size, max_pixels // _DECODER_COPIES.get(image.format or "", 1))
                if image.format == "PNG":
                    _check_png(data)
                if image.format == "BMP" and image.info.get("compression") in _BMP_RUN_LENGTH:
                    raise Reject("compression not supported: run-length encoded BMP")
                if image.format == "WEBP" and image.n_frames * image.height > _WEBP_SIDE_PX:  # type: ignore[attr-defined]
                    raise Reject(f"too many frames: {image.n_frames}")  # type: ignore[attr-defined]
                image.load()
                orientation = _orientation(image)
                pixels = _to_rgb(image)
        except (Reject, MemoryError):
            raise
        except Image.UnidentifiedImageError:
            raise Reject("not an image") from None
        except Image.DecompressionBombError:  # Pillow's own limit, which workers lift
            raise Reject("too many pixels") from None
        except Exception as error:  # why: Pillow's plugins raise many types on damaged files
            text = " ".join(str(error).split())
            kind = "truncated" if "truncated" in text.lower() else "cannot be decoded"
            raise Reject(f"{kind}: {text or type(error).__name__}") from None
    return _apply_orientation(pixels, orientation)


def _check_png(data: bytes) -> None:
    with Image.open(io.BytesIO(data), formats=("PNG",)) as image:
        image.verify()  # why: loading does not check the checksums of pixel data


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise Reject(f"too many pixels: {width}x{height}")
    if min(width, height) < 1 or max(width, height) > MAX_SIDE_PX:
        raise Reject(f"side out of range: {width}x{height}")


def _orientation(image: Image.Image) -> int:
    try:
        value: Any = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # why: see _jpeg_orientation
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _to_rgb(image: Image.Image) -> NDArray[np.uint8]:
    """Convert a loaded Pillow image of any mode to (height, width, 3) uint8; only one band at a time is copied."""
    if image.mode in ("I", "F"):
        raise Reject(f"depth not supported: 32 bits a pixel (mode {image.mode})")
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    for top, band in _bands(image):
        rows = pixels[top : top + band.height]
        if band.mode in _DEEP_GREY:
            grey = np.asarray(band)
            rows[:] = ((grey.astype(np.uint32) * 255 + 32_767) // 65_535)[..., None]
            if (transparent := band.info.get("transparency")) is not None:
                rows[grey == transparent] = 255
            continue
        if band.has_transparency_data:
            colour = band.convert("RGBA")
            band = Image.new("RGB", colour.size, "white")
            band.paste(colour, mask=colour)
        rows[:] = np.asarray(band.convert("RGB"))
    return pixels


def _bands(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """Yield (top row, band) for horizontal bands of at most `_BAND_PIXELS` each."""
    rows = max(1, _BAND_PIXELS // image.width)
    for top in range(0, image.height, rows):
        yield top, image.crop((0, top, image.width, min(top + rows, image.height)))


def _upright(pixels: NDArray[np.uint8], width: int, height: int, factor: int, orientation: int) -> Photo:
    """`pixels` of libjpeg, `factor` times smaller than `width` x `height`, as a `Photo`."""
    if factor == 1:
        return Photo.full(_apply_orientation(pixels, orientation))
    # why: a pixel that is only partly inside the image is the mean of whatever the encoder has put beyond its edge
    inside = np.ascontiguousarray(pixels[: height // factor, : width // factor])
    pixels = _apply_orientation(inside, orientation)
    if orientation >= 5:
        width, height = height, width
    across, down = width / factor, height / factor
    left = pixels.shape[1] - across if orientation in _FROM_RIGHT else 0.0
    top = pixels.shape[0] - down if orientation in _FROM_BOTTOM else 0.0
    return Photo(pixels=pixels, width=width, height=height, averaged=factor, box=(left, top, across, down))


def _apply_orientation(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Undo EXIF orientation 1..8. Source: Exif 2.32, section 4.6.4, tag Orientation."""
    if orientation == 1:
        return pixels
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in _FROM_RIGHT:
        pixels = pixels[:, ::-1]
    if orientation in _FROM_BOTTOM:
        pixels = pixels[::-1]
    return np.ascontiguousarray(pixels)
