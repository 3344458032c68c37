"""The sources of images that a table names: a folder with a table of its images, and a list of paths and labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from resolute.errors import ResoluteError

from .filesystem import file_size, version_stamp, without_query
from .image_folder import walk
from .image_ref import UNSEEN, ImageRef, Label, SourceTarget, is_url
from .names import is_image, other_file_kind, safe_below, safe_relative_path
from .table import TargetTable, is_text, not_utf8, table_rows
from .targets import AUTO, TargetSetting

__all__ = ["FolderFiles", "LabelListSource", "LabelTableSource", "table_covers"]


class LabelTableSource:
    """A folder of images, flat or nested, and a table of names and targets, as on Kaggle. A `Source`.

    A name may be the path below the folder or the file's own name, with or without suffix. A row without a file is
    yielded under its name and becomes a reject; a file without a row is ignored as unlabelled. As in a list, a name may
    also lead out of the folder (`..`, an absolute path, a URL), unless the folder or the table is behind a URL: then
    such a row is ignored as an unsafe name. Links inside the folder are followed, as in `ImageFolderSource`. `numbered`
    if all labels are integers. Holds the names of all files in memory.

    `elsewhere` is another folder whose images the table names too; these rows are left out here. `only_files`: rows
    without a file are left out, since the source of the other folder yields them. `listed` are folders that have been
    listed already, by path.
    """

    label_names: Sequence[str] | None = None
    copies = False
    files: Sequence[str] = ()
    stamps: Sequence[str] = ()

    def __init__(
        self,
        src: str,
        labels: str,
        columns: str | None,
        setting: TargetSetting = AUTO,
        *,
        elsewhere: str | None = None,
        only_files: bool = False,
        listed: Mapping[str, FolderFiles] | None = None,
    ) -> None:
        self.root = src
        self.ignored: Counter[str] = Counter()
        self.numbered = True
        self.target = SourceTarget()
        self._labels, self._table, self._setting = labels, TargetTable(labels, columns, setting), setting
        self._elsewhere, self._only_files, self._listed = elsewhere, only_files, listed or {}

    def __iter__(self) -> Iterator[ImageRef]:
        self.ignored.clear()
        files = self._files(self.root)
        self.ignored.update(files.ignored)
        others = None if self._elsewhere is None else self._files(self._elsewhere)
        labelled: set[str] = set()
        is_remote = is_url(self.root) or is_url(self._labels)
        self.target = self._table.target()
        self.numbered = self._table.numbered
        for name_in_table, label, line in self._table:
            written = name_in_table.removeprefix("./")
            if others is not None and written in others:
                if written in files:
                    raise ResoluteError(
                        f"{self._labels}: line {line} names two files, got {written}, which both {self.root} and "
                        f"{others.root} hold, expected one; set VAL_LABELS to a table for VAL alone"
                    )
                continue
            if written not in files:
                if self._only_files:
                    continue
                if not is_text(written):
                    raise not_utf8(self._labels, line, repr(written))
                below = safe_below(self.root, written)
                if below is None:
                    image = (
                        None
                        if is_remote or label is None
                        else _named_image(self.root, written, label, line, is_remote=False)
                    )
                    if image is not None:
                        yield image
                    else:
                        self.ignored["unlabelled" if label is None else _unusable(written)] += 1
                    continue
                written = below
            name = files.name(written)
            if name is None:
                raise ResoluteError(
                    f"{self._labels}: line {line} names several files, got {written}, of which {self.root} holds "
                    "more than one, expected a unique name; write the full path with its suffix, or remove the other "
                    "files"
                )
            if self._setting.is_dropped(label, self._labels, name, line):
                self.ignored["unlabelled"] += name not in files.sizes
                continue
            assert label is not None
            labelled.add(name)
            yield ImageRef.file(name, label, files.sizes.get(name), line)
        self.ignored["unlabelled"] += len(files.sizes.keys() - labelled)
        self.ignored += Counter()

    def _files(self, root: str) -> FolderFiles:
        return self._listed.get(root) or FolderFiles(root)


class FolderFiles:
    """The image files below a folder, by any form of their names; `sizes` are in bytes. Others count in `ignored`."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.ignored: Counter[str] = Counter()
        self.sizes: dict[str, int | None] = {}
        self._aliases: dict[str, str | None] = {}  # other forms of a name; None: ambiguous
        for name, entry in walk(root, self.ignored):
            if entry.kind == "file" and is_image(name):
                self.sizes[name] = entry.nbytes
                for alias in {_stem(name), entry.name, _stem(entry.name)} - {name}:
                    self._aliases[alias] = name if alias not in self._aliases else None
            else:
                self.ignored[other_file_kind(name)] += entry.kind == "file"

    def __contains__(self, written: str) -> bool:
        written = self._below(written)
        return written in self.sizes or written in self._aliases

    def name(self, written: str) -> str | None:
        """The file's name; `written` itself if there is none, None if there are several."""
        written = self._below(written)
        return written if written in self.sizes else self._aliases.get(written, written)

    def _below(self, written: str) -> str:
        return written.removeprefix(f"{self.root.rstrip('/')}/")


