"""The row of a sample: everything that CPU and GPU do to its image, as one record of 32-bit words.

`train_rows` and `validation_rows` make the rows of a batch, each in one compiled call: crop, flips, operations,
erasing, mixing. The graph adds what only it knows, the first words and `nbytes`. DALI's nodes and Triton's kernels read
the same rows as arrays of words, at the places named by the constants of this module.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resolute.pipeline.jit import compiled

from . import autoaugment as p
from .augment_params import (
    BLUR_UNIFORMS,
    ERASE_UNIFORMS,
    JITTER_UNIFORMS,
    MOST_POLICY_UNIFORMS,
    SHIFT_UNIFORMS,
    UNMIXED,
    draw_blur,
    draw_erasing,
    draw_jitter,
    draw_mixing,
    draw_policy,
    draw_shift,
    policy_table,
    settings_record,
)
from .crops import CROP_UNIFORMS, centre_crop, random_crop, simple_crop
from .permutation import stream_key
from .rng import U64, Stream, derive, epoch_key, fill_uniforms
from .stage import Augment

__all__ = ["empty_rows", "row_dtype", "train_rows", "validation_rows", "words_of"]


@functools.cache
def row_dtype(slots: int) -> np.dtype[np.void]:
    """The layout of a row in a run with `slots` slots; its size is a multiple of 8 bytes."""
    fields: list[Any] = [
        # written by the graph, the same in all rows of a batch; addresses are used on a CPU only
        ("out", "i8"),  # address of the batch's output, (N, res, res, 3) float32 or uint8
        ("raw", "i8"),  # address of its images before normalisation, (N, res, res, 3) uint8
        ("noise", "i8"),  # address of the noise tile of erasing
        ("decoders", "i8"),  # address of the JPEG decoders
        ("as_bytes", "i4"),  # 1: the output is uint8, not normalised
        ("mean", "i4", 3),  # mean colour, levels
        ("factor", "f4", 3),  # normalisation: level * factor + offset
        ("offset", "f4", 3),
        # written by the graph
        ("nbytes", "i4"),  # of the encoded image
        # written by `train_rows` and `validation_rows`
        ("tag", "i4"),  # number of the batch in the run
        ("place", "i4"),  # position of the sample in the batch
        ("res", "i4"),  # px: side of the output
        ("crop", "i4", 4),  # x, y, width, height in px of the stored image
        ("hflip", "i4"),
        ("vflip", "i4"),
        ("erase", "i4", 4),  # x, y, width, height in px of the output; width 0: none
        ("origin", "i4", 2),  # y, x of the fill in the noise tile; -1: mean colour
        ("mode", "i4"),  # UNMIXED, MIXUP or CUTMIX
        ("partner", "i4"),  # position in the batch of the image to mix with
        ("lam", "f4"),  # weight of the sample's own image
        ("box", "i4", 4),  # x, y, width, height in px of the output: what cutmix takes from the partner
        ("shared", "i4"),  # 1: mixed itself, or the partner of a mixed image
        ("kinds", "i4", (slots,)),  # of the operations, see `autoaugment.py`
        ("values", "f4", (slots, p.VALUES)),
    ]
    return np.dtype([*fields, ("padding", "i4", (-np.dtype(fields).itemsize // 4 % 2,))])


def _word(name: str) -> int:
    """Where a field begins in a row, in words; an int64 is at half of it in a row of int64."""
    fields = row_dtype(0).fields
    assert fields is not None
    return fields[name][1] // 4


OUT, RAW, NOISE, DECODERS = (_word(name) // 2 for name in ("out", "raw", "noise", "decoders"))  # in a row of int64
AS_BYTES, MEAN, FACTOR, OFFSET, NBYTES = map(_word, ("as_bytes", "mean", "factor", "offset", "nbytes"))
TAG, PLACE, RES, CROP, HFLIP, VFLIP = map(_word, ("tag", "place", "res", "crop", "hflip", "vflip"))
ERASE, ORIGIN, MODE, PARTNER, LAM, BOX = map(_word, ("erase", "origin", "mode", "partner", "lam", "box"))
SHARED, KINDS = map(_word, ("shared", "kinds"))
_MOST_UNIFORMS = max(1 + CROP_UNIFORMS, MOST_POLICY_UNIFORMS, ERASE_UNIFORMS)


def words_of(rows: NDArray[np.void]) -> NDArray[np.int32]:
    """Rows (N,) as words (N, words) int32, on the same memory."""
    return rows.view(np.int32).reshape(len(rows), -1)


def empty_rows(n: int, slots: int) -> NDArray[np.void]:
    """Rows (n,) of zeros."""
    return np.zeros(n, row_dtype(slots))


def train_rows(
    augment: Augment,
    slots: tuple[str, ...],
    *,
    seed: int,
    epoch: int,
    res: int,
    batch: int,
    index: int,
    ids: NDArray[np.int64],
    counters: NDArray[np.int64],
    stored: NDArray[np.void],
) -> NDArray[np.void]:
    """Rows (N,) of the training samples `ids` (N,) at `res` px, in a run with `slots` as in `AugmentOps`.

    counters   (N,) of the random numbers, unique in the epoch
    stored     (N,) STORED records of the samples
    batch, index   number of the batch in the epoch and in the run
    """
    rows = empty_rows(len(ids), len(slots))
    words = words_of(rows)
    _train_rows(
        words,
        words.view(np.float32),
        len(slots),
        settings_record(augment, res, slots),
        *policy_table(augment, res),
        U64(stream_key(seed)),
        epoch,
        batch,
        index,
        ids,
        counters,
        stored["width"],
        stored["height"],
    )
    return rows


def validation_rows(frac: float, *, slots: int, res: int, index: int, stored: NDArray[np.void]) -> NDArray[np.void]:
    """Rows (N,) of validation samples at `res` px: centre crops with side `frac` of the short side, nothing else.

    `stored` (N,) are the STORED records of the samples, `index` is the number of the batch in the run.
    """
    rows = empty_rows(len(stored), slots)
    words = words_of(rows)
    _validation_rows(words, words.view(np.float32), frac, res, index, stored["width"], stored["height"])
    return rows


@compiled
def _validation_rows(words: Any, floats: Any, frac: Any, res: Any, index: Any, widths: Any, heights: Any) -> None:
    for i in range(len(words)):
        crop = centre_crop(np.int64(widths[i]), np.int64(heights[i]), frac)
        _write_sample(words[i], floats[i], i, index, res, crop)
        words[i, PARTNER] = i


@compiled
def _write_sample(row: Any, floats: Any, place: Any, index: Any, res: Any, crop: Any) -> None:
    """What every sample has; it is not mixed yet."""
    row[TAG], row[PLACE], row[RES], floats[LAM] = index, place, res, 1
    row[CROP], row[CROP + 1], row[CROP + 2], row[CROP + 3] = crop


@compiled
def _train_rows(
    words: Any,
    floats: Any,
    slots: Any,
    settings: Any,
    table_kinds: Any,
    table_values: Any,
    run_key: Any,
    epoch: Any,
    batch: Any,
    index: Any,
    ids: Any,
    counters: Any,
    widths: Any,
    heights: Any,
) -> None:
    s, u = settings[0], np.empty(_MOST_UNIFORMS)
    mixing = draw_mixing(epoch_key(run_key, Stream.BATCH_MIX, epoch), batch, s)
    for i in range(len(words)):
        row, number = words[i], counters[i]
        fill_uniforms(epoch_key(run_key, Stream.CROP, epoch), number, u[: 1 + CROP_UNIFORMS])
        width, height = np.int64(widths[i]), np.int64(heights[i])
        if s.simple_crop:
            crop = simple_crop(u[1:], width, height)
        else:
            crop = random_crop(u[1:], width, height, s.scale[0], s.scale[1], s.ratio[0], s.ratio[1])
        _write_sample(row, floats[i], i, index, s.res, crop)
        row[HFLIP] = u[0] < s.flip_prob
        if s.alternating_flips:
            # Source: Jordan, "94% on CIFAR-10 in 3.29 seconds", arXiv 2404.00498, section 3.6
            fill_uniforms(derive(run_key, U64(Stream.ALTERNATING_FLIP)), ids[i], u[:1])
            row[HFLIP] = (u[0] < 0.5) ^ (epoch % 2 == 1)
        if s.vflip_prob > 0:
            fill_uniforms(epoch_key(run_key, Stream.VFLIP, epoch), number, u[:1])
            row[VFLIP] = u[0] < s.vflip_prob
        kinds = row[KINDS : KINDS + slots]
        values = floats[i, KINDS + slots : KINDS + (1 + p.VALUES) * slots].reshape(slots, p.VALUES)
        if s.shift_slot >= 0:
            fill_uniforms(epoch_key(run_key, Stream.SHIFT, epoch), number, u[:SHIFT_UNIFORMS])
            draw_shift(u, s, kinds[s.shift_slot :], values[s.shift_slot :])
        if s.policy_slot >= 0:
            fill_uniforms(epoch_key(run_key, Stream.POLICY, epoch), number, u[: s.policy_uniforms])
            draw_policy(u, s, table_kinds, table_values, kinds[s.policy_slot :], values[s.policy_slot :])
        if s.jitter_slot >= 0:
            fill_uniforms(epoch_key(run_key, Stream.JITTER, epoch), number, u[:JITTER_UNIFORMS])
            draw_jitter(u, s, kinds[s.jitter_slot :], values[s.jitter_slot :])
        if s.grey_slot >= 0:
            fill_uniforms(epoch_key(run_key, Stream.GREY, epoch), number, u[:1])
            kinds[s.grey_slot] = p.SATURATION if u[0] < s.grey_prob else p.NONE  # by the factor 0
        if s.blur_slot >= 0:
            fill_uniforms(epoch_key(run_key, Stream.BLUR, epoch), number, u[:BLUR_UNIFORMS])
            draw_blur(u, s, kinds[s.blur_slot :], values[s.blur_slot :])
        if s.erase_prob > 0:
            key = epoch_key(run_key, Stream.ERASE, epoch)
            fill_uniforms(key, number, u[:1])
            if u[0] < s.erase_prob:
                fill_uniforms(key, number, u[:ERASE_UNIFORMS])
                draw_erasing(u, s, row[ERASE:ORIGIN], row[ORIGIN:MODE])
        row[PARTNER] = min(i ^ 1, len(words) - 1)
        if s.mixes:
            if not s.mixes_batch:
                mixing = draw_mixing(epoch_key(run_key, Stream.MIX, epoch), number, s)
            row[MODE], floats[i, LAM], row[BOX], row[BOX + 1], row[BOX + 2], row[BOX + 3] = mixing
    for i in range(len(words)):
        if words[i, MODE] != UNMIXED:
            words[i, SHARED] = words[words[i, PARTNER], SHARED] = 1
