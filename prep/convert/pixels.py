"""What the pixels of an image file mean: its colour profile, range, extra bands and orientation, as 8-bit sRGB.

Needs Pillow and NumPy alone: `resolute export` copies this file beside the program that predicts.

An embedded ICC profile other than sRGB is applied, whatever its name: a profile counts as sRGB if converting by it
changes no colour by more than `_SAME_LEVELS`. Only ICC profiles count; PNG's gAMA, cHRM and cICP, the colour space in
EXIF and the profiles in BMP and GIF files are ignored. A profile that cannot be used is ignored too, and reported.
Metadata never decide whether an image is accepted.
"""

from __future__ import annotations

import io
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.TiffImagePlugin import PREFIXES, TiffImageFile

__all__ = [
    "DEEP_BITS",
    "FROM_BOTTOM",
    "FROM_RIGHT",
    "UNCONVERTED",
    "Conversion",
    "ProfileUse",
    "RgbImage",
    "UnreadableError",
    "apply_orientation",
    "conversion_of",
    "is_deep",
    "orientation_of",
    "read_rgb",
]

Image.init()  # why: `Image.open(formats=...)` accepts only loaded plugins
_WANTED_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "AVIF")
_FORMATS: tuple[str, ...] = tuple(name for name in _WANTED_FORMATS if name in Image.OPEN)  # AVIF may be missing
DEEP_BITS = 16  # of the samples of a deep image: their range is that of 16 bits unless a setting says less
_ORIENTATION = 0x0112  # Source: Exif 2.32, section 4.6.4
FROM_RIGHT, FROM_BOTTOM = (2, 3, 6, 7), (3, 4, 7, 8)  # orientations to be mirrored, after being transposed

ProfileUse = Literal["none", "converted", "unusable"]  # "none" also for sRGB

_BAND_PIXELS = 1 << 20
_DEEP_GREY = ("I;16", "I;16L", "I;16B", "I;16N")
_PACKED, _PACKED_BITS = "I;12", 12  # the raw mode of TIFF's 12-bit grey, whose range the file says
_GREY = ("1", "L", "LA", "La", *_DEEP_GREY)

_SAME_LEVELS = 2  # of 255; real sRGB profiles stay within 1
_PROFILES_KEPT = 32
_MAX_PROFILE_BYTES = 1 << 24  # the largest real ones, of printers, have 3 MB
# Colours inside sRGB stay what they are, which a perceptual table, as its maker likes, does not promise. Black stays
# black (black point compensation), as ink on paper never is.
_INTENT, _BLACK_POINT = 1, 0x2000  # Source: lcms2.h, INTENT_RELATIVE_COLORIMETRIC, cmsFLAGS_BLACKPOINTCOMPENSATION
_DEVICES = (b"scnr", b"mntr", b"prtr", b"spac")  # Source: ICC.1:2022, table 18
_SPACES = {b"GRAY": "L", b"RGB ": "RGB", b"CMYK": "CMYK"}  # Source: ICC.1:2022, table 19

_MAX_TEXT_BYTES = 1 << 19
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# Source: TIFF 6.0, section 8 and appendix A; Adobe's technical notes for 330, 34665 and 50706
_SUBFILE, _BITS, _COMPRESSION, _PHOTOMETRIC, _SAMPLES, _PLANAR, _INK_SET = 254, 258, 259, 262, 277, 284, 332
_SUB_IFDS, _EXTRA, _FORMAT, _DNG_VERSION = 330, 338, 339, 50706
_PHOTOMETRICS = {
    0: "white-is-zero grey",
    1: "grey",
    2: "RGB",
    3: "palette",
    4: "mask",
    5: "CMYK",
    6: "YCbCr",
    8: "CIELab",
    9: "ICCLab",
    10: "ITULab",
    32803: "colour filter array",
    32844: "LogL",
    32845: "LogLuv",
}
_MAX_SAMPLES, _MAX_CONTIGUOUS = 1024, 6  # a pixel; the second is Pillow's limit for samples that are not in planes
_COLOUR_BANDS = {0: 1, 1: 1, 2: 3, 3: 1, 5: 4, 6: 3, 8: 3}
_SAMPLE_FORMATS = {2: "signed", 3: "float", 5: "complex", 6: "complex"}
_RAW = "camera raw: not supported, develop it to JPEG or TIFF"
_TO_8_BITS = "not supported, convert it to 8 or 16 bits unsigned"


class UnreadableError(ValueError):
    """An image that is not accepted; `str` of it is the reason, as `kind: detail`."""


