"""Networks are timm's, under timm's names, with what the recipe asks of them."""

from __future__ import annotations

import copy
import dataclasses
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import save_file
from timm.layers import BlurPool2d
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional

from pipeline.errors import ResoluteError
from pipeline.recipe import Ema, Model, Precision, Recipe
from train.loop import Learner
from train.model import build_model, compile_network, ema_decay, set_tf32
from train.norms import GhostBatchNorm, batch_norms, set_norms
from train.warmup import warm_up

from .test_loop import _batch

CPU = torch.device("cpu")
STAGES = [{"res": 32, "epochs": 1, "batch_size": 8}]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads of such small operations wait for each other longer than they work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _model(name: str = "test_resnet", *, classes: int = 7, device: torch.device = CPU, **keys: Any) -> nn.Module:
    torch.manual_seed(0)
    return build_model(Model(name=name, **keys), classes=classes, channels_last=True, device=device)


def _images(n: int = 8) -> torch.Tensor:
    return torch.randn(n, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def _learner(**sections: Any) -> Learner:
    table = {"model": {"name": "test_resnet"}, "precision": {"amp": "off"}, "optim": {"lr": 0.1}, "stages": STAGES}
    return Learner(Recipe.parse({**table, **sections}, name="x"), classes=7, total_steps=10, device=CPU)


def _file(network: nn.Module, path: Path) -> Path:
    save_file({name: value.contiguous() for name, value in network.state_dict().items()}, path)
    return path


def _names(network: nn.Module) -> list[str]:
    return list(network.state_dict())


@pytest.mark.parametrize("name", ["test_resnet", "test_efficientnet"])
@pytest.mark.parametrize(
    "keys",
    [{"norm": "ghost"}, {"antialias": True}, {"drop_path_rate": 0.2}, {"bn_momentum": 0.3, "checkpoint_blocks": True}],
)
def test_names_and_start_are_those_of_the_plain_model(name: str, keys: dict[str, Any]) -> None:
    plain, other = _model(name).state_dict(), _model(name, **keys).state_dict()
    assert list(plain) == list(other)
    assert all(plain[key].equal(other[key]) for key in plain)


def _ghost_oracle(x: torch.Tensor, groups: int, norm: nn.BatchNorm2d) -> torch.Tensor:
    parts = []
    for part in x.tensor_split(groups):
        mean, var = part.mean((0, 2, 3)), part.var((0, 2, 3), unbiased=False)
        n = part.numel() / part.shape[1]
        norm.running_mean.mul_(0.9).add_(0.1 * mean)
        norm.running_var.mul_(0.9).add_(0.1 * var * n / (n - 1))
        scaled = (part - mean[:, None, None]) / (var[:, None, None] + norm.eps).sqrt()
        parts.append(scaled * norm.weight[:, None, None] + norm.bias[:, None, None])
    return torch.cat(parts)


@pytest.mark.parametrize(("samples", "groups"), [(8, 2), (11, 2), (3, 1), (13, 3)])
def test_ghost_norms_normalise_groups_of_the_batch_and_use_all_statistics(samples: int, groups: int) -> None:
    plain = nn.BatchNorm2d(3)
    nn.init.normal_(plain.weight)
    ghost, x = GhostBatchNorm(plain, 4), torch.randn(samples, 3, 5, 5)
    with torch.no_grad():
        torch.testing.assert_close(ghost(x), _ghost_oracle(x, groups, plain), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ghost.state_dict() | {"num_batches_tracked": 0}, plain.state_dict() | {
            "num_batches_tracked": 0})  # fmt: skip
        torch.testing.assert_close(ghost.eval()(x), plain.eval()(x))


def test_group_norms_take_the_place_of_batch_norms_with_their_activations() -> None:
    plain, network = _model("test_efficientnet"), _model("test_efficientnet", norm="group", norm_groups=32)
    assert not batch_norms(network)
    for name, norm in plain.named_modules():
        if isinstance(norm, nn.BatchNorm2d):
            other = network.get_submodule(name)
            x = torch.randn(2, norm.num_features, 3, 3)
            groups = next(g for g in range(min(32, norm.num_features), 0, -1)
                          if norm.num_features % g == 0 and 32 % g == 0)  # fmt: skip
            expected = norm.act(functional.group_norm(x, groups, norm.weight, norm.bias, norm.eps))
            torch.testing.assert_close(other(x), expected)
    images = _images()
    one = network.train()(images)[0]
    torch.testing.assert_close(network(images[:1])[0], one, rtol=1e-3, atol=1e-4)  # a sample alone, as in any batch


def test_batch_norm_momentum_is_the_weight_of_a_batch_in_the_statistics() -> None:
    network, seen = _model(bn_momentum=0.03), {}
    norm = network.conv1[1]
    norm.register_forward_pre_hook(lambda _, given: seen.update(x=given[0].detach()))
    network.train()(_images())
    torch.testing.assert_close(norm.running_mean, 0.03 * seen["x"].mean((0, 2, 3)))


def test_sync_norms_keep_names_and_activations_and_are_refused_where_nothing_would_be_synchronised() -> None:
    plain = _model("test_efficientnet")
    network = set_norms(copy.deepcopy(plain), Model(norm="sync"), ranks=2, device=torch.device("cuda"))
    assert _names(network) == _names(plain)
    assert all(isinstance(norm, nn.SyncBatchNorm) for norm in batch_norms(network))
    torch.testing.assert_close(network.eval()(_images()), plain.eval()(_images()))
    for ranks, device in ((1, "cuda"), (2, "cpu")):
        with pytest.raises(ResoluteError, match=rf"got sync with {ranks} rank\(s\) on {device}, expected several GPUs"):
            set_norms(plain, Model(norm="sync"), ranks=ranks, device=torch.device(device))
    model = Model(name="test_resnet", norm="sync")
    assert _names(build_model(model, classes=7, channels_last=True, device=CPU, trains=False)) == _names(_model())


@pytest.mark.parametrize("keys", [{"norm": "ghost"}, {"bn_momentum": 0.2}])
def test_settings_of_batch_norms_are_refused_for_models_without(keys: dict[str, Any]) -> None:
    with pytest.raises(ResoluteError, match="test_vit has no batch norms"):
        _model("test_vit", options={"img_size": 32}, **keys)


def test_stochastic_depth_skips_later_blocks_more_often_and_scales_what_is_left() -> None:
    """Huang et al., arXiv 1603.09382: the drop rate rises linearly to the last block's; timm scales at training."""
    network = _model(drop_path_rate=0.4, options={})
    paths = [module for module in network.modules() if type(module).__name__ == "DropPath"]
    rates = [path.drop_prob for path in paths]
    blocks = len([module for module in network.modules() if hasattr(module, "drop_path")])
    assert rates == pytest.approx([0.4 * i / (blocks - 1) for i in range(1, blocks)])
    torch.manual_seed(3)
    out = paths[-1].train()(torch.ones(4000, 1, 1, 1)).flatten()
    assert sorted(set(out.tolist())) == pytest.approx([0.0, 1 / 0.6])
    assert float((out == 0).float().mean()) == pytest.approx(0.4, abs=0.03)
    assert paths[-1].eval()(torch.ones(2, 1, 1, 1)).flatten().tolist() == [1.0, 1.0]


def test_antialiasing_removes_the_highest_frequency_before_a_stride() -> None:
    """Zhang, arXiv 1904.11486: a binomial filter, which keeps a constant and loses a checkerboard."""
    blurs = [module for module in _model(antialias=True).modules() if isinstance(module, BlurPool2d)]
    assert blurs
    assert not [module for module in _model().modules() if isinstance(module, BlurPool2d)]
    for blur in blurs:
        plain = torch.ones(1, blur.channels, 8, 8)
        board = plain * (torch.arange(8)[:, None] + torch.arange(8)) .remainder(2).mul(2).sub(1)
        torch.testing.assert_close(blur(plain), torch.ones_like(blur(plain)))
        torch.testing.assert_close(blur(board), torch.zeros_like(blur(board)))
        assert blur.stride == 2


def test_gradient_checkpointing_changes_neither_gradients_nor_statistics() -> None:
    kept = []
    for checkpoint_blocks in (False, True):
        learner = _learner(model={"name": "test_resnet", "checkpoint_blocks": checkpoint_blocks, "drop_path_rate": 0.2})
        torch.manual_seed(4)
        held: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, h=held: h.append(x.numel()) or x, lambda x: x):
            learner.network.train()(_batch(0).images)
        for index in range(2):
            learner.train_step(_batch(index))
        kept.append((learner.network.state_dict(), sum(held)))
    (plain, most), (same, less) = kept
    assert all(same[name].equal(value) for name, value in plain.items())
    assert less < most / 2  # numbers kept for the backward pass


