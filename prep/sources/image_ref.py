"""References to images that are listed but not yet read: name, label, and where their bytes are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from resolute.pipeline.dataset.target import TargetKind

__all__ = [
    "MAX_BYTES",
    "MISSING",
    "PLAIN",
    "UNSEEN",
    "ZIPPED",
    "ByteRange",
    "Ignored",
    "ImageRef",
    "Label",
    "Listing",
    "Source",
    "SourceTarget",
]


class Ignored(NamedTuple):
    """A label among those of an image of which it is unknown whether the image has it."""

    label: str

    def __str__(self) -> str:
        return f"{self.label} ignored"


Label = str | tuple[str | Ignored, ...] | tuple[float, ...]

# Values of `stored_as`: plain bytes at the offset; a zip local header there, followed by stored or deflated content; a
# file that was missing from an existing folder when the source was listed; a URL from a list, not requested yet.
PLAIN, ZIPPED, MISSING, UNSEEN = 0, 1, 2, 3
MAX_BYTES = 1 << 28  # of one image file or archive member; larger ones are never read


class ImageRef(NamedTuple):
    """One candidate image.

    `name` is its POSIX path relative to the source (surrogateescape for invalid UTF-8), which it is sorted by and
    reported as. `label` is its class, in decimal if the source is `numbered`; or its labels, likewise; or its values;
    `line` is where that is written, from 1 (0: not in lines). Its bytes are `nbytes` (0: unknown) from
    `offset` (-1: the entire file) of `container`, a path or URL ("": the file `name` below the source's root).
    `size_bytes` is the size of the image file itself (-1: `nbytes`), which differs only for a compressed archive
    member.
    """

    name: str
    label: Label
    nbytes: int
    container: str = ""
    offset: int = -1
    stored_as: int = PLAIN
    size_bytes: int = -1
    line: int = 0

    @classmethod
    def file(cls, name: str, label: Label, nbytes: int | None, line: int = 0) -> ImageRef:
        """A plain file below the source's root; `nbytes` is None if it was listed but does not exist."""
        return cls(name, label, nbytes or 0, stored_as=MISSING if nbytes is None else PLAIN, line=line)


@dataclass(frozen=True, kw_only=True)
class SourceTarget:
    """The kind of a source's targets.

    `names` and `units` are those of values; `classes` are labels that the source names itself, whether or not an image
    has them; `columns` are the names of a table's target columns; `separator` is the sign between the items
    of a cell of text. `signs`: in columns of -1 and 1, -1 means that a label is not there; `ignored`: labels of an
    image may be `Ignored`. `several_words`: a cell of a column of classes that may also be several labels; "" if there
    is none, or TARGET says what it is. `about` says in lines what was recognised, with examples; none if it can be read
    in one way only. `warnings` are lines about what is probably a mistake, complete after an iteration.
    """

    kind: TargetKind = "class"
    names: tuple[str, ...] = ()
    units: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    separator: str | None = None
    signs: bool = False
    ignored: bool = False
    several_words: str = ""
    about: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(kw_only=True)
class Listing:
    """What an iteration over a source has found besides the images; complete when it has ended.

    `listed` is counted where entries are read, before anything is known about them, and equals the images that were
    yielded and those in `ignored`.
    """

    listed: int = 0  # entries that were read: files, members of archives, samples, rows
    # kind -> count: hidden, junk, other files (by suffix where usual), unsafe names, ...
    ignored: Counter[str] = field(default_factory=Counter)
    numbered: bool = False  # labels are class numbers
    label_names: Sequence[str] | None = None  # names of those numbers, if the source has them
    target: SourceTarget = SourceTarget()  # complete when the first image is yielded, but for its warnings
    stamps: Sequence[str] = ()  # states of the files before they were read, if they alone decide what is listed


class Source(Protocol):
    """The images of a source of one format.

    Iterating yields each image once, in ascending order of `os.fsencode(name)` where that is free. Each iteration
    begins a new `listing`.
    """

    @property
    def root(self) -> str:
        """The folder or URL that names are relative to; the archive or file itself, for messages."""
        ...

    @property
    def unpacks(self) -> bool:
        """Whether the images are unpacked into the scan cache, for lack of random access."""
        ...

    @property
    def files(self) -> Sequence[str]:
        """The archives, tars and lists that are read; without wildcards."""
        ...

    @property
    def listing(self) -> Listing: ...

    def __iter__(self) -> Iterator[ImageRef]: ...


class ByteRange(NamedTuple):
    """The location of an image's bytes, for `fetch`; fields as in `ImageRef`, `path` is the file or container.

    `stamp` is the state of the container when it was listed, as in `container_stamps`; "": unknown, or an entire file.
    """

    path: str
    offset: int = -1
    nbytes: int = 0
    stored_as: int = PLAIN
    size_bytes: int = 0
    stamp: str = ""
