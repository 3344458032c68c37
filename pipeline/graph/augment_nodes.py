"""Augmentation inside the DALI graph: which inputs it needs, and the nodes that apply them.

Every node takes its numbers from the batch (`draws`), none draws its own. On a CPU all operations of a sample run as
one compiled function (`pixels`), since DALI's own cost more than four times as much there and each conditional about
0.2 ms a batch. On a GPU operations and erasing are not part of the graph: `kernels` does all that follows the resize
(`finishes_in_kernels`). Images are (res, res, 3) uint8 before and after.
"""

# ruff: noqa: SIM102  # why: an outer test is Python's, while the graph is built; the inner is DALI's, for each sample

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

__all__ = ["augmented", "finishes_in_kernels", "input_types", "mixed", "noise", "graph_inputs"]

_WHOLE, _MEAN, _NOISE = 0, 1, 2


def finishes_in_kernels(features: Features) -> bool:
    """Whether a GPU's graph ends with the resize, and `kernels` does the rest."""
    return bool(features.slots or features.fills)


def input_types(features: Features) -> dict[str, tuple[Any, int]]:
    """External sources of these features: name -> DALI type and dimensions of a sample's array."""
    wanted: dict[str, tuple[Any, int]] = {}
    if features.slots:
        wanted |= {"changed": (types.INT32, 0), "kinds": (types.INT32, 1), "values": (types.FLOAT, 2)}
    if features.fills:
        # corners y, x and heights and widths of two regions: the whole image's and the erased one's
        wanted |= {"erased": (types.INT32, 0), "erase_out": (types.INT32, 2), "erase_extents": (types.INT32, 2)}
    if "noise" in features.fills:
        wanted["erase_in"] = (types.INT32, 2)
    if features.mixing:
        # as above: the own image's and the partner's
        wanted |= {"mixes": (types.INT32, 0), "mode": (types.INT32, 0), "partner": (types.INT32, 0),
                   "lam": (types.FLOAT, 0), "corners": (types.INT32, 2), "extents": (types.INT32, 2)}  # fmt: skip
    return wanted


def graph_inputs(features: Features, spec: Any) -> dict[str, NDArray[Any]]:
    """What `input_types` take for one batch: `spec` a `BatchSpec`; neutral where its stage has something off."""
    n, values = len(spec), dict[str, NDArray[Any]]()
    if features.slots:
        kinds, slot_values = pack_ops(spec.augment_params, features.slots, n)
        values |= {"changed": (kinds != p.NONE).any(axis=1).astype(np.int32), "kinds": kinds, "values": slot_values}
    if features.fills:
        boxes = spec.augment_params.get("erase_boxes", np.zeros((n, 4), np.int32))
        origins = spec.augment_params.get("erase_from", np.zeros((n, 2), np.int32))
        out, extents = _regions(boxes, spec.res)
        fill = np.where(origins[:, 0] < 0, _MEAN, _NOISE)
        values |= {"erased": np.where(boxes[:, 2] > 0, fill, _WHOLE).astype(np.int32), "erase_out": out,
                   "erase_extents": extents}  # fmt: skip
        if "noise" in features.fills:
            values["erase_in"] = np.stack([np.zeros_like(origins), np.maximum(origins, 0)], axis=1).astype(np.int32)
    if features.mixing:
        corners, extents = _regions(spec.boxes, spec.res)
        # why: the permutation has to see the whole batch, so all samples of a batch enter that branch, or none
        mixes = np.full(n, (spec.modes != UNMIXED).any(), np.int32)
        values |= {"mixes": mixes, "mode": spec.modes, "partner": spec.partners, "lam": spec.lam,
                   "corners": corners, "extents": extents}  # fmt: skip
    return values


def _regions(boxes: NDArray[Any], res: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Corners and extents (N, 2, 2) of the whole image and of `boxes` (N, 4) x, y, width, height."""
    corners, extents = np.zeros((len(boxes), 2, 2), np.int32), np.full((len(boxes), 2, 2), res, np.int32)
    corners[:, 1], extents[:, 1] = boxes[:, 1::-1], boxes[:, :1:-1]
    return corners, extents


def augmented(
    images: Any, given: Mapping[str, Any], features: Features, *,
    mean: tuple[float, ...], std: tuple[float, ...], res: int,
) -> Any:  # fmt: skip
    """Node: policy, jitter, greyscale, blur and erasing, as far as the graph has them; on a CPU alone.

    `mean` and `std` (in 0..1) are the colour and noise that erasing fills with, `res` the largest of the run.
    """
    if features != Features():  # why: compiled nodes have none, DALI's have one, and branches must agree
        images = fn.reshape(images, layout="HWC")
    if features.slots:
        if given["changed"] > 0:
            images = fn.reshape(cpu.apply_augment_ops(images, given["kinds"], given["values"]), layout="HWC")
    if "mean" in features.fills:
        if given["erased"] == _MEAN:
            images = fn.erase(
                images, anchor=fn.cast(given["erase_out"][1], dtype=types.FLOAT), axes=[0, 1],
                shape=fn.cast(given["erase_extents"][1], dtype=types.FLOAT),
                fill_value=[float(np.rint(255 * m)) for m in mean],
            )  # fmt: skip
    if "noise" in features.fills:
        repeats = 1 + -(-res // NOISE_PX)  # enough for a region of `res` px from any place in the first square
        field = types.Constant(np.tile(noise(mean, std), (repeats, repeats, 1)), device=images.device, layout="HWC")
        if given["erased"] == _NOISE:
            images = fn.multi_paste(
                images, field, in_anchors=given["erase_in"], out_anchors=given["erase_out"],
                shapes=given["erase_extents"], output_size=given["erase_extents"][0],
            )  # fmt: skip
    return images


def mixed(images: Any, given: Mapping[str, Any], *, compiled: bool | None = None) -> Any:
    """Node: mixup and cutmix of a batch with itself, permuted by `partner`; `compiled` as in `augmented`."""
    by_function = images.device == "cpu" if compiled is None else compiled
    if given["mixes"] > 0:
        partner = fn.permute_batch(images, indices=given["partner"])
        if given["mode"] == MIXUP:
            if by_function:
                lam = fn.reshape(given["lam"], shape=[1])
                images = fn.reshape(cpu.mix_images(images, partner, lam), layout="HWC")
            else:
                lam = given["lam"]
                images = fn.cast(images * lam + partner * (1.0 - lam), dtype=types.UINT8)
        elif given["mode"] == CUTMIX:
            images = fn.multi_paste(
                images, partner, in_anchors=given["corners"], out_anchors=given["corners"], shapes=given["extents"]
            )
    return images


def noise(mean: tuple[float, ...], std: tuple[float, ...]) -> NDArray[np.uint8]:
    """(NOISE_PX, NOISE_PX, 3): normal noise of the data's mean and deviation in levels, which erasing repeats.

    Source: Box and Muller, 1958.
    """
    u = uniforms(stream_key(0xE4A5E), np.arange(NOISE_PX**2), 6).reshape(NOISE_PX, NOISE_PX, 2, 3)
    normal = np.sqrt(-2 * np.log(1 - u[:, :, 0])) * np.cos(2 * np.pi * u[:, :, 1])
    return np.rint(255 * (np.array(mean) + np.array(std) * normal)).clip(0, 255).astype(np.uint8)
