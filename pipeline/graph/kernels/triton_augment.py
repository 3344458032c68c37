"""Triton kernel that finishes a batch in one launch: erasing, mixup or cutmix, normalisation."""

from __future__ import annotations

import triton
import triton.language as tl

from resolute.pipeline.plan import rows as at
from resolute.pipeline.plan.augment_params import CUTMIX, MIXUP, NOISE_PX

from .triton_slot import _read

__all__ = ["finish"]

_MIXUP = tl.constexpr(MIXUP)
_CUTMIX = tl.constexpr(CUTMIX)
_NOISE_PX = tl.constexpr(NOISE_PX)
_ERASE = tl.constexpr(at.ERASE)
_ORIGIN = tl.constexpr(at.ORIGIN)
_MODE = tl.constexpr(at.MODE)
_PARTNER = tl.constexpr(at.PARTNER)
_LAM = tl.constexpr(at.LAM)
_BOX = tl.constexpr(at.BOX)


@triton.jit
def _within(box, x, y):
    left, top = tl.load(box), tl.load(box + 1)
    return (x >= left) & (x < left + tl.load(box + 2)) & (y >= top) & (y < top + tl.load(box + 3))


@triton.jit
def _erased(source, number, packed, words, noise, fill, side, place, inside, ERASES: tl.constexpr):
    """Red, green and blue (int32) of the pixels `place` of image `number` after erasing."""
    red, green, blue = _read(source + number * (3 * side * side), place, inside)
    if ERASES:
        row = packed + number * words
        box = row + _ERASE
        x, y = place % side, place // side
        filled = inside & _within(box, x, y)
        from_y, from_x = tl.load(row + _ORIGIN), tl.load(row + _ORIGIN + 1)
        if from_y < 0:
            fill_red, fill_green, fill_blue = tl.load(fill), tl.load(fill + 1), tl.load(fill + 2)
            red = tl.where(filled, fill_red, red)
            green = tl.where(filled, fill_green, green)
            blue = tl.where(filled, fill_blue, blue)
        else:
            line = tl.where(filled, from_y + y - tl.load(box + 1), 0) % _NOISE_PX
            column = tl.where(filled, from_x + x - tl.load(box), 0) % _NOISE_PX
            noise_red, noise_green, noise_blue = _read(noise, line * _NOISE_PX + column, filled)
            red = tl.where(filled, noise_red, red)
            green = tl.where(filled, noise_green, green)
            blue = tl.where(filled, noise_blue, blue)
    return red, green, blue


@triton.jit
def _mixed(own, partner, lam):
    """Mixup: lam * own + (1 - lam) * partner, rounded."""
    return (own.to(tl.float32) * lam + partner.to(tl.float32) * (1.0 - lam) + 0.5).to(tl.int32)


@triton.jit(
    do_not_specialize=["words", "side", "parts"],
    do_not_specialize_on_alignment=["source", "target", "packed", "noise", "fill", "scales"],
)
def finish(
    source,
    target,
    packed,
    noise,
    fill,
    scales,
    words,
    side,
    parts,
    ERASES: tl.constexpr,
    MIXES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Erase, mix and normalise; program i * parts + k writes block k of image i.

    source    (N, side, side, 3) uint8
    target    (N, side, side, 3) float32, float16, bfloat16, or uint8, which is not normalised
    packed    (N, words) int32, the rows of the batch (see `plan/rows.py`)
    noise     (NOISE_PX, NOISE_PX, 3) uint8; fill (3,) int32, the mean colour
    scales    (6,) float32: three factors and three shifts applied to levels
    """
    number = (tl.program_id(0) // parts).to(tl.int64)
    place = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    inside = place < side * side
    red, green, blue = _erased(source, number, packed, words, noise, fill, side, place, inside, ERASES)
    if MIXES:
        row = packed + number * words
        mode, partner = tl.load(row + _MODE), tl.load(row + _PARTNER).to(tl.int64)
        if mode == _MIXUP:
            lam = tl.load(row + _LAM).to(tl.float32, bitcast=True)
            r, g, b = _erased(source, partner, packed, words, noise, fill, side, place, inside, ERASES)
            red, green, blue = _mixed(red, r, lam), _mixed(green, g, lam), _mixed(blue, b, lam)
        elif mode == _CUTMIX:
            cut = inside & _within(row + _BOX, place % side, place // side)
            r, g, b = _erased(source, partner, packed, words, noise, fill, side, place, cut, ERASES)
            red, green, blue = tl.where(cut, r, red), tl.where(cut, g, green), tl.where(cut, b, blue)
    at = target + number * (3 * side * side) + 3 * place
    kind: tl.constexpr = target.dtype.element_ty
    if kind == tl.uint8:
        tl.store(at, red.to(tl.uint8), mask=inside)
        tl.store(at + 1, green.to(tl.uint8), mask=inside)
        tl.store(at + 2, blue.to(tl.uint8), mask=inside)
    else:
        tl.store(at, (red.to(tl.float32) * tl.load(scales) + tl.load(scales + 3)).to(kind), mask=inside)
        tl.store(at + 1, (green.to(tl.float32) * tl.load(scales + 1) + tl.load(scales + 4)).to(kind), mask=inside)
        tl.store(at + 2, (blue.to(tl.float32) * tl.load(scales + 2) + tl.load(scales + 5)).to(kind), mask=inside)
