"""FFCV 1.0.2, from .beton files that hold the same JPEG bytes, or (variant "raw") their pixels.

It decodes with libjpeg-turbo's fast, less exact DCT, and shrinks with OpenCV's INTER_AREA. Variant "uint8" also sends
the batches to the job's device and normalises them there.

FFCV needs an older numpy, so this module runs in a separate environment (with Debian's libopencv-dev,
libturbojpeg0-dev, pkg-config and a C++ compiler; 1.0.2 builds on Python 3.11):

    python3 -m venv ffcv
    ffcv/bin/pip install "numpy<2" "setuptools<81" wheel torch numba pillow tqdm opencv-python-headless
    ffcv/bin/pip install ffcv==1.0.2 --no-build-isolation --no-deps
    python -m resolute.benchmarks.loader --ffcv-python ffcv/bin/python --shards DIR

A CPU build of torch suffices. FFCV imports cv2 even if all images are JPEGs already.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import io
from collections.abc import Generator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ffcv.fields import IntField, RGBImageField
from ffcv.fields.basics import IntDecoder
from ffcv.fields.rgb_image import IMAGE_MODES, CenterCropRGBImageDecoder, RandomResizedCropRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.reader import Reader
from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, ToDevice, ToTensor, ToTorchImage
from ffcv.writer import DatasetWriter
from numpy.typing import NDArray
from PIL import Image

from .job import MEAN, STD, Job
from .on_device import normalised_on_device
from .tars import Tars

__all__ = ["centre_crops", "prepare", "stream"]

_CHECKED = 64  # samples whose bytes are read back from a .beton


class _JpegField(RGBImageField):
    """FFCV's image field in its JPEG mode, but takes the JPEG itself: FFCV's would decode and compress it again."""

    def encode(self, destination: Any, jpeg: bytes, malloc: Any) -> None:
        destination["mode"] = IMAGE_MODES["jpg"]
        destination["width"], destination["height"] = Image.open(io.BytesIO(jpeg)).size
        destination["data_ptr"], storage = malloc(len(jpeg))
        storage[:] = np.frombuffer(jpeg, np.uint8)


class _Samples(Sequence[tuple[Any, int]]):
    def __init__(self, jpegs: Any, labels: Sequence[int], *, raw: bool = False) -> None:
        """`raw`: decoded, (height, width, 3) uint8."""
        self._jpegs, self._labels, self._raw = jpegs, labels, raw

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, sample: Any) -> Any:
        jpeg = self._jpegs.jpeg(int(sample)) if isinstance(self._jpegs, Tars) else self._jpegs[int(sample)]
        image = np.asarray(Image.open(io.BytesIO(jpeg)).convert("RGB")) if self._raw else jpeg
        return image, self._labels[int(sample)]


def _write(path: Path, samples: _Samples, workers: int, *, raw: bool = False) -> None:
    field = RGBImageField(write_mode="raw") if raw else _JpegField()
    DatasetWriter(str(path), {"image": field, "label": IntField()}, num_workers=workers).from_indexed_dataset(samples)


def _beton(job: Job, res: int) -> Path:
    return Path(job.scratch, f"{res}{'-raw' if job.variant == 'raw' else ''}.beton")


def prepare(job: Job) -> dict[str, Any]:
    """Write the .beton files. {"versions", "res": {res: {"jpeg_bytes", "file_bytes"}}}: means per sample.

    The file has up to 8 MiB more than its images for each worker that wrote it: FFCV's pages.
    Raises `AssertionError` if a JPEG read back is not the one in the tar.
    """
    results, raw = {}, job.variant == "raw"
    for res in job.resolutions:
        tars, path = Tars(job.shards, res), _beton(job, res)
        _write(path, _Samples(tars, tars.labels, raw=raw), job.workers, raw=raw)
        results[str(res)] = {"jpeg_bytes": tars.mean_bytes, "file_bytes": path.stat().st_size / len(tars)}
        if raw:
            continue
        pointers = Reader(str(path), {"image": RGBImageField}).metadata["f0"]["data_ptr"]
        with path.open("rb") as file:
            for sample in np.linspace(0, len(tars) - 1, _CHECKED).astype(int):
                jpeg = tars.jpeg(int(sample))
                file.seek(int(pointers[sample]))
                assert file.read(len(jpeg)) == jpeg, f"{path}: sample {sample} is not the JPEG of the tar"
    return {"versions": {name: version(name) for name in ("ffcv", "numba", "numpy", "torch")}, "res": results}


def _pipelines(job: Job, res: int, decoder: Any = None) -> dict[str, Any]:
    decoder = decoder or RandomResizedCropRGBImageDecoder((res, res), scale=job.scale, ratio=job.ratio)
    normalise = NormalizeImage(255 * np.array(MEAN), 255 * np.array(STD), np.float32)
    flip = [] if isinstance(decoder, CenterCropRGBImageDecoder) else [RandomHorizontalFlip(job.flip_prob)]
    finish: list[Any] = [normalise, ToTensor(), ToTorchImage()]
    if job.variant == "uint8":
        copy = [] if job.device == "cpu" else [ToDevice(torch.device(job.device), non_blocking=True)]
        finish = [ToTensor(), *copy, ToTorchImage()]
    return {"image": [decoder, *flip, *finish], "label": [IntDecoder(), ToTensor()]}


def _loader(job: Job, res: int, pipelines: dict[str, Any]) -> Any:
    path, total = _beton(job, res), job.batches * job.batch_size
    samples = len(Tars(job.shards, res))
    return Loader(
        str(path),
        batch_size=job.batch_size,
        num_workers=job.workers,
        order=OrderOption.RANDOM,
        os_cache=True,
        custom_fields={"image": RGBImageField},
        pipelines=pipelines,
        seed=res,
        indices=np.arange(total, dtype=np.uint64) % samples,  # why: no epoch ends inside a measurement
    )


def stream(job: Job) -> Generator[torch.Tensor, None, None]:
    """variant "output_size": one loader on the largest images, its decoder's size set anew; else a loader for each."""
    if job.variant == "output_size":
        largest = max(job.resolutions)
        pipelines = _pipelines(job, job.resolutions[0])
        decoder = pipelines["image"][0]  # why: the loader takes it out of the list
        loader = _loader(job, largest, pipelines)
        for res in job.resolutions:
            decoder.output_size = (res, res)  # Source: FFCV's ImageNet example (rn18), before every epoch
            yield from _epoch(loader, job)
        return
    for res in job.resolutions:
        yield from _epoch(_loader(job, res, _pipelines(job, res)), job)


