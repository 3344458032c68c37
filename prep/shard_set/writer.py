"""A shard's specification, and the writer of its tars, idx files and records.

The record is written last, when the tar and its idx file are durable: a shard with a record is complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.format import SOURCE, STORED, shard_name
from resolute.prep.convert.batch import Batch, BatchResult, EncodeOptions, PixelFacts
from resolute.prep.near_copies.descriptor import HASHES
from resolute.prep.sources.image_ref import ByteRange
from resolute.prep.storage.hashed_file import AtomicFile
from resolute.prep.storage.output import Store

from .record import ShardRecord
from .tar_format import dali_index, tar_end

__all__ = ["BATCH_SAMPLES", "ShardSpec", "ShardWriter"]

BATCH_SAMPLES = 16


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """A shard to be written: its samples in key order, at `resolutions` (px) with `short_sides` (px).

    `generation_hash` is that of its generation; `contents_sha256` that of its records at the resolutions at which it is
    finished, None if there are none. `skip` is as in `Batch`.
    """

    generation_hash: str
    contents_sha256: str | None
    split: str
    number: int
    first_key: int
    byte_ranges: Sequence[ByteRange]
    labels: NDArray[Any]  # (n,) u4 class numbers, or (n, …) as in `EncodeOptions.samples`
    resolutions: tuple[int, ...]
    short_sides: tuple[int, ...]
    skip: Mapping[int, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return shard_name(self.split, self.number)

    @property
    def batch_count(self) -> int:
        return -(-len(self.byte_ranges) // BATCH_SAMPLES)

    def batches(self) -> Iterator[Batch]:
        for first in range(0, len(self.byte_ranges), BATCH_SAMPLES):
            chosen = slice(first, first + BATCH_SAMPLES)
            yield Batch(
                first_key=self.first_key + first,
                byte_ranges=tuple(self.byte_ranges[chosen]),
                labels=tuple(self.labels[chosen].tolist()) if self.labels.ndim == 1 else self.labels[chosen],
                short_sides=self.short_sides,
                skip={i - first: reason for i, reason in self.skip.items() if 0 <= i - first < BATCH_SAMPLES},
            )


@dataclass(eq=False)
class ShardWriter:
    """Receives a shard's batch results in order; `finish` makes its files appear, `discard` removes all traces."""

    store: Store
    options: EncodeOptions
    spec: ShardSpec
    _tars: list[AtomicFile] = field(default_factory=list)
    _results: list[BatchResult] = field(default_factory=list)
    _images: int = 0

    def add(self, result: BatchResult) -> None:
        if not self._tars:
            self._tars = [self.store.create(f"{res}/{self.spec.name}.tar") for res in self.spec.resolutions]
        for tar, piece, stored in zip(self._tars, result.tars, result.stored, strict=True):
            stored["offset"] += tar.nbytes
            tar.write(piece)
        self._results.append(replace(result, tars=()))  # why: the tars are written, and take most of the memory
        self._images += len(result.samples) + len(result.rejects)

    @property
    def is_complete(self) -> bool:
        """Whether all results have been added."""
        return self._images == len(self.spec.byte_ranges)

    def discard(self) -> None:
        for tar in self._tars:
            tar.discard()

    def finish(self) -> list[bytes]:
        """Close the tars, then write their idx files, then their records; all are durable when this returns.

        Returns the records (`ShardRecord.to_bytes`). Raises `ResoluteError` if the images have changed since the shard
        was made at other resolutions.
        """
        spec, name = self.spec, self.spec.name
        samples = _concatenate([result.samples for result in self._results], self.options.samples)
        record = ShardRecord(
            generation_hash=spec.generation_hash,
            split=spec.split,
            number=spec.number,
            res=0,
            samples=samples,
            sources=_concatenate([result.sources for result in self._results], SOURCE),
            stored=np.empty(0, STORED),
            files={},
            rejects=tuple(reject for result in self._results for reject in result.rejects),
            facts=PixelFacts.total(result.facts for result in self._results),
        )
        if spec.contents_sha256 not in (None, record.contents_sha256):
            raise ResoluteError(
                f"{name}: its images have changed since it was first made, got other contents under the "
                "same names and sizes, expected the same contents; start over with REBUILD=1 (--rebuild)"
            )
        records = []
        for r, (res, tar) in enumerate(zip(spec.resolutions, self._tars, strict=True)):
            stored, files = _concatenate([result.stored[r] for result in self._results], STORED), {}
            if len(samples):
                tar.write(tar_end(tar.nbytes))
                tar.close()
                index = dali_index(samples, stored, self.options.label_digits)
                files = {f"{res}/{name}.tar": tar.info()}
                files[f"{res}/{name}.idx"] = self.store.write(f"{res}/{name}.idx", index)
            else:  # why: all inputs were rejected, and readers fail on a tar without samples
                tar.discard()
            record = replace(record, res=res, stored=stored, files=files, hashes=None)
            if spec.short_sides[r] == self.options.described_side:
                record = replace(record, hashes=_hashes(self._results))
            records.append(record.to_bytes())
            self.store.write(record.name, records[-1])
        return records


def _hashes(results: Sequence[BatchResult]) -> NDArray[np.uint64]:
    parts = [result.hashes for result in results if result.hashes is not None]
    return np.concatenate([np.empty((0, HASHES), np.uint64), *parts])


def _concatenate(parts: Sequence[NDArray[Any]], dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *parts])
