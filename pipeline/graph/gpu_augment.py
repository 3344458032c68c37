"""`GpuAugment`: the last part of the GPU's path, from the resized images of DALI to a normalised batch of torch.

Triton kernels apply the policy, one launch per slot, and a last one erases, mixes and normalises into a new tensor.
They read DALI's memory in place. A CUDA event marks when they have read it; until then the memory is held, so that DALI
cannot reuse it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import sysconfig
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

from resolute import cuda
from resolute.errors import ResoluteError
from resolute.pipeline.graph.kernels.triton_augment import finish
from resolute.pipeline.graph.kernels.triton_slot import BLOCK, apply_slot
from resolute.pipeline.plan.augment_params import NOISE_PX, AugmentOps
from resolute.pipeline.plan.plan import BatchSpec
from resolute.pipeline.plan.rows import empty_rows, words_of

__all__ = ["GpuAugment", "Held"]

_PARTS = 8  # programs per image; why so few: those that need a histogram each read the complete image
# why no fusion: a * b + c is then rounded twice, as on the CPU
_OPTIONS = {"enable_fp_fusion": False, "num_warps": 4}


class Held:
    """Keeps objects, whose memory kernels read, until an event after these kernels has passed on the device.

    Within `reading(owner)`, kernels that read the memory of `owner` are launched on the current stream of `device`. At
    most `limit` objects are held: from then on, the host waits for the oldest one's event, so it cannot run ahead of
    the device by more than so many batches of DALI's memory. On a CPU, whose kernels run at once, nothing is held.
    """

    def __init__(self, device: torch.device, *, limit: int) -> None:
        self._device, self._limit = device, limit
        self._owners: deque[list[Any]] = deque()  # [owner, stream, event]; None for the event: not recorded yet

    def __len__(self) -> int:
        return len(self._owners)

    @contextlib.contextmanager
    def reading(self, owner: Any) -> Iterator[None]:
        """Hold `owner`; its event follows the kernels that the block launches, even if the block is interrupted."""
        if self._device.type != "cuda":
            yield
            return
        with cuda.device_guard(self._device):
            self._release()
            held = [owner, cuda.current_stream(self._device), None]
            self._owners.append(held)
            try:
                yield
            finally:
                self._event_of(held)

    def _release(self) -> None:
        """Let go of the objects that have been read; waits for the oldest if there are too many."""
        while self._owners:
            event = self._event_of(self._owners[0])
            if not event.query():
                if len(self._owners) < self._limit:
                    return
                event.synchronize()  # sync: the host is `limit` batches ahead, and each holds memory of DALI
            self._owners.popleft()

    def close(self) -> None:
        """Wait until all held objects have been read, and let go of them."""
        while self._owners:
            self._event_of(self._owners[0]).synchronize()  # sync: the graph ends, and its memory with it
            self._owners.popleft()

    def _event_of(self, held: list[Any]) -> Any:
        """The event of a held object, recorded now on its stream if it is not yet: later than all its kernels."""
        if held[2] is None:
            held[2] = cuda.record_event(self._device, timing=False, stream=held[1])
        return held[2]


class GpuAugment:
    """Applies the slots, erasing, mixing and normalisation of a run to its batches on the device."""

    def __init__(
        self,
        ops: AugmentOps,
        *,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        noise: np.ndarray[Any, Any],
        dtype: torch.dtype,
        device: torch.device,
        limit: int = 3,
        as_bytes: bool = False,
    ) -> None:
        """Copy the constants to the device.

        mean, std   of values in 0..1
        noise       (NOISE_PX, NOISE_PX, 3) uint8: the noise fill of erasing
        dtype       of normalised images
        as_bytes    return uint8 images that are not normalised; `normalise` does that later
        device      a CUDA device; a CPU for Triton's interpreter
        limit       batches of DALI's memory that are held at most

        Raises `ResoluteError` if Triton lacks what it needs to start on a CUDA device.
        """
        if device.type == "cuda":
            _check_build_tools()
        self._ops, self._dtype, self._device, self._as_bytes = ops, dtype, device, as_bytes
        self._held = Held(device, limit=limit)
        scales = [1 / (255 * s) for s in std] + [-m / s for m, s in zip(mean, std, strict=True)]
        self._scales = torch.tensor(scales, dtype=torch.float32, device=device)
        self._fill = torch.tensor([round(255 * m) for m in mean], dtype=torch.int32, device=device)
        assert noise.shape == (NOISE_PX, NOISE_PX, 3)
        self._noise = torch.from_numpy(noise).to(device)

    def warm_up(self) -> None:
        """Compile all kernels, for images of any size. Call this first."""
        images = torch.zeros((1, 1, 1, 3), dtype=torch.uint8, device=self._device)
        slots = len(self._ops.slots)
        out = self(images, torch.from_numpy(words_of(empty_rows(1, slots))), list(range(slots)))
        if self._as_bytes and self._dtype != torch.uint8:
            self.normalise(out)

    def close(self) -> None:
        """Wait until the device has read all images of DALI, and let go of them."""
        self._held.close()

    def rows(self, spec: BatchSpec) -> tuple[torch.Tensor, list[int]]:
        """(the rows of a batch, (N, words) int32 in pinned memory; the slots that any image of it uses).

        A run without operations, erasing and mixing needs no rows, and gets an array on the device that is not read.
        """
        if self._ops == AugmentOps():
            return self._fill[None], []
        words = words_of(spec.rows)
        rows = torch.empty(words.shape, dtype=torch.int32, pin_memory=self._device.type != "cpu")
        rows.numpy()[:] = words
        return rows, np.flatnonzero(spec.rows["kinds"].any(axis=0)).tolist()

    def __call__(self, images: Any, rows: torch.Tensor, busy: list[int]) -> torch.Tensor:
        """Augment and mix `images` (N, res, res, 3) uint8, and normalise them unless `as_bytes`; returns a new tensor.

        `images` is a tensor of DALI or torch, which is held until the device has read it. `rows` and `busy` come from
        the method `rows`. Runs asynchronously on the current stream.
        """
        with self._held.reading(images):
            source = _as_torch(images)
            n, side = source.shape[:2]
            rows = rows.to(self._device, non_blocking=True)
            part = triton.cdiv(triton.cdiv(side * side, _PARTS), BLOCK) * BLOCK
            parts = triton.cdiv(side * side, part)
            buffers = [torch.empty_like(source) for _ in busy[:2]]
            for turn, slot in enumerate(busy):
                augmented = buffers[turn % 2]
                apply_slot[(n * parts,)](
                    source,
                    augmented,
                    rows,
                    slot,
                    len(self._ops.slots),
                    rows.shape[1],
                    side,
                    part,
                    parts,
                    BLOCK=BLOCK,
                    **_OPTIONS,
                )
                source = augmented
            dtype = torch.uint8 if self._as_bytes else self._dtype
            return self._finished(source, rows, dtype, erases=self._ops.erasing, mixes=self._ops.mixing)

    def normalise(self, images: torch.Tensor) -> torch.Tensor:
        """Normalise `images` (N, res, res, 3) uint8, contiguous, which belong to torch; returns a new tensor."""
        with _on(self._device):
            return self._finished(images, self._fill[None], self._dtype, erases=False, mixes=False)

    def _finished(
        self, source: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype, *, erases: bool, mixes: bool
    ) -> torch.Tensor:
        """Launch the kernel `finish`; returns its output, a new tensor of `dtype`."""
        n, side = source.shape[:2]
        blocks = triton.cdiv(side * side, BLOCK)
        out = torch.empty(source.shape, dtype=dtype, device=self._device)
        finish[(n * blocks,)](
            source,
            out,
            rows,
            self._noise,
            self._fill,
            self._scales,
            rows.shape[1],
            side,
            blocks,
            ERASES=erases,
            MIXES=mixes,
            BLOCK=BLOCK,
            **_OPTIONS,
        )
        return out


def _on(device: torch.device) -> Any:
    """Context manager: a CUDA `device` is the current one."""
    return cuda.device_guard(device) if device.type == "cuda" else contextlib.nullcontext()


def _as_torch(images: Any) -> torch.Tensor:
    """A tensor on the memory of a DALI tensor, without a copy; a tensor of torch is returned as it is.

    Not by DLPack: when a DLPack tensor is deleted, a thread of DALI waits for the whole device, and
    keeps a core busy meanwhile (`dltensor.h` of DALI 2.4).
    """
    if isinstance(images, torch.Tensor):
        return images
    if hasattr(images, "__cuda_array_interface__"):
        device = torch.device("cuda", images.device_id())
        return torch.as_tensor(images, device=device)  # no sync: nothing is copied
    return torch.from_numpy(np.asarray(images))


def _check_build_tools() -> None:
    """Raise `ResoluteError` without a C compiler or Python's headers: Triton compiles a module in C at its first use.

    Not if that module is in Triton's cache.
    """
    if any(Path(triton.knobs.cache.dir).glob("*/cuda_utils*.so")):
        return
    # why these: as triton.runtime.build does
    cc = os.environ.get("CC")
    programs = ["gcc", "clang"] if cc is None else [cc]
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    headers = sysconfig.get_paths(scheme=scheme)["include"]
    if not any(map(shutil.which, programs)):
        raise ResoluteError(
            f"Triton: got {'no gcc or clang' if cc is None else f'CC={cc}, which is no program'}, expected a C "
            "compiler for a GPU; install one (Debian: apt install gcc)"
        )
    if not Path(headers, "Python.h").exists():
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        raise ResoluteError(
            f"Triton: got no Python.h in {headers}, expected the headers of this Python for a GPU; install "
            f"them (Debian: apt install {package})"
        )
