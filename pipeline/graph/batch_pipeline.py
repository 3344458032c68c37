"""`BatchPipeline`: the one DALI graph of a run, on CPU and GPU.

Everything that varies is input data: crop, resolution, flips, augmentation, mixing and even the batch size come with
each batch, so a stage change is just another batch. Training and validation share the graph. On a CPU it does
everything (`cpu_nodes.py`); for a GPU it decodes and resizes, and Triton kernels do the rest (`gpu_augment.py`). Every
encoded image and every row of parameters carries the number of its batch to an output, where it is checked.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from nvidia.dali import Pipeline, fn, types

from resolute.errors import ResoluteError
from resolute.pipeline.graph.buffers import BufferPool
from resolute.pipeline.plan.augment_params import AugmentOps, erase_noise
from resolute.pipeline.plan.plan import BatchSpec
from resolute.pipeline.plan.rows import words_of

from . import cpu_nodes as cpu
from .kernels.jpeg.memory import Decoders
from .kernels.pread import EncodedImages

__all__ = ["BatchPipeline", "Transform"]

Device = Literal["cpu", "gpu"]
Transform = Callable[[torch.Tensor, BatchSpec], torch.Tensor]  # see `Loader`
# How DALI words it. Source: `CUDABadAlloc` and `CUDAError` in `dali/core/cuda_error.h` of DALI 2.4
_NO_GPU_MEMORY = ("CUDA allocation failed", "bytes on device", "cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY")


class BatchPipeline:
    """A built DALI pipeline: turns encoded images into normalised (N, res, res, 3) batches, in order.

    in_step  False after an exception in a method (Ctrl-C, an error of an operator): then DALI and this object may
             disagree on what is fed, scheduled or returned, and only `build` and `close` may be called
    transform_s  time that `take` has spent in `transform` and in the normalisation after it
    """

    in_step: bool
    transform_s: float

    def __init__(
        self,
        *,
        batch_size: int,
        num_threads: int,
        device_id: int | None,
        decode: Device,
        batches_ahead: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        dtype: torch.dtype,
        ops: AugmentOps,
        largest_pixels: int,
        hw_decoder_load: float = 1.0,
        transform: Transform | None = None,
    ) -> None:
        """Build the graph.

        batch_size     largest of the run; so is `largest_pixels`, of a batch
        num_threads    CPU threads of DALI (one more on the CPU backend)
        device_id      CUDA device; None: the CPU backend
        decode         with a CUDA device: "cpu" decodes the crops on the CPU, "gpu" whole images on the GPU
        batches_ahead  batches in flight
        mean, std      of values in 0..1
        dtype          of the output; uint8: not normalised
        ops            the operations that the run uses
        hw_decoder_load  fraction of the images that a GPU's JPEG engine decodes, 0 to 1; decode "gpu" only
        transform      see `Loader`
        """
        self._on_cpu, self._dtype, self._transform = device_id is None, dtype, transform
        self._batches_ahead = batches_ahead
        self.transform_s = 0.0
        as_bytes = transform is not None or dtype == torch.uint8
        # of each batch in flight: memory that its run uses; on a CPU, its output; on a GPU, parameters of the kernels
        self._in_flight: deque[tuple[Any, NDArray[Any] | None, Any]] = deque()
        self._pipe: Any = None
        noise = erase_noise(mean, std)
        self._gpu_augment: Any = None  # on a GPU, a `GpuAugment`
        # why one thread more on a CPU: between two operators threads wait for the slowest, which leaves a core idle
        threads = num_threads + self._on_cpu
        self._decoders = Decoders(threads) if decode == "cpu" else None
        self._constants = cpu.RunConstants(mean=mean, std=std, noise=noise, decoders=self._decoders)
        if device_id is None:
            # why 2 more than in flight: the consumer's batch and the one before it
            self._out_dtype: Any = np.uint8 if as_bytes else np.float32
            self._buffers = BufferPool(nbytes=(3 if as_bytes else 12) * largest_pixels, count=batches_ahead + 2)
            # images before normalisation: only runs that change them then need these
            self._raw = BufferPool(nbytes=3 * largest_pixels, count=batches_ahead) if ops != AugmentOps() else None
            # those of 16 bits, and those that are normalised after `transform`
            self._rounded = BufferPool(nbytes=6 * largest_pixels, count=2 if dtype.itemsize == 2 else 0)
            self._floats = BufferPool(nbytes=12 * largest_pixels, count=2 if as_bytes and dtype != torch.uint8 else 0)
        else:
            from .gpu_augment import GpuAugment  # why here: only this needs Triton

            self._gpu_augment = GpuAugment(
                ops,
                mean=mean,
                std=std,
                noise=noise,
                device=torch.device("cuda", device_id),
                dtype=dtype,
                limit=batches_ahead,
                as_bytes=as_bytes,
            )
            self._gpu_augment.warm_up()
        # why exec_dynamic: outputs own their memory, so one stays valid while a reference to it lives
        self._define = partial(
            _graph,
            batch_size=batch_size,
            num_threads=threads,
            device_id=device_id,
            prefetch_queue_depth=batches_ahead,
            exec_dynamic=True,
            decode_device="mixed" if decode == "gpu" else "cpu",
            mixing=ops.mixing,
            on_cpu=self._on_cpu,
            hw_decoder_load=hw_decoder_load,
        )
        self.build()

    def build(self) -> None:
        """Build the pipeline, in place of an earlier one, whose batches in flight are discarded. Then call `prime`."""
        self.in_step = False
        self.close()
        with _memory_errors():
            self._pipe = self._define()
            self._pipe.build()

    def prime(self, spec: BatchSpec, jpegs: EncodedImages, nbytes: NDArray[np.int64]) -> None:
        """Run a batch `batches_ahead` times and discard the results. Call this first, with the plan's largest batch.

        DALI's first `schedule_run` starts that many runs; they give its buffers their final sizes, so that nothing is
        reallocated at a stage change.
        """
        for _ in range(self._batches_ahead):
            self._feed(spec, jpegs, nbytes)
        with _memory_errors():
            self._pipe.schedule_run()
        self.in_step = True
        self.drain()

    def start(self, spec: BatchSpec, jpegs: EncodedImages, nbytes: NDArray[np.int64]) -> None:
        """Start a batch, whose encoded images have `nbytes` (N,). At most `batches_ahead` are in flight."""
        self.in_step = False
        self._feed(spec, jpegs, nbytes)
        self._pipe.schedule_run()
        self.in_step = True

    def take(self, spec: BatchSpec, stream: torch.cuda.Stream | None) -> torch.Tensor:
        """Return the oldest batch in flight, which must be `spec`: (N, res, res, 3) images. Blocks.

        On a GPU the host does not wait for the images; they are ordered on `stream`, the current one. Their memory
        stays valid as long as the tensor lives. Raises RuntimeError if DALI returned another batch.
        """
        self.in_step = False
        with _memory_errors():
            *outputs, tags = self._pipe.share_outputs(cuda_stream=stream)
        _, out, kernel_params = self._in_flight.popleft()
        images: Any = outputs[0].as_tensor() if out is None else out
        batches = np.asarray(tags.as_tensor())
        self._pipe.release_outputs()
        # why: DALI issue 5222, it may return a batch of another size
        shape = images.shape() if out is None else images.shape
        same_shape = tuple(shape) == (len(spec), spec.res, spec.res, 3) and len(batches) == len(spec)
        if not same_shape or (batches != spec.index).any():
            raise RuntimeError(f"batch {spec.index}: DALI returned another one, expected {len(spec)} at {spec.res} px")
        self.in_step = True
        images = torch.from_numpy(images) if self._gpu_augment is None else self._gpu_augment(images, *kernel_params)
        if self._transform is not None:
            began = time.perf_counter()
            images = self._normalised(_transformed(self._transform, images, spec))
            self.transform_s += time.perf_counter() - began
        if self._on_cpu and images.dtype != self._dtype:
            rounded = torch.from_numpy(self._rounded.take(tuple(images.shape), np.int16)).view(self._dtype)
            return rounded.copy_(images)  # no sync: on a CPU
        return images

    def _normalised(self, images: torch.Tensor) -> torch.Tensor:
        """`images` (N, res, res, 3) uint8, normalised unless the run's images are uint8."""
        if self._dtype == torch.uint8:
            return images
        if self._gpu_augment is not None:
            return self._gpu_augment.normalise(images)
        out = self._floats.take(tuple(images.shape))
        self._constants.normalise(images.numpy(), out)
        return torch.from_numpy(out)

    def drain(self) -> None:
        """Wait for all batches in flight and discard them."""
        self.in_step = False
        while self._in_flight:
            with _memory_errors():
                self._pipe.share_outputs()
            self._pipe.release_outputs()
            self._in_flight.popleft()
        self.in_step = True

    def close(self) -> None:
        """End DALI's threads, then free the buffers that running batches use, once a GPU has read what it was given."""
        try:
            if self._gpu_augment is not None:
                self._gpu_augment.close()
        finally:
            if self._pipe is not None:
                # why explicitly: while anything refers to the pipeline, such as a traceback, it would go on
                self._pipe._shutdown()
                self._pipe = None
            self._in_flight.clear()

    def _feed(self, spec: BatchSpec, jpegs: EncodedImages, nbytes: NDArray[np.int64]) -> None:
        out = raw = kernel_params = None
        if self._gpu_augment is None:
            shape = len(spec), spec.res, spec.res, 3
            out = self._buffers.take(shape, self._out_dtype)
            raw = self._raw.take(shape, np.uint8) if self._raw else None
        else:
            kernel_params = self._gpu_augment.rows(spec)
        # why no copy: DALI makes one when it is fed
        words = words_of(spec.rows)
        self._constants.complete(words, nbytes, out, raw)
        # why before feeding: DALI does not copy the images, and an interrupt in between must not free them
        self._in_flight.append(((jpegs, raw), out, kernel_params))
        self._pipe.feed_input("jpeg", jpegs)
        self._pipe.feed_input("rows", words)


