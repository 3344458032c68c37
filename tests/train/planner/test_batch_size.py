"""The largest batch size that fits is searched once and kept; running out of memory is reported with a remedy."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from resolute.cli import main
from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.plan.plan import Plan
from resolute.train.learner import Learner
from resolute.train.planner.batch_size import (
    cap_memory,
    largest_that_fits,
    out_of_memory,
    real_steps,
    with_batch_sizes,
)
from resolute.train.recipe.schema import Recipe
from resolute.train.synthetic import synthetic
from tests.support.fake_cuda import GIB, FakeCuda
from tests.train.conftest import SMALL

# why: without an index, which some torch functions refuse
GPU, CPU = torch.device("cuda"), torch.device("cpu")
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB")
MESSAGES = [
    "CUDA out of memory. Tried to allocate 20 MiB",
    "CUDA error: out of memory",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "FIND was unable to find an engine to execute this computation after trying 5 plans.",
    "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8",
]


def recipe(*sizes: int | str, **tables: Any) -> Recipe:
    stages = [{"res": 32 + 16 * i, "epochs": 1, "batch_size": size} for i, size in enumerate(sizes)]
    return Recipe.parse({"model": {"name": "test_resnet"}, "stages": stages, **tables}, name="auto")


def sizes(recipe: Recipe) -> list[Any]:
    return [stage.batch_size for stage in recipe.stages]


def test_the_search_returns_the_largest_multiple_of_8_or_32_that_fits_in_few_probes() -> None:
    candidates = {0, 1, 2, 4, 300, *range(8, 257, 8), *range(256, 300, 32)}
    for limit in range(301):
        probes: list[int] = []

        def fits(n: int, probes: list[int] = probes, most: int = limit) -> bool:
            probes.append(n)
            return n <= most

        got = largest_that_fits(fits, max_size=300)
        assert got == max(n for n in candidates if n <= limit)
        assert len(probes) <= 16


def test_auto_stages_get_the_largest_fitting_size_and_numbers_are_kept(shard_set: ShardSet) -> None:
    with pytest.raises(ResoluteError, match="batch_size: got auto, expected a number"):
        Plan(shard_set, recipe("auto", 8).stages)

    def chosen(recipe: Recipe, max_size: dict[int, int], **more: Any) -> list[int]:
        def probe(recipe: Recipe) -> Any:
            return Plan(shard_set, recipe.stages, eval_batch_size=8), lambda stage, count: count <= max_size[stage]

        return sizes(with_batch_sizes(recipe, device=GPU, saved_recipe=lambda: None, probe=probe, **more))

    assert chosen(recipe("auto", 12, "auto"), {0: 50, 2: 20}) == [48, 12, 16]
    assert chosen(recipe("auto"), {0: 10**6}) == [75], "an epoch's samples"
    assert chosen(recipe("auto", optim={"grad_accum_steps": 24}), {0: 40}) == [40], "no multiple of the micro-batches"
    assert chosen(recipe("auto"), {0: 20}, world_size=3, min_over_ranks=lambda n: n - 8) == [3 * 8], "another rank's 8"
    with pytest.raises(ResoluteError, match="not one sample of 32 px fits"):
        chosen(recipe("auto"), {0: 0})


def test_on_a_cpu_auto_is_refused_unless_a_checkpoint_has_the_size(
    trained: Path, shard_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "auto.toml"
    file.write_text(SMALL.replace("batch_size = 16", 'batch_size = "auto"'))
    line = ["train", "--shards", str(shard_root), "--recipe", str(file), "--runs", str(tmp_path), "--device", "cpu"]
    assert main([*line, "--run", "new"]) == 2
    assert "stages[0].batch_size: got auto on a CPU" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    shutil.copytree(trained, tmp_path / "small")
    assert main([*line, "--run", "small", "--threads", "1"]) == 0
    assert "this run is finished" in capsys.readouterr().out


def test_a_memory_cap_is_a_fraction_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    card = FakeCuda(gib=80).install(monkeypatch)
    cap_memory(GPU, 24)
    assert card.fractions[-1] == 24 / 80
    cap_memory(GPU, 0)
    cap_memory(CPU, 0)
    assert len(card.fractions) == 2
    for gib in (81.0, -1.0):
        with pytest.raises(ResoluteError, match=r"--gpu-memory-gib: got .* at most the 80.0 of this GPU"):
            cap_memory(GPU, gib)
    with pytest.raises(ResoluteError, match="--gpu-memory-gib: got 24 with device cpu"):
        cap_memory(CPU, 24)


class Steps:
    """The steps of a learner on a simulated GPU: 1/8 GiB per sample to train and 1/32 to validate, in the end reserved.

    `fails`: (split, samples) -> the error of a step, if any. `seen`: split, samples and cuDNN's autotuning of each.
    """

    def __init__(self, shards: ShardSet, monkeypatch: pytest.MonkeyPatch, *, gib: float, fraction: float = 1.0) -> None:
        card, resolved = FakeCuda(gib=gib, fraction=fraction).install(monkeypatch), recipe(8, eval={"batch_size": 15})
        self.plan, self.seen = Plan(shards, resolved.stages, eval_batch_size=15), list[Any]()
        self.fails: Callable[[str, int], Exception | None] = lambda split, samples: None
        learner = Learner(resolved, classes=3, total_steps=self.plan.total_steps, device=CPU)
        card.peak_reserved = 0

        def step(batch: Any) -> None:
            split, samples = batch.spec.split, len(batch.labels)
            self.seen.append((split, samples, torch.backends.cudnn.benchmark))
            if (error := self.fails(split, samples)) is not None:
                raise error
            card.peak_reserved = max(card.peak_reserved, samples * GIB // (8 if split == "train" else 32))

        monkeypatch.setattr("gc.collect", lambda: 0)  # why: after each probe; slow in a process with many objects
        monkeypatch.setattr(card, "reset_peak_memory_stats", lambda _: setattr(card, "peak_reserved", 0))
        monkeypatch.setattr(learner, "train_step", step)
        monkeypatch.setattr(learner, "eval_step", step)
        learner.device = GPU
        monkeypatch.setattr(
            "resolute.train.planner.batch_size.synthetic",
            lambda spec, **words: synthetic(spec, **{**words, "device": CPU}),
        )
        self.fits = real_steps(self.plan, learner, world_size=1)


@pytest.mark.parametrize(("fraction", "max_size"), [(1.0, 71), (0.5, 33)])
def test_a_batch_fits_if_two_steps_without_autotuning_leave_memory_for_the_loader(
    shard_set: ShardSet, monkeypatch: pytest.MonkeyPatch, fraction: float, max_size: int
) -> None:
    """Of 9.5 and 4.75 GiB, 0.5 GiB are for the loader's decoders, and under 1 MiB a sample for its images."""
    steps = Steps(shard_set, monkeypatch, gib=10, fraction=fraction)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert [steps.fits(0, n) for n in (max_size, max_size + 1, 1)] == [True, False, True]
    assert steps.seen[:3] == [("train", max_size, False), ("train", max_size, False), ("val", 15, False)]
    assert torch.backends.cudnn.benchmark


