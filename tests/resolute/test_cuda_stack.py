"""The CUDA stack of an environment follows driver and GPUs, unless CUDA=12|13 or an existing installation decides."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from resolute.cuda_stack import choose_stack, driver_and_gpus
from tests import ROOT
from tests.support.fake_make import Make


@pytest.mark.parametrize(
    ("driver", "stack"),
    [("580.65.06", "cuda13"), ("999.1", "cuda13"), ("579.99", "cuda12"), ("525.60.13", "cuda12"), (None, "cuda13")],
)
def test_the_newest_stack_that_the_driver_can_run_is_chosen(driver: str | None, stack: str) -> None:
    assert choose_stack(driver) == stack


@pytest.mark.parametrize(("gpus", "stack"), [
    ([(7, 0)], "cuda12"), ([(7, 2)], "cuda12"), ([(7, 5)], "cuda13"), ([(8, 9), (12, 0)], "cuda13"),
    ([(9, 0), (7, 0)], "cuda12"),  # the stack that has kernels for both
    ([(3, 5), (8, 6)], "cuda13"),  # an old card for the display
    ([(6, 1), (7, 0)], "cuda12"),
])  # fmt: skip
def test_the_stack_has_kernels_for_every_gpu_that_any_stack_has_kernels_for(
    gpus: list[tuple[int, int]], stack: str
) -> None:
    assert choose_stack("580.65.06", gpus) == stack
    assert choose_stack("570.1", gpus) == "cuda12"


def test_gpus_too_old_for_every_stack_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got compute capability 5\.2, 6\.0, expected 7\.0 or higher") as refused:
        choose_stack("580.65.06", [(6, 0), (5, 2), (6, 0)])
    assert "\n" not in str(refused.value)
    assert choose_stack("580.65.06", [(6, 0)], cuda="12") == "cuda12"  # for the CPU


def test_a_driver_too_old_for_every_stack_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got 470\.256\.02, expected 525 or newer; update the driver"):
        choose_stack("470.256.02")


@pytest.mark.parametrize("driver", ["580.1", "470.1", None])
@pytest.mark.parametrize("cuda", ["12", "13"])
def test_the_cuda_setting_overrides_the_driver(driver: str | None, cuda: str) -> None:
    assert choose_stack(driver, cuda=cuda) == f"cuda{cuda}"


def test_unknown_values_of_cuda_are_refused() -> None:
    with pytest.raises(ValueError, match="CUDA: got 11, expected 12 or 13"):
        choose_stack("580.1", cuda="11")


def test_an_environment_keeps_its_stack() -> None:
    """Two DALI packages in one environment overwrite each other's files."""
    assert choose_stack("580.1", installed="cuda12") == "cuda12"
    with pytest.raises(ValueError, match="got 13, but the environment holds cuda12; choose another VENV"):
        choose_stack("580.1", cuda="13", installed="cuda12")


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


@pytest.mark.parametrize(
    ("driver", "words", "stack"),
    [("580.65.06, 9.0", [], "cuda13"), ("580.65.06, 7.0", [], "cuda12"), ("560.35.03, 9.0", [], "cuda12"),
     ("580.65.06, 9.0", ["CUDA=12"], "cuda12"), ("580.65.06, 6.0", ["CUDA=12"], "cuda12")],
)
def test_make_env_installs_and_records_the_stack(
    make: Make, monkeypatch: pytest.MonkeyPatch, driver: str, words: list[str], stack: str
) -> None:
    fake_nvidia_smi(make.folder, monkeypatch, driver)
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


def test_training_without_dali_is_refused_in_one_line(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['nvidia.dali'] = None\n"
        "from resolute.cli import main\n"
        f"sys.exit(main(['train', '--shards', {str(tmp_path)!r}, '--recipe', 'train/recipes/demo.toml']))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "nvidia.dali: not installed, expected" in done.stderr
    assert done.stderr.count("\n") == 1
