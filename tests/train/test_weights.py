"""A network starts from a file's or the hub's weights, or says why it cannot."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import NoReturn

import huggingface_hub.constants
import pytest
import torch
from torch import nn

from pipeline.errors import ResoluteError

from .nets import names_of, net, saved, some_images

pytestmark = pytest.mark.usefixtures("one_thread")

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


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_byobnet"])
def test_a_head_of_other_classes_is_new_and_this_is_said(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, path = net(name), saved(net(name), tmp_path / "weights.safetensors")
    network = net(name, classes=3, weights=str(path))
    assert f"{name}: starts from {path} weights, of 7 classes, so the head is new, for 3" in capsys.readouterr().out
    head = {n for n in names_of(source) if source.state_dict()[n].shape != network.state_dict()[n].shape}
    assert len(head) == 2
    assert all(v.equal(source.state_dict()[n]) for n, v in network.state_dict().items() if n not in head)
    assert network(some_images().repeat(1, 1, 5, 5)).shape == (8, 3)


def test_transformers_get_position_embeddings_of_their_own_size(tmp_path: Path) -> None:
    source, path = net("test_vit", options={"img_size": 64}), tmp_path / "weights.pth"
    torch.save(source.state_dict(), path)
    network = net("test_vit", options={"img_size": 32}, weights=str(path))
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
        (foreign, r"foreign\.pth is damaged or holds no weights \(weights_only=True blocked"),
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
    with pytest.raises(ResoluteError, match=r"hub of timm's weights can't be.*test_resnet.*name a file") as told:
        net(weights="pretrained")
    assert "\n" not in str(told.value)


def test_models_without_weights_are_told_so() -> None:
    with pytest.raises(ResoluteError, match=r"timm cannot build 'resnet10t.none'.* pretrained: .*tag"):
        net("resnet10t.none", weights="pretrained")
