"""Deletes what earlier runs left in OUT: partial files, and complete files that are not part of the set."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from prep.storage.output import Store

__all__ = ["delete_orphans", "delete_partial"]

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


def _names(store: Store) -> Iterator[str]:
    for folder in ("", *store.folders()):
        for file in store.names(folder):
            yield f"{folder}/{file}".lstrip("/")
