"""The GPU path of the loader, run with CPU kernels, produces the batches of the CPU path."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.loader import Loader
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import Augment, Stage
from tests.support.gpu_on_cpu import GpuLoader, differences

MIXING: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch": {"mixup_alpha": 0.8, "cutmix_alpha": 1.0, "mixup_prob": 0.8},
    "elem": {"mixup_alpha": 0.8, "cutmix_alpha": 1.0, "mixup_mode": "elem", "mixup_prob": 0.8},
    "noise": {"random_erasing_prob": 0.6, "random_erasing_fill": "noise"},
    "slots": {"grey_prob": 0.6, "jitter": (0.3, 0.0, 0.0, 0.0)},
}


def plan_of(shards: ShardSet, **keys: Any) -> Plan:
    """Batches of changing size and resolution, upwards and downwards, the last stage without augmentation."""
    augment = Augment(scale=(0.3, 1.0), vflip_prob=0.3, **keys)
    stages = [
        Stage(res=32, epochs=2, batch_size=16, augment=augment),
        Stage(res=64, epochs=1, batch_size=10, augment=augment),
        Stage(res=48, epochs=1, batch_size=32, augment=augment),
        Stage(res=32, epochs=2, batch_size=13),
        Stage(res=(40, 56, 37), epochs=1, batch_size=(20, 11, 24), res_schedule="random", augment=augment),
    ]
    plan = Plan(shards, stages, seed=1, eval_batch_size=7)
    assert plan.total_batches >= 30
    return plan


@pytest.mark.parametrize(
    ("mixing", "decode", "dtype"),
    [
        ("plain", "gpu", torch.float16),
        ("batch", "cpu", torch.float32),
        ("elem", "gpu", torch.float32),
        ("noise", "gpu", torch.float16),
        ("slots", "cpu", torch.float32),
    ],
)
def test_batches_of_the_gpu_path_equal_those_of_the_cpu_path(
    monkeypatch: pytest.MonkeyPatch, shard_set: ShardSet, mixing: str, decode: Any, dtype: torch.dtype
) -> None:
    """Planted mistakes that it finds: rows of the batch before; slots that another batch uses."""
    plan = plan_of(shard_set, **MIXING[mixing])
    with Loader(plan) as on_cpu, GpuLoader(monkeypatch, plan, decode=decode, dtype=dtype, batches_ahead=3) as on_gpu:
        assert on_gpu._graph._on_cpu is False
        assert differences(on_cpu, on_gpu) == []
