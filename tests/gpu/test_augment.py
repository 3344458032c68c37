"""Augmentation on the GPU: Triton kernels against the CPU's compiled function, through the loader."""

from __future__ import annotations

from typing import Any

import pytest

from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.loader import Loader
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import Augment, Stage

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "keys",
    [
        {"policy": "randaugment", "num_ops": 3}, {"policy": "trivialaugment"}, {"policy": "autoaugment"},
        {"policy": "3-augment"}, {"jitter": (0.4, 0.4, 0.4, 0.1)}, {"grey_prob": 0.5, "vflip_prob": 0.5},
        {"blur_prob": 1.0}, {"random_erasing_prob": 0.7}, {"random_erasing_prob": 0.7, "random_erasing_fill": "noise"},
        {"mixup_alpha": 0.8, "cutmix_alpha": 1.0, "mixup_mode": "elem"},
    ],
    ids=lambda keys: "-".join(keys),
)  # fmt: skip
def test_every_operation_gives_the_same_images_as_the_cpu(shard_set: ShardSet, keys: dict[str, Any]) -> None:
    """Decoders and resizes differ by about a level, which operations like equalize amplify: most images stay close."""
    stages = [Stage(res=64, epochs=1, batch_size=16, augment=Augment(scale=(0.3, 1.0), **keys)),
              Stage(res=48, epochs=1, batch_size=16)]  # fmt: skip
    plan = Plan(shard_set, stages, seed=1, eval_batch_size=7)
    errors = []
    with Loader(plan) as on_cpu, Loader(plan, device="cuda") as on_gpu:
        for expected, got in zip(on_cpu, on_gpu, strict=True):
            levels = (got.images.float().cpu() - expected.images).abs().mean(dim=(1, 2, 3)) * 0.226 * 255
            errors += levels.tolist()
    errors.sort()
    assert errors[len(errors) // 2] < 1.5
    assert errors[int(0.9 * len(errors))] < 8
