"""Compiles every Triton kernel ahead of time for three GPU generations, and lists the resources that each uses.

Needs no GPU. The signatures, constants and specialisations are those of the launches of `GpuAugment`, recorded from
it. Per kernel and compute capability: registers and local memory per thread (which is where registers are spilled to),
and the size of the object code.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from resolute.pipeline.graph import gpu_augment
from resolute.pipeline.graph.gpu_augment import GpuAugment
from resolute.pipeline.plan.augment_params import NOISE_PX, AugmentOps

__all__ = ["CAPABILITIES", "Launch", "compiled", "launches", "over_budget", "specialization", "variants"]

CAPABILITIES = (75, 90, 100)
# Registers per thread. why these: loads take hundreds of cycles, during which other warps have to run. 96 registers
# leave 20 warps of a multiprocessor, 5 per scheduler, each with 12 independent loads. `finish` does little but load and
# store: 72 leave 28 warps with 10.5 KiB of loads in flight. An A100 (2 TB/s, 0.5 us a load, 108 multiprocessors) moves
# 9.3 KiB in that time, of which at most a third are loads.
_BUDGETS = {"apply_slot": 96, "finish": 72}


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch of a kernel; the tensors among its arguments are on the device "meta", without memory."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]  # compile-time constants and Triton's options


class _Recorder:
    """Stands in for a kernel of `gpu_augment` and records its launches."""

    def __init__(self, kernel: Any, recorded: list[Launch]) -> None:
        self.kernel, self.recorded = kernel, recorded

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def record(*args: Any, **options: Any) -> None:
            self.recorded.append(Launch(kernel=self.kernel, grid=grid, args=args, options=options))

        return record


def launches(ops: AugmentOps, dtype: torch.dtype, *, n: int = 1, res: int = 1) -> list[Launch]:
    """The launches of `GpuAugment` for a batch of `n` images of `res` px in which every slot is used."""
    recorded, meta = list[Launch](), torch.device("meta")
    with (
        mock.patch.object(gpu_augment, "apply_slot", _Recorder(gpu_augment.apply_slot, recorded)),
        mock.patch.object(gpu_augment, "finish", _Recorder(gpu_augment.finish, recorded)),
    ):
        noise = np.zeros((NOISE_PX, NOISE_PX, 3), np.uint8)
        kernels = GpuAugment(ops, mean=(0.5,) * 3, std=(0.2,) * 3, noise=noise, dtype=dtype, device=meta)
        images = torch.empty((n, res, res, 3), dtype=torch.uint8, device=meta)
        kernels(images, torch.empty((n, 1), dtype=torch.int32, device=meta), list(range(len(ops.slots))))
    return recorded


def variants() -> Iterator[tuple[str, Launch]]:
    """(name, launch) of everything that a run can launch: `apply_slot`, and `finish` for each dtype and feature."""
    slots = ("policy",)
    yield "apply_slot", launches(AugmentOps(slots=slots), torch.float32)[0]
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)
    for dtype, erases, mixes in itertools.product(dtypes, (False, True), (False, True)):
        ops = AugmentOps(slots=slots, erasing=erases, mixing=mixes)
        name = " ".join(["finish", str(dtype).removeprefix("torch."), *["erases"] * erases, *["mixes"] * mixes])
        yield name, launches(ops, dtype)[-1]


def specialization(launch: Launch, capability: int) -> tuple[Any, ...]:
    """Key of Triton's kernel cache: launches with equal keys share one compiled kernel."""
    kernel = launch.kernel
    backend = make_backend(GPUTarget("cuda", capability, 32))
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    options = {**launch.options, "debug": False, "instrumentation_mode": ""}  # as JITFunction.run
    bound, kinds, _ = binder(*launch.args, **options)
    parsed, signature, constants, attributes = kernel._pack_args(backend, options, bound, kinds, options)
    return signature, constants, attributes, parsed.__dict__


def compiled(launch: Launch, capability: int) -> dict[str, Any]:
    """Resources of a launch's object code for a compute capability.

    Keys: registers and local_bytes (spilled registers included) per thread, and code_bytes.
    """
    signature, constants, attributes, options = specialization(launch, capability)
    source = ASTSource(launch.kernel, signature, constants, attributes)
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        line = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    usage = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return {
        "registers": usage["REG"],
        "local_bytes": usage["STACK"] + usage["LOCAL"],
        "code_bytes": len(built.asm["cubin"]),
    }


def over_budget(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One line for each row of results whose kernel takes more than it should."""
    lines = []
    for row in rows:
        budget, where = _BUDGETS[row["kernel"].split()[0]], f"{row['kernel']} for {row['capability']}"
        if row["local_bytes"]:
            lines.append(f"{where}: got {row['local_bytes']} bytes of local memory per thread, expected 0: it spills")
        if row["registers"] > budget:
            lines.append(f"{where}: got {row['registers']} registers, expected at most {budget}")
    return lines
