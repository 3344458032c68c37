"""Stages with several resolutions: no interruption of a run changes a bit, and sizes of batches follow the pixels."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from resolute.cli import main
from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.batch import Batch
from resolute.train.learner import Learner
from resolute.train.optim.schedule import Rates, epoch_samples, epoch_steps
from resolute.train.recipe.schema import Recipe
from tests.support.cli import prep
from tests.train.conftest import assert_equal_runs, train_words

RECIPE = """
seed = 3
model = { name = "test_resnet", drop_rate = 0.4, drop_path_rate = 0.4 }
optim = { lr = 0.1, weight_decay = 0.01 }
loss = { label_smoothing = 0.1 }
ema = { decay = 0.5 }
schedule = { batch_rule = "linear" }
precision = { amp = "off" }
augment = { policy = "randaugment", magnitude = 12, mixup_alpha = 0.4, random_erasing_prob = 0.5 }
eval = { batch_size = 8 }
[[stages]]
res = [32, 64]
res_step = 16
res_schedule = "step"
epochs = 2
batch_size = "constant_pixels"
base_batch_size = 8
model = { drop_rate = 0.1, drop_path_rate = 0.0 }
optim.weight_decay = 0.0
loss.label_smoothing = 0.0
augment = { magnitude = 2, mixup_alpha = 0.0, random_erasing_prob = 0.0 }
[[stages]]
res = [40, 56, 36]
res_schedule = "random"
epochs = 1
batch_size = 8
eval_res = 60
"""


@pytest.fixture
def ramp_file(tmp_path: Path) -> Path:
    path = tmp_path / "ramp.toml"
    path.write_text(RECIPE)
    return path


class Cut(Exception):
    pass


@pytest.mark.slow
def test_a_run_cut_inside_its_ramps_is_bit_identical_even_if_a_resolution_is_added_in_between(
    shard_root: Path,
    ramp_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ramps of resolution and of regularisation."""
    assert main(train_words(shard_root, ramp_file, tmp_path / "whole")) == 0
    out = capsys.readouterr().out
    changes = re.findall(r"^change (\S+) -> (\S+) px: ", out, re.MULTILINE)
    assert ("32", "48") in changes
    assert len(changes) >= 2
    root = Path(shutil.copytree(shard_root, tmp_path / "shards"))
    words = train_words(root, ramp_file, tmp_path / "cut", "--save-every-steps", "2")
    train_step = Learner.train_step
    for cut in (8, 20):  # in the first stage at 48 px, and in the second

        def cutting(self: Learner, batch: Batch, cut: int = cut) -> Any:
            if batch.spec.step == cut:
                raise Cut
            return train_step(self, batch)

        with monkeypatch.context() as patch:
            patch.setattr(Learner, "train_step", cutting)
            with pytest.raises(Cut):
                main(words)
        if cut == 8:  # why 40: drawn in the second stage, and until now read from 48 px
            added = [
                "--src",
                shard_root.parent / "photos",
                "--out",
                root,
                "--res",
                "32,40,48,64",
                "--val-frac",
                "0.17",
                "--shard-samples",
                "32",
            ]
            assert prep([str(word) for word in added]) == 0
            assert 40 in ShardSet.open(root).resolutions
    assert main(words) == 0
    assert_equal_runs(tmp_path / "cut" / "ramp", tmp_path / "whole" / "ramp")


def test_logged_learning_rates_follow_the_batch_size_of_each_resolution() -> None:
    recipe = Recipe.parse(
        {
            "stages": [
                {"res": [32, 64], "epochs": 2, "batch_size": [32, 8], "optim": {"lr_scale": 0.5}},
                {"res": 64, "epochs": 1, "batch_size": 16},
            ],
            "schedule": {"batch_rule": "linear"},
        },
        name="x",
    )
    steps = epoch_steps(recipe.stages, 64)
    assert (steps, epoch_samples(recipe.stages, 64)) == ([2, 8, 4], [64] * 3)
    rates = Rates(recipe.schedule, recipe.optim, recipe.stages, total_steps=14, epoch_steps=steps)
    assert [rates.factor(0, 32), rates.factor(0, 64), rates.factor(1, 64)] == [0.5, 0.125, 0.5]


def test_constant_pixels_without_a_base_takes_that_of_the_nearest_stage() -> None:
    def sizes(*stages: dict[str, Any]) -> list[list[int]]:
        recipe = Recipe.parse({"stages": [{"epochs": 4, **stage} for stage in stages]}, name="x")
        again = Recipe.from_values(recipe.values(), name="x")
        assert again == recipe
        assert again.hash == recipe.hash
        return [[shape.batch_size for shape in stage.shapes] for stage in recipe.stages]

    ramp = {"res": [128, 256], "batch_size": "constant_pixels"}
    assert sizes({"res": 128, "batch_size": 64}, ramp) == [[64], [64, 16]]
    assert sizes(ramp, {"res": 256, "batch_size": 8}) == [[32, 8], [8]]
    assert sizes({"res": 128, "batch_size": 64}, {"res": 256, "batch_size": "constant_pixels"}) == [[64], [16]]
    assert sizes({**ramp, "base_batch_size": 10}) == [[40, 10]]
    with pytest.raises(ResoluteError, match=r"stages\.base_batch_size: got none, expected the batch size at 256 px"):
        sizes(ramp)
