"""How do given numbers become pixels inside the DALI graph?

Every node takes its numbers from the batch (`draws`), none draws its own. A sample's operations run slot after slot:
on a GPU as DALI nodes, each on the samples that want it; on a CPU as one compiled function (`pixels`), since DALI's
own cost more than four times as much there and each conditional about 0.2 ms a batch. Both are tested against the
same oracles. DALI's nodes are further from Pillow in three places: an affine image blends with the black beside it over
its last pixel, sharpness works on the border pixels too, and equalize is OpenCV's (up to 12 levels from Pillow's).
Images are (res, res, 3) uint8 before and after.
"""

# ruff: noqa: SIM102  # why: an outer test is Python's, while the graph is built; the inner is DALI's, for each sample

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvidia.dali import fn, math, types

from . import cpu
from . import policies as p
from .draws import CUTMIX, MIXUP, NOISE_PX, UNMIXED, Features, program
from .rng import stream_key, uniforms

__all__ = ["augmented", "inputs", "mixed", "numbers"]

_WHOLE, _MEAN, _NOISE = 0, 1, 2
_CUT = 0.498  # taken off before DALI rounds: then it cuts to an integer, as Pillow does
_SMOOTH = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32) / 13  # Source: Pillow ImageFilter.SMOOTH


def inputs(features: Features) -> dict[str, tuple[Any, int]]:
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