@pytest.mark.parametrize(
    ("name", "keys", "reason"),
    [
        ("test_vit", {"antialias": True}, "model.antialias: timm's test_vit can't"),
        ("densenet121", {"drop_path_rate": 0.1}, "model.drop_path_rate: timm's densenet121 can't"),
        ("test_resnet", {"drop_path_rate": 0.1, "options": {"drop_path_rate": 0.2}}, "drop_path_rate is given twice"),
        ("dla46_c", {"checkpoint_blocks": True}, "model.checkpoint_blocks: dla46_c can't"),
        ("test_resnett", {}, "timm cannot build 'test_resnett'.*near: .*test_resnet"),
    ],
)
def test_what_timms_model_has_not_is_refused_by_its_key(name: str, keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(ResoluteError, match=reason):
        _model(name, **keys)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("model", "ghost_batch", 16), ("model", "norm_groups", 8), ("loss", "threshold", 0.2),
        ("precision", "tf32", "all"), ("ema", "warmup", False), ("distill", "temperature", 2.0),
    ],
)
def test_keys_that_nothing_reads_are_refused(section: str, key: str, value: Any) -> None:
    with pytest.raises(ResoluteError, match=rf"{section}\.{key}: without effect"):
        Recipe.parse({section: {key: value}, "stages": STAGES}, name="x")


