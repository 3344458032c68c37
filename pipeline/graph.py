"""What happens to the pixels? The one DALI graph of the run, for both backends.

Everything that varies is data: crop window, resolution, flips, augmentation, mixing and even the batch size come in
with each batch, so a stage change is just the next batch. Training and validation run through the same graph; what no
stage of the run uses is not built into it.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from nvidia.dali import fn, pipeline_def, types

from . import cpu, ops
from .draws import Features
from .plan import BatchSpec
from .reader import Pieces

__all__ = ["Graph"]

Device = Literal["cpu", "gpu"]
_INPUTS = {
    "jpeg": (types.UINT8, 1),
    "start": (types.INT32, 1),  # window in the stored image: y, x
    "shape": (types.INT32, 1),  # height, width
}
_CPU_INPUTS = {"canvas": (types.UINT8, 3), "parameters": (types.FLOAT, 1)}  # see `cpu`
_GPU_INPUTS = {
    "size": (types.FLOAT, 1),  # output height, width
    "roi": (types.FLOAT, 1),  # relative y0, x0, y1, x1 of the window; x0 > x1 mirrors, y0 > y1 turns upside down
}


class Graph:
    """A built pipeline, `pipe`, with one output: (N, res, res, 3) normalised images."""

    def __init__(
        self, *, batch_size: int, threads: int, device_id: int | None, decode: Device, depth: int,
        mean: tuple[float, ...], std: tuple[float, ...], half: bool, features: Features, largest_res: int,
    ) -> None:  # fmt: skip
        """`device_id` None is the CPU backend; the output is float32, or float16 if `half`, on a GPU only.

        `decode` "cpu" with a device decodes crops on the CPU and does all the rest on the GPU. `batch_size` and
        `largest_res` (px) are the largest of the run, `features` what it uses.
        """
        self._on_cpu, self._features, self._mean, self._std = device_id is None, features, mean, std
        # why: exec_dynamic: outputs own their memory, so a torch view of one stays valid for as long as it lives
        self.pipe = _graph(
            batch_size=batch_size, num_threads=threads, device_id=device_id, prefetch_queue_depth=depth,
            exec_dynamic=True, decode_device="mixed" if decode == "gpu" else "cpu", features=features,
            on_cpu=self._on_cpu, mean=mean, std=std, half=half, largest_res=largest_res,
        )  # fmt: skip
        self.pipe.build()

    def feed(self, spec: BatchSpec, jpegs: Pieces) -> None:
        """Hand one batch to the graph; the next run takes it.

        With decoding on the CPU `jpegs` are not copied: they must live until that run's output was taken.
        """
        n, windows = len(spec), spec.windows
        vflips = spec.draws.get("vflips", np.zeros(n, bool)).astype(bool)
        values: dict[str, Any] = {
            "jpeg": jpegs,
            "start": np.ascontiguousarray(windows[:, 1::-1]),
            "shape": np.ascontiguousarray(windows[:, :1:-1]),
            **ops.numbers(self._features, spec),
        }
        if self._on_cpu:
            values["canvas"] = cpu.canvas(n, spec.res)
            values["parameters"] = cpu.parameters(spec.flips, vflips, self._mean, self._std)
        else:
            roi = np.empty((n, 4), np.float32)
            roi[:] = (0, 0, 1, 1)
            roi[spec.flips, 1::2] = (1, 0)
            roi[vflips, 0::2] = (1, 0)
            values |= {"size": np.full((n, 2), spec.res, np.float32), "roi": roi}
        for name, value in values.items():
            self.pipe.feed_input(name, value)


@pipeline_def(enable_conditionals=True)
def _graph(
    decode_device: str, on_cpu: bool, features: Features, mean: tuple[float, ...], std: tuple[float, ...], half: bool,
    largest_res: int,
) -> Any:  # fmt: skip
    wanted = {**_INPUTS, **(_CPU_INPUTS if on_cpu else _GPU_INPUTS), **ops.inputs(features)}
    lent = {"jpeg"} if decode_device == "cpu" else set()
    given = {name: fn.external_source(name=name, dtype=kind, ndim=ndim, no_copy=name in lent)
             for name, (kind, ndim) in wanted.items()}  # fmt: skip
    images = fn.decoders.image_slice(
        given["jpeg"], start=given["start"], shape=given["shape"], axes=[0, 1], device=decode_device,
        output_type=types.RGB,
    )  # fmt: skip
    if on_cpu:
        plain = features == Features()  # why: with nothing in between, resize and normalise are one pass
        images = cpu.resized(images, given["canvas"], given["parameters"], normalise=plain)
        if plain:
            return images
    else:
        images = fn.resize(
            images.gpu(), size=given["size"], roi_start=given["roi"][:2], roi_end=given["roi"][2:], roi_relative=True,
            interp_type=types.INTERP_LINEAR, antialias=True,
        )  # fmt: skip
    images = ops.augmented(images, given, features, mean=mean, std=std, res=largest_res)
    if features.mixing:
        images = ops.mixed(images, given)
    if on_cpu:
        return cpu.normalised(images, given["parameters"])
    return fn.crop_mirror_normalize(
        images, mean=[255 * m for m in mean], std=[255 * s for s in std],
        dtype=types.FLOAT16 if half else types.FLOAT, output_layout="HWC",
    )  # fmt: skip
