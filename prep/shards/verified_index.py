"""The verified part of a set's metadata: a usable manifest, intact index arrays and lists, and where samples lie."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.index_array import checksums, checksums_name
from pipeline.dataset.shard_set import FORMAT, VERSION, label_digits, manifest_bytes
from pipeline.errors import ResoluteError
from prep.storage.hashed_file import FileInfo
from prep.storage.output import RUN_FOLDER, Store

from .existing_set import MANIFEST, MANIFEST_COPY
from .list_checks import (
    check_duplicates,
    check_info,
    check_names,
    check_rejects,
    check_samples,
    check_sources,
    check_stored,
)
from .shard_check import Damage, ShardFiles, check_sha256, check_size, read_with_retry
from .source_record import rerun_command

__all__ = ["VerifiedIndex", "find_manifest"]

_PIECE_BYTES = 1 << 20


def find_manifest(store: Store) -> tuple[dict[str, Any] | None, dict[str, str]]:
    """(the manifest or its intact copy, {name: fault} of the two); the manifest is None if neither is usable.

    Raises `ResoluteError` if there is no finished set, or only one of another format or version.
    """
    parsed, faults, present = {}, {}, []
    for name in (MANIFEST, MANIFEST_COPY):
        try:
            data = read_with_retry(store, name, partial(store.read, name))
            present.append(name)
            parsed[name] = _parsed(data)
        except Damage as damage:
            faults[name] = str(damage)
    usable = [m for m in parsed.values() if (m["format"], m["version"]) == (FORMAT, VERSION)]
    if not usable and parsed:
        (name, foreign), *_ = parsed.items()
        raise ResoluteError(
            f"{store.where}/{name}: got format {foreign['format']} version {foreign['version']}, expected {FORMAT} "
            f"version {VERSION}; rebuild it: run {rerun_command(store, rebuild=True)}"
        )
    if MANIFEST not in present and (not usable or store.names(RUN_FOLDER)):
        raise ResoluteError(
            f"{store.where}/{MANIFEST}: not found, expected a finished shard set; run {rerun_command(store)}"
        )
    if not usable:
        return None, faults
    if len(usable) == 2 and usable[0] != usable[1]:
        faults[MANIFEST_COPY] = f"not equal to {MANIFEST}, expected a copy of it"
    return usable[0], faults


def _parsed(data: bytes) -> dict[str, Any]:
    """A manifest that matches its own hash; one of another version is returned as it is. Raises `Damage`."""
    try:
        manifest: dict[str, Any] = json.loads(data)
        is_current = (manifest["format"], manifest["version"]) == (FORMAT, VERSION)
        if data == manifest_bytes(manifest) or (not is_current and "sha256" not in manifest):
            return manifest
    except (ValueError, KeyError, TypeError):
        raise Damage("got bytes that do not parse, expected a manifest in JSON") from None
    raise Damage("changed since prep, got other bytes than its own hash says")


def _check_checksums(file: Any, of: Path) -> None:
    """Raise `Damage` unless `file` holds the checksums of the intact array at `of`."""
    with of.open("rb") as array:
        expected = checksums(iter(partial(array.read, _PIECE_BYTES), b""))
    try:
        got = np.load(io.BytesIO(file.read()), allow_pickle=False)
    except ValueError as error:
        raise Damage(f"not an array, got '{error}', expected a .npy file") from None
    if got.dtype != expected.dtype or not np.array_equal(got, expected):
        raise Damage("got other checksums, expected those of the blocks of its array")


class VerifiedIndex:
    """The index and the lists of a set, checked on construction; `damaged` maps files to their faults."""

    def __init__(self, store: Store, manifest: Mapping[str, Any], files: Mapping[str, FileInfo], scratch: Path) -> None:
        self._store, self._manifest, self._files, self._scratch = store, manifest, files, scratch
        self.damaged: dict[str, str] = {}
        self._paths: dict[str, Path] = {}  # of intact arrays
        self._arrays: dict[str, NDArray[Any]] = {}
        self._bounds: dict[str, NDArray[np.int64]] = {}
        self._checked: set[str] = set()
        self._label_digits = label_digits(len(manifest["classes"]))
        for split in manifest["splits"]:
            self._check_split(split)
        self._check_list("rejects.jsonl", partial(check_rejects, manifest=manifest))
        self._check_list("duplicates.jsonl", partial(check_duplicates, manifest=manifest))
        for name in files:
            if name.rpartition("/")[2] == "_info.json":
                self._check_list(name, partial(self._check_info, name=name))
        for name, path in self._paths.items():
            if checksums_name(name) in files:
                self._check_list(checksums_name(name), partial(_check_checksums, of=path))
        of_shards = {f"{shard.name}.{kind}" for shard in self.shards() for kind in ("tar", "idx")}
        for name in sorted(set(files) - self._checked - of_shards):
            self._check_list(name, lambda file: None)

    def close(self) -> None:
        self._arrays.clear()

    def shards(self) -> Iterator[ShardFiles]:
        for split, info in self._manifest["splits"].items():
            bounds = self._bounds.get(split)
            for res in self._manifest["resolutions"]:
                stored = self._paths.get(f"index/{split}-{res}.npy")
                for number, shard in enumerate(info["shards"]):
                    name = f"{res}/{shard}"
                    yield ShardFiles(
                        store=self._store,
                        name=name,
                        tar=self._files[f"{name}.tar"],
                        idx=self._files[f"{name}.idx"],
                        samples=self._paths.get(f"index/{split}.npy"),
                        stored=stored,
                        rows=(0, 0) if bounds is None else (int(bounds[number]), int(bounds[number + 1])),
                        label_digits=self._label_digits,
                    )

    def _check_split(self, split: str) -> None:
        manifest = self._manifest

        def samples(rows: NDArray[Any]) -> None:
            self._bounds[split] = check_samples(rows, manifest, split)

        def stored(rows: NDArray[Any], res: str) -> None:
            if split in self._bounds:
                check_stored(
                    rows, manifest, split, res, bounds=self._bounds[split],
                    sources=self._arrays.get(f"index/{split}.source.npy"), label_digits=self._label_digits,
                )  # fmt: skip

        self._check_array(f"index/{split}.npy", samples)
        self._check_array(f"index/{split}.source.npy", lambda rows: check_sources(rows, manifest, split))
        for res in manifest["resolutions"]:
            self._check_array(f"index/{split}-{res}.npy", partial(stored, res=res))
        self._check_list(f"index/{split}.sources.jsonl", partial(check_names, manifest=manifest, split=split))

    def _check_array(self, name: str, check: Callable[[NDArray[Any]], None]) -> None:
        self._checked.add(name)

        def work() -> tuple[Path, NDArray[Any]]:
            check_size(self._store, name, self._files[name])
            path = self._store.local(name, self._scratch)
            with path.open("rb") as file:
                check_sha256(hashlib.file_digest(file, "sha256").hexdigest(), self._files[name])
            try:
                return path, np.load(path, mmap_mode="r")
            except ValueError as error:
                raise Damage(f"not an array, got '{error}', expected a .npy file") from None

        try:
            path, rows = read_with_retry(self._store, name, work)
            check(rows)
            self._arrays[name], self._paths[name] = rows, path
        except Damage as damage:
            self.damaged[name] = str(damage)

    def _check_list(self, name: str, check: Callable[[Any], None]) -> None:
        self._checked.add(name)

        def work() -> None:
            check_size(self._store, name, self._files[name])
            with self._store.open(name) as file:
                digest = hashlib.sha256()
                while piece := file.read(_PIECE_BYTES):
                    digest.update(piece)
            check_sha256(digest.hexdigest(), self._files[name])
            with self._store.open(name) as file:
                check(file)

        try:
            read_with_retry(self._store, name, work)
        except Damage as damage:
            self.damaged[name] = str(damage)

    def _check_info(self, file: Any, name: str) -> None:
        check_info(file.read(), self._manifest, name, self._bounds)
