"""Augmentation parameters of each sample, drawn as a pure function of (seed, epoch, sample).

They do not depend on the batch, the rank or earlier samples. Each purpose has its own random stream, so switching one
operation on or off does not change the parameters of the others.

A sample's operations are arranged in slots, applied one after another: those of the policy, then of jitter, greyscale
and blur. Each slot has a kind and six values (see `autoaugment.py`). `Features` describes the slots of a complete run,
the union over its stages.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from . import autoaugment as p
from .rng import betas, stream_key, uniforms
from .stage import Augment

__all__ = ["CUTMIX", "MIXUP", "UNMIXED", "Features", "augment_params", "features", "mix_params",
           "pack_ops"]  # fmt: skip

UNMIXED, MIXUP, CUTMIX = 0, 1, 2
# Stream purposes; order.py uses 0 and 1, plan.py 2.
_BATCH_MIX = 3
_POLICY, _JITTER, _GREY, _BLUR, _ERASE, _VFLIP, _MIX = range(16, 23)
_ERASE_TRIES = 10  # Source: torchvision RandomErasing.get_params
NOISE_PX = 256  # px: period of the noise tile for erasing
_JITTER_KINDS = np.array([p.BRIGHTNESS, p.CONTRAST, p.SATURATION, p.HUE], np.int32)
_ORDERS = np.array(list(itertools.permutations(range(4))))

AugmentParams = dict[str, NDArray[np.generic]]


@dataclass(frozen=True, kw_only=True)
class Features:
    """Features that the graph of a run must support: the operation kinds of each slot, erasing fills, mixing."""

    slots: tuple[tuple[str, frozenset[int]], ...] = ()  # (policy | jitter | grey | blur, kinds), in order
    fills: frozenset[str] = frozenset()  # of erasing: mean, noise
    mixing: bool = False


def features(augments: Sequence[Augment]) -> Features:
    """The features that at least one of `augments` uses."""
    slots: list[tuple[str, frozenset[int]]] = []
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
    return Features(slots=tuple(slots), fills=fills, mixing=any(a.mixes for a in augments))


def augment_params(augment: Augment, *, seed: int, epoch: int, ids: NDArray[np.int64], res: int) -> AugmentParams:
    """Draw the parameters of the samples `ids` (N,) at `res` px; contains only what `augment` switches on.

    PART_kinds    (N, slots) int32 and PART_values (N, slots, 6) float32; PART is policy, jitter, grey or blur
    vflips        (N,) bool
    erase_boxes   (N, 4) int32 x, y, width, height in px of the output; width 0 = no erasing
    erase_from    (N, 2) int32 y, x of the fill's origin in the noise tile, below `NOISE_PX`; -1 = mean colour
    """

    def u(purpose: int, count: int) -> NDArray[np.float64]:
        return uniforms(stream_key(seed, purpose, epoch), ids, count)

    out: AugmentParams = {}
    if augment.policy != "none":
        out["policy_kinds"], out["policy_values"] = _policy(augment, u(_POLICY, 8), res)
    if any(augment.jitters):
        out["jitter_kinds"], out["jitter_values"] = _jitter(augment, u(_JITTER, 6))
    if augment.grey_prob:
        chosen = u(_GREY, 1)[:, :1] < augment.grey_prob
        out["grey_kinds"] = np.where(chosen, p.SATURATION, p.NONE).astype(np.int32)
        out["grey_values"] = np.zeros((len(ids), 1, p.VALUES), np.float32)
    if augment.blur_prob:
        numbers = u(_BLUR, 2)
        out["blur_kinds"] = np.where(numbers[:, :1] < augment.blur_prob, p.BLUR, p.NONE).astype(np.int32)
        out["blur_values"] = _first_value(_between(augment.blur_sigma, numbers[:, 1:]))
    if augment.random_erasing_prob:
        out["erase_boxes"], out["erase_from"] = _erase(augment, u(_ERASE, 5 + 2 * _ERASE_TRIES), res)
    if augment.vflip_prob:
        out["vflips"] = u(_VFLIP, 1)[:, 0] < augment.vflip_prob
    return out


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


def _policy_slots(augment: Augment) -> int:
    return {"none": 0, "randaugment": augment.num_ops, "trivialaugment": 1, "autoaugment": 2, "3-augment": 1}[
        augment.policy
    ]


def _policy(augment: Augment, u: NDArray[np.float64], res: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Kinds (N, slots) and values (N, slots, 6) from uniforms `u` (N, 8)."""
    rows = np.arange(len(u))
    if augment.policy == "3-augment":
        kinds = np.array([p.SATURATION, p.POINT, p.BLUR], np.int32)[(u[:, :1] * 3).astype(int)]
        values = np.zeros((len(u), 1, p.VALUES), np.float32)
        values[kinds == p.POINT, :2] = (128, 255)  # Source: PIL ImageOps.solarize's default
        sigma = _between((0.1, 2.0), u[:, 1:2])  # Source: DeiT's augment.py, GaussianBlur
        values[..., 0] = np.where(kinds == p.BLUR, sigma, values[..., 0])
        return kinds, values
    kinds, values = p.operations(augment.policy, res)
    if augment.policy == "randaugment":
        op = (u[:, 0::2] * (len(p.OPERATIONS) - 1)).astype(int)[:, : augment.num_ops]
        sign = (u[:, 1::2] < 0.5).astype(int)[:, : augment.num_ops]
        return kinds[op], values[op, augment.magnitude, sign]
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


