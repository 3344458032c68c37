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
from resolute.pipeline.plan.augment_params import MIXUP, NOISE_PX, UNMIXED, AugmentOps, pack_ops
from resolute.pipeline.plan.plan import BatchSpec

__all__ = [
    "GPU_NBYTES",
    "ImageRows",
    "augment",
    "augment_decoded",
    "crop",
    "decode",
    "gpu_arguments",
    "gpu_rows",
    "mix",
]

# A row of 32-bit words per image holds everything that varies, because each input of a graph costs the consumer's
# thread about 0.17 ms per batch of 1 024. First int64, by index of an int64: addresses of the output (float32 or
# uint8), of the image before normalisation (uint8, "raw"), of its mix partner's, of the noise tile and of the decoders;
# batch tag.
_OUT, _RAW, _PARTNER, _NOISE, _DECODERS, _TAG = range(6)
# Then int32, by word: side in px, flips, whether `mix` finishes the image; fill and box (x, y, w, h) of erasing, origin
# (y, x) of its noise, mean colour; mode and box of mixing; whether the output is uint8, not normalised; bytes of the
# encoded image.
_RES, _FLIP, _VFLIP, _SHARED, _FILL = 12, 13, 14, 15, 16
_ERASE, _ORIGIN, _MEAN, _MODE, _BOX, _UINT8, _NBYTES = 17, 21, 23, 26, 27, 31, 32
# Then float32: scales and shifts of the channels, lam. Then y, x, height, width of the crop, int32; the kinds of all
# slots, int32, and their values, float32.
_SCALE, _SHIFT, _LAM, _CROP, _SLOTS = 33, 36, 39, 40, 44
_NO_FILL, _FILL_MEAN, _FILL_NOISE = 0, 1, 2
# A row of the GPU's graph, int32: y, x, height, width of the crop in the stored image; number of the batch; relative
# y0, x0, y1, x1 of the region to resize, each 0 or 1, where x0 > x1 flips horizontally and y0 > y1 vertically; output
# height and width; bytes of the encoded image. Then, int64, the address of the decoders.
_GPU_TAG, _GPU_REGION, _GPU_SIZE, GPU_NBYTES, _GPU_DECODERS, _GPU_WORDS = 4, 5, 9, 11, 12, 14