def test_tf32_is_refused_on_a_cpu() -> None:
    set_tf32("convolutions", CPU)
    with pytest.raises(ResoluteError, match="got all on cpu"):
        set_tf32("all", CPU)


@pytest.mark.parametrize("kind", ["safetensors", "pth", "checkpoint"])
def test_weights_of_a_file_are_taken_whole(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, path = _model(), tmp_path / f"weights.{'safetensors' if kind == 'safetensors' else 'pth'}"
    nn.init.normal_(source.fc.weight)
    if kind == "safetensors":
        _file(source, path)
    else:
        torch.save(source.state_dict() if kind == "pth" else {"model": source.state_dict(), "ema": None}, path)
    network = _model(weights=str(path))
    assert all(value.equal(source.state_dict()[name]) for name, value in network.state_dict().items())
    assert "head included" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_byobnet"])
def test_a_head_of_other_classes_is_new_and_this_is_said(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, path = _model(name), _file(_model(name), tmp_path / "weights.safetensors")
    network = _model(name, classes=3, weights=str(path))
    assert f"{name}: starts from {path} weights, of 7 classes, so the head is new, for 3" in capsys.readouterr().out
    head = {n for n in _names(source) if source.state_dict()[n].shape != network.state_dict()[n].shape}
    assert len(head) == 2
    assert all(v.equal(source.state_dict()[n]) for n, v in network.state_dict().items() if n not in head)
    assert network(_images().repeat(1, 1, 5, 5)).shape == (8, 3)


def test_transformers_get_position_embeddings_of_their_own_size(tmp_path: Path) -> None:
    source, path = _model("test_vit", options={"img_size": 64}), tmp_path / "weights.pth"
    torch.save(source.state_dict(), path)
    network = _model("test_vit", options={"img_size": 32}, weights=str(path))
    assert network.pos_embed.shape != source.pos_embed.shape
    assert network.blocks[1].attn.qkv.weight.equal(source.blocks[1].attn.qkv.weight)


def test_group_norms_take_the_weights_of_batch_norms(tmp_path: Path) -> None:
    source, path = _model(), tmp_path / "weights.pth"
    nn.init.normal_(source.conv1[1].weight)
    torch.save(source.state_dict(), path)
    assert _model(norm="group", weights=str(path)).conv1[1].weight.equal(source.conv1[1].weight)


def test_files_that_hold_no_such_weights_are_refused_by_name(tmp_path: Path) -> None:
    other, torn, foreign = tmp_path / "other.pth", tmp_path / "torn.safetensors", tmp_path / "foreign.pth"
    torch.save(_model("test_efficientnet").state_dict(), other)
    torn.write_bytes(b"no weights")
    torch.save({"x": Path("code")}, foreign)
    for path, reason in (
        (other, r"other\.pth is of another model than test_resnet: got \d+ weights missing, \d+ unknown"),
        (torn, r"torn\.safetensors is damaged or holds no weights"),
        (foreign, r"foreign\.pth is damaged or holds no weights \(weights_only=True blocked"),
        (tmp_path / "none.pth", r"none\.pth not found, expected a file"),
    ):
        with pytest.raises(ResoluteError, match=reason):
            _model(weights=str(path))


def test_a_hub_that_cannot_be_reached_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def blocked(*_: object, **__: object) -> NoReturn:
        raise AssertionError("a test may not open connections")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, blocked)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ResoluteError, match=r"hub of timm's weights can't be.*test_resnet.*name a file") as told:
        _model(weights="pretrained")
    assert "\n" not in str(told.value)


def test_models_without_weights_are_told_so() -> None:
    with pytest.raises(ResoluteError, match=r"timm cannot build 'resnet10t.none'.* pretrained: .*tag"):
        _model("resnet10t.none", weights="pretrained")


