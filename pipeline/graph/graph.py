"""What happens to the pixels? The one DALI graph of the run, for both backends.

Everything that varies is data: crop window, resolution, flips, augmentation, mixing and even the batch size come in
with each batch, so a stage change is just the next batch. Training and validation run through the same graph; what no
stage of the run uses is not built into it.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali._autograph.pyct import loader as generated_code

from pipeline.graph.buffers import BufferPool
from pipeline.plan.plan import BatchSpec
from pipeline.plan.sampling import Features

from . import augment_nodes as ops
from . import cpu_nodes as cpu
from .kernels.pread import Pieces

__all__ = ["Graph"]

Device = Literal["cpu", "gpu"]
_INPUTS = {
    "jpeg": (types.UINT8, 1),
    "start": (types.INT32, 1),  # window in the stored image: y, x
    "shape": (types.INT32, 1),  # height, width
}
_CPU_INPUTS = {"parameters": (types.FLOAT, 1), "output": (types.INT64, 1)}  # see `cpu`
_GPU_INPUTS = {
    "size": (types.FLOAT, 1),  # output height, width
    "roi": (types.FLOAT, 1),  # relative y0, x0, y1, x1 of the window; x0 > x1 mirrors, y0 > y1 turns upside down
}
_load_source = generated_code.load_source


def _load_and_delete(source: str, delete_on_exit: bool) -> tuple[Any, str]:
    """As DALI's own function, but its temporary file is gone at once: a killed process never gets to its exit."""
    module, name = _load_source(source, False)
    if delete_on_exit:
        Path(name).unlink(missing_ok=True)
    return module, name


generated_code.load_source = _load_and_delete


class Graph:
    """A built pipeline: what is fed to it comes out as (N, res, res, 3) normalised images, in order."""

    def __init__(
        self, *, batch_size: int, threads: int, device_id: int | None, decode: Device, depth: int,
        mean: tuple[float, ...], std: tuple[float, ...], half: bool, features: Features, largest_res: int,
        largest_bytes: int,
    ) -> None:  # fmt: skip
        """`device_id` None is the CPU backend; the output is float32, or float16 if `half`, on a GPU only.

        `decode` "cpu" with a device decodes crops on the CPU and does all the rest on the GPU. `batch_size`,
        `largest_res` (px) and `largest_bytes` (of a batch as float32) are the largest of the run, `features` what it
        uses.
        """
        self._on_cpu, self._features, self._mean, self._std = device_id is None, features, mean, std
        self._depth, self._plain = depth, device_id is None and features == Features()
        # of each run under way what it reads in place; on a CPU, where it writes; on a GPU, numbers for the kernels
        self._under_way: deque[tuple[Pieces, NDArray[np.float32] | None, Any]] = deque()
        self._kernels = None
        if device_id is not None and ops.finishes_in_kernels(features):
            from .gpu_augment import GpuAugment  # why here: nothing else needs Triton

            self._kernels = GpuAugment(
                features, mean=mean, std=std, noise=ops.noise(mean, std), device=torch.device("cuda", device_id),
                dtype=torch.float16 if half else torch.float32,
            )  # fmt: skip
            self._kernels.warm_up()
            self._features = Features()  # of the graph itself
        # why 2 more than run at once: the consumer's, and the one that it had before
        self._buffers = BufferPool(nbytes=largest_bytes, keep=depth + 2) if self._on_cpu else None
        # why one thread more on a CPU: all wait for the last between two operators, and a core is idle meanwhile
        # why: exec_dynamic: outputs own their memory, so a torch view of one stays valid for as long as it lives
        self._pipe = _graph(
            batch_size=batch_size, num_threads=threads + self._on_cpu, device_id=device_id, prefetch_queue_depth=depth,
            exec_dynamic=True, decode_device="mixed" if decode == "gpu" else "cpu", features=features,
            on_cpu=self._on_cpu, mean=mean, std=std, half=half, largest_res=largest_res,
        )  # fmt: skip
        self._pipe.build()

    def prime(self, spec: BatchSpec, jpegs: Pieces) -> None:
        """Run a batch `depth` times, unseen: the first thing to do.

        DALI's first `schedule_run` starts so many runs at once; with the plan's largest batch its buffers get their
        final sizes, so that nothing grows at a stage change.
        """
        for _ in range(self._depth):
            self._feed(spec, jpegs)
        self._pipe.schedule_run()
        self.drain()

    def start(self, spec: BatchSpec, jpegs: Pieces) -> None:
        """Start to work on a batch; at most `depth` at a time."""
        self._feed(spec, jpegs)
        self._pipe.schedule_run()

    def take(self, spec: BatchSpec, stream: torch.cuda.Stream | None) -> torch.Tensor:
        """Images of the batch that was started first, which was `spec`; waits for it.

        On a GPU they are ordered after `stream`, not awaited. They own their memory or keep it lent.
        """
        (found,) = self._pipe.share_outputs(cuda_stream=stream)
        _, out, numbers = self._under_way.popleft()
        if out is None:
            images = torch.from_dlpack(found.as_tensor())
            whole = tuple(images.shape) == (len(spec), spec.res, spec.res, 3)
        else:
            images = torch.from_numpy(out)
            whole = bool((np.asarray(found.as_tensor()) == spec.index).all())
        self._pipe.release_outputs()
        if not whole:  # DALI issue 5222: never train on another batch's size
            raise RuntimeError(f"batch {spec.index}: DALI returned another one, expected {len(spec)} at {spec.res} px")
        return images if self._kernels is None else self._kernels(images, *numbers)

    def drain(self) -> None:
        """Wait for all batches that were started, and forget them."""
        while self._under_way:
            self._pipe.share_outputs()
            self._pipe.release_outputs()
            self._under_way.popleft()

    def close(self) -> None:
        """End DALI's threads. why not by leaving it to Python: what runs still reads and writes memory of ours."""
        self.__dict__.pop("_pipe", None)
        self._under_way.clear()

    def _feed(self, spec: BatchSpec, jpegs: Pieces) -> None:
        n, crops = len(spec), spec.crops
        vflips = spec.augment_params.get("vflips", np.zeros(n, bool)).astype(bool)
        values: dict[str, Any] = {
            "jpeg": jpegs,
            "start": np.ascontiguousarray(crops[:, 1::-1]),
            "shape": np.ascontiguousarray(crops[:, :1:-1]),
            **ops.graph_inputs(self._features, spec),
        }
        out = None
        if self._buffers is not None:
            out = self._buffers.take((n, spec.res, spec.res, 3))
            values["parameters"] = cpu.parameters(spec.flips, vflips, self._mean, self._std)
            values["output"] = cpu.output_pointers(out, spec.index)
            if not self._plain:
                values["output_shape"] = cpu.output_shape(n, spec.res)
        else:
            roi = np.empty((n, 4), np.float32)
            roi[:] = (0, 0, 1, 1)
            roi[spec.flips, 1::2] = (1, 0)
            roi[vflips, 0::2] = (1, 0)
            values |= {"size": np.full((n, 2), spec.res, np.float32), "roi": roi}
        for name, value in values.items():
            self._pipe.feed_input(name, value)
        numbers = None if self._kernels is None else self._kernels.pack(spec)
        self._under_way.append((jpegs, out, numbers))


