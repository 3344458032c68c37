"""Photos, and copies of them as people make them."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter, ImageOps

from tests import SHARED_DATA

Copy = Callable[[Image.Image], Image.Image]


def drawn(seed: int, width: int = 320, height: int = 240) -> Image.Image:
    """A picture with structure at all scales: clouds, shapes and grain."""
    rng = np.random.default_rng(seed)
    total = np.zeros((height, width, 3))
    for cells, size in ((3, 70), (7, 45), (17, 25), (41, 14)):
        noise = rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8)
        smooth = Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)
        total += (np.asarray(smooth, np.float64) - 128) * size / 64
    image = Image.fromarray((total + 128).clip(0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    for _ in range(12):
        x, y = int(rng.integers(0, width)), int(rng.integers(0, height))
        w, h = rng.integers(10, width // 3, 2).tolist()
        draw.ellipse((x, y, x + w, y + h), fill=tuple(rng.integers(0, 256, 3).tolist()))
    return image.filter(ImageFilter.GaussianBlur(0.8))


def encoded(image: Image.Image, quality: int = 92) -> Image.Image:
    """The image after a JPEG of that quality."""
    content = io.BytesIO()
    image.save(content, "JPEG", quality=quality)
    return Image.open(io.BytesIO(content.getvalue())).convert("RGB")


def cropped(image: Image.Image, left: float = 0, right: float = 0, top: float = 0, bottom: float = 0) -> Image.Image:
    """The image without these fractions of its sides."""
    w, h = image.size
    return image.crop((round(left * w), round(top * h), round((1 - right) * w), round((1 - bottom) * h)))


def barred(image: Image.Image) -> Image.Image:
    """The image with a black bar over 8 % of its height."""
    copy = image.copy()
    w, h = image.size
    copy.paste((0, 0, 0), (0, h - round(0.08 * h), w, h))
    return copy


COPIES: dict[str, Copy] = {
    "mirrored": lambda image: encoded(ImageOps.mirror(image)),
    "quality 50": lambda image: encoded(image, 50),
    "half size": lambda image: encoded(image.resize((image.width // 2, image.height // 2))),
    "grey": lambda image: encoded(image.convert("L").convert("RGB")),
    "darker": lambda image: encoded(ImageEnhance.Brightness(image).enhance(0.85)),
    "brighter": lambda image: encoded(ImageEnhance.Brightness(image).enhance(1.15)),
    "less contrast": lambda image: encoded(ImageEnhance.Contrast(image).enhance(0.75)),
    "more contrast": lambda image: encoded(ImageEnhance.Contrast(image).enhance(1.25)),
    "cropped by 5 %": lambda image: encoded(cropped(image, left=0.02, right=0.03, top=0.04, bottom=0.01)),
    "cropped by 10 %": lambda image: encoded(cropped(image, right=0.1)),
    "bar": lambda image: encoded(barred(image)),
}


@pytest.fixture(scope="session")
def originals() -> list[Image.Image]:
    """24 different photos: real ones if they are there, drawn ones otherwise."""
    files = sorted(Path(SHARED_DATA).glob("imagenet_like/*/*.jpg"))[5::13][:24]
    if len(files) < 24:
        return [drawn(seed) for seed in range(24)]
    return [Image.open(path).convert("RGB") for path in files]


@pytest.fixture
def drawings(tmp_path: Path, drawings_template: Path) -> Path:
    """tmp_path/photos: two classes of 30 drawn photos, of which no two are alike."""
    return Path(shutil.copytree(drawings_template, tmp_path / "photos"))


@pytest.fixture(scope="session")
def drawings_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `drawings` copies; never changed."""
    root = tmp_path_factory.mktemp("drawings") / "photos"
    for number in range(60):
        folder = root / ("ant", "bat")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        drawn(number, 120, 90).save(folder / f"{number:03d}.jpg", quality=92)
    return root
