"""The GPU path against the CPU path: equal batches and augmentation, a step that learns, a run that is saved."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from resolute.cli import main
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.loader import Loader
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import Augment, Stage
from resolute.train.learner import Learner
from resolute.train.logs.metrics import read_log
from resolute.train.recipe.schema import Recipe

pytestmark = pytest.mark.gpu

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
MIXED = Augment(scale=(0.3, 1.0), mixup_alpha=0.8, cutmix_alpha=1.0)
STAGES = (
    Stage(res=32, epochs=1, batch_size=16, augment=MIXED),
    Stage(res=64, epochs=1, batch_size=10, fraction=0.5),
    Stage(res=48, epochs=1, batch_size=32, augment=MIXED),
)


@pytest.mark.parametrize("decode", ["cpu", "gpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_batches_on_the_gpu_equal_those_of_the_cpu(shard_set: ShardSet, decode: str, dtype: torch.dtype) -> None:
    """Decoders and resize kernels round differently: mean within 1 level of 255, 99 % within 4."""
    plan = Plan(shard_set, STAGES, seed=1, eval_batch_size=7)
    with Loader(plan) as on_cpu, Loader(plan, device="cuda", decode=decode, dtype=dtype) as on_gpu:  # type: ignore[arg-type]
        for expected, got in zip(on_cpu, on_gpu, strict=True):
            assert got.images.is_cuda
            assert got.images.dtype == dtype
            assert got.images.is_contiguous(memory_format=torch.channels_last)
            error = (got.images.float().cpu() - expected.images).abs() * 0.226 * 255
            assert error.mean() < 1.0, got.spec
            assert error.flatten().quantile(0.99) < 4.0, got.spec
            assert torch.equal(got.labels.cpu(), expected.labels)
            assert torch.equal(got.lam.cpu(), expected.lam)


@pytest.mark.parametrize("sleep_cycles", [0, 100_000_000])
def test_batches_of_a_device_that_lags_behind_the_host_are_their_own(shard_set: ShardSet, sleep_cycles: int) -> None:
    """DALI's memory is read by kernels that begin late; neither it nor a delivered batch may be overwritten before."""
    plan = Plan(shard_set, STAGES, seed=1, eval_batch_size=7)
    with Loader(plan) as loader:
        expected = [batch.images for batch in loader]
    with Loader(plan, device="cuda") as loader:
        got = []
        for _ in expected:
            torch.cuda._sleep(sleep_cycles)
            got.append(next(loader).images)
        assert loader._graph._gpu_augment is not None
        assert len(loader._graph._gpu_augment._held) <= 3
    for ours, theirs in zip(got, expected, strict=True):
        assert ((ours.cpu() - theirs).abs() * 0.226 * 255).mean() < 1.0


def test_batches_that_are_dropped_before_the_device_read_them_are_not_overwritten(shard_set: ShardSet) -> None:
    """The device is about 0.1 s late at every sixth batch, which is more than are in flight."""
    plan = Plan(shard_set, STAGES, seed=1, eval_batch_size=7)
    sums = []
    for late in (False, True):
        with Loader(plan, device="cuda") as loader:
            taken = []
            for number, batch in enumerate(loader):
                if late and number % 6 == 0:
                    torch.cuda._sleep(200_000_000)
                taken.append(batch.images.double().sum())
                del batch
                if not late:
                    torch.cuda.synchronize()  # sync: nothing is late
        sums.append(torch.stack(taken).tolist())
    assert sums[0] == sums[1]


@pytest.mark.parametrize("amp", ["bf16", "fp16", "off"])
def test_a_learner_overfits_a_single_batch(shard_set: ShardSet, amp: str) -> None:
    table = {
        "model": {"name": "test_resnet"},
        "precision": {"amp": amp},
        "optim": {"lr": 0.1},
        "stages": [{"res": 64, "epochs": 40, "batch_size": 75}],
    }
    recipe = Recipe.parse(table, name="x")
    plan = Plan(shard_set, recipe.stages, eval_batch_size=None)
    learner = Learner(recipe, classes=3, total_steps=plan.total_steps, device=torch.device("cuda"))
    dtype = torch.float32 if amp == "off" else torch.float16
    with Loader(plan, device="cuda", dtype=dtype) as loader:
        losses = [float(learner.train_step(batch)[0]) for batch in loader]
    assert all(map(math.isfinite, losses))
    assert losses[-1] < 0.5 * losses[0]


def test_a_run_on_the_gpu_completes_with_finite_losses(shard_root: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(
        '[model]\nname = "test_resnet"\n[ema]\ndecay = 0.9\n[eval]\nbatch_size = 8\n'
        "[[stages]]\nres = 32\nepochs = 2\nbatch_size = 16\n[[stages]]\nres = 64\nepochs = 1\nbatch_size = 16\n"
    )
    line = ["train", "--shards", str(shard_root), "--recipe", str(recipe), "--run", "tiny", "--runs", str(tmp_path)]
    assert main([*line, "--device", "cuda"]) == 0
    records = read_log(tmp_path / "tiny" / "run.jsonl")
    assert [r["epoch"] for r in records if r["kind"] == "epoch"] == [0, 1, 2]
    assert all(math.isfinite(r["loss"]) for r in records if r["kind"] == "step")


@pytest.mark.parametrize(
    "keys",
    [
        {"policy": "randaugment", "num_ops": 3},
        {"policy": "trivialaugment"},
        {"policy": "3-augment"},
        {"jitter": (0.4, 0.4, 0.4, 0.1)},
        {"grey_prob": 0.5, "vflip_prob": 0.5},
        {"blur_prob": 1.0},
        {"random_erasing_prob": 0.7},
        {"random_erasing_prob": 0.7, "random_erasing_fill": "noise"},
        {"mixup_alpha": 0.8, "cutmix_alpha": 1.0, "mixup_mode": "elem"},
    ],
    ids=lambda keys: "-".join(keys),
)
def test_every_operation_gives_the_same_images_as_the_cpu(shard_set: ShardSet, keys: dict[str, Any]) -> None:
    """Decoders and resizes differ by about a level, which operations like equalize amplify: most images stay close."""
    stages = [
        Stage(res=64, epochs=1, batch_size=16, augment=Augment(scale=(0.3, 1.0), **keys)),
        Stage(res=48, epochs=1, batch_size=16),
    ]
    plan = Plan(shard_set, stages, seed=1, eval_batch_size=7)
    errors = []
    with Loader(plan) as on_cpu, Loader(plan, device="cuda") as on_gpu:
        for expected, got in zip(on_cpu, on_gpu, strict=True):
            levels = (got.images.float().cpu() - expected.images).abs().mean(dim=(1, 2, 3)) * 0.226 * 255
            errors += levels.tolist()
    errors.sort()
    assert errors[len(errors) // 2] < 1.5
    assert errors[int(0.9 * len(errors))] < 8
