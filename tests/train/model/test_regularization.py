"""Regularisation per stage, ramped with the resolution: values and oracles."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import nn
from torch.nn import functional

from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.loader import Batch
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import Augment
from resolute.train.learner import Learner
from resolute.train.planner.measure import restored
from resolute.train.recipe.schema import Recipe
from resolute.train.recipe.stages import RecipeStage, Regularization
from tests.support.networks import CPU, make_batch

RAMP = {
    "drop_rate": [0.1, 0.3],
    "drop_path_rate": [0.0, 0.4],
    "label_smoothing": [0.0, 0.2],
    "weight_decay": [0.0, 0.05],
}
SIZES = (32, 48, 64)


def _stage(res: int | list[int] = 32, **keys: Any) -> dict[str, Any]:
    return {"res": res, "epochs": 1, "batch_size": 8, **keys}


def _recipe(*stages: dict[str, Any], **tables: Any) -> Recipe:
    table = {"model": {"name": "test_resnet"}, "precision": {"amp": "off"}, "stages": [*stages] or [_stage()]}
    return Recipe.parse({**table, **tables}, name="x")


def _learner(recipe: Recipe) -> Learner:
    return Learner(recipe, classes=7, total_steps=12, device=CPU)


def _batch(index: int, stage: int = 0, res: int = 32) -> Batch:
    batch = make_batch(index, stage=stage)
    images = functional.interpolate(batch.images, res).to(memory_format=torch.channels_last)
    return dataclasses.replace(batch, images=images, spec=dataclasses.replace(batch.spec, res=res, epoch=0))


def _rates(network: nn.Module) -> dict[tuple[str, str], float]:
    """Rates of the network's stochastic depth, and of its dropout as attributes of modules and of the network."""
    return {
        (name, key): value
        for name, module in network.named_modules()
        for key, value in vars(module).items()
        if key in ("drop_prob", "p", "drop_rate") and value
    }


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_convnext"])
def test_rates_of_each_stage_and_resolution_equal_those_of_timms_model_with_them(name: str) -> None:
    recipe = _recipe(
        _stage(),
        _stage([48, 64], res_schedule="step"),
        _stage(64, regularization={"drop_rate": 0.0}),
        model={"name": name, "kwargs": {"proj_drop_rate": 0.15} if name == "test_vit" else {}},
        regularization={"drop_rate": [0.1, 0.3], "drop_path_rate": [0.0, 0.4]},
    )
    learner = _learner(recipe)
    for stage, res, drop, path in (
        (0, 32, 0.1, 0.0),
        (1, 48, 0.2, 0.2),
        (1, 64, 0.3, 0.4),
        (2, 64, 0.0, 0.4),
        (0, 32, 0.1, 0.0),
    ):
        learner.enter(stage, res)
        oracle = timm.create_model(name, num_classes=7, drop_rate=drop, drop_path_rate=path, **recipe.model.kwargs)
        assert _rates(oracle)
        assert _rates(learner.network) == pytest.approx(_rates(oracle), rel=1e-6)


def test_the_loss_of_each_stage_is_torchs_with_its_label_smoothing() -> None:
    recipe = _recipe(*map(_stage, SIZES), regularization={"label_smoothing": [0.0, 0.2]})
    learner = _learner(recipe)
    for stage, smoothing in enumerate((0.0, 0.1, 0.2)):
        batch = _batch(stage, stage, SIZES[stage])
        loss = float(learner.forward_backward(batch))
        with torch.no_grad():
            logits = learner.network(batch.images)
        own, partner = (
            functional.cross_entropy(logits, labels, label_smoothing=smoothing)
            for labels in (batch.targets, batch.partner_labels)
        )
        assert loss == pytest.approx(float(0.7 * own + 0.3 * partner), rel=1e-5)


