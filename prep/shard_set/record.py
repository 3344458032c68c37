"""The records of finished tars: the only source of what is finished in a set.

A tar that is durable leaves one small file, `records/SPLIT-NNNNNN-RES.rec`, which is never changed: everything else in
the set (index arrays, lists, manifest) is derived from these records. It is one line of JSON, the rows (of
`Target.sample_dtype`, SOURCE and STORED) of the tar's samples, at the smallest resolution the hashes of their photos,
and the SHA-256 of all that. A record names its generation by hash; records of others, damaged records, and records
whose files are gone do not count.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resolute.files import write_errors
from resolute.pipeline.dataset.format import SAMPLE, SOURCE, STORED, shard_name
from resolute.pipeline.storage.read_at import read_at
from resolute.prep.convert.batch import PixelFacts
from resolute.prep.near_copies.descriptor import HASHES
from resolute.prep.storage.bulk import REQUESTS, read_many
from resolute.prep.storage.hashed_file import FileInfo
from resolute.prep.storage.output import Store
from resolute.prep.storage.retry import retry
from resolute.prep.storage.thread_map import thread_map

__all__ = [
    "RECORDS",
    "Records",
    "ShardRecord",
    "lost_files",
    "pack_rows",
    "record_name",
    "record_names",
    "unpack_rows",
]

RECORDS = "records"
_HASHERS = 4  # threads that check and hash records
_MAX_ASKED = 1024  # records of a part of the set: the files of more are listed, with those of all others
_DIGEST_BYTES = 32


def record_name(shard: str, res: int | str) -> str:
    return f"{RECORDS}/{shard}-{res}.rec"


def record_names(store: Store) -> list[str]:
    """The names of all records in a store, valid or not."""
    return [f"{RECORDS}/{name}" for name in store.names(RECORDS) if name.endswith(".rec")]


def pack_rows(header: Mapping[str, Any], *rows: bytes) -> bytes:
    """A file: one line of JSON, `rows`, and the SHA-256 of all that."""
    data = json.dumps(header).encode() + b"\n" + b"".join(rows)
    return data + hashlib.sha256(data).digest()


def unpack_rows(data: bytes, *, checked: bool = False) -> tuple[dict[str, Any], bytes]:
    """(header, rows) of a file made by `pack_rows`. Raises `ValueError` for other or damaged data unless `checked`."""
    data, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if not checked and hashlib.sha256(data).digest() != digest:
        raise ValueError("other bytes than prep wrote")
    line, _, rows = data.partition(b"\n")
    return json.loads(line), rows


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """A shard that is finished at one resolution (px); arrays are in key order.

    `generation_hash` is the one of its generation, `files` maps its tar and idx to size and hash, `rejects` are
    (key, reason). A shard without samples has no files. `hashes` describe the photos (`near_copies/descriptor.py`);
    None at all but the smallest resolution, and with NEAR_COPIES=none.
    """

    generation_hash: str
    split: str
    number: int
    res: int
    samples: NDArray[Any]  # (n,) `Target.sample_dtype`
    sources: NDArray[Any]  # (n,) SOURCE
    stored: NDArray[Any]  # (n,) STORED with `shard` 0
    files: Mapping[str, FileInfo]
    rejects: tuple[tuple[int, str], ...]
    facts: PixelFacts = PixelFacts()  # noqa: RUF009  (it is frozen)
    hashes: NDArray[np.uint64] | None = None  # (n, HASHES)

    @property
    def name(self) -> str:
        return record_name(shard_name(self.split, self.number), self.res)

    @property
    def contents_sha256(self) -> str:
        """SHA-256 (hex) over samples and sources, which are the same at every resolution."""
        return hashlib.sha256(self.samples.tobytes() + self.sources.tobytes()).hexdigest()

    def to_bytes(self) -> bytes:
        header = {
            "plan": self.generation_hash,
            "split": self.split,
            "number": self.number,
            "res": self.res,
            "samples": len(self.samples),
            "files": {name: [info.nbytes, info.sha256] for name, info in sorted(self.files.items())},
            "rejects": self.rejects,
        }
        if facts := self.facts.to_json():  # why only then: records of other photos stay what they are
            header["pixels"] = facts
        if self.samples.dtype != SAMPLE:
            header["targets"] = [[name, *rest] for name, *rest in self.samples.dtype.descr]
        hashes = b""
        if self.hashes is not None:
            header["hashes"], hashes = HASHES, self.hashes.astype("<u8").tobytes()
        return pack_rows(header, self.samples.tobytes(), self.sources.tobytes(), self.stored.tobytes(), hashes)

    @classmethod
    def parse(cls, data: bytes, *, checked: bool = False) -> ShardRecord:
        """The inverse of `to_bytes`; arrays are read-only. Raises `ValueError` for other or damaged data.

        `checked`: the data were parsed before, and their hash is not computed again.
        """
        header, rows = unpack_rows(data, checked=checked)
        arrays, offset = [], 0
        fields = [(name, kind, *map(tuple, shape)) for name, kind, *shape in header.get("targets", [])]
        for dtype in (np.dtype(fields) if fields else SAMPLE, SOURCE, STORED):
            arrays.append(np.frombuffer(rows or b"\0", dtype, header["samples"], offset))
            offset += arrays[-1].nbytes
        samples, sources, stored = arrays
        hashes = None
        if header.get("hashes") == HASHES:  # why: of another number, their meaning is another too
            hashes = np.frombuffer(rows or b"\0", "<u8", header["samples"] * HASHES, offset).reshape(-1, HASHES)
        return cls(
            generation_hash=header["plan"],
            split=header["split"],
            number=header["number"],
            res=header["res"],
            samples=samples,
            sources=sources,
            stored=stored,
            files={name: FileInfo(nbytes=size, sha256=sha) for name, (size, sha) in header["files"].items()},
            rejects=tuple((key, reason) for key, reason in header["rejects"]),
            facts=PixelFacts(**header.get("pixels", {})),
            hashes=hashes,
        )


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """The part of a record that stays in memory: its place in the local copy, and everything but its rows."""

    offset: int
    nbytes: int
    samples: int
    contents_sha256: str
    files: Mapping[str, FileInfo]  # the tar, the idx and the record
    rejects: tuple[tuple[int, str], ...]
    facts: PixelFacts


def _entry(record: ShardRecord, data: bytes) -> _Entry:
    """The entry of a record with the bytes `data`, without its offset."""
    info = FileInfo(nbytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    return _Entry(
        offset=-1,
        nbytes=len(data),
        samples=len(record.samples),
        contents_sha256=record.contents_sha256,
        files={**record.files, record.name: info},
        rejects=record.rejects,
        facts=record.facts,
    )


class Records:
    """The valid records of a set; each is read once and then kept in the local file `cache_file`.

    `hash_of(split, number)` is the hash of the generation that a shard's record has to name.
    """

    def __init__(self, store: Store, hash_of: Callable[[str, int], str], cache_file: Path) -> None:
        self._store, self._hash_of = store, hash_of
        self._entries: dict[tuple[str, int], dict[int, _Entry]] = {}
        self._adding = threading.Lock()
        with write_errors(cache_file):
            self._cache_file = cache_file.open("w+b", buffering=0)

    def close(self) -> None:
        self._cache_file.close()

    def load(self, *, names: Iterable[str] | None = None, damaged: Collection[str] = ()) -> None:
        """Read the records `names`, some of which may not be there; None: all in the store.

        Those that are in `damaged` or have files there do not count, nor those of a shard that disagree about its
        contents.
        """
        is_part, nbytes = names is not None, 0
        if names is None:
            sizes = {name: size for name, size in self._store.sizes(RECORDS).items() if name.endswith(".rec")}
            names, nbytes = [f"{RECORDS}/{name}" for name in sorted(sizes)], max(sizes.values(), default=0)
        names = [name for name in names if name not in damaged]
        contents = read_many(self._store, names, nbytes=nbytes)
        for parsed, data in thread_map(self._parse, zip(names, contents, strict=True), _HASHERS):
            if parsed is not None:
                self._keep(*parsed, data)
        for shard, entries in list(self._entries.items()):
            if len({entry.contents_sha256 for entry in entries.values()}) > 1:
                del self._entries[shard]
        self._drop(set(damaged))
        if is_part and len(names) <= _MAX_ASKED:
            self._drop(lost_files(self._store, self._sizes(), listed=False))
        else:
            self.drop_lost()

    def _parse(self, named: tuple[str, bytes]) -> tuple[tuple[ShardRecord, _Entry] | None, bytes]:
        """A record with its entry, and its bytes; None if it is missing, damaged or of another generation."""
        name, data = named
        try:
            record = ShardRecord.parse(data)
        except ValueError:
            return None, b""
        is_valid = record.name == name and record.generation_hash == self._hash_of(record.split, record.number)
        return ((record, _entry(record, data)) if is_valid else None), data

    def add(self, data: bytes) -> None:
        """Count the record with these bytes, which is in the store. Thread-safe."""
        record = ShardRecord.parse(data)
        self._keep(record, _entry(record, data), data)

    def _keep(self, record: ShardRecord, entry: _Entry, data: bytes) -> None:
        with self._adding, write_errors(str(self._cache_file.name)):
            offset = self._cache_file.seek(0, 2)
            view = memoryview(data)
            while view:  # why: a raw write may be partial
                view = view[self._cache_file.write(view) :]
            shard = self._entries.setdefault((record.split, record.number), {})
            shard[record.res] = replace(entry, offset=offset)

    def get(self, split: str, number: int, res: int) -> ShardRecord:
        """The record of a shard that is finished at `res`."""
        entry = self._entries[split, number][res]
        return ShardRecord.parse(read_at(self._cache_file.fileno(), entry.nbytes, entry.offset), checked=True)

    def resolutions(self, split: str, number: int) -> Set[int]:
        """The resolutions at which a shard is finished."""
        return self._entries.get((split, number), {}).keys()

    def samples(self, split: str, number: int) -> int:
        """The number of samples of a shard that is finished at any resolution."""
        return self._any(split, number).samples

    def contents_sha256(self, split: str, number: int) -> str | None:
        """`ShardRecord.contents_sha256` of a shard; None if it is not finished at any resolution."""
        return self._any(split, number).contents_sha256 if (split, number) in self._entries else None

    def rejects(self) -> dict[tuple[str, int], str]:
        """{(split, key): reason} of all shards, sorted."""
        return {
            (split, key): reason
            for split, number in sorted(self._entries)
            for key, reason in self._any(split, number).rejects
        }

    def facts(self, shards: Iterable[tuple[str, int]]) -> PixelFacts:
        """The facts about the photos of finished shards, (split, number), together."""
        return PixelFacts.total(self._any(*shard).facts for shard in shards)

    def _any(self, split: str, number: int) -> _Entry:
        entries = self._entries[split, number]
        return entries[min(entries)]

    def files(self, shards: Iterable[tuple[str, int]], resolutions: Iterable[int]) -> dict[str, FileInfo]:
        """The tars, idx files and records of finished shards, (split, number), at `resolutions` (px)."""
        entries = (self._entries[shard][res] for shard in shards for res in resolutions)
        return {name: info for entry in entries for name, info in entry.files.items()}

    def _all(self) -> Iterator[tuple[tuple[str, int], int, _Entry]]:
        for shard, entries in self._entries.items():
            for res, entry in entries.items():
                yield shard, res, entry

    def drop_lost(self) -> None:
        """Drop the records whose files are missing or have another size, by one listing per folder."""
        self._drop(lost_files(self._store, self._sizes()))

    def _sizes(self) -> dict[str, int]:
        return {name: info.nbytes for *_, entry in self._all() for name, info in entry.files.items()}

    def _drop(self, names: Set[str]) -> None:
        for shard, res, _ in [each for each in self._all() if not names.isdisjoint(each[2].files)]:
            del self._entries[shard][res]
            if not self._entries[shard]:
                del self._entries[shard]


def lost_files(store: Store, expected: Mapping[str, int], *, listed: bool = True) -> set[str]:
    """Those of the files {name: bytes} that are missing or have another size.

    One listing per folder, or, if not `listed`, one request per file, which costs less for a few of many files. Raises
    `StorageError` for a folder that exists and cannot be listed.
    """
    if not listed:
        sizes = zip(expected.items(), thread_map(store.size, expected, REQUESTS), strict=True)
        return {name for (name, nbytes), present in sizes if present != nbytes}
    folders = sorted({name.rpartition("/")[0] for name in expected})

    def list_folder(folder: str) -> dict[str, int]:
        return retry(f"{store.where}/{folder}", lambda: store.sizes(folder))

    present = {
        f"{folder}/{name}".lstrip("/"): nbytes
        for folder, files in zip(folders, thread_map(list_folder, folders, 8), strict=True)
        for name, nbytes in files.items()
    }
    return {name for name, nbytes in expected.items() if present.get(name) != nbytes}
