"""The journal of an unfinished run: its plan, and a record of each shard whose files are safe.

A record names the plan it belongs to, by hash; any other is not trusted. Each is read from the store once, many at a
time, and kept in a file on this machine from then on.
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

THREADS = 16  # requests in flight: what an object store far away is fast with
_PLAN = f"{RUN_FOLDER}/plan.json"


class Journal:
    """Finished shards of a run that has no manifest yet, in OUT itself: they survive any kill.

    `plan` holds everything that decides the bytes of the set but its resolutions; its "codecs" may be missing, as in
    runs of older versions. `copy` is a new file on this machine. Raises `ResoluteError` if the run that was begun in
    OUT has another plan, saying what differs.
    """

    def __init__(self, store: Store, plan: Mapping[str, Any], copy: Path) -> None:
        self._store = store
        self._hash = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()
        self._at: dict[str, tuple[int, int]] = {}  # record -> its first byte in the copy, and its length
        self._adding = threading.Lock()
        names = [name for name in store.names(RUN_FOLDER) if name.endswith(".npz")]
        stored_plan = self._stored_plan()
        if stored_plan != plan and stored_plan is not None and names:  # why: without a record there is nothing to protect
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
        """A record of this plan; None for any other, and for one that is damaged."""
        try:
            data = retry(f"{self._store.where}/{RUN_FOLDER}/{name}", partial(_read_or_none, self._store, f"{RUN_FOLDER}/{name}"))
            if data is not None:
                parse_shard_record(data, self._hash)
        except ValueError:
            return None
        return data

    def _append_to_copy(self, name: str, data: bytes) -> None:
        with write_errors(str(self._copy.name)):
            at = self._copy.seek(0, 2)
            view = memoryview(data)
            while view:  # why: a raw write may take only a part
                view = view[self._copy.write(view) :]
        self._at[name] = (at, len(data))

    def get(self, split: str, number: int) -> ShardRecord | None:
        """What was written of a shard, or None."""
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
        """Remember a shard whose files are safe; what was known of it at other resolutions stays. Thread-safe."""
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
    """Raises `ResoluteError` if a run with the plan `begun` cannot continue with `plan`."""
    if {**stored_plan, "codecs": None} != {**plan, "codecs": None}:
        raise ResoluteError(
            f"{store.where}: an unfinished run of another kind, {describe_differences(stored_plan, plan)}; undo that, "
            "start over with REBUILD=1 (--rebuild), or choose another OUT"
        )
    if plan.get("codecs") is not None:
        check_codecs(stored_plan.get("codecs"), f"{store.where}: an unfinished run that")


def delete_journal(store: Store) -> None:
    """Delete a journal, its plan last, so that it never seems to belong to another plan."""
    names = [f"{RUN_FOLDER}/{name}" for name in store.names(RUN_FOLDER)]
    remove: Callable[[str], None] = store.remove
    for _ in thread_map(remove, [name for name in names if name not in (LOCK, _PLAN)], THREADS):
        pass
    store.remove(_PLAN)


def describe_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """What differs between two plans but for their codecs, in words: `quality: got 90, expected 80` and the like."""
    differences = []
    for table in ("settings", "source"):
        before, after = old.get(table, {}), new.get(table, {})
        for name in sorted({*before, *after} - {"classes", "fingerprint"}):
            if before.get(name) != after.get(name):
                differences.append(f"{name}: got {_short(before.get(name))}, expected {_short(after.get(name))}")
    differences += _changed_classes(old.get("source", {}).get("classes", {}), new.get("source", {}).get("classes", {}))
    if not differences:
        differences = ["its format differs"]
    return "; ".join(differences)


def _changed_classes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Classes are told as 'SPLIT CLASS' -> [images, fingerprint]."""
    changed = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    differences = []
    for name in changed[:3]:
        old, new = before.get(name, [0])[0], after.get(name, [0])[0]
        what = f"{old} -> {new} images" if old != new else f"{new} images, other names or sizes"
        differences.append(f"the source has changed in {name} ({what})")
    if len(changed) > 3:
        differences.append(f"and in {len(changed) - 3} more classes")
    return differences


def _short(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 40 else text[:13] + '…"'
