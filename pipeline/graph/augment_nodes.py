"""Mixing nodes of the GPU's DALI graph, and the per-batch inputs they need.

No node draws random numbers: all parameters come from the `BatchSpec`. Operations and erasing are not part of the
graph: runs that use them end it with the resize, and Triton kernels do the rest (`uses_triton`). On a CPU the compiled
nodes of `cpu_nodes.py` do everything, mixing included. Images are (res, res, 3) uint8 before and after.
"""

# why: the outer `if` runs in Python when the graph is built, the inner one in DALI per sample

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvidia.dali import fn, types

from resolute.pipeline.plan.permutation import stream_key
from resolute.pipeline.plan.rng import uniforms
from resolute.pipeline.plan.sampling import CUTMIX, MIXUP, NOISE_PX, UNMIXED, Features

__all__ = ["erase_noise", "graph_inputs", "input_types", "mix", "uses_triton"]


def uses_triton(features: Features) -> bool:
    """Whether, on a GPU, the graph ends with the resize and Triton kernels do the rest."""
    return bool(features.slots or features.fills)


def input_types(features: Features) -> dict[str, tuple[Any, int]]:
    """External sources that `mix` needs: name -> (DALI type, number of dimensions per sample)."""
    if not features.mixing:
        return {}
    # corners and extents of two regions: the complete image and the box taken from the partner
    return {"mixes": (types.INT32, 0), "mode": (types.INT32, 0), "partner": (types.INT32, 0), "lam": (types.FLOAT, 0),
            "corners": (types.INT32, 2), "extents": (types.INT32, 2)}  # fmt: skip


def graph_inputs(features: Features, spec: Any) -> dict[str, NDArray[Any]]:
    """Values of the `input_types` sources for the batch `spec` (a `BatchSpec`); neutral if its stage does not mix."""
    if not features.mixing:
        return {}
    n = len(spec)
    corners, extents = np.zeros((n, 2, 2), np.int32), np.full((n, 2, 2), spec.res, np.int32)
    corners[:, 1], extents[:, 1] = spec.boxes[:, 1::-1], spec.boxes[:, :1:-1]
    # why per batch: permute_batch needs the complete batch, so all of its samples enter that branch or none
    mixes = np.full(n, (spec.modes != UNMIXED).any(), np.int32)
    return {"mixes": mixes, "mode": spec.modes, "partner": spec.partners, "lam": spec.lam, "corners": corners,
            "extents": extents}  # fmt: skip


def mix(images: Any, inputs: Mapping[str, Any]) -> Any:
    """Node: mixup and cutmix of each image with its partner in the batch."""
    if inputs["mixes"] > 0:
        partner = fn.permute_batch(images, indices=inputs["partner"])
        if inputs["mode"] == MIXUP:
            lam = inputs["lam"]
            images = fn.cast(images * lam + partner * (1.0 - lam), dtype=types.UINT8)
        elif inputs["mode"] == CUTMIX:
            images = fn.multi_paste(
                images, partner, in_anchors=inputs["corners"], out_anchors=inputs["corners"], shapes=inputs["extents"]
            )
    return images


def erase_noise(mean: tuple[float, ...], std: tuple[float, ...]) -> NDArray[np.uint8]:
    """Tile of normal noise with the data's mean and standard deviation: (NOISE_PX, NOISE_PX, 3) uint8.

    Source: Box and Muller, 1958.
    """
    u = uniforms(stream_key(0xE4A5E), np.arange(NOISE_PX**2), 6).reshape(NOISE_PX, NOISE_PX, 2, 3)
    normal = np.sqrt(-2 * np.log(1 - u[:, :, 0])) * np.cos(2 * np.pi * u[:, :, 1])
    return np.rint(255 * (np.array(mean) + np.array(std) * normal)).clip(0, 255).astype(np.uint8)
