"""A tiny shard set, made once, and the folder of real data where it is at hand."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# why: before torch is loaded; threads of OpenMP that wait in a loop take the cores of other workers: 5 times as slow
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from pipeline.dataset.shard_set import ShardSet
from prep.__main__ import main as prep
from tests import ROOT
from tests.support.commands import Ended, run

# why: a job in the background ignores Ctrl-C, and so would all that the tests start
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # why: what nohup starts ignores it

RESOLUTIONS = (32, 48, 64)


def pytest_runtest_setup() -> None:
    torch.set_num_threads(1)  # why: such small steps do not gain from more


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the marker `gpu` run CUDA kernels (its JPEG decoder, resize, float16 batches): no CPU can stand in."""
    skip = pytest.mark.skip(reason="no CUDA device: runs kernels on a GPU; CPU checks: tests/pipeline/graph")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(skip)


def make_photos(root: Path, *, classes: int = 3, each: int = 30) -> Path:
    """Smooth coloured photos of 60..130 px, `each` of `classes` classes that differ in their main colour."""
    rng = np.random.default_rng(0)
    for label in range(classes):
        folder = root / f"class{label}"
        folder.mkdir(parents=True)
        for i in range(each):
            width, height = (int(side) for side in rng.integers(60, 131, 2))
            coarse = rng.integers(0, 160, (6, 8, 3), dtype=np.uint8)
            coarse[..., label % 3] += 90
            Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(
                folder / f"{i:03d}.jpg", quality=95
            )
    return root


savefig = Figure.savefig


@pytest.fixture(scope="session", autouse=True)
def undrawn_charts() -> Iterator[None]:
    """Charts of prep's report, which it keeps in memory, are one pixel: drawing them is most of a small run's time."""

    def save(figure: Figure, file: Any, **options: Any) -> None:
        if isinstance(file, io.BytesIO):
            Image.new("RGB", (1, 1)).save(file, "PNG")
        else:
            savefig(figure, file, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", save)
        yield


@pytest.fixture(scope="session")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Ended]:
    """forked(module, *arguments): run a command line in a process of its own, to its end."""
    scratch = tmp_path_factory.mktemp("outputs")
    return lambda module, *arguments: run(module, arguments, folder=ROOT, scratch=scratch)


@pytest.fixture(scope="session")
def shard_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished shard set: 3 classes, 75 training and 15 validation samples, 3 training shards, 32/48/64 px."""
    folder = tmp_path_factory.mktemp("set")
    photos = make_photos(folder / "photos")
    words = ["--src", photos, "--out", folder / "shards", "--res", ",".join(map(str, RESOLUTIONS)),
             "--val-frac", "0.17", "--shard-samples", "32", "--workers", "2"]  # fmt: skip
    assert prep([str(word) for word in words]) == 0
    return folder / "shards"


@pytest.fixture(scope="session")
def shard_set(shard_root: Path) -> ShardSet:
    return ShardSet.open(shard_root)
