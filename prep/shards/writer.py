"""A shard's specification, the writer of its files, and the record that a finished shard leaves."""

from __future__ import annotations

import io
import json
import threading
import zipfile
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.shard_set import SAMPLE, SOURCE, STORED, shard_name
from pipeline.errors import ResoluteError
from prep.convert.batch import Batch, BatchResult, EncodeOptions
from prep.sources.image_ref import ByteRange
from prep.storage.hashed_file import AtomicFile, FileInfo
from prep.storage.output import Store

from .tar_format import dali_index, tar_end

__all__ = ["BATCH_SAMPLES", "ShardRecord", "ShardSpec", "ShardWriter", "parse_shard_record"]

BATCH_SAMPLES = 16
# why: records are read in threads, NumPy parses headers with `ast`, and that fails in several threads (CPython 106905)
_NPY_LOCK = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """A shard to be written: its samples in key order, at `resolutions` (px) with `short_sides` (px)."""

    split: str
    number: int
    first_key: int
    byte_ranges: tuple[ByteRange, ...]
    labels: NDArray[Any]  # (n,) u4
    folds: NDArray[Any] | None  # (n,) u1
    resolutions: tuple[int, ...]
    short_sides: tuple[int, ...]

    def batches(self) -> Iterator[Batch]:
        for first in range(0, len(self.byte_ranges), BATCH_SAMPLES):
            chosen = slice(first, first + BATCH_SAMPLES)
            yield Batch(
                first_key=self.first_key + first,
                byte_ranges=self.byte_ranges[chosen],
                labels=tuple(self.labels[chosen].tolist()),
                short_sides=self.short_sides,
            )


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """The record of a shard whose files are durable; arrays are in key order.

    `stored` maps resolution to STORED rows with `shard` 0, `files` the names of its tars and idx files to size and
    hash; `rejects` are (key, reason). A shard without samples has no files.
    """

    split: str
    number: int
    samples: NDArray[Any]  # (n,) SAMPLE
    sources: NDArray[Any]  # (n,) SOURCE
    stored: dict[int, NDArray[Any]]  # (n,) STORED each
    files: dict[str, FileInfo]
    rejects: tuple[tuple[int, str], ...]

    @property
    def name(self) -> str:
        return shard_name(self.split, self.number)

    def with_earlier(self, earlier: ShardRecord | None) -> ShardRecord:
        """Merged with an earlier record of the same shard at other resolutions; unchanged if there is none.

        Raises `ResoluteError` unless both hold the same samples.
        """
        if earlier is None:
            return self
        if not (np.array_equal(self.samples, earlier.samples) and np.array_equal(self.sources, earlier.sources)):
            raise ResoluteError(
                f"{self.name}: its images have changed since it was first made, got other contents under the "
                "same names and sizes, expected the same contents; start over with REBUILD=1 (--rebuild)"
            )
        return replace(self, stored={**earlier.stored, **self.stored}, files={**earlier.files, **self.files})

    def without(self, lost: Set[str]) -> ShardRecord | None:
        """The record without the resolutions that have a file in `lost`; None if none remains."""
        complete = {res for res in self.stored if not {f"{res}/{self.name}.tar", f"{res}/{self.name}.idx"} & lost}
        if not complete:
            return None
        return replace(
            self,
            stored={res: rows for res, rows in self.stored.items() if res in complete},
            files={name: info for name, info in self.files.items() if int(name.partition("/")[0]) in complete},
        )

    def to_bytes(self, plan: str = "") -> bytes:
        """Serialised for the journal, with the hash of its plan; `parse_shard_record` is the inverse."""
        header = {
            "plan": plan,
            "split": self.split,
            "number": self.number,
            "files": {name: [info.nbytes, info.sha256] for name, info in self.files.items()},
            "rejects": self.rejects,
        }
        buffer = io.BytesIO()
        arrays = {"samples": self.samples, "sources": self.sources}
        arrays |= {f"stored-{res}": rows for res, rows in self.stored.items()}
        np.savez(buffer, allow_pickle=False, told=np.frombuffer(json.dumps(header).encode(), np.uint8), **arrays)
        return buffer.getvalue()


def parse_shard_record(data: bytes, plan: str | None = None) -> ShardRecord:
    """The inverse of `ShardRecord.to_bytes`. Raises `ValueError` for other data or another plan than `plan`."""
    try:
        return _parse(data, plan)
    except (KeyError, EOFError, TypeError, OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"not a shard's record, got {error!r}, expected what prep wrote") from None


def _parse(data: bytes, plan: str | None) -> ShardRecord:
    with _NPY_LOCK, np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        header = json.loads(arrays["told"].tobytes())
        if plan is not None and header.get("plan") != plan:
            raise ValueError("the record of another plan")
        return ShardRecord(
            split=header["split"],
            number=header["number"],
            samples=arrays["samples"],
            sources=arrays["sources"],
            stored={int(name[7:]): arrays[name] for name in arrays.files if name.startswith("stored-")},
            files={name: FileInfo(nbytes=size, sha256=sha) for name, (size, sha) in header["files"].items()},
            rejects=tuple((key, reason) for key, reason in header["rejects"]),
        )


@dataclass(eq=False)
class ShardWriter:
    """Receives a shard's batch results in order; `finish` makes its files appear, `discard` removes all traces."""

    store: Store
    options: EncodeOptions
    spec: ShardSpec
    _tars: list[AtomicFile] = field(default_factory=list)
    _results: list[BatchResult] = field(default_factory=list)

    def add(self, result: BatchResult) -> None:
        if not self._tars:
            name = shard_name(self.spec.split, self.spec.number)
            self._tars = [self.store.create(f"{res}/{name}.tar") for res in self.spec.resolutions]
        for tar, piece, stored in zip(self._tars, result.tars, result.stored, strict=True):
            stored["offset"] += tar.nbytes
            tar.write(piece)
        self._results.append(replace(result, tars=()))  # why: the tars are written, and take most of the memory

    def discard(self) -> None:
        for tar in self._tars:
            tar.discard()

    def finish(self) -> ShardRecord:
        """Close the tars and write their idx files; all are durable when this returns."""
        spec, name = self.spec, shard_name(self.spec.split, self.spec.number)
        samples = _concatenate([result.samples for result in self._results], SAMPLE)
        if spec.folds is not None:
            samples["fold"] = spec.folds[samples["key"] - spec.first_key]
        stored, files = {}, {}
        for r, (res, tar) in enumerate(zip(spec.resolutions, self._tars, strict=True)):
            stored[res] = _concatenate([result.stored[r] for result in self._results], STORED)
            if not len(samples):  # why: all inputs were rejected, and readers fail on a tar without samples
                tar.discard()
                continue
            tar.write(tar_end(tar.nbytes))
            tar.close()
            index = dali_index(samples, stored[res], self.options.label_digits)
            files[f"{res}/{name}.tar"] = tar.info()
            files[f"{res}/{name}.idx"] = self.store.write(f"{res}/{name}.idx", index)
            self.store.sync(str(res))
        return ShardRecord(
            split=spec.split,
            number=spec.number,
            samples=samples,
            sources=_concatenate([result.sources for result in self._results], SOURCE),
            stored=stored,
            files=files,
            rejects=tuple(reject for result in self._results for reject in result.rejects),
        )


def _concatenate(parts: Sequence[NDArray[Any]], dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *parts])
