"""The source for a list file of image paths and labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from .filesystem import file_size, without_query
from .image_ref import UNSEEN, ImageRef, is_url
from .label_rows import is_number, label_rows
from .names import safe_relative_path

__all__ = ["LabelListSource"]


class LabelListSource:
    """A text file of `path label` lines, as ImageNet's train.txt, or a CSV or TSV file with such columns. A `Source`.

    Paths are relative to the list's folder, or absolute. `numbered` if all labels are integers. Images behind URLs are
    not requested while listing (UNSEEN). From a list behind a URL, only paths below its folder and URLs of the same
    scheme are accepted.
    """

    label_names: Sequence[str] | None = None
    copies = False

    def __init__(self, src: str, columns: str | None) -> None:
        self.root = without_query(src).rpartition("/")[0] or ("/" if src.startswith("/") else ".")
        self.ignored: Counter[str] = Counter()
        self.numbered = True
        self._src, self._columns = src, columns

    def __iter__(self) -> Iterator[ImageRef]:
        self.ignored.clear()
        self.numbered = True
        for row in label_rows(self._src, self._columns):
            name = row.name.removeprefix("./")
            # why: a remote list must not name files of this machine
            scheme = f"{self.root.partition('://')[0]}://"
            is_allowed = name.startswith(scheme) if is_url(name) else safe_relative_path(name)
            if is_url(self.root) and ("::" in name or not is_allowed):
                self.ignored["unsafe names"] += 1
                continue
            if not row.label:
                self.ignored["unlabelled"] += 1
                continue
            self.numbered &= is_number(row.label)
            if is_url(self.root) or is_url(name):
                yield ImageRef(name, row.label, 0, packed=UNSEEN)
            else:
                yield ImageRef.file(name, row.label, file_size(name if name.startswith("/") else f"{self.root}/{name}"))
