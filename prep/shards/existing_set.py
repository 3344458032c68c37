"""The finished set at OUT: its manifest, what it records of each shard, and which of its files are damaged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.shard_set import FORMAT, SAMPLE, SOURCE, STORED, VERSION, manifest_bytes, shard_name
from pipeline.errors import ResoluteError
from pipeline.storage.scratch import ScratchFolder
from prep.execute.thread_map import thread_map
from prep.storage.hashed_file import FileInfo
from prep.storage.output import LOCK, RUN_FOLDER, Store
from prep.storage.retry import retry

from .writer import ShardRecord

__all__ = ["DAMAGED", "MANIFEST", "MANIFEST_COPY", "ExistingSet", "has_unfinished_run", "lost_files", "open_existing"]

MANIFEST, MANIFEST_COPY = "manifest.json", "index/manifest.json"
DAMAGED = "damaged.json"  # names of the files that `verify` found damaged


class ExistingSet:
    """A finished set; its index arrays are memory-mapped when they are needed. A context manager."""

    def __init__(self, store: Store, manifest: Mapping[str, Any]) -> None:
        self.manifest = manifest
        self._store = store
        self._scratch: ScratchFolder | None = None
        self._arrays: dict[str, NDArray[Any] | None] = {}
        self._rejects: dict[str, list[tuple[int, str]]] | None = None

    @cached_property
    def damaged(self) -> set[str]:
        """Files whose size is not the manifest's, and files that `verify` reported. One listing per folder, cached."""
        try:
            listed = set(json.loads(self._store.read(DAMAGED)))
        except (FileNotFoundError, ValueError):
            listed = set()
        files = {name: info["bytes"] for name, info in self.manifest["files"].items()}
        expected = manifest_bytes(self.manifest)
        damaged = {name for name in (MANIFEST, MANIFEST_COPY) if _read(self._store, name) != expected}
        return damaged | (listed & files.keys()) | lost_files(self._store, files)

    def close(self) -> None:
        self._arrays.clear()
        if self._scratch is not None:
            self._scratch.close()

    def __enter__(self) -> ExistingSet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def codecs(self) -> dict[str, Any]:
        """{"codecs": versions} that the set was made with; {} for sets of older versions, which do not record them."""
        return {"codecs": self.manifest["codecs"]} if "codecs" in self.manifest else {}

    @property
    def resolutions(self) -> tuple[int, ...]:
        return tuple(sorted(int(res) for res in self.manifest["resolutions"]))

    def get(self, split: str, number: int) -> ShardRecord | None:
        """The record of a shard with the resolutions at which it is intact; None if its samples are lost."""
        shards = self.manifest["splits"][split]["shards"]
        name = shard_name(split, number)
        samples = self._array(f"index/{split}.npy", SAMPLE)
        sources = self._array(f"index/{split}.source.npy", SOURCE)
        if samples is None or sources is None or "rejects.jsonl" in self.damaged:
            return None
        position = shards.index(name) if name in shards else None
        rows, stored, files = slice(0, 0), {}, {}
        for res in self.resolutions:
            array = self._array(f"index/{split}-{res}.npy", STORED)
            names = [f"{res}/{name}.tar", f"{res}/{name}.idx"] if position is not None else []
            if array is None or any(file in self.damaged for file in names):
                continue
            if position is not None:
                # why: samples are in shard order, so those of a shard are contiguous
                rows = slice(*np.searchsorted(array["shard"], [position, position + 1]).tolist())
            stored[res] = np.array(array[rows])
            stored[res]["shard"] = 0
            for file in names:
                info = self.manifest["files"][file]
                files[file] = FileInfo(nbytes=info["bytes"], sha256=info["sha256"])
        if not stored:
            return None
        return ShardRecord(
            split=split,
            number=number,
            samples=np.array(samples[rows]),
            sources=np.array(sources[rows]),
            stored=stored,
            files=files,
            rejects=self._rejects_of(split, number),
        )

    def _rejects_of(self, split: str, number: int) -> tuple[tuple[int, str], ...]:
        if self._rejects is None:
            self._rejects = {}
            per_shard = self.manifest["settings"]["shard_samples"]
            for line in self._store.read("rejects.jsonl").splitlines():
                row = json.loads(line)
                name = shard_name(row["split"], row["key"] // per_shard)
                self._rejects.setdefault(name, []).append((row["key"], row["reason"]))
        return tuple(self._rejects.get(shard_name(split, number), []))

    def _array(self, name: str, dtype: np.dtype[Any]) -> NDArray[Any] | None:
        """A memory-mapped index array; None if it is damaged."""
        if name not in self._arrays:
            array = None
            if name not in self.damaged:
                self._scratch = self._scratch or ScratchFolder()
                array = np.load(self._store.local(name, self._scratch.path), mmap_mode="r")
                assert array.dtype == dtype, (name, array.dtype)
            self._arrays[name] = array
        return self._arrays[name]


def lost_files(store: Store, promised: Mapping[str, int]) -> set[str]:
    """Those of the files {name: bytes} that are missing or have another size; one listing per folder.

    Raises `StorageError` for a folder that exists and cannot be listed.
    """
    folders = sorted({name.rpartition("/")[0] for name in promised})

    def sizes(folder: str) -> dict[str, int]:
        return retry(f"{store.where}/{folder}", lambda: store.sizes(folder))

    present = {
        f"{folder}/{name}".lstrip("/"): nbytes
        for folder, files in zip(folders, thread_map(sizes, folders, 4), strict=True)
        for name, nbytes in files.items()
    }
    return {name for name, nbytes in promised.items() if present.get(name) != nbytes}


def open_existing(store: Store, *, rebuild: bool) -> ExistingSet | None:
    """The finished set at OUT; None if there is none, or if it is to be rebuilt.

    Raises `ResoluteError` if OUT holds foreign files, or a set of another version or damaged beyond use.
    """
    valid, other_version, present = None, None, set()
    for name in (MANIFEST, MANIFEST_COPY):
        data = _read(store, name)
        if data is None:
            continue
        present.add(name)
        try:
            manifest = json.loads(data)
            is_prep, version = manifest["format"] == FORMAT, manifest["version"]
        except (ValueError, KeyError, TypeError):
            continue
        if is_prep and version == VERSION and data == manifest_bytes(manifest):
            valid = valid or manifest
        elif is_prep:
            other_version = version
    if rebuild and (valid or other_version or MANIFEST_COPY in present):
        return None
    # why: MANIFEST is missing during a rebuild; without a run in progress, its copy alone identifies the set
    if valid and (MANIFEST in present or not has_unfinished_run(store)):
        return ExistingSet(store, valid)
    if MANIFEST not in present:
        if not has_unfinished_run(store):
            _refuse_foreign(store)
        return None
    if other_version:
        raise ResoluteError(
            f"{store.where}/{MANIFEST}: a set of another version, got version {other_version}, expected {VERSION}; "
            "rebuild it with REBUILD=1 (--rebuild) or choose another OUT"
        )
    raise ResoluteError(
        f"{store.where}/{MANIFEST}: not a shard set, got a foreign or damaged file, expected a "
        f"{FORMAT} manifest or an empty folder; choose another OUT, or delete the file"
    )


def _read(store: Store, name: str) -> bytes | None:
    try:
        return store.read(name)
    except (FileNotFoundError, NotADirectoryError):
        return None


def has_unfinished_run(store: Store) -> bool:
    """Whether an unfinished run of prep has left its files at OUT."""
    return any(f"{RUN_FOLDER}/{name}" != LOCK for name in store.names(RUN_FOLDER))


def _refuse_foreign(store: Store) -> None:
    root = Path(store.where)
    if "://" not in store.where and root.exists() and not root.is_dir():
        raise ResoluteError(f"{root}: in the way, got a file, expected a folder; choose another OUT")
    names = [name for name in store.folders() if name != RUN_FOLDER] + store.names()
    if names:
        raise ResoluteError(
            f"{store.where}: not empty and not a shard set, got {len(names)} entries such as {names[0]}, expected an "
            "empty or new folder; choose another OUT"
        )
