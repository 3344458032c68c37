"""All questions about CUDA devices go through `resolute.cuda`, so that tests can simulate any machine."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from resolute import cuda
from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import Stage
from tests import ROOT
from tests.support.fake_cuda import FakeCuda
from tests.support.gpu_on_cpu import GpuLoader

# name -> call with a device
QUESTIONS: dict[str, Callable[[Any], Any]] = {
    name: getattr(cuda, name) for name in
    ("allocated_bytes", "available_bytes", "current_stream", "device_name", "memory_limit_bytes",
     "peak_allocated_bytes", "peak_reserved_bytes", "reserved_bytes", "reset_peak_memory", "rng_state", "use_device",
     "synchronize", "total_bytes", "utilization", "record_event", "used_bytes", "allocator_retries")
} | {
    "limit_memory": lambda device: cuda.limit_memory(device, 2**30),
    "set_rng_state": lambda device: cuda.set_rng_state(torch.ones(16, dtype=torch.uint8), device),
    "side_stream": lambda device: cuda.side_stream(device).__enter__(),
    "device_guard": lambda device: cuda.device_guard(device).__enter__(),
}  # fmt: skip


def test_every_question_is_asked_of_the_device_that_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an index, "cuda" is the current device, here the second of three."""
    takes_device = {name for name in cuda.__all__ if "device" in inspect.signature(getattr(cuda, name)).parameters}
    assert takes_device - {"with_index", "resolve_device"} == set(QUESTIONS)
    for name, ask in QUESTIONS.items():
        for device, index in (("cuda", 1), ("cuda:0", 0), ("cuda:2", 2)):
            driver = FakeCuda(devices=3, current=1).install(monkeypatch)
            ask(torch.device(device))
            assert set(driver.asked) == {index}, name


def test_device_and_random_states_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeCuda(devices=2).install(monkeypatch)
    with cuda.device_guard(torch.device("cuda:1")):
        assert driver.current == 1
    assert driver.current == 0
    states = cuda.rng_states()
    cuda.set_rng_state(torch.full((16,), 7, dtype=torch.uint8), torch.device("cuda:1"))
    assert driver.rng[1].tolist() == [7] * 16
    cuda.set_rng_states(states)
    assert driver.rng[1].tolist() == [0] * 16
    FakeCuda(devices=0).install(monkeypatch)
    assert cuda.rng_states() == []


def test_torch_and_the_fake_have_all_functions_that_are_called() -> None:
    calls = {ast.unparse(node.func).removeprefix("driver."): len(node.args)
             for node in ast.walk(ast.parse((ROOT / "resolute/cuda.py").read_text()))
             if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("driver.")}  # fmt: skip
    assert len(calls) > 20
    for name, arguments in calls.items():
        keys = {"enable_timing": True} if name == "Event" else {}
        for module in (torch.cuda, FakeCuda()):
            inspect.signature(getattr(module, name)).bind(*[None] * arguments, **keys)


def test_only_one_module_uses_torch_cuda() -> None:
    paths = {*(ROOT / "pipeline").rglob("*.py"), *(ROOT / "train").rglob("*.py")}
    paths.remove(ROOT / "train" / "inference" / "exported_predict.py")  # runs without this project
    # except in annotations
    other = re.compile(r"(?<!: )(torch\.(cuda|accelerator)\b|\.cuda\(|from torch.* import .*\bcuda\b)")
    assert [path.name for path in paths if other.search(path.read_text())] == []


@pytest.mark.parametrize(("device", "index"), [("cuda", 1), ("cuda:0", 0)])
def test_the_loader_uses_the_device_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, shard_set: ShardSet, device: str, index: int
) -> None:
    plan = Plan(shard_set, [Stage(res=32, epochs=1, batch_size=16)], eval_batch_size=None)
    with GpuLoader(monkeypatch, plan, device=device, driver=FakeCuda(devices=2, current=1)) as loader:
        assert loader.graph_device == index
    with pytest.raises(ResoluteError, match="cuda:2: got 2 CUDA devices, expected more"):
        GpuLoader(monkeypatch, plan, device="cuda:2", driver=FakeCuda(devices=2))
    with pytest.raises(ResoluteError, match="no CUDA device found"):
        GpuLoader(monkeypatch, plan, device="cuda", driver=FakeCuda(devices=0))
