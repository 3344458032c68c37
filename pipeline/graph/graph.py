"""`Graph`: the one DALI graph of a run, on CPU and GPU.

Everything that varies is input data: crop, resolution, flips, augmentation, mixing and even the batch size come with
each batch, so a stage change is just another batch. Training and validation share the graph. Operations that no stage
uses are not part of it.
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
from .kernels.pread import EncodedImages

__all__ = ["Graph"]

Device = Literal["cpu", "gpu"]
_INPUTS = {
    "jpeg": (types.UINT8, 1),
    "start": (types.INT32, 1),  # corner of the crop in the stored image: y, x
    "shape": (types.INT32, 1),  # size of the crop: height, width
}
_CPU_INPUTS = {"parameters": (types.FLOAT, 1), "output": (types.INT64, 1)}  # see cpu_nodes.py
_GPU_INPUTS = {
    "size": (types.FLOAT, 1),  # output height, width
    "roi": (types.FLOAT, 1),  # relative y0, x0, y1, x1 of the crop; x0 > x1 flips horizontally, y0 > y1 vertically
}
_load_source = generated_code.load_source


def _load_and_delete(source: str, delete_on_exit: bool) -> tuple[Any, str]:
    """DALI's own function, but it deletes its temporary file at once: a killed process would leave it behind."""
    module, name = _load_source(source, False)
    if delete_on_exit:
        Path(name).unlink(missing_ok=True)
    return module, name


generated_code.load_source = _load_and_delete


class Graph:
    """A built DALI pipeline: turns encoded images into normalised (N, res, res, 3) batches, in order."""

    def __init__(
        self, *, batch_size: int, threads: int, device_id: int | None, decode: Device, depth: int,
        mean: tuple[float, ...], std: tuple[float, ...], half: bool, features: Features, largest_res: int,
        largest_bytes: int,
    ) -> None:  # fmt: skip
        """Build the graph.

        batch_size     largest of the run; so are `largest_res` (px) and `largest_bytes` (of a float32 batch)
        threads        CPU threads of DALI (one more on the CPU backend)
        device_id      CUDA device; None: the CPU backend
        decode         "cpu" with a CUDA device: decode crops on the CPU, do the rest on the GPU
        depth          batches in flight
        mean, std      of values in 0..1
        half           float16 instead of float32 output, GPU only
        features       the operations that the run uses
        """
        self._on_cpu, self._features, self._mean, self._std = device_id is None, features, mean, std
        self._depth, self._resize_only = depth, device_id is None and features == Features()
        # of each batch in flight: encoded images; on a CPU, its output; on a GPU, parameters of the kernels
        self._in_flight: deque[tuple[EncodedImages, NDArray[np.float32] | None, Any]] = deque()
        self._kernels = None
        if device_id is not None and ops.uses_triton(features):
            from .gpu_augment import GpuAugment  # why here: only this needs Triton

            self._kernels = GpuAugment(
                features, mean=mean, std=std, noise=ops.erase_noise(mean, std), device=torch.device("cuda", device_id),
                dtype=torch.float16 if half else torch.float32,
            )  # fmt: skip
            self._kernels.warm_up()
            self._features = Features()  # the graph itself then has none
        # why 2 more than in flight: the consumer's batch and the one before it
        self._buffers = BufferPool(nbytes=largest_bytes, count=depth + 2) if self._on_cpu else None
        # why one thread more on a CPU: between two operators threads wait for the slowest, which leaves a core idle
        # why exec_dynamic: outputs own their memory, so a torch view of one stays valid while it lives
        self._pipe = _graph(
            batch_size=batch_size, num_threads=threads + self._on_cpu, device_id=device_id, prefetch_queue_depth=depth,
            exec_dynamic=True, decode_device="mixed" if decode == "gpu" else "cpu", features=features,
            on_cpu=self._on_cpu, mean=mean, std=std, half=half, largest_res=largest_res,
        )  # fmt: skip
        self._pipe.build()

    def prime(self, spec: BatchSpec, jpegs: EncodedImages) -> None:
        """Run a batch `depth` times and discard the results. Call this first, with the plan's largest batch.

        DALI's first `schedule_run` starts that many runs; they give its buffers their final sizes, so that nothing is
        reallocated at a stage change.
        """
        for _ in range(self._depth):
            self._feed(spec, jpegs)
        self._pipe.schedule_run()
        self.drain()

    def start(self, spec: BatchSpec, jpegs: EncodedImages) -> None:
        """Start to process a batch; at most `depth` may be in flight."""
        self._feed(spec, jpegs)
        self._pipe.schedule_run()

    def take(self, spec: BatchSpec, stream: torch.cuda.Stream | None) -> torch.Tensor:
        """Return the oldest batch in flight, which must be `spec`: (N, res, res, 3) normalised images. Blocks.

        On a GPU the host does not wait for the images; they are ordered on `stream`. Their memory stays valid as long
        as the tensor lives. Raises RuntimeError if DALI returned another batch.
        """
        (output,) = self._pipe.share_outputs(cuda_stream=stream)
        _, out, kernel_params = self._in_flight.popleft()
        if out is None:
            images = torch.from_dlpack(output.as_tensor())
            matches = tuple(images.shape) == (len(spec), spec.res, spec.res, 3)
        else:
            images = torch.from_numpy(out)
            matches = bool((np.asarray(output.as_tensor()) == spec.index).all())
        self._pipe.release_outputs()
        if not matches:  # why: DALI issue 5222, it may return a batch of another size
            raise RuntimeError(f"batch {spec.index}: DALI returned another one, expected {len(spec)} at {spec.res} px")
        return images if self._kernels is None else self._kernels(images, *kernel_params)

    def drain(self) -> None:
        """Wait for all batches in flight and discard them."""
        while self._in_flight:
            self._pipe.share_outputs()
            self._pipe.release_outputs()
            self._in_flight.popleft()

    def close(self) -> None:
        """End DALI's threads. why explicitly: running batches still use buffers of this object."""
        self.__dict__.pop("_pipe", None)
        self._in_flight.clear()

    def _feed(self, spec: BatchSpec, jpegs: EncodedImages) -> None:
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
            if not self._resize_only:
                values["output_shape"] = cpu.output_shape(n, spec.res)
        else:
            roi = np.empty((n, 4), np.float32)
            roi[:] = (0, 0, 1, 1)
            roi[spec.flips, 1::2] = (1, 0)
            roi[vflips, 0::2] = (1, 0)
            values |= {"size": np.full((n, 2), spec.res, np.float32), "roi": roi}
        for name, value in values.items():
            self._pipe.feed_input(name, value)
        kernel_params = None if self._kernels is None else self._kernels.pack(spec)
        self._in_flight.append((jpegs, out, kernel_params))


