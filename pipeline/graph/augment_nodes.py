"""Augmentation nodes of the DALI graph, and the per-batch inputs they need.

No node draws random numbers: all parameters come from `BatchSpec.augment_params`. On a CPU all operations of a sample
run as one compiled function (`kernels/augment.py`); DALI's own operators take more than four times as long, and each
conditional about 0.2 ms per batch. On a GPU, operations and erasing are not part of the graph: Triton kernels do
everything after the resize (`uses_triton`). Images are (res, res, 3) uint8 before and after each node.
"""

# ruff: noqa: SIM102  # why: the outer `if` runs in Python when the graph is built, the inner one in DALI per sample

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvidia.dali import fn, types

from pipeline.plan import autoaugment as p
from pipeline.plan.rng import stream_key, uniforms
from pipeline.plan.sampling import CUTMIX, MIXUP, NOISE_PX, UNMIXED, Features, pack_ops

from . import cpu_nodes as cpu

__all__ = ["augment", "erase_noise", "graph_inputs", "input_types", "mix", "uses_triton"]

_NOT_ERASED, _MEAN, _NOISE = 0, 1, 2


def uses_triton(features: Features) -> bool:
    """Whether, on a GPU, the graph ends with the resize and Triton kernels do the rest."""
    return bool(features.slots or features.fills)


def input_types(features: Features) -> dict[str, tuple[Any, int]]:
    """External sources that `features` needs: name -> (DALI type, number of dimensions per sample)."""
    sources: dict[str, tuple[Any, int]] = {}
    if features.slots:
        sources |= {"has_ops": (types.INT32, 0), "kinds": (types.INT32, 1), "values": (types.FLOAT, 2)}
    if features.fills:
        # corners (y, x) and extents (height, width) of two regions: the complete image and the erased box
        sources |= {"erased": (types.INT32, 0), "erase_out": (types.INT32, 2), "erase_extents": (types.INT32, 2)}
    if "noise" in features.fills:
        sources["erase_in"] = (types.INT32, 2)
    if features.mixing:
        # corners and extents of two regions: the complete image and the box taken from the partner
        sources |= {"mixes": (types.INT32, 0), "mode": (types.INT32, 0), "partner": (types.INT32, 0),
                    "lam": (types.FLOAT, 0), "corners": (types.INT32, 2), "extents": (types.INT32, 2)}  # fmt: skip
    return sources


def graph_inputs(features: Features, spec: Any) -> dict[str, NDArray[Any]]:
    """Values of the `input_types` sources for the batch `spec` (a `BatchSpec`); neutral for what its stage has off."""
    n, values = len(spec), dict[str, NDArray[Any]]()
    if features.slots:
        kinds, slot_values = pack_ops(spec.augment_params, features.slots, n)
        values |= {"has_ops": (kinds != p.NONE).any(axis=1).astype(np.int32), "kinds": kinds, "values": slot_values}
    if features.fills:
        boxes = spec.augment_params.get("erase_boxes", np.zeros((n, 4), np.int32))
        origins = spec.augment_params.get("erase_from", np.zeros((n, 2), np.int32))
        out, extents = _regions(boxes, spec.res)
        fill = np.where(origins[:, 0] < 0, _MEAN, _NOISE)
        values |= {"erased": np.where(boxes[:, 2] > 0, fill, _NOT_ERASED).astype(np.int32), "erase_out": out,
                   "erase_extents": extents}  # fmt: skip
        if "noise" in features.fills:
            values["erase_in"] = np.stack([np.zeros_like(origins), np.maximum(origins, 0)], axis=1).astype(np.int32)
    if features.mixing:
        corners, extents = _regions(spec.boxes, spec.res)
        # why per batch: permute_batch needs the complete batch, so all of its samples enter that branch or none
        mixes = np.full(n, (spec.modes != UNMIXED).any(), np.int32)
        values |= {"mixes": mixes, "mode": spec.modes, "partner": spec.partners, "lam": spec.lam,
                   "corners": corners, "extents": extents}  # fmt: skip
    return values


def _regions(boxes: NDArray[Any], res: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Corners and extents, (N, 2, 2) each, of the complete image and of `boxes` (N, 4) x, y, width, height."""
    corners, extents = np.zeros((len(boxes), 2, 2), np.int32), np.full((len(boxes), 2, 2), res, np.int32)
    corners[:, 1], extents[:, 1] = boxes[:, 1::-1], boxes[:, :1:-1]
    return corners, extents


def augment(
    images: Any, inputs: Mapping[str, Any], features: Features, *,
    mean: tuple[float, ...], std: tuple[float, ...], res: int,
) -> Any:  # fmt: skip
    """Node: policy, jitter, greyscale, blur and erasing, as far as `features` has them; CPU only.

    `mean` and `std` (of values in 0..1) define the fills of erasing; `res` is the largest of the run in px.
    """
    if features != Features():  # why: compiled nodes output no layout, DALI's do, and both branches must agree
        images = fn.reshape(images, layout="HWC")
    if features.slots:
        if inputs["has_ops"] > 0:
            images = fn.reshape(cpu.apply_augment_ops(images, inputs["kinds"], inputs["values"]), layout="HWC")
    if "mean" in features.fills:
        if inputs["erased"] == _MEAN:
            images = fn.erase(
                images, anchor=fn.cast(inputs["erase_out"][1], dtype=types.FLOAT), axes=[0, 1],
                shape=fn.cast(inputs["erase_extents"][1], dtype=types.FLOAT),
                fill_value=[float(np.rint(255 * m)) for m in mean],
            )  # fmt: skip
    if "noise" in features.fills:
        repeats = 1 + -(-res // NOISE_PX)  # covers a region of `res` px from any origin in the first tile
        tiles = np.tile(erase_noise(mean, std), (repeats, repeats, 1))
        field = types.Constant(tiles, device=images.device, layout="HWC")
        if inputs["erased"] == _NOISE:
            images = fn.multi_paste(
                images, field, in_anchors=inputs["erase_in"], out_anchors=inputs["erase_out"],
                shapes=inputs["erase_extents"], output_size=inputs["erase_extents"][0],
            )  # fmt: skip
    return images


def mix(images: Any, inputs: Mapping[str, Any]) -> Any:
    """Node: mixup and cutmix of each image with its partner in the batch."""
    on_cpu = images.device == "cpu"
    if inputs["mixes"] > 0:
        partner = fn.permute_batch(images, indices=inputs["partner"])
        if inputs["mode"] == MIXUP:
            if on_cpu:
                lam = fn.reshape(inputs["lam"], shape=[1])
                images = fn.reshape(cpu.mix_images(images, partner, lam), layout="HWC")
            else:
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
