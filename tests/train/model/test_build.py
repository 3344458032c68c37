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
from resolute.train.model.ema import _decay
from resolute.train.recipe.schema import Data, Ema, Model, Precision, Recipe
from resolute.train.warmup import warm_up
from tests.support.commands import Ended
from tests.support.networks import CPU, make_batch, names_of, save_weights, tiny_network

STAGES = [{"res": 32, "epochs": 1, "batch_size": 8}]


def _learner(**sections: Any) -> Learner:
    table = {"model": {"name": "test_resnet"}, "precision": {"amp": "off"}, "optim": {"lr": 0.1}, "stages": STAGES}
    return Learner(Recipe.parse({**table, **sections}, name="x"), classes=7, total_steps=10, device=CPU)


@pytest.mark.parametrize("name", ["test_resnet", "test_efficientnet"])
@pytest.mark.parametrize(
    "keys",
    [{"norm": "ghost"}, {"blurpool": True}, {"drop_path_rate": 0.2}, {"bn_momentum": 0.3, "grad_checkpointing": True}],
)
def test_parameter_names_and_initial_weights_equal_the_plain_models(name: str, keys: dict[str, Any]) -> None:
    plain, with_options = tiny_network(name).state_dict(), tiny_network(name, **keys).state_dict()
    assert list(plain) == list(with_options)
    assert all(plain[key].equal(with_options[key]) for key in plain)


def test_stochastic_depth_rises_linearly_and_scales_kept_blocks() -> None:
    """Huang et al., arXiv 1603.09382: the drop rate rises linearly to the last block's; timm scales at training."""
    network = tiny_network(drop_path_rate=0.4, kwargs={})
    paths = [module for module in network.modules() if type(module).__name__ == "DropPath"]
    rates = [path.drop_prob for path in paths]
    blocks = len([module for module in network.modules() if hasattr(module, "drop_path")])
    assert rates == pytest.approx([0.4 * i / (blocks - 1) for i in range(1, blocks)])
    torch.manual_seed(3)
    out = paths[-1].train()(torch.ones(4000, 1, 1, 1)).flatten()
    assert sorted(set(out.tolist())) == pytest.approx([0.0, 1 / 0.6])
    assert float((out == 0).float().mean()) == pytest.approx(0.4, abs=0.03)
    assert paths[-1].eval()(torch.ones(2, 1, 1, 1)).flatten().tolist() == [1.0, 1.0]


def test_blurpool_removes_the_highest_frequency_before_a_stride() -> None:
    """Zhang, arXiv 1904.11486: a binomial filter, which keeps a constant and loses a checkerboard."""
    blurs = [module for module in tiny_network(blurpool=True).modules() if isinstance(module, BlurPool2d)]
    assert blurs
    assert not [module for module in tiny_network().modules() if isinstance(module, BlurPool2d)]
    for blur in blurs:
        plain = torch.ones(1, blur.channels, 8, 8)
        board = plain * (torch.arange(8)[:, None] + torch.arange(8)) .remainder(2).mul(2).sub(1)
        torch.testing.assert_close(blur(plain), torch.ones_like(blur(plain)))
        torch.testing.assert_close(blur(board), torch.zeros_like(blur(board)))
        assert blur.stride == 2


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


@pytest.mark.parametrize(
    ("name", "keys", "reason"),
    [
        ("test_vit", {"blurpool": True}, "model.blurpool: timm's test_vit does not support it"),
        ("densenet121", {"drop_path_rate": 0.1}, "model.drop_path_rate: timm's densenet121 does not support it"),
        ("test_resnet", {"drop_path_rate": 0.1, "kwargs": {"drop_path_rate": 0.2}},
         "got drop_path_rate, expected it only as a key of"),
        ("dla46_c", {"grad_checkpointing": True},
         "model.grad_checkpointing: got true, but dla46_c does not support it"),
        ("test_resnett", {}, "timm cannot build 'test_resnett'.*did you mean test_resnet"),
    ],
)
def test_options_that_a_model_does_not_support_are_refused_by_key(name: str, keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(ResoluteError, match=reason):
        tiny_network(name, **keys)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("model", "ghost_batch", 16), ("model", "norm_groups", 8), ("loss", "threshold", 0.2),
        ("precision", "tf32", "all"), ("ema", "warmup", False), ("distill", "temperature", 2.0),
        ("distill", "alpha", 0.3), ("model", "weights_kind", "ema"),
    ],
)
def test_keys_without_effect_are_refused(section: str, key: str, value: Any) -> None:
    with pytest.raises(ResoluteError, match=rf"{section}\.{key}: without effect"):
        Recipe.parse({section: {key: value}, "stages": STAGES}, name="x")


FIXED_SIZE = ["vit_tiny_patch16_224", "test_vit3", "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"]


@pytest.mark.parametrize("name", FIXED_SIZE)
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


def test_models_without_a_fixed_size_get_no_size_options() -> None:
    assert size_options(Model(name="test_resnet"), [33, 224]) == {}
    assert size_options(Model(name="vit_tiny_patch16_224"), []) == {}
    assert size_options(Model(name="vit_tiny_patch16_224", kwargs={"img_size": 128}), [128]) == {}


def test_a_model_with_a_truly_fixed_size_gets_no_size_options() -> None:
    assert size_options(Model(name="mixer_s32_224"), [128, 160]) == {}
    assert size_options(Model(name="mixer_s32_224"), [128]) == {}
    with pytest.raises(ResoluteError, match=r"timm cannot build .mixer_s32_224. with .*nonsense"):
        build_model(
            Model(name="mixer_s32_224", kwargs={"nonsense": 1}), classes=3, channels_last=True, device=CPU,
            resolutions=[224],
        )  # fmt: skip


