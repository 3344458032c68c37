"""CPU nodes of the DALI graphs, for CPU and GPU, that call numba-compiled functions, once per image.

NVIDIA's numba plugin compiles a wrapper for each pipeline, which takes seconds, only to pass DALI the addresses of two
C functions. Here these C functions are compiled once, cached on disk, and their addresses passed instead.
Source: the signatures are those of `nvidia.dali.plugin.numba.NumbaFunction` (`_run_fn_sig`, `_setup_fn_sig`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numba import carray, types
from numpy.typing import NDArray
from nvidia.dali import types as dali
from nvidia.dali.pipeline import do_not_convert
from nvidia.dali.plugin.numba import NumbaFunction

from resolute.pipeline.graph.kernels.augment import apply_ops, blend
from resolute.pipeline.graph.kernels.jpeg.memory import Decoders, acquire, bytes_at, floats_at, release
from resolute.pipeline.graph.kernels.jpeg.region import decode_region
from resolute.pipeline.graph.kernels.pread import TAG_BYTES
from resolute.pipeline.graph.kernels.resize import normalise_rows, resize
from resolute.pipeline.jit import c_function, compiled
from resolute.pipeline.plan import autoaugment as p
from resolute.pipeline.plan import rows as at
from resolute.pipeline.plan.augment_params import MIXUP, NOISE_PX, UNMIXED

__all__ = [
    "RunConstants",
    "augment",
    "augment_decoded",
    "crop",
    "decode",
    "encoded_bytes",
    "gpu_arguments",
    "mix",
]


class RunConstants:
    """What is the same in all rows of a run, and completes them: normalisation, noise tile, decoders."""

    def __init__(
        self,
        *,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        noise: NDArray[np.uint8],
        decoders: Decoders | None,
    ) -> None:
        """`mean`, `std`: of values in 0..1; `noise`: (NOISE_PX, NOISE_PX, 3), kept, the fill of erasing.

        `decoders`, kept, are as many as there are threads; None if DALI decodes all images.
        """
        assert noise.shape == (NOISE_PX, NOISE_PX, 3)
        self._noise, self._decoders = np.ascontiguousarray(noise), decoders
        row = at.empty_rows(1, 0)
        row["noise"] = _address(self._noise)
        row["decoders"] = 0 if decoders is None else decoders.address
        row["mean"] = [round(255 * m) for m in mean]
        row["factor"] = [1 / (255 * s) for s in std]
        row["offset"] = [-m / s for m, s in zip(mean, std, strict=True)]
        self._words = at.words_of(row)[0, : at.NBYTES]
        self._factor, self._offset = row["factor"][0], row["offset"][0]

    def complete(
        self,
        words: NDArray[np.int32],
        nbytes: NDArray[np.int64],
        out: NDArray[Any] | None = None,
        raw: NDArray[np.uint8] | None = None,
    ) -> None:
        """Complete the rows of a batch in place, (N, words) int32; `nbytes` (N,) are sizes of the encoded images.

        On a CPU, `out` and `raw`, both (N, res, res, 3), must outlive the batch's run. `out` is float32, or uint8 for
        images that are not normalised. `raw` may be None if the run has no slots, erasing or mixing.
        """
        same = self._words.copy()
        if out is not None:
            same.view(np.int64)[at.OUT], same[at.AS_BYTES] = _address(out), out.dtype == np.uint8
        if raw is not None:
            same.view(np.int64)[at.RAW] = _address(raw)
        words[:, : at.NBYTES], words[:, at.NBYTES] = same, nbytes

    def normalise(self, images: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
        """Normalise `images` into `out`, both (N, res, res, 3) and contiguous."""
        lines = (-1, 3 * images.shape[2])
        normalise_rows(images.reshape(lines), out.reshape(lines), self._factor, self._offset)


def _address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def crop(rows: Any) -> tuple[Any, Any]:
    """Nodes: corner x, y and width, height of the crops in the stored images, int32."""
    return rows[at.CROP : at.CROP + 2], rows[at.CROP + 2 : at.CROP + 4]


def encoded_bytes(rows: Any) -> Any:
    """Node: bytes of the encoded images, (1,) int32."""
    return rows[at.NBYTES : at.NBYTES + 1]


def augment(rows: Any, jpegs: Any) -> Any:
    """Node: decoding of the crops, resize, flips, operations, erasing; and normalisation of what `mix` does not need.

    Its outputs are the batch tag, (1,) int64, or -1 if the row and the encoded image in `jpegs`, see `EncodedImages`,
    have different ones; and whether the decoder declined the image, () bool: then nothing was done with it. DALI does
    not own the images, so their memory can be pooled.
    """
    outputs = (dali.INT64, 1), (dali.BOOL, 0)
    return _node(_run_augment, (rows, dali.INT32, 1), (jpegs, dali.UINT8, 1), outputs=outputs)


def augment_decoded(images: Any, rows: Any, jpegs: Any) -> Any:
    """Node: the tag of `augment`, which did nothing with these images; their crops (h, w, 3) uint8 were decoded."""
    return _node(_run_augment, (rows, dali.INT32, 1), (jpegs, dali.UINT8, 1), (images, dali.UINT8, 3))


def mix(tags: Any, rows: Any) -> Any:
    """Node after `augment`, whose output is `tags`: mixup, cutmix and normalisation; returns the tags."""
    return _node(_run_mix, (tags, dali.INT64, 1), (rows, dali.INT32, 1))


def gpu_arguments(rows: Any, jpegs: Any, *, for_decode: bool) -> Any:
    """Nodes for the operators of the GPU's graph, from the rows and `EncodedImages`, in this order:

    corner y, x and height, width of the crop in the stored image, int32, with a 0 behind these if `for_decode`; numbers
    of the batch that came with the row and with the encoded image, (2,) int32; start y, x and end y, x of the region to
    resize, relative, float32, and the output's height, width, float32.

    One node instead of one slice for each: every CPU node costs DALI's threads about 0.8 ms per batch of 512.
    """
    return _node(
        _run_gpu_arguments,
        (rows, dali.INT32, 1),
        (jpegs, dali.UINT8, 1),
        outputs=[(kind, 1) for kind in [dali.INT32] * 3 + [dali.FLOAT] * 3],
        setup=_pairs_and_shape if for_decode else _pairs,
    )


def decode(shaped: Any, rows: Any, jpegs: Any) -> Any:
    """Node: the crops (h, w, 3) uint8, and whether the decoder declined an image, () bool.

    `shaped` (h, w, 0) uint8, of the shape that `gpu_arguments` returns, gives the sizes, because DALI shows a node no
    values before it allocates its outputs. The pixels of a declined image are arbitrary.
    """
    return _node(
        _run_decode,
        (shaped, dali.UINT8, 3),
        (rows, dali.INT32, 1),
        (jpegs, dali.UINT8, 1),
        outputs=[(dali.UINT8, 3), (dali.BOOL, 0)],
        setup=_crop_shape,
    )


class _Compiled(NumbaFunction):
    def _get_run_fn_cpu(self, run_fn: Any, *_: Any) -> int:
        return _function(
            run_fn, _OPERANDS, _SHAPES, types.uint64, types.int32, _OPERANDS, _SHAPES, types.uint64, types.int32
        )

    def _get_setup_fn_cpu(self, setup_fn: Any) -> int:
        return _function(setup_fn, _SHAPES, types.uint64, types.int32, _SHAPES, types.uint64, types.int32, types.int32)


_SHAPES, _OPERANDS = types.CPointer(types.CPointer(types.int64)), types.CPointer(types.voidptr)


def _run_gpu_arguments(outs: Any, to: Any, _od: Any, _no: Any, ins: Any, of: Any, _id: Any, _ni: Any) -> None:
    row = carray(ins[0], of[0][0], np.int32)
    start, shape, roi_start, roi_end, size = outs[0], outs[1], outs[3], outs[4], outs[5]
    for k in range(2):  # y, then x
        carray(start, 2, np.int32)[k] = row[at.CROP + 1 - k]
        carray(shape, 2, np.int32)[k] = row[at.CROP + 3 - k]
        flipped = row[at.HFLIP if k else at.VFLIP] > 0
        carray(roi_start, 2, np.float32)[k] = 1 if flipped else 0
        carray(roi_end, 2, np.float32)[k] = 0 if flipped else 1
        carray(size, 2, np.float32)[k] = row[at.RES]
    tags = carray(outs[2], 2, np.int32)
    tags[0], tags[1] = row[at.TAG], _jpeg_tag(carray(ins[1], of[1][0], np.uint8))
    for k in range(2, to[1][0]):
        carray(shape, 3, np.int32)[k] = 0


def _pairs(outs: Any, _od: Any, count: Any, _ins: Any, _id: Any, _ni: Any, samples: Any) -> None:
    for i in range(count * samples):
        outs[i][0] = 2


def _pairs_and_shape(outs: Any, _od: Any, count: Any, _ins: Any, _id: Any, _ni: Any, samples: Any) -> None:
    for i in range(count * samples):
        outs[i][0] = 3 if samples <= i < 2 * samples else 2


def _run_decode(outs: Any, _to: Any, _od: Any, _no: Any, ins: Any, of: Any, _id: Any, _ni: Any) -> None:
    row, height, width = carray(ins[1], of[1][0], np.int32), of[0][0], of[0][1]
    jpeg = carray(ins[2], of[2][0], np.uint8)
    decoders = carray(ins[1], of[1][0] // 2, np.int64)[at.DECODERS]
    out = carray(outs[0], (height, 3 * width), np.uint8)
    decoder = acquire(decoders)
    first, pitch = _decode(jpeg, row[at.NBYTES], row[at.CROP], row[at.CROP + 1], width, height, decoder)
    carray(outs[1], 1, np.bool_)[0] = first == 0
    if first != 0:
        pixels = carray(bytes_at(first), pitch * height, np.uint8)
        for y in range(height):
            to, source = out[y], pixels[pitch * y : pitch * y + 3 * width]
            for i in range(3 * width):
                to[i] = source[i]
    release(decoders, decoder)


def _crop_shape(outs: Any, _od: Any, _no: Any, ins: Any, _id: Any, _ni: Any, samples: Any) -> None:
    for i in range(samples):
        outs[i][0], outs[i][1], outs[i][2] = ins[i][0], ins[i][1], 3


@do_not_convert
def _node(
    run: Callable[..., None],
    *inputs: tuple[Any, Any, int],
    outputs: Sequence[tuple[Any, int]] = ((dali.INT64, 1),),
    setup: Callable[..., None] | None = None,
) -> Any:
    """A node with `outputs` of these types and numbers of dimensions; `setup` sets their shapes, at first (1,)."""
    operands, kinds, ndims = zip(*inputs, strict=True)
    return _Compiled(
        run_fn=run,
        setup_fn=setup or _shape_of_tag,
        out_types=[kind for kind, _ in outputs],
        in_types=list(kinds),
        outs_ndim=[ndim for _, ndim in outputs],
        ins_ndim=list(ndims),
    )(*operands)


@compiled
def _jpeg_tag(jpeg: Any) -> Any:
    """The number that follows an encoded image."""
    tag = np.int64(0)
    for i in range(TAG_BYTES):  # why not as an int32: its address may be odd
        tag |= np.int64(jpeg[len(jpeg) - TAG_BYTES + i]) << 8 * i
    return tag


@compiled
def _decode(jpeg: Any, nbytes: Any, x: Any, y: Any, width: Any, height: Any, decoder: Any) -> Any:
    """`decode_region` of an encoded image of `nbytes` in the (at least as large) array with its tag."""
    nbytes = min(np.int64(nbytes), len(jpeg) - TAG_BYTES)
    return decode_region(jpeg.ctypes.data, nbytes, np.int64(x), np.int64(y), width, height, decoder)


@compiled
def _output_floats(longs: Any, place: Any, res: Any) -> Any:
    """The output of the image at `place` of its batch, (res, res, 3) float32."""
    return carray(floats_at(longs[at.OUT] + 12 * np.int64(place) * res * res), (res, res, 3), np.float32)


@compiled
def _byte_image(first: Any, place: Any, res: Any) -> Any:
    """The image at `place` of those at the address `first`, (res, res, 3) uint8."""
    return carray(bytes_at(first + 3 * np.int64(place) * res * res), (res, res, 3), np.uint8)


@compiled
def _write(raw: Any, row: Any, longs: Any, floats: Any) -> None:
    """Write the finished image `raw` (res, res, 3) uint8 to the output, normalised unless that is uint8."""
    res = row[at.RES]
    if row[at.AS_BYTES] > 0:
        source, to = raw.reshape(-1), _byte_image(longs[at.OUT], row[at.PLACE], res).reshape(-1)
        for i in range(len(source)):
            to[i] = source[i]
        return
    factor, offset = floats[at.FACTOR : at.OFFSET], floats[at.OFFSET : at.NBYTES]
    out = _output_floats(longs, row[at.PLACE], res)
    normalise_rows(raw.reshape(res, 3 * res), out.reshape(res, 3 * res), factor, offset)


_c_functions: dict[Any, Any] = {}  # why: DALI holds only their addresses, which must stay valid


def _function(function: Callable[..., None], *arguments: Any) -> int:
    """Address of `function` as a C function."""
    if function not in _c_functions:
        _c_functions[function] = c_function(function, types.void(*arguments))
    return int(_c_functions[function].address)


# Called by DALI with arrays of pointers, shapes and dimensions, first of the outputs, then of the inputs.


def _shape_of_tag(outs: Any, _od: Any, _no: Any, _ins: Any, _id: Any, _ni: Any, samples: Any) -> None:
    for i in range(samples):
        outs[i][0] = 1


def _run_augment(outs: Any, _to: Any, _od: Any, _no: Any, ins: Any, of: Any, _id: Any, inputs: Any) -> None:
    words, jpeg = of[0][0], carray(ins[1], of[1][0], np.uint8)
    longs, row = carray(ins[0], words // 2, np.int64), carray(ins[0], words, np.int32)
    floats = carray(ins[0], words, np.float32)
    carray(outs[0], 1, np.int64)[0] = row[at.TAG] if row[at.TAG] == _jpeg_tag(jpeg) else -1
    if inputs == 3:  # of `augment_decoded`
        height, width = of[2][0], of[2][1]
        _augment(carray(ins[2], 3 * width * height, np.uint8), 3 * width, height, width, longs, row, floats)
        return
    width, height = np.int64(row[at.CROP + 2]), np.int64(row[at.CROP + 3])
    decoder = acquire(longs[at.DECODERS])
    first, pitch = _decode(jpeg, row[at.NBYTES], row[at.CROP], row[at.CROP + 1], width, height, decoder)
    carray(outs[1], 1, np.bool_)[0] = first == 0
    if first != 0:
        _augment(carray(bytes_at(first), pitch * height, np.uint8), pitch, height, width, longs, row, floats)
    release(longs[at.DECODERS], decoder)


@compiled
def _augment(pixels: Any, pitch: int, height: int, width: int, longs: Any, row: Any, floats: Any) -> None:
    """What `augment` does with a decoded crop, `pixels` and `pitch` as in `resize`.

    `longs`, `row` and `floats` are the image's row (see `plan/rows.py`) as int64, int32 and float32.
    """
    res, place, hflip, vflip = row[at.RES], row[at.PLACE], row[at.HFLIP] > 0, row[at.VFLIP] > 0
    factor, offset = floats[at.FACTOR : at.OFFSET], floats[at.OFFSET : at.NBYTES]
    slots = (len(row) - at.KINDS) // (1 + p.VALUES)
    first = at.KINDS + slots
    kinds, values = row[at.KINDS : first], floats[first : first + p.VALUES * slots]
    x, y, w, h = row[at.ERASE], row[at.ERASE + 1], row[at.ERASE + 2], row[at.ERASE + 3]
    if not (kinds != p.NONE).any() and w == 0 and row[at.SHARED] == 0:
        if row[at.AS_BYTES] > 0:
            out = _byte_image(longs[at.OUT], place, res)
            resize(pixels, pitch, height, width, hflip, vflip, out, factor, offset)
        else:
            normalised = _output_floats(longs, place, res)
            resize(pixels, pitch, height, width, hflip, vflip, normalised, factor, offset)
        return
    raw = _byte_image(longs[at.RAW], place, res)
    resize(pixels, pitch, height, width, hflip, vflip, raw, factor, offset)
    apply_ops(raw, kinds, values.reshape(slots, p.VALUES))
    noise, top, left = _byte_image(longs[at.NOISE], 0, NOISE_PX), row[at.ORIGIN], row[at.ORIGIN + 1]
    for j in range(h):
        for i in range(w):
            for c in range(3):
                if top < 0:
                    raw[y + j, x + i, c] = row[at.MEAN + c]
                else:
                    raw[y + j, x + i, c] = noise[(top + j) % NOISE_PX, (left + i) % NOISE_PX, c]
    if row[at.SHARED] == 0:
        _write(raw, row, longs, floats)


def _run_mix(outs: Any, _to: Any, _od: Any, _no: Any, ins: Any, of: Any, _id: Any, _ni: Any) -> None:
    words = of[1][0]
    longs, row = carray(ins[1], words // 2, np.int64), carray(ins[1], words, np.int32)
    floats = carray(ins[1], words, np.float32)
    carray(outs[0], 1, np.int64)[0] = row[at.TAG]
    if row[at.SHARED] == 0:
        return
    res = row[at.RES]
    raw = _byte_image(longs[at.RAW], row[at.PLACE], res)
    if row[at.MODE] != UNMIXED:
        own, partner = raw, _byte_image(longs[at.RAW], row[at.PARTNER], res)
        if row[at.MODE] == MIXUP:
            raw = np.empty((res, res, 3), np.uint8)  # why not in place: the partner reads the image too
            blend(own.reshape(-1), partner.reshape(-1), floats[at.LAM], raw.reshape(-1))
        else:
            raw = own.copy()
            x, y, w, h = row[at.BOX], row[at.BOX + 1], row[at.BOX + 2], row[at.BOX + 3]
            for j in range(y, y + h):
                to, source = raw[j].reshape(-1), partner[j].reshape(-1)
                for i in range(3 * x, 3 * (x + w)):
                    to[i] = source[i]
    _write(raw, row, longs, floats)
