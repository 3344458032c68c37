"""Models: timm's networks under timm's names, with the changes that the recipe requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.layers import BlurPool2d
from torch._dynamo.testing import CompileCounter
from torch.optim.swa_utils import AveragedModel

from resolute.errors import ResoluteError
from resolute.train.learner import Learner
from resolute.train.model.build import compile_network, set_tf32, size_options
from resolute.train.recipe.schema import Data, Model, Recipe
from resolute.train.warmup import warm_up
from tests.support.commands import Ended
from tests.support.networks import CPU, make_batch, names_of, save_weights, tiny_network

STAGES = [{"res": 32, "epochs": 1, "batch_size": 8}]


def _learner(**sections: Any) -> Learner:
    table = {"model": {"name": "test_resnet"}, "precision": {"amp": "off"}, "optim": {"lr": 0.1}, "stages": STAGES}
    return Learner(Recipe.parse({**table, **sections}, name="x"), classes=7, total_steps=10, device=CPU)


def test_parameter_names_and_initial_weights_equal_the_plain_models() -> None:
    plain = tiny_network("test_efficientnet").state_dict()
    options: list[dict[str, Any]] = [
        {"norm": "ghost"},
        {"blurpool": True},
        {"drop_path_rate": 0.2},
        {"bn_momentum": 0.3, "grad_checkpointing": True},
    ]
    for keys in options:
        with_options = tiny_network("test_efficientnet", **keys).state_dict()
        assert list(plain) == list(with_options)
        assert all(plain[key].equal(with_options[key]) for key in plain)
    assert [module for module in tiny_network(blurpool=True).modules() if isinstance(module, BlurPool2d)]
    assert not [module for module in tiny_network().modules() if isinstance(module, BlurPool2d)]


def test_gradient_checkpointing_changes_neither_gradients_nor_statistics() -> None:
    kept = []
    for recompute in (False, True):
        learner = _learner(model={"name": "test_resnet", "grad_checkpointing": recompute, "drop_path_rate": 0.2})
        torch.manual_seed(4)
        held: list[int] = []

        def pack(x: torch.Tensor, held: list[int] = held) -> torch.Tensor:
            held.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            learner.network.train()(make_batch(0).images)
        for index in range(2):
            learner.train_step(make_batch(index))
        kept.append((learner.network.state_dict(), sum(held)))
    (plain, most), (same, less) = kept
    assert all(same[name].equal(value) for name, value in plain.items())
    assert less < most / 2  # numbers kept for the backward pass


def test_a_fixed_size_model_accepts_every_resolution_of_the_recipe() -> None:
    name = "vit_tiny_patch16_224"
    model = Model(name=name)
    options = size_options(model, [128, 160, 224])
    assert options == {"dynamic_img_size": True}
    with torch.device("meta"):
        network: Any = timm.create_model(name, **options)
        plain: Any = timm.create_model(name)
    for res in (128, 160, 224):
        assert network(torch.empty(2, 3, res, res, device="meta")).shape == (2, 1000)
    shapes = [{key: value.shape for key, value in each.state_dict().items()} for each in (network, plain)]
    assert shapes[0] == shapes[1]  # a run's weights fit the model at other resolutions, and timm's weights fit both
    assert size_options(model, [plain.pretrained_cfg["input_size"][1]]) == {}


@pytest.mark.slow
def test_the_tf32_setting_can_be_read_back_through_torchs_older_functions(forked: Callable[..., Ended]) -> None:
    """Inductor's autotuning reads the precision of matrix products, and raises if newer settings were mixed in."""
    code = (
        "import torch; from resolute.train.model.build import set_tf32; "
        "set_tf32('all', torch.device('cuda', 0)); "
        "print((torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32))"
    )
    assert forked("tests.support.execute", code).out.strip() == str(("high", True))
    with pytest.raises(ResoluteError, match="got all on cpu"):
        set_tf32("all", CPU)


