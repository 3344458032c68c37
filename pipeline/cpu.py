"""What runs inside the DALI graph on a CPU in place of DALI's own nodes? Compiled functions, called for one image each.

NVIDIA's numba plugin compiles a wrapper around a Python function for every pipeline, for seconds; what it hands to
DALI in the end are two addresses of C functions. Ours are compiled once, kept on disk, and handed over instead.
Source: the signatures are those of `nvidia.dali.plugin.numba.NumbaFunction` (`_run_fn_sig`, `_setup_fn_sig`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray, types
from numpy.typing import NDArray
from nvidia.dali import types as dali
from nvidia.dali.pipeline import do_not_convert
from nvidia.dali.plugin.numba import NumbaFunction

from .compiled import c_function
from .pixels import blend, run_slots
from .resize import normalise_rows, resize

__all__ = ["blended", "canvas", "changed", "normalised", "parameters", "resized"]

_PARAMETERS = 8  # float32 an image: mirrored or not, upside down or not, three scales, three shifts


def canvas(batch: int, res: int) -> NDArray[np.uint8]:
    """(batch, res, res, 0): tells DALI the output's size by its shape, and weighs nothing."""
    return np.empty((batch, res, res, 0), np.uint8)


def parameters(
    flips: NDArray[Any], vflips: NDArray[Any], mean: tuple[float, ...], std: tuple[float, ...]
) -> NDArray[np.float32]:
    """(N, 8) for `flips` and `vflips` (N,) bool and the statistics of values in 0..1."""
    out = np.empty((len(flips), _PARAMETERS), np.float32)
    out[:, 0], out[:, 1] = flips, vflips
    out[:, 2:5] = [1 / (255 * s) for s in std]
    out[:, 5:8] = [-m / s for m, s in zip(mean, std, strict=True)]
    return out


def resized(images: Any, canvas: Any, parameters: Any, *, normalise: bool) -> Any:
    """Node: (h, w, 3) uint8 resized to the canvas, mirrored or not; float32 times scales plus shifts, or else uint8."""
    run, out = (_resize_normalise, dali.FLOAT) if normalise else (_resize, dali.UINT8)
    return _node(run, out, (canvas, dali.UINT8, 3), (images, dali.UINT8, 3), (parameters, dali.FLOAT, 1))


def changed(images: Any, kinds: Any, values: Any) -> Any:
    """Node: (h, w, 3) uint8 after the operations of `pixels.run_slots`."""
    return _node(_run_slots, dali.UINT8, (images, dali.UINT8, 3), (kinds, dali.INT32, 1), (values, dali.FLOAT, 2))


def blended(images: Any, partner: Any, lam: Any) -> Any:
    """Node: `lam` (1,) float32 of (h, w, 3) uint8 and the rest of its partner."""
    return _node(_blend, dali.UINT8, (images, dali.UINT8, 3), (partner, dali.UINT8, 3), (lam, dali.FLOAT, 1))


def normalised(images: Any, parameters: Any) -> Any:
    """Node: (h, w, 3) uint8 -> float32, times the scales plus the shifts of `parameters`."""
    return _node(_normalise, dali.FLOAT, (images, dali.UINT8, 3), (parameters, dali.FLOAT, 1))


class _Compiled(NumbaFunction):
    def _get_run_fn_cpu(self, run_fn: Any, *_: Any) -> int:
        return _address(run_fn, _OPERANDS, _SHAPES, types.uint64, types.int32,
                        _OPERANDS, _SHAPES, types.uint64, types.int32)  # fmt: skip

    def _get_setup_fn_cpu(self, setup_fn: Any) -> int:
        return _address(setup_fn, _SHAPES, types.uint64, types.int32, _SHAPES, types.uint64, types.int32, types.int32)


_SHAPES, _OPERANDS = types.CPointer(types.CPointer(types.int64)), types.CPointer(types.voidptr)


@do_not_convert
def _node(run: Callable[..., None], out: Any, *inputs: tuple[Any, Any, int]) -> Any:
    """One (h, w, 3) output, as high and wide as the first input."""
    given, kinds, ndims = zip(*inputs, strict=True)
    return _Compiled(
        run_fn=run, setup_fn=_shape_of_first, out_types=[out], in_types=list(kinds), outs_ndim=[3],
        ins_ndim=list(ndims),
    )(*given)  # fmt: skip


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


def _resize_normalise(outs: Any, to: Any, _od: Any, _no: Any, ins: Any, of: Any, _id: Any, _ni: Any) -> None:
    image, given = carray(ins[1], (of[1][0], of[1][1], 3), np.uint8), carray(ins[2], _PARAMETERS, np.float32)
    out = carray(outs[0], (to[0][0], to[0][1], 3), np.float32)
    resize(image, given[0] > 0, given[1] > 0, out, given[2:5], given[5:8])


def _normalise(outs: Any, to: Any, _od: Any, _no: Any, ins: Any, of: Any, _id: Any, _ni: Any) -> None:
    shape, given = (of[0][0], 3 * of[0][1]), carray(ins[1], _PARAMETERS, np.float32)
    normalise_rows(carray(ins[0], shape, np.uint8), carray(outs[0], shape, np.float32), given[2:5], given[5:8])


def _run_slots(outs: Any, to: Any, _od: Any, _no: Any, ins: Any, of: Any, _id: Any, _ni: Any) -> None:
    shape, slots = (of[0][0], of[0][1], 3), of[1][0]
    out = carray(outs[0], shape, np.uint8)
    out[:] = carray(ins[0], shape, np.uint8)
    run_slots(out, carray(ins[1], (slots,), np.int32), carray(ins[2], (slots, of[2][1]), np.float32))


def _blend(outs: Any, to: Any, _od: Any, _no: Any, ins: Any, of: Any, _id: Any, _ni: Any) -> None:
    count = of[0][0] * of[0][1] * 3
    image, partner = carray(ins[0], count, np.uint8), carray(ins[1], count, np.uint8)
    blend(image, partner, carray(ins[2], 1, np.float32)[0], carray(outs[0], count, np.uint8))
