"""Fixtures of all tests: a tiny shard set, command lines as forked processes, and process-wide settings."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

# why: before torch is loaded; OpenMP threads that spin while waiting make other workers 5 times slower
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.pop("MAKELEVEL", None)  # `make test` sets it, and messages would name make's commands

import numpy as np
import pytest
import torch
from PIL import Image

from resolute.pipeline.dataset.shard_set import ShardSet
from tests import ROOT
from tests.support.cli import prep
from tests.support.commands import Ended, run

# why: a background job ignores Ctrl-C, and so would all processes that the tests start
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # why: under nohup it is ignored

RESOLUTIONS = (32, 48, 64)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "nightly: a whole benchmark program on tiny data; run once a day, by `.ci/nightly`"
    )


def pytest_runtest_setup() -> None:
    torch.set_num_threads(1)  # why: small steps do not gain from more threads


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests, and skip those marked `gpu` without a GPU: they run CUDA kernels (JPEG decoder, resize, …).

    Tests marked `timing`, and no others, are repeated once if they fail: a repetition elsewhere would hide a race.
    """
    # files with long tests first, so that no worker ends with one while the others have nothing left
    with_long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in with_long)
    # why skipped: CUDA kernels need a GPU; the same graph and kernels are tested on every CPU in tests/pipeline/graph
    skip = pytest.mark.skip(reason="no NVIDIA GPU here; `make test-gpu` runs these tests on a GPU")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(skip)
        if item.get_closest_marker("timing"):
            item.add_marker(pytest.mark.flaky(reruns=1))


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


@pytest.fixture(scope="session")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Ended]:
    """forked(module, *arguments): run a command line in a forked process to its end."""
    scratch = tmp_path_factory.mktemp("outputs")
    return lambda module, *arguments: run(module, arguments, folder=ROOT, scratch=scratch)


@pytest.fixture(scope="session")
def shard_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished shard set: 3 classes, 75 training and 15 validation samples, 3 training shards, 32/48/64 px."""
    folder = tmp_path_factory.mktemp("set")
    photos = make_photos(folder / "photos")
    words = [
        "--src",
        photos,
        "--out",
        folder / "shards",
        "--res",
        ",".join(map(str, RESOLUTIONS)),
        "--val-frac",
        "0.17",
        "--shard-samples",
        "32",
        "--workers",
        "2",
    ]
    assert prep([str(word) for word in words]) == 0
    return folder / "shards"


@pytest.fixture(scope="session")
def shard_set(shard_root: Path) -> ShardSet:
    return ShardSet.open(shard_root)
