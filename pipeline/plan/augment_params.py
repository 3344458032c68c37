"""Augmentation parameters of a sample, drawn as a pure function of (seed, epoch, sample).

They do not depend on the batch, the rank or earlier samples. Each step of the augmentation has its own random stream,
so switching one on or off does not change the parameters of the others.

A sample's operations are arranged in slots, applied one after another: the shift, then those of the policy, of jitter,
greyscale and blur. Each slot has a kind and six values (see `autoaugment.py`). `AugmentOps` says which slots a complete
run has, the union over its stages.

The functions named `draw_...` are compiled and draw the parameters of one sample. Their argument `s` is a record of
`settings_record`, and `u` are uniforms of the step's stream. `rows.py` calls them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resolute.pipeline.jit import compiled

from . import autoaugment as p
from .permutation import stream_key
from .rng import U64, beta, derive, fill_uniforms, uniforms
from .stage import BINS, SIZED_AT, Augment

__all__ = [
    "BLUR_UNIFORMS",
    "CUTMIX",
    "ERASE_UNIFORMS",
    "JITTER_UNIFORMS",
    "MIXUP",
    "MOST_POLICY_UNIFORMS",
    "NOISE_PX",
    "SHIFT_UNIFORMS",
    "UNMIXED",
    "AugmentOps",
    "draw_blur",
    "draw_erasing",
    "draw_jitter",
    "draw_mixing",
    "draw_policy",
    "draw_shift",
    "erase_noise",
    "policy_table",
    "settings_record",
    "used_ops",
]

UNMIXED, MIXUP, CUTMIX = 0, 1, 2
NOISE_PX = 256  # px: period of the noise tile for erasing
_ERASE_TRIES = 10  # Source: torchvision RandomErasing.get_params
# Uniforms that a step draws for a sample.
SHIFT_UNIFORMS, MOST_POLICY_UNIFORMS, JITTER_UNIFORMS, BLUR_UNIFORMS = 2, 20, 6, 2
ERASE_UNIFORMS = 5 + 2 * _ERASE_TRIES

_PARTS = ("shift", "policy", "jitter", "grey", "blur")
_POLICIES = ("none", "randaugment", "trivialaugment", "autoaugment", "3-augment")
_NO_POLICY, _RANDAUGMENT, _TRIVIALAUGMENT, _AUTOAUGMENT, _THREE_AUGMENT = range(len(_POLICIES))
_THREE_KINDS = np.array([p.SATURATION, p.POINT, p.BLUR])
_JITTER_KINDS = np.array([p.BRIGHTNESS, p.CONTRAST, p.SATURATION, p.HUE])
_HUE = 3  # index in these
_ORDERS = np.array(list(itertools.permutations(range(4))))
_DRAWN_OPS = len(p.OPERATIONS) - 1  # all but Invert, which only AutoAugment uses
_AUTO_OPS = np.array([[p.OPERATIONS.index(name) for name, _, _ in pair] for pair in p.AUTOAUGMENT])
_AUTO_PROBS = np.array([[prob for _, prob, _ in pair] for pair in p.AUTOAUGMENT])
_AUTO_BINS = np.array([[k or 0 for _, _, k in pair] for pair in p.AUTOAUGMENT])


@dataclass(frozen=True, kw_only=True)
class AugmentOps:
    """What the graph of a run must support besides crops and flips."""

    slots: tuple[str, ...] = ()  # in order: shift, policy, jitter, grey, blur; one name for each slot
    erasing: bool = False
    mixing: bool = False


def used_ops(augments: Sequence[Augment]) -> AugmentOps:
    """The ops that at least one of `augments` uses."""
    counts = [_slot_counts(augment) for augment in augments]
    return AugmentOps(
        slots=tuple(part for part in _PARTS for _ in range(max((count[part] for count in counts), default=0))),
        erasing=any(a.random_erasing_prob for a in augments),
        mixing=any(a.mixes for a in augments),
    )


def _slot_counts(a: Augment) -> dict[str, int]:
    policy = {"none": 0, "randaugment": a.num_ops, "autoaugment": 2}.get(a.policy, 1)
    counts = bool(a.shift_px), policy, sum(strength > 0 for strength in a.jitters), bool(a.grey_prob), bool(a.blur_prob)
    return dict(zip(_PARTS, counts, strict=True))


@functools.lru_cache(maxsize=256)
def settings_record(a: Augment, res: int, slots: tuple[str, ...]) -> NDArray[np.void]:
    """`a` at `res` px, in a run with these `slots`, as numbers for compiled functions: (1,) records, read-only."""
    flags = {
        "simple_crop": a.crop_mode == "simple",
        "alternating_flips": a.flip_mode == "alternate",
        "erase_noise": a.random_erasing_fill == "noise",
        "mixes": a.mixes,
        "mixes_batch": a.mixup_mode == "batch",  # all samples of a batch alike
    }
    integers = {
        "res": res,
        # the first slot of each part; -1: unused
        **{f"{part}_slot": slots.index(part) if count else -1 for part, count in _slot_counts(a).items()},
        "shift_px": a.shift_px,
        "policy": _POLICIES.index(a.policy),
        "policy_uniforms": MOST_POLICY_UNIFORMS if a.op_prob < 1 else 16 if a.magnitude_std else 8,
        "num_ops": a.num_ops,
        "magnitude": a.magnitude,
    }
    floats = {
        "flip_prob": a.flip_prob,
        "vflip_prob": a.vflip_prob,
        "magnitude_std": a.magnitude_std,
        "op_prob": a.op_prob,
        "jitter_prob": a.jitter_prob,
        "grey_prob": a.grey_prob,
        "blur_prob": a.blur_prob,
        "erase_prob": a.random_erasing_prob,
        "mix_prob": a.mixup_prob,
        # of what is mixed
        "cutmix_prob": (a.mixup_switch_prob if a.mixup_alpha else 1.0) if a.cutmix_alpha else 0.0,
        "mixup_power": 1.0 / (a.mixup_alpha or 1.0),
        "cutmix_power": 1.0 / (a.cutmix_alpha or 1.0),
    }
    tuples = {
        "scale": a.scale,
        "ratio": a.ratio,
        "jitters": a.jitters,
        "blur_sigma": a.blur_sigma,
        "erase_scale": a.random_erasing_scale,
        "erase_ratio": a.random_erasing_ratio,
    }
    fields: list[Any] = [(name, "?") for name in flags] + [(name, "i8") for name in integers]
    fields += [(name, "f8") for name in floats] + [(name, "f8", len(values)) for name, values in tuples.items()]
    values = (*flags.values(), *integers.values(), *floats.values(), *tuples.values())
    record = np.array([values], np.dtype(fields, align=True))
    record.flags.writeable = False
    return record


def policy_table(augment: Augment, res: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Kinds and values of `autoaugment.operations` for the policy of `augment`; any if that has no table."""
    return p.operations(augment.policy if augment.policy in p.WITH_TABLE else "randaugment", res)


