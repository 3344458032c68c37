"""Classification of file names: images, ignored files, unsafe paths, names of splits."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterable

from resolute.errors import ResoluteError
from resolute.urls import is_url

__all__ = [
    "SUFFIXES",
    "ignore_reason",
    "is_image",
    "other_file_kind",
    "refuse_split_names",
    "safe_below",
    "safe_relative_path",
]

SUFFIXES = frozenset({".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif"})
# Files that operating systems leave in folders and archives, in lower case.
_JUNK = frozenset(
    {
        "__macosx",
        ".ds_store",
        "thumbs.db",
        "ehthumbs.db",
        "desktop.ini",
        "@eadir",
        "$recycle.bin",
        "lost+found",
        "system volume information",
    }
)
_USUAL_SUFFIX = re.compile(r"\.(?=[a-z0-9]*[a-z])[a-z0-9]{1,4}")
_SPLIT_FILE = re.compile(r"(training|train|validation|valid|val|testing|test|dev)(?=[-_.\d])", re.IGNORECASE)


def is_image(name: str) -> bool:
    return posixpath.splitext(name)[1].lower() in SUFFIXES


def other_file_kind(name: str) -> str:
    """The kind under which a non-image file is counted: its lower-case suffix, or `other files` for an unusual one."""
    suffix = posixpath.splitext(name)[1].lower()
    return suffix if _USUAL_SUFFIX.fullmatch(suffix) else "other files"


def ignore_reason(part: str) -> str | None:
    """The reason for skipping a file or folder with that name (no slash) and everything in it; None to keep it."""
    if part.lower() in _JUNK or part.startswith("._"):
        return "junk"
    return "hidden" if part.startswith(".") else None


def safe_relative_path(name: str) -> str | None:
    """An archive member's name as a plain relative path; None if it might lead out of a folder."""
    if name.startswith("/") or "\\" in name or "\0" in name or re.match(r"[A-Za-z]:", name):
        return None
    parts = [part for part in name.split("/") if part not in ("", ".")]
    return None if ".." in parts or not parts else "/".join(parts)


def safe_below(root: str, name: str) -> str | None:
    """`name`, as written in a table, as a plain path relative to `root`; None if it leads elsewhere.

    An absolute path or URL below `root` is accepted; `..`, any other absolute path or URL and, below a URL, fsspec's
    chains (`a::b`) are not. Nothing is looked up: links inside `root` are trusted and followed.
    """
    name = name.removeprefix(f"{root.rstrip('/')}/")
    if is_url(name) or (is_url(root) and "::" in name):
        return None
    return safe_relative_path(name)


def refuse_split_names(src: str, names: Iterable[str]) -> None:
    """Raise `ResoluteError` if files such as `train-00000.tar`, the names of those in `src`, are of two splits."""
    matches = (_SPLIT_FILE.match(name) for name in names)
    splits = sorted({match[1] for match in matches if match})
    if len(splits) > 1:
        train = next((name for name in splits if name.lower().startswith("train")), splits[0])
        val = next((name for name in splits if name.lower().startswith(("val", "dev"))), None)
        val = val or next(name for name in splits if name != train)
        raise ResoluteError(
            f"{src}: holds splits, got {', '.join(splits)}, expected the images of a single split; use "
            f"SRC={shlex.quote(f'{src}/{train}-*')} VAL={shlex.quote(f'{src}/{val}-*')}"
        )