def table_covers(labels: str, columns: str | None, files: FolderFiles, others: FolderFiles) -> bool:
    """Whether a table for the folder of `files` also names images that only the folder of `others` holds."""
    names = (name.removeprefix("./") for name, _, _ in table_rows(labels, columns))
    return any(name in others and name not in files for name in names)


def _stem(name: str) -> str:
    return name[: name.rindex(".")]


class LabelListSource:
    """A text file of `path label` lines, as ImageNet's train.txt, or a table with such columns. A `Source`.

    Paths are relative to the list's folder, or absolute. `numbered` if all labels are integers. Images behind URLs are
    not requested while listing (UNSEEN). A list of this machine may name any file of it; from one behind a URL, only
    paths below its folder and URLs of the same scheme are accepted.
    """

    label_names: Sequence[str] | None = None
    copies = False
    stamps: Sequence[str] = ()

    def __init__(self, src: str, columns: str | None, setting: TargetSetting = AUTO) -> None:
        self.root = without_query(src).rpartition("/")[0] or ("/" if src.startswith("/") else ".")
        self.ignored: Counter[str] = Counter()
        self.files: Sequence[str] = (src,)
        self.numbered = True
        self.target = SourceTarget()
        self._table, self._src, self._setting = TargetTable(src, columns, setting), src, setting

    def __iter__(self) -> Iterator[ImageRef]:
        self.ignored.clear()
        stamp = version_stamp(self._src)
        self.target = self._table.target()
        self.numbered = self._table.numbered
        root, is_remote = self.root, is_url(self.root)
        scheme = f"{root.partition('://')[0]}://"
        are_urls = True
        seen: set[Label] = set()  # classes that were checked: most rows have one of them
        for written, label, line in self._table:
            name = written.removeprefix("./")
            if is_remote and (  # it must not name files of this machine
                "::" in name or not (name.startswith(scheme) if is_url(name) else safe_relative_path(name))
            ):
                self.ignored[_unusable(name)] += 1
                continue
            if label not in seen and self._setting.is_dropped(label, self._src, name, line):
                self.ignored["unlabelled"] += 1
                continue
            assert label is not None
            image = _named_image(root, name, label, line, is_remote=is_remote)
            if image is None:
                self.ignored[_unusable(name)] += 1
                continue
            if isinstance(label, str):
                seen.add(label)
            are_urls = are_urls and image.packed == UNSEEN
            yield image
        self.stamps = (stamp,) if are_urls else ()


def _named_image(root: str, name: str, label: Label, line: int, *, is_remote: bool) -> ImageRef | None:
    """The image that a label file names, relative to `root`, or by any path or URL; None for a Windows path.

    `is_remote`: `root` is a URL.
    """
    name = name.removeprefix("file://")
    if is_remote or is_url(name):
        return ImageRef(name, label, 0, "", -1, UNSEEN, -1, line)
    size = file_size(name if name.startswith("/") else f"{root}/{name}")
    return None if size is None and "\\" in name else ImageRef.file(name, label, size, line)


def _unusable(name: str) -> str:
    """The kind under which a name that is not read is counted."""
    return "names with backslashes (write / instead)" if "\\" in name else "unsafe names"