def _erase(augment: Augment, u: NDArray[np.float64], res: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Boxes (N, 4) x, y, w, h and noise origins (N, 2). Source: torchvision RandomErasing.get_params."""
    area = res * res * _between(augment.random_erasing_scale, u[:, 5 : 5 + _ERASE_TRIES])
    ratio = np.exp(_between(tuple(np.log(augment.random_erasing_ratio)), u[:, 5 + _ERASE_TRIES :]))
    h, w = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))
    good = (h < res) & (w < res) & (h >= 1) & (w >= 1)
    rows, first = np.arange(len(u)), np.argmax(good, axis=1)
    on = good[rows, first] & (u[:, 0] < augment.random_erasing_prob)
    w, h = w[rows, first], h[rows, first]
    x, y = np.floor(u[:, 1] * (res - w + 1)), np.floor(u[:, 2] * (res - h + 1))
    boxes = np.where(on[:, None], np.stack([x, y, w, h], axis=1), 0).astype(np.int32)
    if augment.random_erasing_fill == "mean":
        return boxes, np.full((len(u), 2), -1, np.int32)
    return boxes, (u[:, 3:5] * NOISE_PX).astype(np.int32)


def mix_params(
    augment: Augment, *, seed: int, epoch: int, batch: int, ids: NDArray[np.int64], res: int
) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int32]]:
    """Mixing of the samples `ids` (N,): modes (N,) int32, lam (N,) float32, boxes (N, 4) int32 x, y, w, h in px.

    With `mixup_mode` "batch", all samples have the values drawn for batch `batch` of the epoch. `augment` must mix.
    Source: timm.data.mixup, modes "batch" and "elem".
    """
    per_batch = augment.mixup_mode == "batch"
    counters = np.array([batch]) if per_batch else ids
    key = stream_key(seed, _BATCH_MIX if per_batch else _MIX, epoch)
    mixed, which, x, y = uniforms(key, counters, 4).T
    cut = which < augment.mixup_switch_prob if augment.mixup_alpha else np.ones(len(counters), bool)
    if not augment.cutmix_alpha:
        cut[:] = False
    lam = np.ones(len(counters))
    boxes = np.zeros((len(counters), 4), np.int32)
    purposes = (1, 1) if per_batch else (1, 2)
    for chosen, alpha, purpose in zip((~cut, cut), (augment.mixup_alpha, augment.cutmix_alpha), purposes, strict=True):
        if chosen.any():
            lam[chosen] = betas(stream_key(key, purpose), counters[chosen], alpha, pairs=32 if per_batch else 4)
    boxes[cut] = _cutmix_boxes(lam[cut], x[cut], y[cut], res)
    covered = boxes[:, 2].astype(np.int64) * boxes[:, 3]
    lam = np.where(cut, 1.0 - covered / res**2, lam)
    on = (mixed < augment.mixup_prob) & (~cut | (covered > 0))
    modes = np.where(on, np.where(cut, CUTMIX, MIXUP), UNMIXED).astype(np.int32)
    weights = np.where(on, lam, 1.0).astype(np.float32)
    boxes = np.where((on & cut)[:, None], boxes, 0).astype(np.int32)
    repeats = len(ids) if per_batch else 1
    return modes.repeat(repeats), weights.repeat(repeats), boxes.repeat(repeats, axis=0)


def _cutmix_boxes(
    lam: NDArray[np.float64], x: NDArray[np.float64], y: NDArray[np.float64], res: int
) -> NDArray[np.int32]:
    """Boxes (N, 4) int32 x, y, width, height in px, clipped to the image, with area fraction 1 - `lam` (N,).

    `x`, `y` (N,) in 0..1 are the centres.

    Source: timm.data.mixup rand_bbox.
    """
    half = (res * np.sqrt(1.0 - lam)).astype(np.int64) // 2
    x0, x1 = (np.clip((x * res).astype(np.int64) + side * half, 0, res) for side in (-1, 1))
    y0, y1 = (np.clip((y * res).astype(np.int64) + side * half, 0, res) for side in (-1, 1))
    return np.stack([x0, y0, x1 - x0, y1 - y0], axis=1).astype(np.int32)


def _between(bounds: tuple[float, float], u: NDArray[np.float64]) -> NDArray[np.float64]:
    return bounds[0] + (bounds[1] - bounds[0]) * u


def _first_value(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """(N, slots, 6) float32: `values` (N, slots) as the first value, else 0."""
    out = np.zeros((*values.shape, p.VALUES), np.float32)
    out[..., 0] = values
    return out