def test_after_a_half_life_in_epochs_of_any_length_weights_count_half() -> None:
    recipe = _learner(ema={"half_life_epochs": 1.0, "warmup": False}, stages=STAGES * 2).recipe
    learner = Learner(recipe, classes=7, total_steps=6, device=CPU, epoch_steps=[4, 2])
    assert learner.ema is not None
    for index, epoch in enumerate([0, 0, 0, 0, 1, 1]):
        before = learner.ema.module.get_parameter("fc.bias").detach().clone()
        batch = make_batch(index)
        learner.train_step(dataclasses.replace(batch, spec=dataclasses.replace(batch.spec, epoch=epoch)))
        # timm's average starts as the first step's weights
        share = 0.0 if index == 0 else 0.5 ** (1 / (4 if epoch == 0 else 2))
        expected = share * before + (1 - share) * learner.network.get_parameter("fc.bias").detach()
        torch.testing.assert_close(learner.ema.module.get_parameter("fc.bias").detach(), expected)


def test_the_average_of_the_last_epochs_equals_torchs_averaged_model() -> None:
    recipe = _learner(ema={"last_epochs": 2}, stages=[{"res": 32, "epochs": 4, "batch_size": 8}]).recipe
    learner = Learner(recipe, classes=7, total_steps=9, device=CPU, epoch_steps=[3, 1, 3, 2])
    assert learner.ema is not None
    oracle = AveragedModel(learner.network, use_buffers=True)
    for index, epoch in enumerate([0, 0, 0, 1, 2, 2, 2, 3, 3]):
        batch = make_batch(index)
        learner.train_step(dataclasses.replace(batch, spec=dataclasses.replace(batch.spec, epoch=epoch)))
        if epoch >= 2:
            oracle.update_parameters(learner.network)
        expected = oracle.module if epoch >= 2 else learner.network
        for name, value in expected.state_dict().items():
            if value.is_floating_point():
                torch.testing.assert_close(learner.ema.module.state_dict()[name], value, rtol=1e-5, atol=1e-6)


def data_of(name: str, **tables: Any) -> Data:
    model = {"name": name, **tables.pop("model", {})}
    return Recipe.parse({"model": model, "data": tables, "stages": STAGES}, name="x").data


def test_images_are_normalised_as_the_initial_weights_expect() -> None:
    for name in ("vit_tiny_patch16_224", "resnet18.tv_in1k"):
        cfg = timm.get_pretrained_cfg(name)
        assert cfg is not None
        for keys in ({}, {"normalize": "weights"}, {"normalize": {"mean": cfg.mean, "std": cfg.std}}):
            data = data_of(name, model={"weights": "pretrained"}, **keys)
            assert (data.mean, data.std) == (cfg.mean, cfg.std)
    assert data_of("vit_tiny_patch16_224").mean == (0.485, 0.456, 0.406)  # random weights expect nothing
    assert data_of("vit_tiny_patch16_224", normalize={"mean": [0.1, 0.2, 0.3], "std": [1, 1, 1]}).std == (1, 1, 1)


