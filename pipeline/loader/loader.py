"""`Loader`: iterates over the batches of a plan, for a training loop.

    shards = ShardSet.open("shards")
    plan = Plan(shards, recipe.stages)
    with Loader(plan, device="cpu") as loader:
        for batch in loader:                      # training and validation batches, as planned
            ...                                   # batch.images, batch.labels, batch.spec.split

One object serves the complete run: its threads and its DALI graph are started once. Its state is the index of the next
batch. If a batch fails, the `next()` that would return it raises; all batches before it are delivered.
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
from pipeline.graph.kernels.pread import EncodedImages
from pipeline.plan.plan import BatchSpec, Pass, Plan
from pipeline.plan.sampling import features

from .prefetch import Prefetcher
from .reader import PendingBatch, Reader

__all__ = ["Batch", "Loader"]

_LOG = logging.getLogger("resolute")
_MAX_NEIGHBOURS = 1000  # samples tried as the replacement of a damaged one


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A batch on its device; N is the local batch size. The tensors stay valid as long as they are referenced."""

    images: torch.Tensor  # (N, 3, res, res) float32 or float16, normalised, channels_last memory
    labels: torch.Tensor  # (N,) int64
    partner_labels: torch.Tensor  # (N,) int64: label of the image mixed in; equal to `labels` if there is none
    lam: torch.Tensor  # (N,) float32: weight of `labels`; that of `partner_labels` is 1 - lam
    spec: BatchSpec


@dataclass(kw_only=True)
class _PlannedBatch:
    """A batch being read: its spec, labels and pending reads; or the `error` that prevents them."""

    index: int
    spec: BatchSpec | None = None
    labels: NDArray[np.int64] | None = None
    pending: PendingBatch | None = None
    error: Exception | None = None


