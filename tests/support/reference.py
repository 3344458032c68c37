"""Slow, simple oracles of a batch: one sample at a time, with PIL and plain NumPy."""

from __future__ import annotations

import io
import math
import tarfile

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from resolute.pipeline.dataset.format import key_name
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.plan.augment_params import CUTMIX, MIXUP
from resolute.pipeline.plan.plan import BatchSpec


def stored_jpeg(shards: ShardSet, split: str, res: int, sample: int) -> bytes:
    """The JPEG of a sample, looked up by its key in the tar with Python's own tarfile."""
    part = shards.splits[split]
    path = shards.path(res, part.shards[part.stored[res]["shard"][sample]])
    with tarfile.open(path) as tar:
        member = tar.extractfile(key_name(int(part.samples["key"][sample])) + ".jpg")
        assert member is not None
        return member.read()


def view(shards: ShardSet, spec: BatchSpec, i: int) -> NDArray[np.uint8]:
    """Sample i of a batch before mixing, (res, res, 3) uint8: decode, crop, resize, flip, all by PIL."""
    data = stored_jpeg(shards, spec.split, spec.stored_res, int(spec.ids[i]))
    x, y, w, h = (int(v) for v in spec.crops[i])
    image = Image.open(io.BytesIO(data)).convert("RGB").crop((x, y, x + w, y + h))
    image = image.resize((spec.res, spec.res), Image.Resampling.BILINEAR)
    pixels = np.asarray(image)[:, ::-1] if spec.flips[i] else np.asarray(image)
    return pixels[::-1] if spec.rows["vflip"][i] else pixels


def mix(images: NDArray[np.uint8], spec: BatchSpec) -> NDArray[np.uint8]:
    """Mixup and cutmix of a batch (N, res, res, 3), sample by sample."""
    out = images.copy()
    for i in range(len(spec)):
        partner = images[spec.partners[i]].astype(np.float64)
        if spec.modes[i] == MIXUP:
            blend = images[i] * float(spec.lam[i]) + partner * (1.0 - float(spec.lam[i]))
            out[i] = np.clip(np.rint(blend), 0, 255).astype(np.uint8)
        elif spec.modes[i] == CUTMIX:
            x, y, w, h = (int(v) for v in spec.boxes[i])
            out[i, y : y + h, x : x + w] = images[spec.partners[i], y : y + h, x : x + w]
    return out


def crop_window(
    width: int, height: int, u: NDArray[np.float64], area: tuple[float, float], ratio: tuple[float, float]
) -> tuple[int, int, int, int]:
    """Random-resized-crop as in torchvision's get_params, from the uniforms `u`: x, y, w, h."""
    for attempt in range(10):
        target = width * height * (area[0] + (area[1] - area[0]) * u[2 + attempt])
        low, high = math.log(ratio[0]), math.log(ratio[1])
        aspect = math.exp(low + (high - low) * u[12 + attempt])
        w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            return int(u[0] * (width - w + 1)), int(u[1] * (height - h + 1)), w, h
    actual = width / height
    w, h = width, height
    if actual < ratio[0]:
        h = round(width / ratio[0])
    elif actual > ratio[1]:
        w = round(height * ratio[1])
    return (width - w) // 2, (height - h) // 2, w, h
