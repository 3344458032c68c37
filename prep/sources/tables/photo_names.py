"""Names of photos as tables and lists write them: found among the photos of a source, or explained.

A table rarely writes a name as the file system does. Some differences leave no doubt which photo is meant, others have
to be settled by the user: `NameIndex.find` and `same_form` do the former, `closest` describes the latter.
"""

from __future__ import annotations

import os
import posixpath
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import combinations
from pathlib import Path
from urllib.parse import unquote

from resolute.prep.sources.names import is_image, safe_relative_path
from resolute.urls import is_url

__all__ = ["EXACT", "SAME_STEM", "WITHOUT_SUFFIX", "AmbiguousName", "NameIndex", "differences"]

EXACT, WITHOUT_SUFFIX, SAME_STEM = 0, 1, 2  # how well a text names a photo; the lower the better
_MANY = 100_000  # names; for each difference they are all written anew, a microsecond or two each
_ZEROS = re.compile(r"(?<!\d)0+(?=\d)")


class AmbiguousName(Exception):
    """Several photos have the name."""


class NameIndex:
    """The photos of a source by every form of their names.

    `names` are POSIX paths relative to the source's root. With `root`, they may be written relative to another folder:
    one above `root`, that of the table `table`, or the working directory. Memory: one dictionary of the names, and one
    more for each further form that is needed.
    """

    def __init__(self, names: Iterable[str], root: str | None = None, table: str = "") -> None:
        # why not always a copy: there may be millions
        self._names: Mapping[str, object] = names if isinstance(names, Mapping) else dict.fromkeys(names)
        self._bases = [] if root is None else _bases(root, table)
        self._root = f"{Path(root).absolute()}/" if root is not None and self._bases else ""
        self._above = (*([f"{root.rstrip('/')}/"] if root else []), *_above(self._root, self._bases))
        self._folded: dict[tuple[str, ...], dict[str, str | None]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    @property
    def example(self) -> str:
        """One of the names; "" without any."""
        return next(iter(self._names), "")

    def find(self, written: str) -> str | None:
        """The photo that `written` names: by its path or its own name, with or without suffix; None if none.

        Raises `AmbiguousName` if there are several.
        """
        if written in self._names:  # as nearly always
            return written
        for form in self._paths(written):
            if form in self._names:
                return form
        for form in self._paths(written):
            if form in self._aliases:
                name = self._aliases[form]
                if name is None:
                    raise AmbiguousName(written)
                return name
        return None

    def rank(self, written: str) -> int | None:
        """How well `written` names a photo: `EXACT`, `WITHOUT_SUFFIX` or `SAME_STEM`; None if it names none."""
        try:
            name = self.find(written)
        except AmbiguousName:
            name = written
        if name is not None:
            return EXACT if is_image(written) else WITHOUT_SUFFIX
        return SAME_STEM if is_image(written) and self._stem_is_known(written) else None

    def same_form(self, written: str) -> str | None:
        """The only photo whose name differs from `written` merely in its form: the Unicode form, the case of the
        suffix, backslashes, or a slash at the beginning. None if there is none, or several."""
        return self._folds(()).get(_fold(written, ()))

    def looks_like(self, written: str) -> bool:
        """Whether a photo has a similar name."""
        return self.closest(written) is not None

    def closest(self, written: str) -> tuple[str, tuple[str, ...]] | None:
        """A photo with a similar name, and what differs, in words; None if there is none."""
        at_once = 2 if len(self._names) <= _MANY else 1  # differences
        subsets = [loose for count in range(at_once + 1) for loose in combinations(_LOOSE, count)]
        parts = _fold(written, ()).split("/")
        # why in this order: a folder that is written otherwise is no folder in front
        for dropped, loose in [(0, loose) for loose in subsets] + [
            (n, s) for s in subsets for n in range(1, len(parts))
        ]:
            folds, key = self._folds(loose), _fold("/".join(parts[dropped:]), loose)
            if key in folds:
                name = folds[key] or next(name for name in self._names if key in _keys(name, loose))
                words = [*(_WORDS[each] for each in loose), *(["a folder in front"] if dropped else [])]
                return name, tuple(words) or differences(written, name)
        return None

    def _paths(self, written: str) -> Iterator[str]:
        """`written` as paths relative to the root, if it may be relative to other folders."""
        yield written
        tidy = safe_relative_path(written) or written
        if tidy != written:
            yield tidy
        for beginning in self._above:
            if written.startswith(beginning):
                yield safe_relative_path(written[len(beginning) :]) or written
        if written.startswith("../") or "/../" in written:
            paths = (os.path.normpath(base / written) for base in self._bases)
            yield from (path[len(self._root) :] for path in paths if path.startswith(self._root))

    @cached_property
    def _aliases(self) -> dict[str, str | None]:
        """{another form of a name: the name, None if several have it}."""
        aliases: dict[str, str | None] = {}
        for name in self._names:
            stem = _stem(name)
            forms = {stem} if "/" not in name else {stem, name.rpartition("/")[2], stem.rpartition("/")[2]}
            for alias in forms - {name}:
                aliases[alias] = name if alias not in aliases else None
        return aliases

    def _stem_is_known(self, written: str) -> bool:
        stems = [_stem(form) for form in self._paths(written)]
        return any(stem in self._aliases or stem in self._names for stem in stems)

    def _folds(self, loose: tuple[str, ...]) -> dict[str, str | None]:
        """{folded form: the name, None if several have it}."""
        if loose not in self._folded:
            folds: dict[str, str | None] = {}
            for name in self._names:
                path = _fold(name, loose)
                folds[path] = None if path in folds else name
            paths = frozenset(folds)
            for name in self._names:
                for key in _keys(name, loose) - paths:
                    folds[key] = None if key in folds else name
            self._folded[loose] = folds
        return self._folded[loose]


def _keys(name: str, loose: tuple[str, ...]) -> set[str]:
    """The folded forms of a photo's name: its path and its own name, with and without suffix."""
    own = posixpath.basename(name)
    return {_fold(form, loose) for form in (name, _stem(name), own, _stem(own))}


def _fold(name: str, loose: Sequence[str]) -> str:
    """`name` without differences of form, and without those in `loose`."""
    name = unicodedata.normalize("NFC", name.replace("\\", "/")).lstrip("/").removeprefix("./")
    if is_image(name):
        stem = _stem(name)
        name = stem if "suffix" in loose else stem + name[len(stem) :].lower()
    for each in loose:
        name = _LOOSE[each](name)
    return name


_LOOSE: dict[str, Callable[[str], str]] = {
    "case": str.casefold,
    "suffix": lambda name: name,  # dropped by `_fold`, which knows the suffixes
    "zeros": lambda name: _ZEROS.sub("", name),
    "float": lambda name: name.removesuffix(".0"),
    "percent": unquote,
}
_WORDS = {
    "case": "upper and lower case",
    "suffix": "the suffix",
    "zeros": "leading zeros",
    "float": "a .0 at the end",
    "percent": "signs written as %20 and the like",
}


def differences(written: str, name: str) -> tuple[str, ...]:
    """In what form, in words, two names differ that `NameIndex.same_form` takes for the same."""
    words = []
    if written.startswith("/"):
        words.append("a slash at the beginning")
    if "\\" in written:
        words.append("backslashes")
    if unicodedata.normalize("NFC", written) != written or unicodedata.normalize("NFC", name) != name:
        words.append("the Unicode form (NFC and NFD)")
    if is_image(written) and is_image(name) and posixpath.splitext(written)[1] != posixpath.splitext(name)[1]:
        words.append("the case of the suffix")
    return tuple(words)


def _bases(root: str, table: str) -> list[Path]:
    """Folders to which the names of photos below `root` may be relative."""
    if is_url(root):
        return []
    tables = [] if is_url(table) or not table else [Path(table).absolute().parent]
    return [*Path(root).absolute().parents, *tables, Path.cwd()]


def _above(root: str, bases: Iterable[Path]) -> list[str]:
    """The beginnings of names of photos below `root` that are absolute, or relative to a folder above it."""
    if not root:
        return []
    above = [base for base in bases if base in Path(root).parents]
    return [root, f"{Path(root).resolve()}/", *(f"{Path(root).relative_to(base)}/" for base in above)]


def _stem(name: str) -> str:
    """`name` without its suffix."""
    stem, _, suffix = name.rpartition(".")  # why not splitext: three times as fast
    return name if "/" in suffix or stem[-1:] in ("", "/") else stem
