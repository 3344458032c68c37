"""The journal of an unfinished run: its plan, and one record per shard whose files are durable.

A record names its plan by hash; records of other plans are ignored. Each record is read from the store once, many at a
time, and then kept in a local file.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.dataset.shard_set import shard_name
from pipeline.errors import ResoluteError
from pipeline.storage.read_at import read_at
from prep.convert.codecs import check_codecs
from prep.execute.thread_map import thread_map
from prep.storage.hashed_file import write_errors
from prep.storage.output import LOCK, RUN_FOLDER, Store
from prep.storage.retry import retry

from .writer import ShardRecord, parse_shard_record

__all__ = ["THREADS", "Journal", "delete_journal", "describe_differences"]

THREADS = 16  # requests in flight, to hide the latency of a remote object store
_PLAN = f"{RUN_FOLDER}/plan.json"


class Journal:
    """Records of the shards finished by a run that has no manifest yet. They are stored in OUT and survive a kill.

    `plan` holds everything that decides the bytes of the set except its resolutions; its "codecs" may be missing, as in
    runs of older versions. `copy` is a new local file. Raises `ResoluteError`, listing the differences, if OUT holds an
    unfinished run with another plan.
    """

    def __init__(self, store: Store, plan: Mapping[str, Any], copy: Path) -> None:
        self._store = store
        self._hash = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()
        self._at: dict[str, tuple[int, int]] = {}  # record -> its offset in the copy, and its length
        self._adding = threading.Lock()
        names = [name for name in store.names(RUN_FOLDER) if name.endswith(".npz")]
        stored_plan = self._stored_plan()
        if stored_plan != plan and stored_plan is not None and names:  # why `names`: no records, nothing to lose
            _refuse_other_plan(store, stored_plan, plan)
        if stored_plan != plan:
            store.write(_PLAN, json.dumps(plan).encode())
        with write_errors(copy):
            self._copy = copy.open("w+b", buffering=0)
        try:
            for name, data in zip(names, thread_map(self._read, names, THREADS), strict=True):
                if data is not None:
                    self._append_to_copy(name, data)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._copy.close()

    def _stored_plan(self) -> dict[str, Any] | None:
        try:
            stored_plan: Any = json.loads(self._store.read(_PLAN))
        except FileNotFoundError:
            return None
        except ValueError:
            return {}
        return stored_plan if isinstance(stored_plan, dict) else {}

    def _read(self, name: str) -> bytes | None:
        """A record of this plan; None if it belongs to another plan or is damaged."""
        try:
            path = f"{RUN_FOLDER}/{name}"
            data = retry(f"{self._store.where}/{path}", partial(_read_or_none, self._store, path))
            if data is not None:
                parse_shard_record(data, self._hash)
        except ValueError:
            return None
        return data

    def _append_to_copy(self, name: str, data: bytes) -> None:
        with write_errors(str(self._copy.name)):
            at = self._copy.seek(0, 2)
            view = memoryview(data)
            while view:  # why: a raw write may be partial
                view = view[self._copy.write(view) :]
        self._at[name] = (at, len(data))

    def get(self, split: str, number: int) -> ShardRecord | None:
        """The record of a shard, or None."""
        return self._get(f"{shard_name(split, number)}.npz")

    def _get(self, name: str) -> ShardRecord | None:
        if name not in self._at:
            return None
        at, nbytes = self._at[name]
        return parse_shard_record(read_at(self._copy.fileno(), nbytes, at), self._hash)

    def __iter__(self) -> Iterator[ShardRecord]:
        for name in sorted(self._at):
            record = self._get(name)
            assert record is not None
            yield record

    def add(self, record: ShardRecord) -> None:
        """Record a shard whose files are durable, merged with its record at other resolutions. Thread-safe."""
        with self._adding:
            record = record.with_earlier(self.get(record.split, record.number))
            data = record.to_bytes(self._hash)
            self._store.write(f"{RUN_FOLDER}/{record.name}.npz", data)
            self._append_to_copy(f"{record.name}.npz", data)


def _read_or_none(store: Store, name: str) -> bytes | None:
    try:
        return store.read(name)
    except FileNotFoundError:
        return None


def _refuse_other_plan(store: Store, stored_plan: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
    """Raise `ResoluteError` if a run with the plan `stored_plan` cannot be resumed with `plan`."""
    if {**stored_plan, "codecs": None} != {**plan, "codecs": None}:
        raise ResoluteError(
            f"{store.where}: an unfinished run with other settings, {describe_differences(stored_plan, plan)}; undo "
            "the change, start over with REBUILD=1 (--rebuild), or choose another OUT"
        )
    if plan.get("codecs") is not None:
        check_codecs(stored_plan.get("codecs"), f"{store.where}: an unfinished run that")


def delete_journal(store: Store) -> None:
    """Delete a journal; its plan goes last, so that records are never attributed to another plan."""
    names = [f"{RUN_FOLDER}/{name}" for name in store.names(RUN_FOLDER)]
    remove: Callable[[str], None] = store.remove
    for _ in thread_map(remove, [name for name in names if name not in (LOCK, _PLAN)], THREADS):
        pass
    store.remove(_PLAN)


def describe_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """The differences between two plans, except codecs, in words: `quality: got 90, expected 80; …`."""
    differences = []
    for table in ("settings", "source"):
        before, after = old.get(table, {}), new.get(table, {})
        for name in sorted({*before, *after} - {"classes", "fingerprint"}):
            if before.get(name) != after.get(name):
                differences.append(f"{name}: got {_shorten(before.get(name))}, expected {_shorten(after.get(name))}")
    differences += _changed_classes(old.get("source", {}).get("classes", {}), new.get("source", {}).get("classes", {}))
    if not differences:
        differences = ["its format differs"]
    return "; ".join(differences)


def _changed_classes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Describe the classes that differ; both arguments map 'SPLIT CLASS' to [images, fingerprint]."""
    changed = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    differences = []
    for name in changed[:3]:
        old, new = before.get(name, [0])[0], after.get(name, [0])[0]
        what = f"{old} -> {new} images" if old != new else f"{new} images, other names or sizes"
        differences.append(f"the source has changed in {name} ({what})")
    if len(changed) > 3:
        differences.append(f"and in {len(changed) - 3} more classes")
    return differences


def _shorten(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 40 else text[:13] + '…"'