def test_groups_have_the_stages_weight_decay_and_norms_and_biases_none() -> None:
    recipe = _recipe(
        *map(_stage, SIZES),
        _stage(64, regularization={"weight_decay": 0.2}),
        regularization={"weight_decay": [0.0, 0.05]},
        optim={"name": "adamw", "lr": 0.01, "layer_decay": 0.7, "lookahead": 2},
    )
    learner = _learner(recipe)
    for step, (stage, decay) in enumerate([(0, 0.0), (1, 0.025), (2, 0.05), (3, 0.2), (0, 0.0)]):
        with restored(learner):  # as measured steps before training; they leave another decay behind
            after = (stage + 1) % 4
            learner.train_step(_batch(step, after, recipe.stages[after].max_res))
        learner.train_step(_batch(step, stage, recipe.stages[stage].max_res))
        for group in learner.optimizer.param_groups:
            expected = decay if all(parameter.ndim > 1 for parameter in group["params"]) else 0.0
            assert group["weight_decay"] == pytest.approx(expected)


def test_pairs_are_linear_in_the_resolution_between_the_smallest_and_largest_of_the_run() -> None:
    recipe = _recipe(
        _stage(128),
        _stage([144, 176], res_step=16, epochs=3, regularization={"weight_decay": 0.1}),
        _stage(224),
        regularization={"drop_rate": [0.1, 0.3], "magnitude": [5, 15], "mixup_alpha": [0.2, 0], "weight_decay": [0, 1]},
        augment={"policy": "randaugment"},
    )
    expected = {
        (0, 128): (0.1, 5, 0.2, 0.0),
        (1, 144): (0.4 / 3, 7, 0.5 / 3, 0.1),
        (1, 160): (0.5 / 3, 8, 0.4 / 3, 0.1),
        (1, 176): (0.2, 10, 0.1, 0.1),
        (2, 224): (0.3, 15, 0.0, 1.0),
    }
    for (stage, res), values in expected.items():
        got = recipe.regularization_at(stage, res)
        names = ("drop_rate", "magnitude", "mixup_alpha", "weight_decay")
        assert [got[name] for name in names] == pytest.approx(values)
        assert recipe.stages[stage].augments[res].magnitude == values[1]
    assert Recipe.from_values(recipe.values(), name="x") == recipe
    scaled = _recipe(_stage(32, epochs=4), _stage(64, epochs=2), regularization=RAMP, scale_epochs=0.5)
    assert [stage.regularization.drop_rate for stage in scaled.stages] == [0.1, 0.3]


def test_batches_of_a_ramp_equal_those_of_stages_with_its_strengths(shard_set: ShardSet) -> None:
    augment = Augment(policy="randaugment", random_erasing_fill="noise", mixup_prob=0.7)
    ramp = RecipeStage(
        res=(32, 48, 64),
        res_schedule="random",
        epochs=1,
        batch_size=8,
        augment=augment,
        regularization=Regularization(
            magnitude=(0, 20), mixup_alpha=(0.0, 0.4), cutmix_alpha=1.0, random_erasing_prob=(0.0, 0.5)
        ),
    )
    plan, plans = Plan(shard_set, [ramp]), {}
    for res, (magnitude, alpha, erasing) in {32: (0, 0.0, 0.0), 48: (10, 0.2, 0.25), 64: (20, 0.4, 0.5)}.items():
        same = dataclasses.replace(
            augment, magnitude=magnitude, mixup_alpha=alpha, cutmix_alpha=1.0, random_erasing_prob=erasing
        )
        plans[res] = Plan(shard_set, [dataclasses.replace(ramp, augment=same, regularization=Regularization())])
    specs = [plan.batch(index) for index in range(plan.total_batches)]
    assert {spec.res for spec in specs if spec.split == "train"} == {32, 48, 64}
    for spec in specs:
        np.testing.assert_equal(dataclasses.asdict(spec), dataclasses.asdict(plans[spec.res].batch(spec.index)))
    assert len({plan.fingerprint, *(each.fingerprint for each in plans.values())}) == 4
    constant = dataclasses.replace(ramp, regularization=Regularization(mixup_alpha=0.3))
    written = dataclasses.replace(
        ramp, augment=dataclasses.replace(augment, mixup_alpha=0.3), regularization=Regularization(drop_rate=0.5)
    )
    assert Plan(shard_set, [constant]).fingerprint == Plan(shard_set, [written]).fingerprint
