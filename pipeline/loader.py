"""How does a training loop get the run's batches?

    shards = ShardSet.open("shards")
    plan = Plan(shards, recipe.stages)
    with Loader(plan, device="cpu") as loader:
        for batch in loader:                      # training and validation batches, as planned
            ...                                   # batch.images, batch.labels, batch.spec.split

One object for the run: its threads and its DALI graph start once. Its state is one integer.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from . import cuda
from .ahead import Ahead
from .draws import features
from .errors import ResoluteError, differences
from .graph import Graph
from .memory import keep_freed_memory
from .plan import BatchSpec, Plan, Segment
from .reader import Encoded, PendingBatch, Pieces, Reader

__all__ = ["Batch", "Loader"]

_LOG = logging.getLogger("resolute")
_MOST_BAD = 1000  # neighbours tried in the place of one


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One batch on its device; N is this rank's number of samples.

    The tensors keep their memory for as long as they live.
    """

    images: torch.Tensor  # (N, 3, res, res) float32 or float16, normalised, channels_last memory
    labels: torch.Tensor  # (N,) int64
    partner_labels: torch.Tensor  # (N,) int64: of the image mixed in (its own where there is none)
    lam: torch.Tensor  # (N,) float32: weight of `labels`; 1 - lam is that of `partner_labels`
    spec: BatchSpec


