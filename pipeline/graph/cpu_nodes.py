"""CPU nodes of the DALI graph that call numba-compiled functions, once per image.

NVIDIA's numba plugin compiles a wrapper for each pipeline, which takes seconds, only to pass DALI the addresses of two
C functions. Here these C functions are compiled once, cached on disk, and their addresses passed instead.
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

from pipeline.graph.kernels.augment import apply_ops, blend
from pipeline.graph.kernels.resize import normalise_rows, resize
from pipeline.jit import c_function, compiled

__all__ = ["apply_augment_ops", "mix_images", "normalize", "output_pointers", "output_shape", "parameters",
           "resize_mirror", "resize_normalize"]  # fmt: skip

# per image, float32: horizontal flip, vertical flip, three scales, three shifts
_PARAMETERS = 8
# per image, int64: address of its output, side of its output in px, batch tag
_OUTPUT = 3


def output_shape(batch: int, res: int) -> NDArray[np.uint8]:
    """(batch, res, res, 0) uint8: an empty array whose shape sets the size of the node's output."""
    return np.empty((batch, res, res, 0), np.uint8)


def parameters(
    flips: NDArray[Any], vflips: NDArray[Any], mean: tuple[float, ...], std: tuple[float, ...]
) -> NDArray[np.float32]:
    """(N, 8) float32 for `flips` and `vflips` (N,) bool, and `mean` and `std` of values in 0..1."""
    rows = np.empty((len(flips), _PARAMETERS), np.float32)
    rows[:, 0], rows[:, 1] = flips, vflips
    rows[:, 2:5] = [1 / (255 * s) for s in std]
    rows[:, 5:8] = [-m / s for m, s in zip(mean, std, strict=True)]
    return rows


def output_pointers(out: NDArray[np.float32], batch_tag: int) -> NDArray[np.int64]:
    """(N, 3) int64: where each image of a batch is written; the nodes that write them return `batch_tag`.

    `out` (N, res, res, 3) must stay alive until the graph has returned the batch.
    """
    rows = np.empty((len(out), _OUTPUT), np.int64)
    rows[:, 0] = out.ctypes.data + out.strides[0] * np.arange(len(out))
    rows[:, 1], rows[:, 2] = out.shape[1], batch_tag
    return rows


def resize_mirror(images: Any, output_shape: Any, parameters: Any) -> Any:
    """Node: (h, w, 3) uint8, resized to `output_shape` and flipped."""
    return _node(_run_resize, dali.UINT8, (output_shape, dali.UINT8, 3), (images, dali.UINT8, 3),
                 (parameters, dali.FLOAT, 1))  # fmt: skip


def resize_normalize(images: Any, parameters: Any, output: Any) -> Any:
    """Node: resize, flip and `normalize` in one pass; returns the batch tag as `normalize` does."""
    return _node(_run_resize_normalize, dali.INT64, (images, dali.UINT8, 3), (parameters, dali.FLOAT, 1),
                 (output, dali.INT64, 1), ends=True)  # fmt: skip


def apply_augment_ops(images: Any, kinds: Any, values: Any) -> Any:
    """Node: (h, w, 3) uint8 after the operations `kinds` (slots,) and `values` (slots, 6), see `kernels.augment`."""
    return _node(_run_apply_ops, dali.UINT8, (images, dali.UINT8, 3), (kinds, dali.INT32, 1), (values, dali.FLOAT, 2))


def mix_images(images: Any, partner: Any, lam: Any) -> Any:
    """Node: mixup, `lam` (1,) float32 of the image (h, w, 3) uint8 plus 1 - lam of its partner."""
    return _node(_run_mix, dali.UINT8, (images, dali.UINT8, 3), (partner, dali.UINT8, 3), (lam, dali.FLOAT, 1))


def normalize(images: Any, parameters: Any, output: Any) -> Any:
    """Node: (h, w, 3) uint8 times the scales plus the shifts of `parameters`, written to the address in `output`.

    The node itself outputs the batch tag, (1,) int64: DALI does not own the images, so their memory can be pooled.
    """
    return _node(_run_normalize, dali.INT64, (images, dali.UINT8, 3), (parameters, dali.FLOAT, 1),
                 (output, dali.INT64, 1), ends=True)  # fmt: skip


class _Compiled(NumbaFunction):
    def _get_run_fn_cpu(self, run_fn: Any, *_: Any) -> int:
        return _address(run_fn, _OPERANDS, _SHAPES, types.uint64, types.int32,
                        _OPERANDS, _SHAPES, types.uint64, types.int32)  # fmt: skip

    def _get_setup_fn_cpu(self, setup_fn: Any) -> int:
        return _address(setup_fn, _SHAPES, types.uint64, types.int32, _SHAPES, types.uint64, types.int32, types.int32)


