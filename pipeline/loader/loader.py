"""The run's batches, for a training loop.

    shards = ShardSet.open("shards")
    plan = Plan(shards, recipe.stages)
    with Loader(plan, device="cpu") as loader:
        for batch in loader:                      # training and validation batches, as planned
            ...                                   # batch.images, batch.labels, batch.spec.split

One object for the run: its threads and its DALI graph start once. Its state is the index of the next batch. What fails
for a batch is raised by the `next()` that would return it, never earlier; the batches before it are delivered.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline import cuda
from pipeline.errors import DamagedSample, ResoluteError, StorageError, differences
from pipeline.graph.graph import Graph
from pipeline.graph.kernels.pread import Pieces
from pipeline.plan.plan import BatchSpec, Plan, Pass
from pipeline.plan.sampling import features

from .prefetch import Prefetcher
from .reader import PendingBatch, Reader

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


@dataclass(kw_only=True)
class _PlannedBatch:
    """A batch that is being read: its plan and the read of just that plan's samples, or why there is none."""

    index: int
    spec: BatchSpec | None = None
    labels: NDArray[np.int64] | None = None
    pending: PendingBatch | None = None
    error: Exception | None = None


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
        rank: int = 0,
        world_size: int = 1,
        start: int = 0,
    ) -> None:
        """Start the threads and build the graph.

        device   where batches arrive; "cuda:N" needs a GPU. No silent fallback.
        decode   on a GPU device: decode there ("gpu", the default) or on the CPU.
        dtype    torch.float32, or torch.float16 (on a GPU, for AMP: half the bytes).
        threads  DALI's CPU threads (on a CPU, one more); readers: threads that read ahead, more where storage is slow.
        depth    batches DALI works on ahead of the consumer; as many again are being read.
        start    index of the first batch wanted (see `state_dict`).
        on_bad_sample  "error": a damaged sample ends in a `DamagedSample` that names it, and the loader can be moved on
                 with `load_state_dict`. "skip": the next sound sample of its split takes its place, the same one in
                 every run and on every rank; see `skipped`. Storage that does not deliver is a `StorageError` in
                 either case: `next()` tries again, and so does a new loader at the same batch.

        Raises `ResoluteError` when the device is not there, an option is out of range or a resolution is not in the
        open shards.
        """
        _check_range("threads", threads, 1)
        _check_range("readers", readers, 1)
        _check_range("depth", depth, 1)
        _check_range("world_size", world_size, 1)
        _check_range("rank", rank, 0, world_size - 1)
        _check_range("start", start, 0, plan.total_batches)
        if on_bad_sample not in ("error", "skip"):
            raise ResoluteError(f"on_bad_sample: got {on_bad_sample!r}, expected error or skip; choose one")
        self.plan, self.rank, self.world_size = plan, rank, world_size
        self.device = cuda.usable(device)
        on_gpu = self.device.type == "cuda"
        if decode not in (None, "cpu", "gpu"):
            raise ResoluteError(f"decode: got {decode!r}, expected cpu or gpu; choose one")
        if decode == "gpu" and not on_gpu:
            raise ResoluteError("decode: got gpu with device cpu, expected cpu; leave it out")
        if dtype != torch.float32 and not (dtype == torch.float16 and on_gpu):
            raise ResoluteError(f"dtype: got {dtype}, expected torch.float32, or torch.float16 on a GPU; choose one")
        for pass_ in plan.passes:
            if pass_.stored_res not in plan.shards.splits[pass_.split].stored:
                raise ResoluteError(
                    f"{plan.shards.root}: {pass_.stored_res} px is not open, got "
                    f"{sorted(plan.shards.splits[pass_.split].stored)}; name it in ShardSet.open"
                )
        plan.check_ranks(world_size)
        self._features = features([stage.augment for stage in plan.stages])
        self._skip = on_bad_sample == "skip"
        self.skipped: dict[tuple[str, int, int], str] = {}  # (split, stored res, sample): why it could not be read
        self._replacements: dict[tuple[str, int], dict[int, int]] = {}  # damaged sample: the one in its place
        self._depth, self._next = depth, start
        self._reading: deque[_PlannedBatch] = deque()
        self._running: deque[tuple[BatchSpec, NDArray[np.int64]]] = deque()  # with labels
        self._read_next = start
        decode = decode or ("gpu" if on_gpu else "cpu")
        # why: that a GPU's decoders do not look behind an image's end has not been tried
        self._reader = Reader(plan.shards, threads=readers, check_crc=check_crc, padded=decode == "cpu")
        self._prefetcher = Prefetcher(plan, rank=rank, world_size=world_size)
        sizes = [pass_.max_batch(rank=rank, world_size=world_size) for pass_ in plan.passes]
        try:
            self._graph = Graph(
                batch_size=max(sizes, default=1), threads=threads, device_id=self.device.index if on_gpu else None,
                decode=decode, depth=depth, mean=mean, std=std,
                half=dtype == torch.float16, features=self._features,
                largest_res=max((pass_.res for pass_ in plan.passes), default=1),
                largest_bytes=max((12 * s.res**2 * n for s, n in zip(plan.passes, sizes, strict=True)), default=0),
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
        self._move(position)
        self._read_ahead()

    def _move(self, position: int) -> None:
        self._graph.drain()
        self._running.clear()
        self._reading.clear()
        self._next = self._read_next = position

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        if not hasattr(self, "_graph"):
            raise ResoluteError("Loader: next() after close(), expected an open loader; open another")
        if self._next >= self.plan.total_batches:
            raise StopIteration
        if self._first_ahead() != self._next:  # the last call was interrupted, and its batch never returned
            self._move(self._next)
        self._run_ahead(wait=True)
        stream = cuda.current_stream(self.device) if self.device.type == "cuda" else None
        spec, labels = self._running.popleft()
        images = self._graph.take(spec, stream)  # the wait for data is here
        self._run_ahead(wait=False)
        batch = Batch(
            images=images.permute(0, 3, 1, 2),
            labels=self._to_device(labels),
            partner_labels=self._to_device(labels[spec.partners]),
            lam=self._to_device(spec.lam),
            spec=spec,
        )
        self._next += 1  # why last: the state never counts a batch that was not returned
        return batch

    def _first_ahead(self) -> int:
        """The index of the first batch that is worked on, read, or to be read."""
        if self._running:
            return self._running[0][0].index
        return self._reading[0].index if self._reading else self._read_next

    def _to_device(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def _read_ahead(self) -> None:
        while len(self._reading) < self._depth + 1 and self._read_next < self.plan.total_batches:
            batch = _PlannedBatch(index=self._read_next)
            self._submit(batch)
            self._reading.append(batch)
            self._prefetcher.advance(self._read_next)
            self._read_next += 1

    def _submit(self, batch: _PlannedBatch) -> None:
        """Plan a batch with the replacements known now, and start to read just its samples."""
        try:
            pass_ = self.plan.pass_at(batch.index)
            replacements = self._replacements.get((pass_.split, pass_.stored_res))
            spec = self.plan.batch(batch.index, rank=self.rank, world_size=self.world_size, replacements=replacements)
            labels = self.plan.shards.splits[spec.split].samples[spec.ids]["label"].astype(np.int64)
            batch.spec, batch.labels = spec, labels
            batch.pending = self._reader.submit(spec.split, spec.stored_res, spec.ids)
        except Exception as error:  # a damaged index, for one; raised when the batch is due
            batch.error = error

    def _run_ahead(self, *, wait: bool) -> None:
        """Keep `depth` batches in DALI.

        `wait` for a read, or raise what is wrong with it, only when there is no other batch to hand out.
        """
        self._read_ahead()
        while len(self._running) < self._depth and self._reading:
            batch, due = self._reading[0], wait and not self._running
            if batch.pending is not None and not batch.pending.done() and not due:
                return
            jpegs = self._usable(batch)
            if batch.error is not None:
                if not due:
                    return
                self._reading.clear()  # so that the next call reads it again, and what comes after it
                self._read_next = self._next
                raise batch.error
            assert batch.spec is not None
            assert batch.labels is not None
            assert jpegs is not None
            self._reading.popleft()
            self._read_ahead()
            self._graph.start(batch.spec, jpegs)
            self._running.append((batch.spec, batch.labels))

    def _usable(self, batch: _PlannedBatch) -> Pieces | None:
        """The encoded images of `batch.spec`; None if `batch.error` says why there are none.

        Where samples are damaged and may be skipped, the batch is planned and read again with others in their places:
        its plan and its bytes always come from the same set of replacements.
        """
        while batch.error is None:
            assert batch.spec is not None
            assert batch.pending is not None
            try:
                read = batch.pending.result()
                if not read.errors:
                    return read.pieces
                if not self._skip:
                    raise next(iter(read.errors.values()))
                for place, error in read.errors.items():
                    self._replace(batch.spec, int(batch.spec.ids[place]), error)
            except Exception as error:
                batch.error = error
            else:
                self._submit(batch)
        return None

    def _replace(self, spec: BatchSpec, sample: int, error: DamagedSample) -> None:
        """Put the next sound sample in the place of a damaged one, also where that one stood in for another."""
        replacements = self._replacements.setdefault((spec.split, spec.stored_res), {})
        if sample not in replacements:
            sound = self._next_sound(spec, sample, error)
            for damaged, replacement in replacements.items():
                if replacement == sample:
                    replacements[damaged] = sound
            replacements[sample] = sound
        if (key := (spec.split, spec.stored_res, sample)) not in self.skipped:
            self.skipped[key] = str(error)
            _LOG.warning("skipped, sample %d in its place: %s", replacements[sample], error)

    def _next_sound(self, spec: BatchSpec, sample: int, error: DamagedSample) -> int:
        """The first sample after `sample` that can be read. Raises `StorageError` if the storage does not deliver."""
        total = len(self.plan.shards.splits[spec.split])
        for distance in range(1, min(total, _MOST_BAD)):
            neighbour = (sample + distance) % total
            if not self._reader.submit(spec.split, spec.stored_res, np.array([neighbour])).result().errors:
                return neighbour
        raise ResoluteError(f"{error} (nor can the {min(total, _MOST_BAD) - 1} samples after it be read)")

    def _prime(self) -> None:
        """Run the plan's largest batch that can be read through the graph, unseen: nothing has to grow later.

        Raises what is wrong with the largest if none can be read, and `StorageError` at once.
        """
        refused: ResoluteError | None = None
        for pass_ in sorted(
            self.plan.passes, key=lambda s: -(s.res**2) * s.max_batch(rank=self.rank, world_size=self.world_size)
        ):
            try:
                self._graph.prime(*self._readable(pass_))
                return
            except StorageError:
                raise
            except ResoluteError as error:  # why: damage is raised when its batch is due
                refused = refused or error
        if refused is not None:
            raise refused

    def _readable(self, pass_: Pass) -> tuple[BatchSpec, Pieces]:
        """The first batch of a segment, with a sample that can be read in the place of each that cannot."""
        spec = self.plan.batch(pass_.first, rank=self.rank, world_size=self.world_size)
        read = self._reader.submit(spec.split, spec.stored_res, spec.ids).result()
        if not read.errors:
            return spec, read.pieces
        ids, pieces = spec.ids.tolist(), list(read.pieces)
        sound = [place for place in range(len(spec)) if place not in read.errors]
        if sound:
            sample, piece = ids[sound[0]], pieces[sound[0]]
        else:
            sample = self._next_sound(spec, ids[0], read.errors[0])
            piece = self._reader.submit(spec.split, spec.stored_res, np.array([sample])).result().pieces[0]
        replacements = {ids[place]: sample for place in read.errors}
        spec = self.plan.batch(pass_.first, rank=self.rank, world_size=self.world_size, replacements=replacements)
        return spec, [piece if place in read.errors else pieces[place] for place in range(len(spec))]

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


def _check_range(name: str, value: int, least: int, most: int | None = None) -> None:
    if value < least or (most is not None and value > most):
        expected = f"at least {least}" if most is None else f"{least} to {most}"
        raise ResoluteError(f"{name}: out of range, got {value}, expected {expected}; choose another")