class Loader(Iterator[Batch]):
    """Iterates over the batches of a plan, from any of them on. Use as a context manager."""

    def __init__(
        self,
        plan: Plan,
        *,
        device: str | torch.device = "cpu",
        decode: Literal["cpu", "gpu"] | None = None,
        dtype: torch.dtype = torch.float32,
        mean: tuple[float, ...] = (0.485, 0.456, 0.406),
        std: tuple[float, ...] = (0.229, 0.224, 0.225),
        threads: int = 2,
        readers: int = 2,
        depth: int = 3,
        check_crc: bool = True,
        on_bad_sample: Literal["error", "skip"] = "error",
        keep_memory: bool = True,
        rank: int = 0,
        world: int = 1,
        start: int = 0,
    ) -> None:
        """Start the threads and build the graph.

        device   where batches arrive; "cuda:N" needs a GPU. No silent fallback.
        decode   on a GPU device: decode there ("gpu", the default) or on the CPU.
        dtype    torch.float32, or torch.float16 (on a GPU, for AMP: half the bytes).
        threads  DALI's CPU threads (on a CPU, one more); readers: threads that read ahead, more where storage is slow.
        depth    batches DALI works on ahead of the consumer; as many again are being read.
        start    index of the first batch wanted (see `state_dict`).
        on_bad_sample  "error": a sample that cannot be read ends in a `ResoluteError` that names it, and the loader can
                 be moved on with `load_state_dict`. "skip": the next sample of its split that can be read takes its
                 place, the same one in every run and on every rank; see `skipped`.
        keep_memory    on a CPU, let this process keep memory that batches free, instead of faulting it in again for
                 each (glibc only; up to a fifth faster); it then stays as large as it has been.

        Raises `ResoluteError` when the device is not there or a resolution is not in the open shards.
        """
        self.plan, self.rank, self.world = plan, rank, world
        self.device = torch.device(device)
        on_gpu = self.device.type == "cuda"
        if on_gpu and not cuda.available():
            raise ResoluteError(f"device {device}: no CUDA device found, expected one; use device cpu")
        if decode == "gpu" and not on_gpu:
            raise ResoluteError("decode: got gpu with device cpu, expected cpu; leave it out")
        if dtype != torch.float32 and not (dtype == torch.float16 and on_gpu):
            raise ResoluteError(f"dtype: got {dtype}, expected torch.float32, or torch.float16 on a GPU; choose one")
        for segment in plan.segments:
            if segment.stored_res not in plan.shards.splits[segment.split].stored:
                raise ResoluteError(
                    f"{plan.shards.root}: {segment.stored_res} px is not open, got "
                    f"{sorted(plan.shards.splits[segment.split].stored)}; name it in ShardSet.open"
                )
        plan.check_ranks(world)
        self._features = features([stage.augment for stage in plan.stages])
        self._skip = on_bad_sample == "skip"
        self.skipped: dict[tuple[str, int, int], str] = {}  # (split, stored res, sample): why it could not be read
        self._instead: dict[tuple[str, int], dict[int, int]] = {}
        self._depth, self._next = depth, start
        self._reading: deque[tuple[BatchSpec, PendingBatch]] = deque()
        self._running: deque[BatchSpec] = deque()
        self._read_next = start
        decode = decode or ("gpu" if on_gpu else "cpu")
        # why: that a GPU's decoders do not look behind an image's end has not been tried
        self._reader = Reader(plan.shards, threads=readers, check_crc=check_crc, padded=decode == "cpu")
        self._ahead = Ahead(plan, rank=rank, world=world)
        if keep_memory and not on_gpu:
            keep_freed_memory()
        largest = max((segment.batch_size for segment in plan.segments), default=1)
        try:
            self._graph = Graph(
                batch_size=largest, threads=threads, device_id=(self.device.index or 0) if on_gpu else None,
                decode=decode, depth=depth, mean=mean, std=std,
                half=dtype == torch.float16, features=self._features,
                largest_res=max((segment.res for segment in plan.segments), default=1),
                largest_bytes=max((_image_bytes(segment, world) for segment in plan.segments), default=0),
            )  # fmt: skip
            self._prime()
            self._read_ahead()
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        """Batches still to come."""
        return self.plan.total_batches - self._next

    def state_dict(self) -> dict[str, Any]:
        """The state: the index of the next batch that `next()` returns, and of which plan."""
        return {"next_batch": self._next, "fingerprint": self.plan.fingerprint, "plan": self.plan.identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at another batch. What runs ahead is dropped; the graph and the threads stay.

        A bare {"next_batch": index} moves the loader within its plan.
        Raises `ResoluteError` for the state of another plan, naming what differs, and for a batch that it has not.
        """
        if state.get("fingerprint", self.plan.fingerprint) != self.plan.fingerprint:
            changes = "; ".join(differences(state.get("plan"), self.plan.identity))
            raise ResoluteError(f"Loader: the state of another plan: {changes}; build the plan that it was saved with")
        position = state["next_batch"]
        if not 0 <= position <= self.plan.total_batches:
            raise ResoluteError(
                f"Loader: next_batch is out of range, got {position}, expected 0 to {self.plan.total_batches}; "
                "load a state of this plan"
            )
        while self._running:
            self._graph.drop()
            self._running.popleft()
        self._reading.clear()
        self._next = self._read_next = position
        self._read_ahead()

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        if not hasattr(self, "_graph"):
            raise ResoluteError("Loader: next() after close(), expected an open loader; open another")
        if self._next >= self.plan.total_batches:
            raise StopIteration
        self._run_ahead(wait=True)
        stream = cuda.current_stream(self.device) if self.device.type == "cuda" else None
        spec = self._running.popleft()
        images = self._graph.take(spec, stream)  # the wait for data is here
        self._next += 1
        self._run_ahead(wait=False)
        labels = self.plan.shards.splits[spec.split].samples[spec.ids]["label"].astype(np.int64)
        return Batch(
            images=images.permute(0, 3, 1, 2),
            labels=self._to_device(labels),
            partner_labels=self._to_device(labels[spec.partners]),
            lam=self._to_device(spec.lam),
            spec=spec,
        )

    def _to_device(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def _read_ahead(self) -> None:
        while len(self._reading) < self._depth + 1 and self._read_next < self.plan.total_batches:
            spec = self._planned(self._read_next)
            self._reading.append((spec, self._reader.submit(spec.split, spec.stored_res, spec.ids)))
            self._ahead.follow(self._read_next)
            self._read_next += 1

    def _run_ahead(self, *, wait: bool) -> None:
        """Keep `depth` batches in DALI. `wait` for a read only when there is no other batch to hand out."""
        while len(self._running) < self._depth and self._reading:
            spec, pending = self._reading[0]
            if not pending.done() and (self._running or not wait):
                return
            spec, jpegs = self._usable(spec, pending.result())
            self._reading.popleft()
            self._read_ahead()
            self._graph.start(spec, jpegs)
            self._running.append(spec)

    def _planned(self, index: int) -> BatchSpec:
        segment = self.plan.segment(index)
        instead = self._instead.get((segment.split, segment.stored_res))
        return self.plan.batch(index, rank=self.rank, world=self.world, instead=instead)

    def _usable(self, spec: BatchSpec, read: Encoded) -> tuple[BatchSpec, Pieces]:
        """The batch with others in the places of what cannot be read; raises if that is not wanted."""
        if not read.errors:
            return spec, read.pieces
        pieces = list(read.pieces)
        for i, error in read.errors.items():
            number = int(spec.ids[i])
            if not self._skip:
                raise error
            other, pieces[i] = self._next_good(spec, number, error)
            self._instead.setdefault((spec.split, spec.stored_res), {})[number] = other
            if (key := (spec.split, spec.stored_res, number)) not in self.skipped:
                self.skipped[key] = str(error)
                _LOG.warning("skipped, sample %d in its place: %s", other, error)
        return self._planned(spec.index), pieces

    def _next_good(self, spec: BatchSpec, number: int, error: ResoluteError) -> tuple[int, NDArray[np.uint8]]:
        total = len(self.plan.shards.splits[spec.split])
        for away in range(1, min(total, _MOST_BAD)):
            other = (number + away) % total
            read = self._reader.submit(spec.split, spec.stored_res, np.array([other])).result()
            if not read.errors:
                return other, read.pieces[0]
        raise ResoluteError(f"{error} (nor can the {min(total, _MOST_BAD) - 1} samples after it be read)")

    def _prime(self) -> None:
        """Run the plan's largest batch through the graph, unseen, so that nothing has to grow later."""
        largest = max(self.plan.segments, key=lambda s: s.res**2 * min(s.batch_size, s.samples))
        spec = self.plan.batch(largest.first, rank=self.rank, world=self.world)
        read = self._reader.submit(spec.split, spec.stored_res, spec.ids).result()
        jpegs = read.pieces
        if read.errors:  # why: any good one does, with the window that fits it: nobody sees these
            places = [i for i in range(len(spec)) if i not in read.errors]
            if not places:
                raise read.errors[0]
            filled = [places[0] if i in read.errors else i for i in range(len(spec))]
            jpegs, spec = [jpegs[i] for i in filled], dataclasses.replace(spec, windows=spec.windows[filled])
        self._graph.prime(spec, jpegs)

    def close(self) -> None:
        """End threads and files. Batches already handed out stay valid."""
        self._reader.close()
        self._reading.clear()
        self._running.clear()
        if graph := self.__dict__.pop("_graph", None):
            graph.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _image_bytes(segment: Segment, world: int) -> int:
    """Of a rank's largest batch, as float32. why 1 more: pairs of images stay together on a rank."""
    return 12 * segment.res**2 * (-(-min(segment.batch_size, segment.samples) // world) + (world > 1))
