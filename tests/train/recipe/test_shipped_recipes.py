"""Every recipe of `train/recipes`: its model takes its settings, a small model trains with them, and the heading, the
page about recipes and, where it says so, the published schedule agree with it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from resolute.train.logs.metrics import read_log
from resolute.train.model.build import build_model
from resolute.train.model.freeze import trainable_sets
from resolute.train.optim.optimizer import build_optimizer
from resolute.train.optim.schedule import epoch_samples, epoch_steps
from resolute.train.options import LrOptions, TrainOptions
from resolute.train.plot_lr import Curve
from resolute.train.recipe.schema import Recipe
from resolute.train.recipe.sections import StepSchedule
from resolute.train.setup import Run
from resolute.train.trainer import train
from tests import ROOT

FOLDER = ROOT / "train" / "recipes"
PATHS = sorted(FOLDER.glob("*.toml"))
RECIPES = {path.stem: Recipe.load(path) for path in PATHS}
# the comments at the top, below the line that names the schema
HEADINGS = {path.stem: path.read_text().partition("\n[")[0].partition("\n")[2] for path in PATHS}
SAMPLES = {"imagenet": 1_281_167, "dogs": 6_000}
STAND_INS = {
    "resnet": "test_resnet",
    "deit": "test_vit",
    "convnext": "test_convnext",
    "efficientnet": "test_efficientnet",
}

each_recipe = pytest.mark.parametrize("name", RECIPES)


@pytest.mark.slow
@each_recipe
def test_every_recipe_is_rebuilt_from_its_values_and_its_model_accepts_its_settings(name: str) -> None:
    recipe = RECIPES[name]
    assert Recipe.from_values(recipe.values(), name=name) == recipe
    with torch.device("meta"):  # why: only names and shapes matter
        network = build_model(
            dataclasses.replace(recipe.model, weights=""),
            classes=10,
            channels_last=False,
            device=torch.device("meta"),
            resolutions=recipe.resolutions,
        )
    sets = trainable_sets(recipe.stages, network)
    assert [len(earlier) <= len(later) for earlier, later in pairwise(sets)] == [True] * (len(sets) - 1)
    head = [name for name in dict(network.named_parameters()) if name.startswith("head.")]
    assert sets[-1] == {*(head if recipe.name == "linear_probe" else dict(network.named_parameters()))}
    groups = build_optimizer(recipe.optim, network).param_groups
    assert {group["weight_decay"] for group in groups} == {0.0, recipe.optim.weight_decay}
    assert (len({group.get("lr_scale", 1.0) for group in groups}) > 1) == (recipe.optim.layer_decay is not None)


# ---- headings and the page about recipes -----------------------------------------------------------------------------


def test_an_included_recipe_is_found_by_its_name_unless_a_file_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    included = LrOptions(recipe=Path("demo"), samples=9).recipe
    assert included is not None
    assert included.samefile(ROOT / "train/recipes/demo.toml")
    for own in ("demo.toml", "recipes/demo", "mine.txt"):
        Path(own).parent.mkdir(exist_ok=True)
        Path(own).touch()
        assert LrOptions(recipe=Path(own), samples=9).recipe == Path(own)


@pytest.mark.parametrize("name", [name for name in RECIPES if name.partition("_")[0] in SAMPLES])
def test_a_recipe_makes_as_many_passes_over_the_data_as_its_heading_says(name: str) -> None:
    samples = SAMPLES[name.partition("_")[0]]
    passes = sum(epoch_samples(RECIPES[name].stages, samples)) / samples
    written = re.findall(r"\b([\d.]+) (?:full )?(?:passes|epochs)\b", HEADINGS[name])
    assert any(float(number) == pytest.approx(passes, rel=2e-4) for number in written), passes


@each_recipe
def test_the_shards_of_the_heading_hold_every_resolution_of_the_recipe(name: str) -> None:
    command = re.search(r"make shards .*RES=([\d,]+)", HEADINGS[name])
    if command is None:
        assert name == "demo"
    else:
        assert max(RECIPES[name].resolutions) <= max(map(int, command[1].split(",")))


def test_the_page_about_recipes_has_each_one_and_says_which_were_not_run() -> None:
    rows = re.findall(r"^\| `(\w+)\.toml` \|.*\| (yes|no)[^|]* \|$", (ROOT / "docs" / "recipes.md").read_text(), re.M)
    assert sorted(rows) == sorted(
        (name, "no" if heading.startswith("# Not run by us. ") else "yes") for name, heading in HEADINGS.items()
    )


# ---- schedules -------------------------------------------------------------------------------------------------------


def _cosine(
    peak: float, epochs: int, *, rise: int = 0, first: float = 0.0, last: float = 0.0, counts_rise: bool = False
) -> list[float]:
    """A linear rise over `rise` epochs, which may count as epochs of the cosine, as in timm; a rate for each epoch."""
    fall = np.arange(rise, epochs) - (0 if counts_rise else rise)
    length = epochs if counts_rise else epochs - rise
    cosine = last + (peak - last) / 2 * (1 + np.cos(np.pi * fall / length))
    return [*np.linspace(first, peak, rise + 1)[:-1].tolist(), *cosine.tolist()]


@pytest.mark.parametrize(
    ("name", "expected", "tolerance"),
    [
        # tolerance: the largest difference, as a part of the peak, that the heading names
        ("imagenet_rn50_torchvision_v2", _cosine(0.5, 600, rise=5, first=0.005), 1e-4),
        ("imagenet_convnextv2_atto", _cosine(8e-4, 600, last=1e-6), 1e-4),
        ("imagenet_rn50_rsb_a3", _cosine(8e-3, 100, rise=5, first=1e-6, last=1e-6, counts_rise=True), 0.05),
        ("imagenet_deit3_base", _cosine(3e-3, 800, rise=5, first=1e-6, last=1e-5, counts_rise=True), 0.01),
        ("imagenet_deit3_base_224", _cosine(1e-5, 20, rise=5, first=1e-6, last=1e-5), 1e-5),
        ("imagenet_deit3_small", _cosine(4e-3, 800, rise=5, first=1e-6, last=1e-5, counts_rise=True), 0.01),
        ("imagenet_rn50_ffcv", np.interp(range(88), [0, 2, 88], [1.7e-4, 1.7, 0.0]).tolist(), 1e-5),
    ],
    ids=["torchvision", "convnext", "rsb", "deit3-base", "deit3-base-224", "deit3", "ffcv"],
)
def test_the_learning_rate_follows_the_published_schedule(name: str, expected: list[float], tolerance: float) -> None:
    recipe = RECIPES[name]
    curve, steps = Curve(recipe, 12_812), epoch_steps(recipe.stages, 12_812)
    stages = [number for number, stage in enumerate(recipe.stages) for _ in range(stage.epochs)]
    rates = [curve.at(stages[epoch], first)[0] for epoch, first in enumerate(np.cumsum([0, *steps[:-1]]).tolist())]
    assert len(rates) == len(expected)
    peak = max(expected)
    worst = max(abs(got - want) for got, want in zip(rates, expected, strict=True)) / peak
    assert worst < tolerance
    assert (max(rates), rates.index(max(rates))) == (pytest.approx(peak, rel=0.01), expected.index(peak))


# ---- a few real steps ------------------------------------------------------------------------------------------------


def _small(recipe: Recipe, samples: int) -> Recipe:
    """The recipe with a small model of the same kind, at most 64 px and three steps per stage and resolution; all else
    is kept.
    """
    model = next(small for kind, small in STAND_INS.items() if kind in recipe.model.name)
    largest = max(recipe.resolutions)

    def res(size: int) -> int:
        return max(32, round(4 * size / largest) * 16)

    stages = tuple(
        dataclasses.replace(
            stage,
            res=tuple(map(res, stage.res)) if isinstance(stage.res, tuple) else res(stage.res),
            fraction=1.0,
            res_step=None,
            eval_res=res(stage.validation_res),
            batch_size=math.ceil(samples / 3),
            base_batch_size=None,
            epochs=len(stage.resolutions),
        )
        for stage in recipe.stages
    )
    schedule = recipe.schedule
    if not isinstance(schedule, StepSchedule) and schedule.warmup_epochs:
        share = sum(stage.epochs for stage in stages) / recipe.total_epochs
        schedule = dataclasses.replace(schedule, warmup_epochs=share * schedule.warmup_epochs)
    return dataclasses.replace(
        recipe,
        stages=stages,
        model=dataclasses.replace(recipe.model, name=model, weights=""),
        schedule=schedule,
        precision=dataclasses.replace(recipe.precision, amp="off"),
        eval=dataclasses.replace(recipe.eval, batch_size=15),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "dogs_efficientnet_b4",
        "imagenet_rn50",
        "imagenet_rn50_efficienttrain",
        "imagenet_deit3_small",
        "imagenet_convnextv2_atto",
        "imagenet_rn18_ffcv",
        "linear_probe",
    ],
)
def test_three_steps_of_every_stage_train_with_a_small_model(
    name: str, shard_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = _small(RECIPES[name], 75 if RECIPES[name].data.folds is None else 50)
    monkeypatch.setattr(Recipe, "from_text", lambda text: small)
    path = FOLDER / f"{name}.toml"
    options = TrainOptions(shards=str(shard_root), recipe=path, device="cpu", threads=1)
    assert train(Run(options=options, shards=shard_root, folder=tmp_path / "run")) == 0
    steps = [record for record in read_log(tmp_path / "run" / "run.jsonl") if record["kind"] == "step"]
    expected = [number for number, stage in enumerate(small.stages) for _ in range(3 * stage.epochs)]
    assert [step["stage"] for step in steps] == expected
    assert all(math.isfinite(step["loss"]) and step["lr"] > 0 for step in steps)
