"""How do several processes train as one? Each takes its slice of every batch; what they find is put together here.

torchrun starts them (`make train GPUS=8`), NCCL joins GPUs, gloo CPUs. A process alone needs neither and pays nothing.
Gradients are averaged by torch's DistributedDataParallel while they are computed; losses and counts are summed when
they are read, at a checkpoint or the end of an epoch; what only a clock or a signal knows is agreed on by `vote`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from pipeline import cuda
from pipeline.errors import ResoluteError
from pipeline.plan.rng import stream_key

__all__ = ["Ranks", "join"]

_CPU = torch.device("cpu")
_DROP = 4  # purpose of random numbers; pipeline.plan.plan and order have 0 to 3
T = TypeVar("T")


class Ranks:
    """This process among those of its run; by default it is alone. Every method is called by all ranks at once."""

    def __init__(self, *, rank: int = 0, world_size: int = 1, local_rank: int = 0) -> None:
        self.rank, self.world_size, self.local_rank = rank, world_size, local_rank
        self._wrapped: DistributedDataParallel | None = None
        self._parameters: list[nn.Parameter] = []  # of the wrapped network
        self._trainable: list[bool] = []  # which of them
        self._vote: tuple[torch.Tensor, Any] | None = None

    @property
    def is_main(self) -> bool:
        """Whether this is the one that writes the log, the checkpoints and what is printed."""
        return self.rank == 0

    def device(self, wanted: str) -> torch.device:
        """This rank's own GPU. Raises `ResoluteError` if there is none left, or `wanted` names a single one."""
        if wanted not in ("auto", "cuda"):
            raise ResoluteError(f"--device: got {wanted} for {self.world_size} ranks, expected auto, cuda or cpu; take one")
        count = cuda.device_count()
        if self.local_rank >= count:
            raise ResoluteError(f"got {count} GPUs on this machine, expected one for each of its ranks; lower GPUS")
        return cuda.select(torch.device("cuda", self.local_rank))

    def wrap(self, network: nn.Module) -> nn.Module:
        """`network` with gradients that are averaged over the ranks in `backward`; alone, itself.

        Parameters and their names stay those of `network`. Made anew whenever another set of them is trainable: those
        that are frozen are not sent.
        """
        if self.world_size == 1:
            return network
        if self._wrapped is None or self._wrapped.module is not network:
            self._parameters, self._trainable = list(network.parameters()), []
        trainable = [parameter.requires_grad for parameter in self._parameters]
        if self._wrapped is None or trainable != self._trainable:
            self._wrapped = None  # why first: its buckets are as large as the gradients
            # buffers (statistics) are the first rank's from here, and again before each validation (`share_buffers`):
            # in training nothing reads them, so that sending them in each forward pass would be time lost
            self._wrapped = DistributedDataParallel(network, forward_sync_buffers=False)
            self._trainable = trainable
        return self._wrapped

    def averaging(self, wrapped: nn.Module, *, now: bool) -> AbstractContextManager[None]:
        """Around a forward pass: whether its backward pass sends the gradients, those accumulated before included."""
        if isinstance(wrapped, DistributedDataParallel) and not now:
            return wrapped.no_sync()
        return contextlib.nullcontext()

    def seed(self, seed: int, step: int) -> None:
        """Let each rank draw its own dropout: a function of seed, rank and step, so nothing to save. Alone: nothing."""
        if self.world_size > 1:
            torch.manual_seed(stream_key(seed, _DROP, self.rank, step) >> 1)  # why: torch takes 63 bits of it

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """`values`, summed in place over all ranks."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def max(self, value: int) -> int:
        """The largest value that any rank gives; waits for all of them."""
        if self.world_size == 1:
            return value
        values = torch.tensor(value)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return int(values)

    def broadcast(self, value: T) -> T:
        """The first rank's value."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=_CPU)
        return box[0]

    def check_same(self, value: object, message: str) -> None:
        """Raise `ResoluteError` with `message` on the ranks whose value is not the first one's."""
        if (first := self.broadcast(value)) != value:
            raise ResoluteError(f"{message}; got {value}, expected {first} as rank 0")

    def gather(self, values: dict[Any, str]) -> dict[Any, str]:
        """What all ranks give, put together."""
        if self.world_size == 1:
            return values
        boxes: list[Any] = [None] * self.world_size
        dist.all_gather_object(boxes, values)
        return {key: value for box in boxes for key, value in box.items()}

    @torch.no_grad()
    def broadcast_buffers(self, *networks: nn.Module) -> None:
        """Give all ranks the first one's statistics: each has seen other samples since the last step began."""
        if self.world_size > 1:
            for network in networks:
                for buffer in network.buffers():
                    dist.broadcast(buffer, src=0)

    def vote(self, *mine: int) -> tuple[int, ...]:
        """The largest that any rank gave, place by place, in the call before (zeros in the first). Alone: `mine`.

        One call late, as it then waits for no other rank and no device: it runs beside the next step, on the CPU.
        """
        if self.world_size == 1:
            return mine
        before = self._finish_vote()
        values = torch.tensor(mine)
        self._vote = values, dist.all_reduce(values, op=dist.ReduceOp.MAX, async_op=True)
        return (0,) * len(mine) if before is None else tuple(before.tolist())

    def _finish_vote(self) -> torch.Tensor | None:
        if self._vote is None:
            return None
        (values, work), self._vote = self._vote, None
        work.wait()
        return values

    def _leave(self) -> None:
        """All meet, then part: none ends while another still needs it."""
        self._finish_vote()
        dist.all_reduce(torch.zeros(1))
        self._wrapped = None
        dist.destroy_process_group()


@contextlib.contextmanager
def join(device: str) -> Iterator[Ranks]:
    """The ranks that torchrun started (its variables tell), or this process alone. `device`: as on the command line.

    Only the first rank prints. An error ends them all: the rank that meets it first tells it, the others leave without
    a word (`SystemExit`).
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        yield Ranks()
        return
    on_gpu = device != "cpu" and cuda.available()
    store, rank, world_size = next(rendezvous("env://"))
    if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
        # why: torchrun's store outlives a restart, with the addresses of the dead; several nodes count restarts apart
        store = dist.PrefixStore(f"life{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    ranks = Ranks(rank=rank, world_size=world_size, local_rank=int(os.environ["LOCAL_RANK"]))
    with contextlib.ExitStack() as stack:
        if not ranks.is_main:
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))  # noqa: PTH123
        try:
            dist.init_process_group(
                "cuda:nccl,cpu:gloo" if on_gpu else "gloo", store=store, rank=rank, world_size=world_size
            )
            yield ranks
            ranks._leave()
        except ResoluteError as error:
            _raise_once(store, f"rank {rank}: {error}")
        except RuntimeError as error:
            text = str(error)
            if not isinstance(error, dist.DistError) and "gloo" not in text.lower():
                raise
            _raise_once(
                store, f"rank {rank}: lost another rank ({text.splitlines()[0][:100]}); see its message; "
                "the same command goes on from the last checkpoint"
            )  # fmt: skip


def _raise_once(store: dist.Store, text: str) -> None:
    """Raise it as an error on the first rank that comes here, end the others."""
    try:
        first = store.add("resolute/told", 1) == 1
    except RuntimeError:  # why: where torchrun itself has ended, so has the store
        first = True
    if first:
        raise ResoluteError(text) from None
    sys.exit(2)
