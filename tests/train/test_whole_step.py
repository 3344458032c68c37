"""The whole training step of every included recipe, as a GPU would run it, without a GPU.

The product's learner runs on fake tensors (tests/support/whole_step.py): dtypes and memory formats of all its
operations; and inductor's kernels of the compiled step are brought to object code for A100 and H100.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from resolute.train.recipe.schema import RECIPES, Recipe
from tests import ROOT
from tests.support.whole_step import build_guard

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.skipif(
    shutil.which("g++") is None, reason="no g++, which compiles the stand-in for CUDA's driver")]  # fmt: skip

# why: autocast computes layer norm and the norm of GRN in float32; layer scale, a float32 weight, also keeps DeiT's
# residual stream in it. The next product converts to bf16.
FLOAT32_BETWEEN = {"imagenet_deit3_small", "imagenet_convnextv2_atto"}
# why: the mean over the image gives an expanded gradient with the strides of NCHW, which pointwise operations and the
# last norm's backward pass keep up to the convolutions before them
NCHW_GRADIENTS = {"imagenet_convnextv2_atto", "dogs_efficientnet_b4"}
# why: the blur before strided convolutions pads by reflection, whose output has NCHW strides on fake tensors; whether
# it does on a GPU has not been seen
BLURRED = {"imagenet_rn18_ffcv", "imagenet_rn50_ffcv"}
FUSED = {"sgd": "_fused_sgd_", "adamw": "_fused_adamw_"}
# Recipes whose kernels are compiled, and what changes in [model]: fewer blocks of the same widths.
COMPILED = {
    "imagenette_cpu": {}, "imagenet_deit3_small": {"kwargs": {"depth": 2, "init_values": 1e-4}},
}  # fmt: skip
SHARED_LIMITS = {80: 166912, 90: 232448}  # bytes per block; source: CUDA C++ Programming Guide, the table of limits


def different() -> list[str]:
    """Names of the included recipes, of those with the same network, precision, stages and update the first."""
    names: dict[str, str] = {}
    for path in sorted(RECIPES.glob("*.toml")):
        recipe = Recipe.load(path)
        sizes = {(res, stage.validation_res) for stage in recipe.stages for res in stage.resolutions}
        key = repr((recipe.model, recipe.precision, recipe.freeze, sorted(sizes), recipe.optim.name, recipe.loss.kind,
                    recipe.ema.on))  # fmt: skip
        names.setdefault(key, path.stem)
    return list(names.values())


@pytest.fixture(scope="module")
def whole_step(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[dict[str, Any]]]:
    """whole_step(command, recipe, key=value, …): the rows of that command, in a process of its own."""
    folder = tmp_path_factory.mktemp("guard")
    guard = build_guard(folder)

    def run(command: str, recipe: str, **keys: str) -> list[dict[str, Any]]:
        words = [sys.executable, "-W", "ignore", "-m", "tests.support.whole_step", str(guard), command, recipe]
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}
        done = subprocess.run([*words, *(f"{key}={value}" for key, value in keys.items())], cwd=ROOT,
                              env=os.environ | caches, capture_output=True, text=True, check=False)  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
        return rows

    return run


def faults(rows: list[dict[str, Any]], recipe: str, dtype: str) -> list[str]:
    """One line for each operation that is not as the recipe, under autocast to `dtype` (float32: off), should run."""
    lines = []
    for row in rows:
        kind, name, dtypes = row["kind"], row["name"], row["dtypes"]
        floats = {each for each in dtypes if "float" in each}
        if kind == "product":
            # float32: the log-sum-exp that attention keeps for its backward pass
            right = floats <= ({dtype, "float32"} if name.endswith("attention_backward") else {dtype})
            right &= row["channels_last"] is not False or recipe in BLURRED or (
                name == "convolution_backward" and recipe in NCHW_GRADIENTS)  # fmt: skip
        elif kind == "norm":
            right = floats == ({dtype} if "batch" in name else {"float32"})
        elif kind == "narrowed":
            right = recipe in FLOAT32_BETWEEN
        elif kind == "scores":
            right = floats == {"float64"}
        else:
            right = kind != "sync" and floats == {"float32"}
        if not right:
            lines.append(f"{row['when']}: {kind} {name}: {dtypes}, channels_last {row['channels_last']}")
    return lines


def _check_complete(rows: list[dict[str, Any]], recipe: Recipe) -> None:
    """Every pass of every resolution was recorded."""
    found = {(row["when"], row["kind"]) for row in rows}
    for stage in recipe.stages:
        for res in stage.resolutions:
            assert {(f"train {res}", kind) for kind in ("product", "norm", "statistics", "gradients", "loss")} <= found
        assert {(f"eval {stage.validation_res}", kind) for kind in ("product", "norm", "scores")} <= found
    updates = {row["name"] for row in rows if row["kind"] == "update"}
    fused = {FUSED[recipe.optim.name]} if recipe.optim.name in FUSED else set()
    assert updates == fused | ({"_foreach_lerp_"} if recipe.ema.on else set())


@pytest.mark.parametrize("name", different())
def test_dtypes_and_memory_formats(name: str, whole_step: Callable[..., list[dict[str, Any]]]) -> None:
    """Products in autocast's dtype and channels_last; norms' statistics, weights, gradients and loss in float32."""
    recipe = Recipe.load(RECIPES / f"{name}.toml")
    rows = whole_step("step", name)
    _check_complete(rows, recipe)
    assert faults(rows, name, "float32" if recipe.precision.amp == "off" else "bfloat16") == []


@pytest.mark.parametrize(("keys", "dtype"), [
    ({"amp": "off"}, "float32"), ({"capability": "75"}, "float16"),
])  # fmt: skip
def test_other_precisions(
    keys: dict[str, str], dtype: str, whole_step: Callable[..., list[dict[str, Any]]]
) -> None:
    """`amp = "off"` is float32 throughout; "auto" is fp16 on a GPU without bf16."""
    assert faults(whole_step("step", "cifar10", **keys), "cifar10", dtype) == []


@pytest.mark.parametrize(("plant", "expected"), [
    ("autocast", "product convolution: ['float32', 'float32']"), ("float", "narrowed _to_copy"),
    ("half_norm", "statistics"), ("contiguous", "channels_last False"), ("sync", ": sync "),
])  # fmt: skip
def test_planted_mistakes_are_found(
    plant: str, expected: str, whole_step: Callable[..., list[dict[str, Any]]]
) -> None:
    found = faults(whole_step("step", "labels_cpu", plant=plant), "labels_cpu", "bfloat16")
    assert any(expected in line for line in found), found


def over_budget(rows: list[dict[str, Any]]) -> list[str]:
    """One line for each kernel that cannot be launched, or spills registers.

    Inductor itself skips configurations that spill, if it has another.
    """
    lines = []
    for row in rows:
        where = f"{row['kernel']} {row['blocks']} for {row['capability']}"
        if row["local_bytes"]:
            lines.append(f"{where}: {row['local_bytes']} bytes of local memory per thread")
        if row["registers"] > 255 or row["max_warps"] < row["warps"]:
            lines.append(f"{where}: {row['registers']} registers of {row['warps']} warps do not fit")
        if row["shared_bytes"] > SHARED_LIMITS[row["capability"]]:
            lines.append(f"{where}: {row['shared_bytes']} bytes of shared memory")
    return lines


@pytest.mark.parametrize("name", COMPILED)
def test_kernels_of_the_compiled_step_fit(name: str, whole_step: Callable[..., list[dict[str, Any]]]) -> None:
    rows = whole_step("kernels", name, model=json.dumps(COMPILED[name]))
    assert len({row["kernel"] for row in rows}) > 10
    assert {row["capability"] for row in rows} == {80, 90}
    assert any("backward" in row["kernel"] for row in rows)
    assert over_budget(rows) == []


def test_a_kernel_with_too_large_blocks_is_found(whole_step: Callable[..., list[dict[str, Any]]]) -> None:
    rows = whole_step("kernels", "imagenet_deit3_small", model='{"kwargs": {"depth": 1}}', plant="block")
    assert any("local memory" in line or "do not fit" in line for line in over_budget(rows)), rows
