"""How does any image file become upright 8-bit RGB, or a reason why not?

Two ways: libjpeg-turbo, strictly, for plain JPEGs; Pillow for everything else, and for JPEGs that the first
way refused. Whatever cannot be decoded whole is a `Reject`; errors of our own are not caught here.
"""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

__all__ = ["MAX_PIXELS", "Reject", "decode"]

# Two images of 89 Mpx. Source: Pillow's limit for DecompressionBombError, Image.MAX_IMAGE_PIXELS * 2.
MAX_PIXELS = 178_956_970
MAX_SIDE_PX = 65_500  # Source: libjpeg-turbo's JPEG_MAX_DIMENSION; what we write has to fit it
_ORIENTATION = 0x0112  # Source: Exif 2.32, section 4.6.4
_DEEP_GREY = ("I;16", "I;16L", "I;16B", "I;16N")

Image.init()  # why: `Image.open(formats=...)` knows only the plugins that are loaded
_KNOWN = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "AVIF")
_FORMATS: tuple[str, ...] = tuple(name for name in _KNOWN if name in Image.OPEN)  # AVIF may be missing


class Reject(Exception):
    """This input is not taken; `str` of it says why, as `kind` or `kind: detail`."""


def decode(data: bytes) -> NDArray[np.uint8]:
    """Decode an image file's bytes to (height, width, 3) uint8 RGB, C-contiguous, EXIF orientation applied.

    Alpha is laid over white, CMYK converted, 16-bit grey scaled, the first frame of several taken; colour
    profiles are ignored. Raises `Reject` if there is no whole image of at most `MAX_PIXELS` in `data`.
    """
    if not data:
        raise Reject("empty file")
    if data[:2] == b"\xff\xd8":
        pixels = _plain_jpeg(data)
        if pixels is not None:
            return _upright(pixels, _jpeg_orientation(data))
    return _careful(data)


def _plain_jpeg(data: bytes) -> NDArray[np.uint8] | None:
    """The fast way; None where Pillow should have a look."""
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
        _check_size(int(width), int(height))
        if colorspace not in ("YCbCr", "Gray", "RGB"):
            return None
        pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(data)
        return pixels
    except ValueError:
        return None


def _jpeg_orientation(data: bytes) -> int:
    # why: a search is 100x cheaper than parsing, and most photos of a training set have no EXIF
    if b"Exif\0\0" not in data:
        return 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # why: broken EXIF is no reason to reject the picture
        try:
            with Image.open(io.BytesIO(data), formats=("JPEG",)) as image:
                return _orientation(image)
        except Exception:  # why: the pixels are fine, and Pillow may raise anything on broken metadata
            return 1


def _careful(data: bytes) -> NDArray[np.uint8]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
                _check_size(*image.size)
                image.load()
                orientation = _orientation(image)
                pixels = _rgb(image)
        except (Reject, MemoryError):
            raise
        except Image.UnidentifiedImageError:
            raise Reject("not an image") from None
        except Image.DecompressionBombError:
            raise Reject("too many pixels") from None
        except Exception as error:  # why: Pillow's plugins raise anything on damaged files
            text = " ".join(str(error).split())
            kind = "truncated" if "truncated" in text.lower() else "cannot be decoded"
            raise Reject(f"{kind}: {text or type(error).__name__}") from None
    return _upright(pixels, orientation)


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise Reject(f"too many pixels: {width}x{height}")
    if min(width, height) < 1 or max(width, height) > MAX_SIDE_PX:
        raise Reject(f"side out of range: {width}x{height}")


def _orientation(image: Image.Image) -> int:
    try:
        value: Any = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # why: see _jpeg_orientation
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _rgb(image: Image.Image) -> NDArray[np.uint8]:
    """A loaded Pillow image of any mode -> (height, width, 3) uint8."""
    if image.mode in _DEEP_GREY:
        grey = (np.asarray(image).astype(np.uint32) * 255 + 32_767) // 65_535
        return np.repeat(grey.astype(np.uint8)[..., None], 3, axis=2)
    if image.mode in ("I", "F"):
        raise Reject(f"depth not supported: 32 bits a pixel (mode {image.mode})")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return np.array(image.convert("RGB"))


def _upright(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Undo EXIF orientation 1..8. Source: Exif 2.32, section 4.6.4, tag Orientation."""
    if orientation == 1:
        return pixels
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return np.ascontiguousarray(pixels)
