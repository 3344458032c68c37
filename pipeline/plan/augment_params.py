"""Augmentation parameters of each sample, drawn as a pure function of (seed, epoch, sample).

They do not depend on the batch, the rank or earlier samples. Each purpose has its own random stream, so switching one
operation on or off does not change the parameters of the others.

A sample's operations are arranged in slots, applied one after another: the shift, then those of the policy, of jitter,
greyscale and blur. Each slot has a kind and six values (see `autoaugment.py`). `AugmentOps` describes the slots of a
complete run, the union over its stages.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resolute.pipeline.jit import compiled

from . import autoaugment as p
from .permutation import stream_key
from .rng import U64, Stream, beta, philox, uniforms
from .stage import BINS, SIZED_AT, Augment

__all__ = [
    "CUTMIX",
    "MIXUP",
    "UNMIXED",
    "AugmentOps",
    "alternating_flips",
    "augment_params",
    "erase_noise",
    "mix_params",
    "pack_ops",
    "used_ops",
]

UNMIXED, MIXUP, CUTMIX = 0, 1, 2
_ERASE_TRIES = 10  # Source: torchvision RandomErasing.get_params
NOISE_PX = 256  # px: period of the noise tile for erasing
_JITTER_KINDS = np.array([p.BRIGHTNESS, p.CONTRAST, p.SATURATION, p.HUE], np.int32)
_ORDERS = np.array(list(itertools.permutations(range(4))))

AugmentParams = dict[str, NDArray[np.generic]]


@dataclass(frozen=True, kw_only=True)
class AugmentOps:
    """AugmentOps that the graph of a run must support: the operation kinds of each slot, erasing fills, mixing."""

    slots: tuple[tuple[str, frozenset[int]], ...] = ()  # (shift | policy | jitter | grey | blur, kinds), in order
    fills: frozenset[str] = frozenset()  # of erasing: mean, noise
    mixing: bool = False


def used_ops(augments: Sequence[Augment]) -> AugmentOps:
    """The ops that at least one of `augments` uses."""
    slots: list[tuple[str, frozenset[int]]] = []
    if any(a.shift_px for a in augments):
        slots.append(("shift", frozenset({p.AFFINE})))
    for k in range(max(map(_policy_slots, augments), default=0)):
        kinds = (p.POLICY_KINDS[a.policy] for a in augments if _policy_slots(a) > k)
        slots.append(("policy", frozenset().union(*kinds)))
    jitters = [{int(kind) for kind, s in zip(_JITTER_KINDS, a.jitters, strict=True) if s} for a in augments]
    for k in range(max(map(len, jitters), default=0)):
        slots.append(("jitter", frozenset().union(*(kinds for kinds in jitters if len(kinds) > k))))
    if any(a.grey_prob for a in augments):
        slots.append(("grey", frozenset({p.SATURATION})))
    if any(a.blur_prob for a in augments):
        slots.append(("blur", frozenset({p.BLUR})))
    fills = frozenset(a.random_erasing_fill for a in augments if a.random_erasing_prob)
    return AugmentOps(slots=tuple(slots), fills=fills, mixing=any(a.mixes for a in augments))


def augment_params(augment: Augment, *, seed: int, epoch: int, ids: NDArray[np.int64], res: int) -> AugmentParams:
    """Draw the parameters of the samples `ids` (N,) at `res` px; contains only what `augment` switches on.

    PART_kinds    (N, slots) int32 and PART_values (N, slots, 6) float32; PART is shift, policy, jitter, grey or blur
    vflips        (N,) bool
    erase_boxes   (N, 4) int32 x, y, width, height in px of the output; width 0 = no erasing
    erase_from    (N, 2) int32 y, x of the fill's origin in the noise tile, below `NOISE_PX`; -1 = mean colour
    """

    def u(purpose: Stream, count: int) -> NDArray[np.float64]:
        return uniforms(stream_key(seed, purpose, epoch), ids, count)

    out: AugmentParams = {}
    if augment.shift_px:
        out["shift_kinds"], out["shift_values"] = _shift(augment.shift_px, u(Stream.SHIFT, 2))
    if augment.policy != "none":
        count = 8
        if augment.policy == "randaugment":
            count = 20 if augment.op_prob < 1 else 16 if augment.magnitude_std else 8
        out["policy_kinds"], out["policy_values"] = _policy(augment, u(Stream.POLICY, count), res)
    if any(augment.jitters):
        out["jitter_kinds"], out["jitter_values"] = _jitter(augment, u(Stream.JITTER, 6))
    if augment.grey_prob:
        chosen = u(Stream.GREY, 1)[:, :1] < augment.grey_prob
        out["grey_kinds"] = np.where(chosen, p.SATURATION, p.NONE).astype(np.int32)
        out["grey_values"] = np.zeros((len(ids), 1, p.VALUES), np.float32)
    if augment.blur_prob:
        numbers = u(Stream.BLUR, 2)
        out["blur_kinds"] = np.where(numbers[:, :1] < augment.blur_prob, p.BLUR, p.NONE).astype(np.int32)
        out["blur_values"] = _first_value(_between(augment.blur_sigma, numbers[:, 1:]) * res / SIZED_AT)
    if augment.random_erasing_prob:
        out["erase_boxes"], out["erase_from"] = _erase(augment, stream_key(seed, Stream.ERASE, epoch), ids, res)
    if augment.vflip_prob:
        out["vflips"] = u(Stream.VFLIP, 1)[:, 0] < augment.vflip_prob
    return out


def alternating_flips(*, seed: int, epoch: int, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """(N,) bool: whether the samples `ids` (N,) are flipped in `epoch`: half of them in even epochs, half in odd ones.

    Source: Jordan, "94% on CIFAR-10 in 3.29 seconds", arXiv 2404.00498, section 3.6.
    """
    return (uniforms(stream_key(seed, Stream.ALTERNATING_FLIP), ids, 1)[:, 0] < 0.5) ^ bool(epoch % 2)


def pack_ops(
    params: Mapping[str, NDArray[np.generic]], slots: Sequence[tuple[str, frozenset[int]]], n: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Arrange the params of `n` samples in a run's slots: kinds (n, slots) int32, values (n, slots, 6) float32."""
    kinds, values = np.zeros((n, len(slots)), np.int32), np.zeros((n, len(slots), p.VALUES), np.float32)
    parts = [part for part, _ in slots]
    for part in dict.fromkeys(parts):
        if f"{part}_kinds" in params:
            first, count = parts.index(part), params[f"{part}_kinds"].shape[1]
            kinds[:, first : first + count] = params[f"{part}_kinds"]
            values[:, first : first + count] = params[f"{part}_values"]
    return kinds, values


