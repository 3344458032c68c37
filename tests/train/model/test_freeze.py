"""Freezing: frozen layers do not change and cost no backward pass; unfrozen ones start with clean state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch

from resolute.errors import ResoluteError
from resolute.pipeline.loader.batch import Batch
from resolute.train.learner import Learner
from resolute.train.model.freeze import layers, trainable_sets
from resolute.train.recipe.schema import Recipe
from resolute.train.recipe.stages import RecipeStage
from tests.support.networks import CPU, make_batch

EACH = 2  # steps of each stage
NORMS = ("running_mean", "running_var", "num_batches_tracked")


def _recipe(*names: str | None, model: str = "test_resnet", **tables: Any) -> Recipe:
    stages = [{"res": 32, "epochs": 1, "batch_size": 8} | ({"train_from": name} if name else {}) for name in names]
    model_table = {"name": model, "kwargs": {"img_size": 32}} if model == "test_vit" else {"name": model}
    table = {
        "model": model_table,
        "stages": stages,
        "ema": {"decay": 0.5},
        "precision": {"amp": "off"},
    }
    return Recipe.parse({**table, **tables}, name="x")


def _learner(recipe: Recipe) -> Learner:
    steps = [EACH] * len(recipe.stages)
    return Learner(recipe, classes=4, total_steps=sum(steps), device=CPU, epoch_steps=steps)


def _batch(step: int) -> Batch:
    return make_batch(step, stage=step // EACH, classes=4)


@pytest.mark.parametrize(
    ("name", "trained"),
    [
        ("layer3", ("layer3", "layer4", "fc")),
        ("layer3.0.conv1", ("layer3", "layer4", "fc")),
        ("head", ("fc",)),
        ("fc", ("fc",)),
        ("conv1", ("",)),
        (None, ("",)),
    ],
)
def test_a_layer_name_trains_it_and_all_layers_above(name: str | None, trained: tuple[str, ...]) -> None:
    network = timm.create_model("test_resnet")
    stage = RecipeStage(res=32, epochs=1, batch_size=8, train_from=name)
    (trainable,) = trainable_sets([stage], network)
    assert trainable == {n for n, _ in network.named_parameters() if n.startswith(trained)}


def test_an_ambiguous_name_means_the_first_layer_and_an_unknown_one_is_refused_with_the_known_ones() -> None:
    network = timm.create_model("test_vit")
    stage = RecipeStage(res=160, epochs=1, batch_size=8, train_from="blocks")
    (trainable,) = trainable_sets([stage], network)
    assert {n for n, _ in network.named_parameters()} - trainable == set(layers(network)["cls_token"])
    with pytest.raises(ResoluteError) as error:
        _learner(_recipe("head", "layr3"))
    assert str(error.value) == (
        "stages[1].train_from: got 'layr3', expected a layer of the model "
        "(conv1, layer1, layer2, layer3, layer4, fc) or head; did you mean layer3?"
    )


@pytest.mark.parametrize(
    ("model", "layer", "optim"),
    [
        ("test_resnet", "layer3", {"name": "sgd", "lr": 0.1}),
        ("test_efficientnet", "blocks.2", {"name": "adamw", "lr": 0.01}),
    ],
)
def test_frozen_weights_and_statistics_stay_and_all_others_change(
    model: str, layer: str, optim: dict[str, Any]
) -> None:
    learner = _learner(_recipe(layer, model=model, optim={**optim, "weight_decay": 0.1}))
    trained = learner.freezer.sets[0]
    before = copy.deepcopy(learner.network.state_dict())
    for step in range(EACH):
        learner.train_step(_batch(step))
    modules = {name.rpartition(".")[0] for name in trained}
    for name, value in learner.network.state_dict().items():
        module, _, tensor = name.rpartition(".")
        moves = module in modules if tensor in NORMS else name in trained
        assert torch.equal(value, before[name]) != moves, name


@pytest.mark.parametrize(("model", "name"), [("test_resnet", "layer3"), ("test_vit", "blocks.4")])
def test_no_backward_pass_runs_below_the_lowest_trainable_layer(model: str, name: str) -> None:
    learner = _learner(_recipe(name, None, model=model))
    known = ["patch_embed" if layer == "cls_token" else layer for layer in layers(learner.network)]
    needs: dict[str, bool] = {}
    for layer in known:
        learner.network.get_submodule(layer).register_forward_hook(
            lambda _, inputs, out, layer=layer: needs.update({layer: out.requires_grad})
        )
    learner.forward_backward(_batch(0))
    assert needs == {layer: known.index(layer) >= known.index(name) > 0 for layer in known}
    assert not all(parameter.grad is not None for parameter in learner.network.parameters())
    learner.forward_backward(_batch(EACH))
    assert needs == dict.fromkeys(known, True)
    assert all(parameter.grad is not None for parameter in learner.network.parameters())


def test_unfrozen_parameters_start_with_clean_optimizer_state() -> None:
    learner = _learner(_recipe("layer4", "layer2", "head", optim={"name": "adamw", "lr": 0.01}))

    def ages() -> dict[str, int]:
        state = learner.optimizer.state
        return {name: int(state[p]["step"]) for name, p in learner.network.named_parameters() if p in state}

    expected = [{"fc": 2, "layer4": 2}, {"fc": 4, "layer4": 4, "layer3": 2, "layer2": 2}, {"fc": 6}]
    for stage, layers_ in enumerate(expected):
        for step in range(EACH * stage, EACH * (stage + 1)):
            learner.train_step(_batch(step))
        assert ages() == {
            name: age
            for name, _ in learner.network.named_parameters()
            for layer, age in layers_.items()
            if name.startswith(layer)
        }
