"""Compiled functions that run inside the DALI graph on a CPU in place of DALI's own nodes, called for one image each.

NVIDIA's numba plugin compiles a wrapper around a Python function for every pipeline, for seconds; what it hands to
DALI in the end are two addresses of C functions. Ours are compiled once, kept on disk, and handed over instead.
Source: the signatures are those of `nvidia.dali.plugin.numba.NumbaFunction` (`_run_fn_sig`, `_setup_fn_sig`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray, types
from numba.extending import intrinsic
from numpy.typing import NDArray
from nvidia.dali import types as dali
from nvidia.dali.pipeline import do_not_convert
from nvidia.dali.plugin.numba import NumbaFunction

from pipeline.graph.kernels.augment import blend, apply_ops
from pipeline.graph.kernels.resize import normalise_rows, resize
from pipeline.jit import c_function, compiled

__all__ = ["mix_images", "output_shape", "changed", "resize_normalize", "normalize", "output_pointers", "parameters", "resize_mirror"]

# of each image, float32: mirrored or not, upside down or not, three scales, three shifts
_PARAMETERS = 8
# of each image, int64: the address of its output, the side of its output in px, the number of its batch
_OUTPUT = 3


def output_shape(batch: int, res: int) -> NDArray[np.uint8]:
    """(batch, res, res, 0): tells DALI the output's size by its shape, and weighs nothing."""
    return np.empty((batch, res, res, 0), np.uint8)


def parameters(
    flips: NDArray[Any], vflips: NDArray[Any], mean: tuple[float, ...], std: tuple[float, ...]
) -> NDArray[np.float32]:
    """(N, 8) for `flips` and `vflips` (N,) bool and the statistics of values in 0..1."""
    found = np.empty((len(flips), _PARAMETERS), np.float32)
    found[:, 0], found[:, 1] = flips, vflips
    found[:, 2:5] = [1 / (255 * s) for s in std]
    found[:, 5:8] = [-m / s for m, s in zip(mean, std, strict=True)]
    return found


def output_pointers(out: NDArray[np.float32], number: int) -> NDArray[np.int64]:
    """(N, 3): where the images of batch `number` shall go, which the nodes that write them give back.

    `out` (N, res, res, 3) must live until the batch was taken.
    """
    found = np.empty((len(out), _OUTPUT), np.int64)
    found[:, 0] = out.ctypes.data + out.strides[0] * np.arange(len(out))
    found[:, 1], found[:, 2] = out.shape[1], number
    return found


def resize_mirror(images: Any, output_shape: Any, parameters: Any) -> Any:
    """Node: (h, w, 3) uint8 resize_mirror to the canvas, mirrored or not."""
    return _node(_resize, dali.UINT8, (output_shape, dali.UINT8, 3), (images, dali.UINT8, 3), (parameters, dali.FLOAT, 1))


def resize_normalize(images: Any, parameters: Any, output: Any) -> Any:
    """Node: `normalize` of the image resize_mirror and mirrored or not, in one pass."""
    return _node(_finish, dali.INT64, (images, dali.UINT8, 3), (parameters, dali.FLOAT, 1), (output, dali.INT64, 1),
                 ends=True)  # fmt: skip


def apply_augment_ops(images: Any, kinds: Any, values: Any) -> Any:
    """Node: (h, w, 3) uint8 after the operations of `pixels.apply_ops`."""
    return _node(_apply_ops, dali.UINT8, (images, dali.UINT8, 3), (kinds, dali.INT32, 1), (values, dali.FLOAT, 2))


def mix_images(images: Any, partner: Any, lam: Any) -> Any:
    """Node: `lam` (1,) float32 of (h, w, 3) uint8 and the rest of its partner."""
    return _node(_blend, dali.UINT8, (images, dali.UINT8, 3), (partner, dali.UINT8, 3), (lam, dali.FLOAT, 1))


def normalize(images: Any, parameters: Any, output: Any) -> Any:
    """Node: (h, w, 3) uint8 times the scales plus the shifts of `parameters`, written where `output` says.

    What DALI gets is the number of the batch, (1,) int64: the images are not its own, so that their memory can be ours.
    """
    return _node(_normalise, dali.INT64, (images, dali.UINT8, 3), (parameters, dali.FLOAT, 1), (output, dali.INT64, 1),
                 ends=True)  # fmt: skip


class _Compiled(NumbaFunction):
    def _get_run_fn_cpu(self, run_fn: Any, *_: Any) -> int:
        return _address(run_fn, _OPERANDS, _SHAPES, types.uint64, types.int32,
                        _OPERANDS, _SHAPES, types.uint64, types.int32)  # fmt: skip

    def _get_setup_fn_cpu(self, setup_fn: Any) -> int:
        return _address(setup_fn, _SHAPES, types.uint64, types.int32, _SHAPES, types.uint64, types.int32, types.int32)


