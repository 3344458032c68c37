"""Host side of GPU augmentation: packs a batch's parameters into one array and launches the Triton kernels.

A batch takes at most one launch per slot plus one, whatever the policy draws. The host never waits for the device.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

from resolute.errors import ResoluteError
from resolute.pipeline import cuda
from resolute.pipeline.graph.kernels.triton_finish import ERASE_FIELDS, MIX_FIELDS, finish
from resolute.pipeline.graph.kernels.triton_slot import BLOCK, apply_slot
from resolute.pipeline.plan import autoaugment as p
from resolute.pipeline.plan.plan import BatchSpec
from resolute.pipeline.plan.sampling import CUTMIX, NOISE_PX, Features, pack_ops

__all__ = ["GpuAugment"]

_PARTS = 8  # programs per image; why so few: those that need a histogram each read the complete image
# why no fusion: a * b + c is then rounded twice, as on the CPU
_OPTIONS = {"enable_fp_fusion": False, "num_warps": 4}


class GpuAugment:
    """Applies the slots, erasing, mixing and normalisation of a run to its batches on the device."""

    def __init__(
        self, features: Features, *, mean: tuple[float, ...], std: tuple[float, ...], noise: np.ndarray[Any, Any],
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        """Copy the constants to the device.

        mean, std   of values in 0..1
        noise       (NOISE_PX, NOISE_PX, 3) uint8: the noise fill of erasing
        dtype       of the output
        device      a CUDA device; a CPU for Triton's interpreter

        Raises `ResoluteError` if Triton lacks what it needs to start on a CUDA device.
        """
        if device.type == "cuda":
            _check_build_tools()
        self._features, self._dtype, self._device = features, dtype, device
        self._slots = len(features.slots)
        self._erase = (1 + p.VALUES) * self._slots
        self._erases, self._mixes = bool(features.fills), features.mixing
        self._mix = self._erase + ERASE_FIELDS * self._erases
        self._fields = self._mix + MIX_FIELDS * self._mixes
        scales = [1 / (255 * s) for s in std] + [-m / s for m, s in zip(mean, std, strict=True)]
        self._scales = torch.tensor(scales, dtype=torch.float32, device=device)
        self._fill = torch.tensor([round(255 * m) for m in mean], dtype=torch.int32, device=device)
        assert noise.shape == (NOISE_PX, NOISE_PX, 3)
        self._noise = torch.from_numpy(noise).to(device)

    def warm_up(self) -> None:
        """Compile both kernels, for images of any size. Call this first."""
        images = torch.zeros((1, 1, 1, 3), dtype=torch.uint8, device=self._device)
        packed = torch.zeros((1, self._fields), dtype=torch.int32, pin_memory=self._device.type != "cpu")
        self(images, packed, list(range(self._slots)))

    def pack(self, spec: BatchSpec) -> tuple[torch.Tensor, list[int]]:
        """(parameters of a batch, (N, fields) int32 in pinned memory; the slots that any image of it uses)."""
        n, features = len(spec), self._features
        packed = torch.empty((n, self._fields), dtype=torch.int32, pin_memory=self._device.type != "cpu")
        rows, busy = packed.numpy(), list[int]()
        if self._slots:
            kinds, values = pack_ops(spec.augment_params, features.slots, n)
            rows[:, : self._slots] = kinds
            rows[:, self._slots : self._erase] = values.view(np.int32).reshape(n, -1)
            busy = np.flatnonzero((kinds != p.NONE).any(axis=0)).tolist()
        if features.fills:
            erase = rows[:, self._erase : self._mix]
            erase[:, :4] = spec.augment_params.get("erase_boxes", 0)
            erase[:, 4:] = spec.augment_params.get("erase_from", 0)
        if features.mixing:
            mix = rows[:, self._mix :]
            mix[:, 0], mix[:, 1], mix[:, 2] = spec.modes, spec.partners, spec.lam.view(np.int32)
            mix[:, 3:] = np.where((spec.modes == CUTMIX)[:, None], spec.boxes, 0)
        return packed, busy

    def __call__(self, images: torch.Tensor, packed: torch.Tensor, busy: list[int]) -> torch.Tensor:
        """Augment, mix and normalise `images` (N, res, res, 3) uint8; returns a new tensor of the run's dtype.

        Runs asynchronously on the current stream. `packed` and `busy` come from `pack`. The caller may release `images`
        before the device has read them: torch frees in the stream's order, and DALI frees the memory of a tensor that
        it lent by DLPack only after it has waited for the device (in a thread of its own; `dltensor.h` of DALI 2.4.0).
        """
        n, side = images.shape[:2]
        with cuda.on(self._device) if self._device.type == "cuda" else contextlib.nullcontext():
            params = packed.to(self._device, non_blocking=True)
            part = triton.cdiv(triton.cdiv(side * side, _PARTS), BLOCK) * BLOCK
            parts, blocks = triton.cdiv(side * side, part), triton.cdiv(side * side, BLOCK)
            buffers = [torch.empty_like(images) for _ in busy[:2]]
            for turn, slot in enumerate(busy):
                augmented = buffers[turn % 2]
                apply_slot[(n * parts,)](
                    images, augmented, params, slot, self._slots, self._fields, side, part, parts, BLOCK=BLOCK,
                    **_OPTIONS,
                )  # fmt: skip
                images = augmented
            out = torch.empty(images.shape, dtype=self._dtype, device=self._device)
            finish[(n * blocks,)](
                images, out, params, self._noise, self._fill, self._scales, self._fields, self._erase, self._mix,
                side, blocks, ERASES=self._erases, MIXES=self._mixes, BLOCK=BLOCK, **_OPTIONS,
            )  # fmt: skip
        return out


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
            "compiler to augment on a GPU; install one (Debian: apt install gcc)"
        )
    if not Path(headers, "Python.h").exists():
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        raise ResoluteError(
            f"Triton: got no Python.h in {headers}, expected the headers of this Python to augment on a GPU; install "
            f"them (Debian: apt install {package})"
        )
