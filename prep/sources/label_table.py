"""The source for a folder of images with a table of labels. No row can name a file outside the folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from pipeline.errors import ResoluteError

from .image_folder import walk
from .image_ref import ImageRef
from .label_rows import is_number, label_rows
from .names import is_image, other_file_kind, safe_below
from .text_encoding import is_text, not_utf8

__all__ = ["LabelTableSource"]


class LabelTableSource:
    """A folder of images, flat or nested, and a CSV or TSV file of names and labels, as on Kaggle. A `Source`.

    A name may be the path below the folder or the file's own name, with or without suffix. A row without a file is
    yielded under its name and becomes a reject; a file without a row is ignored as unlabelled. A name that leads out of
    the folder (`..`, an absolute path elsewhere, a URL) is never read; its row is ignored as an unsafe name. Links
    inside the folder are followed, as in `ImageFolderSource`. `numbered` if all labels are integers. Holds the names of
    all files in memory.
    """

    label_names: Sequence[str] | None = None
    copies = False

    def __init__(self, src: str, labels: str, columns: str | None) -> None:
        self.root = src
        self.ignored: Counter[str] = Counter()
        self.numbered = True
        self._labels, self._columns = labels, columns

    def __iter__(self) -> Iterator[ImageRef]:
        self.ignored.clear()
        self.numbered = True
        sizes: dict[str, int | None] = {}
        aliases: dict[str, str | None] = {}  # other forms of a name; None: ambiguous
        for name, entry in walk(self.root, self.ignored):
            if entry.kind == "file" and is_image(name):
                sizes[name] = entry.nbytes
                for alias in {_stem(name), entry.name, _stem(entry.name)} - {name}:
                    aliases[alias] = name if alias not in aliases else None
            else:
                self.ignored[other_file_kind(name)] += entry.kind == "file"
        labelled: set[str] = set()
        for row in label_rows(self._labels, self._columns):
            written = row.name.removeprefix("./")
            if written not in sizes and written not in aliases:
                if not is_text(written):
                    raise not_utf8(self._labels, row.line, repr(written))
                below = safe_below(self.root, written)
                if below is None:
                    self.ignored["unsafe names"] += 1
                    continue
                written = below
            name = written if written in sizes else aliases.get(written, written) or self._ambiguous(written, row.line)
            if not row.label:
                self.ignored["unlabelled"] += name not in sizes
                continue
            labelled.add(name)
            self.numbered &= is_number(row.label)
            yield ImageRef.file(name, row.label, sizes.get(name))
        self.ignored["unlabelled"] += len(sizes.keys() - labelled)
        self.ignored += Counter()

    def _ambiguous(self, written: str, line: int) -> str:
        raise ResoluteError(
            f"{self._labels}: line {line} names several files, got {written}, of which {self.root} holds more than "
            "one, expected a unique name; write the full path with its suffix, or remove the other files"
        )


def _stem(name: str) -> str:
    return name[: name.rindex(".")]