@compiled
def draw_shift(u: Any, s: Any, kinds: Any, values: Any) -> None:
    """Translation by -shift_px to shift_px px in x and y, drawn independently; kinds (1,), values (1, 6)."""
    x, y = np.floor(u[0] * (2 * s.shift_px + 1)) - s.shift_px, np.floor(u[1] * (2 * s.shift_px + 1)) - s.shift_px
    kinds[0] = p.AFFINE if x != 0 or y != 0 else p.NONE
    values[0, 0] = values[0, 4] = 1
    values[0, 2], values[0, 5] = -x, -y


@compiled
def draw_policy(u: Any, s: Any, table_kinds: Any, table_values: Any, kinds: Any, values: Any) -> None:
    """The operations of a policy; kinds (slots,), values (slots, 6). The tables are those of `policy_table`."""
    if s.policy == _RANDAUGMENT:
        for k in range(s.num_ops):
            strength = s.magnitude
            if s.magnitude_std > 0:
                # Sources: timm.data.auto_augment, AugmentOp; Box and Muller, 1958
                normal = math.sqrt(-2 * math.log(1 - u[8 + 2 * k])) * math.cos(2 * math.pi * u[9 + 2 * k])
                strength = int(min(max(np.rint(s.magnitude + s.magnitude_std * normal), 0), BINS - 1))
            op, applied = int(u[2 * k] * _DRAWN_OPS), s.op_prob == 1 or u[16 + k] < s.op_prob
            kinds[k] = table_kinds[op] if applied else p.NONE
            _copy(table_values[op, strength, int(u[2 * k + 1] < 0.5)], values[k])
    elif s.policy == _TRIVIALAUGMENT:
        op = int(u[0] * _DRAWN_OPS)
        kinds[0] = table_kinds[op]
        _copy(table_values[op, int(u[1] * BINS), int(u[2] < 0.5)], values[0])
    elif s.policy == _AUTOAUGMENT:
        sub = int(u[0] * len(_AUTO_OPS))
        for k in range(2):
            op = _AUTO_OPS[sub, k]
            kinds[k] = table_kinds[op] if u[1 + k] < _AUTO_PROBS[sub, k] else p.NONE
            _copy(table_values[op, _AUTO_BINS[sub, k], int(u[3 + k] < 0.5)], values[k])
    else:  # 3-augment
        kinds[0] = _THREE_KINDS[int(u[0] * 3)]
        if kinds[0] == p.POINT:
            values[0, 0], values[0, 1] = 128, 255  # Source: PIL ImageOps.solarize's default
        elif kinds[0] == p.BLUR:
            values[0, 0] = _between(0.1, 2.0, u[1]) * s.res / SIZED_AT  # Source: DeiT's augment.py, GaussianBlur