def test_a_half_life_is_the_time_after_which_weights_count_half() -> None:
    steps = Ema(half_life_steps=40.0)
    assert ema_decay(steps, 999) ** 40 == pytest.approx(0.5)
    assert ema_decay(Ema(half_life_epochs=1.5), 20) ** 30 == pytest.approx(0.5)
    assert ema_decay(Ema(decay=0.9), 20) == 0.9
    with pytest.raises(ResoluteError, match="ema: got decay and half_life_steps, expected one of"):
        Ema(decay=0.9, half_life_steps=3.0)


def test_the_average_of_a_run_halves_its_start_in_each_epoch_of_its_own_length() -> None:
    recipe = _learner(ema={"half_life_epochs": 1.0, "warmup": False}).recipe
    stages = (*recipe.stages, dataclasses.replace(recipe.stages[0], epochs=1))
    recipe = dataclasses.replace(recipe, stages=stages)
    learner = Learner(recipe, classes=7, total_steps=6, device=CPU, epoch_steps=[4, 2])
    assert learner.ema is not None
    first = _batch(0)
    learner.train_step(first)  # timm's average starts as the first step's weights
    start, share = learner.network.fc.bias.detach().clone(), 1.0
    for index, epoch in ((1, 0), (2, 0), (3, 0), (4, 1), (5, 1)):
        with torch.no_grad():
            learner.network.fc.bias.zero_()
        batch = _batch(index)
        batch = dataclasses.replace(batch, spec=dataclasses.replace(batch.spec, epoch=epoch))
        before = learner.ema.module.fc.bias.detach().clone()
        learner.train_step(batch)
        share = 0.5 ** (1 / (4 if epoch == 0 else 2))
        expected = share * before + (1 - share) * learner.network.fc.bias.detach()
        torch.testing.assert_close(learner.ema.module.fc.bias.detach(), expected)
    assert start.any()


def test_a_compiled_network_keeps_names_average_and_results_and_compiles_nothing_after_the_warm_up() -> None:
    counter, plain = CompileCounter(), _learner(ema={"decay": 0.5})
    learner = _learner(ema={"decay": 0.5})
    names = learner.state_dict()
    compile_network(learner.network, CPU, backend=counter)
    warm_up(learner.network, [("train", 32, 8), ("val", 32, 12)], device=CPU, dtype=torch.float32, channels_last=True,
            accumulate=1, autocast=learner.autocast())  # fmt: skip
    compiled = counter.frame_count
    assert compiled == 2
    for index in range(2):
        got, same = learner.train_step(_batch(index)), plain.train_step(_batch(index))
        torch.testing.assert_close(got, same)
    batch = _batch(9, n=12, split="val")
    torch.testing.assert_close(learner.eval_step(batch), plain.eval_step(batch))
    assert counter.frame_count == compiled
    for section in ("model", "ema"):
        state = learner.state_dict()[section]
        assert list(state) == list(names[section]) == _names(_model())
        torch.testing.assert_close(state, plain.state_dict()[section])
    plain.load_state_dict(learner.state_dict())


def test_a_run_with_everything_on_goes_on_from_its_state_bit_for_bit(tmp_path: Path) -> None:
    teacher = _file(_model(), tmp_path / "teacher.safetensors")
    tables: dict[str, Any] = {
        "model": {"name": "test_resnet", "norm": "ghost", "ghost_batch": 4, "bn_momentum": 0.2, "drop_path_rate": 0.2,
                  "antialias": True, "checkpoint_blocks": True},
        "optim": {"name": "lamb", "lr": 0.02, "lookahead": 2, "clip_agc": 0.05, "centralise": True, "accumulate": 2,
                  "layer_norm_grads": True, "smoothing": 0.1},
        "loss": {"kind": "bce", "threshold": 0.2},
        "distill": {"teacher": "test_resnet", "weights": str(teacher)},
        "ema": {"half_life_steps": 3.0},
    }  # fmt: skip
    cut = _learner(**tables)
    for index in range(3):
        cut.train_step(_batch(index))
    torch.save(cut.state_dict(), tmp_path / "state.pt")
    resumed = _learner(**tables)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    expected = [cut.train_step(_batch(index))[0] for index in range(3, 6)]
    torch.set_rng_state(torch.load(tmp_path / "state.pt", weights_only=True)["rng"])
    assert [resumed.train_step(_batch(index))[0] for index in range(3, 6)] == expected
    for section in ("model", "ema"):
        a, b = resumed.state_dict()[section], cut.state_dict()[section]
        assert all(a[name].equal(b[name]) for name in b)


def test_a_missing_compiler_is_told_by_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ResoluteError, match=r"precision\.compile: no compiler found \(got no-such-compiler missing\)"):
        _learner(precision={"amp": "off", "compile": True})
    assert Precision().compile is False
