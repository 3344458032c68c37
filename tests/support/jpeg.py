"""JPEGs and their regions: made, decoded by our decoder and by DALI's."""

from __future__ import annotations

import ctypes
import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvidia.dali import fn, pipeline_def, types
from PIL import Image

from resolute.pipeline.graph.kernels.jpeg.memory import Decoders, acquire, release
from resolute.pipeline.graph.kernels.jpeg.region import decode_region

__all__ = ["Region", "encode", "our_region", "photo", "random_region", "regions_by_dali"]

Region = tuple[int, int, int, int]  # x, y, w, h in px
_DECODERS = Decoders(1)


def photo(width: int, height: int, seed: int = 0) -> NDArray[np.uint8]:
    """(height, width, 3): smooth colours, with edges and some noise."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (-(-height // 12) + 1, -(-width // 12) + 1, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
    noise = rng.integers(0, 256, smooth.shape, dtype=np.uint8)
    image = np.where(rng.random((height, width, 1)) < 0.05, noise, smooth)
    image[height // 3 : height // 2, width // 4 : width // 2] = rng.integers(0, 256, 3)
    return image.astype(np.uint8)


def encode(image: NDArray[np.uint8], **options: Any) -> bytes:
    """JPEG of an image, CMYK if it has four channels. `options` of Pillow's `save`: quality, subsampling, …"""
    file = io.BytesIO()
    Image.fromarray(image, "CMYK" if image.shape[2:] == (4,) else None).save(file, "JPEG", **options)
    return file.getvalue()


def random_region(width: int, height: int, rng: np.random.Generator) -> Region:
    x, y = int(rng.integers(width)), int(rng.integers(height))
    return x, y, int(rng.integers(1, width - x + 1)), int(rng.integers(1, height - y + 1))


def our_region(jpeg: bytes, region: Region) -> NDArray[np.uint8] | None:
    """(h, w, 3) pixels; None if our decoder declines the image."""
    x, y, w, h = region
    encoded = np.frombuffer(jpeg, np.uint8)
    decoder = acquire(_DECODERS.address)
    first, pitch = decode_region(encoded.ctypes.data, len(encoded), x, y, w, h, decoder)
    try:
        if first == 0:
            return None
        rows = np.frombuffer(ctypes.string_at(first, pitch * h), np.uint8).reshape(h, pitch)
        return rows[:, : 3 * w].reshape(h, w, 3)
    finally:
        release(_DECODERS.address, decoder)


def regions_by_dali(jpegs: list[bytes], regions: list[Region]) -> list[NDArray[np.uint8]]:
    """(h, w, 3) pixels of each region of an image, decoded as images are that our decoder declines.

    Raises RuntimeError if one of them is refused.
    """

    @pipeline_def(batch_size=len(jpegs), num_threads=2, device_id=None, exec_dynamic=True, prefetch_queue_depth=1)
    def graph() -> Any:
        start, shape = (fn.external_source(name=name, dtype=types.INT32, ndim=1) for name in ("start", "shape"))
        return fn.decoders.image_slice(
            fn.external_source(name="jpegs", dtype=types.UINT8, ndim=1),
            start=start,
            shape=shape,
            axes=[0, 1],
            output_type=types.RGB,
            jpeg_fancy_upsampling=True,
        )

    pipe = graph()
    pipe.build()
    corners = np.array(regions, np.int32)
    pipe.feed_input("jpegs", [np.frombuffer(jpeg, np.uint8) for jpeg in jpegs])
    pipe.feed_input("start", corners[:, 1::-1].copy())
    pipe.feed_input("shape", corners[:, :1:-1].copy())
    (images,) = pipe.run()
    return [np.array(images.at(i)) for i in range(len(jpegs))]
