"""Every recipe of `train/recipes`: planned on a set of its size, trained for a few steps with a small model, and held
against its heading, the page about recipes and, where it says so, the published schedule.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from timm.scheduler import CosineLRScheduler
from torch.optim import lr_scheduler

from resolute.pipeline.dataset.shard_set import ShardSet, Split
from resolute.train.logs.metrics import read_log
from resolute.train.model.build import build_model
from resolute.train.model.freeze import trainable_sets
from resolute.train.optim.optimizer import build_optimizer
from resolute.train.optim.schedule import epoch_samples, epoch_steps
from resolute.train.options import LrOptions
from resolute.train.plot_lr import Curve
from resolute.train.recipe.schema import Recipe
from resolute.train.trainer import Options, run
from tests import ROOT
from tests.train.test_targets import of_kind

FOLDER = ROOT / "train" / "recipes"
PATHS = sorted(FOLDER.glob("*.toml"))
RECIPES = {path.stem: Recipe.load(path) for path in PATHS}
# the comments at the top, below the line that names the schema
HEADINGS = {path.stem: path.read_text().partition("\n[")[0].partition("\n")[2] for path in PATHS}
IMAGENET, CIFAR = (1_281_167, 50_000), (50_000, 10_000)
# training and validation photos of other sets
SIZES = {"demo": (2_700, 300), "dogs_efficientnet_b4": (6_000, 3_000), "cifar10": CIFAR,
         "imagenette_cpu": (2_911, 720),
         "imagenette_cpu_whole": (9_469, 3_925), "imagenette_cpu_quick": (9_469, 3_925)}  # fmt: skip
STAND_INS = {"resnet": "test_resnet", "deit": "test_vit", "convnext": "test_convnext",
             "efficientnet": "test_efficientnet"}  # fmt: skip

each_recipe = pytest.mark.parametrize("name", RECIPES)


def _samples(name: str) -> tuple[int, int]:
    return SIZES.get(name, IMAGENET if name.startswith("imagenet_") else (3_000, 300))


def _made_up(shards: ShardSet, recipe: Recipe, samples: tuple[int, int]) -> ShardSet:
    """A set of that many training and validation samples, with the records of the few in `shards` over and over."""

    def split(real: Split, count: int) -> Split:
        rows = np.resize(np.arange(len(real)), count)
        stored = max(real.stored)
        return dataclasses.replace(
            real, samples=real.samples[rows],
            stored=dict.fromkeys(recipe.resolutions, real.stored[stored][rows]),
        )  # fmt: skip

    splits = {name: split(shards.splits[name], count)
              for name, count in zip(("train", "val"), samples, strict=True)}  # fmt: skip
    return dataclasses.replace(shards, splits=splits, resolutions=recipe.resolutions)


@each_recipe
def test_every_recipe_can_be_planned_on_a_set_of_its_size(name: str, shard_set: ShardSet) -> None:
    recipe, samples = RECIPES[name], _samples(name)
    plan = recipe.plan(_made_up(shard_set, recipe, samples))
    assert plan.total_steps == sum(epoch_steps(recipe.stages, samples[0]))
    for number, stage in enumerate(recipe.stages):
        spec = plan.batch(plan.largest_batch(number))
        assert (spec.stage, spec.res, len(spec)) == (number, stage.max_res, stage.batch_size_at(stage.max_res))
        assert len(np.unique(spec.ids)) == len(spec)
        assert 0 <= spec.ids.min() <= spec.ids.max() < samples[0]
    last = plan.batch(plan.total_batches - 1)
    assert (last.split, last.res, last.last) == ("val", recipe.stages[-1].validation_res, True)


@each_recipe
def test_every_recipes_model_accepts_its_settings_resolutions_layers_and_optimizer(name: str) -> None:
    recipe = RECIPES[name]
    with torch.device("meta"):  # why: only names and shapes matter
        network = build_model(
            dataclasses.replace(recipe.model, weights=""), classes=10, channels_last=False, device=torch.device("meta"),
            resolutions=recipe.resolutions,
        )  # fmt: skip
    sets = trainable_sets(recipe.freeze, recipe.stages, network)
    assert [len(earlier) <= len(later) for earlier, later in pairwise(sets)] == [True] * (len(sets) - 1)
    assert len(sets[-1]) == len(dict(network.named_parameters()))
    groups = build_optimizer(recipe.optim, network).param_groups
    assert {group["weight_decay"] for group in groups} == {0.0, recipe.optim.weight_decay}
    assert (len({group.get("lr_scale", 1.0) for group in groups}) > 1) == (recipe.optim.layer_decay is not None)


@each_recipe
def test_every_recipe_is_rebuilt_from_its_values(name: str) -> None:
    assert Recipe.from_values(RECIPES[name].values(), name=name) == RECIPES[name]


# ---- headings --------------------------------------------------------------------------------------------------------

PASSES = {
    "imagenet_rn50": 38.75, "imagenet_rn50_fixed224": 50, "imagenet_rn50_ffcv": 88, "imagenet_rn18_ffcv": 88,
    "imagenet_rn50_rsb_a3": 100, "imagenet_rn50_torchvision_v2": 600, "imagenet_rn50_efficienttrain": 455,
    "imagenet_deit3_small": 800, "imagenet_convnextv2_atto": 600, "cifar10": 24, "dogs_efficientnet_b4": 14,
    "imagenette_cpu": 68, "imagenette_cpu_whole": 23, "imagenette_cpu_quick": 5,
}  # fmt: skip


def test_an_included_recipe_is_found_by_its_name_unless_a_file_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert LrOptions(recipe=Path("demo"), samples=9).recipe.samefile(ROOT / "train/recipes/demo.toml")
    for own in ("demo.toml", "recipes/demo", "mine.txt"):
        Path(own).parent.mkdir(exist_ok=True)
        Path(own).touch()
        assert LrOptions(recipe=Path(own), samples=9).recipe == Path(own)


@pytest.mark.parametrize(("name", "passes"), PASSES.items())
def test_a_recipe_makes_as_many_passes_over_the_data_as_its_heading_says(name: str, passes: float) -> None:
    samples = _samples(name)[0]
    assert sum(epoch_samples(RECIPES[name].stages, samples)) / samples == pytest.approx(passes, rel=2e-4)
    if not name.startswith("imagenette_"):
        assert re.search(rf"\b{passes:g} (full )?(passes|epochs)\b", HEADINGS[name])


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


def _torch_rates(lr: float, epochs: int, *build: Callable[[torch.optim.Optimizer], Any], at: int = 0) -> list[float]:
    """The learning rate of each epoch by torch's schedulers, stepped once an epoch; the second one begins at `at`."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr)
    schedulers = [make(optimizer) for make in build]
    scheduler = schedulers[0] if len(build) == 1 else lr_scheduler.SequentialLR(optimizer, schedulers, [at])
    rates = []
    for _ in range(epochs):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def _torchvision() -> list[float]:
    return _torch_rates(
        0.5, 600, lambda optimizer: lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=5),
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=595), at=5,
    )  # fmt: skip


