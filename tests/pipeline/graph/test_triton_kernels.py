"""GPU augmentation without a GPU: kernels are interpreted and compiled for every architecture, launches checked."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from resolute.pipeline.plan.augment_params import AugmentOps, used_ops
from resolute.pipeline.plan.stage import Augment
from tests import ROOT
from tests.support.kernel_resources import (
    CAPABILITIES,
    Launch,
    compiled,
    launches,
    over_budget,
    specialization,
    variants,
)

EVERYTHING = used_ops([
    Augment(policy="randaugment", num_ops=4, jitter=(0.4, 0.4, 0.4, 0.1), grey_prob=0.1, blur_prob=0.1,
            random_erasing_prob=0.1, mixup_alpha=0.2)
])  # fmt: skip
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)


@pytest.fixture
def triton_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cache of compiled kernels."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def interpreted(*selected: str) -> str:
    """Run `interpreted_kernels.py` in a process of its own, in Triton's interpreter; returns what pytest printed."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/pipeline/graph/interpreted_kernels.py", "-p", "no:cacheprovider",
         "--timeout=600", *selected],
        cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    assert "skipped" not in done.stdout
    return done.stdout


def test_interpreted_kernels_do_what_the_cpu_does_to_a_random_batch() -> None:
    chosen = "(random_policies and augment5) or (erasing_and_mixing and 8-noise)"
    assert "2 passed" in interpreted("-k", chosen)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_interpreted_kernels_equal_the_cpu() -> None:
    assert re.search(r"\d\d passed", interpreted())


def rows(names: str, *capabilities: int) -> list[dict[str, Any]]:
    """Resources of all variants of kernels whose name matches `names`."""
    chosen = [(name, launch) for name, launch in variants() if re.fullmatch(names, name)]
    return [{"kernel": name, "capability": capability, **compiled(launch, capability)}
            for name, launch in chosen for capability in capabilities]  # fmt: skip


@pytest.mark.usefixtures("triton_cache")
def test_the_largest_kernels_compile_within_their_budgets() -> None:
    """bfloat16 too, which a T4 (7.5) has no instructions for."""
    measured = rows("apply_slot|finish bfloat16 erases mixes", 75, 90)
    assert len(measured) == 4
    assert over_budget(measured) == []


@pytest.mark.slow
@pytest.mark.usefixtures("triton_cache")
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_kernel_compiles_for_every_architecture_within_its_budget(capability: int) -> None:
    measured = rows(".*", capability)
    assert len(measured) == 1 + 4 * 2 * 2
    assert all(row["registers"] >= 16 and row["code_bytes"] > 8_000 for row in measured)
    assert over_budget(measured) == []


@pytest.mark.usefixtures("triton_cache")
def test_kernels_over_their_budget_are_detected() -> None:
    name, launch = next(variants())
    wide = replace(launch, options={**launch.options, "BLOCK": 1024})
    resources = compiled(wide, 90), compiled(launch, 90, maxnreg=32)
    registers, spills = over_budget([{"kernel": name, "capability": 90, **each} for each in resources])
    assert re.fullmatch(r"apply_slot for 90: got \d+ registers, expected at most 96", registers)
    assert re.fullmatch(r"apply_slot for 90: got \d+ bytes of local memory per thread, .* it spills", spills)


SHAPES = [(1, 1), (1, 2), (3, 17), (7, 33), (16, 64), (1024, 224), (5, 225), (65_600, 32), (2, 8192), (1, 16_384)]


def changed_specializations(first: list[Launch], others: list[list[Launch]]) -> list[str]:
    """Names of the kernels that have to be compiled again for one of `others` when `first` has run."""
    known = {repr(specialization(launch, 90)) for launch in first}
    again = {launch.kernel.__name__ for each in others for launch in each
             if repr(specialization(launch, 90)) not in known}  # fmt: skip
    return sorted(again)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_kernel_is_compiled_after_the_warm_up(dtype: torch.dtype) -> None:
    """Whatever the batch size, resolution, number of slots and fields: Triton specialises integers that are 1 or
    divisible by 16, and pointers that are aligned."""
    others = [launches(EVERYTHING, dtype, n=n, res=res) for n, res in SHAPES]
    assert all(len(each) == len(EVERYTHING.slots) + 1 for each in others)
    assert changed_specializations(launches(EVERYTHING, dtype), others) == []


def test_arguments_that_cause_a_compilation_or_break_a_launch_are_detected() -> None:
    (first, *_), (other, *_) = launches(EVERYTHING, torch.float16), launches(EVERYTHING, torch.float16, n=16, res=64)
    specialized = triton.jit(first.kernel.fn)
    planted = [replace(launch, kernel=specialized) for launch in (first, other)]
    assert changed_specializations(planted[:1], [planted[1:]]) == ["apply_slot"]
    misnamed = Launch(kernel=triton.jit(_with_params), grid=(1,), args=first.args[:1], options={})
    with pytest.raises(TypeError, match="failed to specialize argument of type: dict"):
        specialization(misnamed, 90)


def _with_params(params):  # type: ignore[no-untyped-def]
    pass


@pytest.mark.parametrize(("n", "res"), SHAPES)
def test_the_programs_of_a_launch_cover_each_image_once(n: int, res: int) -> None:
    for launch in launches(EVERYTHING, torch.float16, n=n, res=res):
        (programs,) = launch.grid
        arguments = dict(zip(launch.kernel.arg_names, launch.args, strict=False))
        part = arguments.get("part", launch.options["BLOCK"])
        assert programs < 2**31  # CUDA's limit of the first dimension; 65 535 of the others
        assert programs == n * arguments["parts"]
        assert (arguments["parts"] - 1) * part < res * res <= arguments["parts"] * part
        assert 3 * arguments["parts"] * part < 2**31  # offsets within an image are 32-bit, those of images 64-bit


def test_a_run_without_slots_takes_one_launch() -> None:
    assert [launch.kernel.__name__ for launch in launches(AugmentOps(), torch.float16)] == ["finish"]
