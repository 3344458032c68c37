"""The examples with Lightning, Transformers and Accelerate themselves: a resumed run ends with the same weights."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from resolute.pipeline.examples import accelerate_loop
from resolute.pipeline.examples.start import ResumingOptions
from tests.support.commands import Ended

from .conftest import tiny_resnet18

# why: the packages of others may warn of each other's ageing interfaces
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
WORDS = ["--res", "32,48", "--epochs", "1", "--batch-size", "25", "--checkpoint"]


def options(shards: Path, checkpoint: Path, *, stop: int | None = None) -> ResumingOptions:
    """Those of `WORDS`."""
    return ResumingOptions(shards=str(shards), res=(32, 48), epochs=1, batch_size=25, checkpoint=checkpoint, stop=stop)


@pytest.fixture(params=["lightning", "transformers"])
def example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """One of the two examples, on the CPU and without any network."""
    pytest.importorskip(request.param)
    for name in ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "ACCELERATE_USE_CPU"):
        monkeypatch.setenv(name, "1")
    module = importlib.import_module(f"resolute.pipeline.examples.{request.param}_loop")
    if request.param == "lightning":
        monkeypatch.setattr(module, "resnet18", tiny_resnet18)
    return module


def test_a_resumed_run_ends_with_the_same_weights(
    example: ModuleType, shard_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole: dict[str, torch.Tensor] = example.train(options(shard_root, tmp_path / "whole"))
    output = capsys.readouterr().out
    assert len(re.findall("top-?1", output)) == 2
    first = example.train(options(shard_root, tmp_path / "cut", stop=1))
    assert any(not torch.equal(value, first[name]) for name, value in whole.items())
    assert len(re.findall("top-?1", capsys.readouterr().out)) == 1
    second = example.train(options(shard_root, tmp_path / "cut"))
    assert len(re.findall("top-?1", capsys.readouterr().out)) == 1
    assert [name for name, value in whole.items() if not torch.equal(value, second[name])] == []


def test_a_run_resumed_with_another_number_of_processes_gives_the_same_weights(
    shard_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked: Callable[..., Ended]
) -> None:
    """Two processes up to the first checkpoint, then one: the weights of one process, up to the order of sums."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    single = accelerate_loop.train(options(shard_root, tmp_path / "one"))
    words = [shard_root, *WORDS, tmp_path / "two", "--stop", "1"]
    done = forked("tests.support.torchrun", accelerate_loop.__name__, *words)
    assert done.status == 0, done.err
    assert done.out.startswith("epoch 0 32 px: top-1 ")
    (tmp_path / "two" / "part").mkdir()  # what a run that is killed while it saves leaves
    resumed = accelerate_loop.train(options(shard_root, tmp_path / "two"))
    assert [path.name for path in (tmp_path / "two").iterdir()] == ["epoch-0001"]
    for name, weights in single.items():
        # why 2 %: the steps amplify rounding, by an amount that depends on the CPU (0.5 % with AVX-512); biases start
        # at zero, so that a gradient of the wrong size changes them by far more
        assert (resumed[name] - weights).float().norm() <= 0.02 * weights.float().norm(), name