def _epoch(loader: Any, job: Job) -> Generator[torch.Tensor, None, None]:
    batches = iter(loader)
    sent = batches
    if job.variant == "uint8":
        sent = normalised_on_device(batches, device=torch.device(job.device), dtype=getattr(torch, job.dtype))
    try:
        for images, _ in sent:
            yield images
    finally:
        batches.close()


def centre_crops(job: Job, jpegs: list[bytes]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """(N, res, res, 3) in 0..255 and (N, 4) crops x, y, w, h; the same decode and resize as in training."""
    (res,) = job.resolutions
    path = Path(job.scratch, f"centre-{res}-{job.crop_frac}.beton")
    _write(path, _Samples(jpegs, [0] * len(jpegs)), 1)
    decoder = CenterCropRGBImageDecoder((res, res), ratio=job.crop_frac)
    loader = Loader(
        str(path),
        batch_size=len(jpegs),
        num_workers=job.workers,
        custom_fields={"image": RGBImageField},
        pipelines=_pipelines(job, res, decoder),
    )
    images = next(iter(loader))[0].permute(0, 2, 3, 1).numpy()
    crops = [job.centre_square(*Image.open(io.BytesIO(jpeg)).size) for jpeg in jpegs]
    pixels = 255 * (images * np.array(STD) + np.array(MEAN))
    return pixels.astype(np.float32), np.array(crops, np.int64)
