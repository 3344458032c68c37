"""Fixtures of the tests of prep: small photos, a set made of them, and prep's command line as a function."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from resolute.prep.run import pool
from resolute.prep.sources import fetch
from resolute.prep.storage import retry
from tests.support import quick_worker
from tests.support.cli import prep as main
from tests.support.refusals import Ran

CLASSES = ("apple", "bee", "cat")


@pytest.fixture(scope="session", autouse=True)
def without_sync() -> Iterator[None]:
    """Files of this process are not forced to the disk, which takes a fifth of the time of a small set.

    No test can miss it: what a killed process has written stays in the system's memory.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session")
def scene() -> Callable[..., NDArray[np.uint8]]:
    """scene(seed, width, height): (height, width, 3) uint8, smooth as photos are."""

    def make(seed: int, width: int, height: int) -> NDArray[np.uint8]:
        rng = np.random.default_rng(seed)
        coarse = rng.integers(0, 256, (7, 9, 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
        noisy = smooth.astype(np.int16) + rng.integers(-12, 13, smooth.shape)
        return np.clip(noisy, 0, 255).astype(np.uint8)

    return make


@pytest.fixture(scope="session")
def photo_template(tmp_path_factory: pytest.TempPathFactory, scene: Callable[..., NDArray[np.uint8]]) -> Path:
    """What `photos` copies; never changed."""
    root = tmp_path_factory.mktemp("template") / "photos"
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
def photos(tmp_path: Path, photo_template: Path) -> Path:
    """tmp_path/photos: 3 classes of 20 JPEGs of 50..110 px, some nested, plus files that are not photos."""
    return Path(shutil.copytree(photo_template, tmp_path / "photos"))


@pytest.fixture(scope="session")
def set_template(photo_template: Path) -> Path:
    """The set that prep makes of `photos` at 32 and 48 px, 20 samples per shard; never changed."""
    out = photo_template.with_name("set")
    assert main(["--src", photo_template, "--out", out, "--res", "32,48", "--shard-samples", 20, "--workers", 2]) == 0
    return out


@pytest.fixture
def prepared(photos: Path, tmp_path: Path, set_template: Path) -> Path:
    """tmp_path/s: a copy of `set_template`, as if it had been made of `photos`."""
    ignore = shutil.ignore_patterns("source.json")  # why: it names the folder of the template
    return Path(shutil.copytree(set_template, tmp_path / "s", ignore=ignore))


@pytest.fixture
def prep(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """prep("--src", ...): run the command line in this process, with two workers unless the arguments say otherwise."""

    def run(*argv: object) -> Ran:
        words = [str(word) for word in argv]
        if not any(word.startswith("--workers") for word in words) and "ray" not in words:
            words += ["--workers", "2"]
        capfd.readouterr()
        status = main(words)
        return Ran(status, *capfd.readouterr())

    return run


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """An empty folder apart from the photos, for catalogs and scan caches."""
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process and the workers that it starts ask a failing server or disk again at once."""
    monkeypatch.setattr(fetch, "_REMOTE_WAITS_S", (0.0, 0.0, 0.0))
    monkeypatch.setattr(retry, "WAITS_S", (0.0, 0.0))
    monkeypatch.setattr(pool, "Pool", partial(pool.Pool, serve=quick_worker.serve))
