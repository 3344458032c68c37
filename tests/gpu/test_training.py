"""Training on a GPU: no wait for the device, captured graphs, memory, resuming, and two processes."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from resolute import cuda
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.loader import Loader
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import Augment, Stage
from resolute.train.learner import Learner
from resolute.train.logs.metrics import read_log
from resolute.train.planner.batch_size import loader_bytes
from resolute.train.recipe.schema import Recipe
from resolute.train.warmup import capture_graphs, shapes, warm_up
from tests import ROOT

pytestmark = pytest.mark.gpu

STEPS = 20
COMPARED = (
    9  # first steps of a run: kernels that add in another order each time let the losses of later ones drift apart
)
POLICY = {"mixup_alpha": 0.2, "cutmix_alpha": 1.0, "policy": "randaugment", "random_erasing_prob": 0.25}


@contextmanager
def training(shards: ShardSet, **precision: Any) -> Iterator[tuple[Iterator[Any], Learner]]:
    """(training batches, learner), warmed up as in a run."""
    recipe = Recipe.parse(
        {
            "model": {"name": "test_resnet"},
            "optim": {"lr": 1e-3},
            "augment": POLICY,
            "stages": [{"res": 64, "epochs": 20, "batch_size": 16}],
            "precision": precision,
            "eval": {"every_epochs": 1000},
        },
        name="x",
    )
    plan = recipe.plan(shards)
    learner = Learner(recipe, classes=len(shards.classes), total_steps=plan.total_steps, device=torch.device("cuda"))
    warm_up(learner, [shape for shape in shapes(plan) if shape[0] == "train"])
    capture_graphs(learner, plan)
    with Loader(plan, device="cuda", dtype=learner.image_dtype) as loader:
        yield (batch for batch in loader if batch.spec.split == "train"), learner


def test_loader_and_steps_never_wait_for_the_device(shard_set: ShardSet) -> None:
    with training(shard_set, amp="bf16") as (batches, learner):
        for batch in itertools.islice(batches, 5):
            learner.train_step(batch)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for batch in itertools.islice(batches, STEPS):
                learner.train_step(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_captured_steps_have_the_losses_of_eager_ones(shard_set: ShardSet) -> None:
    losses = []
    for captured in (False, True):
        with training(shard_set, amp="bf16", cuda_graphs=captured) as (batches, learner):
            losses.append([float(learner.train_step(batch)[0]) for batch in itertools.islice(batches, STEPS)])
    assert max(abs(eager - captured) for eager, captured in zip(*losses, strict=True)) <= 0.05


def test_dali_takes_no_more_memory_than_is_set_aside_for_it(shard_set: ShardSet) -> None:
    """Its memory is what a loader adds to the device beyond what torch reserves."""
    device = torch.device("cuda", torch.cuda.current_device())
    plan = Plan(shard_set, [Stage(res=64, epochs=10, batch_size=64, augment=Augment(**POLICY))], eval_batch_size=None)  # type: ignore[arg-type]
    torch.zeros(1, device=device)  # so that CUDA's context is there
    before = cuda.used_bytes(device) - cuda.reserved_bytes(device)
    with Loader(plan, device="cuda", dtype=torch.float16) as loader:
        for _ in zip(range(10), loader, strict=False):
            pass
        cuda.synchronize(device)  # sync: all memory is in use
        used = cuda.used_bytes(device) - cuda.reserved_bytes(device) - before
    spec = plan.batch(0)
    assert used <= loader_bytes(plan, spec, len(spec), dtype=torch.float16)


def recipe_file(
    folder: Path, *, model: str = "test_resnet", batch_size: int | str = 8, res: int = 32, compiled: bool = False
) -> Path:
    path = folder / "recipe.toml"
    path.write_text(
        f'[model]\nname = "{model}"\n[optim]\nlr = 0.01\n[precision]\namp = "off"\ntf32 = "off"\n'
        f"compile = {json.dumps(compiled)}\n[eval]\nbatch_size = 8\n"
        f"[[stages]]\nres = {res}\nepochs = 2\nbatch_size = {json.dumps(batch_size)}\n"
        f"[[stages]]\nres = 64\nepochs = 1\nbatch_size = {json.dumps(batch_size)}\n"
    )
    return path


def command(shards: Path, recipe: Path, run: str, *more: str) -> list[str]:
    words = ["train", f"--shards={shards}", f"--recipe={recipe}", f"--run={run}", f"--runs={recipe.parent}"]
    return [sys.executable, "-m", "resolute", *words, "--device=cuda", "--save-every-steps=2", *more]


def train(words: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


def losses(run: Path) -> dict[int, float]:
    """{step: loss} of a run's log."""
    records = [record for record in read_log(run / "run.jsonl") if record["kind"] == "step"]
    assert [record["step"] for record in records] == list(range(len(records)))
    return {record["step"]: record["loss"] for record in records}


def test_a_batch_that_does_not_fit_is_refused_in_one_line(shard_root: Path, tmp_path: Path) -> None:
    recipe = recipe_file(tmp_path, model="resnet50", batch_size=64, res=64)
    done = train(command(shard_root, recipe, "big", "--gpu-memory-gib=0.3"))
    assert done.returncode == 2
    assert "out of memory" in done.stderr.strip().splitlines()[-1]


def test_an_automatic_batch_size_fits_into_the_memory(shard_root: Path, tmp_path: Path) -> None:
    done = train(command(shard_root, recipe_file(tmp_path, batch_size="auto"), "auto", "--gpu-memory-gib=1"))
    assert done.returncode == 0, done.stderr
    assert len(losses(tmp_path / "auto")) > 0


def killed_and_resumed(words: list[str], run: Path, **environment: str) -> dict[int, float]:
    """The losses of a run that was killed with SIGKILL in its middle and started again."""
    log = run / "run.jsonl"
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **environment},
        start_new_session=True,
    )
    while process.poll() is None and not (log.exists() and log.read_bytes().count(b'"kind": "step"') >= 10):
        time.sleep(0.02)
    assert process.poll() is None, "it ended before it could be killed"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    done = train(words, **environment)
    assert done.returncode == 0, done.stderr
    return losses(run)


def test_a_run_that_is_killed_continues_with_each_step_once(shard_root: Path, tmp_path: Path) -> None:
    """Losses may differ: cuDNN adds in another order each time."""
    recipe = recipe_file(tmp_path, batch_size=4)
    assert train(command(shard_root, recipe, "whole")).returncode == 0
    resumed = killed_and_resumed(command(shard_root, recipe, "killed"), tmp_path / "killed")
    assert resumed.keys() == losses(tmp_path / "whole").keys()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_two_processes_train_as_one_and_resume(compiled: bool, shard_root: Path, tmp_path: Path) -> None:
    """The network has no batch normalisation, which depends on the number of processes.

    Where there is one GPU, both share it and gloo connects them; NCCL needs a GPU for each.
    """
    recipe = recipe_file(tmp_path, model="test_convnext", batch_size=4, compiled=compiled)
    environment = {"RESOLUTE_SHARE_GPU": "1"} if torch.cuda.device_count() < 2 else {}
    assert train(command(shard_root, recipe, "one")).returncode == 0
    two = killed_and_resumed(command(shard_root, recipe, "two", "--gpus=2"), tmp_path / "two", **environment)
    one = losses(tmp_path / "one")
    assert two.keys() == one.keys()
    assert max(abs(one[step] - two[step]) for step in range(COMPARED)) <= 1e-3
