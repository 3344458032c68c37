"""The largest batch size that fits is searched once and kept; running out of memory is reported with a remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.dataset.shard_set import ShardSet
from pipeline.errors import ResoluteError
from pipeline.plan.plan import Plan
from pipeline.plan.stage import AUTO
from tests.support.fake_cuda import GIB, FakeCuda
from train.__main__ import main
from train.loop import Learner
from train.planner.batch_size import DoesNotFit, cap_memory, largest_that_fits, real_steps, with_batch_sizes
from train.planner.measure import synthetic
from train.recipe.schema import Recipe

# why: without an index, which some torch functions refuse
GPU, CPU = torch.device("cuda"), torch.device("cpu")
Words = Callable[[Path], list[str]]


def recipe(*sizes: int | str, **tables: Any) -> Recipe:
    stages = [{"res": 32 + 16 * i, "epochs": 1, "batch_size": size} for i, size in enumerate(sizes)]
    return Recipe.parse({"model": {"name": "test_resnet"}, "stages": stages, **tables}, name="auto")


def sizes(recipe: Recipe) -> list[int]:
    return [stage.batch_size for stage in recipe.stages]


@pytest.mark.parametrize("max_size", [1, 3, 8, 13, 256, 300, 1000])
def test_the_search_returns_the_largest_fitting_candidate_in_few_probes(max_size: int) -> None:
    """Candidates: `max_size`, multiples of 8 below 256 and of 32 above, and halvings of the first probe."""
    first = min(8, max_size)
    candidates = {0, max_size, *range(8, min(max_size, 256) + 1, 8), *range(256, max_size + 1, 32)}
    candidates |= {first >> k for k in range(4)}
    for limit in range(max_size + 2):
        probes: list[int] = []

        def fits(n: int, limit: int = limit, probes: list[int] = probes) -> bool:
            probes.append(n)
            return n <= limit

        expected = max(n for n in candidates if n <= min(limit, max_size))
        assert largest_that_fits(fits, max_size=max_size) == expected
        assert len(probes) == len(set(probes)) <= 16
        assert max(probes) <= max_size


def test_batch_size_auto_must_be_resolved_before_planning(shard_set: ShardSet) -> None:
    got = recipe("auto", 8)
    assert sizes(got) == [AUTO, 8]
    with pytest.raises(ResoluteError, match="batch_size: got auto, expected a number"):
        Plan(shard_set, got.stages)
    for wrong in (0, -8, "most"):
        with pytest.raises(ResoluteError, match="batch_size: got"):
            recipe(wrong)


def probing(shards: ShardSet, max_size: dict[int, int]) -> Any:
    def probe(recipe: Recipe) -> Any:
        return Plan(shards, recipe.stages, eval_batch_size=8), lambda stage, count: count <= max_size[stage]

    return probe


def test_auto_stages_get_the_largest_fitting_size_and_numbers_are_kept(shard_set: ShardSet) -> None:
    words: dict[str, Any] = {"device": GPU, "saved_recipe": lambda: None}
    got = with_batch_sizes(recipe("auto", 12, "auto"), probe=probing(shard_set, {0: 50, 2: 20}), **words)
    assert sizes(got) == [48, 12, 16]
    got = with_batch_sizes(recipe("auto"), probe=probing(shard_set, {0: 10**6}), **words)
    assert sizes(got) == [75]  # an epoch's samples
    got = with_batch_sizes(
        recipe("auto"), probe=probing(shard_set, {0: 20}), world_size=3, min_over_ranks=lambda n: n - 8, **words
    )
    assert sizes(got) == [3 * 8]  # another rank fits 8
    with pytest.raises(ResoluteError, match="not one sample of 32 px fits"):
        with_batch_sizes(recipe("auto"), probe=probing(shard_set, {0: 0}), **words)


def test_auto_suits_any_number_of_micro_batches(shard_set: ShardSet) -> None:
    accumulating = Recipe.parse({"optim": {"grad_accum_steps": 24}, "stages": [
        {"res": 32, "epochs": 1, "batch_size": "auto"}]}, name="x")  # fmt: skip
    got = with_batch_sizes(accumulating, device=GPU, saved_recipe=lambda: None, probe=probing(shard_set, {0: 40}))
    assert sizes(got) == [40]


def test_a_resumed_run_keeps_its_batch_sizes(shard_set: ShardSet) -> None:
    def never(_: Recipe) -> Any:
        raise AssertionError

    saved_recipe = {"stages": [{"batch_size": 40}, {"batch_size": 8}]}
    got = with_batch_sizes(recipe("auto", 12), device=CPU, saved_recipe=lambda: saved_recipe, probe=never)
    assert sizes(got) == [40, 12]  # the recipe's number wins: the checkpoint will refuse it
    same = recipe(4, 12)
    assert with_batch_sizes(same, device=CPU, saved_recipe=lambda: saved_recipe, probe=never) is same


def test_on_a_cpu_auto_is_refused_unless_a_checkpoint_has_the_size(
    words: Words, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "model = {{ name = 'test_resnet' }}\n[[stages]]\nres = 32\nepochs = 1\nbatch_size = {}\n"
    file = tmp_path / "auto.toml"
    line = [*words(tmp_path), "--recipe", str(file), "--threads", "1"]
    file.write_text(text.format('"auto"'))
    assert main(line) == 2
    assert "stages[0].batch_size: got auto on a CPU" in capsys.readouterr().err
    assert not (tmp_path / "auto").exists()
    file.write_text(text.format(40))
    assert main(line) == 0
    file.write_text(text.format('"auto"'))
    capsys.readouterr()
    assert main(line) == 0
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


@pytest.mark.parametrize(("gib", "fraction", "max_size"), [(10, 1.0, 72), (10, 0.5, 36), (1000, 1.0, 64)])
def test_a_batch_fits_if_two_steps_leave_memory_for_the_loader(
    shard_set: ShardSet, monkeypatch: pytest.MonkeyPatch, gib: float, fraction: float, max_size: int
) -> None:
    """10 GiB, a tenth of it kept free, hold 72 samples of 1/8 GiB; torch raises above 64 in the last case."""
    card, steps = FakeCuda(gib=gib, fraction=fraction).install(monkeypatch), []
    small = recipe(8)
    plan = Plan(shard_set, small.stages)
    learner = Learner(small, classes=3, total_steps=plan.total_steps, device=CPU)

    def train_step(batch: Any) -> None:
        steps.append(len(batch.labels))
        if gib == 1000 and len(batch.labels) > 64:
            raise torch.OutOfMemoryError("CUDA out of memory")
        card.peak_reserved = len(batch.labels) * GIB // 8

    monkeypatch.setattr(learner, "train_step", train_step)
    learner.device = GPU
    monkeypatch.setattr(
        "train.planner.batch_size.synthetic", lambda spec, **words: synthetic(spec, **{**words, "device": CPU})
    )
    fits = real_steps(plan, learner, world_size=1)
    assert [fits(0, n) for n in (max_size, max_size + 1, 1)] == [True, False, True]
    assert steps.count(max_size) == 2


def test_the_out_of_memory_error_names_stage_shape_usage_and_remedies(
    shard_set: ShardSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeCuda(gib=80, fraction=0.3).install(monkeypatch)
    resolved = recipe(64, 48, optim={"grad_accum_steps": 2}, eval={"batch_size": 15})
    plan = Plan(shard_set, resolved.stages, eval_batch_size=15)
    message = str(DoesNotFit("train", 48, 48).describe(plan, resolved, GPU))
    assert message.startswith("stage 1, train: out of memory with images of 24x3x48x48 (3.0 GiB in use")
    assert "limit 24.0 GiB; the GPU has 80.0 GiB" in message
    assert "set batch_size = 24" in message
    assert "optim.grad_accum_steps = 4" in message
    message = str(DoesNotFit("val", 48, 15).describe(plan, resolved, GPU))
    assert "stage 1, val: out of memory with images of 15x3x48x48" in message
    assert "set eval.batch_size = 7" in message
    assert "grad_accum_steps" not in message


@pytest.mark.parametrize("where", ["warm-up", "step"])
def test_a_run_that_runs_out_of_memory_ends_in_one_line(
    words: Words, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """In the warm-up at 64 px, or in the first step at 32 px; both simulated, as a CPU has no such error."""

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB")

    if where == "step":
        monkeypatch.setattr(Learner, "train_step", full)
    else:
        build = Learner.__init__

        def init(self: Learner, *args: Any, **words: Any) -> None:
            build(self, *args, **words)
            self.network.register_forward_pre_hook(lambda _, inputs: full() if inputs[0].shape[2] == 64 else None)

        monkeypatch.setattr(Learner, "__init__", init)
    assert main([*words(tmp_path), "--threads", "1"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    stage, shape, size = ("stage 0", "16x3x32x32", 8) if where == "step" else ("stage 2", "12x3x64x64", 6)
    assert error.startswith(f"error: {stage}, train: out of memory with images of {shape}, expected")
    assert f"set batch_size = {size}" in error
