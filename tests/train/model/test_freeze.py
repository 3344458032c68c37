"""Freezing: frozen layers do not change and cost no backward pass; unfrozen ones start with clean state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from timm.optim import Lamb
from torch import nn

from resolute.errors import ResoluteError
from resolute.pipeline.loader.loader import Batch
from resolute.train.loop import Learner
from resolute.train.model.freeze import Freezer, layers, trainable_sets
from resolute.train.recipe.schema import Freeze, Recipe
from resolute.train.recipe.stages import RecipeStage
from tests.support.networks import CPU, make_batch

EACH = 2  # steps of each stage
NORMS = ("running_mean", "running_var", "num_batches_tracked")


def _recipe(mode: str, *names: str | None, model: str = "test_resnet", **tables: Any) -> Recipe:
    stages = [{"res": 32, "epochs": 1, "batch_size": 8} | ({f"{mode}_to": name} if name else {}) for name in names]
    model_table = {"name": model, "kwargs": {"img_size": 32}} if model == "test_vit" else {"name": model}
    table = {"model": model_table, "freeze": {"mode": mode}, "stages": stages, "ema": {"decay": 0.5},
             "precision": {"amp": "off"}}  # fmt: skip
    return Recipe.parse({**table, **tables}, name="x")


def _learner(recipe: Recipe) -> Learner:
    steps = [EACH] * len(recipe.stages)
    return Learner(recipe, classes=4, total_steps=sum(steps), device=CPU, epoch_steps=steps)


def _batch(step: int) -> Batch:
    return make_batch(step, stage=step // EACH, classes=4)


@pytest.mark.parametrize(("model", "expected"), [
    ("resnet18", ["conv1", "layer1", "layer2", "layer3", "layer4", "fc"]),
    ("vit_tiny_patch16_224", ["cls_token", *(f"blocks.{i}" for i in range(12)), "head"]),
    ("caformer_s18", ["stem", *(f"stages.{i}" for i in range(4)), "head.norm", "head.fc"]),  # timm has no order of it
    ("rdnet_tiny", ["stem.0", "stem.1", "dense_stages.0"]),  # timm has no coarse order of it
])  # fmt: skip
def test_layers_are_in_timms_order_and_hold_every_parameter_once(model: str, expected: list[str]) -> None:
    with torch.device("meta"):
        network = timm.create_model(model)
    named_layers = layers(network)
    assert list(named_layers)[: len(expected)] == expected
    everything = sorted(name for name, _ in network.named_parameters())
    assert sorted(name for names in named_layers.values() for name in names) == everything
    head = {id(parameter) for parameter in network.get_classifier().parameters()}
    last = set(list(named_layers.values())[-1])
    assert head == {id(parameter) for name, parameter in network.named_parameters() if name in last} & head


@pytest.mark.parametrize(("mode", "name", "trained"), [
    ("unfreeze", "layer3", ("layer3", "layer4", "fc")), ("freeze", "layer3", ("layer3", "layer4", "fc")),
    ("unfreeze", "none", ("fc",)), ("freeze", "all", ("fc",)), ("unfreeze", "all", ("",)), ("freeze", "none", ("",)),
    ("unfreeze", "layer3.0.conv1", ("layer3", "layer4", "fc")), ("freeze", None, ("",)), ("freeze", "bn1", ("",)),
])  # fmt: skip
def test_a_layer_name_trains_it_and_all_layers_above(mode: Any, name: str | None, trained: tuple[str, ...]) -> None:
    network = timm.create_model("test_resnet")
    stage = RecipeStage(res=32, epochs=1, batch_size=8, **{f"{mode}_to": name})
    (trainable,) = trainable_sets(Freeze(mode=mode), [stage], network)
    assert trainable == {n for n, _ in network.named_parameters() if n.startswith(trained)}


def test_an_ambiguous_name_means_the_first_layer_and_an_unknown_one_is_refused_with_the_known_ones() -> None:
    network = timm.create_model("test_vit")
    stage = RecipeStage(res=160, epochs=1, batch_size=8, unfreeze_to="blocks")
    (trainable,) = trainable_sets(Freeze(mode="unfreeze"), [stage], network)
    assert {n for n, _ in network.named_parameters()} - trainable == set(layers(network)["cls_token"])
    with pytest.raises(ResoluteError) as error:
        _learner(_recipe("unfreeze", "none", "layr3"))
    assert str(error.value) == (
        "stages[1].unfreeze_to: got 'layr3', expected a layer of the model "
        "(conv1, layer1, layer2, layer3, layer4, fc), all or none; did you mean layer3?"
    )


@pytest.mark.parametrize(("mode", "names", "message"), [
    ("none", {"freeze_to": "layer1"}, "stages.freeze_to: without effect, freeze.mode is none; remove it"),
    ("unfreeze", {"unfreeze_to": "fc", "freeze_to": "fc"}, "stages.freeze_to: without effect, freeze.mode is unfreeze"),
    ("unfreeze", {"unfreeze_to": "all"}, "freeze.mode: without effect, no stage freezes anything; remove it"),
])  # fmt: skip
def test_a_freeze_key_without_effect_is_refused(mode: str, names: dict[str, str], message: str) -> None:
    table = {"freeze": {"mode": mode}, "stages": [{"res": 32, "epochs": 1, "batch_size": 8, **names}]}
    with pytest.raises(ResoluteError) as error:
        Recipe.parse(table, name="x")
    assert message in str(error.value)


@pytest.mark.parametrize(("model", "layer", "optim"), [
    ("test_resnet", "layer3", {"name": "sgd", "lr": 0.1}),
    ("test_efficientnet", "blocks.2", {"name": "adamw", "lr": 0.01}),
])  # fmt: skip
def test_frozen_weights_and_statistics_stay_and_all_others_change(
    model: str, layer: str, optim: dict[str, Any]
) -> None:
    learner = _learner(_recipe("freeze", layer, model=model, optim={**optim, "weight_decay": 0.1}))
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
    learner = _learner(_recipe("unfreeze", name, None, model=model))
    known = ["patch_embed" if layer == "cls_token" else layer for layer in layers(learner.network)]
    needs: dict[str, bool] = {}
    for layer in known:
        learner.network.get_submodule(layer).register_forward_hook(
            lambda _, inputs, out, layer=layer: needs.update({layer: out.requires_grad}))  # fmt: skip
    learner.forward_backward(_batch(0))
    assert needs == {layer: known.index(layer) >= known.index(name) > 0 for layer in known}
    assert not all(parameter.grad is not None for parameter in learner.network.parameters())
    learner.forward_backward(_batch(EACH))
    assert needs == dict.fromkeys(known, True)
    assert all(parameter.grad is not None for parameter in learner.network.parameters())


def test_unfrozen_parameters_start_with_clean_optimizer_state() -> None:
    learner = _learner(_recipe("unfreeze", "layer4", "layer2", "none", optim={"name": "adamw", "lr": 0.01}))

    def ages() -> dict[str, int]:
        state = learner.optimizer.state
        return {name: int(state[p]["step"]) for name, p in learner.network.named_parameters() if p in state}

    expected = [{"fc": 2, "layer4": 2}, {"fc": 4, "layer4": 4, "layer3": 2, "layer2": 2}, {"fc": 6}]
    for stage, layers_ in enumerate(expected):
        for step in range(EACH * stage, EACH * (stage + 1)):
            learner.train_step(_batch(step))
        assert ages() == {name: age for name, _ in learner.network.named_parameters()
                          for layer, age in layers_.items() if name.startswith(layer)}  # fmt: skip


def test_unfrozen_groups_count_their_optimizer_steps_from_one() -> None:
    """timm's LAMB: the first update of a thawed weight equals that of a new optimizer."""
    network = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    stages = [RecipeStage(res=32, epochs=1, batch_size=8, unfreeze_to=name) for name in ("1", None)]
    optimizer = Lamb(network.parameters(), lr=0.1)
    freezer = Freezer(Freeze(mode="unfreeze"), stages, network, optimizer)
    images = torch.randn(5, 3)
    for stage in (0, 0, 0, 1):
        freezer.apply_to_optimizer(stage)
        freezer.apply_to_network(stage)
        optimizer.zero_grad()
        network(images).pow(2).sum().backward()
        if stage == 1:
            fresh = copy.deepcopy(network[0])
            for mine, theirs in zip(fresh.parameters(), network[0].parameters(), strict=True):
                assert theirs.grad is not None
                mine.grad = theirs.grad.clone()
            Lamb(fresh.parameters(), lr=0.1, max_grad_norm=None).step()
            optimizer.defaults["max_grad_norm"] = None  # why: one norm over all gradients, of which `fresh` has a part
        optimizer.step()
    for mine, theirs in zip(fresh.parameters(), network[0].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert [int(group["step"]) for group in optimizer.param_groups] == [1, 4]
