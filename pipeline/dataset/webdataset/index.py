"""The index of tars that others made: all samples that can be used, found once and kept.

    FOLDER/NAMES-STATE/samples.npy   SAMPLE records, one a sample, in the order of the tars; samples.crc.npy
    FOLDER/NAMES-STATE/stored.npy    STORED records, `shard` the number of the tar; stored.crc.npy
    FOLDER/NAMES-STATE/rejects.jsonl what was left out, with the reason
    FOLDER/NAMES-STATE/meta.json     written last, by whoever holds its lock; hashes of the others

NAMES is a hash of the tars' names and of what was looked for in them, STATE of their sizes and times. FOLDER is
`.resolute-index` beside the tars, or in the user's cache folder where that cannot be written.
"""

from __future__ import annotations

import hashlib
import io
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

from pipeline.dataset.index_array import Records, checksums, checksums_name, read_checksums
from pipeline.dataset.shard_set import SAMPLE, STORED, manifest_bytes
from pipeline.errors import Missing, ResoluteError, StorageError
from pipeline.storage.disk_cache import CacheSettings
from pipeline.storage.exclusive_writer import exclusive_writer, cache_error
from pipeline.storage.files import DaemonPool, Files, retry_local

from .sample_check import CheckedSamples, SampleFields, look
from .tar_reader import Sample, samples

__all__ = ["REPAIR", "ForeignIndex", "open_index"]

REPAIR = "fetch the tar again, or index it as it is: `python -m pipeline index SOURCE`"
_FORMAT, _VERSION = "resolute-foreign-index", 1
_FOLDER = ".resolute-index"
_ARRAYS = {"samples": SAMPLE, "stored": STORED}
_TASK_SAMPLES = 16
_TELL_S = 30.0
_AHEAD_BYTES = 64 << 20  # of a remote tar, fetched before they are looked at


class _Records(Records):
    repair = "remove the folder it is in: it is made again"


@dataclass(frozen=True, kw_only=True)
class ForeignIndex:
    """All usable samples of some tars. `samples` (N,) SAMPLE: `key` is the sample's number in the source, rejected
    ones counted, and `fold` 32 bits of a hash of its key. `stored` (N,) STORED: `shard` is the number of its tar.
    """

    folder: Path
    hash: str  # of names, bytes and labels of all samples, 12 hex digits; not of the tars' times
    samples: Records
    stored: Records
    states: tuple[tuple[int, str], ...]  # of each tar, its `Files.identity`
    counts: tuple[int, ...]  # samples of each tar
    classes: int  # the largest label + 1
    labels: int  # different ones
    rejected: int


def open_index(
    files: Files, names: Sequence[str], fields: SampleFields, *, threads: int, folder: Path | None,
    log: Callable[[str], None],
) -> ForeignIndex:  # fmt: skip
    """The index of the tars `names`: the one that is there if it fits, else a new one.

    One process makes it and the others wait. Raises `ResoluteError` for a tar that is not there or damaged, or if
    no sample can be used.
    """
    states = _states(files, names)
    which = _hash([_VERSION, list(names), fields.image, fields.label])
    name = f"{which}-{_hash(states)}"
    places = [folder] if folder is not None else _places(files)
    for place in places:
        if (found := _opened(place / name, log)) is not None:
            return found
    place = next((place for place in places if _writable(place)), places[-1])
    meta = place / name / "meta.json"
    if (old := _others(place, which, name)) and not meta.exists():
        log(f"{files.root}: the tars changed since they were indexed; indexing them again")
    while True:
        with exclusive_writer(meta, float("inf"), None) as part:
            if (found := _opened(place / name, log)) is not None:
                return found
            if part is not None:
                meta.unlink(missing_ok=True)  # damaged
                try:
                    made = _made(files, names, fields, meta.parent, threads, log)
                    _write_all(part, manifest_bytes({**made, "states": states}))
                    os.rename(f"{meta}.part", meta)  # noqa: PTH104
                except ResoluteError:
                    shutil.rmtree(meta.parent, ignore_errors=True)  # why: these tars will never have an index
                    with suppress(OSError):
                        place.rmdir()
                    raise
                except OSError as error:
                    raise cache_error(meta, error) from None
        for path in old:
            shutil.rmtree(path, ignore_errors=True)  # why: who still reads it has it mapped


def _states(files: Files, names: Sequence[str]) -> list[tuple[int, str]]:
    with DaemonPool(32 if files.remote else 4, name="resolute-stat", files=files) as pool:
        found = [future.result() for future in [pool.submit(partial(files.identity, name)) for name in names]]
    states = [state for state in found if state is not None]
    if len(states) < len(names):
        raise ResoluteError(f"{files.where(names[found.index(None)])}: not found, expected a tar; correct the source")
    return states


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


def _places(files: Files) -> list[Path]:
    """Folders where an index may be, the best first."""
    beside = [] if files.remote else [Path(files.where("")) / _FOLDER]
    root = files.root if files.remote else str(beside[0].absolute())
    return [*beside, CacheSettings().folder / "foreign" / _hash(root)]


def _writable(place: Path) -> bool:
    there = next((path for path in (place, *place.parents) if path.exists()), place)
    return os.access(there, os.W_OK)


def _others(place: Path, which: str, name: str) -> list[Path]:
    """Indexes of the same tars in another state."""
    return [path for path in place.glob(f"{which}-*") if path.name != name]


