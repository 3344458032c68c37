"""A network starts from a file's or the hub's weights, or says why it cannot."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import Any, NoReturn

import huggingface_hub.constants
import pytest
import torch
from torch import nn

from pipeline.errors import ResoluteError, StorageError
from tests.support.nets import names_of, net, saved, some_images
from train import checkpoint
from train.recipe.schema import Recipe


@pytest.mark.parametrize("kind", ["safetensors", "pth", "checkpoint"])
def test_weights_of_a_file_are_taken_whole(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, path = net(), tmp_path / f"weights.{'safetensors' if kind == 'safetensors' else 'pth'}"
    nn.init.normal_(source.fc.weight)
    if kind == "safetensors":
        saved(source, path)
    else:
        torch.save(source.state_dict() if kind == "pth" else {"model": source.state_dict(), "ema": None}, path)
    network = net(weights=str(path))
    assert all(value.equal(source.state_dict()[name]) for name, value in network.state_dict().items())
    assert "head included" in capsys.readouterr().out


@pytest.mark.parametrize(("best", "kind", "taken"), [
    ("raw", "best", "raw"), ("ema", "best", "EMA"), ("raw", "ema", "EMA"), ("ema", "raw", "raw"),
])  # fmt: skip
@pytest.mark.parametrize("ours", [True, False])
def test_raw_or_averaged_weights_of_a_checkpoint_are_taken_by_choice_and_this_is_said(
    ours: bool, best: str, kind: Any, taken: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw, average, path = net(), net(), tmp_path / "best.pt"
    nn.init.normal_(average.fc.weight)
    if ours:
        state = {"model": raw.state_dict(), "ema": average.state_dict(), "progress": {"best_weights": best}}
        checkpoint.save(path, state)
    else:  # as timm writes them; which was better is not in it, so the average is taken
        torch.save({"state_dict": raw.state_dict(), "state_dict_ema": average.state_dict()}, path)
        taken = "raw" if kind == "raw" else "EMA"
    network = net(weights=str(path), weights_kind=kind)
    expected = (raw if taken == "raw" else average).state_dict()
    assert all(value.equal(expected[name]) for name, value in network.state_dict().items())
    assert f"starts from {taken} weights of {path}, head included" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pth", "best.pt"])
def test_an_average_that_a_file_does_not_hold_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name == "best.pt":
        checkpoint.save(path, {"model": net().state_dict(), "ema": None, "progress": {"best_weights": "raw"}})
    elif name == "weights.pth":
        torch.save(net().state_dict(), path)
    else:
        saved(net(), path)
    with pytest.raises(ResoluteError, match=r"model\.weights_kind: got ema, but .* holds no averaged weights"):
        net(weights=str(path), weights_kind="ema")


def test_a_choice_of_weights_without_a_file_is_refused() -> None:
    table = {"stages": [{"res": 32, "epochs": 1, "batch_size": 8}], "model": {"weights_kind": "ema"}}
    with pytest.raises(ResoluteError, match=r"model\.weights_kind: without effect, model\.weights is empty"):
        Recipe.parse(table, name="x")


def test_a_file_of_weights_that_may_not_be_read_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(net(), tmp_path / "weights.safetensors")

    def refuse(*_: object, **__: object) -> NoReturn:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(StorageError, match=r"weights\.safetensors cannot be read, got 'Permission denied'"):
        net(weights=str(path))


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_byobnet"])
def test_a_head_of_other_classes_is_new_and_this_is_said(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, path = net(name), saved(net(name), tmp_path / "weights.safetensors")
    network = net(name, classes=3, weights=str(path))
    assert f"{name}: starts from {path} weights, with 7 classes, so a new head is made for 3" in capsys.readouterr().out
    head = {n for n in names_of(source) if source.state_dict()[n].shape != network.state_dict()[n].shape}
    assert len(head) == 2
    assert all(v.equal(source.state_dict()[n]) for n, v in network.state_dict().items() if n not in head)
    assert network(some_images().repeat(1, 1, 5, 5)).shape == (8, 3)


def test_transformers_get_position_embeddings_of_their_own_size(tmp_path: Path) -> None:
    source, path = net("test_vit", kwargs={"img_size": 64}), tmp_path / "weights.pth"
    torch.save(source.state_dict(), path)
    network = net("test_vit", kwargs={"img_size": 32}, weights=str(path))
    assert network.pos_embed.shape != source.pos_embed.shape
    assert network.blocks[1].attn.qkv.weight.equal(source.blocks[1].attn.qkv.weight)


def test_files_that_hold_no_such_weights_are_refused_by_name(tmp_path: Path) -> None:
    other, torn, foreign = tmp_path / "other.pth", tmp_path / "torn.safetensors", tmp_path / "foreign.pth"
    torch.save(net("test_efficientnet").state_dict(), other)
    torn.write_bytes(b"no weights")
    torch.save({"x": Path("code")}, foreign)
    for path, reason in (
        (other, r"other\.pth is of another model than test_resnet: got \d+ weights missing, \d+ unknown"),
        (torn, r"torn\.safetensors is damaged or holds no weights"),
        (foreign, r"foreign\.pth is damaged or holds no weights \(Weights only load failed\)"),
        (tmp_path / "none.pth", r"none\.pth not found, expected a file"),
    ):
        with pytest.raises(ResoluteError, match=reason):
            net(weights=str(path))


def test_a_hub_that_cannot_be_reached_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def blocked(*_: object, **__: object) -> NoReturn:
        raise AssertionError("a test may not open connections")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, blocked)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    message = r"weights of test_resnet are not cached and the hub cannot be reached.*name a local file"
    with pytest.raises(ResoluteError, match=message) as told:
        net(weights="pretrained")
    assert "\n" not in str(told.value)


def test_models_without_weights_are_told_so() -> None:
    with pytest.raises(ResoluteError, match=r"timm cannot build 'resnet10t.none'.* pretrained: .*tag"):
        net("resnet10t.none", weights="pretrained")