@dataclass(frozen=True, kw_only=True)
class RgbImage:
    """An upright image: `pixels` (H, W, 3) uint8 sRGB, C-contiguous, and what was done to get them.

    `largest` is the largest sample that a deep image holds, 0 to 65 535 (of colours, to the next multiple of 256); None
    for images whose file says their range.
    """

    pixels: NDArray[np.uint8]
    profile: ProfileUse
    largest: int | None


def read_rgb(data: bytes, *, bits: int = DEEP_BITS, check: Callable[[Image.Image], None] | None = None) -> RgbImage:
    """Decode an image file with Pillow; of several frames the first is used.

    Alpha is composited over white. The samples of deep images (16 bits each), 0 to 2**bits - 1, become 0 to 255, and
    larger ones are clipped. `check(image)` is called before pixels are decoded, and may raise. Raises `UnreadableError`
    for what is not supported; Pillow raises many types on damaged files.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # why: broken EXIF is no reason to reject the image
        with _opened(data) as image:
            if check is not None:
                check(image)
            raw = _raw_mode(image)
            bits = _PACKED_BITS if raw == _PACKED else bits
            is_inverted = isinstance(image, _Tiff) and image.is_inverted
            image.load()
            if image.mode in ("I", "F"):
                raise UnreadableError(f"32 bits a pixel: {_TO_8_BITS}")
            largest = _largest(image, raw)
            low = _low_bytes(data, raw) if largest is not None and bits < DEEP_BITS else None
            orientation = orientation_of(image)
            pixels, profile = _to_rgb(image, low, bits, is_inverted=is_inverted)
    return RgbImage(pixels=apply_orientation(pixels, orientation), profile=profile, largest=largest)


def is_deep(data: bytes) -> bool:
    """Whether an image file has 16-bit samples, whose range its header does not say; False if it cannot be read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with _opened(data) as image:
                return _is_deep(image.mode, _raw_mode(image))
    except Exception:  # why: the conversion reports it
        return False