@pipeline_def(enable_conditionals=True)
def _graph(
    decode_device: str, on_cpu: bool, features: Features, mean: tuple[float, ...], std: tuple[float, ...], half: bool,
    largest_res: int,
) -> Any:  # fmt: skip
    ends_with_resize = not on_cpu and ops.uses_triton(features)
    features = Features() if ends_with_resize else features
    resize_only = features == Features()  # on a CPU, resize and normalise are then one pass
    sources = {**_INPUTS, **(_CPU_INPUTS if on_cpu else _GPU_INPUTS), **ops.input_types(features)}
    if on_cpu and not resize_only:
        sources["output_shape"] = (types.UINT8, 3)
    not_copied = {"jpeg"} if decode_device == "cpu" else set()
    inputs = {name: fn.external_source(name=name, dtype=kind, ndim=ndim, no_copy=name in not_copied)
              for name, (kind, ndim) in sources.items()}  # fmt: skip
    images = fn.decoders.image_slice(
        inputs["jpeg"], start=inputs["start"], shape=inputs["shape"], axes=[0, 1], device=decode_device,
        output_type=types.RGB,
        # why: nvJPEG by default repeats chroma samples while libjpeg-turbo (CPU) interpolates; the decoder must not
        # change what the model is trained on
        jpeg_fancy_upsampling=True,
    )  # fmt: skip
    if on_cpu:
        if resize_only:
            return cpu.resize_normalize(images, inputs["parameters"], inputs["output"])
        images = cpu.resize_mirror(images, inputs["output_shape"], inputs["parameters"])
    else:
        images = fn.resize(
            images.gpu(), size=inputs["size"], roi_start=inputs["roi"][:2], roi_end=inputs["roi"][2:],
            roi_relative=True, interp_type=types.INTERP_LINEAR, antialias=True,
        )  # fmt: skip
        if ends_with_resize:
            return images
    images = ops.augment(images, inputs, features, mean=mean, std=std, res=largest_res)
    if features.mixing:
        images = ops.mix(images, inputs)
    if on_cpu:
        return cpu.normalize(images, inputs["parameters"], inputs["output"])
    return fn.crop_mirror_normalize(
        images, mean=[255 * m for m in mean], std=[255 * s for s in std],
        dtype=types.FLOAT16 if half else types.FLOAT, output_layout="HWC",
    )  # fmt: skip
