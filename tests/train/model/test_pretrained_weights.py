"""Initial weights from a file or from the hub, or an error that says why not."""

from __future__ import annotations

import argparse
import errno
import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import huggingface_hub.constants
import pytest
import torch
from torch import nn

from resolute.errors import ResoluteError, StorageError
from resolute.train import checkpoint
from tests.support.networks import names_of, random_images, save_weights, tiny_network


@pytest.mark.parametrize("kind", ["safetensors", "pth", "checkpoint"])
def test_all_weights_of_a_file_are_loaded(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, path = tiny_network(), tmp_path / f"weights.{'safetensors' if kind == 'safetensors' else 'pth'}"
    nn.init.normal_(source.get_parameter("fc.weight"))
    if kind == "safetensors":
        save_weights(source, path)
    else:
        torch.save(source.state_dict() if kind == "pth" else {"model": source.state_dict(), "ema": None}, path)
    network = tiny_network(weights=str(path))
    assert all(value.equal(source.state_dict()[name]) for name, value in network.state_dict().items())
    assert "head included" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("best", "kind", "taken"),
    [
        ("raw", "best", "raw"),
        ("ema", "best", "EMA"),
        ("raw", "ema", "EMA"),
        ("ema", "raw", "raw"),
        (None, "best", "EMA"),  # as timm writes them; the better one is not recorded, so EMA is loaded
    ],
)
def test_raw_or_ema_weights_of_a_checkpoint_are_loaded_as_requested(
    best: str | None, kind: Any, taken: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw, average, path = tiny_network(), tiny_network(), tmp_path / "best.pt"
    nn.init.normal_(average.get_parameter("fc.weight"))
    if best:
        state = {"model": raw.state_dict(), "ema": average.state_dict(), "progress": {"best_weights": best}}
        checkpoint.save(path, state)
    else:
        torch.save({"state_dict": raw.state_dict(), "state_dict_ema": average.state_dict()}, path)
    network = tiny_network(weights=str(path), weights_kind=kind)
    expected = (raw if taken == "raw" else average).state_dict()
    assert all(value.equal(expected[name]) for name, value in network.state_dict().items())
    assert f"starts from {taken} weights of {path}, head included" in capsys.readouterr().out


def test_a_checkpoint_of_timms_train_program_is_loaded_with_its_arguments(tmp_path: Path) -> None:
    source, path = tiny_network(), tmp_path / "model_best.pth.tar"
    nn.init.normal_(source.get_parameter("fc.weight"))
    torch.save({"epoch": 3, "args": argparse.Namespace(lr=0.1), "state_dict": source.state_dict()}, path)
    network = tiny_network(weights=str(path))
    assert all(value.equal(source.state_dict()[name]) for name, value in network.state_dict().items())


def saved(folder: Path, classes: Sequence[str], *, export: bool = False) -> tuple[Path, nn.Module]:
    """A file of weights that says the names of its classes and its normalisation, and the network in it."""
    network = tiny_network(classes=len(classes))
    nn.init.normal_(network.get_parameter("fc.weight"))
    images = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}
    if export:
        (folder / "config.json").write_text(json.dumps({"label_names": classes, "pretrained_cfg": images}))
        return save_weights(network, folder / "model.safetensors"), network
    state = {"model": network.state_dict(), "ema": None, "progress": {"best_weights": "raw"}}
    checkpoint.save(folder / "best.pt", {**state, "recipe": {"data": images}, "head": {"names": classes}})
    return folder / "best.pt", network


@pytest.mark.parametrize("export", [False, True])
def test_the_head_of_weights_that_name_their_classes_is_matched_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], export: bool
) -> None:
    """Not by position: the same number of other classes, or these in another order, would be mislabelled silently."""
    path, source = saved(tmp_path, ["a", "b", "c", "d"], export=export)
    images = random_images()
    expected = source.eval()(images)
    for names, rows in (("abcd", [0, 1, 2, 3]), ("dacb", [3, 0, 2, 1]), ("cb", [2, 1])):
        got = tiny_network(classes=len(names), weights=str(path), names=[*names]).eval()(images)
        torch.testing.assert_close(got, expected[:, rows])
    assert "head's 4 classes matched by name" in capsys.readouterr().out
    for names in ("abcz", "abcde"):
        network = tiny_network(classes=len(names), weights=str(path), names=[*names])
        weight = network.get_parameter("fc.weight")
        assert not any(torch.equal(row, other) for row in weight for other in source.get_parameter("fc.weight"))
        said = f"of other classes (a, b, c …), so a new head is made for {len(names)}"
        assert said in capsys.readouterr().out


def test_an_unreadable_weights_file_is_unavailable_and_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_weights(tiny_network(), tmp_path / "weights.safetensors")

    def refuse(*_: object, **__: object) -> NoReturn:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(StorageError, match=r"weights\.safetensors cannot be read, got 'Permission denied'"):
        tiny_network(weights=str(path))


@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
def test_a_head_with_another_number_of_classes_is_replaced(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, path = tiny_network(name), save_weights(tiny_network(name), tmp_path / "weights.safetensors")
    network = tiny_network(name, classes=3, weights=str(path))
    assert f"{name}: starts from {path} weights, with 7 classes, so a new head is made for 3" in capsys.readouterr().out
    head = {n for n in names_of(source) if source.state_dict()[n].shape != network.state_dict()[n].shape}
    assert len(head) == 2
    assert all(v.equal(source.state_dict()[n]) for n, v in network.state_dict().items() if n not in head)
    assert network(random_images().repeat(1, 1, 5, 5)).shape == (8, 3)


def test_files_without_matching_weights_are_refused_by_name(tmp_path: Path) -> None:
    other, torn, foreign = tmp_path / "other.pth", tmp_path / "torn.safetensors", tmp_path / "foreign.pth"
    torch.save(tiny_network("test_efficientnet").state_dict(), other)
    torn.write_bytes(b"no weights")
    torch.save({"x": Path("code")}, foreign)
    for path, reason in (
        (other, r"other\.pth is of another model than test_resnet: got \d+ weights missing, \d+ unknown"),
        (torn, r"torn\.safetensors is damaged or holds no weights"),
        (foreign, r"foreign\.pth holds a pathlib\.PosixPath beside its weights, which could run code"),
        (tmp_path / "none.pth", r"none\.pth not found, expected a file"),
    ):
        with pytest.raises(ResoluteError, match=reason):
            tiny_network(weights=str(path))


def test_an_unreachable_hub_and_a_model_without_weights_are_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def blocked(*_: object, **__: object) -> NoReturn:
        raise AssertionError("a test may not open connections")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, blocked)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for model, message in (
        ("test_resnet", "weights of test_resnet are not cached and the hub cannot be reached.*name a local file"),
        ("resnet10t.none", r"timm cannot build 'resnet10t.none'.* pretrained: .*tag"),
    ):
        with pytest.raises(ResoluteError, match=message) as error:
            tiny_network(model, weights="pretrained")
        assert "\n" not in str(error.value)