def _opened(folder: Path, log: Callable[[str], None]) -> ForeignIndex | None:
    """The index in a folder; None if there is none for us to read, or, which `log` gets, none that is sound.

    Raises `StorageError` if the disk does not deliver it: a new one takes hours for a large set.
    """
    if not os.access(folder, os.R_OK | os.X_OK):
        return None
    try:
        text = retry_local((folder / "meta.json").read_bytes, folder)
        meta = json.loads(text)
        if manifest_bytes(meta) != text:
            raise ValueError("other bytes than its own hash says")
        records = {}
        for name, dtype in _ARRAYS.items():
            path = folder / f"{name}.npy"
            crcs = read_checksums(folder / checksums_name(path.name), meta["sha256_of"][name], str(path))
            records[name] = _Records(path, crcs, dtype)
    except FileNotFoundError:
        return None
    except StorageError:
        raise
    except (ValueError, KeyError, TypeError, ResoluteError) as error:
        log(f"{folder}: a damaged index ({error}); making it again")
        return None
    return ForeignIndex(
        folder=folder, hash=meta["hash"], counts=tuple(meta["counts"]), classes=meta["classes"], labels=meta["labels"],
        rejected=meta["rejected"], states=tuple((nbytes, state) for nbytes, state in meta["states"]), **records,
    )  # fmt: skip


def _made(
    files: Files, names: Sequence[str], fields: SampleFields, folder: Path, threads: int, log: Callable[[str], None]
) -> dict[str, Any]:
    """Look at all samples, write all but the meta, which is returned."""
    log(f"{files.root}: indexing {len(names)} tars, once: every image is decoded")
    looks: list[CheckedSamples] = []
    began = told = time.monotonic()
    with DaemonPool(threads, name="resolute-index", files=files) as pool:
        for done in _looked(files, names, fields, pool, 4 * threads):
            looks.append(done)
            if time.monotonic() - told > _TELL_S:
                told, count = time.monotonic(), sum(len(one.samples) for one in looks)
                log(f"  tar {done.tar + 1} of {len(names)}, {count} images, {count / (told - began):.0f} images/s")
    rejects = [reject for one in looks for reject in one.rejects]
    reasons = Counter(reject["reason"].partition(":")[0] for reject in rejects)
    reason = ", ".join(f"{count} {text}" for text, count in reasons.most_common(5))
    arrays = {name: np.concatenate([np.empty(0, dtype), *(getattr(one, name) for one in looks)])
              for name, dtype in _ARRAYS.items()}  # fmt: skip
    if not len(arrays["samples"]):
        raise ResoluteError(
            f"{files.root}: no sample can be used in {len(names)} tars, got {reason or 'no files'}, expected images "
            f"({', '.join(fields.image)}) with a label ({', '.join(fields.label)}); name yours with image= and label="
        )
    try:
        hashes = {name: _write_array(folder / f"{name}.npy", array) for name, array in arrays.items()}
        lines = "".join(json.dumps(reject) + "\n" for reject in rejects)
        (folder / "rejects.jsonl").write_text(lines)
    except OSError as error:
        raise cache_error(folder, error) from None
    if rejects:
        log(f"  left out {len(rejects)} of {len(rejects) + len(arrays['samples'])}: {reason}; see "
             f"{folder / 'rejects.jsonl'}")  # fmt: skip
    used = np.unique(arrays["samples"]["label"])
    counts = np.bincount(arrays["stored"]["shard"], minlength=len(names))
    return {
        "format": _FORMAT, "version": _VERSION, "tars": list(names), "counts": counts.tolist(),
        "classes": int(used[-1]) + 1, "labels": len(used), "rejected": len(rejects), "sha256_of": hashes,
        "hash": _hash([list(names), hashes]),
    }  # fmt: skip


def _looked(files: Files, names: Sequence[str], fields: SampleFields, pool: DaemonPool, most: int) -> Iterator[CheckedSamples]:
    """What became of all samples, in their order, a few at a time; `most` tasks run ahead."""
    tasks: deque[Future[CheckedSamples]] = deque()
    number = 0  # of a sample in the source
    for tar, name in enumerate(names):
        for some in _some(_walk(files, name)):
            tasks.append(pool.submit(partial(look, files, name, tar, some, number, fields)))
            number += len(some)
            if len(tasks) > most:
                yield tasks.popleft().result()
    while tasks:
        yield tasks.popleft().result()


def _some(every: Iterator[Sample]) -> Iterator[list[Sample]]:
    some: list[Sample] = []
    for sample in every:
        some.append(sample)
        if len(some) == _TASK_SAMPLES:
            yield some
            some = []
    if some:
        yield some


def _walk(files: Files, name: str) -> Iterator[Sample]:
    wished = 0

    def read(offset: int, nbytes: int) -> bytes:
        nonlocal wished
        if files.chunk_bytes and offset + _AHEAD_BYTES // 2 > wished:
            files.prefetch(name, offset, _AHEAD_BYTES)
            wished = offset + _AHEAD_BYTES
        return files.read(name, offset, nbytes)

    if (nbytes := files.size(name)) is None:
        raise Missing(f"{files.where(name)}: not found, expected the tar that was there a moment ago; put it back")
    return samples(read, nbytes, files.where(name))


def _write_array(path: Path, array: NDArray[Any]) -> str:
    """Write an index array and its checksums; returns the SHA-256 of the latter."""
    out = io.BytesIO()
    np.save(out, array)
    beside = io.BytesIO()
    np.save(beside, checksums([out.getvalue()]))
    for where, data in ((path, out), (path.with_name(checksums_name(path.name)), beside)):
        with suppress(FileNotFoundError):
            where.unlink()  # why: who has a damaged one mapped must not see it change
        with where.open("xb") as file:
            file.write(data.getbuffer())
            file.flush()
            os.fsync(file.fileno())
    return hashlib.sha256(beside.getvalue()).hexdigest()


def _write_all(handle: int, data: bytes) -> None:
    while data:
        data = data[os.write(handle, data) :]
    os.fsync(handle)
