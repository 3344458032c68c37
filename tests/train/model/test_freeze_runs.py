"""A run with freezing resumes bit-identically, and every shape and trainable set is warmed up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from resolute.cli import main
from resolute.pipeline.loader.loader import Batch
from resolute.train import loop
from resolute.train.loop import Learner
from tests.train.conftest import assert_equal_runs, stop_at, train_words

Pass = tuple[int, int]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Pass | None]:
    """(resolution, number of trainable parameters) of each training pass; None where the first step begins."""
    passes: list[Pass | None] = []
    networks: list[nn.Module] = []
    build, train_step = loop.build_model, Learner.train_step

    def note(network: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if network is networks[-1] and network.training:  # not its EMA
            passes.append((inputs[0].shape[-1], sum(p.requires_grad for p in network.parameters())))

    def built(*args: Any, **kwargs: Any) -> nn.Module:
        networks.append(build(*args, **kwargs))
        networks[-1].register_forward_pre_hook(note)
        return networks[-1]

    def stepped(self: Learner, batch: Batch) -> Any:
        if None not in passes:
            passes.append(None)
        return train_step(self, batch)

    monkeypatch.setattr(loop, "build_model", built)
    monkeypatch.setattr(Learner, "train_step", stepped)
    return passes


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "keys"), [
    ("unfreeze", ['unfreeze_to = "none"', 'unfreeze_to = "layer3"', ""]),
    ("freeze", ["", 'freeze_to = "layer2"', 'freeze_to = "all"']),
])  # fmt: skip
def test_every_resolution_and_trainable_set_was_warmed_up_and_resumes_are_exact(
    recipe_file: Path, shard_root: Path, seen: list[Pass | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    mode: str, keys: list[str],
) -> None:  # fmt: skip
    """The tiny run with three trainable sets; stages change at steps 6 and 16."""
    head, *stages = recipe_file.read_text().split("[[stages]]")
    tables = f'[precision]\namp = "off"\n[schedule]\nkind = "onecycle_stage"\n[freeze]\nmode = "{mode}"\n'
    text = "".join(f"[[stages]]\n{key}{stage}" for key, stage in zip(keys, stages, strict=True))
    (tmp_path / "tiny.toml").write_text(head + tables + text)
    whole, cut = (train_words(shard_root, tmp_path / "tiny.toml", tmp_path / name) for name in ("whole", "cut"))
    assert main(whole) == 0
    start = seen.index(None)
    trained = {each for each in seen[start + 1 :] if each}
    assert len({parameters for _, parameters in trained}) == 3
    assert trained <= set(seen[:start])
    for index in (9, 20):
        with monkeypatch.context() as patch:
            stop_at(patch, index)
            assert main(cut) == 128 + 15
    assert main(cut) == 0
    assert_equal_runs(tmp_path / "cut" / "tiny", tmp_path / "whole" / "tiny")
