"""Records of images that have been listed but not read: name, label, and where their bytes are."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

__all__ = ["MAX_BYTES", "MISSING", "PLAIN", "UNSEEN", "ZIPPED", "ByteRange", "ImageRef", "Source", "is_url"]

# `packed`: plain bytes at the offset; a zip local header there, stored or deflated content; no such file when the
# source was listed, though its folder was there; a URL from a list, which nobody has asked for yet.
PLAIN, ZIPPED, MISSING, UNSEEN = 0, 1, 2, 3
MAX_BYTES = 1 << 28  # of one image file, or of one member of an archive: what is larger is never read


@dataclass(frozen=True, slots=True)
class ImageRef:
    """One candidate image.

    `name` is its POSIX path relative to the source (surrogateescape for bytes that are no text): what it is
    sorted by and what reports show. `label` is its class, in decimal where the source is `numbered`. `nbytes`
    hold it, from byte `offset` (-1: a whole file) of the container `place`, a path or URL ("": the file `name`
    below the source's root); 0 if unknown. `size_bytes` is the image file's own size (-1: `nbytes`), which is
    another one only where it is compressed.
    """

    name: str
    label: str
    nbytes: int
    container: str = ""
    offset: int = -1
    packed: int = PLAIN
    size_bytes: int = -1

    @classmethod
    def file(cls, name: str, label: str, nbytes: int | None) -> ImageRef:
        """A file of its own below the source's root; `nbytes` None: listed, but not there."""
        return cls(name, label, nbytes or 0, packed=MISSING if nbytes is None else PLAIN)


class Source(Protocol):
    """Images of one kind of source; iterating yields each once, in ascending order of `os.fsencode(name)` where
    that costs nothing. Everything else is complete when an iteration has ended, and may be iterated again."""

    root: str  # folder or URL that names are relative to; for messages, the archive or file itself
    ignored: Counter[str]  # kind -> how many: hidden, junk, other files (or .txt: their suffix), unsafe names, ...
    numbered: bool  # labels are class numbers
    label_names: Sequence[str] | None  # of those numbers, where the source tells
    copies: bool  # the images are unpacked into the spool, for want of random access

    def __iter__(self) -> Iterator[ImageRef]: ...


class ByteRange(NamedTuple):
    """Where an image's bytes are, all that `fetch` needs: see `Found`; `path` is the file or container."""

    path: str
    offset: int = -1
    nbytes: int = 0
    packed: int = PLAIN
    size_bytes: int = 0


def is_url(path: str) -> bool:
    """Whether `path` is for fsspec: `s3://...`; plain paths are not, nor are drive letters."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", path) is not None
