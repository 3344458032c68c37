"""The examples: they train on every batch, validate every sample once, and resume from their checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from resolute import Loader, Plan, ShardSet, Stage
from resolute.pipeline.examples import plain, timm_loop
from resolute.pipeline.examples.start import Options, ResumingOptions
from tests import ROOT

from .conftest import tiny_resnet18

SHORT: dict[str, Any] = {"epochs": 1, "batch_size": 25}


def differ(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in first if not torch.equal(first[name].cpu(), second[name].cpu())]


@pytest.mark.slow
def test_a_resumed_run_of_plain_ends_with_the_same_weights(
    shard_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole run has the default device, the CPU, and resolutions."""
    monkeypatch.setattr(plain, "resnet18", tiny_resnet18)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)  # a machine with a GPU, which gives other bits
        whole = plain.train(ResumingOptions(shards=str(shard_root), checkpoint=tmp_path / "whole.pt", **SHORT))
    output = capsys.readouterr().out
    assert [line.partition(":")[0] for line in output.splitlines()] == ["epoch 0 32 px", "epoch 1 48 px"]
    cut: dict[str, Any] = {"shards": str(shard_root), "res": (32, 48), "checkpoint": tmp_path / "cut.pt", **SHORT}
    first = plain.train(ResumingOptions(**cut, stop=1))
    assert differ(whole, first)
    second = plain.train(ResumingOptions(**cut))
    assert differ(whole, second) == []
    assert capsys.readouterr().out == output


@pytest.mark.slow
def test_the_timm_loop_sees_every_sample_once_in_passes_of_the_announced_length(
    shard_root: Path, shard_set: ShardSet, capsys: pytest.CaptureFixture[str]
) -> None:
    top1 = timm_loop.train(Options(shards=str(shard_root), res=(32, 48), **SHORT))
    assert top1.count == len(shard_set.splits["val"])
    assert capsys.readouterr().out.count(f"% of {top1.count}") == 2
    plan = Plan(shard_set, [Stage(res=32, epochs=1, batch_size=20)], eval_batch_size=4)
    with Loader(plan) as loader:
        (epoch,) = loader.epochs()
        parts = [timm_loop.PairLoader(part, 3) for part in (epoch.train, epoch.val)]
        lengths = [len(part) for part in parts]
        train, val = (list(part) for part in parts)
    assert [len(train), len(val)] == lengths
    assert sum(len(images) for images, _ in train) == len(shard_set.splits["train"])
    assert all(target.shape == (len(images), 3) for images, target in train)
    labels = torch.cat([target for _, target in val]).numpy()
    assert labels.tolist() == shard_set.splits["val"].samples["label"].tolist()


def test_the_training_loop_in_the_readme_runs(shard_root: Path, shard_set: ShardSet) -> None:
    text = (ROOT / "README.md").read_text().split("## In your own loop")[1]
    code = text.split("```python\n")[1].split("```")[0]
    for old, new in (
        ('"shards"', repr(str(shard_root))),
        ("128", "32"),
        ("160", "48"),
        ("epochs=5", "epochs=1"),
        ("256", "25"),
        ('"cuda"', '"cpu"'),
    ):
        assert old in code
        code = code.replace(old, new)
    losses: list[torch.Tensor] = []
    counts: list[torch.Tensor] = []
    states: list[dict[str, Any]] = []
    names: dict[str, Any] = {
        "step": losses.append,
        "count": counts.append,
        "save": lambda loader: states.append(loader),
        "model": lambda images: images.mean((2, 3)),
    }
    exec(code, names)
    assert len(losses) == names["plan"].total_steps
    assert all(loss.shape == () and loss.isfinite() for loss in losses)
    assert len(torch.cat(counts)) == 2 * len(shard_set.splits["val"])
    assert len(states) == 2
