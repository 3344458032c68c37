"""Draws one demo photo: a textured object, lit and shaded, at a random place on a cluttered background.

Shape and texture together define the class; colour, position, scale, rotation, light and background carry no
information about it. Drawn with numpy and Pillow only, from one random generator per photo.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

__all__ = ["CLASSES", "draw"]

Floats = NDArray[np.floating[Any]]
CLASSES = tuple(
    f"{texture}-{shape}"
    for shape, textures in (
        ("cross", ("dotted", "striped")),
        ("disc", ("dotted", "striped")),
        ("ring", ("checked", "striped")),
        ("star", ("checked", "dotted")),
        ("triangle", ("checked", "striped")),
    )
    for texture in textures
)
_GRAIN_PX = 1024
_NOISE = (4.5, 10.0)  # sensor noise in levels of 255; with JPEG quality 90-95 it determines the file size


def draw(rng: Generator, label: int, *, base_px: tuple[int, int] = (500, 375)) -> NDArray[np.uint8]:
    """Draw one photo of class `label` as (H, W, 3) uint8 RGB.

    The sides vary by 40 % around `base_px` (width, height); about a third of the photos are upright.
    """
    scale = rng.uniform(0.6, 1.4)
    width, height = (round(side * scale * rng.uniform(0.9, 1.1)) for side in base_px)
    if rng.random() < 0.35:
        width, height = height, width
    # why: drawn at half size and enlarged, the background is out of focus as in photos, and four times cheaper
    image = _background(rng, width // 2, height // 2)
    _clutter(rng, image)
    pixels = np.asarray(image.resize((width, height), Image.Resampling.BICUBIC)).astype(np.float32)
    texture, _, shape = CLASSES[label].partition("-")
    _put_object(rng, pixels, shape, texture)
    row, column = rng.integers(0, _GRAIN_PX - np.array([height, width]))
    pixels += _grain()[row : row + height, column : column + width] * np.float32(rng.uniform(*_NOISE))
    return np.clip(pixels, 0, 255, out=pixels).astype(np.uint8)


def _background(rng: Generator, width: int, height: int) -> Image.Image:
    """Two layers of coloured 1/f noise over a gradient that often has a horizon, darkened towards the corners."""
    top, bottom = _muted(rng), _muted(rng)
    down = np.linspace(0, 1, height, dtype=np.float32)
    if rng.random() < 0.5:
        down = 1 / (1 + np.exp(-(down - np.float32(rng.uniform(0.3, 0.7))) * np.float32(rng.uniform(10, 60))))
    layers = (top + (bottom - top) * down[:, None])[:, None, :]
    for strength in (rng.uniform(15, 35), rng.uniform(8, 25)):
        tint = (1 + 0.35 * rng.standard_normal(3)).astype(np.float32) * np.float32(strength)
        layers = layers + _cloud(rng, width, height)[..., None] * tint
    x = np.linspace(-1, 1, width, dtype=np.float32)[None, :] - np.float32(rng.uniform(-0.3, 0.3))
    y = np.linspace(-1, 1, height, dtype=np.float32)[:, None] - np.float32(rng.uniform(-0.3, 0.3))
    layers *= (1 - np.float32(rng.uniform(0, 0.25)) * (x * x + y * y))[..., None]
    return Image.fromarray(np.clip(layers, 0, 255).astype(np.uint8))


def _cloud(rng: Generator, width: int, height: int) -> Floats:
    """(height, width) noise of unit variance: each octave is twice as fine and `roughness` times as strong."""
    octaves, roughness = 7, np.float32(rng.uniform(0.45, 0.75))
    sizes = [(max(2, width >> k), max(2, height >> k)) for k in reversed(range(octaves))]
    cloud = rng.standard_normal(sizes[0][::-1], dtype=np.float32)
    gain = np.float32(1)
    for w, h in sizes[1:-1]:
        gain *= roughness
        cloud = np.asarray(Image.fromarray(cloud).resize((w, h), Image.Resampling.BICUBIC))
        cloud = cloud + gain * rng.standard_normal((h, w), dtype=np.float32)
    cloud = np.asarray(Image.fromarray(cloud).resize((width, height), Image.Resampling.BICUBIC))
    return (cloud - cloud.mean()) / cloud.std()


def _clutter(rng: Generator, image: Image.Image) -> None:
    """Draw half-transparent blobs, polygons and lines, some larger and some smaller than the object."""
    canvas = ImageDraw.Draw(image, "RGBA")
    side = min(image.size)
    for _ in range(rng.integers(6, 15)):
        x, y = rng.uniform(0, image.width), rng.uniform(0, image.height)
        size = side * rng.uniform(0.03, 0.3)
        fill = (*(int(c) for c in _muted(rng)), int(rng.integers(90, 256)))
        kind = rng.integers(4)
        if kind == 0:
            w, h = size * rng.uniform(0.3, 1, 2)
            canvas.ellipse((x - w, y - h, x + w, y + h), fill=fill)
        elif kind == 1:
            angles = np.sort(rng.uniform(0, 2 * np.pi, rng.integers(3, 7)))
            reach = size * rng.uniform(0.4, 1, len(angles))
            corners = zip(x + reach * np.cos(angles), y + reach * np.sin(angles), strict=True)
            canvas.polygon([(float(a), float(b)) for a, b in corners], fill=fill)
        else:
            dx, dy = rng.normal(0, side * 0.4, 2)
            canvas.line((x, y, x + dx, y + dy), fill=fill, width=int(rng.integers(1, 2 + side // 50)))


def _put_object(rng: Generator, pixels: Floats, shape: str, texture: str) -> None:
    """Draw the object into `pixels` (H, W, 3) in place, with a shadow below it and shading across it."""
    height, width = pixels.shape[:2]
    radius = min(height, width) * rng.uniform(0.3, 0.7) / 2
    cx, cy = rng.uniform(radius * 0.9, width - radius * 0.9), rng.uniform(radius * 0.9, height - radius * 0.9)
    angle = rng.uniform(0, 2 * np.pi)
    reach = int(radius * 1.3) + 2
    x0, x1 = max(0, int(cx) - reach), min(width, int(cx) + reach)
    y0, y1 = max(0, int(cy) - reach), min(height, int(cy) + reach)
    x = (np.arange(x0, x1, dtype=np.float32)[None, :] - np.float32(cx)) / np.float32(radius)
    y = (np.arange(y0, y1, dtype=np.float32)[:, None] - np.float32(cy)) / np.float32(radius)
    squash = np.float32(rng.uniform(0.8, 1.0))  # as if seen from the side
    cos, sin = np.float32(np.cos(angle)), np.float32(np.sin(angle))
    u, v = (x * cos + y * sin) / squash, y * cos - x * sin
    edge = np.float32(radius)
    mask = np.clip(_distance(shape, u, v) * edge + 0.5, 0, 1)[..., None]
    turn = rng.uniform(0, np.pi)
    s = u * np.float32(np.cos(turn)) + v * np.float32(np.sin(turn))
    t = v * np.float32(np.cos(turn)) - u * np.float32(np.sin(turn))
    pattern = _pattern(texture, s, t, rng.uniform(0.26, 0.38), edge)[..., None]
    first = _colour(rng)
    second = _contrasting(rng, first)
    light = rng.uniform(0, 2 * np.pi)
    slope = x * np.float32(np.cos(light)) + y * np.float32(np.sin(light))
    shade = (np.float32(rng.uniform(0.8, 1.1)) + np.float32(rng.uniform(0.05, 0.3)) * slope)[..., None]
    patch = pixels[y0:y1, x0:x1]
    soft = Image.fromarray((mask[..., 0] * 255).astype(np.uint8)).filter(ImageFilter.BoxBlur(radius * 0.08))
    drop = round(radius * 0.1)
    shadow = np.roll(np.asarray(soft), (drop, drop), (0, 1)).astype(np.float32)[..., None] / 255
    patch *= 1 - np.float32(rng.uniform(0.2, 0.6)) * shadow
    patch += mask * ((first + (second - first) * pattern) * shade - patch)


def _distance(shape: str, u: Floats, v: Floats) -> Floats:
    """Signed distance to the outline in units of the radius, positive inside; every shape fits a unit disc."""
    r = np.sqrt(u * u + v * v)
    if shape == "disc":
        return 0.85 - r
    if shape == "ring":
        return 0.24 - np.abs(r - 0.7)
    if shape == "cross":
        a, b = np.abs(u), np.abs(v)
        return np.maximum(np.minimum(0.3 - a, 0.92 - b), np.minimum(0.92 - a, 0.3 - b))
    if shape == "triangle":
        tips = [np.float32(k * 2 * np.pi / 3) for k in range(3)]
        return np.minimum.reduce([0.52 - (u * np.cos(a) + v * np.sin(a)) for a in tips])
    assert shape == "star", shape
    sector = np.abs((np.arctan2(v, u) * np.float32(5 / (2 * np.pi))) % 1 - 0.5) * np.float32(4 * np.pi / 10)
    # the line from a tip (radius 1, angle pi/5 from the sector's middle) to the notch (radius 0.45)
    tip, notch = (np.cos(np.pi / 5), np.sin(np.pi / 5)), (0.45, 0.0)
    normal = np.array([tip[1] - notch[1], notch[0] - tip[0]], np.float32)
    normal /= np.float32(np.hypot(*normal))
    a, b = r * np.cos(sector), r * np.sin(sector)
    return (notch[0] - a) * normal[0] + (notch[1] - b) * normal[1]


def _pattern(texture: str, s: Floats, t: Floats, period: float, edge: np.float32) -> Floats:
    """Pattern with values 0..1 over coordinates in units of the radius; `period` is in the same unit."""
    turns = np.float32(2 * np.pi / period)
    sharp = edge / turns  # why: edges are one pixel wide at any scale
    if texture == "striped":
        return np.clip(np.sin(s * turns) * sharp + 0.5, 0, 1)
    if texture == "checked":
        wave = np.sin(s * turns * np.float32(0.8)) * np.sin(t * turns * np.float32(0.8))
        return np.clip(wave * sharp * 2 + 0.5, 0, 1)
    assert texture == "dotted", texture
    near = [(z / np.float32(period) + 0.5) % 1 - 0.5 for z in (s, t)]
    return np.clip((0.34 - np.sqrt(near[0] ** 2 + near[1] ** 2)) * np.float32(period) * edge + 0.5, 0, 1)


@cache
def _grain() -> Floats:
    """One tile of unit noise, cropped at random places: 30 times cheaper than new noise for every photo."""
    rng = np.random.default_rng(0)
    return rng.standard_normal((_GRAIN_PX, _GRAIN_PX, 3), dtype=np.float32)


def _colour(rng: Generator) -> Floats:
    """A random RGB colour, 0..255, neither black nor white."""
    return rng.uniform(25, 230, 3).astype(np.float32)


def _muted(rng: Generator) -> Floats:
    """A random colour of low saturation, as natural scenes have."""
    colour = _colour(rng)
    return colour.mean() + (colour - colour.mean()) * np.float32(rng.uniform(0.15, 0.8))


def _contrasting(rng: Generator, reference: Floats) -> Floats:
    """A random colour whose brightness differs from that of `reference` by more than 70 levels."""
    while True:
        colour = _colour(rng)
        if abs(float(colour.mean() - reference.mean())) > 70:
            return colour
