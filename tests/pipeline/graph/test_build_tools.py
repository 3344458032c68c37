"""Augmentation on a GPU says in one line that Triton lacks a C compiler or Python's headers."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import torch

from resolute.errors import ResoluteError
from resolute.pipeline.graph.gpu_finish import GpuFinish
from resolute.pipeline.plan.augment_params import erase_noise, used_ops
from resolute.pipeline.plan.stage import Augment
from tests.support.gpu_on_cpu import MEAN, STD


@pytest.fixture(autouse=True)
def slim(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without programs, Python's headers and compiled kernels; returns its root."""
    for name in ("bin", "include", "cache"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path / "include")})
    return tmp_path


def program(path: Path) -> None:
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)


def open_on(device: str) -> None:
    GpuFinish(used_ops([Augment(grey_prob=0.5)]), mean=MEAN, std=STD, noise=erase_noise(MEAN, STD),
               dtype=torch.float32, device=torch.device(device))  # fmt: skip


def refusal() -> str:
    with pytest.raises(ResoluteError) as refused:
        open_on("cuda")
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_machine_without_a_c_compiler_or_the_headers_of_python_is_told_so(
    slim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refusal().startswith("Triton: got no gcc or clang, expected a C compiler")
    headers = f"Triton: got no Python.h in {slim}/include, expected the headers of this Python"
    program(slim / "bin" / "clang")
    assert refusal().startswith(headers)
    monkeypatch.setenv("CC", "mine")  # Triton takes this one, even if there is another
    assert refusal().startswith("Triton: got CC=mine, which is no program, expected a C compiler")
    program(slim / "bin" / "mine")
    assert refusal().startswith(headers)


@pytest.mark.skipif(torch.cuda.is_available(), reason="opens a GPU")
def test_a_machine_with_both_or_with_a_filled_cache_passes(slim: Path) -> None:
    open_on("cpu")  # Triton's interpreter needs neither
    kept = slim / "cache" / "ABC" / f"cuda_utils{sysconfig.get_config_var('EXT_SUFFIX')}"
    kept.parent.mkdir()
    kept.touch()
    with pytest.raises((RuntimeError, AssertionError), match=r"NVIDIA|CUDA"):
        open_on("cuda")
    kept.unlink()
    program(slim / "bin" / "gcc")
    (slim / "include" / "Python.h").touch()
    with pytest.raises((RuntimeError, AssertionError), match=r"NVIDIA|CUDA"):
        open_on("cuda")
