"""The CUDA stack of an environment follows driver and GPUs, unless CUDA=12|13 or an existing installation decides."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from resolute.cuda_stack import choose_stack, driver_and_gpus
from tests import ROOT
from tests.support.fake_make import Make


@pytest.mark.parametrize(
    ("driver", "gpus", "stack"),
    [
        ("580.65.06", [], "cuda13"),
        ("579.99", [], "cuda12"),
        (None, [], "cuda13"),
        ("580.65.06", [(7, 2)], "cuda12"),
        ("580.65.06", [(7, 5)], "cuda13"),
        ("580.65.06", [(9, 0), (7, 0)], "cuda12"),  # the stack that has kernels for both
        ("580.65.06", [(3, 5), (8, 6)], "cuda13"),  # an old card for the display
    ],
)
def test_the_newest_stack_that_driver_and_gpus_can_run_is_chosen(
    driver: str | None, gpus: list[tuple[int, int]], stack: str
) -> None:
    assert choose_stack(driver, gpus) == stack


def fake_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, answer: str, status: int = 0) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{answer}'\nexit {status}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_driver_and_gpus_are_read_from_nvidia_smi_or_the_driver_from_the_kernel_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "version"
    module.write_text("570.86.15\n")
    fake_nvidia_smi(tmp_path, monkeypatch, "580.65.06, 7.0\n580.65.06, 12.0")
    assert driver_and_gpus(module) == ("580.65.06", [(7, 0), (12, 0)])
    fake_nvidia_smi(tmp_path, monkeypatch, "580.65.06, [N/A]")
    assert driver_and_gpus(module) == ("580.65.06", [])
    for answer, status in (("NVIDIA-SMI has failed", 9), ('Field "compute_cap" is not a valid field to query.', 2)):
        fake_nvidia_smi(tmp_path, monkeypatch, answer, status=status)
        assert driver_and_gpus(module) == ("570.86.15", [])
    assert driver_and_gpus(tmp_path / "none") == (None, [])


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """`make` before `make env`: without the stamp of an environment."""
    make = Make(tmp_path)
    (tmp_path / ".venv" / ".resolute-ready").unlink()
    (tmp_path / "resolute").mkdir(exist_ok=True)
    shutil.copy(ROOT / "resolute" / "cuda_stack.py", tmp_path / "resolute")
    return make


@pytest.mark.parametrize(("words", "stack"), [([], "cuda13"), (["CUDA=12"], "cuda12")])
def test_make_env_installs_and_records_the_stack(
    make: Make, monkeypatch: pytest.MonkeyPatch, words: list[str], stack: str
) -> None:
    fake_nvidia_smi(make.folder, monkeypatch, "580.65.06, 9.0")
    (call,) = make.calls("env", *words)
    assert call[-4:] == ["--constraint", f"locks/{stack}.txt", "--editable", f".[{stack},train]"]
    assert (make.folder / ".venv" / ".resolute-ready").read_text() == f"{stack}\n"
    (make.folder / "calls").unlink()
    other_version = {"cuda12": "13", "cuda13": "12"}[stack]
    assert f"the environment holds {stack}" in make("env", f"CUDA={other_version}").stderr
    assert not (make.folder / "calls").exists()


@pytest.mark.parametrize(
    ("answer", "got"), [("470.256.02, 9.0", "470.256.02"), ("580.65.06, 6.0", "compute capability 6.0")]
)
def test_make_env_with_too_old_a_driver_or_gpu_installs_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch, answer: str, got: str
) -> None:
    fake_nvidia_smi(make.folder, monkeypatch, answer)
    done = make("env")
    assert (done.returncode, done.stderr.count(f"too old, got {got}, expected ")) == (2, 1)
    assert not (make.folder / "calls").exists()
    assert not (make.folder / ".venv" / ".resolute-ready").exists()
