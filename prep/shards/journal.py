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
from prep.storage.hashed_file import writing
from prep.storage.output import LOCK, WORK, Store
from prep.storage.retry import retry

from .writer import Written, read_written

__all__ = ["THREADS", "Journal", "forget", "told_differences"]

THREADS = 16  # requests in flight: what an object store far away is fast with
_PLAN = f"{WORK}/plan.json"


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
        names = [name for name in store.names(WORK) if name.endswith(".npz")]
        begun = self._begun()
        if begun != plan and begun is not None and names:  # why: without a record there is nothing to protect
            _refuse_another(store, begun, plan)
        if begun != plan:
            store.write(_PLAN, json.dumps(plan).encode())
        with writing(copy):
            self._copy = copy.open("w+b", buffering=0)
        try:
            for name, data in zip(names, thread_map(self._read, names, THREADS), strict=True):
                if data is not None:
                    self._keep(name, data)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._copy.close()

    def _begun(self) -> dict[str, Any] | None:
        try:
            begun: Any = json.loads(self._store.read(_PLAN))
        except FileNotFoundError:
            return None
        except ValueError:
            return {}
        return begun if isinstance(begun, dict) else {}

    def _read(self, name: str) -> bytes | None:
        """A record of this plan; None for any other, and for one that is damaged."""
        try:
            data = retry(f"{self._store.where}/{WORK}/{name}", partial(_read_if_there, self._store, f"{WORK}/{name}"))
            if data is not None:
                read_written(data, self._hash)
        except ValueError:
            return None
        return data

    def _keep(self, name: str, data: bytes) -> None:
        with writing(str(self._copy.name)):
            at = self._copy.seek(0, 2)
            view = memoryview(data)
            while view:  # why: a raw write may take only a part
                view = view[self._copy.write(view) :]
        self._at[name] = (at, len(data))

    def get(self, split: str, number: int) -> Written | None:
        """What was written of a shard, or None."""
        return self._get(f"{shard_name(split, number)}.npz")

    def _get(self, name: str) -> Written | None:
        if name not in self._at:
            return None
        at, nbytes = self._at[name]
        return read_written(read_at(self._copy.fileno(), nbytes, at), self._hash)

    def __iter__(self) -> Iterator[Written]:
        for name in sorted(self._at):
            written = self._get(name)
            assert written is not None
            yield written

    def add(self, written: Written) -> None:
        """Remember a shard whose files are safe; what was known of it at other resolutions stays. Thread-safe."""
        with self._adding:
            written = written.with_earlier(self.get(written.split, written.number))
            data = written.to_bytes(self._hash)
            self._store.write(f"{WORK}/{written.name}.npz", data)
            self._keep(f"{written.name}.npz", data)


def _read_if_there(store: Store, name: str) -> bytes | None:
    try:
        return store.read(name)
    except FileNotFoundError:
        return None


def _refuse_another(store: Store, begun: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
    """Raises `ResoluteError` if a run with the plan `begun` cannot continue with `plan`."""
    if {**begun, "codecs": None} != {**plan, "codecs": None}:
        raise ResoluteError(
            f"{store.where}: an unfinished run of another kind, {told_differences(begun, plan)}; undo that, "
            "start over with REBUILD=1 (--rebuild), or choose another OUT"
        )
    if plan.get("codecs") is not None:
        check_codecs(begun.get("codecs"), f"{store.where}: an unfinished run that")


def forget(store: Store) -> None:
    """Delete a journal, its plan last, so that it never seems to belong to another plan."""
    names = [f"{WORK}/{name}" for name in store.names(WORK)]
    remove: Callable[[str], None] = store.remove
    for _ in thread_map(remove, [name for name in names if name not in (LOCK, _PLAN)], THREADS):
        pass
    store.remove(_PLAN)


def told_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """What differs between two plans but for their codecs, in words: `quality: got 90, expected 80` and the like."""
    told = []
    for table in ("settings", "source"):
        before, after = old.get(table, {}), new.get(table, {})
        for name in sorted({*before, *after} - {"classes", "fingerprint"}):
            if before.get(name) != after.get(name):
                told.append(f"{name}: got {_short(before.get(name))}, expected {_short(after.get(name))}")
    told += _changed_classes(old.get("source", {}).get("classes", {}), new.get("source", {}).get("classes", {}))
    if not told:
        told = ["its format differs"]
    return "; ".join(told)


def _changed_classes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Classes are told as 'SPLIT CLASS' -> [images, fingerprint]."""
    changed = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    told = []
    for name in changed[:3]:
        old, new = before.get(name, [0])[0], after.get(name, [0])[0]
        what = f"{old} -> {new} images" if old != new else f"{new} images, other names or sizes"
        told.append(f"the source has changed in {name} ({what})")
    if len(changed) > 3:
        told.append(f"and in {len(changed) - 3} more classes")
    return told


def _short(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 40 else text[:13] + '…"'