class Loader(Iterator[Batch]):
    """Iterates over the batches of a plan, from any index on. Use as a context manager."""

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
        depth: int = 3,
        check_crc: bool = True,
        on_bad_sample: Literal["error", "skip"] = "error",
        rank: int = 0,
        world_size: int = 1,
        start: int = 0,
    ) -> None:
        """Start the threads, build the graph, and run the plan's largest batch through it.

        device         of the batches; "cuda:N" requires that GPU, there is no silent fallback
        decode         on a CUDA device: decode on the GPU ("gpu", the default) or on the CPU
        dtype          of the images: torch.float32, or, on a GPU, torch.float16
        mean, std      of values in 0..1
        threads        CPU threads of DALI (one more on a CPU)
        depth          batches that DALI processes ahead of the consumer; depth + 1 more are being read
        check_crc      verify the CRC-32 of every image
        on_bad_sample  "error": a damaged sample raises `DamagedSample`; `load_state_dict` can move past its batch.
                       "skip": the next intact sample of the split replaces it, the same one in every run and on every
                       rank; see `skipped`. In both cases a storage failure raises `StorageError`, and the next
                       `next()`, or a new loader at the same batch, tries again
        start          index of the first batch (see `state_dict`)

        Raises `ResoluteError` if the device is not available, an option is out of range or a resolution is not open;
        `StorageError` if the storage fails.
        """
        _check_range("threads", threads, 1)
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
        self.skipped: dict[tuple[str, int, int], str] = {}  # (split, stored res, sample): reason
        self._replacements: dict[tuple[str, int], dict[int, int]] = {}  # damaged sample: its replacement
        self._depth, self._next = depth, start
        self._reading: deque[_PlannedBatch] = deque()
        self._running: deque[tuple[BatchSpec, NDArray[np.int64]]] = deque()  # with labels
        self._read_next = start
        decode = decode or ("gpu" if on_gpu else "cpu")
        # why only on a CPU: it has not been verified that GPU decoders ignore bytes after the end of an image
        self._reader = Reader(plan.shards, check_crc=check_crc, padded=decode == "cpu")
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
        """Number of remaining batches."""
        return self.plan.total_batches - self._next

    def state_dict(self) -> dict[str, Any]:
        """The index of the batch that `next()` returns next, and the identity of its plan."""
        return {"next_batch": self._next, "fingerprint": self.plan.fingerprint, "plan": self.plan.identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the batch of `state`; batches in flight are discarded, graph and threads are kept.

        A bare {"next_batch": index} is allowed. Raises `ResoluteError` if the state belongs to another plan (naming
        the differences) or the index is out of range.
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
        if self._first_ahead() != self._next:  # the previous call was interrupted before it returned its batch
            self._move(self._next)
        self._fill_graph(wait=True)
        stream = cuda.current_stream(self.device) if self.device.type == "cuda" else None
        spec, labels = self._running.popleft()
        images = self._graph.take(spec, stream)  # blocks until the batch is ready
        self._fill_graph(wait=False)
        batch = Batch(
            images=images.permute(0, 3, 1, 2),
            labels=self._to_device(labels),
            partner_labels=self._to_device(labels[spec.partners]),
            lam=self._to_device(spec.lam),
            spec=spec,
        )
        self._next += 1  # why last: the state must not count a batch that was not returned
        return batch

    def _first_ahead(self) -> int:
        """Index of the oldest batch that is being processed or read, else of the next to read."""
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
        """Plan a batch with the replacements known so far, and submit its reads."""
        try:
            pass_ = self.plan.pass_at(batch.index)
            replacements = self._replacements.get((pass_.split, pass_.stored_res))
            spec = self.plan.batch(batch.index, rank=self.rank, world_size=self.world_size, replacements=replacements)
            labels = self.plan.shards.splits[spec.split].samples[spec.ids]["label"].astype(np.int64)
            batch.spec, batch.labels = spec, labels
            batch.pending = self._reader.submit(spec.split, spec.stored_res, spec.ids)
        except Exception as error:  # e.g. a damaged index; raised when the batch is due
            batch.error = error

    def _fill_graph(self, *, wait: bool) -> None:
        """Keep `depth` batches in DALI.

        Blocks for a read, or raises its error, only if `wait` is set and no other batch can be returned.
        """
        self._read_ahead()
        while len(self._running) < self._depth and self._reading:
            batch, due = self._reading[0], wait and not self._running
            if batch.pending is not None and not batch.pending.done() and not due:
                return
            jpegs = self._read_result(batch)
            if batch.error is not None:
                if not due:
                    return
                self._reading.clear()  # so that the next call reads this batch and those after it again
                self._read_next = self._next
                raise batch.error
            assert batch.spec is not None
            assert batch.labels is not None
            assert jpegs is not None
            self._reading.popleft()
            self._read_ahead()
            self._graph.start(batch.spec, jpegs)
            self._running.append((batch.spec, batch.labels))

    def _read_result(self, batch: _PlannedBatch) -> EncodedImages | None:
        """Wait for the encoded images of `batch.spec`; None if `batch.error` is set.

        If damaged samples may be skipped, the batch is planned and read again with replacements, so that its spec and
        its bytes always use the same replacements.
        """
        while batch.error is None:
            assert batch.spec is not None
            assert batch.pending is not None
            try:
                read = batch.pending.result()
                if not read.errors:
                    return read.images
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
        """Replace a damaged sample by the next intact one, also where it was itself a replacement."""
        replacements = self._replacements.setdefault((spec.split, spec.stored_res), {})
        if sample not in replacements:
            intact = self._next_intact(spec, sample, error)
            for damaged, replacement in replacements.items():
                if replacement == sample:
                    replacements[damaged] = intact
            replacements[sample] = intact
        if (key := (spec.split, spec.stored_res, sample)) not in self.skipped:
            self.skipped[key] = str(error)
            _LOG.warning("skipped, sample %d in its place: %s", replacements[sample], error)

    def _next_intact(self, spec: BatchSpec, sample: int, error: DamagedSample) -> int:
        """The first sample after `sample` that is intact. Raises `StorageError` if the storage fails."""
        total = len(self.plan.shards.splits[spec.split])
        for distance in range(1, min(total, _MAX_NEIGHBOURS)):
            neighbour = (sample + distance) % total
            if not self._reader.submit(spec.split, spec.stored_res, np.array([neighbour])).result().errors:
                return neighbour
        raise ResoluteError(f"{error} (nor can the {min(total, _MAX_NEIGHBOURS) - 1} samples after it be read)")

    def _prime(self) -> None:
        """Run the plan's largest readable batch through the graph, so that no buffer has to grow later.

        Raises `StorageError` immediately, and the error of the largest batch if none is readable.
        """
        first_error: ResoluteError | None = None
        for pass_ in sorted(
            self.plan.passes, key=lambda s: -(s.res**2) * s.max_batch(rank=self.rank, world_size=self.world_size)
        ):
            try:
                self._graph.prime(*self._readable_batch(pass_))
                return
            except StorageError:
                raise
            except ResoluteError as error:  # why not raised: damage is reported when its batch is due
                first_error = first_error or error
        if first_error is not None:
            raise first_error

    def _readable_batch(self, pass_: Pass) -> tuple[BatchSpec, EncodedImages]:
        """The first batch of a pass, with every damaged sample replaced by an intact one."""
        spec = self.plan.batch(pass_.first, rank=self.rank, world_size=self.world_size)
        read = self._reader.submit(spec.split, spec.stored_res, spec.ids).result()
        if not read.errors:
            return spec, read.images
        ids, images = spec.ids.tolist(), list(read.images)
        intact = [place for place in range(len(spec)) if place not in read.errors]
        if intact:
            sample, piece = ids[intact[0]], images[intact[0]]
        else:
            sample = self._next_intact(spec, ids[0], read.errors[0])
            piece = self._reader.submit(spec.split, spec.stored_res, np.array([sample])).result().images[0]
        replacements = {ids[place]: sample for place in read.errors}
        spec = self.plan.batch(pass_.first, rank=self.rank, world_size=self.world_size, replacements=replacements)
        return spec, [piece if place in read.errors else images[place] for place in range(len(spec))]

    def close(self) -> None:
        """End threads and close files. Batches already returned stay valid."""
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


def _check_range(name: str, value: int, minimum: int, maximum: int | None = None) -> None:
    if value < minimum or (maximum is not None and value > maximum):
        expected = f"at least {minimum}" if maximum is None else f"{minimum} to {maximum}"
        raise ResoluteError(f"{name}: out of range, got {value}, expected {expected}; choose another")
