"""Regularisation that a stage overrides: values and oracles."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional

from resolute.errors import ResoluteError
from resolute.pipeline.loader.batch import Batch
from resolute.train.learner import Learner
from resolute.train.planner.measure import restored
from resolute.train.recipe.schema import Recipe
from resolute.train.recipe.sections import BinaryLoss
from tests.support.networks import CPU, make_batch

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
def test_rates_of_each_stage_equal_those_of_timms_model_with_them(name: str) -> None:
    recipe = _recipe(
        _stage(),
        _stage([48, 64], res_schedule="step", model={"drop_rate": 0.2, "drop_path_rate": 0.2}),
        _stage(64, model={"drop_rate": 0.0, "drop_path_rate": 0.4}),
        model={"name": name, "drop_rate": 0.1, "kwargs": {"proj_drop_rate": 0.15} if name == "test_vit" else {}},
    )
    learner = _learner(recipe)
    for stage, drop, path in ((0, 0.1, 0.0), (1, 0.2, 0.2), (2, 0.0, 0.4), (0, 0.1, 0.0)):
        learner.enter(stage)
        oracle = timm.create_model(name, num_classes=7, drop_rate=drop, drop_path_rate=path, **recipe.model.kwargs)
        assert _rates(oracle)
        assert _rates(learner.network) == pytest.approx(_rates(oracle), rel=1e-6)


def test_the_loss_of_each_stage_is_torchs_with_its_label_smoothing() -> None:
    smoothings = (0.0, 0.1, 0.2)
    recipe = _recipe(
        *(_stage(res, loss={"label_smoothing": value}) for res, value in zip(SIZES, smoothings, strict=True))
    )
    learner = _learner(recipe)
    for stage, smoothing in enumerate(smoothings):
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
        _stage(32, optim={"weight_decay": 0.0}),
        _stage(48, optim={"weight_decay": 0.025}),
        _stage(64),
        _stage(64, optim={"weight_decay": 0.2}),
        optim={"name": "adamw", "lr": 0.01, "weight_decay": 0.05, "layer_decay": 0.7, "lookahead": 2},
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


def test_a_stage_overrides_keys_of_the_run_and_no_others() -> None:
    recipe = _recipe(
        _stage(128, augment={"magnitude": 5}, optim={"lr_scale": 0.5}, epochs=4),
        _stage(224, loss={"label_smoothing": 0.0}, epochs=2),
        augment={"policy": "randaugment", "mixup_alpha": 0.2},
        loss={"kind": "bce", "label_smoothing": 0.1, "sum_classes": True},
        scale_epochs=0.5,
    )
    first, last = recipe.in_stage(0), recipe.in_stage(1)
    assert (first.augment.magnitude, first.augment.mixup_alpha, first.optim.lr_scale) == (5, 0.2, 0.5)
    assert (last.augment.magnitude, last.optim) == (9, recipe.optim)
    assert first.loss == recipe.loss
    assert isinstance(recipe.loss, BinaryLoss)
    assert last.loss == dataclasses.replace(recipe.loss, label_smoothing=0.0)
    assert Recipe.from_values(recipe.values(), name="x") == recipe


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (
            {"stages": [_stage(loss={"gamma_neg": 2.0})]},
            "x: stages.loss.gamma_neg: not a key that a stage overrides; known: label_smoothing",
        ),
        (
            {"stages": [_stage(loss={"label_smoothing": 0.1})], "loss": {"kind": "asl"}},
            "x: stages.loss.label_smoothing: without effect, loss.kind is asl; remove it",
        ),
        (
            {"stages": [_stage(loss={"label_smoothing": 1.0})]},
            "x: stages.loss.label_smoothing: got 1.0, expected number, at least 0, below 1; correct it",
        ),
        (
            {"stages": [_stage(model={"drop_rat": 0.1})]},
            "x: stages.model.drop_rat: not a key that a stage overrides; did you mean drop_rate?",
        ),
        ({"stages": [_stage(optim=0.5)]}, "x: stages.optim: got 0.5, expected a table; correct it"),
        (
            {"stages": [_stage(model={"drop_rate": 0.1})], "model": {"drop_rate": 0.2}},
            "x: model.drop_rate: without effect, every stage overrides it; remove it",
        ),
        (
            {"stages": [_stage(), _stage(augment={"magnitude": 3})]},
            "x: stages.augment.magnitude: without effect, policy is not randaugment; remove it",
        ),
    ],
)
def test_a_key_that_a_stage_cannot_override_is_refused_in_one_line(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ResoluteError) as error:
        Recipe.parse(tables, name="x", where="x")
    assert str(error.value) == message