def _convnext() -> list[float]:
    return _torch_rates(8e-4, 600, lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=600, eta_min=1e-6))


def _timm(lr: float, epochs: int, last: float) -> list[float]:
    """timm's cosine, which counts the five epochs of the warm-up as its own."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr)
    scheduler = CosineLRScheduler(optimizer, t_initial=epochs, lr_min=last, warmup_t=5, warmup_lr_init=1e-6)
    rates = []
    for epoch in range(epochs):
        scheduler.step(epoch)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def _ffcv(lr: float) -> list[float]:
    return np.interp(range(88), [0, 2, 88], [1e-4 * lr, lr, 0.0]).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("name", "published", "tolerance"), [
    # tolerance: the largest difference, as a part of the peak, that the heading names
    ("imagenet_rn50_torchvision_v2", _torchvision, 1e-4), ("imagenet_convnextv2_atto", _convnext, 1e-4),
    ("imagenet_rn50_rsb_a3", lambda: _timm(8e-3, 100, 1e-6), 0.05),
    ("imagenet_deit3_small", lambda: _timm(4e-3, 800, 1e-5), 0.01),
    ("imagenet_rn50_ffcv", lambda: _ffcv(1.7), 0.11),
])  # fmt: skip
def test_the_learning_rate_follows_the_published_schedule(
    name: str, published: Callable[[], list[float]], tolerance: float
) -> None:
    recipe, expected = RECIPES[name], published()
    curve, steps = Curve(recipe, 12_812), epoch_steps(recipe.stages, 12_812)
    stages = [number for number, stage in enumerate(recipe.stages) for _ in range(stage.epochs)]
    rates = [curve.at(stages[epoch], first)[0] for epoch, first in enumerate(np.cumsum([0, *steps[:-1]]).tolist())]
    assert len(rates) == len(expected)
    peak = max(expected)
    worst = max(abs(got - want) for got, want in zip(rates, expected, strict=True)) / peak
    assert worst < tolerance
    assert (max(rates), rates.index(max(rates))) == (pytest.approx(peak, rel=0.01), expected.index(peak))


@each_recipe
def test_early_stopping_cannot_end_a_run_before_its_last_stage(name: str) -> None:
    """A change of the validation resolution restarts the patience, so each earlier stage must be too short for it."""
    recipe = RECIPES[name]
    early = recipe.stages[:-1] if recipe.stop.patience else ()
    sizes = [stage.validation_res for stage in recipe.stages]
    assert all(stage.epochs <= recipe.stop.patience for stage in early)
    assert not early or len({*sizes}) == len(sizes)


# ---- a few real steps ------------------------------------------------------------------------------------------------


def _small(recipe: Recipe, samples: int) -> Recipe:
    """The recipe with a small model of the same kind, at most 64 px and three steps per stage and resolution; all else
    is kept.
    """
    model = next(small for kind, small in STAND_INS.items() if kind in recipe.model.name)
    largest = max(recipe.resolutions)

    def res(size: int) -> int:
        return max(32, round(4 * size / largest) * 16)

    stages = tuple(dataclasses.replace(
        stage, res=tuple(map(res, stage.res)) if isinstance(stage.res, tuple) else res(stage.res), fraction=1.0,
        res_step=None, eval_res=res(stage.validation_res), batch_size=math.ceil(samples / 3), base_batch_size=None,
        epochs=len(stage.resolutions),
    ) for stage in recipe.stages)  # fmt: skip
    epochs, warmup = sum(stage.epochs for stage in stages), recipe.schedule.warmup_epochs
    return dataclasses.replace(
        recipe, stages=stages, model=dataclasses.replace(recipe.model, name=model, weights=""),
        schedule=dataclasses.replace(
            recipe.schedule, warmup_epochs=warmup and warmup * epochs / recipe.total_epochs
        ),
        precision=dataclasses.replace(recipe.precision, amp="off"),
        eval=dataclasses.replace(recipe.eval, batch_size=15),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", [
    "demo", "cifar10", "labels_cpu", "values_cpu", "imagenette_cpu", "dogs_efficientnet_b4", "imagenet_rn50",
    "imagenet_rn50_ffcv", "imagenet_rn50_rsb_a3", "imagenet_rn50_efficienttrain", "imagenet_deit3_small",
    "imagenet_convnextv2_atto",
])  # fmt: skip
def test_three_steps_of_every_stage_train_with_a_small_model(
    name: str, shard_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = name.partition("_")[0]
    root = of_kind(kind, shard_root, tmp_path / "set").root if kind in ("labels", "values") else shard_root
    small = _small(RECIPES[name], 75 if RECIPES[name].data.folds is None else 50)
    monkeypatch.setattr(Recipe, "load", lambda path: small)
    options = Options(shards=root, recipe=FOLDER / f"{name}.toml", folder=tmp_path / "run", device="cpu", threads=1)
    assert run(options) == 0
    steps = [record for record in read_log(tmp_path / "run" / "run.jsonl") if record["kind"] == "step"]
    expected = [number for number, stage in enumerate(small.stages) for _ in range(3 * stage.epochs)]
    assert [step["stage"] for step in steps] == expected
    assert all(math.isfinite(step["loss"]) and step["lr"] > 0 for step in steps)
