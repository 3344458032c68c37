"""CUDA graphs of the training step: what they need, and their bookkeeping with a stand-in for CUDA's graphs."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from resolute import cuda
from resolute.errors import ResoluteError
from resolute.train.learner import Learner
from resolute.train.recipe.schema import Recipe
from resolute.train.step_graphs import StepGraphs, check_cuda_graphs
from resolute.train.warmup import untouched
from tests.support.networks import CPU, make_batch

GPU = torch.device("cuda", 0)
STAGES = [{"res": 32, "epochs": 2, "batch_size": 8}, {"res": 32, "epochs": 1, "batch_size": 8, "train_from": "layer3"}]


def recipe(*, graphs: bool = True, stages: Any = None, **tables: Any) -> Recipe:
    table = {
        "model": {"name": "test_resnet", "drop_path_rate": 0.2},
        "optim": {"lr": 0.1, "clip_norm": 1.0},
        "ema": {"decay": 0.5},
        "precision": {"amp": "off", "cuda_graphs": graphs},
        "stages": stages or STAGES[:1],
    }
    return Recipe.parse({**table, **tables}, name="x")


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({}, ""),
        (
            {"stages": [{"res": [32, 64], "epochs": 2, "batch_size": 8}]},
            r"several shapes in stages\[0\] \(8 of 32 px, 8",
        ),
        ({"optim": {"grad_accum_steps": 2}}, "got true with optim.grad_accum_steps = 2, expected 1"),
        ({"model": {"name": "test_resnet", "grad_checkpointing": True}}, "got true with model.grad_checkpointing"),
        ({"precision": {"cuda_graphs": True, "compile": True}}, "got compile and cuda_graphs, expected one of them"),
    ],
)
def test_what_a_graph_cannot_capture_is_refused(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ResoluteError, match=message) if message else contextlib.nullcontext():
        check_cuda_graphs(recipe(**tables), device=GPU, world_size=1)


class StandIn:
    """CUDA's graphs on a CPU: a replay runs the captured work again, into the tensors of the capture."""

    def __init__(self, network: torch.nn.Module) -> None:
        self.network, self.replays, self.pools = network, 0, list[Any]()

    @contextlib.contextmanager
    def side_stream(self, device: torch.device) -> Iterator[None]:
        yield

    def captured_graph(self, work: Callable[[], torch.Tensor], *, pool: Any = None) -> tuple[Any, torch.Tensor]:
        self.pools.append(pool)
        buffers = {name: buffer.clone() for name, buffer in self.network.named_buffers()}
        random = torch.get_rng_state()
        loss = work().clone()
        gradients = {name: parameter.grad for name, parameter in self.network.named_parameters()}
        for name, buffer in self.network.named_buffers():  # a capture runs nothing
            buffer.copy_(buffers[name])
        torch.set_rng_state(random)
        outer = self

        class Graph:
            def pool(self) -> str:
                return "pool"

            def replay(self) -> None:
                outer.replays += 1
                outer.network.zero_grad(set_to_none=True)
                loss.copy_(work())
                for name, parameter in outer.network.named_parameters():
                    if (gradient := gradients[name]) is not None:
                        assert parameter.grad is not None
                        gradient.copy_(parameter.grad)

        return Graph(), loss


def test_a_run_with_graphs_equals_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout, clipping, EMA, a stage that freezes layers, a validation in between and a smaller last batch."""
    tables = {"stages": STAGES}
    ends = []
    for graphs in (False, True):
        learner = Learner(recipe(graphs=False, **tables), classes=7, total_steps=8, device=CPU, epoch_steps=[3, 2, 3])
        stand_in = StandIn(learner.network)
        if graphs:
            monkeypatch.setattr(cuda, "side_stream", stand_in.side_stream)
            monkeypatch.setattr(cuda, "captured_graph", stand_in.captured_graph)
            learner.graphs = StepGraphs(learner.network, learner.forward_backward)
            before = copy.deepcopy(learner.state_dict())
            for stage in (0, 1):
                with untouched(learner.network):
                    learner.graphs.capture(make_batch(100 + stage, stage=stage))
                    learner.graphs.capture(make_batch(100 + stage, stage=stage))
            assert stand_in.pools == [None, "pool"]
            assert all(value.equal(before["model"][name]) for name, value in learner.network.state_dict().items())
        losses = []
        for index in range(8):
            batch = make_batch(index, n=5 if index == 4 else 8, stage=int(index > 4))
            losses.append(learner.train_step(batch)[0])
            if index == 2:
                learner.eval_step(make_batch(50, split="val"))
        assert stand_in.replays == (7 if graphs else 0)
        ends.append(([float(loss) for loss in losses], learner.state_dict()))
    (without_graphs, state), (with_graphs, other) = ends
    assert with_graphs == without_graphs
    for section in ("model", "ema"):
        assert all(value.equal(other[section][name]) for name, value in state[section].items())
