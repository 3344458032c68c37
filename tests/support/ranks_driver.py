"""Starts ranks for tests of several, with torchrun's launcher as forked processes, which need no imports.

A rank with `how` "" runs all lines in sequence, and with "compiled" it trains a compiled network; otherwise `how` is
what happens to rank 1 at step `cue` of its first start: "kill", or "end", a SIGTERM to the launcher. Each rank records
the samples that it saw.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from resolute.cli import main
from resolute.console import guard_process
from resolute.pipeline.loader.batch import Batch
from resolute.train import learner as learners
from resolute.train import trainer as runs
from resolute.train.devices.distributed import Ranks, join
from resolute.train.model.build import compile_network
from resolute.train.options import TrainOptions
from resolute.train.recipe.schema import Recipe
from resolute.train.synthetic import synthetic
from resolute.train.warmup import warm_up
from tests.support.batch_spec import batch_spec


def work(folder: str, how: str, cue: int, *lines: Any) -> None:
    rank, start_count = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if how == "compiled":
        with join("cpu") as ranks:
            train_compiled(ranks, Path(folder, f"compiled{rank}"))
        return
    train_step, stop, word = learners.Learner.train_step, runs._Session._stop, threading.Event()
    place = Path(folder, "run")

    def step(learner: learners.Learner, batch: Batch) -> tuple[torch.Tensor, float]:
        if rank == 1 and start_count == 0 and batch.spec.step == cue:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            os.kill(os.getppid(), signal.SIGTERM)
            assert word.wait(60)
        got = train_step(learner, batch)
        with Path(f"{place}.seen{rank}").open("a") as file:
            print(json.dumps([batch.spec.index, batch.spec.ids.tolist()]), file=file)
        return got

    def stopping(session: Any, *signal: Any) -> None:
        word.set()
        stop(session, *signal)

    cast(Any, learners.Learner).train_step = step
    cast(Any, runs._Session)._stop = stopping
    if how:
        sys.exit(main(lines[0]))
    with join("cpu") as ranks:
        measure(ranks, Path(folder, f"measured{rank}"))
        for shards, recipe, place in lines:
            options = TrainOptions(
                shards=shards, recipe=Path(recipe), device="cpu", threads=1, save_every_s=0.0
            )  # each vote is to save
            runs.train(runs.Run(options=options, shards=shards, folder=Path(place)), ranks)
        Path(folder, f"after{rank}").write_text(json.dumps(ranks.vote(0, 0)))


def measure(ranks: Ranks, file: Path) -> None:
    rank = ranks.rank
    votes = [ranks.vote(*mine) for mine in ([rank, 0], [0, 5 if rank == 1 else 0], [0, 0], [0, 0])]
    first, last = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    network = torch.nn.Sequential(first, last)
    for layer in (first, last):
        torch.nn.init.ones_(layer.weight)
    wrapped, gradients = [], []
    for frozen in (True, True, False):
        first.requires_grad_(not frozen)
        wrapped.append(ranks.wrap(network))
        for now in (False, True):
            with ranks.sync_gradients(wrapped[-1], last=now):
                wrapped[-1](torch.full((1, 2), rank + 1.0)).sum().backward()
        gradients.append([p.grad is not None and p.grad.sum().item() for p in (first.weight, last.bias)])
        network.zero_grad(set_to_none=True)
    drawn = []
    for step in (4, 5, 4):
        ranks.seed(0, step)
        drawn.append(torch.rand(3).tolist())
    statistics = torch.nn.BatchNorm1d(1)
    assert statistics.running_mean is not None
    statistics.running_mean += rank
    ranks.average_statistics(statistics)
    norm = torch.nn.BatchNorm1d(1, momentum=0.5)
    training = ranks.wrap(norm)
    for _ in range(2):
        training(torch.full((2, 1), float(rank))).sum().backward()
    assert norm.running_mean is not None
    own_mean = norm.running_mean.item()
    norm.bias.requires_grad_(False)  # another set of trainable parameters
    ranks.wrap(norm)
    file.write_text(
        json.dumps(
            {
                "own_mean": own_mean,
                "rewrapped_mean": norm.running_mean.item(),
                "votes": votes,
                "kept": wrapped[0] is wrapped[1],
                "remade": wrapped[1] is not wrapped[2],
                "gradients": gradients,
                "drawn": drawn,
                "mean": statistics.running_mean.item(),
                "agreed": ranks.broadcast(rank + 7),
                "collected": ranks.gather({rank: "x"}),
            }
        )
    )


def train_compiled(ranks: Ranks, file: Path) -> None:
    """Record the graphs after warm-up, after training and after validation, and when the last step's gradients and
    buckets of gradients were ready."""
    from torch._dynamo.testing import CompileCounterWithBackend  # why here: the import is slow

    table = {
        "model": {"name": "test_resnet"},
        "precision": {"amp": "off"},
        "eval": {"flip": True},
        "stages": [{"res": 32, "epochs": 1, "batch_size": 8}],
    }
    cpu = torch.device("cpu")
    learner = learners.Learner(Recipe.parse(table, name="x"), classes=2000, total_steps=9, device=cpu, ranks=ranks)
    counter, graphs, ready = CompileCounterWithBackend("aot_eager"), list[int](), list[str]()
    compile_network(learner.network, cpu, backend=counter)
    warm_up(learner, [("train", 32, 4), ("val", 32, 4)])
    graphs.append(counter.frame_count)

    def average(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        ready.append("bucket")
        work = dist.all_reduce(bucket.buffer().div_(ranks.world_size), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    # why a lambda: torch refuses annotations that are strings
    cast(Any, ranks.wrap(learner.network)).register_comm_hook(None, lambda _, bucket: average(bucket))
    for parameter in learner.network.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: ready.append("gradient"))
    for step in range(2):  # why two: DistributedDataParallel arranges its buckets after the first
        ready.clear()
        learner.train_step(synthetic(batch_spec(4, res=32, step=step, global_size=8), device=cpu, dtype=torch.float32))
    graphs.append(counter.frame_count)
    learner.eval_step(synthetic(batch_spec(4, res=32, split="val"), device=cpu, dtype=torch.float32))
    file.write_text(json.dumps({"graphs": [*graphs, counter.frame_count], "ready": ready}))


if __name__ == "__main__":
    guard_process()
    for count, restarts, *words in json.loads(sys.argv[1]):
        elastic_launch(
            LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=count,
                max_restarts=restarts,
                monitor_interval=0.1,
                run_id=words[0],
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                start_method="fork",
            ),
            work,
        )(*words)