def test_probing_size_options_does_not_change_the_initial_weights() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    size_options(Model(name="test_vit3"), [128, 160])
    assert torch.equal(torch.rand(3), expected)


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


@pytest.mark.parametrize(("tf32", "expected"), [("all", ("high", True)), ("off", ("highest", False))])
def test_the_tf32_setting_can_be_read_back_through_torchs_older_functions(
    forked: Callable[..., Ended], tf32: Any, expected: tuple[str, bool]
) -> None:
    """Inductor's autotuning reads the precision of matrix products, and raises if newer settings were mixed in."""
    code = (
        "import torch; from resolute.train.model.build import set_tf32; "
        f"set_tf32({tf32!r}, torch.device('cuda', 0)); "
        "print((torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32))"
    )
    assert forked("tests.support.execute", code).out.strip() == str(expected)


def test_tf32_is_refused_on_a_cpu() -> None:
    set_tf32("convolutions", CPU)
    with pytest.raises(ResoluteError, match="got all on cpu"):
        set_tf32("all", CPU)


def test_after_the_half_life_of_the_ema_weights_count_half() -> None:
    steps = Ema(half_life_steps=40.0)
    assert _decay(steps, 999) ** 40 == pytest.approx(0.5)
    assert _decay(Ema(half_life_epochs=1.5), 20) ** 30 == pytest.approx(0.5)
    assert _decay(Ema(decay=0.9), 20) == 0.9
    with pytest.raises(ResoluteError, match="ema: got decay and half_life_steps, expected one of"):
        Ema(decay=0.9, half_life_steps=3.0)


def test_a_half_life_in_epochs_follows_the_length_of_each_epoch() -> None:
    recipe = _learner(ema={"half_life_epochs": 1.0, "warmup": False}).recipe
    stages = (*recipe.stages, dataclasses.replace(recipe.stages[0], epochs=1))
    recipe = dataclasses.replace(recipe, stages=stages)
    learner = Learner(recipe, classes=7, total_steps=6, device=CPU, epoch_steps=[4, 2])
    assert learner.ema is not None
    first = make_batch(0)
    learner.train_step(first)  # timm's average starts as the first step's weights
    start, share = learner.network.fc.bias.detach().clone(), 1.0
    for index, epoch in ((1, 0), (2, 0), (3, 0), (4, 1), (5, 1)):
        with torch.no_grad():
            learner.network.fc.bias.zero_()
        batch = make_batch(index)
        batch = dataclasses.replace(batch, spec=dataclasses.replace(batch.spec, epoch=epoch))
        before = learner.ema.module.fc.bias.detach().clone()
        learner.train_step(batch)
        share = 0.5 ** (1 / (4 if epoch == 0 else 2))
        expected = share * before + (1 - share) * learner.network.fc.bias.detach()
        torch.testing.assert_close(learner.ema.module.fc.bias.detach(), expected)
    assert start.any()


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
    ({"last_epochs": 1, "decay": 0.9}, "ema: got decay and last_epochs, expected one of"),
    ({"last_epochs": 1, "warmup": True}, "ema.warmup: without effect, ema.last_epochs is a plain mean; remove it"),
])  # fmt: skip
def test_an_average_of_the_last_epochs_that_cannot_be_is_refused(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ResoluteError) as error:
        _learner(ema=table)
    assert message in str(error.value)


def test_mean_and_std_are_those_of_the_pretrained_weights() -> None:
    def data(name: str, **keys: Any) -> Data:
        table = {"model": {"name": name}, "data": {"mean_std": "pretrained", **keys}, "stages": STAGES}
        return Recipe.parse(table, name="x").data

    for name in ("vit_tiny_patch16_224", "resnet50", "resnet18.tv_in1k"):
        cfg = timm.get_pretrained_cfg(name)
        assert (data(name).mean, data(name).std) == (cfg.mean, cfg.std)
    assert data("vit_tiny_patch16_224").mean == (0.5, 0.5, 0.5)
    for key in ("mean", "std"):
        with pytest.raises(ResoluteError, match=rf"data\.{key}: without effect, data\.mean_std is pretrained; remove"):
            data("resnet50", **{key: [0.5, 0.5, 0.5]})
    for name in ("no_such_net", "resnet50.no_such_tag"):
        with pytest.raises(ResoluteError, match=rf"data\.mean_std: got pretrained, but timm has no weights of {name}"):
            data(name)


def test_a_compiled_network_keeps_names_and_results_and_is_not_recompiled() -> None:
    counter, plain = CompileCounter(), _learner(ema={"decay": 0.5})
    learner = _learner(ema={"decay": 0.5})
    names = learner.state_dict()
    compile_network(learner.network, CPU, backend=counter)
    warm_up(learner, [("train", 32, 8), ("val", 32, 12)])
    compiled = counter.frame_count
    assert compiled == 2
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


def test_a_validation_of_images_and_mirror_images_compiles_nothing_after_the_warm_up() -> None:
    counter, learner = CompileCounter(), _learner(ema={"decay": 0.5}, eval={"flip": True})
    compile_network(learner.network, CPU, backend=counter)
    warm_up(learner, [("train", 32, 8), ("val", 32, 12)])
    compiled = counter.frame_count
    learner.train_step(make_batch(0))
    learner.eval_step(make_batch(9, n=12, split="val"))
    assert counter.frame_count == compiled


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
    assert Precision().compile is False