_SHAPES, _OPERANDS = types.CPointer(types.CPointer(types.int64)), types.CPointer(types.voidptr)


@do_not_convert
def _node(run: Callable[..., None], out: Any, *inputs: tuple[Any, Any, int], ends: bool = False) -> Any:
    """A node whose output is (h, w, 3) with the size of its first input, or, with `ends`, the batch tag (1,)."""
    operands, kinds, ndims = zip(*inputs, strict=True)
    return _Compiled(
        run_fn=run, setup_fn=_shape_of_tag if ends else _shape_of_first, out_types=[out], in_types=list(kinds),
        outs_ndim=[1 if ends else 3], ins_ndim=list(ndims),
    )(*operands)  # fmt: skip


@intrinsic
def _pointer(context: Any, address: Any) -> Any:
    """Cast an int64 to a pointer to float32. Source: the example in numba's documentation of `intrinsic`."""

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.float32)(address), write


@compiled
def _output(address: Any, height: int, width: int) -> Any:
    """The output image at `address`, (height, width, 3) float32."""
    return carray(_pointer(address), (height, width, 3), np.float32)  # type: ignore[call-arg]  # called by compiled code only


_c_functions: dict[Any, Any] = {}  # why: DALI holds only their addresses, which must stay valid


def _address(function: Callable[..., None], *arguments: Any) -> int:
    if function not in _c_functions:
        _c_functions[function] = c_function(function, types.void(*arguments))
    return int(_c_functions[function].address)


# Called by DALI with arrays of pointers, shapes and dimensions, first of the outputs, then of the inputs.


def _shape_of_first(outs: Any, _od: Any, _no: Any, ins: Any, _id: Any, _ni: Any, samples: Any) -> None:
    for i in range(samples):
        outs[i][0], outs[i][1], outs[i][2] = ins[i][0], ins[i][1], 3


def _run_resize(outs: Any, to: Any, _od: Any, _no: Any, ins: Any, of: Any, _id: Any, _ni: Any) -> None:
    image, params = carray(ins[1], (of[1][0], of[1][1], 3), np.uint8), carray(ins[2], _PARAMETERS, np.float32)
    out = carray(outs[0], (to[0][0], to[0][1], 3), np.uint8)
    resize(image, params[0] > 0, params[1] > 0, out, params[2:5], params[5:8])


def _shape_of_tag(outs: Any, _od: Any, _no: Any, _ins: Any, _id: Any, _ni: Any, samples: Any) -> None:
    for i in range(samples):
        outs[i][0] = 1


def _run_resize_normalize(outs: Any, _to: Any, _od: Any, _no: Any, ins: Any, of: Any, _id: Any, _ni: Any) -> None:
    image, params = carray(ins[0], (of[0][0], of[0][1], 3), np.uint8), carray(ins[1], _PARAMETERS, np.float32)
    target = carray(ins[2], _OUTPUT, np.int64)
    out = _output(target[0], target[1], target[1])
    resize(image, params[0] > 0, params[1] > 0, out, params[2:5], params[5:8])
    carray(outs[0], 1, np.int64)[0] = target[2]


def _run_normalize(outs: Any, _to: Any, _od: Any, _no: Any, ins: Any, of: Any, _id: Any, _ni: Any) -> None:
    shape, params = (of[0][0], 3 * of[0][1]), carray(ins[1], _PARAMETERS, np.float32)
    target = carray(ins[2], _OUTPUT, np.int64)
    out = _output(target[0], of[0][0], of[0][1]).reshape(shape)
    normalise_rows(carray(ins[0], shape, np.uint8), out, params[2:5], params[5:8])
    carray(outs[0], 1, np.int64)[0] = target[2]


def _run_apply_ops(outs: Any, to: Any, _od: Any, _no: Any, ins: Any, of: Any, _id: Any, _ni: Any) -> None:
    shape, slots = (of[0][0], of[0][1], 3), of[1][0]
    out = carray(outs[0], shape, np.uint8)
    out[:] = carray(ins[0], shape, np.uint8)
    apply_ops(out, carray(ins[1], (slots,), np.int32), carray(ins[2], (slots, of[2][1]), np.float32))


def _run_mix(outs: Any, to: Any, _od: Any, _no: Any, ins: Any, of: Any, _id: Any, _ni: Any) -> None:
    count = of[0][0] * of[0][1] * 3
    image, partner = carray(ins[0], count, np.uint8), carray(ins[1], count, np.uint8)
    blend(image, partner, carray(ins[2], 1, np.float32)[0], carray(outs[0], count, np.uint8))
