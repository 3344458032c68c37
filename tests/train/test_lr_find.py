"""The learning rate range test: its steps equal a plain loop's, its suggestions the stored ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
from numpy.typing import NDArray
from torch.nn import functional

from resolute.cli import main
from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.loader import Loader
from resolute.train.learner import Learner
from resolute.train.lr_find import RangeTest, doubt, range_test, suggestion
from resolute.train.recipe.schema import Recipe
from tests.support.networks import CPU
from tests.train.conftest import stages

STORED = json.loads(Path(__file__).with_name("lr_find_sweeps.json").read_text())
STAGES = f"{stages((32, 2, 16))}optim.lr_scale = 2.0\n{stages((48, 1, 8))}"


def _test(losses: NDArray[np.float64], *, low: float = 1e-3, high: float = 1e1, diverged: bool = True) -> RangeTest:
    lrs = np.geomspace(low, high, len(losses))
    return RangeTest(lrs=lrs, losses=losses, width=len(losses) / 25, diverged=diverged)


def test_stored_range_tests_give_the_stored_suggestions() -> None:
    ratios = []
    for name, stored in STORED["sweeps"].items():
        lrs, losses = np.array(stored["lr"]), np.array(stored["loss"])
        got = suggestion(RangeTest(lrs=lrs, losses=losses, width=len(lrs) / 25, diverged=False))
        assert got == stored["suggested"], name
        ratios.append(got / stored["peak"])
    *near, far = sorted(ratios)
    assert (near[0], near[-1], far) == pytest.approx((0.9, 1.6, 6), rel=0.06), "as the command says"


@pytest.mark.parametrize(
    ("losses", "diverged", "message"),
    [
        (
            np.linspace(2.3, 1.0, 100),
            False,
            r"--max-lr: got 10, but the loss has not risen by then, expected it to; raise",
        ),
        (np.linspace(2.3, 9.0, 100), True, r"--min-lr: got 0\.001, but the loss only rises from there, expected it"),
        (
            2.3 + np.sin(np.arange(100.0) ** 2),
            False,
            r"--steps: got 100, in which the loss fell by \d+\.\d % only \(noise \d+\.\d %\)",
        ),
    ],
)
def test_a_curve_without_a_valley_gives_no_suggestion(
    losses: NDArray[np.float64], diverged: bool, message: str
) -> None:
    with pytest.raises(ResoluteError, match=message):
        suggestion(_test(losses, diverged=diverged))


def test_a_suggestion_from_a_loss_that_hardly_fell_is_called_uncertain() -> None:
    def losses(fall: float, noise: float) -> NDArray[np.float64]:
        """From 2, down by the fraction `fall` and up again, with the deviation `noise` as a fraction."""
        curve = np.concatenate([np.full(20, 1.0), np.linspace(1.0, 1.0 - fall, 40), np.linspace(1.0 - fall, 1.5, 40)])
        return 2 * (curve + noise * np.random.default_rng(0).choice((-1.0, 1.0), 100))

    assert doubt(_test(losses(0.2, 0.02))) == ""
    for fall, noise in ((0.03, 0.001), (0.2, 0.12)):  # less than a twentieth; less than twice the noise
        test = _test(losses(fall, noise))
        assert suggestion(test) > 0
        found = re.fullmatch(
            r"The loss fell by (\S+) % only \(noise (\S+) %\): the suggestion is uncertain\.", doubt(test)
        )
        assert found is not None
        assert float(found[1]) == pytest.approx(100 * fall, rel=0.35)
        assert float(found[2]) == pytest.approx(100 * noise, rel=0.35)
    for stored in STORED["sweeps"].values():
        lrs, curve = np.array(stored["lr"]), np.array(stored["loss"])
        assert doubt(RangeTest(lrs=lrs, losses=curve, width=len(lrs) / 25, diverged=False)) == ""


def test_a_noisy_loss_near_zero_is_no_divergence() -> None:
    losses = [2.3] * 10 + [0.01] * 70 + [0.8] * 10 + [9.0] * 50
    learner = SimpleNamespace(
        recipe=Recipe.parse(
            {"model": {"name": "test_resnet"}, "stages": [{"res": 32, "epochs": 1, "batch_size": 1}]}, name="x"
        ),
        rates=None,
        ema=None,
        train_step=lambda batch: (batch,),
    )
    test = range_test(None, losses, learner, low=1e-3, high=1e1, steps=140)  # type: ignore[arg-type]
    assert test.diverged
    assert 90 < len(test.losses) < 100


def test_the_sweep_equals_a_plain_training_loop(shard_set: ShardSet) -> None:
    steps, low, high, factor = 6, 1e-4, 1e-2, 2.0
    recipe = Recipe.parse(
        {
            "seed": 5,
            "model": {"name": "test_resnet"},
            "precision": {"amp": "off", "channels_last": False},
            "optim": {"name": "adamw", "weight_decay": 0.01},
            "loss": {"label_smoothing": 0.1},
            "stages": [{"res": 32, "epochs": 2, "batch_size": 16, "optim": {"lr_scale": factor}}],
        },
        name="x",
    )
    plan = recipe.plan(shard_set)
    learner = Learner(recipe, classes=3, total_steps=plan.total_steps, device=CPU)
    with Loader(plan, num_threads=1) as loader:
        test = range_test(plan, loader, learner, low=low, high=high, steps=steps)
    assert test.lrs == pytest.approx(np.geomspace(low, high, steps))

    torch.manual_seed(5)
    network = timm.create_model("test_resnet", num_classes=3)
    weights = [p for p in network.parameters() if p.ndim > 1]
    groups: list[dict[str, Any]] = [
        {"params": weights, "weight_decay": 0.01},
        {"params": [p for p in network.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    # why 0.85: the momentum of OneCycle at the peak of its learning rate
    optimizer = torch.optim.AdamW(groups, betas=(0.85, 0.999))
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: factor * low * (high / low) ** (step / (steps - 1)) / optimizer.defaults["lr"]
    )
    losses = []
    with Loader(plan, num_threads=1) as loader:
        for batch in [next(loader) for _ in range(steps)]:
            optimizer.zero_grad()
            network.train()
            loss = functional.cross_entropy(network(batch.images.contiguous()), batch.labels, label_smoothing=0.1)
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(float(loss.detach()))
    assert test.losses == pytest.approx(losses, rel=1e-4)


def _words(folder: Path, shards: Path, *more: str, optim: str = "") -> list[str]:
    (folder / "x.toml").write_text(f'[model]\nname = "test_resnet"\n[precision]\namp = "off"\n{optim}{STAGES}')
    return [
        "lr-find",
        "--shards",
        str(shards),
        "--recipe",
        str(folder / "x.toml"),
        "--device",
        "cpu",
        "--threads",
        "1",
        "--out",
        str(folder / "a.html"),
        *more,
    ]


@pytest.mark.slow
def test_the_command_draws_the_same_page_again_and_writes_nothing_else(
    shard_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = _words(tmp_path, shard_root, "--steps", "60")
    assert main(words) == 0
    printed, page = capsys.readouterr().out, (tmp_path / "a.html").read_bytes()
    assert main([*words, "--out", "b.html"]) == 0
    assert capsys.readouterr().out.replace("b.html", str(tmp_path / "a.html")) == printed
    assert (tmp_path / "b.html").read_bytes() == page
    assert {path.name for path in tmp_path.iterdir()} == {"x.toml", "a.html", "b.html"}
    assert "60 steps of stage 0 (32 px, batch 16), LR 0.001 to 10, sgd, seed 0" in printed
    (suggested,) = re.findall(r"^optim\.lr = ([0-9.e-]+) ", printed, re.M)
    assert f"optim.lr = {suggested}" in page.decode()
