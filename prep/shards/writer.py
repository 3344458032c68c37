"""Shards: what is to be written, the writer of their files, and the record of a finished one."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.shard_set import SAMPLE, SOURCE, STORED, shard_name
from pipeline.errors import ResoluteError
from prep.convert.batch import Chunk, Job, Task
from prep.sources.image_ref import Location
from prep.storage.hashed_file import FileInfo, Part
from prep.storage.output import Store

from .tar_format import dali_index, end

__all__ = ["CHUNK_SAMPLES", "ShardSpec", "ShardWriter", "Written", "read_written"]

CHUNK_SAMPLES = 16


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """A shard to be written: its samples in key order, at `resolutions` (px) of `short_sides` (px)."""

    split: str
    number: int
    first_key: int
    places: tuple[Location, ...]
    labels: NDArray[Any]  # (n,) u4
    folds: NDArray[Any] | None  # (n,) u1
    resolutions: tuple[int, ...]
    short_sides: tuple[int, ...]

    def tasks(self) -> Iterator[Task]:
        for first in range(0, len(self.places), CHUNK_SAMPLES):
            chosen = slice(first, first + CHUNK_SAMPLES)
            yield Task(
                first_key=self.first_key + first,
                places=self.places[chosen],
                labels=tuple(self.labels[chosen].tolist()),
                short_sides=self.short_sides,
            )


@dataclass(frozen=True, kw_only=True)
class Written:
    """A shard that is safe in the store. Arrays in key order; `stored` by resolution, with `shard` 0.

    `files` are its tars and idx files by name; `rejects` (key, reason). Without samples there are no files.
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

    def with_earlier(self, earlier: Written | None) -> Written:
        """Together with an earlier writing of the same shard at other resolutions.

        Raises `ResoluteError` unless both hold the same samples.
        """
        if earlier is None:
            return self
        if not (np.array_equal(self.samples, earlier.samples) and np.array_equal(self.sources, earlier.sources)):
            raise ResoluteError(
                f"{self.name}: its images are not those it was made from first, got other contents under the "
                "same names and sizes, expected them unchanged; start over with REBUILD=1 (--rebuild)"
            )
        return replace(self, stored={**earlier.stored, **self.stored}, files={**earlier.files, **self.files})

    def without(self, lost: Set[str]) -> Written | None:
        """Only the resolutions none of whose files are `lost`; None if that is none of them."""
        whole = {res for res in self.stored if not {f"{res}/{self.name}.tar", f"{res}/{self.name}.idx"} & lost}
        if not whole:
            return None
        return replace(
            self,
            stored={res: rows for res, rows in self.stored.items() if res in whole},
            files={name: info for name, info in self.files.items() if int(name.partition("/")[0]) in whole},
        )

    def to_bytes(self, plan: str = "") -> bytes:
        """For the journal, with the hash of the plan it belongs to; `read_written` reads it."""
        told = {
            "plan": plan,
            "split": self.split,
            "number": self.number,
            "files": {name: [info.nbytes, info.sha256] for name, info in self.files.items()},
            "rejects": self.rejects,
        }
        buffer = io.BytesIO()
        arrays = {"samples": self.samples, "sources": self.sources}
        arrays |= {f"stored-{res}": rows for res, rows in self.stored.items()}
        np.savez(buffer, allow_pickle=False, told=np.frombuffer(json.dumps(told).encode(), np.uint8), **arrays)
        return buffer.getvalue()


def read_written(data: bytes, plan: str | None = None) -> Written:
    """Raises `ValueError` if `data` is not what `to_bytes` gave, or belongs to another plan than `plan`."""
    try:
        return _read_written(data, plan)
    except (KeyError, EOFError, TypeError, OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"not a shard's record, got {error!r}, expected what prep wrote") from None


def _read_written(data: bytes, plan: str | None) -> Written:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        told = json.loads(arrays["told"].tobytes())
        if plan is not None and told.get("plan") != plan:
            raise ValueError("the record of another plan")
        return Written(
            split=told["split"],
            number=told["number"],
            samples=arrays["samples"],
            sources=arrays["sources"],
            stored={int(name[7:]): arrays[name] for name in arrays.files if name.startswith("stored-")},
            files={name: FileInfo(nbytes=size, sha256=sha) for name, (size, sha) in told["files"].items()},
            rejects=tuple((key, reason) for key, reason in told["rejects"]),
        )


@dataclass(eq=False)
class ShardWriter:
    """Takes a shard's chunks in order; `finish` makes its files appear, `discard` leaves nothing."""

    store: Store
    job: Job
    spec: ShardSpec
    _tars: list[Part] = field(default_factory=list)
    _chunks: list[Chunk] = field(default_factory=list)

    def add(self, chunk: Chunk) -> None:
        if not self._tars:
            name = shard_name(self.spec.split, self.spec.number)
            self._tars = [self.store.create(f"{res}/{name}.tar") for res in self.spec.resolutions]
        for tar, piece, stored in zip(self._tars, chunk.tars, chunk.stored, strict=True):
            stored["offset"] += tar.nbytes
            tar.write(piece)
        self._chunks.append(replace(chunk, tars=()))  # why: written; they are what takes the memory

    def discard(self) -> None:
        for tar in self._tars:
            tar.discard()

    def finish(self) -> Written:
        """Close the tars and write their idx files; all that is durable then."""
        spec, name = self.spec, shard_name(self.spec.split, self.spec.number)
        samples = _joined([chunk.samples for chunk in self._chunks], SAMPLE)
        if spec.folds is not None:
            samples["fold"] = spec.folds[samples["key"] - spec.first_key]
        stored, files = {}, {}
        for r, (res, tar) in enumerate(zip(spec.resolutions, self._tars, strict=True)):
            stored[res] = _joined([chunk.stored[r] for chunk in self._chunks], STORED)
            if not len(samples):  # why: every input was rejected, and readers trip over a tar without samples
                tar.discard()
                continue
            tar.write(end(tar.nbytes))
            tar.close()
            index = dali_index(samples, stored[res], self.job.label_digits)
            files[f"{res}/{name}.tar"] = tar.info()
            files[f"{res}/{name}.idx"] = self.store.write(f"{res}/{name}.idx", index)
            self.store.sync(str(res))
        return Written(
            split=spec.split,
            number=spec.number,
            samples=samples,
            sources=_joined([chunk.sources for chunk in self._chunks], SOURCE),
            stored=stored,
            files=files,
            rejects=tuple(reject for chunk in self._chunks for reject in chunk.rejects),
        )


def _joined(parts: Sequence[NDArray[Any]], dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *parts])
