"""The whole training step of every included recipe, as a GPU would run it, without a GPU.

The product's learner runs on fake tensors (tests/support/whole_step.py): dtypes and memory formats of all its
operations.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from resolute.train.recipe import RECIPES
from resolute.train.recipe.schema import Recipe
from tests import ROOT
from tests.support.whole_step import build_guard

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++, which compiles the stand-in for CUDA's driver"),
]

# why: the mean over the image gives an expanded gradient with the strides of NCHW, which pointwise operations and the
# last norm's backward pass keep up to the convolutions before them
NCHW_GRADIENTS = {"imagenet_convnextv2_atto", "finetune_convnext", "dogs_efficientnet_b4"}
# why: the blur before strided convolutions pads by reflection, whose output has NCHW strides on fake tensors; whether
# it does on a GPU has not been seen
BLURRED = {"imagenet_rn18_ffcv", "imagenet_rn50_ffcv"}
FUSED = {"sgd": "_fused_sgd_", "momentum": "_fused_sgd_", "adamw": "_fused_adamw_"}


def chosen() -> list[str]:
    """Names of recipes, each with a kind of network, precision, optimizer, loss or EMA that none before has."""
    names, seen = list[str](), set[tuple[str, str]]()
    for path in sorted(RECIPES.glob("*.toml")):
        recipe = Recipe.load(path)
        kind = recipe.model.name.split("_")[0]
        parts = (kind, recipe.precision, recipe.optim.name, recipe.loss.kind, recipe.ema.on)
        own = {(str(place), repr(part)) for place, part in enumerate(parts)}
        if own - seen:
            names.append(path.stem)
        seen |= own
    return names


Rows = list[dict[str, Any]]
OTHER_PRECISIONS = {
    "imagenet_rn18_ffcv,amp=off": "float32",
    "imagenet_rn18_ffcv,capability=75": "float16",
}  # without bf16, "auto" is fp16
MISTAKES = "labels_cpu,mistakes=all"  # one of each kind, which must be found


def record_steps(folder: Path, jobs: list[str]) -> list[Rows]:
    """The distinct operations of the steps of each RECIPE[,KEY=VALUE…] in `jobs`."""
    words = [sys.executable, "-W", "ignore", "-m", "tests.support.whole_step", str(build_guard(folder)), *jobs]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()[-len(jobs) :]]


def faults(rows: Rows, recipe: str, dtype: str) -> list[str]:
    """One line for each operation that is not as the recipe, under autocast to `dtype` (float32: off), should run."""
    lines = []
    # why: autocast computes layer norm, and the norm of ConvNeXt V2's GRN, in float32; layer scale, a float32 weight,
    # also keeps DeiT's residual stream in it. The next product converts to bf16.
    has_layer_norm = any(row["kind"] == "norm" and "batch" not in row["name"] for row in rows)
    for row in rows:
        kind, name, dtypes = row["kind"], row["name"], row["dtypes"]
        floats = {each for each in dtypes if "float" in each}
        if kind == "product":
            # float32: the log-sum-exp that attention keeps for its backward pass
            right = floats <= ({dtype, "float32"} if name.endswith("attention_backward") else {dtype})
            right &= (
                row["channels_last"] is not False
                or recipe in BLURRED
                or (name == "convolution_backward" and recipe in NCHW_GRADIENTS)
            )
        elif kind == "norm":
            right = floats == ({dtype} if "batch" in name else {"float32"})
        elif kind == "narrowed":
            right = has_layer_norm
        elif kind == "scores":
            right = floats == {"float64"}
        else:
            right = kind != "sync" and floats == {"float32"}
        if not right:
            lines.append(f"{row['when']}: {kind} {name}: {dtypes}, channels_last {row['channels_last']}")
    return lines


def _check_complete(rows: Rows, recipe: Recipe) -> None:
    """Every pass of the first and the last stage was recorded."""
    found = {(row["when"], row["kind"]) for row in rows}
    for stage in (recipe.stages[0], recipe.stages[-1]):
        trained = f"train {stage.resolutions[-1]}"
        assert {(trained, kind) for kind in ("product", "norm", "statistics", "gradients", "loss")} <= found
        assert {(f"eval {stage.validation_res}", kind) for kind in ("product", "norm", "scores")} <= found
    updates = {row["name"] for row in rows if row["kind"] == "update"}
    fused = {FUSED[recipe.optim.name]} if recipe.optim.name in FUSED else set()
    assert updates == fused | ({"_foreach_lerp_"} if recipe.ema.on else set())


def test_every_recipe_computes_in_the_right_dtypes_and_memory_formats(tmp_path: Path) -> None:
    """Products in autocast's dtype and channels_last; norms' statistics, weights, gradients and loss in float32."""
    jobs = [*chosen(), *OTHER_PRECISIONS, MISTAKES]
    steps = dict(zip(jobs, record_steps(tmp_path, jobs), strict=True))
    planted = faults(steps.pop(MISTAKES), "labels_cpu", "bfloat16")
    for expected in (
        "product convolution: ['float32', 'float32']",
        "narrowed _to_copy",
        "statistics",
        "channels_last False",
        ": sync ",
    ):
        assert any(expected in line for line in planted), planted
    wrong = {}
    for job, rows in steps.items():
        name = job.partition(",")[0]
        recipe = Recipe.load(RECIPES / f"{name}.toml")
        _check_complete(rows, recipe)
        dtype = OTHER_PRECISIONS.get(job, "float32" if recipe.precision.amp == "off" else "bfloat16")
        wrong[job] = faults(rows, name, dtype)
    assert {job: lines for job, lines in wrong.items() if lines} == {}