def test_a_batch_does_not_fit_if_any_library_runs_out_of_memory(
    shard_set: ShardSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(out_of_memory(RuntimeError(message)) for message in MESSAGES)
    steps = Steps(shard_set, monkeypatch, gib=1000)
    steps.fails = lambda _, samples: OUT_OF_MEMORY if samples > 15 else None
    assert [steps.fits(0, n) for n in (15, 16)] == [True, False]
    steps.fails = lambda split, _: OUT_OF_MEMORY if split == "val" else None
    with pytest.raises(ResoluteError, match=r"^stage 0, val: out of memory .* 15x3x32x32 .*; set eval\.batch_size = 7"):
        with_batch_sizes(
            recipe("auto", eval={"batch_size": 15}),
            device=GPU,
            saved_recipe=lambda: None,
            probe=lambda _: (steps.plan, steps.fits),
        )
    steps.fails = lambda split, samples: RuntimeError("CUDA error: device-side assert triggered")
    with pytest.raises(RuntimeError, match="device-side assert"):
        steps.fits(0, 1)


@pytest.mark.parametrize(
    ("where", "line"),
    [
        ("step", "stage 0, train: out of memory with images of 16x3x32x32"),
        ("warm-up", "stage 2, train: out of memory with images of 12x3x64x64"),
    ],
)
def test_a_run_that_runs_out_of_memory_ends_in_one_line(
    words: Callable[[Path], list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    line: str,
) -> None:
    """Simulated, as a CPU has no such error."""

    def full(learner: Learner, images: Any) -> Any:
        if where == "step" or images.shape[2] == 64:
            raise RuntimeError(MESSAGES[2])

    if where == "step":
        monkeypatch.setattr(Learner, "train_step", full)
    monkeypatch.setattr("resolute.train.warmup._forward_and_backward", full if where == "warm-up" else lambda *_: None)
    assert main([*words(tmp_path), "--threads", "1"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"resolute train: {line}, expected")
