"""The dtypes of a loader's images, and the user's transform of the uint8 batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.loader import Loader
from resolute.pipeline.plan.plan import BatchSpec, Plan
from resolute.pipeline.plan.stage import Augment, Stage
from tests.support.gpu_on_cpu import MEAN, STD, GpuLoader

AUGMENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mixing": {"mixup_alpha": 0.8, "cutmix_alpha": 1.0, "mixup_mode": "elem", "mixup_prob": 0.7},
    "policy": {"policy": "randaugment", "random_erasing_prob": 0.5, "mixup_alpha": 0.8, "mixup_prob": 0.5},
}
MEANS, STDS = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
ON_BOTH = [("policy", False), ("mixing", True)]


def plan_of(shards: ShardSet, name: str) -> Plan:
    augment = Augment(**AUGMENTS[name])
    stages = [
        Stage(res=32, epochs=1, batch_size=16, augment=augment),
        Stage(res=(40, 56, 48), epochs=1, batch_size=(20, 11, 24), res_schedule="random", augment=augment),
        Stage(res=48, epochs=1, batch_size=10),
    ]
    return Plan(shards, stages, seed=1, eval_batch_size=7)


def images_of(monkeypatch: pytest.MonkeyPatch, plan: Plan, on_gpu: bool, **options: Any) -> list[torch.Tensor]:
    """The images of all batches: (N, 3, res, res), in channels_last memory."""
    with GpuLoader(monkeypatch, plan, **options) if on_gpu else Loader(plan, **options) as loader:
        images = [batch.images for batch in loader]
    assert len(images) == plan.total_batches
    assert all(each.is_contiguous(memory_format=torch.channels_last) for each in images)
    return images


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "on_gpu"), ON_BOTH)
def test_images_of_every_dtype_are_the_same_numbers_also_after_a_transform_that_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, shard_set: ShardSet, name: str, on_gpu: bool
) -> None:
    """uint8: the levels before normalisation; 16 bits: the rounded float32."""
    plan = plan_of(shard_set, name)
    images = {
        dtype: images_of(monkeypatch, plan, on_gpu, dtype=dtype)
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.uint8)
    }
    for raw, normalised in zip(images[torch.uint8], images[torch.float32], strict=True):
        assert len(raw.unique()) > 100
        torch.testing.assert_close((raw / 255 - MEANS) / STDS, normalised, atol=1e-5, rtol=1e-5)
    for dtype in (torch.float16, torch.bfloat16):
        assert same(images[dtype], [each.to(dtype) for each in images[torch.float32]])
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        unchanged = images_of(monkeypatch, plan, on_gpu, dtype=dtype, transform=lambda images, spec: images)
        assert same(images[dtype], unchanged)


@pytest.mark.parametrize(("name", "on_gpu", "in_place"), [("policy", False, True), ("mixing", True, False)])
def test_a_transform_gets_the_uint8_images_and_what_it_returns_is_normalised(
    monkeypatch: pytest.MonkeyPatch, shard_set: ShardSet, name: str, on_gpu: bool, in_place: bool
) -> None:
    """Here the negatives of training images, in the loader's memory or as new tensors in contiguous memory."""
    plan = plan_of(shard_set, name)
    seen = list[BatchSpec]()

    def negative(images: torch.Tensor, spec: BatchSpec) -> torch.Tensor:
        assert (images.dtype, tuple(images.shape)) == (torch.uint8, (len(spec), 3, spec.res, spec.res))
        seen.append(spec)
        if spec.split == "val":
            return images
        return images.neg_().sub_(1) if in_place else (255 - images).contiguous()  # 255 - level, modulo 256

    raw = images_of(monkeypatch, plan, on_gpu, dtype=torch.uint8)
    changed = images_of(monkeypatch, plan, on_gpu, transform=negative)
    assert [spec.index for spec in seen] == list(range(plan.total_batches))
    for levels, got, spec in zip(raw, changed, seen, strict=True):
        expected = 255 - levels if spec.split == "train" else levels
        torch.testing.assert_close((expected / 255 - MEANS) / STDS, got, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("wrong", "got"),
    [
        (lambda images: images / 255, r"a float32 tensor \(16, 3, 32, 32\) on cpu"),
        (lambda images: images.permute(0, 2, 3, 1), r"a uint8 tensor \(16, 32, 32, 3\) on cpu"),
    ],
)
def test_a_transform_that_returns_something_else_is_refused(
    shard_set: ShardSet, wrong: Callable[[torch.Tensor], Any], got: str
) -> None:
    with (
        Loader(plan_of(shard_set, "plain"), transform=lambda images, spec: wrong(images)) as loader,
        pytest.raises(
            ResoluteError, match=rf"^transform: got {got}, expected a uint8 tensor \(16, 3, 32, 32\) on cpu, as it was"
        ),
    ):
        next(loader)
