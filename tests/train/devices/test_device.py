"""The device of a run has an index, and CUDA is queried in one module only."""

from __future__ import annotations

import pytest
import torch

from resolute import cuda
from resolute.errors import ResoluteError
from resolute.train.devices import hardware
from resolute.train.devices.device import device_name, pick_device
from resolute.train.devices.hardware import bf16_is_emulated, describe, peak_memory_bytes, reset_peak_memory
from resolute.train.learner import autocast_dtype
from resolute.train.planner.batch_size import cap_memory
from resolute.train.recipe.schema import Precision
from tests.support.fake_cuda import GIB, FakeCuda


@pytest.mark.parametrize(("wanted", "index"), [("auto", 1), ("cuda:0", 0)])
def test_a_gpu_has_an_index_and_is_the_current_device(monkeypatch: pytest.MonkeyPatch, wanted: str, index: int) -> None:
    driver = FakeCuda(devices=2, current=1).install(monkeypatch)
    device = pick_device(wanted)
    assert device == torch.device("cuda", index)
    assert driver.current == index
    assert device_name(device) == f"Fake GPU {index}"


@pytest.mark.parametrize(
    ("line", "emulated"),
    [
        ("flags\t\t: fpu avx512f avx512_vnni", True),
        ("flags\t\t: fpu avx512f avx512_bf16", False),
        ("Features\t: fp asimd", True),
        ("Features\t: fp asimd bf16", False),
        ("vendor_id\t: unknown", False),
    ],
)
def test_bf16_is_emulated_by_cpus_without_instructions_for_it(
    monkeypatch: pytest.MonkeyPatch, line: str, emulated: bool
) -> None:
    monkeypatch.setattr(hardware, "_cpu_flags", hardware._cpu_flags.__wrapped__)  # without its cache
    monkeypatch.setattr("pathlib.Path.read_text", lambda *_, **__: f"processor\t: 0\n{line}\n")
    assert bf16_is_emulated(torch.device("cpu")) == emulated
    assert autocast_dtype(Precision(), torch.device("cpu")) is (None if emulated else torch.bfloat16)
    assert autocast_dtype(Precision(amp="bf16"), torch.device("cpu")) is torch.bfloat16
    assert autocast_dtype(Precision(amp="off"), torch.device("cpu")) is None


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), torch.float16), ((8, 0), torch.bfloat16)])
def test_a_gpu_without_bf16_trains_in_fp16(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype
) -> None:
    FakeCuda(capability=capability).install(monkeypatch)
    assert autocast_dtype(Precision(), torch.device("cuda", 0)) is dtype
    assert autocast_dtype(Precision(amp="off"), torch.device("cuda", 0)) is None
    assert autocast_dtype(Precision(amp="fp16"), torch.device("cuda", 0)) is torch.float16


def test_a_missing_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(devices=1).install(monkeypatch)
    with pytest.raises(ResoluteError, match="--device: got cuda:1 on a machine with 1 CUDA devices"):
        pick_device("cuda:1")
    FakeCuda(devices=0).install(monkeypatch)
    with pytest.raises(ResoluteError, match="--device: got cuda on a machine with 0 CUDA devices"):
        pick_device("cuda")
    assert pick_device("auto") == torch.device("cpu")
    for name in ("gpu", "cuda:", "cuda:x", "cuda:²", "cpu:0"):
        with pytest.raises(ResoluteError, match=f"--device: got {name}, expected auto, cpu, cuda or cuda:N; choose"):
            pick_device(name)


def test_every_query_accepts_a_device_without_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some torch functions refuse such a device."""
    driver, device = FakeCuda(devices=2, current=1, gib=80).install(monkeypatch), torch.device("cuda")
    with pytest.raises(ValueError, match=r"Expected a torch\.device with a specified index"):
        driver.get_per_process_memory_fraction(device)
    cap_memory(device, 20)
    assert cuda.memory_limit_bytes(device) == 20 * GIB
    assert peak_memory_bytes(device) == driver.allocated
    reset_peak_memory(device)
    assert describe(device, threads=1)["gpu"] == "Fake GPU 1"
    assert cuda.with_index(device) == torch.device("cuda", 1)
    assert cuda.with_index("cpu") == torch.device("cpu")
