"""Triton's kernels on a GPU against the CPU's compiled functions, on equal images, and under compute-sanitizer."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from resolute.pipeline.graph.gpu_augment import GpuAugment
from resolute.pipeline.plan.augment_params import erase_noise, used_ops
from resolute.pipeline.plan.stage import Augment
from tests import ROOT
from tests.pipeline.graph.test_augment_kernels import MEAN, STD, run
from tests.support.batch_spec import batch_spec, drawn_rows

pytestmark = pytest.mark.gpu

IMAGES, RES = 64, 67  # px; a size at which a program of the kernel ends within a block of pixels
JITTER_AFTER_BLUR = {"policy": "3-augment"}
AUGMENTS: tuple[dict[str, Any], ...] = (
    {"policy": "randaugment", "num_ops": 3},
    {"policy": "trivialaugment"},
    {"policy": "autoaugment"},
    JITTER_AFTER_BLUR,
    {"jitter": (0.4, 0.4, 0.4, 0.1), "grey_prob": 0.3, "blur_prob": 0.3},
    {"random_erasing_prob": 0.7, "random_erasing_fill": "noise", "mixup_alpha": 0.5, "cutmix_alpha": 1.0},
)


@pytest.mark.parametrize("keys", AUGMENTS, ids=lambda keys: "-".join(keys))
def test_augmentation_equals_that_of_the_cpu(keys: dict[str, Any]) -> None:
    """Levels of 0 to 255 at most 1 apart, since a blur's weights are float32 here and float64 on a CPU.

    At most 2 where jitter follows a blur, which enlarges the difference. A third of the images each is mixed by mixup,
    by CutMix and not at all.
    """
    augment = Augment(**keys)
    images = np.random.default_rng(0).integers(0, 256, (IMAGES, RES, RES, 3), dtype=np.uint8)
    images[::4] //= 16  # faint ones, on which contrast and equalisation act strongly
    mixing: dict[str, Any] = {}
    if "mixup_alpha" in keys:
        mixing = {
            "mode": np.arange(IMAGES) % 3,
            "lam": np.linspace(0.2, 0.8, IMAGES, dtype=np.float32),
            "partner": np.arange(IMAGES)[::-1],
            "box": (3, 5, 8, 9),
        }
    rows = drawn_rows(augment, np.arange(IMAGES), res=RES, seed=0)
    spec, used = batch_spec(IMAGES, res=RES, rows=rows, hflip=0, **mixing), used_ops([augment])
    kernels = GpuAugment(
        used,
        mean=MEAN,
        std=STD,
        noise=erase_noise(MEAN, STD),
        dtype=torch.float32,
        as_bytes=True,
        device=torch.device("cuda"),
    )
    got = kernels(torch.from_numpy(images).cuda(), *kernels.rows(spec)).cpu().numpy()
    kernels.close()
    difference = np.abs(got.astype(int) - run(images, spec, used))
    assert difference.max() <= (2 if keys == JITTER_AFTER_BLUR else 1)


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_sanitizer_finds_nothing(tool: str) -> None:
    """Invalid addresses, and races in shared memory, by NVIDIA's compute-sanitizer."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        pytest.skip("compute-sanitizer is not installed; it is part of CUDA's toolkit")
    kernels = ("--kernel-name", "kns=apply_slot", "--kernel-name", "kns=finish")
    pytest_words = ("-m", "pytest", "tests/gpu/test_kernels.py", "-k", "equals", "-n", "0", "-p", "no:cacheprovider")
    done = subprocess.run(
        [program, "--tool", tool, "--error-exitcode", "9", *kernels, sys.executable, *pytest_words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert "6 passed" in done.stdout
