"""What is done of an unfinished run, and is it still the same run?"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any

from pipeline.errors import ResoluteError
from pipeline.shards import shard_name

from .shard import Written, read_written
from .store import LOCK, WORK, Store

__all__ = ["Journal", "forget", "told_differences"]

_PLAN = f"{WORK}/plan.json"


class Journal:
    """Finished shards of a run that has no manifest yet, in OUT itself: they survive any kill.

    `plan` holds everything that decides the bytes of the set but its resolutions. Raises `ResoluteError` if
    the run that was begun in OUT has another plan, telling what differs.
    """

    def __init__(self, store: Store, plan: Mapping[str, Any]) -> None:
        self._store = store
        self._names = {name for name in store.names(WORK) if name.endswith(".npz")}
        self._adding = threading.Lock()
        try:
            begun = json.loads(store.read(_PLAN))
        except FileNotFoundError:
            begun = None
        except ValueError:
            begun = {}
        if begun is not None and begun != plan:
            raise ResoluteError(
                f"{store.where}: an unfinished run of another kind, {told_differences(begun, plan)}; undo that, "
                "start over with REBUILD=1 (--rebuild), or choose another OUT"
            )
        if begun is None:
            store.write(_PLAN, json.dumps(plan).encode())

    def get(self, split: str, number: int) -> Written | None:
        """What was written of a shard, or None. A damaged entry counts as none."""
        name = f"{shard_name(split, number)}.npz"
        if name not in self._names:
            return None
        try:
            return read_written(self._store.read(f"{WORK}/{name}"))
        except (ValueError, KeyError, OSError, EOFError):
            return None

    def add(self, written: Written) -> None:
        """Remember a shard whose files are safe; what was known of it at other resolutions stays."""
        with self._adding:
            written = written.with_earlier(self.get(written.split, written.number))
            self._store.write(f"{WORK}/{written.name}.npz", written.to_bytes())
            self._names.add(f"{written.name}.npz")


def forget(store: Store) -> None:
    """Delete a journal, its plan last, so that it never seems to belong to another plan."""
    names = [name for name in store.names(WORK) if f"{WORK}/{name}" not in (LOCK, _PLAN)]
    for name in [*(f"{WORK}/{name}" for name in names), _PLAN]:
        store.remove(name)


def told_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """What differs between two plans, in words: `quality: got 90, expected 80` and the like."""
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
