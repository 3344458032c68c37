"""Deletes what earlier runs left in OUT: partial files, complete files that are not part of the set, or the set."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator

from prep.execute.thread_map import thread_map
from prep.storage.output import Store

from .existing_set import MANIFEST, PLAN
from .record import RECORDS, THREADS, record_names

__all__ = ["delete_orphans", "delete_partial", "start_over"]

_OF_A_SET = (
    r"\d+/((train|val)-\d{6}\.(tar|idx)|_info\.json)"
    r"|index/(train|val)((-\d+)?(\.crc)?\.npy|\.source\.npy|\.sources\.jsonl)"
    r"|records/(train|val)-\d{6}-\d+\.rec"
    r"|rejects\.jsonl|duplicates\.jsonl|_info\.json"
)
_SET_NAMES = re.compile(_OF_A_SET)
_PARTIAL_NAMES = re.compile(
    rf"{_OF_A_SET}|records/plan\.json|manifest\.json|damaged\.json|report\.html|source\.json|\.prep/.+"
)


def delete_partial(store: Store) -> None:
    """Delete partial files of killed runs. To be called only while no other run can be writing."""
    store.delete_partial(_PARTIAL_NAMES)


def delete_orphans(store: Store, keep: Collection[str]) -> None:
    """Delete prep's files, complete or partial, that are not in `keep` (names in `store`), and nothing else.

    Partial files may even stem from this run: from cluster nodes that were lost.
    """
    delete_partial(store)
    for name in _names(store):
        if name not in keep and _SET_NAMES.fullmatch(name):
            store.remove(name)
    for folder in store.folders():
        if folder.isdecimal():
            store.remove_folder(folder)


def start_over(store: Store) -> None:
    """Forget the set at OUT; its shards stay until they are replaced. A run killed here has to start over again."""
    store.write(PLAN, b"{}\n")
    store.remove(MANIFEST)  # why: it lists files that are about to be replaced
    remove: Callable[[str], None] = store.remove
    for _ in thread_map(remove, record_names(store), THREADS):
        pass
    for folder in (RECORDS, ""):
        store.sync(folder)


def _names(store: Store) -> Iterator[str]:
    for folder in ("", *store.folders()):
        for file in store.names(folder):
            yield f"{folder}/{file}".lstrip("/")