class ImageRows:
    """Packs the parameters of batches into rows for the nodes of this file."""

    def __init__(
        self,
        ops: AugmentOps,
        *,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        noise: NDArray[np.uint8],
        decoders: Decoders,
    ) -> None:
        """`mean`, `std`: of values in 0..1; `noise`: (NOISE_PX, NOISE_PX, 3), kept, the fill of erasing.

        `decoders`, kept, are as many as there are threads.
        """
        assert noise.shape == (NOISE_PX, NOISE_PX, 3)
        self._ops, self._noise, self._decoders = ops, np.ascontiguousarray(noise), decoders
        slots = len(ops.slots)
        words = _SLOTS + (1 + p.VALUES) * slots
        self._same = np.zeros(words + words % 2, np.int32)  # why even: keeps the int64 of all rows aligned
        self._same.view(np.int64)[_NOISE] = self._noise.__array_interface__["data"][0]
        self._same.view(np.int64)[_DECODERS] = decoders.address
        self._same[_MEAN : _MEAN + 3] = [round(255 * m) for m in mean]
        numbers = self._same.view(np.float32)
        numbers[_SCALE:_SHIFT] = [1 / (255 * s) for s in std]
        numbers[_SHIFT:_LAM] = [-m / s for m, s in zip(mean, std, strict=True)]

    def pack(
        self, spec: BatchSpec, nbytes: NDArray[np.int64], out: NDArray[Any], raw: NDArray[np.uint8] | None
    ) -> NDArray[np.int32]:
        """Rows (N, words) int32 of a batch; `out` and `raw`, both (N, res, res, 3), must outlive its run.

        `nbytes` (N,) are the sizes of the encoded images. `out` is float32, or uint8 for images that are not
        normalised. `raw` may be None if the run has no slots, erasing or mixing.
        """
        n, params, slots = len(spec), spec.augment_params, len(self._ops.slots)
        rows = np.empty((n, len(self._same)), np.int32)
        rows[:] = self._same
        longs, floats = rows.view(np.int64), rows.view(np.float32)
        longs[:, _OUT], longs[:, _TAG] = _addresses(out), spec.index
        rows[:, _RES], rows[:, _FLIP], rows[:, _UINT8] = spec.res, spec.flips, out.dtype == np.uint8
        rows[:, _NBYTES] = nbytes
        rows[:, _CROP : _CROP + 2], rows[:, _CROP + 2 : _SLOTS] = spec.crops[:, 1::-1], spec.crops[:, :1:-1]
        if "vflips" in params:
            rows[:, _VFLIP] = params["vflips"]
        if raw is None:
            return rows
        longs[:, _RAW] = addresses = _addresses(raw)
        if "erase_boxes" in params:
            boxes: NDArray[Any] = params["erase_boxes"]
            origins: NDArray[Any] = params["erase_from"]
            fill = np.where(origins[:, 0] < 0, _FILL_MEAN, _FILL_NOISE)
            rows[:, _FILL] = np.where(boxes[:, 2] > 0, fill, _NO_FILL)
            rows[:, _ERASE:_ORIGIN], rows[:, _ORIGIN:_MEAN] = boxes, origins
        mixed = spec.modes != UNMIXED
        if self._ops.mixing and mixed.any():
            rows[:, _SHARED] = mixed
            rows[spec.partners[mixed], _SHARED] = 1
            longs[:, _PARTNER] = addresses[spec.partners]
            rows[:, _MODE], rows[:, _BOX:_UINT8], floats[:, _LAM] = spec.modes, spec.boxes, spec.lam
        if slots and any(f"{part}_kinds" in params for part, _ in self._ops.slots):
            kinds, values = pack_ops(params, self._ops.slots, n)
            last = _SLOTS + slots
            rows[:, _SLOTS:last], floats[:, last : last + p.VALUES * slots] = kinds, values.reshape(n, -1)
        return rows

    def normalise(self, images: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
        """Normalise `images` into `out`, both (N, res, res, 3) and contiguous."""
        numbers, lines = self._same.view(np.float32), (-1, 3 * images.shape[2])
        scale, shift = numbers[_SCALE:_SHIFT], numbers[_SHIFT:_LAM]
        normalise_rows(images.reshape(lines), out.reshape(lines), scale, shift)


def _addresses(images: NDArray[Any]) -> NDArray[np.int64]:
    """(N,) int64: where each of N images lies in memory."""
    first: int = images.__array_interface__["data"][0]
    return first + images.strides[0] * np.arange(len(images))


def crop(rows: Any) -> tuple[Any, Any]:
    """Nodes: corner y, x and height, width of the crops in the stored images, int32."""
    return rows[_CROP : _CROP + 2], rows[_CROP + 2 : _SLOTS]


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


def gpu_rows(spec: BatchSpec, nbytes: NDArray[np.int64], decoders: Decoders | None) -> NDArray[np.int32]:
    """Rows (N, 14) int32 of the GPU's graph for a batch whose encoded images have `nbytes` (N,).

    `decoders` must outlive its run.
    """
    rows = np.empty((len(spec), _GPU_WORDS), np.int32)
    rows[:, 0:2], rows[:, 2:4] = spec.crops[:, 1::-1], spec.crops[:, :1:-1]
    rows[:, _GPU_TAG], rows[:, GPU_NBYTES] = spec.index, nbytes
    rows[:, _GPU_REGION:_GPU_SIZE], rows[:, _GPU_SIZE:GPU_NBYTES] = (0, 0, 1, 1), spec.res
    rows[:, _GPU_DECODERS:].view(np.int64)[:] = 0 if decoders is None else decoders.address
    rows[spec.flips, _GPU_REGION + 1 : _GPU_SIZE : 2] = (1, 0)
    if "vflips" in spec.augment_params:
        rows[spec.augment_params["vflips"].astype(bool), _GPU_REGION:_GPU_SIZE:2] = (1, 0)
    return rows


def gpu_arguments(rows: Any, jpegs: Any, *, for_decode: bool) -> Any:
    """Nodes for the operators of the GPU's graph, from `gpu_rows` and `EncodedImages`, in this order:

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
    """Node: the crops (h, w, 3) uint8, from `gpu_rows`, and whether the decoder declined an image, () bool.

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
        return _address(
            run_fn, _OPERANDS, _SHAPES, types.uint64, types.int32, _OPERANDS, _SHAPES, types.uint64, types.int32
        )

    def _get_setup_fn_cpu(self, setup_fn: Any) -> int:
        return _address(setup_fn, _SHAPES, types.uint64, types.int32, _SHAPES, types.uint64, types.int32, types.int32)


_SHAPES, _OPERANDS = types.CPointer(types.CPointer(types.int64)), types.CPointer(types.voidptr)


def _run_gpu_arguments(outs: Any, to: Any, _od: Any, _no: Any, ins: Any, of: Any, _id: Any, _ni: Any) -> None:
    row = carray(ins[0], _GPU_WORDS, np.int32)
    for k in range(2):
        carray(outs[0], 2, np.int32)[k] = row[k]
        carray(outs[1], 2, np.int32)[k] = row[2 + k]
        carray(outs[3], 2, np.float32)[k] = row[_GPU_REGION + k]
        carray(outs[4], 2, np.float32)[k] = row[_GPU_REGION + 2 + k]
        carray(outs[5], 2, np.float32)[k] = row[_GPU_SIZE + k]
    tags = carray(outs[2], 2, np.int32)
    tags[0], tags[1] = row[_GPU_TAG], _jpeg_tag(carray(ins[1], of[1][0], np.uint8))
    for k in range(2, to[1][0]):
        carray(outs[1], 3, np.int32)[k] = 0


def _pairs(outs: Any, _od: Any, count: Any, _ins: Any, _id: Any, _ni: Any, samples: Any) -> None:
    for i in range(count * samples):
        outs[i][0] = 2


def _pairs_and_shape(outs: Any, _od: Any, count: Any, _ins: Any, _id: Any, _ni: Any, samples: Any) -> None:
    for i in range(count * samples):
        outs[i][0] = 3 if samples <= i < 2 * samples else 2


def _run_decode(outs: Any, _to: Any, _od: Any, _no: Any, ins: Any, of: Any, _id: Any, _ni: Any) -> None:
    row, height, width = carray(ins[1], _GPU_WORDS, np.int32), of[0][0], of[0][1]
    jpeg = carray(ins[2], of[2][0], np.uint8)
    decoders = carray(ins[1], _GPU_WORDS // 2, np.int64)[_GPU_DECODERS // 2]
    out = carray(outs[0], (height, 3 * width), np.uint8)
    decoder = acquire(decoders)
    first, pitch = _decode(jpeg, row[GPU_NBYTES], row[1], row[0], width, height, decoder)
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
def _float_image(address: Any, res: int) -> Any:
    """The image at `address`, (res, res, 3) float32."""
    return carray(floats_at(address), (res, res, 3), np.float32)


@compiled
def _byte_image(address: Any, res: int) -> Any:
    """The image at `address`, (res, res, 3) uint8."""
    return carray(bytes_at(address), (res, res, 3), np.uint8)


@compiled
def _write(raw: Any, row: Any, longs: Any, floats: Any) -> None:
    """Write the finished image `raw` (res, res, 3) uint8 to the output, normalised unless that is uint8."""
    res = row[_RES]
    if row[_UINT8] > 0:
        source, to = raw.reshape(-1), _byte_image(longs[_OUT], res).reshape(-1)
        for i in range(len(source)):
            to[i] = source[i]
        return
    out = _float_image(longs[_OUT], res)
    normalise_rows(raw.reshape(res, 3 * res), out.reshape(res, 3 * res), floats[_SCALE:_SHIFT], floats[_SHIFT:_LAM])


_c_functions: dict[Any, Any] = {}  # why: DALI holds only their addresses, which must stay valid


def _address(function: Callable[..., None], *arguments: Any) -> int:
    if function not in _c_functions:
        _c_functions[function] = c_function(function, types.void(*arguments))
    return int(_c_functions[function].address)


# Called by DALI with arrays of pointers, shapes and dimensions, first of the outputs, then of the inputs.


def _shape_of_tag(outs: Any, _od: Any, _no: Any, _ins: Any, _id: Any, _ni: Any, samples: Any) -> None:
    for i in range(samples):
        outs[i][0] = 1


@compiled
def _own_tag(longs: Any, jpeg: Any) -> Any:
    """The batch tag of a row, -1 if the encoded image has another one."""
    return longs[_TAG] if longs[_TAG] == _jpeg_tag(jpeg) else np.int64(-1)


def _run_augment(outs: Any, _to: Any, _od: Any, _no: Any, ins: Any, of: Any, _id: Any, inputs: Any) -> None:
    words, jpeg = of[0][0], carray(ins[1], of[1][0], np.uint8)
    longs, row = carray(ins[0], words // 2, np.int64), carray(ins[0], words, np.int32)
    floats = carray(ins[0], words, np.float32)
    carray(outs[0], 1, np.int64)[0] = longs[_TAG] if longs[_TAG] == _jpeg_tag(jpeg) else -1
    if inputs == 3:  # of `augment_decoded`
        height, width = of[2][0], of[2][1]
        _augment(carray(ins[2], 3 * width * height, np.uint8), 3 * width, height, width, longs, row, floats)
        return
    height, width = np.int64(row[_CROP + 2]), np.int64(row[_CROP + 3])
    decoder = acquire(longs[_DECODERS])
    first, pitch = _decode(jpeg, row[_NBYTES], row[_CROP + 1], row[_CROP], width, height, decoder)
    carray(outs[1], 1, np.bool_)[0] = first == 0
    if first != 0:
        _augment(carray(bytes_at(first), pitch * height, np.uint8), pitch, height, width, longs, row, floats)
    release(longs[_DECODERS], decoder)


@compiled
def _augment(pixels: Any, pitch: int, height: int, width: int, longs: Any, row: Any, floats: Any) -> None:
    """What `augment` does with a decoded crop, `pixels` and `pitch` as in `resize`.

    `longs`, `row` and `floats` are the image's row of `ImageRows.pack` as int64, int32 and float32.
    """
    words = len(row)
    res, flip, vflip = row[_RES], row[_FLIP] > 0, row[_VFLIP] > 0
    scale, shift = floats[_SCALE:_SHIFT], floats[_SHIFT:_LAM]
    slots = (words - _SLOTS) // (1 + p.VALUES)
    first = _SLOTS + slots
    kinds, values = row[_SLOTS:first], floats[first : first + p.VALUES * slots]
    if not (kinds != p.NONE).any() and row[_FILL] == _NO_FILL and row[_SHARED] == 0:
        if row[_UINT8] > 0:
            resize(pixels, pitch, height, width, flip, vflip, _byte_image(longs[_OUT], res), scale, shift)
        else:
            resize(pixels, pitch, height, width, flip, vflip, _float_image(longs[_OUT], res), scale, shift)
        return
    raw = _byte_image(longs[_RAW], res)
    resize(pixels, pitch, height, width, flip, vflip, raw, scale, shift)
    apply_ops(raw, kinds, values.reshape(slots, p.VALUES))
    if row[_FILL] != _NO_FILL:
        x, y, w, h = row[_ERASE], row[_ERASE + 1], row[_ERASE + 2], row[_ERASE + 3]
        noise, top, left = _byte_image(longs[_NOISE], NOISE_PX), row[_ORIGIN], row[_ORIGIN + 1]
        for j in range(h):
            for i in range(w):
                for c in range(3):
                    if row[_FILL] == _FILL_MEAN:
                        raw[y + j, x + i, c] = row[_MEAN + c]
                    else:
                        raw[y + j, x + i, c] = noise[(top + j) % NOISE_PX, (left + i) % NOISE_PX, c]
    if row[_SHARED] == 0:
        _write(raw, row, longs, floats)


def _run_mix(outs: Any, _to: Any, _od: Any, _no: Any, ins: Any, of: Any, _id: Any, _ni: Any) -> None:
    words = of[1][0]
    longs, row = carray(ins[1], words // 2, np.int64), carray(ins[1], words, np.int32)
    floats = carray(ins[1], words, np.float32)
    carray(outs[0], 1, np.int64)[0] = longs[_TAG]
    if row[_SHARED] == 0:
        return
    res = row[_RES]
    raw = _byte_image(longs[_RAW], res)
    if row[_MODE] != UNMIXED:
        own, partner = raw, _byte_image(longs[_PARTNER], res)
        if row[_MODE] == MIXUP:
            raw = np.empty((res, res, 3), np.uint8)  # why not in place: the partner reads the image too
            blend(own.reshape(-1), partner.reshape(-1), floats[_LAM], raw.reshape(-1))
        else:
            raw = own.copy()
            x, y, w, h = row[_BOX], row[_BOX + 1], row[_BOX + 2], row[_BOX + 3]
            for j in range(y, y + h):
                to, source = raw[j].reshape(-1), partner[j].reshape(-1)
                for i in range(3 * x, 3 * (x + w)):
                    to[i] = source[i]
    _write(raw, row, longs, floats)
