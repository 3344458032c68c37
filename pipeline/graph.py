"""What happens to the pixels? The one DALI graph of the run, for both backends.

Everything that varies is data: crop window, resolution, flip, mixing and even the batch size come in with each
batch, so a stage change is just the next batch. Training and validation run through the same graph.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from nvidia.dali import Pipeline, fn, pipeline_def, types

from .plan import CUTMIX, MIXUP, BatchSpec

__all__ = ["build_graph", "feed"]

Device = Literal["cpu", "gpu"]
_INPUTS = {
    "jpeg": (types.UINT8, 1),
    "start": (types.INT32, 1),  # window in the stored image: y, x
    "shape": (types.INT32, 1),  # height, width
    "size": (types.FLOAT, 1),  # output height, width
    "roi": (types.FLOAT, 1),  # relative y0, x0, y1, x1 of the window; x0 > x1 mirrors
    "mode": (types.INT32, 0),
    "partner": (types.INT32, 0),
    "lam": (types.FLOAT, 0),
    "corners": (types.INT32, 2),  # pasted regions' corners y, x: the own image's, the partner's
    "extents": (types.INT32, 2),  # their heights and widths
}


def build_graph(
    *, batch_size: int, threads: int, device_id: int | None, decode: Device, depth: int,
    mean: tuple[float, ...], std: tuple[float, ...], half: bool, mixing: bool,
) -> Pipeline:  # fmt: skip
    """A built pipeline with one output: (N, res, res, 3) normalised images, float16 if `half` else float32.

    `device_id` None is the CPU backend. `decode` "cpu" with a device decodes crops on the CPU and does all the
    rest on the GPU. `batch_size` is the largest of the run, `mixing` whether any batch may be mixed.
    """
    # why: exec_dynamic: outputs own their memory, so a torch view of one stays valid for as long as it lives
    graph = _graph(
        batch_size=batch_size, num_threads=threads, device_id=device_id, prefetch_queue_depth=depth,
        exec_dynamic=True, decode_device="mixed" if decode == "gpu" else "cpu", mixing=mixing,
        to_gpu=device_id is not None and decode == "cpu", mean=[255 * m for m in mean],
        std=[255 * s for s in std], half=half,
    )  # fmt: skip
    graph.build()
    return graph


@pipeline_def(enable_conditionals=True)
def _graph(
    decode_device: str, to_gpu: bool, mixing: bool, mean: list[float], std: list[float], half: bool
) -> Any:
    given = {name: fn.external_source(name=name, dtype=kind, ndim=ndim) for name, (kind, ndim) in _INPUTS.items()
             if mixing or name not in _MIX_INPUTS}  # fmt: skip
    images = fn.decoders.image_slice(
        given["jpeg"], start=given["start"], shape=given["shape"], axes=[0, 1],
        device=decode_device, output_type=types.RGB,
    )  # fmt: skip
    if to_gpu:
        images = images.gpu()
    images = fn.resize(
        images, size=given["size"], roi_start=given["roi"][:2], roi_end=given["roi"][2:], roi_relative=True,
        interp_type=types.INTERP_LINEAR, antialias=True,
    )  # fmt: skip
    if mixing:  # noqa: SIM102  # this test is Python's, the next one DALI's
        # why: either all samples of a batch are mixed or none, so the permutation in this branch sees the whole batch
        if given["mode"] > 0:
            partner = fn.permute_batch(images, indices=given["partner"])
            if given["mode"] == MIXUP:
                lam = given["lam"]
                images = fn.cast(images * lam + partner * (1.0 - lam), dtype=types.UINT8)
            else:
                images = fn.multi_paste(
                    images, partner, in_anchors=given["corners"], out_anchors=given["corners"],
                    shapes=given["extents"],
                )  # fmt: skip
    return fn.crop_mirror_normalize(
        images, mean=mean, std=std, dtype=types.FLOAT16 if half else types.FLOAT, output_layout="HWC"
    )


_MIX_INPUTS = ("mode", "partner", "lam", "corners", "extents")


def feed(graph: Pipeline, spec: BatchSpec, jpegs: list[NDArray[np.uint8]], *, mixing: bool) -> None:
    """Hand one batch to the graph; the next run takes it."""
    n = len(spec)
    windows = spec.windows
    roi = np.empty((n, 4), np.float32)
    roi[:] = (0, 0, 1, 1)
    roi[spec.flips] = (0, 1, 1, 0)
    values: dict[str, Any] = {
        "jpeg": jpegs,
        "start": np.ascontiguousarray(windows[:, 1::-1]),
        "shape": np.ascontiguousarray(windows[:, :1:-1]),
        "size": np.full((n, 2), spec.res, np.float32),
        "roi": roi,
    }
    if mixing:
        corners = np.zeros((n, 2, 2), np.int32)
        extents = np.full((n, 2, 2), spec.res, np.int32)
        corners[:, 1] = spec.boxes[:, 1::-1]
        extents[:, 1] = spec.boxes[:, :1:-1]
        values |= {"mode": spec.modes, "partner": spec.partners, "lam": spec.lam,
                   "corners": corners, "extents": extents}  # fmt: skip
        assert set(np.unique(spec.modes)) <= {0, MIXUP, CUTMIX}
    for name, value in values.items():
        graph.feed_input(name, value)