@pytest.mark.parametrize("normalize", ["imagenet", {"mean": [0.4, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}])
def test_another_normalisation_than_that_of_the_weights_is_refused(normalize: Any) -> None:
    with pytest.raises(
        ResoluteError, match=r"data\.normalize: got \{.*expected .*0\.5.*as pretrained of vit_tiny.*leave"
    ):
        data_of("vit_tiny_patch16_224", model={"weights": "pretrained"}, normalize=normalize)


@pytest.mark.parametrize(
    "normalize", [{"mean": [0, 0, 0]}, {"mean": [0, 0, 0], "std": [1, 0, 1]}, {"means": [0, 0, 0]}]
)
def test_half_a_normalisation_is_refused(normalize: Any) -> None:
    with pytest.raises(ResoluteError, match=r"data\.normalize"):
        data_of("resnet18", normalize=normalize)


def test_weights_that_do_not_say_their_normalisation_need_one_if_timms_is_unusual(tmp_path: Path) -> None:
    path = save_weights(tiny_network(), tmp_path / "weights.safetensors")  # test_resnet: 0.5 in timm
    with pytest.raises(ResoluteError, match=r"data\.normalize: got none, and .*weights\.safetensors does not say"):
        data_of("test_resnet", model={"weights": str(path)})
    assert data_of("test_resnet", model={"weights": str(path)}, normalize="imagenet").mean == (0.485, 0.456, 0.406)
    (tmp_path / "config.json").write_text('{"pretrained_cfg": {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}}')
    assert data_of("test_resnet", model={"weights": str(path)}).mean == (0.1, 0.2, 0.3)
    (tmp_path / "config.json").unlink()
    usual = save_weights(timm.create_model("resnet18"), tmp_path / "resnet18.safetensors")
    assert data_of("resnet18", model={"weights": str(usual)}).mean == (0.485, 0.456, 0.406)


def test_the_keys_that_were_replaced_name_the_new_one() -> None:
    for old in ({"mean": [0, 0, 0]}, {"std": [1, 1, 1]}, {"mean_std": "pretrained"}):
        with pytest.raises(ResoluteError, match=r"no such setting, expected data\.normalize; rename it"):
            data_of("resnet18", **old)


def test_values_hold_the_numbers_and_give_the_same_recipe() -> None:
    table = {"model": {"name": "vit_tiny_patch16_224", "weights": "pretrained"}, "stages": STAGES}
    recipe = Recipe.parse(table, name="x")
    assert recipe.values()["data"]["normalize"]["mean"] == [0.5, 0.5, 0.5]
    assert Recipe.from_values(recipe.values(), name="x") == recipe


@pytest.mark.slow
def test_a_compiled_network_keeps_names_and_results_and_is_not_recompiled() -> None:
    tables = {"ema": {"decay": 0.5}, "eval": {"flip": True}}
    counter, plain, learner = CompileCounter(), _learner(**tables), _learner(**tables)
    names = learner.state_dict()
    compile_network(learner.network, CPU, backend=counter)
    warm_up(learner, [("train", 32, 8), ("val", 32, 12)])
    compiled = counter.frame_count
    assert compiled == 3  # training, validation of images, and of mirror images
    for index in range(2):
        got, same = learner.train_step(make_batch(index)), plain.train_step(make_batch(index))
        torch.testing.assert_close(got, same)
    batch = make_batch(9, n=12, split="val")
    torch.testing.assert_close(learner.eval_step(batch).sums, plain.eval_step(batch).sums)
    assert counter.frame_count == compiled
    for section in ("model", "ema"):
        state = learner.state_dict()[section]
        assert list(state) == list(names[section]) == names_of(tiny_network())
        torch.testing.assert_close(state, plain.state_dict()[section])
    plain.load_state_dict(learner.state_dict())


@pytest.mark.slow
def test_a_run_with_every_feature_resumes_bit_identically(tmp_path: Path) -> None:
    teacher = save_weights(tiny_network(), tmp_path / "teacher.safetensors")
    tables: dict[str, Any] = {
        "model": {
            "name": "test_resnet",
            "norm": "ghost",
            "ghost_batch": 4,
            "bn_momentum": 0.2,
            "drop_path_rate": 0.2,
            "blurpool": True,
            "grad_checkpointing": True,
        },
        "optim": {
            "name": "lamb",
            "lr": 0.02,
            "lookahead": 2,
            "clip_agc": 0.05,
            "gradient_centralization": True,
            "grad_accum_steps": 2,
        },
        "loss": {"kind": "bce", "threshold": 0.2},
        "distill": {"teacher": "test_resnet", "weights": str(teacher)},
        "ema": {"half_life_steps": 3.0},
    }
    cut = _learner(**tables)
    for index in range(3):
        cut.train_step(make_batch(index))
    torch.save(cut.state_dict(), tmp_path / "state.pt")
    resumed = _learner(**tables)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    expected = [cut.train_step(make_batch(index))[0] for index in range(3, 6)]
    torch.set_rng_state(torch.load(tmp_path / "state.pt", weights_only=True)["rng"])
    assert [resumed.train_step(make_batch(index))[0] for index in range(3, 6)] == expected
    for section in ("model", "ema"):
        a, b = resumed.state_dict()[section], cut.state_dict()[section]
        assert all(a[name].equal(b[name]) for name in b)
