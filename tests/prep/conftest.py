"""Fixtures of the tests of prep: small photos, generated for each test, and prep's command line as a function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests import SHARED_DATA
from tests.support.cli import prep as main

CLASSES = ("apple", "bee", "cat")


@dataclass(frozen=True, kw_only=True)
class Ran:
    """The result of a command line: exit status, stdout, stderr."""

    status: int
    out: str
    err: str


@pytest.fixture
def scene() -> Callable[..., NDArray[np.uint8]]:
    """scene(seed, width, height): (height, width, 3) uint8, smooth as photos are."""

    def make(seed: int, width: int, height: int) -> NDArray[np.uint8]:
        rng = np.random.default_rng(seed)
        coarse = rng.integers(0, 256, (7, 9, 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
        noisy = smooth.astype(np.int16) + rng.integers(-12, 13, smooth.shape)
        return np.clip(noisy, 0, 255).astype(np.uint8)

    return make


@pytest.fixture
def photos(tmp_path: Path, scene: Callable[..., NDArray[np.uint8]]) -> Path:
    """tmp_path/photos: 3 classes of 20 JPEGs of 50..110 px, some nested, plus files that are not photos."""
    root = tmp_path / "photos"
    for label, name in enumerate(CLASSES):
        (root / name / "more").mkdir(parents=True)
        for i in range(20):
            folder = root / name / "more" if i % 4 == 0 else root / name
            pixels = scene(label * 100 + i, 50 + (i * 7) % 60, 50 + (i * 13) % 60)
            Image.fromarray(pixels).save(folder / f"{i:02d}.{'jpg' if i % 2 else 'JPEG'}", quality=95)
    (root / "apple" / "notes.txt").write_text("no image")
    (root / "apple" / ".hidden.jpg").write_text("no image")
    (root / "readme.md").write_text("no image")
    return root


@pytest.fixture
def prep(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """prep("--src", ...): run the command line in this process, with two workers unless the arguments say otherwise."""

    def run(*argv: object) -> Ran:
        words = [str(word) for word in argv]
        if not any(word.startswith("--workers") for word in words) and "ray" not in words:
            words += ["--workers", "2"]
        capfd.readouterr()
        status = main(words)
        out, err = capfd.readouterr()
        return Ran(status=status, out=out, err=err)

    return run


@pytest.fixture
def difficult() -> Path:
    """Real files that trip decoders; skips the test where the folder does not exist."""
    folder = SHARED_DATA / "difficult"
    if not folder.is_dir():
        pytest.skip("checks files of other people, which may not be published with the project and are not here")
    return folder


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """An empty folder apart from the photos, for catalogs and scan caches."""
    (tmp_path / "work").mkdir()
    return tmp_path / "work"
