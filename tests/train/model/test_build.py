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
from resolute.train.loop import Learner
from resolute.train.model.build import build_model, compile_network, set_tf32, size_options
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
    options: list[dict[str, Any]] = [{"norm": "ghost"}, {"blurpool": True}, {"drop_path_rate": 0.2},
                                     {"bn_momentum": 0.3, "grad_checkpointing": True}]  # fmt: skip
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
        with torch.autograd.graph.saved_tensors_hooks(lambda x, h=held: h.append(x.numel()) or x, lambda x: x):
            learner.network.train()(make_batch(0).images)
        for index in range(2):
            learner.train_step(make_batch(index))
        kept.append((learner.network.state_dict(), sum(held)))
    (plain, most), (same, less) = kept
    assert all(same[name].equal(value) for name, value in plain.items())
    assert less < most / 2  # numbers kept for the backward pass


@pytest.mark.parametrize(("name", "keys", "reason"), [
    ("test_vit", {"blurpool": True}, "model.blurpool: timm's test_vit does not support it"),
    ("test_resnet", {"drop_path_rate": 0.1, "kwargs": {"drop_path_rate": 0.2}},
     "got drop_path_rate, expected it only as a key of"),
    ("dla46_c", {"grad_checkpointing": True}, "model.grad_checkpointing: got true, but dla46_c does not support it"),
    ("test_resnett", {}, "timm cannot build 'test_resnett'.*did you mean test_resnet"),
])  # fmt: skip
def test_options_that_a_model_does_not_support_are_refused_by_key(name: str, keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(ResoluteError, match=reason):
        tiny_network(name, **keys)


def test_keys_without_effect_are_refused() -> None:
    for section, key, value in (
        ("model", "ghost_batch", 16), ("model", "norm_groups", 8), ("loss", "threshold", 0.2),
        ("precision", "tf32", "all"), ("ema", "warmup", False), ("distill", "temperature", 2.0),
        ("distill", "alpha", 0.3), ("model", "weights_kind", "ema"),
    ):  # fmt: skip
        with pytest.raises(ResoluteError, match=rf"{section}\.{key}: without effect"):
            Recipe.parse({section: {key: value}, "stages": STAGES}, name="x")


@pytest.mark.parametrize("name", [
    "vit_tiny_patch16_224", pytest.param("swinv2_tiny_window8_256", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_fixed_size_model_accepts_every_resolution_of_the_recipe(name: str) -> None:
    model = Model(name=name)
    options = size_options(model, [128, 160, 224])
    assert options == {"dynamic_img_size": True}
    with torch.device("meta"):
        network, plain = timm.create_model(name, **options), timm.create_model(name)
    for res in (128, 160, 224):
        assert network(torch.empty(2, 3, res, res, device="meta")).shape == (2, 1000)
    shapes = [{key: value.shape for key, value in each.state_dict().items()} for each in (network, plain)]
    assert shapes[0] == shapes[1]  # a run's weights fit the model at other resolutions, and timm's weights fit both
    assert size_options(model, [plain.pretrained_cfg["input_size"][1]]) == {}


def test_models_that_need_no_size_options_or_have_none_get_none() -> None:
    assert size_options(Model(name="test_resnet"), [33, 224]) == {}
    assert size_options(Model(name="vit_tiny_patch16_224"), []) == {}
    assert size_options(Model(name="vit_tiny_patch16_224", kwargs={"img_size": 128}), [128]) == {}
    assert size_options(Model(name="mixer_s32_224"), [128, 160]) == {}
    with pytest.raises(ResoluteError, match=r"timm cannot build .mixer_s32_224. with .*nonsense"):
        build_model(Model(name="mixer_s32_224", kwargs={"nonsense": 1}), classes=3, channels_last=True, device=CPU,
                    resolutions=[224])  # fmt: skip
    before = torch.get_rng_state()
    size_options(Model(name="test_vit3"), [128, 160])
    assert torch.equal(torch.get_rng_state(), before)  # probing does not change the initial weights


def test_a_vision_transformer_trains_and_validates_at_the_recipes_resolutions() -> None:
    stages = [{"res": 32, "eval_res": 64, "epochs": 1, "batch_size": 8}, {"res": 48, "epochs": 1, "batch_size": 8}]
    learner = _learner(model={"name": "test_vit3"}, stages=stages)
    names = learner.network.state_dict()
    for index, res in enumerate((32, 48)):
        batch = make_batch(index)
        images = torch.nn.functional.interpolate(batch.images, size=(res, res))
        assert torch.isfinite(learner.train_step(dataclasses.replace(batch, images=images))[0])
    scores = learner.eval_step(dataclasses.replace(batch, images=torch.zeros(8, 3, 64, 64)))
    assert torch.isfinite(scores.sums["raw"]).all()
    assert list(names) == list(timm.create_model("test_vit3", num_classes=7).state_dict())


def test_a_size_refused_during_warm_up_is_reported_in_one_line() -> None:
    learner = _learner()
    learner.network = tiny_network("test_vit3")
    with pytest.raises(ResoluteError, match=r"^model: the network refuses images of 48 px \(Input height"):
        warm_up(learner, [("train", 48, 2)])


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
        before = learner.ema.module.fc.bias.detach().clone()
        batch = make_batch(index)
        learner.train_step(dataclasses.replace(batch, spec=dataclasses.replace(batch.spec, epoch=epoch)))
        # timm's average starts as the first step's weights
        share = 0.0 if index == 0 else 0.5 ** (1 / (4 if epoch == 0 else 2))
        expected = share * before + (1 - share) * learner.network.fc.bias.detach()
        torch.testing.assert_close(learner.ema.module.fc.bias.detach(), expected)


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


@pytest.mark.parametrize(("table", "message"), [
    ({"last_epochs": 9}, "ema.last_epochs: got 9, expected at most the run's"),
    ({"half_life_steps": 3.0, "decay": 0.9}, "ema: got decay and half_life_steps, expected one of"),
    ({"last_epochs": 1, "warmup": True}, "ema.warmup: without effect, ema.last_epochs is a plain mean; remove it"),
])  # fmt: skip
def test_an_average_of_weights_that_cannot_be_is_refused(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ResoluteError, match=message):
        _learner(ema=table)


def test_mean_and_std_are_those_of_the_pretrained_weights() -> None:
    def data(name: str, **keys: Any) -> Data:
        table = {"model": {"name": name}, "data": {"mean_std": "pretrained", **keys}, "stages": STAGES}
        return Recipe.parse(table, name="x").data

    for name in ("vit_tiny_patch16_224", "resnet18.tv_in1k"):
        cfg = timm.get_pretrained_cfg(name)
        assert (data(name).mean, data(name).std) == (cfg.mean, cfg.std)
    with pytest.raises(ResoluteError, match=r"data\.std: without effect, data\.mean_std is pretrained; remove"):
        data("resnet50", std=[0.5, 0.5, 0.5])
    with pytest.raises(ResoluteError, match=r"data\.mean_std: got pretrained, but timm has no weights of resnet50\.no"):
        data("resnet50.no_such_tag")


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


def test_a_run_with_every_feature_resumes_bit_identically(tmp_path: Path) -> None:
    teacher = save_weights(tiny_network(), tmp_path / "teacher.safetensors")
    tables: dict[str, Any] = {
        "model": {"name": "test_resnet", "norm": "ghost", "ghost_batch": 4, "bn_momentum": 0.2, "drop_path_rate": 0.2,
                  "blurpool": True, "grad_checkpointing": True},
        "optim": {"name": "lamb", "lr": 0.02, "lookahead": 2, "clip_agc": 0.05, "gradient_centralization": True,
                  "grad_accum_steps": 2},
        "loss": {"kind": "bce", "threshold": 0.2, "label_smoothing": 0.1},
        "distill": {"teacher": "test_resnet", "weights": str(teacher)},
        "ema": {"half_life_steps": 3.0},
    }  # fmt: skip
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


def test_a_missing_compiler_is_reported_by_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ResoluteError, match=r"precision\.compile: no compiler found \(got no-such-compiler missing\)"):
        _learner(precision={"amp": "off", "compile": True})