def _shift(reach: int, u: NDArray[np.float64]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Translations by -reach to reach px in x and y, drawn independently from uniforms `u` (N, 2)."""
    px = np.floor(u * (2 * reach + 1)) - reach
    values = np.zeros((len(u), 1, p.VALUES), np.float32)
    values[:, 0, (0, 4)] = 1
    values[:, 0, (2, 5)] = -px
    return np.where(px.any(axis=1, keepdims=True), p.AFFINE, p.NONE).astype(np.int32), values


def _policy_slots(augment: Augment) -> int:
    return {"none": 0, "randaugment": augment.num_ops, "trivialaugment": 1, "autoaugment": 2, "3-augment": 1}[
        augment.policy
    ]


def _policy(augment: Augment, u: NDArray[np.float64], res: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Kinds (N, slots) and values (N, slots, 6) from uniforms `u` (N, 8), of RandAugment (N, 16) with `magnitude_std`
    and (N, 20) with `op_prob`."""
    rows = np.arange(len(u))
    if augment.policy == "3-augment":
        kinds = np.array([p.SATURATION, p.POINT, p.BLUR], np.int32)[(u[:, :1] * 3).astype(int)]
        values = np.zeros((len(u), 1, p.VALUES), np.float32)
        values[kinds == p.POINT, :2] = (128, 255)  # Source: PIL ImageOps.solarize's default
        sigma = _between((0.1, 2.0), u[:, 1:2]) * res / SIZED_AT  # Source: DeiT's augment.py, GaussianBlur
        values[..., 0] = np.where(kinds == p.BLUR, sigma, values[..., 0])
        return kinds, values
    kinds, values = p.operations(augment.policy, res)
    if augment.policy == "randaugment":
        op = (u[:, 0:8:2] * (len(p.OPERATIONS) - 1)).astype(int)[:, : augment.num_ops]
        sign = (u[:, 1:8:2] < 0.5).astype(int)[:, : augment.num_ops]
        chosen = kinds[op]
        if augment.op_prob < 1:
            applied = u[:, 16:20][:, : augment.num_ops] < augment.op_prob
            chosen = np.where(applied, chosen, p.NONE).astype(np.int32)
        if not augment.magnitude_std:
            return chosen, values[op, augment.magnitude, sign]
        # Sources: timm.data.auto_augment, AugmentOp; Box and Muller, 1958
        normal = np.sqrt(-2 * np.log(1 - u[:, 8::2])) * np.cos(2 * np.pi * u[:, 9::2])
        bins = np.rint(augment.magnitude + augment.magnitude_std * normal).clip(0, BINS - 1).astype(int)
        return chosen, values[op, bins[:, : augment.num_ops], sign]
    if augment.policy == "trivialaugment":
        op, bins = (u[:, :1] * (len(p.OPERATIONS) - 1)).astype(int), (u[:, 1:2] * values.shape[1]).astype(int)
        return kinds[op], values[op, bins, (u[:, 2:3] < 0.5).astype(int)]
    sub = (u[:, 0] * len(p.AUTOAUGMENT)).astype(int)
    op, prob, bins = _AUTO_OPS[sub], _AUTO_PROBS[sub], _AUTO_BINS[sub]
    chosen = np.where(u[:, 1:3] < prob, kinds[op], p.NONE).astype(np.int32)
    return chosen, values[op, bins, (u[rows, 3:5] < 0.5).astype(int)]


_AUTO_OPS = np.array([[p.OPERATIONS.index(name) for name, _, _ in pair] for pair in p.AUTOAUGMENT])
_AUTO_PROBS = np.array([[prob for _, prob, _ in pair] for pair in p.AUTOAUGMENT])
_AUTO_BINS = np.array([[k or 0 for _, _, k in pair] for pair in p.AUTOAUGMENT])


def _jitter(augment: Augment, u: NDArray[np.float64]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The jitter's operations in a random order. Source: torchvision ColorJitter.get_params."""
    strengths = np.array(augment.jitters)
    factors = 1 + strengths * (2 * u[:, 2:6] - 1)
    factors[:, 3] = 6 * (factors[:, 3] - 1)
    order = _ORDERS[(u[:, 1] * len(_ORDERS)).astype(int)]
    order = order[strengths[order] > 0].reshape(len(u), -1)  # every row keeps the same number of operations
    on = u[:, :1] < augment.jitter_prob
    kinds = np.where(on, _JITTER_KINDS[order], p.NONE).astype(np.int32)
    return kinds, _first_value(np.take_along_axis(factors, order, axis=1))


def _erase(augment: Augment, key: int, ids: NDArray[np.int64], res: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Boxes (N, 4) x, y, w, h and noise origins (N, 2). Source: torchvision RandomErasing.get_params."""
    boxes, origins = np.zeros((len(ids), 4), np.int32), np.empty((len(ids), 2), np.int32)
    noise = augment.random_erasing_fill == "noise"
    low, high = np.log(augment.random_erasing_ratio)
    _erase_boxes(
        U64(key),
        np.ascontiguousarray(ids, np.int64),
        res,
        augment.random_erasing_prob,
        *map(float, augment.random_erasing_scale),
        low,
        high,
        noise,
        boxes,
        origins,
    )
    return boxes, origins


@compiled
def _erase_boxes(
    key: Any,
    ids: Any,
    res: Any,
    prob: Any,
    area_low: Any,
    area_high: Any,
    ratio_low: Any,
    ratio_high: Any,
    noise: Any,
    boxes: Any,
    origins: Any,
) -> None:
    for i in range(len(ids)):
        on, x, y, origin_y = _uniform4(key, ids[i], 0)  # numbers 0 to 3
        origins[i, 0] = origins[i, 1] = -1
        if noise:
            origins[i, 0], origins[i, 1] = int(origin_y * NOISE_PX), int(_uniform(key, ids[i], 4) * NOISE_PX)
        if on >= prob:
            continue
        for k in range(5, 5 + _ERASE_TRIES):
            area = res * res * (area_low + (area_high - area_low) * _uniform(key, ids[i], k))
            ratio = math.exp(ratio_low + (ratio_high - ratio_low) * _uniform(key, ids[i], k + _ERASE_TRIES))
            h, w = np.rint(math.sqrt(area * ratio)), np.rint(math.sqrt(area / ratio))
            if 1 <= h < res and 1 <= w < res:
                boxes[i, 0], boxes[i, 1] = math.floor(x * (res - w + 1)), math.floor(y * (res - h + 1))
                boxes[i, 2], boxes[i, 3] = w, h
                break


@compiled
def _uniform4(key: Any, number: Any, block: Any) -> Any:
    """Numbers 4 * block to 4 * block + 3 of `uniforms` for the counter `number`."""
    wide = U64(number)
    a, b, c, d = philox(U64(block), wide & U64(0xFFFFFFFF), wide >> U64(32), U64(0), key)
    return a * 2.0**-32, b * 2.0**-32, c * 2.0**-32, d * 2.0**-32


@compiled
def _uniform(key: Any, number: Any, k: Any) -> Any:
    """Number `k` of `uniforms` for the counter `number`."""
    a, b, c, d = _uniform4(key, number, k // 4)
    return (a, b, c, d)[k % 4]


def mix_params(
    augment: Augment, *, seed: int, epoch: int, batch: int, ids: NDArray[np.int64], res: int
) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int32]]:
    """Mixing of the samples `ids` (N,): modes (N,) int32, lam (N,) float32, boxes (N, 4) int32 x, y, w, h in px.

    With `mixup_mode` "batch", all samples have the values drawn for batch `batch` of the epoch. `augment` must mix.
    Source: timm.data.mixup, modes "batch" and "elem".
    """
    per_batch = augment.mixup_mode == "batch"
    counters = np.array([batch]) if per_batch else np.ascontiguousarray(ids, np.int64)
    key = stream_key(seed, Stream.BATCH_MIX if per_batch else Stream.MIX, epoch)
    n = len(counters)
    modes, lam, boxes = np.zeros(n, np.int32), np.ones(n, np.float32), np.zeros((n, 4), np.int32)
    cutmix_prob = (augment.mixup_switch_prob if augment.mixup_alpha else 1.0) if augment.cutmix_alpha else 0.0
    mixup_key, cutmix_key = (U64(stream_key(stream_key(key, part))) for part in (1, 1 if per_batch else 2))
    _mix_params(
        U64(key),
        mixup_key,
        cutmix_key,
        counters,
        res,
        augment.mixup_prob,
        cutmix_prob,
        1.0 / (augment.mixup_alpha or 1.0),
        1.0 / (augment.cutmix_alpha or 1.0),
        32 if per_batch else 4,
        modes,
        lam,
        boxes,
    )
    repeats = len(ids) if per_batch else 1
    return modes.repeat(repeats), lam.repeat(repeats), boxes.repeat(repeats, axis=0)


@compiled
def _mix_params(
    key: Any,
    mixup_key: Any,
    cutmix_key: Any,
    counters: Any,
    res: Any,
    prob: Any,
    cutmix_prob: Any,
    mixup_power: Any,
    cutmix_power: Any,
    pairs: Any,
    modes: Any,
    lam: Any,
    boxes: Any,
) -> None:
    for i in range(len(counters)):
        mixed, which, x, y = _uniform4(key, counters[i], 0)
        if mixed >= prob:
            continue
        if which >= cutmix_prob:
            modes[i], lam[i] = MIXUP, beta(mixup_key, counters[i], mixup_power, pairs)
            continue
        weight = beta(cutmix_key, counters[i], cutmix_power, pairs)
        # a box of area fraction 1 - weight around x, y, clipped to the image. Source: timm.data.mixup rand_bbox
        half = int(res * math.sqrt(1.0 - weight)) // 2
        x0, x1 = max(int(x * res) - half, 0), min(int(x * res) + half, res)
        y0, y1 = max(int(y * res) - half, 0), min(int(y * res) + half, res)
        covered = (x1 - x0) * (y1 - y0)
        if covered > 0:
            modes[i], lam[i] = CUTMIX, 1.0 - covered / res**2
            boxes[i, 0], boxes[i, 1], boxes[i, 2], boxes[i, 3] = x0, y0, x1 - x0, y1 - y0


def erase_noise(mean: tuple[float, ...], std: tuple[float, ...]) -> NDArray[np.uint8]:
    """Tile of normal noise with the data's mean and standard deviation: (NOISE_PX, NOISE_PX, 3) uint8.

    Source: Box and Muller, 1958.
    """
    u = uniforms(stream_key(0xE4A5E), np.arange(NOISE_PX**2), 6).reshape(NOISE_PX, NOISE_PX, 2, 3)
    normal = np.sqrt(-2 * np.log(1 - u[:, :, 0])) * np.cos(2 * np.pi * u[:, :, 1])
    return np.rint(255 * (np.array(mean) + np.array(std) * normal)).clip(0, 255).astype(np.uint8)


def _between(bounds: tuple[float, float], u: NDArray[np.float64]) -> NDArray[np.float64]:
    return bounds[0] + (bounds[1] - bounds[0]) * u


def _first_value(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """(N, slots, 6) float32: `values` (N, slots) as the first value, else 0."""
    out = np.zeros((*values.shape, p.VALUES), np.float32)
    out[..., 0] = values
    return out