@pipeline_def(enable_conditionals=True)
def _graph(
    decode_device: str, on_cpu: bool, features: Features, mean: tuple[float, ...], std: tuple[float, ...], half: bool,
    largest_res: int,
) -> Any:  # fmt: skip
    in_kernels = not on_cpu and ops.finishes_in_kernels(features)
    features = Features() if in_kernels else features
    plain = features == Features()  # why: on a CPU, with nothing in between, resize and normalise are one pass
    wanted = {**_INPUTS, **(_CPU_INPUTS if on_cpu else _GPU_INPUTS), **ops.input_types(features)}
    if on_cpu and not plain:
        wanted["output_shape"] = (types.UINT8, 3)
    lent = {"jpeg"} if decode_device == "cpu" else set()
    given = {name: fn.external_source(name=name, dtype=kind, ndim=ndim, no_copy=name in lent)
             for name, (kind, ndim) in wanted.items()}  # fmt: skip
    images = fn.decoders.image_slice(
        given["jpeg"], start=given["start"], shape=given["shape"], axes=[0, 1], device=decode_device,
        output_type=types.RGB,
        # why: nvJPEG's default repeats chroma samples, libjpeg-turbo's (CPU) interpolates: where images are decoded
        # must not change what the model is trained on
        jpeg_fancy_upsampling=True,
    )  # fmt: skip
    if on_cpu:
        if plain:
            return cpu.resize_normalize(images, given["parameters"], given["output"])
        images = cpu.resize_mirror(images, given["output_shape"], given["parameters"])
    else:
        images = fn.resize(
            images.gpu(), size=given["size"], roi_start=given["roi"][:2], roi_end=given["roi"][2:], roi_relative=True,
            interp_type=types.INTERP_LINEAR, antialias=True,
        )  # fmt: skip
        if in_kernels:
            return images
    images = ops.augmented(images, given, features, mean=mean, std=std, res=largest_res)
    if features.mixing:
        images = ops.mixed(images, given)
    if on_cpu:
        return cpu.normalize(images, given["parameters"], given["output"])
    return fn.crop_mirror_normalize(
        images, mean=[255 * m for m in mean], std=[255 * s for s in std],
        dtype=types.FLOAT16 if half else types.FLOAT, output_layout="HWC",
    )  # fmt: skip
