"""`Loader`: iterates over the batches of a plan, for a training loop.

    shards = ShardSet.open("shards")
    plan = Plan(shards, recipe.stages)
    with Loader(plan, device="cpu") as loader:
        for epoch in loader.epochs():
            for batch in epoch.train:
                ...                               # batch.images, batch.targets
            for batch in epoch.val:
                ...

or `for batch in loader`: training and validation batches as planned, told apart by `batch.spec.split`.

One object serves the complete run: its threads and its DALI graph are started once. Its state is the index of the next
batch. If a batch fails, the `next()` that would return it raises; all batches before it are delivered. After any
exception in `next()`, Ctrl-C included, the next call continues with the same batch: a `for` loop started again skips
and repeats nothing.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import weakref
from collections import Counter, deque
from collections.abc import Container, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, NoReturn

import numpy as np
import simplejpeg
import torch
from numpy.typing import NDArray

from resolute import cuda
from resolute.errors import DamagedSample, ResoluteError, differences
from resolute.machine import cpus_per_process
from resolute.pipeline.dataset.target import IGNORED_TARGET
from resolute.pipeline.graph.batch_pipeline import BatchPipeline, Transform
from resolute.pipeline.graph.kernels.pread import TAG_BYTES
from resolute.pipeline.jit import numba_interrupts
from resolute.pipeline.plan.plan import BatchSpec, Plan
from resolute.pipeline.plan.stage import Count, Index, Positive, Probability
from resolute.settings import checked

from .batch import Batch
from .epochs import Epoch, epochs
from .reader import CutShort, EncodedBatch, PendingBatch, Reader
from .tar_downloader import TarDownloader

__all__ = ["Loader", "mix_targets", "pack_labels", "unpack_labels"]

_LOG = logging.getLogger("resolute")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)
_NO_LABELS = torch.empty(0, dtype=torch.int64)
_MAX_COMMENT = 65_533  # bytes in a comment of a JPEG file
_NEIGHBOURS, _MAX_CANDIDATES = 3, 1000  # samples tried as the replacement of a damaged one: the next; in all
# why kept: DALI's destructor waits for threads, which a forked process does not have
_INHERITED: list[tuple[Reader, BatchPipeline | None]] = []
_GOLDEN = (math.sqrt(5) - 1) / 2
_LOGGED = 10  # damaged samples that are logged of each tar


@dataclass(kw_only=True)
class _PlannedBatch:
    """A batch being read: its spec, targets and pending reads; or the `error` that prevents them."""

    index: int
    spec: BatchSpec | None = None
    keys: NDArray[np.int64] | None = None
    targets: NDArray[Any] | None = None
    pending: PendingBatch | None = None
    error: ResoluteError | None = None


class Loader(Iterator[Batch]):
    """Iterates over the batches of a plan, from any index on. Use as a context manager."""

    @checked("Loader")
    def __init__(
        self,
        plan: Plan,
        *,
        device: str | torch.device = "cpu",
        decode: Literal["cpu", "gpu"] | None = None,
        hw_decoder_load: Probability | None = None,
        dtype: torch.dtype = torch.float32,
        mean: tuple[float, float, float] = (0.485, 0.456, 0.406),
        std: tuple[Positive, Positive, Positive] = (0.229, 0.224, 0.225),
        transform: Transform | None = None,
        num_threads: Count | None = None,
        batches_ahead: Count = 3,
        check_crc: bool = True,
        on_bad_sample: Literal["error", "skip"] = "error",
        rank: Index | None = None,
        world_size: Count | None = None,
        start: Index = 0,
    ) -> None:
        """Start the threads, build the graph, and run the plan's largest batch through it.

        device         of the batches; "cuda:N" requires that GPU, there is no silent fallback
        decode         where JPEGs are decoded: "cpu" (None: the same) or, on a CUDA device, "gpu". The latter decodes
                       whole images; a fault of the GPU's decoder library can end the process
        hw_decoder_load  with decode "gpu", fraction of the JPEGs that the GPU's JPEG engine decodes, if it has one
                       (A100, H100, ...); its cores decode the rest. None: all. On an H200 the engine alone decoded
                       twice as many images/s as with DALI's default of 0.65 (benchmarks/results/LOG.md)
        dtype          of the images: torch.float32, float16 or bfloat16; or uint8, which are not normalised
        mean, std      of values in 0..1
        transform      called with each batch's images, (N, 3, res, res) uint8 on their device in channels_last memory,
                       and its `BatchSpec`, in training and validation; returns images of the same shape and dtype,
                       which are then normalised. It comes after augmentation and mixing, runs in the consumer's thread,
                       and must not keep the images. On a CPU, normalisation then takes place in that thread too
        num_threads    CPU threads of DALI (one more on a CPU); None: the CPUs that this process may use, divided by the
                       processes that torchrun, Slurm or MPI has started on this machine
        batches_ahead  batches that DALI processes ahead of the consumer; one more than that are being read
        check_crc      verify the CRC-32 of every image
        on_bad_sample  "error": a damaged sample raises `DamagedSample`; `load_state_dict` can move past its batch.
                       "skip": an intact sample of the split replaces it, one of the next or else one of another tar;
                       it is the same in every run and on every rank, see `skipped`. In both cases a storage failure
                       raises `StorageError`, and the next `next()`, or a new loader at the same batch, tries again
        rank, world_size  this process's number, from 0, and the number of processes that share each batch; None: those
                       of torch.distributed's process group, 0 and 1 without one. `world_size` 1: every batch as a whole
        start          index of the first batch (see `state_dict`)

        Raises `ResoluteError` if the device is not available, or an option is out of range;
        `StorageError` if the storage fails.
        """
        if not isinstance(plan, Plan):
            raise ResoluteError(f"Loader.plan: got {type(plan).__name__}, expected a Plan; build one of the shard set")
        rank, world_size = _ranks(rank, world_size)
        _check_range("Loader.rank", rank, 0, world_size - 1)
        _check_range("Loader.start", start, 0, plan.total_batches)
        self.plan, self.rank, self.world_size = plan, rank, world_size
        self._process = os.getpid()
        self.device = cuda.resolve_device(device)
        on_gpu = self.device.type == "cuda"
        if decode == "gpu" and not on_gpu:
            raise ResoluteError("decode: got gpu with device cpu, expected cpu; leave it out")
        decode = decode or "cpu"
        if hw_decoder_load is not None and decode != "gpu":
            raise ResoluteError(f"hw_decoder_load: without effect with decode {decode}; leave it out")
        if dtype not in _DTYPES:
            raise ResoluteError(
                f"dtype: got {dtype}, expected {', '.join(map(str, _DTYPES[:-1]))} or {_DTYPES[-1]}; choose one"
            )
        if transform is not None and not callable(transform):
            raise ResoluteError(
                f"transform: got {transform!r}, expected a function of a batch's images and its BatchSpec; correct it"
            )
        plan.check_ranks(world_size)
        self._skip = on_bad_sample == "skip"
        self.skipped: dict[tuple[str, int, int], str] = {}  # (split, stored res, sample): reason
        self._replacements: dict[tuple[str, int], dict[int, int]] = {}  # damaged sample: its replacement
        self._logged = Counter[tuple[str, int, int]]()  # skipped samples of each (split, stored res, shard)
        self._batches_ahead, self._next = batches_ahead, start
        self._began = start  # the batch at which it was opened, or of the last state that was loaded
        # False after an exception in `next()`: what is in flight is discarded, see `_resynchronise`
        self._in_step = True
        self._reading: deque[_PlannedBatch] = deque()
        # with keys and targets
        self._running: deque[tuple[BatchSpec, NDArray[np.int64], NDArray[Any]]] = deque()
        self._read_next = start
        self._reader = Reader(plan.shards, check_crc=check_crc, asks_once=self._skip)
        self._tar_downloader = TarDownloader(plan, self._reader.files, rank=rank, world_size=world_size)
        shapes = {
            (res, size)
            for phase in plan.phases
            for (res, _), size in phase.local_shapes(rank=rank, world_size=world_size).items()
        }
        try:
            self._graph = BatchPipeline(
                batch_size=max((size for _, size in shapes), default=1),
                num_threads=num_threads or cpus_per_process(),
                device_id=self.device.index if on_gpu else None,
                decode=decode,
                batches_ahead=batches_ahead,
                mean=mean,
                std=std,
                dtype=dtype,
                ops=plan.augment_ops,
                transform=transform,
                largest_pixels=max((res**2 * size for res, size in shapes), default=0),
                hw_decoder_load=1.0 if hw_decoder_load is None else hw_decoder_load,
            )
            with numba_interrupts():
                self._prime()
                self._read_ahead()
        except BaseException:
            self.close()
            raise
        # Called if the loader is dropped without `close`, as in a notebook.
        self._finalizer = weakref.finalize(self, _release, self._process, self._reader, self._graph)
        self._finalizer.atexit = False

    def __repr__(self) -> str:
        state = f"batch {self._next} of {self.plan.total_batches}" if hasattr(self, "_graph") else "closed"
        return f"Loader: {state}, {self.device}, rank {self.rank} of {self.world_size}"

    def __len__(self) -> int:
        """Number of remaining batches."""
        return self.plan.total_batches - self._next

    @property
    def position(self) -> int:
        """The index of the batch that `next()` returns next."""
        return self._next

    @property
    def transform_s(self) -> float:
        """Seconds that `next()` has spent in `transform` and in the normalisation after it.

        On a GPU this is launch time only, since kernels run asynchronously.
        """
        self._refuse_closed()
        return self._graph.transform_s

    def _has_passed(self, end: int) -> bool:
        """Whether batches before `end` were returned or left out since a state was loaded, and none of them remain."""
        return self._began < end <= self._next

    def epochs(self) -> Iterator[Epoch]:
        """The epochs that have batches left, each with its training batches, `train`, and its validation, `val`.

        Where a loop leaves batches out, by `break` for example, they are skipped. After `load_state_dict` within an
        epoch, the first one has what is left of it.
        """
        self._refuse_second_loop()
        return epochs(self)

    def state_dict(self) -> dict[str, Any]:
        """The index of the batch that `next()` returns next, and the configuration of its plan."""
        return {"next_batch": self._next, "fingerprint": self.plan.fingerprint, "plan": self.plan.config}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the batch of `state`; batches in flight are discarded, graph and threads are kept.

        A bare {"next_batch": index} is allowed. Raises `ResoluteError` if the state belongs to another plan (naming
        the differences), the index is out of range, or the loader is closed.
        """
        if state.get("fingerprint", self.plan.fingerprint) != self.plan.fingerprint:
            changes = "; ".join(differences(state.get("plan"), self.plan.config))
            raise ResoluteError(f"Loader: the state of another plan: {changes}; build the plan that it was saved with")
        position = state.get("next_batch")
        if not isinstance(position, (int, np.integer)) or not 0 <= position <= self.plan.total_batches:
            raise ResoluteError(
                f"Loader: next_batch is out of range, got {position!r}, expected 0 to {self.plan.total_batches}; "
                "load a state of this plan"
            )
        self._began = int(position)
        self._move_to(int(position))

    def _move_to(self, position: int) -> None:
        """Continue at batch `position`; for `_has_passed`, the batches before it are left out."""
        self._refuse_closed()
        self._next, self._in_step = position, False
        self._resynchronise()
        self._read_ahead()
        self._in_step = True

    def _resynchronise(self) -> None:
        """Discard everything in flight, so that the batch `_next` is the next to be read."""
        self._running.clear()
        self._reading.clear()
        self._read_next = self._next
        if self._graph.in_step:
            self._graph.drain()
        else:
            self._graph.build()
            self._prime()

    def __iter__(self) -> Loader:
        self._refuse_second_loop()
        return self

    def _refuse_second_loop(self) -> None:
        self._refuse_closed()
        if self._has_passed(self.plan.total_batches):
            raise ResoluteError(
                f"Loader: a second loop, but all {self.plan.total_batches} batches have been returned; build a plan of "
                'more epochs, or go back with load_state_dict({"next_batch": 0})'
            )

    def _refuse_closed(self) -> None:
        if os.getpid() != self._process:
            raise ResoluteError(
                f"Loader: used in process {os.getpid()}, which was forked from process {self._process}, where it was "
                "opened, expected the same; loop over it directly, without a DataLoader's workers, or open it in them"
            )
        if not hasattr(self, "_graph"):
            raise ResoluteError("Loader: used after close(), expected an open loader; open another")

    def __next__(self) -> Batch:
        self._refuse_closed()
        if self._next >= self.plan.total_batches:
            raise StopIteration
        try:
            with numba_interrupts():
                if not self._in_step:
                    self._resynchronise()
                self._in_step = False
                batch = self._deliver()
        except StopIteration as error:  # it would end the caller's loop as if all batches had been returned
            raise RuntimeError(f"batch {self._next}: it was not delivered, and {len(self)} batches remain") from error
        # why nothing is called from here on: Python handles Ctrl-C after calls, and would lose a batch that is counted
        self._next += 1
        self._in_step = True
        return batch

    def _deliver(self) -> Batch:
        """Wait for the oldest batch in flight, and put others in its place."""
        self._fill_graph(wait=True)
        stream = cuda.current_stream(self.device) if self.device.type == "cuda" else None
        spec, keys, targets = self._running.popleft()
        images = self._graph.take(spec, stream)  # blocks until the batch is ready
        self._fill_graph(wait=False)
        own, partners, lam = self._targets_on_device(spec, targets)
        return Batch(
            images=images.permute(0, 3, 1, 2), targets=own, partner_labels=partners, lam=lam, keys=keys, spec=spec
        )

    def _targets_on_device(
        self, spec: BatchSpec, targets: NDArray[Any]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`Batch.targets`, `partner_labels` and `lam`; on a GPU in one asynchronous copy from pinned memory."""
        on_cpu = self.device.type == "cpu"
        if targets.ndim > 1:
            mixed = mix_targets(targets, spec, ignored=self.plan.shards.target.ignored)
            if on_cpu:
                return torch.from_numpy(mixed), _NO_LABELS, torch.from_numpy(spec.lam)
            n, columns = mixed.shape
            packed = torch.empty(n, columns + 1, pin_memory=True)
            packed.numpy()[:, :columns], packed.numpy()[:, columns] = mixed, spec.lam
            packed = packed.to(self.device, non_blocking=True)
            return packed[:, :columns], _NO_LABELS, packed[:, columns]
        partners = targets[spec.partners]
        if on_cpu:
            return torch.from_numpy(targets), torch.from_numpy(partners), torch.from_numpy(spec.lam)
        return unpack_labels(pack_labels(targets, partners, spec.lam, pin=True).to(self.device, non_blocking=True))

    def _read_ahead(self) -> None:
        while len(self._reading) < self._batches_ahead + 1 and self._read_next < self.plan.total_batches:
            batch = _PlannedBatch(index=self._read_next)
            self._submit(batch)
            self._reading.append(batch)
            self._tar_downloader.advance(self._read_next)
            self._read_next += 1

    def _submit(self, batch: _PlannedBatch) -> None:
        """Plan a batch with the replacements known so far, and submit its reads."""
        try:
            replacements = None
            if self._replacements:
                split = self.plan.phase_at(batch.index).split
                replacements = self._replacements.get((split, self.plan.res_at(batch.index)[1]))
            spec = self.plan.batch(batch.index, rank=self.rank, world_size=self.world_size, replacements=replacements)
            samples = self.plan.shards.splits[spec.split].samples[spec.ids]
            batch.spec, batch.keys = spec, samples["key"].astype(np.int64)
            batch.targets = self.plan.shards.target.decode(samples)
            batch.pending = self._reader.submit(spec.split, spec.stored_res, spec.ids, tag=spec.index)
        except ResoluteError as error:  # e.g. a damaged index; raised when the batch is due
            batch.error = error

    def _fill_graph(self, *, wait: bool) -> None:
        """Keep `batches_ahead` batches in DALI.

        Blocks for a read, or raises its error, only if `wait` is set and no other batch can be returned.
        """
        self._read_ahead()
        while len(self._running) < self._batches_ahead and self._reading:
            batch, due = self._reading[0], wait and not self._running
            if batch.pending is not None and not batch.pending.done() and not due:
                return
            read = self._read_result(batch)
            if batch.error is not None:
                if not due:
                    return
                raise batch.error
            assert batch.spec is not None
            assert batch.keys is not None
            assert batch.targets is not None
            assert read is not None
            self._reading.popleft()
            self._read_ahead()
            self._graph.start(batch.spec, read.images, read.nbytes)
            self._running.append((batch.spec, batch.keys, batch.targets))

    def _read_result(self, batch: _PlannedBatch) -> EncodedBatch | None:
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
                    return read
                if not self._skip:
                    raise next(iter(read.errors.values()))
                for place, error in read.errors.items():
                    self._replace(batch.spec, int(batch.spec.ids[place]), error)
            except ResoluteError as error:
                batch.error = error
            else:
                self._submit(batch)
        return None

    def _replace(self, spec: BatchSpec, sample: int, error: DamagedSample) -> None:
        """Replace a damaged sample by the first intact candidate, also where it was itself a replacement."""
        replacements = self._replacements.setdefault((spec.split, spec.stored_res), {})
        if sample not in replacements:
            affected = [damaged for damaged, replacement in replacements.items() if replacement == sample]
            known = {*replacements, sample}
            # why together: if one raises, the batch is tried again from here
            replacements |= {each: self._first_intact(spec, each, known, error) for each in [sample, *affected]}
        if (key := (spec.split, spec.stored_res, sample)) not in self.skipped:
            self.skipped[key] = str(error)
            self._log_skipped(spec, sample, replacements[sample], error)

    def _log_skipped(self, spec: BatchSpec, sample: int, replacement: int, error: DamagedSample) -> None:
        """Log a damaged sample: a tar that is cut short once, of any other tar the first `_LOGGED` samples."""
        shard = int(self.plan.shards.splits[spec.split].stored[spec.stored_res][sample]["shard"])
        logged, most = self._logged[spec.split, spec.stored_res, shard], _LOGGED
        rest = ""
        if isinstance(error, CutShort):
            most, rest = 1, "; the tar is cut short, so its other missing samples are skipped without a report"
        elif logged + 1 == most:
            rest = "; further damaged samples of this tar are skipped without a report"
        if logged < most:
            _LOG.warning("skipped, sample %d in its place: %s%s", replacement, error, rest)
        self._logged[spec.split, spec.stored_res, shard] += 1

    def _first_intact(self, spec: BatchSpec, sample: int, damaged: Container[int], error: DamagedSample) -> int:
        """The first of `candidates` that is intact. Raises `StorageError` if the storage fails."""
        tried = 0
        for candidate in itertools.islice(
            candidates(sample, len(self.plan.shards.splits[spec.split])), _MAX_CANDIDATES
        ):
            tried += 1
            if candidate in damaged:
                continue
            if not self._reader.submit(spec.split, spec.stored_res, np.array([candidate])).result().errors:
                return candidate
        raise ResoluteError(f"{error} (nor can any of {tried} other samples of the split be read)")

    def _prime(self) -> None:
        """Run a batch as large as the plan's largest through the graph, so that no buffer has to grow later.

        Nothing is read for it: each image is the same grey one, which holds all crops of that batch.
        """
        pixels: dict[int, int] = {}
        for phase in self.plan.phases:
            for k in phase.distinct_batches:
                res, start, end = phase.batch_at(k)
                pixels[phase.first + k] = res**2 * (end - start)
        if not pixels:
            return
        spec = self.plan.batch(max(pixels, key=pixels.__getitem__), rank=self.rank, world_size=self.world_size)
        width, height = (spec.crops[:, :2] + spec.crops[:, 2:]).max(axis=0).tolist()
        stored = self.plan.shards.splits[spec.split].stored[spec.stored_res][spec.ids]
        jpeg = grey_jpeg(width, height, nbytes=int(stored["nbytes"].max()))
        images = np.empty((len(spec), len(jpeg) + TAG_BYTES), np.uint8)
        images[:, : len(jpeg)] = np.frombuffer(jpeg, np.uint8)
        images[:, len(jpeg) :] = np.array([spec.index], np.int32).view(np.uint8)
        self._graph.prime(spec, images, np.full(len(spec), len(jpeg)))

    def close(self) -> None:
        """End threads and close files. Batches already returned stay valid."""
        self._reading.clear()
        self._running.clear()
        _release(self._process, self._reader, self.__dict__.get("_graph"))
        self.__dict__.pop("_graph", None)  # why afterwards: Ctrl-C above leaves it to the next `close`
        if finalizer := self.__dict__.pop("_finalizer", None):
            finalizer.detach()

    def __reduce__(self) -> NoReturn:
        raise ResoluteError(
            "Loader: copied or sent to another process, expected to stay in the one that opened it; send its plan, and "
            "open a loader there"
        )

    def __enter__(self) -> Loader:
        self._refuse_closed()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def candidates(sample: int, total: int) -> Iterator[int]:
    """The other samples of a split of `total`, in the order in which they may replace a damaged `sample`.

    The next ones as stored; then some from everywhere, since a tar that is cut short lacks thousands in a row. Samples
    of one tar that are replaced by those have replacements of their own, which are in one or two other tars.
    """
    near = [(sample + distance) % total for distance in range(1, min(total, _NEIGHBOURS + 1))]
    yield from near
    step = max(1, round(total * _GOLDEN))  # why golden: its multiples are spread evenly over the split
    while math.gcd(step, total) > 1:  # else it would not come to every sample
        step += 1
    for number in range(1, total):
        candidate = (sample + number * step) % total
        if candidate not in near:
            yield candidate


def grey_jpeg(width: int, height: int, *, nbytes: int) -> bytes:
    """A grey image of `width` x `height` px as a JPEG of `nbytes` bytes, or a few more, most of which are comments."""
    jpeg = simplejpeg.encode_jpeg(np.full((height, width, 3), 128, np.uint8), quality=90)
    comments = list[bytes]()
    for start in range(0, nbytes - len(jpeg), _MAX_COMMENT):
        text = bytes(min(_MAX_COMMENT, nbytes - len(jpeg) - start))
        comments.append(b"\xff\xfe" + (len(text) + 2).to_bytes(2, "big") + text)
    return b"".join([jpeg[:2], *comments, jpeg[2:]])  # after the marker that begins the file


def _ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and number of ranks for the options of `Loader`. Raises `ResoluteError` if the data do not give them."""
    if rank is not None and world_size is not None:
        return rank, world_size
    if rank is None and world_size == 1:
        return 0, 1
    if rank is not None or world_size is not None:
        given, missing = ("rank", "world_size") if world_size is None else ("world_size", "rank")
        value = rank if world_size is None else world_size
        raise ResoluteError(f"Loader: got {given} {value} without {missing}, expected both or none; add {missing}")
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    if (started := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise ResoluteError(
            f"Loader: got WORLD_SIZE={started} (torchrun) without a process group, expected one: each process would "
            "read every batch as a whole; call torch.distributed.init_process_group before, or give rank and world_size"
        )
    return 0, 1


def _release(process: int, reader: Reader, graph: BatchPipeline | None) -> None:
    """End the threads of both, unless they are those of another process, `process`, from which this one was forked."""
    if os.getpid() != process:
        _INHERITED.append((reader, graph))
        return
    try:
        reader.close()
    finally:
        if graph is not None:
            graph.close()


def mix_targets(targets: NDArray[np.float32], spec: BatchSpec, *, ignored: bool = False) -> NDArray[np.float32]:
    """The mixed targets (N, C) float32 of a batch: lam times the own row plus 1 - lam times the partner's.

    `ignored`: labels may be `IGNORED_TARGET`, which a mixed one is if it is so in a row whose weight is not 0.
    """
    mixed = spec.lam < 1
    if not mixed.any():
        return targets
    lam = spec.lam[mixed, None]
    out = targets.copy()
    own, partners = targets[mixed], targets[spec.partners[mixed]]
    blend = lam * own + (1 - lam) * partners
    if ignored:  # the weight of a partner is above 0 in all these rows
        blend[((own == IGNORED_TARGET) & (lam > 0)) | (partners == IGNORED_TARGET)] = IGNORED_TARGET
    out[mixed] = blend
    return out


def pack_labels(
    labels: NDArray[np.int64], partners: NDArray[np.int64], lam: NDArray[np.float32], *, pin: bool
) -> torch.Tensor:
    """The three (N,) arrays as one (5 N,) int32 tensor, in pinned memory with `pin`."""
    n = len(labels)
    packed = torch.empty(5 * n, dtype=torch.int32, pin_memory=pin)
    words = packed.numpy()
    longs = words[: 4 * n].view(np.int64)
    longs[:n], longs[n:], words[4 * n :].view(np.float32)[:] = labels, partners, lam
    return packed


def unpack_labels(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of a `pack_labels` tensor: labels (N,) int64, partner labels (N,) int64, lam (N,) float32."""
    n = len(packed) // 5
    own, partners, lam = packed[: 2 * n], packed[2 * n : 4 * n], packed[4 * n :]
    return own.view(torch.int64), partners.view(torch.int64), lam.view(torch.float32)


def _check_range(name: str, value: float, minimum: int, maximum: int) -> None:
    if not minimum <= value <= maximum:
        raise ResoluteError(f"{name}: got {value}, expected {minimum} to {maximum}; correct it")