def apply_orientation(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Undo EXIF orientation 1..8. Source: Exif 2.32, section 4.6.4, tag Orientation."""
    if orientation == 1:
        return pixels
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in FROM_RIGHT:
        pixels = pixels[:, ::-1]
    if orientation in FROM_BOTTOM:
        pixels = pixels[::-1]
    return np.ascontiguousarray(pixels)


def orientation_of(image: Image.Image) -> int:
    """The EXIF orientation of an opened image; 1 if it is missing or broken."""
    try:
        value: Any = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # why: the pixels are fine, and Pillow raises many types on broken metadata
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


# ---- colour profiles


@dataclass(frozen=True)
class Conversion:
    """How pixels become sRGB: by `transform` from `mode` (L, RGB or CMYK), or, without one, not at all."""

    use: ProfileUse = "none"
    mode: str = "RGB"
    transform: Any = None

    def of_pixels(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """(H, W, 3) uint8 sRGB of RGB pixels, or of grey ones with three equal bands."""
        if self.transform is None:
            return pixels
        converted = np.empty_like(pixels)
        rows = max(1, _BAND_PIXELS // pixels.shape[1])
        for top in range(0, len(pixels), rows):
            converted[top : top + rows] = np.asarray(self.of_image(Image.fromarray(pixels[top : top + rows])))
        return converted

    def of_image(self, image: Image.Image) -> Image.Image:
        """An RGB image of one in any mode that converts to `mode`."""
        if self.transform is None:
            return image.convert("RGB")
        # why channel 0: grey that was converted to RGB
        colour = image.getchannel(0) if (self.mode, image.mode) == ("L", "RGB") else image.convert(self.mode)
        converted: Image.Image = self.transform.apply(colour)
        return converted


def conversion_of(profile: bytes | None, kind: str) -> Conversion:
    """The conversion of an image with an ICC profile; `kind` is L for any grey, CMYK, RGB for all else."""
    if not profile:
        return UNCONVERTED
    mode = _SPACES.get(profile[16:20], "")
    # why: grey that was made of colours often keeps their profile
    if (mode != kind and (mode, kind) != ("RGB", "L")) or len(profile) > _MAX_PROFILE_BYTES:
        return Conversion("unusable")
    return _cached_conversion(bytes(profile), mode)


UNCONVERTED = Conversion()


@lru_cache(_PROFILES_KEPT)
def _cached_conversion(profile: bytes, mode: str) -> Conversion:
    from PIL import ImageCms  # why here: most photos have no profile

    if profile[12:16] not in _DEVICES:
        return Conversion("unusable")
    try:
        transform = ImageCms.buildTransform(
            ImageCms.ImageCmsProfile(io.BytesIO(profile)),
            ImageCms.createProfile("sRGB"),
            mode,
            "RGB",
            ImageCms.Intent(_INTENT),
            ImageCms.Flags(_BLACK_POINT),
        )
        if mode != "CMYK" and _is_same(transform.apply(_colours(mode)), mode):
            return Conversion("none")
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        return Conversion("unusable")
    return Conversion("converted", mode, transform)


def _colours(mode: str) -> Image.Image:
    """All greys, and for RGB a cube of 17 x 17 x 17 colours, as an image."""
    greys = np.arange(256, dtype=np.uint8)[None]
    if mode == "L":
        return Image.fromarray(greys)
    levels = np.linspace(0, 255, 17).round().astype(np.uint8)
    cube = np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), -1).reshape(1, -1, 3)
    return Image.fromarray(np.concatenate([greys[..., None].repeat(3, -1), cube], 1))


def _is_same(converted: Image.Image, mode: str) -> bool:
    before, after = (np.asarray(image.convert("RGB")).astype(np.int16) for image in (_colours(mode), converted))
    return int(np.abs(after - before).max()) <= _SAME_LEVELS


# ---- opening


def _opened(data: bytes) -> Image.Image:
    """The image, of which no pixels are decoded yet; its profile, if it has one, in `info["icc_profile"]`."""
    if data.startswith(_PNG_SIGNATURE):
        essential, profile = _png_essentials(data)
        image: Image.Image = Image.open(io.BytesIO(essential), formats=("PNG",))
        if profile is not None:
            image.info["icc_profile"] = profile
        return image
    if data.startswith(tuple(PREFIXES)):
        if data[8:10] == b"CR":
            raise UnreadableError(_RAW)
        return _Tiff(io.BytesIO(data))
    return Image.open(io.BytesIO(data), formats=_FORMATS)


def _png_essentials(data: bytes) -> tuple[bytes, bytes | None]:
    """A PNG file without the chunks that decide neither pixels nor orientation, and its ICC profile.

    Pillow refuses files for the size of such chunks, which are of any size.

    A profile that is too large or damaged is b"?", which no conversion accepts. Raises `UnreadableError` for wrong
    checksums. Source: PNG 3rd edition, sections 5.3 and 11.3.2.3
    """
    parts, profile, pos = [data[:8]], None, 8
    while pos + 12 <= len(data):
        size, kind = int.from_bytes(data[pos : pos + 4], "big"), data[pos + 4 : pos + 8]
        end = pos + 12 + size
        is_critical = not kind[0] & 0x20
        if end > len(data) and is_critical:
            break
        stored = int.from_bytes(data[end - 4 : end], "big")
        is_whole = end <= len(data) and zlib.crc32(memoryview(data)[pos + 4 : end - 4]) == stored
        if not is_whole and (is_critical or kind == b"tRNS"):
            raise UnreadableError(f"damaged: wrong checksum of PNG chunk {kind.decode('latin-1')}")
        content = data[pos + 8 : end - 4]
        if is_critical or (is_whole and (kind in (b"tRNS", b"eXIf") or _has_orientation(kind, content))):
            parts.append(data[pos:end])
        elif kind == b"iCCP" and profile is None:
            profile = _inflated(content.partition(b"\0")[2][1:], _MAX_PROFILE_BYTES) if is_whole else b"?"
        pos = end
        if kind == b"IEND":
            return b"".join(parts), profile
    raise UnreadableError("truncated: PNG without its end, chunk IEND")


def _has_orientation(kind: bytes, content: bytes) -> bool:
    """Whether a text chunk of a PNG may have an orientation: EXIF as ImageMagick writes it, or XMP, of usual size."""
    keyword, _, text = content.partition(b"\0")
    if (kind, keyword) == (b"iTXt", b"XML:com.adobe.xmp"):
        is_packed, text = text[:1] == b"\1", text[2:].partition(b"\0")[2].partition(b"\0")[2]
    elif kind in (b"tEXt", b"zTXt") and keyword.startswith(b"Raw profile type "):
        is_packed, text = kind == b"zTXt", text[kind == b"zTXt" :]
    else:
        return False
    return (_inflated(text, _MAX_TEXT_BYTES) != b"?") if is_packed else len(text) <= _MAX_TEXT_BYTES


def _inflated(packed: bytes, limit: int) -> bytes:
    """The content of a zlib stream; b"?" if it is damaged or longer than `limit`."""
    unpacker = zlib.decompressobj()
    try:
        content = unpacker.decompress(packed, limit)
    except zlib.error:
        return b"?"
    return content if unpacker.eof else b"?"


class _Tiff(TiffImageFile):
    """A TIFF whose tags are obeyed where Pillow guesses, and whose first image is refused with a reason.

    A band counts as alpha only if ExtraSamples says so; other bands beyond the colours are ignored.
    """

    in_planes = False  # each band by itself
    is_inverted = False  # grey above 8 bits whose 0 is white, which Pillow leaves as it is

    def _setup(self) -> None:
        tags = self.tag_v2
        photometric: Any = tags.get(_PHOTOMETRIC)
        formats = set(tags.get(_FORMAT, (1,)))
        bits = tuple(tags.get(_BITS, (1,)))
        compression, is_planar = tags.get(_COMPRESSION, 1), tags.get(_PLANAR, 1) == 2
        samples = tags.get(_SAMPLES, 3 if compression in (6, 7) and photometric in (2, 6) else 1)
        what = f"{samples} x {bits[0]} bits, {_PHOTOMETRICS.get(photometric, photometric)}"
        if _DNG_VERSION in tags or (tags.get(_SUBFILE, 0) & 1 and _SUB_IFDS in tags) or photometric == 32803:
            raise UnreadableError(_RAW)
        if kind := next((_SAMPLE_FORMATS[each] for each in formats if each in _SAMPLE_FORMATS), None):
            raise UnreadableError(f"{kind} TIFF: {bits[0]} bits, {_TO_8_BITS}")
        if bits[0] > DEEP_BITS:
            raise UnreadableError(f"{bits[0]}-bit TIFF: {_TO_8_BITS}")
        if photometric is None:
            raise UnreadableError("TIFF not supported: no PhotometricInterpretation, so black may be white")
        if photometric not in _COLOUR_BANDS or (photometric == 5 and tags.get(_INK_SET, 1) != 1):
            raise UnreadableError(f"TIFF not supported: {what}; convert it to RGB")
        extra = samples - _COLOUR_BANDS[photometric]
        if photometric == 6 and samples == 1:  # grey by another name
            extra = 0
        if extra < 0 or samples > _MAX_SAMPLES:
            raise UnreadableError(f"TIFF not supported: {what}")
        meanings = (*tags.get(_EXTRA, ()), *[0] * extra)[:extra]
        meanings = tuple(each if each in (1, 2) else 0 for each in meanings)
        if any(meanings[1:]):
            if not meanings[0]:
                raise UnreadableError(f"TIFF not supported: {what}, alpha after other bands")
            meanings = (meanings[0], *[0] * (extra - 1))
        if is_planar and samples > 1:
            if photometric == 8 or (meanings[:1] > (0,) and _COLOUR_BANDS[photometric] == 1):
                raise UnreadableError(f"TIFF not supported: {what}, in separate planes; convert it to RGB")
            self.in_planes = True
            if compression == 1:  # why: with planes, only libtiff's decoder, of compressed files, is right
                tags[_COMPRESSION] = 8
        else:
            tags[_PLANAR] = 1
            if samples > _MAX_CONTIGUOUS:
                raise UnreadableError(f"TIFF not supported: {what}; convert it to 8-bit RGB")
        if meanings:
            tags[_EXTRA] = meanings
        elif _EXTRA in tags:
            del tags[_EXTRA]
        if photometric == 0 and bits[0] > 8:
            tags[_PHOTOMETRIC] = 1
            self.is_inverted = True
        tags[_FORMAT] = (1,)  # why: 4, undefined, is read as unsigned too
        try:
            super()._setup()
        except (SyntaxError, KeyError, IndexError):
            raise UnreadableError(f"TIFF not supported: {what}, {extra} extra; convert it to 8-bit RGB") from None


# ---- samples of any depth to 8 bits


def _raw_mode(image: Image.Image) -> str:
    """How the samples lie in the file, such as RGB;16B."""
    if not image.tile:  # type: ignore[attr-defined]
        return ""
    args: Any = image.tile[0].args  # type: ignore[attr-defined]
    return str(args if isinstance(args, str) else args[0] if args else "")


def _is_deep(mode: str, raw: str) -> bool:
    return raw != _PACKED and (mode in _DEEP_GREY or ";16" in raw)


def _largest(image: Image.Image, raw: str) -> int | None:
    """`RgbImage.largest` of a loaded image."""
    if not _is_deep(image.mode, raw):
        return None
    if image.mode in _DEEP_GREY:
        return int(np.asarray(image).max())
    bands: Any = image.getextrema()
    colours = len(image.getbands()) - image.mode.endswith("A")
    return int(max(high for _, high in bands[:colours])) << 8 | 255


def _low_bytes(data: bytes, raw: str) -> Image.Image | None:
    """The low bytes of the samples of a deep colour image, of which Pillow decodes the high ones; None for grey."""
    if raw.startswith("I;16"):
        return None
    kind, _, order = raw.partition(";16")
    low = _opened(data)
    in_planes = " in planes" * (isinstance(low, _Tiff) and low.in_planes)  # which libtiff reads in its own order
    if kind not in ("RGB", "RGBA", "RGBX") or in_planes:
        raise UnreadableError(
            f"16-bit {kind}{in_planes} not supported: with GREY_RANGE only grey, RGB and RGBA; convert it to one"
        )
    # why: read in the other byte order, the low byte of each sample takes the place of the high one
    other = {"B": "L", "L": "B", "N": "B" if sys.byteorder == "little" else "L"}[order]
    low.tile = [  # type: ignore[attr-defined]
        tile._replace(args=swapped if isinstance(tile.args, str) else (swapped, *tile.args[1:]))
        for tile in low.tile  # type: ignore[attr-defined]
        for swapped in [f"{kind};16{other}"]
    ]
    low.load()
    return low


def _scaled(samples: NDArray[np.uint16], bits: int, *, is_inverted: bool = False) -> NDArray[np.uint8]:
    """Samples, 0 to 2**bits - 1, as 0 to 255, rounded."""
    top = (1 << bits) - 1
    values = np.minimum(samples, top).astype(np.uint32)
    if is_inverted:
        values = top - values
    return ((values * 255 + top // 2) // top).astype(np.uint8)


def _to_rgb(
    image: Image.Image, low: Image.Image | None, bits: int, *, is_inverted: bool
) -> tuple[NDArray[np.uint8], ProfileUse]:
    """(height, width, 3) uint8 sRGB of a loaded image of any mode; only one band of rows at a time is copied.

    `low` has the low bytes of samples whose high ones are in `image`.
    """
    kind = "L" if image.mode in _GREY else "CMYK" if image.mode == "CMYK" else "RGB"
    # why not of Lab: Pillow's own conversion has it
    conversion = conversion_of(None if image.mode == "LAB" else image.info.get("icc_profile"), kind)
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    for top, band in _bands(image):
        rows = pixels[top : top + band.height]
        if band.mode in _DEEP_GREY:
            grey = np.asarray(band)
            rows[:] = np.asarray(conversion.of_image(Image.fromarray(_scaled(grey, bits, is_inverted=is_inverted))))
            if (transparent := band.info.get("transparency")) is not None:
                rows[grey == transparent] = 255
            continue
        if low is not None:
            band = _deep_band(band, low.crop((0, top, image.width, top + band.height)), bits)
        alpha = None
        if band.has_transparency_data:
            band = band.convert("LA").convert("RGBA") if band.mode == "La" else band.convert("RGBA")
            alpha, band = band.getchannel("A"), band.convert("RGB")
        band = conversion.of_image(band)
        if alpha is not None:
            white = Image.new("RGB", band.size, "white")
            white.paste(band, mask=alpha)
            band = white
        rows[:] = np.asarray(band)
    return pixels, conversion.use


def _deep_band(high: Image.Image, low: Image.Image, bits: int) -> Image.Image:
    """The samples of both as 8 bits, 0 to 2**bits - 1 as 0 to 255; alpha keeps its range of 16 bits."""
    samples = np.asarray(high).astype(np.uint16) << 8 | np.asarray(low)
    scaled = _scaled(samples, bits)
    if high.mode == "RGBA":
        scaled[..., 3] = np.asarray(high)[..., 3]
    deep = Image.fromarray(scaled, high.mode)
    if (transparent := high.info.get("transparency")) is not None:
        deep.info["transparency"] = transparent
    return deep


def _bands(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """Yield (top row, band) for horizontal bands of at most `_BAND_PIXELS` each."""
    rows = max(1, _BAND_PIXELS // image.width)
    for top in range(0, image.height, rows):
        yield top, image.crop((0, top, image.width, min(top + rows, image.height)))
