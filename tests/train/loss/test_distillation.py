"""Distillation: the teacher's images and weights; test_class_weights.py compares the loss with its formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from resolute.errors import ResoluteError
from resolute.train import checkpoint
from resolute.train.loss.distillation import Teacher
from resolute.train.recipe.schema import Distill
from tests.support.networks import CPU, save_weights, tiny_network

IMAGENET: dict[str, Any] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


@pytest.fixture(scope="session")
def teacher_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_weights(tiny_network(), tmp_path_factory.mktemp("teacher") / "teacher.safetensors")


def test_a_pretrained_teacher_gets_images_with_its_own_normalisation(monkeypatch: pytest.MonkeyPatch) -> None:
    network: Any = timm.create_model("test_resnet", num_classes=7)
    assert network.pretrained_cfg["mean"] == (0.5, 0.5, 0.5)
    monkeypatch.setattr("resolute.train.loss.distillation.build_model", lambda *_, **__: network)
    teacher = Teacher(Distill(teacher="test_resnet"), classes=7, **IMAGENET, channels_last=True, device=CPU)
    images = torch.rand(4, 3, 32, 32)
    mean, std = (torch.tensor(IMAGENET[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    torch.testing.assert_close(teacher((images - mean) / std), network((images - 0.5) / 0.5), rtol=1e-4, atol=1e-5)


def teacher_of(folder: Path, names: list[str]) -> tuple[Teacher, Any]:
    """A teacher for classes of these names, and its network, of a run of a, b, c with mean and std of 0.5."""
    source, path = tiny_network(classes=3), folder / "best.pt"
    torch.nn.init.normal_(source.get_parameter("fc.weight"))
    data, progress = {"mean": [0.5] * 3, "std": [0.5] * 3}, {"best_weights": "raw"}
    state = {"model": source.state_dict(), "ema": None, "progress": progress, "recipe": {"data": data}}
    checkpoint.save(path, {**state, "head": {"names": ["a", "b", "c"]}})
    distill = Distill(teacher="test_resnet", weights=str(path))
    teacher = Teacher(distill, classes=len(names), names=names, **IMAGENET, channels_last=True, device=CPU)
    return teacher, source.eval()


def test_a_teacher_of_another_run_gets_its_normalisation_and_answers_in_the_runs_order(tmp_path: Path) -> None:
    teacher, source = teacher_of(tmp_path, ["c", "a", "b"])
    images = torch.rand(4, 3, 32, 32)
    mean, std = (torch.tensor(IMAGENET[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    with torch.no_grad():
        expected = source((images - 0.5) / 0.5)[:, [2, 0, 1]]
    torch.testing.assert_close(teacher((images - mean) / std), expected, rtol=1e-4, atol=1e-5)


def test_a_teacher_of_other_classes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ResoluteError, match=r"^distill: weights: .* of test_resnet are without z, expected the 3"):
        teacher_of(tmp_path, ["b", "c", "z"])


def test_a_teacher_with_another_number_of_classes_is_refused(teacher_file: Path) -> None:
    with pytest.raises(ResoluteError, match=r"^distill: weights: .*test_resnet are for 7 classes, expected the 3"):
        Teacher(
            Distill(teacher="test_resnet", weights=str(teacher_file)),
            classes=3,
            **IMAGENET,
            channels_last=True,
            device=CPU,
        )