@compiled
def draw_jitter(u: Any, s: Any, kinds: Any, values: Any) -> None:
    """The jitter's operations in a random order. Source: torchvision ColorJitter.get_params."""
    on, order, slot = u[0] < s.jitter_prob, int(u[1] * len(_ORDERS)), 0
    for k in range(4):
        op = _ORDERS[order, k]
        if s.jitters[op] > 0:
            factor = 1 + s.jitters[op] * (2 * u[2 + op] - 1)
            kinds[slot] = _JITTER_KINDS[op] if on else p.NONE
            values[slot, 0] = 6 * (factor - 1) if op == _HUE else factor
            slot += 1


@compiled
def draw_blur(u: Any, s: Any, kinds: Any, values: Any) -> None:
    """Gaussian blur; kinds (1,), values (1, 6)."""
    kinds[0] = p.BLUR if u[0] < s.blur_prob else p.NONE
    values[0, 0] = _between(s.blur_sigma[0], s.blur_sigma[1], u[1]) * s.res / SIZED_AT


@compiled
def draw_erasing(u: Any, s: Any, box: Any, origin: Any) -> None:
    """The box x, y, w, h in px of the output, width 0 = none; and y, x of the fill in the noise tile, -1 = mean colour.

    u[0] has decided that the sample is erased. Source: torchvision RandomErasing.get_params.
    """
    res, low, high = s.res, math.log(s.erase_ratio[0]), math.log(s.erase_ratio[1])
    origin[0] = origin[1] = -1
    if s.erase_noise:
        origin[0], origin[1] = int(u[3] * NOISE_PX), int(u[4] * NOISE_PX)
    for k in range(5, 5 + _ERASE_TRIES):
        area = res * res * _between(s.erase_scale[0], s.erase_scale[1], u[k])
        ratio = math.exp(_between(low, high, u[k + _ERASE_TRIES]))
        h, w = np.rint(math.sqrt(area * ratio)), np.rint(math.sqrt(area / ratio))
        if 1 <= h < res and 1 <= w < res:
            box[0], box[1] = math.floor(u[1] * (res - w + 1)), math.floor(u[2] * (res - h + 1))
            box[2], box[3] = w, h
            break


@compiled
def draw_mixing(key: Any, number: Any, s: Any) -> Any:
    """Mixing of a sample, or of batch `number` of the epoch: mode, lam, and a box x, y, w, h in px.

    `key` is that of the stream for samples or for batches. Source: timm.data.mixup, modes "elem" and "batch".
    """
    u, res, pairs = np.empty(4), s.res, 32 if s.mixes_batch else 4
    fill_uniforms(key, number, u)
    if u[0] >= s.mix_prob:
        return UNMIXED, 1.0, 0, 0, 0, 0
    if u[1] >= s.cutmix_prob:
        return MIXUP, beta(_part_key(key, 1), number, s.mixup_power, pairs), 0, 0, 0, 0
    weight = beta(_part_key(key, 1 if s.mixes_batch else 2), number, s.cutmix_power, pairs)
    # a box of area fraction 1 - weight around x, y, clipped to the image. Source: timm.data.mixup rand_bbox
    half, x, y = int(res * math.sqrt(1.0 - weight)) // 2, int(u[2] * res), int(u[3] * res)
    x0, x1, y0, y1 = max(x - half, 0), min(x + half, res), max(y - half, 0), min(y + half, res)
    covered = (x1 - x0) * (y1 - y0)
    if covered <= 0:
        return UNMIXED, 1.0, 0, 0, 0, 0
    return CUTMIX, 1.0 - covered / res**2, x0, y0, x1 - x0, y1 - y0


@compiled
def _part_key(key: Any, part: Any) -> Any:
    """`key` of `beta` for the stream `stream_key(key, part)`."""
    return derive(U64(0), derive(derive(U64(0), key), U64(part)))


@compiled
def _between(low: Any, high: Any, u: Any) -> Any:
    return low + (high - low) * u


@compiled
def _copy(source: Any, to: Any) -> None:
    for i in range(p.VALUES):
        to[i] = source[i]


def erase_noise(mean: tuple[float, ...], std: tuple[float, ...]) -> NDArray[np.uint8]:
    """Tile of normal noise with the data's mean and standard deviation: (NOISE_PX, NOISE_PX, 3) uint8.

    Source: Box and Muller, 1958.
    """
    u = uniforms(stream_key(0xE4A5E), np.arange(NOISE_PX**2), 6).reshape(NOISE_PX, NOISE_PX, 2, 3)
    normal = np.sqrt(-2 * np.log(1 - u[:, :, 0])) * np.cos(2 * np.pi * u[:, :, 1])
    return np.rint(255 * (np.array(mean) + np.array(std) * normal)).clip(0, 255).astype(np.uint8)
