"""Checks before training that DALI can decode an image, and computes its upright size.

In the graph a single undecodable image ends the run, so every image is decoded here once, at least as strictly as by
DALI (compared on thousands of damaged files): JPEGs by libjpeg-turbo, which is also DALI's CPU decoder, other formats
by Pillow. The format is detected from the content, not from the file name.
"""

from __future__ import annotations

import io
import struct
import warnings

import simplejpeg
from PIL import Image

__all__ = ["Unusable", "upright_size"]

_MAX_PIXELS = 1 << 26  # as prep: 8192 x 8192
_MAX_SIDE_PX = 65_535  # the index stores uint16
_ORIENTATION, _SHORT = 0x0112, 3  # Source: Exif 2.32, section 4.6.4; TIFF 6.0, page 15
# Other tags that DALI reads. Source: Exif 2.32, section 4.6.4; the values are rationals of 8 bytes.
_TEXTS = frozenset({0x010E, 0x010F, 0x0110, 0x0131, 0x0132, 0x8298})
_RATIONAL_BYTES = {0x011A: 8, 0x011B: 8, 0x013E: 16, 0x013F: 48, 0x0211: 24, 0x0214: 48}
_AMBIGUOUS = "EXIF orientation that decoders read differently"
_SCAN, _APP1 = 0xDA, 0xE1  # Source: ITU-T T.81, table B.1
_PNG_END = b"\0\0\0\0IEND\xaeB`\x82"
_EXIF_FLAG = 0x08  # Source: WebP container specification, Extended File Format
_FORMATS = ("PNG", "WEBP", "BMP")


class Unusable(Exception):
    """A sample cannot be used; the message is the reason, in a few words."""


def upright_size(data: bytes) -> tuple[int, int]:
    """(width, height) in px of an encoded image as DALI decodes it, with EXIF orientation applied.

    Accepts JPEG (baseline and progressive; grey, RGB and CMYK), PNG (any depth; DALI drops transparency), WebP without
    EXIF, and BMP. Raises `Unusable` for damaged files and for those that DALI does not decode.
    """
    if not data:
        raise Unusable("empty")
    if data[:2] == b"\xff\xd8":
        width, height = _jpeg_size(data)
        orientation = _orientation(_exif(data))
    else:
        width, height, exif = _pillow_size(data)
        orientation = _orientation([exif])
    return (height, width) if orientation >= 5 else (width, height)


def _jpeg_size(data: bytes) -> tuple[int, int]:
    try:
        height, width, _, _ = simplejpeg.decode_jpeg_header(data)
        _check_size(width, height)
        # why Gray: decodes all entropy-coded data, where damage shows, but skips colour conversion
        simplejpeg.decode_jpeg(data, "Gray")
    except ValueError as error:
        raise Unusable(f"damaged JPEG: {error}") from None
    return width, height


def _pillow_size(data: bytes) -> tuple[int, int, bytes]:
    """Width and height as stored, and the EXIF data."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
                kind, size = image.format, image.size
                _check_size(*size)
                image.verify()  # why: loading a PNG does not verify all of its checksums
            if kind == "PNG" and _PNG_END not in data:
                raise Unusable("damaged PNG: no end")
            if kind == "WEBP" and data[12:16] == b"VP8X" and data[20] & _EXIF_FLAG:
                raise Unusable("WebP with EXIF, which DALI 2.4 does not decode")
            with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
                image.load()
                exif = image.info.get("exif", b"") if kind == "PNG" else b""
        except Image.UnidentifiedImageError:
            raise Unusable("not a JPEG, PNG, WebP or BMP") from None
        except Unusable:
            raise
        except Exception as error:  # why: Pillow's plugins raise anything on damaged files
            raise Unusable(f"damaged: {' '.join(str(error).split()) or type(error).__name__}") from None
    return *size, exif.removeprefix(b"Exif\0\0")


def _check_size(width: int, height: int) -> None:
    if width * height > _MAX_PIXELS or max(width, height) > _MAX_SIDE_PX:
        raise Unusable(f"too large: {width}x{height} px")


def _exif(data: bytes) -> list[bytes]:
    """The TIFF structures in a JPEG's EXIF segments."""
    at, structures = 2, []
    while at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] != _SCAN:
        if data[at + 1] == 0xFF:  # a fill byte
            at += 1
            continue
        length = int.from_bytes(data[at + 2 : at + 4], "big")
        if data[at + 1] == _APP1 and data.startswith(b"Exif\0\0", at + 4):
            structures.append(data[at + 10 : at + 2 + length])
        at += 2 + length
    return structures


def _orientation(exif: list[bytes]) -> int:
    """EXIF orientation 1 to 8; 1 if there is none. Source: TIFF 6.0, section 2.

    Raises `Unusable` if decoders may disagree about it: a wrong guess would swap width and height.
    """
    exif = [tiff for tiff in exif if b"\x12\x01" in tiff or b"\x01\x12" in tiff]
    if not exif:
        return 1
    tiff = exif[0]
    order = "<" if tiff[:4] == b"II*\0" else ">"
    try:
        (first,) = struct.unpack_from(f"{order}I", tiff, 4)
        (count,) = struct.unpack_from(f"{order}H", tiff, first)
        entries = [struct.unpack_from(f"{order}HHII", tiff, first + 2 + 12 * k) for k in range(count)]
    except struct.error:  # cut short
        raise Unusable(_AMBIGUOUS) from None
    values = []
    for tag, kind, number, value in entries:
        # why: DALI reads these too, and ignores the whole EXIF if one of them is not inside
        nbytes = _RATIONAL_BYTES.get(tag, number if tag in _TEXTS and number > 4 else 0)
        if (nbytes and value + nbytes > len(tiff)) or (tag == _ORIENTATION and (kind, number) != (_SHORT, 1)):
            raise Unusable(_AMBIGUOUS)
        if tag == _ORIENTATION:
            values.append(value & 0xFFFF if order == "<" else value >> 16)
    if len(exif) > 1 or len(values) > 1 or tiff[:4] not in (b"II*\0", b"MM\0*") or first < 8:
        raise Unusable(_AMBIGUOUS)
    return values[0] if values and 1 <= values[0] <= 8 else 1
