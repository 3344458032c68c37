"""The records of finished tars, which alone say what of a set is finished.

A tar that is durable leaves one small file, `records/SPLIT-NNNNNN-RES.rec`, which is never changed: everything else in
the set (index arrays, lists, manifest) is derived from these records. It is one line of JSON, the SAMPLE, SOURCE and
STORED rows of the tar's samples, and the SHA-256 of all that. A record names its plan by hash; records of other plans,
damaged records, and records whose files are gone do not count.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.shard_set import SAMPLE, SOURCE, STORED, shard_name
from pipeline.storage.read_at import read_at
from prep.execute.thread_map import thread_map
from prep.storage.hashed_file import FileInfo, write_errors
from prep.storage.output import Store
from prep.storage.retry import retry

__all__ = ["RECORDS", "THREADS", "Records", "ShardRecord", "lost_files", "plan_hash", "record_name",
           "record_names"]  # fmt: skip

RECORDS = "records"
THREADS = 16  # requests in flight, to hide the latency of a remote object store
_DIGEST_BYTES = 32


def record_name(shard: str, res: int | str) -> str:
    return f"{RECORDS}/{shard}-{res}.rec"


def record_names(store: Store) -> list[str]:
    """The names of all records in a store, valid or not."""
    return [f"{RECORDS}/{name}" for name in store.names(RECORDS) if name.endswith(".rec")]


def plan_hash(plan: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """A shard that is finished at one resolution (px); arrays are in key order.

    `plan` is the `plan_hash` of its set, `files` maps its tar and idx to size and hash, `rejects` are (key, reason). A
    shard without samples has no files.
    """

    plan: str
    split: str
    number: int
    res: int
    samples: NDArray[Any]  # (n,) SAMPLE
    sources: NDArray[Any]  # (n,) SOURCE
    stored: NDArray[Any]  # (n,) STORED with `shard` 0
    files: Mapping[str, FileInfo]
    rejects: tuple[tuple[int, str], ...]

    @property
    def name(self) -> str:
        return record_name(shard_name(self.split, self.number), self.res)

    @property
    def contents(self) -> str:
        """SHA-256 (hex) over samples and sources, which are the same at every resolution."""
        return hashlib.sha256(self.samples.tobytes() + self.sources.tobytes()).hexdigest()

    def to_bytes(self) -> bytes:
        header = {
            "plan": self.plan,
            "split": self.split,
            "number": self.number,
            "res": self.res,
            "samples": len(self.samples),
            "files": {name: [info.nbytes, info.sha256] for name, info in sorted(self.files.items())},
            "rejects": self.rejects,
        }
        rows = self.samples.tobytes() + self.sources.tobytes() + self.stored.tobytes()
        data = json.dumps(header).encode() + b"\n" + rows
        return data + hashlib.sha256(data).digest()

    @classmethod
    def parse(cls, data: bytes) -> ShardRecord:
        """The inverse of `to_bytes`; arrays are read-only. Raises `ValueError` for other or damaged data."""
        data, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
        if hashlib.sha256(data).digest() != digest:
            raise ValueError("not a record as prep wrote it")
        line, _, rows = data.partition(b"\n")
        header = json.loads(line)
        arrays, offset = [], 0
        for dtype in (SAMPLE, SOURCE, STORED):
            arrays.append(np.frombuffer(rows or b"\0", dtype, header["samples"], offset))
            offset += arrays[-1].nbytes
        samples, sources, stored = arrays
        return cls(
            plan=header["plan"], split=header["split"], number=header["number"], res=header["res"],
            samples=samples, sources=sources, stored=stored,
            files={name: FileInfo(nbytes=size, sha256=sha) for name, (size, sha) in header["files"].items()},
            rejects=tuple((key, reason) for key, reason in header["rejects"]),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """The part of a record that stays in memory: its place in the local copy, and everything but its rows."""

    offset: int
    nbytes: int
    samples: int
    contents: str
    files: Mapping[str, FileInfo]  # the tar, the idx and the record
    rejects: tuple[tuple[int, str], ...]


class Records:
    """The valid records of the plan with the hash `plan`; each is read once and then kept in the local file `copy`."""

    def __init__(self, store: Store, plan: str, copy: Path) -> None:
        self._store, self.plan = store, plan
        self._entries: dict[tuple[str, int], dict[int, _Entry]] = {}
        self._adding = threading.Lock()
        with write_errors(copy):
            self._copy = copy.open("w+b", buffering=0)

    def close(self) -> None:
        self._copy.close()

    def load(self, *, damaged: Collection[str] = ()) -> None:
        """Read all records in the store.

        Those that are in `damaged` or have files there do not count, nor those of a shard that disagree about its
        contents.
        """
        names = [name for name in record_names(self._store) if name not in damaged]
        for record, data in thread_map(self._read, names, THREADS):
            if record is not None:
                self._add(record, data)
        for shard, entries in list(self._entries.items()):
            if len({entry.contents for entry in entries.values()}) > 1:
                del self._entries[shard]
        self._drop(set(damaged))
        self.drop_lost()

    def _read(self, name: str) -> tuple[ShardRecord | None, bytes]:
        """A record and its bytes; None if it belongs to another plan or is damaged."""
        try:
            data = retry(f"{self._store.where}/{name}", partial(_read, self._store, name))
            record = ShardRecord.parse(data)
        except ValueError:
            return None, b""
        return (record if (record.plan, record.name) == (self.plan, name) else None), data

    def add(self, data: bytes) -> None:
        """Count the record with these bytes, which is in the store. Thread-safe."""
        self._add(ShardRecord.parse(data), data)

    def _add(self, record: ShardRecord, data: bytes) -> None:
        info = FileInfo(nbytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        with self._adding, write_errors(str(self._copy.name)):
            offset = self._copy.seek(0, 2)
            view = memoryview(data)
            while view:  # why: a raw write may be partial
                view = view[self._copy.write(view) :]
            self._entries.setdefault((record.split, record.number), {})[record.res] = _Entry(
                offset=offset, nbytes=len(data), samples=len(record.samples), contents=record.contents,
                files={**record.files, record.name: info}, rejects=record.rejects,
            )  # fmt: skip

    def get(self, split: str, number: int, res: int) -> ShardRecord:
        """The record of a shard that is finished at `res`."""
        entry = self._entries[split, number][res]
        return ShardRecord.parse(read_at(self._copy.fileno(), entry.nbytes, entry.offset))

    def resolutions(self, split: str, number: int) -> Set[int]:
        """The resolutions at which a shard is finished."""
        return self._entries.get((split, number), {}).keys()

    def samples(self, split: str, number: int) -> int:
        """The number of samples of a shard that is finished at any resolution."""
        return self._any(split, number).samples

    def contents(self, split: str, number: int) -> str | None:
        """`ShardRecord.contents` of a shard; None if it is not finished at any resolution."""
        return self._any(split, number).contents if (split, number) in self._entries else None

    def rejects(self) -> dict[tuple[str, int], str]:
        """{(split, key): reason} of all shards, sorted."""
        return {
            (split, key): reason
            for split, number in sorted(self._entries)
            for key, reason in self._any(split, number).rejects
        }

    def _any(self, split: str, number: int) -> _Entry:
        entries = self._entries[split, number]
        return entries[min(entries)]

    def files(self, resolutions: Collection[int] | None = None) -> dict[str, FileInfo]:
        """The tars, idx files and records, at `resolutions` (None: all)."""
        return {
            name: info
            for _, res, entry in self._all() if resolutions is None or res in resolutions
            for name, info in entry.files.items()
        }  # fmt: skip

    def _all(self) -> Iterator[tuple[tuple[str, int], int, _Entry]]:
        for shard, entries in self._entries.items():
            for res, entry in entries.items():
                yield shard, res, entry

    def drop_lost(self) -> None:
        """Drop the records whose files are missing or have another size, by one listing per folder."""
        self._drop(lost_files(self._store, {name: info.nbytes for name, info in self.files().items()}))

    def _drop(self, names: Set[str]) -> None:
        for shard, res, _ in [each for each in self._all() if not names.isdisjoint(each[2].files)]:
            del self._entries[shard][res]
            if not self._entries[shard]:
                del self._entries[shard]


def _read(store: Store, name: str) -> bytes:
    try:
        return store.read(name)
    except FileNotFoundError:  # why not retried: it was listed a moment ago, but a lost record is only a missing one
        return b""


def lost_files(store: Store, expected: Mapping[str, int]) -> set[str]:
    """Those of the files {name: bytes} that are missing or have another size; one listing per folder.

    Raises `StorageError` for a folder that exists and cannot be listed.
    """
    folders = sorted({name.rpartition("/")[0] for name in expected})

    def sizes(folder: str) -> dict[str, int]:
        return retry(f"{store.where}/{folder}", lambda: store.sizes(folder))

    present = {
        f"{folder}/{name}".lstrip("/"): nbytes
        for folder, files in zip(folders, thread_map(sizes, folders, 4), strict=True)
        for name, nbytes in files.items()
    }
    return {name for name, nbytes in expected.items() if present.get(name) != nbytes}
