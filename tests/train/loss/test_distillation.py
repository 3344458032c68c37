"""Distillation: the teacher's images, logits and weights; test_class_weights.py compares the loss with its formula."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch

from resolute.errors import ResoluteError
from resolute.train.loop import Learner
from resolute.train.loss.distillation import Teacher, distilled
from resolute.train.recipe.schema import Distill, Recipe
from tests.support.networks import CPU, make_batch, save_weights, tiny_network
from tests.train.test_loop import TABLE

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


@pytest.fixture(scope="session")
def teacher_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_weights(tiny_network(), tmp_path_factory.mktemp("teacher") / "teacher.safetensors")


def test_a_step_uses_the_teachers_logits_and_does_not_change_the_teacher(teacher_file: Path) -> None:
    table = {**TABLE, "distill": {"teacher": "test_resnet", "weights": str(teacher_file), "alpha": 1.0}}
    learner = Learner(Recipe.parse(table, name="x"), classes=7, total_steps=10, device=CPU)
    assert learner.teacher is not None
    before = {name: value.clone() for name, value in learner.teacher.state_dict().items()}
    batch = make_batch(3)
    same = timm.create_model("test_resnet", num_classes=7, checkpoint_path=str(teacher_file)).eval()
    with torch.no_grad():
        taught, logits = same(batch.images), learner.network(batch.images)
    expected = distilled(torch.zeros(8), logits, taught, learner.recipe.distill).mean()
    loss, _ = learner.train_step(batch)
    torch.testing.assert_close(loss, expected)
    assert not learner.teacher.network.training
    assert all(value.equal(before[name]) for name, value in learner.teacher.state_dict().items())
    assert all(p.grad is None for p in learner.teacher.parameters())
    assert learner.state_dict()["model"].keys() == learner.network.state_dict().keys()


def test_a_pretrained_teacher_gets_images_with_its_own_normalisation(monkeypatch: pytest.MonkeyPatch) -> None:
    network = timm.create_model("test_resnet", num_classes=7)
    assert network.pretrained_cfg["mean"] == (0.5, 0.5, 0.5)
    monkeypatch.setattr("resolute.train.loss.distillation.build_model", lambda *_, **__: network)
    teacher = Teacher(Distill(teacher="test_resnet"), classes=7, **IMAGENET, channels_last=True, device=CPU)
    images = torch.rand(4, 3, 32, 32)
    mean, std = (torch.tensor(IMAGENET[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    torch.testing.assert_close(teacher((images - mean) / std), network((images - 0.5) / 0.5), rtol=1e-4, atol=1e-5)


def test_a_teacher_with_another_number_of_classes_is_refused(teacher_file: Path) -> None:
    with pytest.raises(ResoluteError, match=r"^distill: weights: .*test_resnet are for 7 classes, expected 3"):
        Teacher(Distill(teacher="test_resnet", weights=str(teacher_file)), classes=3, **IMAGENET, channels_last=True,
                device=CPU)  # fmt: skip
