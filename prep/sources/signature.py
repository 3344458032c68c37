"""The signature of a source: a short text that changes whenever other photos would be listed.

Where a few files decide all of it (archives, tars, Parquet, a list of URLs), it is a hash of their sizes and times, or
of what a store says of their versions: nothing is read. Else it is a hash of the names, sizes and labels of all photos,
as the source lists them. The content of a photo is not part of it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from resolute.prep.storage.thread_map import thread_map
from resolute.urls import without_credentials

from .filesystem import version_stamp
from .image_ref import Source

__all__ = ["ListingHash", "file_stamps", "has_signature", "signature_of_files"]

_BLOCK = 1 << 16  # photos at once
_REQUESTS = 64  # to a store at once


class ListingHash:
    """The hash of a listing, to which blocks of images are added in the order of the source."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, block: Sequence[Sequence[Any]]) -> None:
        """Add images, of which `block` holds each field of `ImageRef`."""
        names, labels, nbytes, _, _, stored_as, file_bytes, _ = block
        for texts in (names, map(str, labels)):
            self._hash.update("\0".join(texts).encode("utf-8", "surrogatepass") + b"\0\0")
        for numbers in (nbytes, stored_as, file_bytes):
            self._hash.update(array("q", numbers).tobytes())

    def signature(self) -> str:
        return f"listing {self._hash.hexdigest()}"


def file_stamps(paths: Iterable[str]) -> list[str]:
    """The state of each of the files; "" for one of which a store says nothing."""
    return list(thread_map(version_stamp, paths, _REQUESTS))


def signature_of_files(paths: Sequence[str], stamps: Sequence[str]) -> str | None:
    """The signature of a source that the files alone decide; None if the state of one is unknown."""
    if not all(stamps):
        return None
    lines = (f"{without_credentials(path)}\0{stamp}\0" for path, stamp in zip(paths, stamps, strict=True))
    return f"files {hashlib.sha256(''.join(lines).encode('utf-8', 'surrogatepass')).hexdigest()}"


def has_signature(source: Source, signature: str) -> bool:
    """Whether the source is as it was when it had this signature."""
    if signature.startswith("files "):
        return signature == signature_of_files(source.files, file_stamps(source.files))
    images, listing = iter(source), ListingHash()
    while block := list(islice(images, _BLOCK)):
        listing.add(list(zip(*block, strict=True)))
    return signature == listing.signature()