_SHAPES, _OPERANDS = types.CPointer(types.CPointer(types.int64)), types.CPointer(types.voidptr)


@do_not_convert
def _node(run: Callable[..., None], out: Any, *inputs: tuple[Any, Any, int], ends: bool = False) -> Any:
    """One (h, w, 3) output, as high and wide as the first input; a batch number, (1,), if it `ends` the graph."""
    given, kinds, ndims = zip(*inputs, strict=True)
    return _Compiled(
        run_fn=run, setup_fn=_shape_of_number if ends else _shape_of_first, out_types=[out], in_types=list(kinds),
        outs_ndim=[1 if ends else 3], ins_ndim=list(ndims),
    )(*given)  # fmt: skip


@intrinsic
def _pointer(context: Any, address: Any) -> Any:
    """An int64 as a pointer to float32. Source: the recipe in numba's documentation of `intrinsic`."""

    def write(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.inttoptr(given[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.float32)(address), write


@compiled
def _output(address: Any, height: int, width: int) -> Any:
    """Where an image shall go, (height, width, 3) float32."""
    return carray(_pointer(address), (height, width, 3), np.float32)  # type: ignore[call-arg]  # not for Python


_kept: dict[Any, Any] = {}  # why: DALI holds an address only


def _address(function: Callable[..., None], *arguments: Any) -> int:
    if function not in _kept:
        _kept[function] = c_function(function, types.void(*arguments))
    return int(_kept[function].address)


# What DALI calls: pointers to and shapes of the outputs, then of the inputs, one of each an operand.


def _shape_of_first(outs: Any, _od: Any, _no: Any, ins: Any, _id: Any, _ni: Any, samples: Any) -> None:
    for i in range(samples):
        outs[i][0], outs[i][1], outs[i][2] = ins[i][0], ins[i][1], 3


def _resize(outs: Any, to: Any, _od: Any, _no: Any, ins: Any, of: Any, _id: Any, _ni: Any) -> None:
    image, given = carray(ins[1], (of[1][0], of[1][1], 3), np.uint8), carray(ins[2], _PARAMETERS, np.float32)
    out = carray(outs[0], (to[0][0], to[0][1], 3), np.uint8)
    resize(image, given[0] > 0, given[1] > 0, out, given[2:5], given[5:8])


def _shape_of_number(outs: Any, _od: Any, _no: Any, _ins: Any, _id: Any, _ni: Any, samples: Any) -> None:
    for i in range(samples):
        outs[i][0] = 1


def _finish(outs: Any, _to: Any, _od: Any, _no: Any, ins: Any, of: Any, _id: Any, _ni: Any) -> None:
    image, given = carray(ins[0], (of[0][0], of[0][1], 3), np.uint8), carray(ins[1], _PARAMETERS, np.float32)
    place = carray(ins[2], _OUTPUT, np.int64)
    out = _output(place[0], place[1], place[1])
    resize(image, given[0] > 0, given[1] > 0, out, given[2:5], given[5:8])
    carray(outs[0], 1, np.int64)[0] = place[2]


def _normalise(outs: Any, _to: Any, _od: Any, _no: Any, ins: Any, of: Any, _id: Any, _ni: Any) -> None:
    shape, given = (of[0][0], 3 * of[0][1]), carray(ins[1], _PARAMETERS, np.float32)
    place = carray(ins[2], _OUTPUT, np.int64)
    out = _output(place[0], of[0][0], of[0][1]).reshape(shape)
    normalise_rows(carray(ins[0], shape, np.uint8), out, given[2:5], given[5:8])
    carray(outs[0], 1, np.int64)[0] = place[2]


def _apply_ops(outs: Any, to: Any, _od: Any, _no: Any, ins: Any, of: Any, _id: Any, _ni: Any) -> None:
    shape, slots = (of[0][0], of[0][1], 3), of[1][0]
    out = carray(outs[0], shape, np.uint8)
    out[:] = carray(ins[0], shape, np.uint8)
    apply_ops(out, carray(ins[1], (slots,), np.int32), carray(ins[2], (slots, of[2][1]), np.float32))


def _blend(outs: Any, to: Any, _od: Any, _no: Any, ins: Any, of: Any, _id: Any, _ni: Any) -> None:
    count = of[0][0] * of[0][1] * 3
    image, partner = carray(ins[0], count, np.uint8), carray(ins[1], count, np.uint8)
    blend(image, partner, carray(ins[2], 1, np.float32)[0], carray(outs[0], count, np.uint8))
