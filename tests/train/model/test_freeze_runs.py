"""A run with freezing resumes bit-identically, and every shape and trainable set is warmed up."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from resolute.cli import main
from resolute.pipeline.loader.loader import Batch
from resolute.train import loop
from resolute.train.loop import Learner
from resolute.train.planner.measure import restored
from resolute.train.warmup import warm_up
from tests.train.conftest import train_words, without_clocks
from tests.train.model.test_freeze import EACH, _batch, _learner, _recipe


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "names", "amp", "optim"), [
    ("unfreeze", ("none", "layer3", None), "off", {"name": "sgd", "lr": 0.1, "clip_norm": 1.0}),
    ("freeze", (None, "layer2", "all"), "bf16", {"name": "adamw", "lr": 0.01}),
])  # fmt: skip
def test_a_run_resumed_at_any_step_is_bit_identical(
    mode: str, names: tuple[Any, ...], amp: str, optim: dict[str, Any]
) -> None:
    recipe = _recipe(mode, *names, optim=optim, schedule={"kind": "onecycle_stage"}, precision={"amp": amp})
    learner, total, states, losses = _learner(recipe), EACH * len(names), [], []
    for step in range(total):
        states.append(_saved(learner))
        losses.append(learner.train_step(_batch(step))[0].item())
    for cut in range(1, total) if amp == "off" else (2, 4):  # bf16 is slow on many CPUs
        again = _learner(recipe)
        again.load_state_dict(states[cut])
        _as_before_a_start(again)
        assert [again.train_step(_batch(step))[0].item() for step in range(cut, total)] == losses[cut:]
        for section in ("model", "ema"):
            ours = again.state_dict()[section]
            for name, value in learner.state_dict()[section].items():
                assert torch.equal(ours[name], value), (cut, name)


def _saved(learner: Learner) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(learner.state_dict(), file)
    file.seek(0)
    state: dict[str, Any] = torch.load(file, weights_only=True)
    return state


def _as_before_a_start(learner: Learner) -> None:
    """Run warm-up and measured steps of all stages, which must leave no trace."""
    with restored(learner):
        for stage in range(len(learner.recipe.stages)):
            learner.train_step(_batch(EACH * stage))
    for stages in learner.freezer.stages_by_set:
        warm_up(learner, [("train", 32, 8)], stage=stages[0])


FROZEN = ['unfreeze_to = "none"', 'unfreeze_to = "layer3"', ""]


@pytest.fixture(scope="module")
def frozen_words(recipe_file: Path, shard_root: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command line of the tiny run with three trainable sets; stages change at steps 6 and 16."""
    parts = recipe_file.read_text().split("[[stages]]")
    text = parts[0] + '[precision]\namp = "off"\n[freeze]\nmode = "unfreeze"\n'
    text += "".join(f"[[stages]]\n{line}{part}" for line, part in zip(FROZEN, parts[1:], strict=True))
    path = tmp_path_factory.mktemp("frozen") / "tiny.toml"
    path.write_text(text)
    return train_words(shard_root, path, path.parent, "--save-every-steps", "3", "--runs")


Pair = tuple[bool, torch.Size, int]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Pair | None]:
    """(training, shape, trainable parameters) of each forward pass; None where the first step begins."""
    passes: list[Pair | None] = []
    networks: list[nn.Module] = []
    build, train_step = loop.build_model, Learner.train_step

    def note(network: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if network is networks[-1]:  # not its EMA
            passes.append((network.training, inputs[0].shape, sum(p.requires_grad for p in network.parameters())))

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


class Cut(Exception):
    pass


@pytest.mark.slow
def test_every_resolution_and_trainable_set_was_warmed_up_and_resumes_are_exact(
    frozen_words: list[str], seen: list[Pair | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([*frozen_words, str(tmp_path / "whole")]) == 0
    start = seen.index(None)
    assert {pair[2] for pair in seen[start + 1 :] if pair and pair[0]} == {2, 23, 47}
    before, after = (
        {(pair[1][-1], pair[2]) for pair in pairs if pair and pair[0]} for pairs in (seen[:start], seen[start:])
    )
    assert after <= before
    train_step = Learner.train_step
    for cut in (8, 14):  # resumed from step 6, at a stage change, and from 12, inside a stage

        def cutting(self: Learner, batch: Batch, cut: int = cut) -> Any:
            if batch.spec.step == cut:
                raise Cut
            return train_step(self, batch)

        runs = tmp_path / str(cut)
        with monkeypatch.context() as patch:
            patch.setattr(Learner, "train_step", cutting)
            with pytest.raises(Cut):
                main([*frozen_words, str(runs)])
        assert main([*frozen_words, str(runs)]) == 0
        assert _results(runs) == _results(tmp_path / "whole")


def _results(runs: Path) -> list[dict[str, Any]]:
    records = [record for record in without_clocks(runs / "tiny" / "run.jsonl") if record["kind"] in ("step", "epoch")]
    assert len(records) == 31
    return records
