"""Checks that a finished shard set is still what prep wrote: `resolute verify SHARDS`.

Reads every file once and decodes every JPEG; writes nothing but `damaged.json`, from which prep repairs the set.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from resolute.console import counted, say
from resolute.errors import ResoluteError, StorageError
from resolute.files import PARTIAL
from resolute.fork_server import fork_server
from resolute.pipeline.dataset.manifest import FORMAT, MANIFEST, READ_VERSIONS, VERSION, is_sealed, join_manifest
from resolute.pipeline.dataset.source_json import SOURCE_JSON, missing_set_hint
from resolute.prep.shard_set.cards import CARD
from resolute.prep.shard_set.existing_set import CHANGES, DAMAGED
from resolute.prep.shard_set.file_check import Damage, check_file, init_worker, read_with_retry
from resolute.prep.shard_set.record import record_name
from resolute.prep.shard_set.set_source import read_source_json, rerun_command
from resolute.prep.storage.hashed_file import FileInfo
from resolute.prep.storage.output import RUN_FOLDER, Store, read_present

__all__ = ["VerifyResult", "summary", "to_rebuild", "verify", "write_damaged_list"]

# Files of a set that its manifest does not list.
_OUTSIDE = frozenset({MANIFEST, DAMAGED, SOURCE_JSON, CHANGES, CARD, "report.html"})
_MAX_NAMED = 8  # shards or unexpected files listed by name


@dataclass(kw_only=True)
class VerifyResult:
    """Outcome of `verify`.

    `damaged` maps file names to what is wrong with them; `unexpected` are files that do not belong to the set;
    `manifest` is the joined one, None if one is damaged; nothing else is checked then.
    """

    manifest: dict[str, Any] | None
    damaged: dict[str, str] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    elapsed_s: float = 0.0


def verify(
    store: Store, *, workers: int, progress: Callable[[int, int], None] = lambda done, total: None
) -> VerifyResult:
    """Hash every file and decode every JPEG; files are read in `workers` processes.

    `progress(bytes done, total bytes)` is called after each file. Writes nothing. Raises `ResoluteError` if there is no
    finished set of this version, or if its files cannot be read.
    """
    started_at = time.perf_counter()
    manifest, damaged = _read_manifest(store)
    result = VerifyResult(manifest=manifest)
    if manifest is None:
        is_lost = store.size(damaged) is None
        result.damaged[damaged] = "missing" if is_lost else "changed since prep, got other bytes than it should have"
    else:
        files = {name: FileInfo(nbytes=i["bytes"], sha256=i["sha256"]) for name, i in manifest["files"].items()}
        result.unexpected = _unexpected_files(store, files)
        total = sum(info.nbytes for info in files.values())
        done = 0
        for name, fault in _in_processes(store, files, workers):
            if fault is not None:
                result.damaged[name] = fault
            done += files[name].nbytes
            progress(done, total)
    _check_storage(store, result.damaged)
    result.damaged = dict(sorted(result.damaged.items()))
    result.elapsed_s = time.perf_counter() - started_at
    return result


def _check_storage(store: Store, damaged: Mapping[str, str]) -> None:
    """Raise `StorageError` if files were missing because storage was: the manifest is gone, or they are back by now."""
    missing = [name for name, fault in damaged.items() if fault == "missing"]
    if missing and (store.size(MANIFEST) is None or any(store.size(name) is not None for name in missing)):
        raise StorageError(
            f"{store.where}: storage was away while verify read it, got {len(missing)} files missing, such as "
            f"{missing[0]}, expected the set's folder all the time; check its mount, then run verify again"
        )


def _read_manifest(store: Store) -> tuple[dict[str, Any] | None, str]:
    """The joined manifest, or None and the name of the one that is damaged or missing.

    Raises `ResoluteError` if there is none, or one of another version.
    """
    try:
        data = read_with_retry(store, MANIFEST, lambda: store.read(MANIFEST))
    except Damage:
        hint = missing_set_hint(rerun_command(store), read_source_json(store))
        raise ResoluteError(f"{store.where}/{MANIFEST}: not found, expected a finished shard set; {hint}") from None
    try:
        manifest: dict[str, Any] = json.loads(data)
        got = (manifest["format"], manifest["version"])
    except (ValueError, KeyError, TypeError):
        return None, MANIFEST
    if got not in [(FORMAT, version) for version in READ_VERSIONS] and (is_sealed(data) or "sha256" not in manifest):
        raise ResoluteError(
            f"{store.where}/{MANIFEST}: got format {got[0]} version {got[1]}, expected {FORMAT} "
            f"version {VERSION}; rebuild it: run {rerun_command(store, rebuild=True)}"
        )
    if not is_sealed(data):
        return None, MANIFEST
    try:
        return join_manifest(manifest, partial(read_present, store)), ""
    except ValueError as error:
        return None, str(error)


def _unexpected_files(store: Store, files: Mapping[str, Any]) -> list[str]:
    set_folders = {name.rpartition("/")[0] for name in files} | {"index", ""}
    unexpected = []
    for folder in ("", *store.folders()):
        if folder in (RUN_FOLDER, "report"):
            continue
        names = [f"{folder}/{name}".lstrip("/") for name in store.names(folder)]
        if folder in set_folders:
            unexpected += [
                name
                for name in names
                if name not in files and name not in _OUTSIDE and not PARTIAL.fullmatch(name.rpartition("/")[2])
            ]  # partial files are deleted by the next prep
        else:
            unexpected.append(f"{folder}/")
    return sorted(unexpected)


def _in_processes(store: Store, files: Mapping[str, FileInfo], workers: int) -> Iterator[tuple[str, str | None]]:
    """Yield each file with its fault as it completes. An interrupt ends the workers in the middle of a tar."""
    context = fork_server()
    stop = context.Event()
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=init_worker, initargs=(stop, dict(os.environ)))
    try:
        name_of = {pool.submit(check_file, store, name, info): name for name, info in files.items()}
        for future in as_completed(name_of):
            yield name_of[future], future.result()
    except BrokenProcessPool:
        raise ResoluteError(
            "got a worker process that died, expected it to finish; if it ran out of memory, use fewer "
            "workers (--workers)"
        ) from None
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


def to_rebuild(manifest: Mapping[str, Any], damaged: Collection[str]) -> dict[str, list[str]]:
    """{resolution: shards} that `prep` rebuilds to repair the set; all other files are derived again."""
    to_do: dict[str, list[str]] = {}
    for res in manifest["resolutions"]:
        for info in manifest["splits"].values():
            for shard in info["shards"]:
                if not {f"{res}/{shard}.tar", f"{res}/{shard}.idx", record_name(shard, res)}.isdisjoint(damaged):
                    to_do.setdefault(res, []).append(shard)
    return to_do


def summary(store: Store, result: VerifyResult) -> str:
    """The closing lines of the command, without a final newline."""
    if result.unexpected:
        say(f"ignored, not part of the set: {_first_names(result.unexpected)}")
    manifest, damaged = result.manifest, result.damaged
    if manifest is None:
        return _damage_lines(store, damaged) + (
            f"\nrun {rerun_command(store)}: it derives the manifest again; then verify the set again"
        )
    files = manifest["files"]
    if not damaged:
        samples = sum(split["samples"] for split in manifest["splits"].values())
        shards = sum(len(split["shards"]) for split in manifest["splits"].values())
        gigabytes = sum(info["bytes"] for info in files.values()) / 1e9
        return (
            f"{store.where}: sound, {counted(samples, 'sample')}, "
            f"{counted(len(manifest['resolutions']), 'resolution')}, {counted(shards, 'shard')}, {gigabytes:.3g} GB, "
            f"{result.elapsed_s:.1f} s"
        )
    text = _damage_lines(store, damaged)
    if manifest["version"] != VERSION:
        return text + f"\nrun {rerun_command(store, rebuild=True)}: this version only makes older sets anew"
    for res, shards_of in to_rebuild(manifest, damaged).items():
        text += f"\n  to rebuild at {res} px: {_first_names(shards_of)}"
    return text + f"\nrun {rerun_command(store)}: it rebuilds only the damaged shards"


def _damage_lines(store: Store, damaged: Mapping[str, str]) -> str:
    message = [f"{store.where}: damaged, {len(damaged)} file{'s' * (len(damaged) > 1)}"]
    return "\n".join(message + [f"  {name}: {what}" for name, what in damaged.items()])


def _first_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more


def write_damaged_list(store: Store, result: VerifyResult) -> None:
    """Write `damaged.json`, which the next `prep` repairs from; delete it if the set is sound."""
    try:
        if result.damaged:
            store.write(DAMAGED, (json.dumps(list(result.damaged), indent=1) + "\n").encode())
        elif store.size(DAMAGED) is not None:
            store.remove(DAMAGED)
    except ResoluteError as error:
        raise ResoluteError(f"{error}; prep repairs what {DAMAGED} lists: run verify again first") from None