def numbers(features: Features, spec: Any) -> dict[str, NDArray[Any]]:
    """What `inputs` take for one batch: `spec` a `BatchSpec`; neutral where its stage has something off."""
    n, values = len(spec), dict[str, NDArray[Any]]()
    if features.slots:
        kinds, slot_values = program(spec.draws, features.slots, n)
        values |= {"changed": (kinds != p.NONE).any(axis=1).astype(np.int32), "kinds": kinds, "values": slot_values}
    if features.fills:
        boxes = spec.draws.get("erase_boxes", np.zeros((n, 4), np.int32))
        origins = spec.draws.get("erase_from", np.zeros((n, 2), np.int32))
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
    mean: tuple[float, ...], std: tuple[float, ...], res: int, compiled: bool | None = None,
) -> Any:  # fmt: skip
    """Node: policy, jitter, greyscale, blur and erasing, as far as the run has them; nothing otherwise.

    `mean` and `std` (in 0..1) are the colour and noise that erasing fills with, `res` the largest of the run.
    `compiled` None: the compiled function on a CPU, DALI's nodes on a GPU.
    """
    by_function = images.device == "cpu" if compiled is None else compiled
    if features != Features():  # why: compiled nodes have none, DALI's have one, and branches must agree
        images = fn.reshape(images, layout="HWC")
    if features.slots:
        if given["changed"] > 0:
            if by_function:
                images = fn.reshape(cpu.changed(images, given["kinds"], given["values"]), layout="HWC")
            else:
                for k, (_, kinds) in enumerate(features.slots):
                    images = _slot(images, given["kinds"][k], given["values"][k], kinds)
    if "mean" in features.fills:
        if given["erased"] == _MEAN:
            images = fn.erase(
                images, anchor=fn.cast(given["erase_out"][1], dtype=types.FLOAT), axes=[0, 1],
                shape=fn.cast(given["erase_extents"][1], dtype=types.FLOAT),
                fill_value=[float(np.rint(255 * m)) for m in mean],
            )  # fmt: skip
    if "noise" in features.fills:
        noise = types.Constant(_noise(mean, std, res), device=images.device, layout="HWC")
        if given["erased"] == _NOISE:
            images = fn.multi_paste(
                images, noise, in_anchors=given["erase_in"], out_anchors=given["erase_out"],
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
                images = fn.reshape(cpu.blended(images, partner, lam), layout="HWC")
            else:
                lam = given["lam"]
                images = fn.cast(images * lam + partner * (1.0 - lam), dtype=types.UINT8)
        elif given["mode"] == CUTMIX:
            images = fn.multi_paste(
                images, partner, in_anchors=given["corners"], out_anchors=given["corners"], shapes=given["extents"]
            )
    return images


def _noise(mean: tuple[float, ...], std: tuple[float, ...], res: int) -> NDArray[np.uint8]:
    """Normal noise of the data's mean and deviation in levels: the same `NOISE_PX` square again and again.

    Big enough for a region of `res` px from any place in the first square. Source: Box and Muller, 1958.
    """
    u = uniforms(stream_key(0xE4A5E), np.arange(NOISE_PX**2), 6).reshape(NOISE_PX, NOISE_PX, 2, 3)
    normal = np.sqrt(-2 * np.log(1 - u[:, :, 0])) * np.cos(2 * np.pi * u[:, :, 1])
    square = np.rint(255 * (np.array(mean) + np.array(std) * normal)).clip(0, 255).astype(np.uint8)
    repeats = 1 + -(-res // NOISE_PX)
    return np.tile(square, (repeats, repeats, 1))


def _slot(images: Any, kind: Any, values: Any, kinds: frozenset[int]) -> Any:
    """Node: one operation of each sample, out of `kinds`."""
    factor = values[0]
    if p.AFFINE in kinds:
        if kind == p.AFFINE:
            images = fn.warp_affine(images, matrix=fn.reshape(values, shape=[2, p.VALUES // 2]), fill_value=0)
    if p.BRIGHTNESS in kinds:
        if kind == p.BRIGHTNESS:
            images = _cut(images * factor)
    if p.SATURATION in kinds:
        if kind == p.SATURATION:
            grey = fn.cast(_grey(images), dtype=types.FLOAT)
            images = _cut(grey + factor * (images - grey))
    if p.CONTRAST in kinds:
        if kind == p.CONTRAST:
            mean = math.floor(fn.reductions.mean(_grey(images), axes=[0, 1], keep_dims=True) + 0.5)
            images = _cut(mean + factor * (images - mean))
    if p.SHARPNESS in kinds:
        if kind == p.SHARPNESS:
            smooth = fn.cast(fn.filter(images, types.Constant(_SMOOTH, device=images.device)), dtype=types.FLOAT)
            images = _cut(smooth + factor * (images - smooth))
    if p.POINT in kinds:
        if kind == p.POINT:
            turned = fn.cast(images >= factor, dtype=types.UINT8) * types.Constant(255, dtype=types.UINT8)
            images = (images ^ turned) & fn.cast(values[1], dtype=types.UINT8)
    if p.AUTOCONTRAST in kinds:
        if kind == p.AUTOCONTRAST:
            images = _stretched(images)
    if p.EQUALIZE in kinds:
        if kind == p.EQUALIZE:
            images = fn.equalize(images)
    if p.BLUR in kinds:
        if kind == p.BLUR:
            images = fn.gaussian_blur(images, sigma=factor)
    if p.HUE in kinds:
        if kind == p.HUE:
            images = _turned(images, factor)
    return images


def _cut(values: Any) -> Any:
    return fn.cast(values - _CUT, dtype=types.UINT8)


def _grey(images: Any) -> Any:
    return fn.color_space_conversion(images, image_type=types.RGB, output_type=types.GRAY)


def _stretched(images: Any) -> Any:
    """Each channel spread over 0..255; one that is even stays. Source: Pillow ImageOps.autocontrast."""
    low = fn.reductions.min(images, axes=[0, 1], keep_dims=True)
    span = fn.cast(fn.reductions.max(images, axes=[0, 1], keep_dims=True) - low, dtype=types.FLOAT)
    even = fn.cast(span == 0.0, dtype=types.FLOAT)
    scale = even + (1.0 - even) * 255.0 / math.max(span, 1.0)
    return _cut((images - low * (1.0 - even)) * scale)


def _turned(images: Any, sixths: Any) -> Any:
    """The hue turned by `sixths` of a circle; the formula is that of `pixels`."""
    r, g, b = (fn.cast(images[:, :, c : c + 1], dtype=types.FLOAT) for c in range(3))
    top = math.max(math.max(r, g), b)
    chroma = top - math.min(math.min(r, g), b)
    by = 1.0 / math.max(chroma, 1.0)
    red = fn.cast(top == r, dtype=types.FLOAT)
    green = (1.0 - red) * (top == g)
    blue = 1.0 - red - green
    hue = (red * (g - b) + green * (b - r) + blue * (r - g)) * by + 2.0 * green + 4.0 * blue
    k = hue + sixths + types.Constant(np.array([[[5, 3, 1]]], np.float32), device=images.device)
    k = k - 6.0 * math.floor(k / 6.0)
    return fn.cast(top - chroma * math.clamp(math.min(k, 4.0 - k), 0.0, 1.0), dtype=types.UINT8)
