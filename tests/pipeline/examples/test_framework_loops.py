"""The Lightning and Transformers examples, with the real packages: a resumed run ends with the same weights."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests import ROOT

# why: the packages of others may warn of each other's ageing interfaces
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
WORDS = ["--res", "32,48", "--epochs", "1", "--batch-size", "25", "--checkpoint"]


@pytest.fixture(params=["lightning", "transformers"])
def example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """One of the two examples, on the CPU and without any network."""
    pytest.importorskip(request.param)
    for name in ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "ACCELERATE_USE_CPU"):
        monkeypatch.setenv(name, "1")
    return importlib.import_module(f"resolute.pipeline.examples.{request.param}_loop")


def test_a_resumed_run_ends_with_the_same_weights(
    example: ModuleType, shard_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole: dict[str, torch.Tensor] = example.main([str(shard_root), *WORDS, str(tmp_path / "whole")])
    output = capsys.readouterr().out
    assert len(re.findall("top-?1", output)) == 2
    cut: list[Any] = [str(shard_root), *WORDS, str(tmp_path / "cut")]
    first = example.main([*cut, "--stop", "1"])
    assert any(not torch.equal(value, first[name]) for name, value in whole.items())
    assert len(re.findall("top-?1", capsys.readouterr().out)) == 1
    second = example.main(cut)
    assert len(re.findall("top-?1", capsys.readouterr().out)) == 1
    assert [name for name, value in whole.items() if not torch.equal(value, second[name])] == []


def test_the_loops_have_fewer_than_80_lines() -> None:
    for name in ("lightning_loop", "transformers_loop"):
        text = (ROOT / "pipeline" / "examples" / f"{name}.py").read_text()
        assert len(text.splitlines()) < 80, name
