"""The host never waits for the device in a steady step or in the loader: a trace in which "meta" is the device."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.dataset.target import Target
from resolute.pipeline.graph import gpu_augment
from resolute.pipeline.loader.batch import Batch
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import Augment, Stage
from resolute.train.learner import Learner
from resolute.train.logs.metrics import Meter, NullLogWriter
from resolute.train.loop import run_batches
from resolute.train.model.outputs import CLASSES, Outputs
from resolute.train.recipe.schema import Recipe
from tests.support.device_trace import DEVICE, DeviceTrace
from tests.support.gpu_on_cpu import GpuLoader
from tests.support.networks import make_batch

SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "values": {},
    "adamw": {
        "optim": {"name": "adamw", "lr": 1e-3, "clip_norm": 1.0},
        "ema": {"decay": 0.9},
        "loss": {"label_smoothing": 0.1},
        "eval": {"flip": True},
    },
    "lamb": {
        "optim": {
            "name": "lamb",
            "lr": 1e-3,
            "gradient_centralization": True,
            "clip_agc": 0.1,
            "gradient_normalization": True,
        },
        "loss": {"kind": "asl"},
    },
    "labels": {
        "optim": {"lr": 0.1, "clip_value": 0.1, "grad_accum_steps": 2},
        "model": {"name": "test_resnet", "grad_checkpointing": True},
    },
    "freeze": {
        "loss": {"kind": "bce"},
        "stages": [{"res": 32, "epochs": 1, "batch_size": 8, "train_from": "head"}],
    },
}


@pytest.fixture(autouse=True)
def meta_as_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets "meta" pass where torch accepts real devices only."""
    generator = torch.Generator
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": generator())


def on_device(batch: Batch) -> Batch:
    names = ("images", "targets", "partner_labels", "lam")
    return dataclasses.replace(batch, **{name: getattr(batch, name).to(DEVICE) for name in names})


HEADS = {
    "labels": Outputs(target=Target(kind="labels", names=tuple("abcdefg")), loss="bce"),
    "values": Outputs(
        target=Target(kind="values", names=tuple("abcdefg")), loss="mse", mean=(1.0,) * 7, std=(2.0,) * 7
    ),
}


def with_targets(batch: Batch, head: Outputs) -> Batch:
    """The batch with random targets of the head's kind."""
    if head.target.kind == "class":
        return batch
    return dataclasses.replace(batch, targets=torch.rand(len(batch.targets), 7), partner_labels=batch.targets[:0])


def trace_steps(keys: dict[str, Any], head: Outputs = CLASSES) -> list[str]:
    """Device syncs in the third and fourth step of a run, validation included."""
    table = {"model": {"name": "test_resnet"}, "stages": [{"res": 32, "epochs": 4, "batch_size": 8}], **keys}
    learner = Learner(Recipe.parse(table, name="x"), classes=7, total_steps=10, device=DEVICE, head=head)
    meter = Meter(NullLogWriter(Path("x")), device=DEVICE, head=head)
    kinds: tuple[Any, ...] = ("train", "train", "train", "val", "train", "val")
    batches = [on_device(with_targets(make_batch(index, split=split), head)) for index, split in enumerate(kinds)]
    batches = [dataclasses.replace(batch, spec=dataclasses.replace(batch.spec, stage=0, epoch=0)) for batch in batches]
    run_batches(batches[:2], learner, meter, lambda spec: True)
    with DeviceTrace() as trace:
        run_batches(batches[2:], learner, meter, lambda spec: True)
    return trace.events


@pytest.mark.parametrize("name", ["sgd", *(pytest.param(name, marks=pytest.mark.slow) for name in [*SETTINGS][1:])])
def test_a_steady_step_waits_for_nothing(name: str) -> None:
    assert trace_steps(SETTINGS[name], HEADS.get(name, CLASSES)) == []


MISTAKES: list[tuple[str, Callable[[torch.Tensor], Any]]] = [
    ("read", lambda loss: 1 if loss > 0 else 0),
    ("host copy", lambda loss: loss.cpu()),
    ("dynamic shape", lambda loss: loss.expand(8)[loss.expand(8) > 0]),
    ("pageable copy", lambda loss: torch.zeros(8).to(loss.device, non_blocking=True)),
    ("blocking copy", lambda loss: torch.empty(8, pin_memory=True).to(loss.device)),
]


def test_the_trace_finds_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = Learner.forward_backward

    def waiting(learner: Learner, batch: Batch) -> torch.Tensor:
        loss = gradients(learner, batch)
        if batch.spec.index > 2:
            for _, mistake in MISTAKES:
                mistake(loss)
        return loss

    monkeypatch.setattr(Learner, "forward_backward", waiting)
    assert [event.partition(":")[0] for event in trace_steps({})] == [kind for kind, _ in MISTAKES]


class Ignored:
    """Stands in for a kernel and launches nothing."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *_, **__: None


def trace_loader(monkeypatch: pytest.MonkeyPatch, shards: ShardSet, augment: Augment) -> tuple[DeviceTrace, int]:
    """The trace of the loader's batches, and their number."""
    plan = Plan(shards, [Stage(res=res, epochs=1, batch_size=8, augment=augment) for res in (32, 48)], seed=1)
    with GpuLoader(monkeypatch, plan) as loader:
        for kernel in ("apply_slot", "finish"):
            monkeypatch.setattr(gpu_augment, kernel, Ignored())
        loader.device = DEVICE
        assert loader._graph._gpu_augment is not None
        loader._graph._gpu_augment._device = DEVICE
        loader._graph._gpu_augment._fill = loader._graph._gpu_augment._fill.to(DEVICE)
        with DeviceTrace() as trace:
            next(loader)
            trace.events.clear()
            trace.copies = 0
            batches = sum(batch.labels.device == batch.lam.device == DEVICE for batch in loader)
    return trace, batches


AUGMENTS = {
    "plain": Augment(),
    "policy": Augment(policy="randaugment", jitter=(0.4, 0.4, 0.4, 0.1), random_erasing_prob=0.5, mixup_alpha=0.2),
}


@pytest.mark.parametrize("name", ["plain", *(pytest.param(name, marks=pytest.mark.slow) for name in [*AUGMENTS][1:])])
def test_batches_reach_the_device_in_asynchronous_copies_from_pinned_memory(
    monkeypatch: pytest.MonkeyPatch, shard_set: ShardSet, name: str
) -> None:
    """One of labels and weights per batch, and one of the kernels' parameters, if the run has any."""
    trace, batches = trace_loader(monkeypatch, shard_set, AUGMENTS[name])
    assert trace.events == []
    assert batches > 20
    assert trace.copies == batches * (1 if name == "plain" else 2)
