"""Copies of photos as people and programs make them, for measuring how many are recognised."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageOps

__all__ = ["KINDS", "ONLY_REPORTED", "Kind"]

Kind = Callable[[Image.Image, np.random.Generator], Image.Image]
_QUALITY = 92  # of every copy unless its kind says otherwise


def _encoded(image: Image.Image, quality: int = _QUALITY) -> Image.Image:
    """The image after a JPEG of that quality."""
    content = io.BytesIO()
    image.save(content, "JPEG", quality=quality)
    return Image.open(io.BytesIO(content.getvalue())).convert("RGB")


def _half(image: Image.Image) -> Image.Image:
    return image.resize((max(1, image.width // 2), max(1, image.height // 2)), Image.Resampling.BICUBIC)


def _cropped(image: Image.Image, left: float, right: float, top: float, bottom: float) -> Image.Image:
    """The image without these fractions of its width and height."""
    width, height = image.size
    return image.crop(
        (round(left * width), round(top * height), round((1 - right) * width), round((1 - bottom) * height))
    )


def _off_one_side(image: Image.Image, fraction: float, random: np.random.Generator) -> Image.Image:
    return _cropped(image, *np.where(np.arange(4) == random.integers(4), fraction, 0.0).tolist())


def _off_both(image: Image.Image, fraction: float, random: np.random.Generator) -> Image.Image:
    """Without a fraction of the width and of the height, divided at random between opposite sides."""
    x, y = random.random(2).tolist()
    return _cropped(image, fraction * x, fraction * (1 - x), fraction * y, fraction * (1 - y))


def _bar_over(image: Image.Image, fraction: float, random: np.random.Generator, sides: int = 1) -> Image.Image:
    """A black or white bar over one side, or over two opposite ones."""
    copy, (width, height) = image.copy(), image.size
    draw, colour = ImageDraw.Draw(copy), (0, 255)[random.integers(2)]
    across, down = round(fraction * width), round(fraction * height)
    bars = [
        (0, 0, width, down - 1),
        (0, height - down, width, height),
        (0, 0, across - 1, height),
        (width - across, 0, width, height),
    ]
    first = int(random.integers(4)) if sides == 1 else 2 * int(random.integers(2))
    for bar in bars[first : first + sides]:
        draw.rectangle(bar, fill=(colour,) * 3)
    return copy


def _bar_added(image: Image.Image, fraction: float, random: np.random.Generator) -> Image.Image:
    """A black or white bar beside one side, which makes the photo larger."""
    border = np.zeros(4, int)
    side = int(random.integers(4))
    border[side] = round(fraction * (image.width if side % 2 == 0 else image.height))
    left, top, right, bottom = border.tolist()
    return ImageOps.expand(image, (left, top, right, bottom), fill=((0,) * 3, (255,) * 3)[random.integers(2)])


def _framed(image: Image.Image, fraction: float) -> Image.Image:
    return ImageOps.expand(image, round(fraction * min(image.size)), fill=(255, 255, 255))


def _turned(image: Image.Image, degrees: float) -> Image.Image:
    """Turned, and cut so that no corner is empty."""
    return _cropped(image.rotate(degrees, Image.Resampling.BICUBIC), *[0.025 * abs(degrees)] * 4)


KINDS: dict[str, Kind] = {
    "mirrored": lambda image, _: _encoded(ImageOps.mirror(image)),
    "JPEG quality 50": lambda image, _: _encoded(image, 50),
    "half size": lambda image, _: _encoded(_half(image)),
    "grey": lambda image, _: _encoded(image.convert("L").convert("RGB")),
    "brightness -15 %": lambda image, _: _encoded(ImageEnhance.Brightness(image).enhance(0.85)),
    "brightness +15 %": lambda image, _: _encoded(ImageEnhance.Brightness(image).enhance(1.15)),
    "contrast -25 %": lambda image, _: _encoded(ImageEnhance.Contrast(image).enhance(0.75)),
    "contrast +25 %": lambda image, _: _encoded(ImageEnhance.Contrast(image).enhance(1.25)),
    "crop 5 %, one side": lambda image, random: _encoded(_off_one_side(image, 0.05, random)),
    "crop 10 %, one side": lambda image, random: _encoded(_off_one_side(image, 0.10, random)),
    "crop 5 % of width and height": lambda image, random: _encoded(_off_both(image, 0.05, random)),
    "crop 10 % of width and height": lambda image, random: _encoded(_off_both(image, 0.10, random)),
    "crop 5 % off all sides": lambda image, _: _encoded(_cropped(image, *[0.05] * 4)),
    "central square": lambda image, _: _encoded(ImageOps.fit(image, (min(image.size),) * 2)),
    "mirrored, crop 5 %, quality 50": lambda image, random: _encoded(
        _off_both(ImageOps.mirror(image), 0.05, random), 50
    ),
    "bar 8 % over one side": lambda image, random: _encoded(_bar_over(image, 0.08, random)),
    "bar 8 % added at one side": lambda image, random: _encoded(_bar_added(image, 0.08, random)),
    "bars 8 % over two sides": lambda image, random: _encoded(_bar_over(image, 0.08, random, sides=2)),
    "frame 8 %": lambda image, _: _encoded(_framed(image, 0.08)),
    "turned by 3 degrees": lambda image, _: _encoded(_turned(image, 3)),
    "turned by 6 degrees": lambda image, _: _encoded(_turned(image, 6)),
}
# Kinds that the method is not made for.
ONLY_REPORTED = ("bars 8 % over two sides", "frame 8 %", "turned by 3 degrees", "turned by 6 degrees")
