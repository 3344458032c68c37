"""Data-parallel training: the ranks of a run and their collective operations. Each rank takes a slice of every batch.

torchrun starts the ranks (`make train GPUS=8`); NCCL connects GPUs, gloo CPUs. A single process uses neither. With
RESOLUTE_SHARE_GPU=1 in the environment, for tests, several ranks use one GPU, which gloo connects: NCCL refuses that.
Gradients are averaged by torch's DistributedDataParallel during the backward pass; losses and counts are summed when
they are read, at a checkpoint or the end of an epoch; timers and signals of single ranks take effect through `vote`.
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
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from resolute import cuda
from resolute.errors import ResoluteError
from resolute.pipeline.plan.permutation import stream_key

__all__ = ["LostRank", "Ranks", "join", "running_statistics", "shares_gpu"]

_CPU = torch.device("cpu")
_DROPOUT = 4  # stream of random numbers; pipeline.plan uses 0 to 3
T = TypeVar("T")


def shares_gpu() -> bool:
    """Whether ranks may share a GPU, which only tests want."""
    return os.environ.get("RESOLUTE_SHARE_GPU") == "1"


class Ranks:
    """This process's rank and the collective operations of the run. All ranks must call the methods in the same order.

    By default a single process, for which every operation is free.
    """

    def __init__(self, *, rank: int = 0, world_size: int = 1, local_rank: int = 0) -> None:
        self.rank, self.world_size, self.local_rank = rank, world_size, local_rank
        self._wrapped: DistributedDataParallel | None = None
        self._parameters: list[nn.Parameter] = []  # of the wrapped network
        self._trainable: list[bool] = []  # for each of them
        self._vote: tuple[torch.Tensor, Any] | None = None

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes the log and the checkpoints and prints."""
        return self.rank == 0

    def device(self, name: str) -> torch.device:
        """This rank's own GPU. Raises `ResoluteError` if there are too few, or if `name` is a specific one."""
        if name not in ("auto", "cuda"):
            raise ResoluteError(
                f"--device: got {name} for {self.world_size} ranks, expected auto, cuda or cpu; choose one"
            )
        count, index = cuda.device_count(), self.local_rank
        if shares_gpu():
            index %= max(1, count)
        if index >= count:
            raise ResoluteError(f"got {count} GPUs on this machine, expected one per rank; lower GPUS")
        return cuda.use_device(torch.device("cuda", index))

    def wrap(self, network: nn.Module) -> nn.Module:
        """`network` wrapped so that `backward` averages gradients over the ranks; `network` itself for a single rank.

        Parameters and their names stay those of `network`. The wrapper is rebuilt whenever the trainable set changes,
        so that gradients of frozen parameters are not communicated.
        """
        if self.world_size == 1:
            return network
        if self._wrapped is None or self._wrapped.module is not network:
            self._parameters, self._trainable = list(network.parameters()), []
        trainable = [parameter.requires_grad for parameter in self._parameters]
        if self._wrapped is None or trainable != self._trainable:
            self._wrapped = None  # why first: frees its buckets, which are as large as the gradients
            # why no sync: buffers (statistics) are broadcast here and averaged before each validation
            # (`average_statistics`); training does not read them in between
            self._wrapped = DistributedDataParallel(network, gradient_as_bucket_view=True)
            self._wrapped.broadcast_buffers = False  # why not as an argument: its name depends on torch's version
            self._trainable = trainable
        return self._wrapped

    def unwrap(self) -> None:
        """Forget the wrapped network, so that its memory can be freed."""
        self._wrapped, self._parameters, self._trainable = None, [], []

    def sync_gradients(self, wrapped: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Around a forward pass: if `last`, its backward pass averages all gradients accumulated so far."""
        if isinstance(wrapped, DistributedDataParallel) and not last:
            return wrapped.no_sync()
        return contextlib.nullcontext()

    def seed(self, seed: int, step: int) -> None:
        """Seed dropout as a function of (seed, rank, step), so that no state is saved. No effect on a single rank."""
        if self.world_size > 1:
            torch.manual_seed(stream_key(seed, _DROPOUT, self.rank, step) >> 1)  # why: torch takes 63 bits

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """`values`, summed in place over all ranks."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def max(self, value: int) -> int:
        """The maximum of all ranks' values."""
        if self.world_size == 1:
            return value
        values = torch.tensor(value)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return int(values)

    def broadcast(self, value: T) -> T:
        """Rank 0's value, any picklable object."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=_CPU)
        return box[0]

    def check_same(self, value: object, message: str) -> None:
        """Raise `ResoluteError` with `message` on ranks whose value differs from rank 0's."""
        if (first := self.broadcast(value)) != value:
            raise ResoluteError(f"{message}; got {value}, expected {first} as on rank 0")

    def gather(self, values: dict[Any, str]) -> dict[Any, str]:
        """The union of all ranks' dicts."""
        if self.world_size == 1:
            return values
        return {key: value for each in self.of_all(values) for key, value in each.items()}

    @torch.no_grad()
    def average_statistics(self, *networks: nn.Module) -> None:
        """Give all ranks the mean of their batch norm statistics, since each has seen different samples, and rank 0's
        other buffers."""
        if self.world_size > 1:
            for network in networks:
                averaged = {id(buffer) for buffer in running_statistics(network).values()}
                for buffer in network.buffers():
                    if id(buffer) in averaged:
                        dist.all_reduce(buffer)
                        buffer /= self.world_size
                    else:
                        dist.broadcast(buffer, src=0)

    def of_all(self, value: T) -> list[T]:
        """Every rank's value, any picklable object, by rank."""
        values: list[Any] = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def vote(self, *values_here: int) -> tuple[int, ...]:
        """Element-wise maximum over the ranks of the previous call's values (zeros in the first call).

        Asynchronous on the CPU during the next step, hence one call late. A single rank gets `values_here` at once.
        """
        if self.world_size == 1:
            return values_here
        before = self.finish_vote()
        values = torch.tensor(values_here)
        self._vote = values, dist.all_reduce(values, op=dist.ReduceOp.MAX, async_op=True)
        return (0,) * len(values_here) if before is None else tuple(before.tolist())  # no sync: on the CPU

    def finish_vote(self) -> torch.Tensor | None:
        """Wait for the latest `vote` and forget it; returns its result, None if there is none. All ranks call it."""
        if self._vote is None:
            return None
        (values, work), self._vote = self._vote, None
        work.wait()  # no sync: with the other ranks' CPUs alone
        return values

    def _leave(self) -> None:
        """Barrier, then leave the process group: no rank exits while another still needs it."""
        self.finish_vote()
        dist.all_reduce(torch.zeros(1))
        self._wrapped = None
        dist.destroy_process_group()


@contextlib.contextmanager
def join(device: str) -> Iterator[Ranks]:
    """The ranks started by torchrun (from its environment variables), or a single one. `device`: value of `--device`.

    Only rank 0 prints. An error ends all ranks: the first to fail raises `ResoluteError`, the others exit silently
    (`SystemExit`).
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        yield Ranks()
        return
    on_gpu = device != "cpu" and cuda.available()
    store, rank, world_size = next(rendezvous("env://"))
    if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
        # why: torchrun's store survives a restart and still holds the old addresses; not on several nodes, whose
        # restart counts may differ
        store = dist.PrefixStore(f"life{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    ranks = Ranks(rank=rank, world_size=world_size, local_rank=int(os.environ["LOCAL_RANK"]))
    with contextlib.ExitStack() as stack:
        if not ranks.is_main:
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))  # noqa: PTH123
        try:
            backend = "cuda:nccl,cpu:gloo" if on_gpu and not shares_gpu() else "gloo"
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
            yield ranks
            ranks._leave()
        except ResoluteError as error:
            _raise_once(store, ResoluteError(f"rank {rank}: {error}"))
        except RuntimeError as error:
            text = str(error)
            if not isinstance(error, dist.DistError) and "gloo" not in text.lower():
                raise
            _raise_once(
                store,
                LostRank(
                    f"rank {rank}: lost another rank ({text.splitlines()[0][:100]}); see its message; "
                    "the same command resumes from the last checkpoint"
                ),
            )


def running_statistics(network: nn.Module) -> dict[str, torch.Tensor]:
    """The running means and variances of the batch norms, by name."""
    norms = [(name, module) for name, module in network.named_modules() if isinstance(module, _BatchNorm)]
    found = {f"{name}.{kind}": getattr(norm, kind) for name, norm in norms for kind in ("running_mean", "running_var")}
    return {name: value for name, value in found.items() if value is not None}


class LostRank(ResoluteError):
    """Another rank has ended. Its own error says why; if it was killed, the ranks are started again."""

    exit_status = 75  # Source: sysexits.h, EX_TEMPFAIL


def _raise_once(store: dist.Store, error: ResoluteError) -> None:
    """Raise `error` on the first rank that calls this, exit on the others."""
    try:
        first = store.add("resolute/error", 1) == 1
    except RuntimeError:  # why: the store ends with torchrun
        first = True
    if first:
        raise error from None
    sys.exit(error.exit_status)
