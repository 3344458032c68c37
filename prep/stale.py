"""What is left of earlier attempts, and may be deleted?"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from .store import Store

__all__ = ["remove_parts", "remove_stale"]

_OURS = re.compile(
    r"\d+/((train|val)-\d{6}\.(tar|idx)|_info\.json)"
    r"|index/(train|val)((-\d+)?(\.crc)?\.npy|\.source\.npy|\.sources\.jsonl)"
    r"|rejects\.jsonl|duplicates\.jsonl|_info\.json"
)
_PART = re.compile(
    rf"({_OURS.pattern}|manifest\.json|index/manifest\.json|damaged\.json|report\.html|source\.json)\.[0-9a-f]{{8}}\.part"
    r"|\.prep/.+\.part"
)


def remove_parts(store: Store) -> None:
    """Delete what killed runs had half written. Only where no other run can be writing."""
    for name in _names(store):
        if _PART.fullmatch(name):
            store.remove(name)


def remove_stale(store: Store, keep: Collection[str]) -> None:
    """Delete files of ours, whole or half written, that are not in `keep` (names in `store`); nothing else.

    Half written ones are left by nodes of a cluster that were lost during this very run.
    """
    for name in _names(store):
        if name not in keep and (_OURS.fullmatch(name) or _PART.fullmatch(name)):
            store.remove(name)
    for folder in store.folders():
        if folder.isdecimal():
            store.remove_folder(folder)


def _names(store: Store) -> Iterator[str]:
    for folder in ("", *store.folders()):
        for file in store.names(folder):
            yield f"{folder}/{file}".lstrip("/")
