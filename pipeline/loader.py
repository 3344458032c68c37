"""How does a training loop get the run's batches?

    shards = ShardSet.open("shards")
    plan = Plan(shards, recipe.stages)
    with Loader(plan, device="cpu") as loader:
        for batch in loader:                      # training and validation batches, as planned
            ...                                   # batch.images, batch.labels, batch.spec.split

One object for the run: its threads and its DALI graph start once. Its state is one integer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch

from .errors import ResoluteError
from .graph import build_graph, feed
from .plan import BatchSpec, Plan
from .reader import PendingBatch, Reader

__all__ = ["Batch", "Loader"]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One batch on its device; N is this rank's number of samples.

    The tensors own their memory (DALI's buffer lives as long as the view of it does).
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
        readers: int = 4,
        depth: int = 3,
        check_crc: bool = True,
        rank: int = 0,
        world: int = 1,
        start: int = 0,
    ) -> None:
        """Start the threads and build the graph.

        device   where batches arrive; "cuda:N" needs a GPU. No silent fallback.
        decode   on a GPU device: decode there ("gpu", the default) or on the CPU.
        dtype    torch.float32, or torch.float16 (on a GPU, for AMP: half the bytes).
        threads  DALI's CPU threads; readers: threads that read ahead.
        depth    batches DALI works on ahead of the consumer; as many again are being read.
        start    index of the first batch wanted (see `state_dict`).

        Raises `ResoluteError` when the device is not there or a resolution is not in the open shards.
        """
        self.plan, self.rank, self.world = plan, rank, world
        self.device = torch.device(device)
        on_gpu = self.device.type == "cuda"
        if on_gpu and not torch.cuda.is_available():
            raise ResoluteError(f"device {device}: no CUDA device found, expected one; use device cpu")
        if decode == "gpu" and not on_gpu:
            raise ResoluteError("decode: got gpu with device cpu, expected cpu; leave it out")
        if dtype not in (torch.float32, torch.float16):
            raise ResoluteError(f"dtype: got {dtype}, expected torch.float32 or torch.float16; choose one")
        for segment in plan.segments:
            if segment.stored_res not in plan.shards.splits[segment.split].stored:
                raise ResoluteError(
                    f"{plan.shards.root}: {segment.stored_res} px is not open, got "
                    f"{sorted(plan.shards.splits[segment.split].stored)}; name it in ShardSet.open"
                )
        augments = [stage.augment for stage in plan.stages]
        self._mixing = any((a.mixup_alpha or a.cutmix_alpha) and a.mix_prob for a in augments)
        self._depth, self._next = depth, start
        self._reading: deque[tuple[BatchSpec, PendingBatch]] = deque()
        self._running: deque[BatchSpec] = deque()
        self._read_next = start
        self._reader = Reader(plan.shards, threads=readers, check_crc=check_crc)
        largest = max((segment.batch_size for segment in plan.segments), default=1)
        try:
            self._graph = build_graph(
                batch_size=largest, threads=threads, device_id=(self.device.index or 0) if on_gpu else None,
                decode=decode or ("gpu" if on_gpu else "cpu"), depth=depth, mean=mean, std=std,
                half=dtype == torch.float16, mixing=self._mixing,
            )  # fmt: skip
            self._prime()
            self._read_ahead()
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        """Batches still to come."""
        return self.plan.total_batches - self._next

    def state_dict(self) -> dict[str, int]:
        """The state: the index of the next batch that `next()` returns."""
        return {"next_batch": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at another batch. What runs ahead is dropped; the graph and the threads stay."""
        while self._running:
            self._graph.share_outputs()
            self._graph.release_outputs()
            self._running.popleft()
        self._reading.clear()
        self._next = self._read_next = state["next_batch"]
        self._read_ahead()

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        if not hasattr(self, "_graph"):
            raise ResoluteError("Loader: next() after close(), expected an open loader; open another")
        if self._next >= self.plan.total_batches:
            raise StopIteration
        self._run_ahead(wait=True)
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        # the wait for data is here; on a GPU the batch is only ordered after the consumer's stream, not awaited
        (images,) = self._graph.share_outputs(cuda_stream=stream)
        spec = self._running.popleft()
        view = torch.from_dlpack(images.as_tensor())
        self._graph.release_outputs()
        self._next += 1
        self._run_ahead(wait=False)
        expected = (len(spec), spec.res, spec.res, 3)
        if tuple(view.shape) != expected:  # DALI issue 5222: never train on another batch's size
            raise RuntimeError(f"batch {spec.index}: DALI returned {tuple(view.shape)}, expected {expected}")
        labels = self.plan.shards.splits[spec.split].samples["label"][spec.ids].astype(np.int64)
        return Batch(
            images=view.permute(0, 3, 1, 2),
            labels=self._to_device(labels),
            partner_labels=self._to_device(labels[spec.partners]),
            lam=self._to_device(spec.lam),
            spec=spec,
        )

    def _to_device(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def _read_ahead(self) -> None:
        while len(self._reading) < self._depth + 1 and self._read_next < self.plan.total_batches:
            spec = self.plan.batch(self._read_next, rank=self.rank, world=self.world)
            self._reading.append((spec, self._reader.submit(spec.split, spec.stored_res, spec.ids)))
            self._read_next += 1

    def _run_ahead(self, *, wait: bool) -> None:
        """Keep `depth` batches in DALI. `wait` for a read only when there is no other batch to hand out."""
        while len(self._running) < self._depth and self._reading:
            spec, pending = self._reading[0]
            if not pending.done() and (self._running or not wait):
                return
            jpegs = pending.result()
            self._reading.popleft()
            self._read_ahead()
            feed(self._graph, spec, jpegs, mixing=self._mixing)
            self._graph.schedule_run()
            self._running.append(spec)

    def _prime(self) -> None:
        """Run the plan's largest batch through the graph, unseen.

        DALI's first `schedule_run` starts `depth` runs at once; with these its buffers get their final sizes, so
        that nothing grows at a stage change.
        """
        largest = max(self.plan.segments, key=lambda s: s.res**2 * min(s.batch_size, s.samples))
        spec = self.plan.batch(largest.first, rank=self.rank, world=self.world)
        jpegs = self._reader.submit(spec.split, spec.stored_res, spec.ids).result()
        for _ in range(self._depth):
            feed(self._graph, spec, jpegs, mixing=self._mixing)
        self._graph.schedule_run()
        for _ in range(self._depth):
            self._graph.share_outputs()
            self._graph.release_outputs()

    def close(self) -> None:
        """End threads and files. Batches already handed out stay valid."""
        self._reader.close()
        self._running.clear()
        self._reading.clear()
        self.__dict__.pop("_graph", None)

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
