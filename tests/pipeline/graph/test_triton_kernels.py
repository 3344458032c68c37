"""The GPU's augmentation without a GPU: every kernel interpreted, and compiled for every generation of devices."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

# One process a device generation: compiled code is kept below the given folder. Prints registers and spilled bytes.
COMPILE = """
import subprocess, sys, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from pipeline.graph.kernels.triton_finish import finish
from pipeline.graph.gpu_augment import _OPTIONS
from pipeline.graph.kernels.triton_slot import BLOCK, apply_slot

TYPES = {"source": "*u8", "target": "*u8", "params": "*i32", "noise": "*u8", "fill": "*i32", "scales": "*fp32"}

def build(kernel, constants, **types):
    names, types = kernel.arg_names, {**TYPES, **types}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    source = ASTSource(fn=kernel, signature=signature,
                       constexprs={(names.index(name),): value for name, value in constants.items()})
    built = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32), options=_OPTIONS)
    dump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        text = subprocess.run([dump, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    print(kernel.__name__, types["target"], len(built.asm["cubin"]), " ".join(text.split("\\n")[-2:]))

build(apply_slot, {"BLOCK": BLOCK})
for target in ("*fp32", "*fp16", "*bf16"):
    build(finish, {"ERASES": True, "MIXES": True, "BLOCK": BLOCK}, target=target)
build(finish, {"ERASES": False, "MIXES": False, "BLOCK": BLOCK}, target="*fp16")
"""


def python(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_interpreted_kernels_do_what_the_cpu_does() -> None:
    done = python("-m", "pytest", "tests/pipeline/graph/interpreted_kernels.py", "-p", "no:cacheprovider",
                  "--timeout=600", TRITON_INTERPRET="1")  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    assert re.search(r"\d\d passed", done.stdout)
    assert "skipped" not in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", ["75", "80", "86", "90", "100"])
def test_kernels_compile_for_every_generation_without_spills(capability: str, tmp_path: Path) -> None:
    done = python("-c", COMPILE, capability, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    print(done.stdout)
    assert len(lines) == 5
    for line in lines:
        registers, stack = (int(re.search(rf"{name}:(\d+)", line)[1]) for name in ("REG", "STACK"))  # type: ignore[index]
        assert registers <= 255
        assert stack == 0, line
