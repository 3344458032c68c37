"""Deletes files of earlier runs in OUT: partial files, complete files that are not part of the set, or the set."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

from resolute.pipeline.dataset.manifest import MANIFEST
from resolute.prep.storage.bulk import remove_many
from resolute.prep.storage.output import Store
from resolute.prep.storage.thread_map import thread_map

from .existing_set import CHANGES
from .generation import spec_name
from .record import RECORDS, record_names

__all__ = ["delete_orphans", "delete_partial", "delete_partial_shards", "start_over"]

_OF_A_SET = (
    r"\d+/((train|val)-\d{6}\.(tar|idx)|_info\.json)"
    r"|index/(train|val)((-\d+)?(\.g\d{3,})?(\.crc)?\.npy|(\.g\d{3,})?\.(source\.npy|sources\.jsonl)"
    r"|groups(\.g\d{3,})?\.npy)"
    r"|records/(train|val)-\d{6}-\d+\.rec|records/(plan-\d{3,}\.json|photos(-\d{3,})?\.parquet)"
    r"|manifest\.g\d{3,}\.[\d-]+\.json|(rejects|duplicates|near_copies)(\.g\d{3,})?\.jsonl|near_copies(\.g\d{3,})?\.csv|_info\.json"
)
_SET_NAMES = re.compile(_OF_A_SET)
_OF_A_SHARD = re.compile(rf"(?:\d+|{RECORDS})/((?:train|val)-\d{{6}})(?:\.tar|\.idx|-\d+\.rec)")
_OF_A_GENERATION = re.compile(r"plan-\d{3,}\.json|photos.*\.parquet")
_PARTIAL_NAMES = re.compile(
    rf"{_OF_A_SET}|records/plan\.json|manifest\.json|damaged\.json|report\.html|changes\.jsonl"
    r"|source\.json|README\.md|\.prep/.+"
)


def delete_partial(store: Store) -> None:
    """Delete partial files of killed runs. To be called only while no other run can be writing."""
    store.delete_partial(_PARTIAL_NAMES.fullmatch)


def delete_partial_shards(store: Store, shards: Collection[str]) -> None:
    """Delete partial files of the shards with these names, which this run is not writing; those of other jobs stay."""
    names = frozenset(shards)

    def of(file: str) -> bool:
        match = _OF_A_SHARD.fullmatch(file)
        return match is not None and match[1] in names

    if names:
        store.delete_partial(of)


def delete_orphans(store: Store, keep: Collection[str]) -> None:
    """Delete prep's files, complete or partial, that are not in `keep` (names in `store`), and nothing else.

    Partial files may even stem from this run: from cluster nodes that were lost.
    """
    delete_partial(store)
    folders = store.folders()
    names = [name for name in _names(store, ["", *folders]) if name not in keep and _SET_NAMES.fullmatch(name)]
    remove_many(store, names)
    for folder in folders:
        if folder.isdecimal():
            store.remove_folder(folder)


def start_over(store: Store) -> None:
    """Forget the set at OUT; its shards stay until they are replaced. A run killed here has to start over again."""
    store.write(spec_name(0), b"{}\n")
    if store.size(MANIFEST) is not None and b'"croissant.json": {' in store.read(MANIFEST):
        store.remove("croissant.json")  # of an earlier version: it describes the tars that were there
    store.remove(MANIFEST)  # why: it lists files that are about to be replaced
    remove_many(store, [f"{RECORDS}/{name}" for name in store.names(RECORDS) if _OF_A_GENERATION.fullmatch(name)])
    remove_many(store, record_names(store))
    store.remove(CHANGES)
    for folder in (RECORDS, ""):
        store.sync(folder)


def _names(store: Store, folders: Sequence[str]) -> Iterator[str]:
    for folder, files in zip(folders, thread_map(store.names, folders, 8), strict=True):
        for file in files:
            yield f"{folder}/{file}".lstrip("/")
