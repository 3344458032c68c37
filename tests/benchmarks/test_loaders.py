"""The loaders of the benchmarks: every one gets the same images and does the same work."""

from __future__ import annotations

import dataclasses
import importlib
import math
import tarfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from resolute.benchmarks import bench
from resolute.benchmarks.loader import SAME_DB, psnr_db, reference
from resolute.benchmarks.loaders.dataloader import stored_images
from resolute.benchmarks.loaders.job import MEAN, STD, Job
from resolute.benchmarks.loaders.registry import LOADERS
from resolute.benchmarks.loaders.run import Runner, available
from resolute.benchmarks.loaders.tars import Tars
from resolute.benchmarks.options import PeerOptions
from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.reader import Reader
from resolute.pipeline.plan.stage import Augment

HERE = [name for name, loader in LOADERS.items() if loader.module != "ffcv"]
# torchvision 0.29 warns about its own decoder
pytestmark = pytest.mark.filterwarnings("ignore:The image decoding and encoding capabilities:DeprecationWarning")


@pytest.fixture
def job(shard_root: Path, tmp_path: Path) -> Job:
    return Job(shards=str(shard_root), scratch=str(tmp_path), resolutions=(32, 64), batches=3, batch_size=8, workers=1)


def runner(job: Job, name: str, **settings: Any) -> Runner:
    return Runner(job=job, loaders=(name,), rounds=1, **settings)


def stream(name: str, job: Job) -> Any:
    loader = LOADERS[name]
    module = importlib.import_module(f"resolute.benchmarks.loaders.{loader.module}")
    return closing(module.stream(replace(job, variant=loader.variant)))


def test_images_are_the_members_of_the_tars_in_order_for_every_way_to_read_them(shard_set: ShardSet) -> None:
    tars, stored, expected = Tars(shard_set.root, 48), stored_images(shard_set, 48), list[bytes]()
    for path in sorted(Path(shard_set.root, "48").glob("train-*.tar")):
        with tarfile.open(path) as tar:
            expected += [tar.extractfile(member).read() for member in tar.getmembers()]  # type: ignore[union-attr]
    ids = np.arange(len(stored))
    assert [tars.jpeg(i) for i in range(len(tars))] == [stored.jpeg(i) for i in range(len(stored))] == expected[::2]
    assert tars.labels == stored.labels == [int(label) for label in expected[1::2]]
    assert tars.mean_bytes == pytest.approx(np.mean([len(jpeg) for jpeg in expected[::2]]))
    with closing(Reader(shard_set)) as reader:
        read = reader.submit("train", 48, ids).result()
        assert not read.errors
        assert all(jpeg.tobytes().startswith(stored.jpeg(i)) for i, jpeg in zip(ids.tolist(), read.images, strict=True))


def test_all_loaders_use_the_default_crop_and_flip(job: Job) -> None:
    default = Augment()
    assert (job.scale, job.ratio, job.flip_prob) == (default.scale, default.ratio, default.flip_prob)


@pytest.mark.slow
@pytest.mark.parametrize("name", HERE)
def test_every_loader_delivers_the_same_kind_of_batches(job: Job, name: str) -> None:
    torch.manual_seed(0)
    with stream(name, job) as batches_of:
        batches = [batch.clone() for batch in batches_of]
    counts = {res: sum(batch.shape == (8, 3, res, res) for batch in batches) for res in job.resolutions}
    assert sum(counts.values()) == len(batches)
    assert all(count >= job.batches for count in counts.values())
    values = torch.cat([batch.flatten() for batch in batches])
    assert values.dtype == torch.float32
    # normalised, not twice and not in another range: these photos have means of 80 + 30 and 80 + 90 levels
    low, high = (-np.array(MEAN) / STD).min() - 0.02, ((1 - np.array(MEAN)) / STD).max() + 0.02
    assert low <= values.min()
    assert values.max() <= high
    assert -1.2 < values.mean() < 0.2
    assert 0.4 < values.std() < 1.3


@pytest.mark.parametrize("name", [name for name in HERE if LOADERS[name].has_crops])
def test_loaders_resize_the_reported_crop(job: Job, name: str) -> None:
    loader, res = LOADERS[name], 64
    module = importlib.import_module(f"resolute.benchmarks.loaders.{loader.module}")
    tars = Tars(job.shards, res, "val")
    jpegs = [tars.jpeg(i) for i in range(5)]
    for frac in (1.0, 0.5):
        at = replace(job, variant=loader.variant, resolutions=(res,), crop_frac=frac)
        images, crops = module.centre_crops(at, jpegs)
        assert (images.shape, images.dtype) == ((5, res, res, 3), np.float32)
        values = [psnr_db(image, exact) for image, exact in zip(images, reference(jpegs, crops, res), strict=True)]
        assert min(values) > 35
        wrong = reference(jpegs[1:] + jpegs[:1], crops, res)
        assert max(psnr_db(image, exact) for image, exact in zip(images, wrong, strict=True)) < 30
        assert (name == "pillow") <= (values == [SAME_DB] * 5)


def test_psnr_equals_its_definition() -> None:
    exact = np.full((4, 4, 3), 100, np.uint8)
    assert psnr_db(exact.astype(np.float32), exact) == SAME_DB
    assert psnr_db(exact + np.float32(2), exact) == pytest.approx(20 * math.log10(255 / 2))


@pytest.mark.slow  # a new interpreter
def test_a_failing_loader_is_reported_in_one_line(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOADERS, "v2", dataclasses.replace(LOADERS["v2"], module="nowhere"))
    with pytest.raises(ResoluteError, match=r"^loader v2: ended with 1, got ModuleNotFoundError: .*nowhere.*--only$"):
        runner(job, "v2").run("v2", task="rate", resolutions=(32,))


def test_ffcv_without_an_interpreter_is_left_out_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FFCV_PYTHON", raising=False)
    names, left_out = available(PeerOptions(shards="x"), rates=True)
    assert "ours" in names
    assert "ffcv" not in names
    assert list(left_out) == ["ffcv", "ffcv-raw"]
    with pytest.raises(ResoluteError, match="--only ffcv: got no interpreter"):
        available(PeerOptions(shards="x", only=("ffcv",)), rates=True)
    with pytest.raises(ResoluteError, match="--ffcv-python: got nowhere, expected an interpreter"):
        available(PeerOptions(shards="x", only=("ffcv",), ffcv_python="nowhere"), rates=True)


def test_bench_compares_with_the_fastest_dataloader_of_all_that_serve_every_size() -> None:
    sized = {name for name, loader in LOADERS.items() if "sized" in loader.variant}
    assert {*bench._BEST} == sized
    assert LOADERS[bench._REBUILT].at_change == "rebuilt"
