"""The whole training step of every included recipe, as a GPU would run it, without a GPU.

The product's learner runs on fake tensors (tests/support/whole_step.py): dtypes and memory formats of all its
operations.
"""

from __future__ import annotations

import json
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


def different() -> list[str]:
    """Names of the included recipes, of those with the same network, precision, update and loss the first."""
    names: dict[str, str] = {}
    for path in sorted(RECIPES.glob("*.toml")):
        recipe = Recipe.load(path)
        key = repr((recipe.model.name, recipe.precision, recipe.optim.name, recipe.loss.kind, recipe.ema.on))
        names.setdefault(key, path.stem)
    return list(names.values())


@pytest.fixture(scope="module")
def whole_step(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[dict[str, Any]]]:
    """whole_step(recipe, key=value, …): the distinct operations of its step, in a process of its own."""
    guard = build_guard(tmp_path_factory.mktemp("guard"))

    def run(recipe: str, **keys: str) -> list[dict[str, Any]]:
        words = [sys.executable, "-W", "ignore", "-m", "tests.support.whole_step", str(guard), recipe]
        done = subprocess.run([*words, *(f"{key}={value}" for key, value in keys.items())], cwd=ROOT,
                              capture_output=True, text=True, check=False)  # fmt: skip
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
    """Every pass of the first and the last stage was recorded."""
    found = {(row["when"], row["kind"]) for row in rows}
    for stage in (recipe.stages[0], recipe.stages[-1]):
        trained = f"train {stage.resolutions[-1]}"
        assert {(trained, kind) for kind in ("product", "norm", "statistics", "gradients", "loss")} <= found
        assert {(f"eval {stage.validation_res}", kind) for kind in ("product", "norm", "scores")} <= found
    updates = {row["name"] for row in rows if row["kind"] == "update"}
    fused = {FUSED[recipe.optim.name]} if recipe.optim.name in FUSED else set()
    assert updates == fused | ({"_foreach_lerp_"} if recipe.ema.on else set())


@pytest.mark.parametrize("name", different())
def test_dtypes_and_memory_formats(name: str, whole_step: Callable[..., list[dict[str, Any]]]) -> None:
    """Products in autocast's dtype and channels_last; norms' statistics, weights, gradients and loss in float32."""
    recipe = Recipe.load(RECIPES / f"{name}.toml")
    rows = whole_step(name)
    _check_complete(rows, recipe)
    assert faults(rows, name, "float32" if recipe.precision.amp == "off" else "bfloat16") == []


@pytest.mark.parametrize(("keys", "dtype"), [
    ({"amp": "off"}, "float32"), ({"capability": "75"}, "float16"),
])  # fmt: skip
def test_other_precisions(
    keys: dict[str, str], dtype: str, whole_step: Callable[..., list[dict[str, Any]]]
) -> None:
    """`amp = "off"` is float32 throughout; "auto" is fp16 on a GPU without bf16."""
    assert faults(whole_step("cifar10", **keys), "cifar10", dtype) == []


def test_mistakes_are_found(whole_step: Callable[..., list[dict[str, Any]]]) -> None:
    found = faults(whole_step("labels_cpu", mistakes="all"), "labels_cpu", "bfloat16")
    for expected in ("product convolution: ['float32', 'float32']", "narrowed _to_copy", "statistics",
                     "channels_last False", ": sync "):  # fmt: skip
        assert any(expected in line for line in found), found
