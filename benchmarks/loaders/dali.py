"""Stock DALI with its WebDataset reader, decoder and resize, as in NVIDIA's examples.

Variant "gpu": all that follows the reader runs on the GPU, where the JPEG engine decodes whole images. why whole: crops
cannot be decoded by the engines of an A100 or H100 (nvImageCodec, issue 55). Its batches are float16 if the job says
so, in channels_last memory.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin.pytorch import DALIGenericIterator

from .dataloader import pillow
from .job import MEAN, STD, Job
from .tars import Tars

__all__ = ["centre_crops", "stream"]


def _finish(images: Any, res: int, mirror: Any) -> Any:
    images = fn.resize(images, size=(res, res), interp_type=types.INTERP_LINEAR, antialias=True)
    return fn.crop_mirror_normalize(
        images,
        dtype=types.FLOAT,
        output_layout="CHW",
        mirror=mirror,
        mean=[255 * value for value in MEAN],
        std=[255 * value for value in STD],
    )


def _read(tars: Tars) -> Any:
    return fn.readers.webdataset(
        paths=[str(path) for path in tars.paths],
        index_paths=[str(path) for path in tars.indexes],
        ext=["jpg", "cls"],
        missing_component_behavior="error",
        random_shuffle=True,
    )


@pipeline_def
def _gpu_graph(job: Job, tars: Tars, res: int) -> Any:
    jpegs, labels = _read(tars)
    # why 1.0: DALI's default of 0.65 was half as fast on an H200 (benchmarks/results/LOG.md)
    images = fn.decoders.image(jpegs, device="mixed", output_type=types.RGB, hw_decoder_load=1.0)
    images = fn.random_resized_crop(
        images,
        size=(res, res),
        random_area=job.scale,
        random_aspect_ratio=job.ratio,
        interp_type=types.INTERP_LINEAR,
        antialias=True,
    )
    images = fn.crop_mirror_normalize(
        images,
        dtype=types.FLOAT16 if job.dtype == "float16" else types.FLOAT,
        output_layout="HWC",
        mirror=fn.random.coin_flip(probability=job.flip_prob),
        mean=[255 * value for value in MEAN],
        std=[255 * value for value in STD],
    )
    return images, labels


@pipeline_def
def _graph(job: Job, tars: Tars, res: int) -> Any:
    jpegs, labels = _read(tars)
    images = fn.decoders.image_random_crop(
        jpegs, device="cpu", random_area=job.scale, random_aspect_ratio=job.ratio, num_attempts=10
    )
    return _finish(images, res, fn.random.coin_flip(probability=job.flip_prob)), labels


def stream(job: Job) -> Generator[torch.Tensor, None, None]:
    on_gpu = job.variant == "gpu"
    for seed, res in enumerate(job.resolutions):
        graph = (_gpu_graph if on_gpu else _graph)(
            job,
            Tars(job.shards, res),
            res,
            batch_size=job.batch_size,
            num_threads=job.workers,
            device_id=torch.device(job.device).index or 0 if on_gpu else None,
            seed=seed,
        )
        batches = DALIGenericIterator([graph], ["images", "labels"], size=-1)
        for _ in range(job.batches):
            images = next(batches)[0]["images"]
            yield images.permute(0, 3, 1, 2) if on_gpu else images


@pipeline_def
def _centre_graph(jpegs: list[bytes], crops: NDArray[np.int64], res: int) -> Any:
    source = fn.external_source(lambda: [np.frombuffer(jpeg, np.uint8) for jpeg in jpegs])
    x_y = fn.external_source(lambda: [np.array(crop[:2], np.int32) for crop in crops])
    w_h = fn.external_source(lambda: [np.array(crop[2:], np.int32) for crop in crops])
    images = fn.decoders.image_slice(source, device="cpu", start=x_y, shape=w_h, axis_names="WH")
    return _finish(images, res, 0)


def centre_crops(job: Job, jpegs: list[bytes]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """(N, res, res, 3) in 0..255 and (N, 4) crops x, y, w, h; the same decoder and resize as in training."""
    (res,) = job.resolutions
    crops = [job.centre_square(*pillow(jpeg).size) for jpeg in jpegs]
    graph = _centre_graph(jpegs, np.array(crops), res, batch_size=len(jpegs), num_threads=job.workers, device_id=None)
    out = graph.run()[0]
    pixels: NDArray[Any] = np.stack([np.array(out.at(i)) for i in range(len(jpegs))]).transpose(0, 2, 3, 1)
    pixels = 255 * (pixels * np.array(STD) + np.array(MEAN))
    return pixels.astype(np.float32), np.array(crops, np.int64)
