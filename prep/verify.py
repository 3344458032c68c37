"""Checks that a finished shard set is still what prep wrote: `python -m prep.verify SHARDS`.

Reads every file once and decodes every JPEG; writes nothing but `damaged.json`, from which prep repairs the set.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from pipeline.cli import guard_process

    guard_process()

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from pipeline.cli import Parser, number
from pipeline.cpu_count import available_cpus
from pipeline.dataset.source_record import SOURCE_RECORD
from pipeline.errors import ResoluteError, from_os_error, strip_credentials
from pipeline.storage.atomic_file import PARTIAL
from pipeline.storage.scratch import ScratchFolder
from prep.shards.existing_set import DAMAGED, MANIFEST, MANIFEST_COPY
from prep.shards.shard_check import ShardFiles, check_shard, init_worker
from prep.shards.source_record import rerun_command
from prep.shards.verified_index import VerifiedIndex, find_manifest
from prep.storage.hashed_file import FileInfo
from prep.storage.output import RUN_FOLDER, Store, open_store

__all__ = ["VerifyResult", "main", "to_rebuild", "verify"]

# Files of a set that its manifest does not list.
_OUTSIDE = frozenset({MANIFEST, MANIFEST_COPY, DAMAGED, SOURCE_RECORD, "report.html"})
_MAX_NAMED = 8  # shards or unexpected files listed by name


@dataclass(kw_only=True)
class VerifyResult:
    """Outcome of `verify`.

    `damaged` maps file names to what is wrong with them; `unexpected` are files that do not belong to the set;
    `manifest` is None if neither the manifest nor its copy is usable.
    """

    manifest: dict[str, Any] | None
    damaged: dict[str, str] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    elapsed_s: float = 0.0


def verify(
    store: Store, *, workers: int, progress: Callable[[int, int], None] = lambda done, total: None
) -> VerifyResult:
    """Hash every file, decode every JPEG and compare both with the index; tars are read in `workers` processes.

    `progress(bytes done, total bytes)` is called after each tar. Writes nothing. Raises `ResoluteError` if there is no
    finished set of this version, or if its files cannot be read.
    """
    started_at = time.perf_counter()
    manifest, damaged = find_manifest(store)
    result = VerifyResult(manifest=manifest, damaged=damaged)
    if manifest is not None:
        files = {name: FileInfo(nbytes=i["bytes"], sha256=i["sha256"]) for name, i in manifest["files"].items()}
        result.unexpected = _unexpected_files(store, files)
        with ScratchFolder() as scratch:
            index = VerifiedIndex(store, manifest, files, scratch)
            shards = list(index.shards())
            damaged |= index.damaged
            total = sum(shard.tar.nbytes for shard in shards)
            done = 0
            for shard, faults in _in_processes(shards, workers):
                damaged |= faults
                done += shard.tar.nbytes
                progress(done, total)
            index.close()
    result.damaged = dict(sorted(damaged.items()))
    result.elapsed_s = time.perf_counter() - started_at
    return result


def _unexpected_files(store: Store, files: Mapping[str, Any]) -> list[str]:
    set_folders = {name.rpartition("/")[0] for name in files} | {"index", ""}
    unexpected = []
    for folder in ("", *store.folders()):
        if folder in (RUN_FOLDER, "report"):
            continue
        names = [f"{folder}/{name}".lstrip("/") for name in store.names(folder)]
        if folder in set_folders:
            unexpected += [
                name for name in names
                if name not in files and name not in _OUTSIDE and not PARTIAL.fullmatch(name.rpartition("/")[2])
            ]  # fmt: skip  # partial files are deleted by the next prep
        else:
            unexpected.append(f"{folder}/")
    return sorted(unexpected)


def _in_processes(shards: Sequence[ShardFiles], workers: int) -> Iterator[tuple[ShardFiles, dict[str, str]]]:
    """Yield each shard with its faults as it completes. An interrupt ends the workers in the middle of a tar."""
    context = multiprocessing.get_context("forkserver")
    stop = context.Event()
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=init_worker, initargs=(stop,))
    try:
        shard_of = {pool.submit(check_shard, shard): shard for shard in shards}
        for future in as_completed(shard_of):
            yield shard_of.pop(future), future.result()
    except BrokenProcessPool:
        raise ResoluteError(
            "verify: got a worker process that died, expected it to finish; if it ran out of memory, use fewer "
            "workers (--workers)"
        ) from None
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


def to_rebuild(manifest: Mapping[str, Any], damaged: Set[str]) -> dict[str, list[str]]:
    """{resolution: shards} that `prep` rebuilds to repair the set; see `prep.shards.existing_set.ExistingSet.get`."""
    to_do: dict[str, list[str]] = {}
    for res in manifest["resolutions"]:
        for split, info in manifest["splits"].items():
            index = {f"index/{split}.npy", f"index/{split}.source.npy", f"index/{split}-{res}.npy", "rejects.jsonl"}
            for shard in info["shards"]:
                if not damaged.isdisjoint({*index, f"{res}/{shard}.tar", f"{res}/{shard}.idx"}):
                    to_do.setdefault(res, []).append(shard)
    return to_do


def _summary(store: Store, result: VerifyResult) -> str:
    """The closing lines, without a final newline."""
    manifest, damaged = result.manifest, result.damaged
    if manifest is None:
        return _damage_lines(store, damaged) + (
            "\nneither the manifest nor its copy is usable; to start over, "
            f"run {rerun_command(store, rebuild=True)}"
        )
    files = manifest["files"]
    if not damaged:
        samples = sum(split["samples"] for split in manifest["splits"].values())
        shards = sum(len(split["shards"]) for split in manifest["splits"].values())
        gigabytes = sum(info["bytes"] for info in files.values()) / 1e9
        return (
            f"{store.where}: sound, {samples} samples, {len(manifest['resolutions'])} resolutions, "
            f"{shards} shards, {gigabytes:.3g} GB, {result.elapsed_s:.1f} s"
        )
    text = _damage_lines(store, damaged)
    for res, shards_of in to_rebuild(manifest, set(damaged)).items():
        text += f"\n  to rebuild at {res} px: {_first_names(shards_of)}"
    return text + f"\nrun {rerun_command(store)}: it rebuilds only the damaged shards"


def _damage_lines(store: Store, damaged: Mapping[str, str]) -> str:
    message = [f"{store.where}: damaged, {len(damaged)} file{'s' * (len(damaged) > 1)}"]
    return "\n".join(message + [f"  {name}: {what}" for name, what in damaged.items()])


def _first_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more


def _write_damaged_list(store: Store, result: VerifyResult) -> None:
    """Write `damaged.json`, which the next `prep` repairs from; delete it if the set is sound."""
    try:
        if result.damaged:
            store.write(DAMAGED, (json.dumps(list(result.damaged), indent=1) + "\n").encode())
        elif store.size(DAMAGED) is not None:
            store.remove(DAMAGED)
    except ResoluteError as error:
        raise ResoluteError(f"{error}; prep repairs what {DAMAGED} lists: run verify again first") from None


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m prep.verify",
        description="Hash every file of a shard set and decode every JPEG in it.",
        epilog="Lists the damaged files, also in SHARDS/damaged.json, and the `make shards` command that rebuilds only "
        "those. Exit status: 0 sound, 1 damaged, 2 error (explained in one line on stderr), 130 interrupted.",
        allow_abbrev=False,
    )
    parser.add_argument("shards", metavar="SHARDS", help="folder of the set, or a URL such as s3://bucket/set")
    parser.add_argument("--workers", type=number(0, 4096), default=0, metavar="N",
        help="processes (default: one per CPU core)")  # fmt: skip
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status; a `ResoluteError` becomes one line on stderr and status 2."""
    try:
        args = _parser().parse_args(argv)
        workers = args.workers or available_cpus()
        store = open_store(args.shards)
        with tqdm(unit="B", unit_scale=True, disable=None, dynamic_ncols=True) as bar:

            def progress(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            result = verify(store, workers=workers, progress=progress)
        if result.unexpected:
            print(f"verify: ignored, not part of the set: {_first_names(result.unexpected)}", file=sys.stderr)
        # why: messages quote file names, which may hold bytes that are not valid text
        print(_summary(store, result).encode(errors="backslashreplace").decode())
        _write_damaged_list(store, result)
    except (ResoluteError, OSError) as error:
        message = from_os_error(error) if isinstance(error, OSError) else error
        print(strip_credentials(f"verify: {message}").encode(errors="backslashreplace").decode(), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("verify: interrupted", file=sys.stderr)
        return 130
    return 1 if result.damaged else 0


if __name__ == "__main__":
    from pipeline.cli import run_main

    run_main(main)
