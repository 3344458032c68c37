"""GPU augmentation without a GPU: kernels are interpreted and compiled for three architectures, launches checked."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from resolute.pipeline.plan.augment_params import used_ops
from resolute.pipeline.plan.stage import Augment
from tests import ROOT
from tests.support.kernel_resources import CAPABILITIES, compiled, launches, over_budget, specialization, variants

EVERYTHING = used_ops(
    [
        Augment(
            policy="randaugment",
            num_ops=4,
            jitter=(0.4, 0.4, 0.4, 0.1),
            grey_prob=0.1,
            blur_prob=0.1,
            random_erasing_prob=0.1,
            mixup_alpha=0.2,
        )
    ]
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_interpreted_kernels_equal_the_cpu() -> None:
    """`interpreted_kernels.py`, in a process of its own, in Triton's interpreter."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "tests/pipeline/graph/interpreted_kernels.py",
            "-p",
            "no:cacheprovider",
            "--timeout=600",
        ],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert "skipped" not in done.stdout
    assert re.search(r"\d passed", done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_kernel_compiles_within_its_budget(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: int
) -> None:
    """bfloat16 too, which a T4 (7.5) has no instructions for; for newer GPUs, the largest kernels."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    every = capability == CAPABILITIES[0]
    measured = [
        {"kernel": name, "capability": capability, **compiled(launch, capability)}
        for name, launch in variants()
        if every or name == "apply_slot" or name.endswith("erases mixes")
    ]
    assert len(measured) == (1 + 4 * 2 * 2 if every else 1 + 4)
    assert all(row["registers"] >= 16 and row["code_bytes"] > 8_000 for row in measured)
    assert over_budget(measured) == []


SHAPES = [(1, 1), (1, 2), (3, 17), (7, 33), (16, 64), (1024, 224), (5, 225), (65_600, 32), (2, 8192), (1, 16_384)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8])
def test_no_kernel_is_compiled_after_the_warm_up(dtype: torch.dtype) -> None:
    """Whatever the batch size, resolution, number of slots and fields: Triton specialises integers that are 1 or
    divisible by 16, and pointers that are aligned."""
    known = {repr(specialization(launch, 90)) for launch in launches(EVERYTHING, dtype)}
    for n, res in SHAPES:
        others = launches(EVERYTHING, dtype, n=n, res=res)
        assert len(others) == len(EVERYTHING.slots) + 1
        assert {repr(specialization(launch, 90)) for launch in others} <= known, (n, res)


def test_the_programs_of_a_launch_cover_each_image_once() -> None:
    for n, res in SHAPES:
        for launch in launches(EVERYTHING, torch.float16, n=n, res=res):
            (programs,) = launch.grid
            arguments = dict(zip(launch.kernel.arg_names, launch.args, strict=False))
            part = arguments.get("part", launch.options["BLOCK"])
            assert programs < 2**31  # CUDA's limit of the first dimension; 65 535 of the others
            assert programs == n * arguments["parts"]
            assert (arguments["parts"] - 1) * part < res * res <= arguments["parts"] * part
            assert 3 * arguments["parts"] * part < 2**31  # offsets within an image are 32-bit, those of images 64-bit