def _transformed(transform: Transform, images: torch.Tensor, spec: BatchSpec) -> torch.Tensor:
    """`images` (N, res, res, 3) uint8 after the user's transform. Raises `ResoluteError` if it returns others."""
    view = images.permute(0, 3, 1, 2)
    got = transform(view, spec)
    if _tensor(got) != _tensor(view):
        raise ResoluteError(f"transform: got {_tensor(got)}, expected {_tensor(view)}, as it was given; correct it")
    return got.permute(0, 2, 3, 1).contiguous()


def _tensor(value: Any) -> str:
    """Describe a value in an error message."""
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"a {str(value.dtype).removeprefix('torch.')} tensor {tuple(value.shape)} on {value.device}"


@contextlib.contextmanager
def _memory_errors() -> Iterator[None]:
    """Raises `torch.OutOfMemoryError`, as torch would, where DALI says that the GPU's memory is exhausted."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        line = next((line for line in str(error).splitlines() if any(text in line for text in _NO_GPU_MEMORY)), None)
        if line is None:
            raise
        raise torch.OutOfMemoryError(f"CUDA out of memory in DALI: {line.strip()}") from error


def _graph(*, decode_device: str, on_cpu: bool, mixing: bool, hw_decoder_load: float = 1.0, **settings: Any) -> Any:
    """The pipeline of a run, not yet built; `settings` are those of DALI's `Pipeline`.

    Outputs on a CPU: the number of the batch that came with each image, (1,) int64; the images are written to the
    addresses in the input "rows". For a GPU: the resized images, (res, res, 3) uint8, and the numbers, (2,) int32.
    """
    pipe = Pipeline(**settings)
    with pipe:
        # why so few inputs: each costs the consumer's thread about 0.17 ms per batch of 1 024
        jpegs = fn.external_source(name="jpeg", dtype=types.UINT8, ndim=1, no_copy=True)
        rows = fn.external_source(name="rows", dtype=types.INT32, ndim=1)
        if on_cpu:
            pipe.set_outputs(_on_cpu(jpegs, rows, mixing))
        else:
            pipe.set_outputs(*_for_gpu(jpegs, rows, decode_device, hw_decoder_load))
    return pipe


_conditional: Any = vars(fn)["_conditional"]  # why like this: DALI's type hints lack it
_OPTIONS: dict[str, Any] = {
    "output_type": types.RGB,
    # why: nvJPEG by default repeats chroma samples while libjpeg-turbo (CPU) interpolates; the decoder must not change
    # what the model is trained on
    "jpeg_fancy_upsampling": True,
}


def _on_cpu(jpegs: Any, rows: Any, mixing: bool) -> Any:
    """Define the nodes of the graph on a CPU; returns its output."""

    def decode_rest(jpegs: Any, rows: Any) -> Any:
        start, shape = cpu.crop(rows)
        images = fn.decoders.image_slice(jpegs, device="cpu", start=start, shape=shape, axes=[1, 0], **_OPTIONS)
        return cpu.augment_decoded(images, rows, jpegs)

    tags, declined = cpu.augment(rows, jpegs)
    tags = _with_declined(tags, declined, decode_rest, jpegs, rows)
    return cpu.mix(tags, rows) if mixing else tags


def _for_gpu(jpegs: Any, rows: Any, decode_device: str, hw_decoder_load: float) -> tuple[Any, Any]:
    """Define the nodes of the graph for a GPU; returns its outputs."""
    on_gpu = decode_device == "mixed"
    start, shape, tags, roi_start, roi_end, size = cpu.gpu_arguments(rows, jpegs, for_decode=not on_gpu)
    if on_gpu:
        # why: libjpeg-turbo ignores what follows an image; that GPU decoders do is documented nowhere. This copy, made
        # by DALI's threads, also ends the use of the fed memory, which a GPU may read after the batch was returned
        jpegs = fn.slice(jpegs, start=0, shape=cpu.encoded_bytes(rows), axes=[0])
        # why not image_slice: in nvImageCodec 0.9, decoding a region on a GPU fails or crashes (its issue 55)
        images = fn.decoders.image(jpegs, device="mixed", hw_decoder_load=hw_decoder_load, **_OPTIONS)
        images = fn.slice(images, start=start, shape=shape, axes=[0, 1])
    else:

        def decode_rest(jpegs: Any, start: Any, shape: Any) -> Any:
            region = {"start": start, "shape": shape[0:2], "axes": [0, 1]}
            return fn.decoders.image_slice(jpegs, device="cpu", **region, **_OPTIONS)

        images, declined = cpu.decode(fn.zeros(shape=shape, dtype=types.UINT8), rows, jpegs)
        images = _with_declined(images, declined, decode_rest, jpegs, start, shape)
    images = fn.resize(
        images.gpu(),
        size=size,
        roi_start=roi_start,
        roi_end=roi_end,
        roi_relative=True,
        interp_type=types.INTERP_LINEAR,
        antialias=True,
    )
    return images, tags


def _with_declined(node: Any, declined: Any, decode_rest: Callable[..., Any], *inputs: Any) -> Any:
    """`node`, with the samples of `decode_rest(*inputs)` where they are `declined`; it gets these samples only.

    why not `if declined:` in the graph: for that DALI rewrites the source of all functions, 0.25 s at each start.
    """
    rest = _conditional.split(node, predicate=declined)[1]
    chosen = decode_rest(*(_conditional.split(each, predicate=declined)[0] for each in inputs))
    return _conditional.merge(chosen, rest, predicate=declined)
