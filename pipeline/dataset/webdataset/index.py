"""The persistent index of third-party tars: all usable samples, checked once and stored on disk.

    FOLDER/NAMES-STATE/samples.npy   FOREIGN_SAMPLE records, one per sample, in tar order; samples.crc.npy
    FOLDER/NAMES-STATE/stored.npy    STORED records, `shard` is the number of the tar; stored.crc.npy
    FOLDER/NAMES-STATE/rejects.jsonl rejected samples with the reason
    FOLDER/NAMES-STATE/meta.json     hashes of the other files; written last, by the process that holds its lock

NAMES hashes the tars' names, the extensions of images and labels and the kind of target, STATE the tars' sizes and
modification times.
FOLDER is `.resolute-index` beside the tars, or the user's cache folder if that cannot be written.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resolute.errors import Missing, ResoluteError, StorageError
from resolute.files import atomic_write, delete_partial
from resolute.pipeline.dataset.format import STORED, manifest_bytes
from resolute.pipeline.dataset.index_array import Records, checksums, checksums_name, read_checksums
from resolute.pipeline.dataset.target import CLASS, Target
from resolute.pipeline.storage.base import Files
from resolute.pipeline.storage.disk_cache import CacheSettings, cache_error, exclusive_writer, write_at
from resolute.pipeline.storage.local import retry_local
from resolute.pipeline.storage.threads import DaemonPool

from .sample_check import FOREIGN_SAMPLE, CheckedSamples, SampleFields, check_samples
from .tar_reader import Sample, samples

__all__ = ["REPAIR", "ForeignIndex", "open_index"]

REPAIR = "fetch the tar again, or index it as it is: `python -m resolute.pipeline index SOURCE`"
_FORMAT, _VERSION = "resolute-foreign-index", 3
_FOLDER = ".resolute-index"
_TASK_SAMPLES = 16
_LOG_INTERVAL_S = 30.0
_AHEAD_BYTES = 64 << 20  # of a remote tar, prefetched


class _Records(Records):
    repair = "remove the folder it is in: it is made again"


@dataclass(frozen=True, kw_only=True)
class ForeignIndex:
    """All usable samples of some tars.

    `samples` (N,) FOREIGN_SAMPLE, or its like with other targets: `key` is the sample's number in the source (counting
    rejected ones). `stored` (N,) STORED: `shard` is the number of its tar.
    """

    folder: Path
    hash: str  # 12 hex digits over names, bytes and labels of all samples; not over modification times
    samples: Records
    stored: Records
    states: tuple[tuple[int, str], ...]  # `Files.identity` of each tar
    counts: tuple[int, ...]  # usable samples of each tar
    classes: int  # largest label + 1, or number of values
    labels: int  # distinct labels; 0 for values
    rejected: int  # samples


def open_index(
    files: Files, names: Sequence[str], fields: SampleFields, *, threads: int, folder: Path | None,
    log: Callable[[str], None],
) -> ForeignIndex:  # fmt: skip
    """Open the index of the tars `names`, or build it if there is none for their current state.

    One process builds it while others wait. `folder` None: beside the tars, or the cache folder. `log` receives
    progress lines. Raises `ResoluteError` if a tar is missing or damaged or no sample is usable.
    """
    states = _states(files, names)
    target = [] if fields.target == CLASS else [fields.target, fields.classes]
    names_hash = _hash([_VERSION, list(names), fields.image, fields.label, *target])
    name = f"{names_hash}-{_hash(states)}"
    folders = [folder] if folder is not None else _index_folders(files)
    for parent in folders:
        if (index := _open(parent / name, log)) is not None:
            return index
    parent = next((path for path in folders if _writable(path)), folders[-1])
    meta = parent / name / "meta.json"
    if (outdated := _outdated(parent, names_hash, name)) and not meta.exists():
        log(f"{files.root}: the tars changed since they were indexed; indexing them again")
    while True:
        with exclusive_writer(meta, float("inf"), None) as part:
            if (index := _open(parent / name, log)) is not None:
                return index
            if part is not None:
                meta.unlink(missing_ok=True)  # damaged
                delete_partial(meta.parent)
                try:
                    entries = _build(files, names, fields, meta.parent, threads, log)
                    write_at(part, manifest_bytes({**entries, "states": states}), 0)
                    os.fsync(part)
                    os.rename(f"{meta}.part", meta)  # noqa: PTH104
                except ResoluteError:
                    shutil.rmtree(meta.parent, ignore_errors=True)  # why: an index of these tars will never exist
                    with suppress(OSError):
                        parent.rmdir()
                    raise
                except OSError as error:
                    raise cache_error(meta, error) from None
        for path in outdated:
            shutil.rmtree(path, ignore_errors=True)  # safe: processes that still use it have it mapped


def _states(files: Files, names: Sequence[str]) -> list[tuple[int, str]]:
    with DaemonPool(32 if files.remote else 4, name="resolute-stat", files=files) as pool:
        identities = [future.result() for future in [pool.submit(partial(files.identity, name)) for name in names]]
    states = [state for state in identities if state is not None]
    if len(states) < len(names):
        missing = files.where(names[identities.index(None)])
        raise ResoluteError(f"{missing}: not found, expected a tar; correct the source")
    return states


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


def _index_folders(files: Files) -> list[Path]:
    """Folders where an index may be, in order of preference."""
    local = [] if files.remote else [Path(files.where("")) / _FOLDER]
    root = files.root if files.remote else str(local[0].absolute())
    return [*local, CacheSettings().folder / "foreign" / _hash(root)]


def _writable(place: Path) -> bool:
    existing = next((path for path in (place, *place.parents) if path.exists()), place)
    return os.access(existing, os.W_OK)


def _outdated(parent: Path, names_hash: str, name: str) -> list[Path]:
    """Indexes of the same tars in another state."""
    return [path for path in parent.glob(f"{names_hash}-*") if path.name != name]


def _open(folder: Path, log: Callable[[str], None]) -> ForeignIndex | None:
    """Open the index in `folder`; None if there is none, it is not readable, or it is damaged (which is logged).

    Raises `StorageError` if the disk fails: rebuilding a large index takes hours.
    """
    if not os.access(folder, os.R_OK | os.X_OK):
        return None
    try:
        text = retry_local((folder / "meta.json").read_bytes, folder)
        meta = json.loads(text)
        if manifest_bytes(meta) != text:
            raise ValueError("its bytes do not match its own hash")
        records = {}
        target = Target(kind=meta.get("target", CLASS), names=("",) * meta["classes"])
        for name, dtype in (("samples", _sample_dtype(target)), ("stored", STORED)):
            path = folder / f"{name}.npy"
            crcs = read_checksums(folder / checksums_name(path.name), meta["sha256_of"][name], str(path))
            records[name] = _Records(path, crcs, dtype)
    except FileNotFoundError:
        return None
    except StorageError:
        raise
    except (ValueError, KeyError, TypeError, ResoluteError) as error:
        log(f"{folder}: the index is damaged ({error}); indexing again")
        return None
    return ForeignIndex(
        folder=folder, hash=meta["hash"], counts=tuple(meta["counts"]), classes=meta["classes"], labels=meta["labels"],
        rejected=meta["rejected"], states=tuple((nbytes, state) for nbytes, state in meta["states"]), **records,
    )  # fmt: skip


def _build(
    files: Files, names: Sequence[str], fields: SampleFields, folder: Path, threads: int, log: Callable[[str], None]
) -> dict[str, Any]:
    """Check all samples and write all files of the index except meta.json, whose entries are returned."""
    log(f"{files.root}: indexing {len(names)} tars; every image is decoded once")
    checked: list[CheckedSamples] = []
    began = logged = time.monotonic()
    with DaemonPool(threads, name="resolute-index", files=files) as pool:
        for group in _check_all(files, names, fields, pool, 4 * threads):
            checked.append(group)
            if time.monotonic() - logged > _LOG_INTERVAL_S:
                logged, count = time.monotonic(), sum(len(done.samples) for done in checked)
                log(f"  tar {group.tar + 1} of {len(names)}, {count} images, {count / (logged - began):.0f} images/s")
    rejects = [reject for group in checked for reject in group.rejects]
    reasons = Counter(reject["reason"].partition(":")[0] for reject in rejects)
    reason = ", ".join(f"{count} {text}" for text, count in reasons.most_common(5))
    arrays = {name: np.concatenate([np.empty(0, dtype), *(getattr(group, name) for group in checked)])
              for name, dtype in (("samples", FOREIGN_SAMPLE), ("stored", STORED))}  # fmt: skip
    if not len(arrays["samples"]):
        kind = f", target={fields.target}" if fields.target != CLASS else " (several labels, numbers: target=)"
        raise ResoluteError(
            f"{files.root}: no usable sample in {len(names)} tars, got {reason or 'no files'}, expected images "
            f"({', '.join(fields.image)}) with a label ({', '.join(fields.label)}{kind}); name yours with image= and "
            "label="
        )
    if fields.target != CLASS:
        targets = [row for group in checked for row in group.targets]
        target = _target(fields, targets, where=files.root)
        arrays["samples"] = _with_targets(arrays["samples"], target, targets)
    try:
        hashes = {name: _write_array(folder / f"{name}.npy", array) for name, array in arrays.items()}
        lines = "".join(json.dumps(reject) + "\n" for reject in rejects)
        (folder / "rejects.jsonl").write_text(lines)
    except OSError as error:
        raise cache_error(folder, error) from None
    if rejects:
        log(f"  left out {len(rejects)} of {len(rejects) + len(arrays['samples'])}: {reason}; see "
             f"{folder / 'rejects.jsonl'}")  # fmt: skip
    if fields.target == CLASS:
        used = np.unique(arrays["samples"]["label"])
        about: dict[str, Any] = {"classes": int(used[-1]) + 1, "labels": len(used)}
    else:
        counted = len({c for row in targets for c in row}) if fields.target == "labels" else 0
        about = {"classes": len(target), "labels": counted, "target": fields.target}
    counts = np.bincount(arrays["stored"]["shard"], minlength=len(names))
    return {
        "format": _FORMAT, "version": _VERSION, "tars": list(names), "counts": counts.tolist(), **about,
        "rejected": len(rejects), "sha256_of": hashes, "hash": _hash([list(names), hashes]),
    }  # fmt: skip


def _target(fields: SampleFields, targets: Sequence[tuple[float, ...]], *, where: str) -> Target:
    """A target with as many classes as the largest label asks for, or as many values as each sample has."""
    if fields.target == "labels":
        count = max((int(c) + 1 for row in targets for c in row), default=0)
        if not count:
            raise ResoluteError(f"{where}: got no label in any sample, expected some; correct the tars or target=")
        return Target(kind="labels", names=("",) * max(count, len(fields.classes)))
    lengths = sorted({len(row) for row in targets})
    if len(lengths) > 1:
        raise ResoluteError(
            f"{where}: got samples with {lengths[0]} and with {lengths[-1]} values, expected equally many in all; "
            "correct the tars"
        )
    return Target(kind="values", names=("",) * lengths[0])


def _sample_dtype(target: Target) -> np.dtype[Any]:
    return FOREIGN_SAMPLE if target.kind == CLASS else np.dtype([*target.sample_dtype.descr, ("hash", "<u4")])


def _with_targets(
    samples: NDArray[np.void], target: Target, targets: Sequence[tuple[float, ...]]
) -> NDArray[np.void]:
    """FOREIGN_SAMPLE records (N,) with other targets in the place of their labels."""
    encoded = target.encode(samples["key"].tolist(), targets)
    records = np.empty(len(samples), _sample_dtype(target))
    for name in encoded.dtype.names or ():
        records[name] = encoded[name]
    records["hash"] = samples["hash"]
    return records


def _check_all(
    files: Files, names: Sequence[str], fields: SampleFields, pool: DaemonPool, max_pending: int
) -> Iterator[CheckedSamples]:
    """Check all samples in groups, yielded in order; at most `max_pending` groups are submitted ahead."""
    tasks: deque[Future[CheckedSamples]] = deque()
    number = 0  # of the sample in the source
    for tar, name in enumerate(names):
        for group in _groups(_walk(files, name)):
            tasks.append(pool.submit(partial(check_samples, files, name, tar, group, number, fields)))
            number += len(group)
            if len(tasks) > max_pending:
                yield tasks.popleft().result()
    while tasks:
        yield tasks.popleft().result()


def _groups(tar: Iterator[Sample]) -> Iterator[list[Sample]]:
    while group := list(itertools.islice(tar, _TASK_SAMPLES)):
        yield group


def _walk(files: Files, name: str) -> Iterator[Sample]:
    prefetched = 0

    def read(offset: int, nbytes: int) -> bytes:
        nonlocal prefetched
        if files.chunk_bytes and offset + _AHEAD_BYTES // 2 > prefetched:
            files.prefetch(name, offset, _AHEAD_BYTES)
            prefetched = offset + _AHEAD_BYTES
        return files.read(name, offset, nbytes)

    if (nbytes := files.size(name)) is None:
        raise Missing(f"{files.where(name)}: not found, expected the tar that was there a moment ago; put it back")
    return samples(read, nbytes, files.where(name))


def _write_array(path: Path, array: NDArray[Any]) -> str:
    """Write an index array and its checksum file; returns the SHA-256 of the latter."""
    out, crcs = io.BytesIO(), io.BytesIO()
    np.save(out, array)
    np.save(crcs, checksums([out.getvalue()]))
    atomic_write(path, out.getvalue())  # a process that has a damaged file mapped does not see it change
    atomic_write(path.with_name(checksums_name(path.name)), crcs.getvalue())
    return hashlib.sha256(crcs.getvalue()).hexdigest()
