"""What kind of source is SRC, and who reads it?"""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import ResoluteError

from .archive import ArchiveSource
from .filesystem import expand_pattern, is_pattern, list_folder, path_kind
from .image_folder import ImageFolderSource
from .image_ref import Source, is_url
from .label_list import LabelListSource
from .label_table import LabelTableSource
from .names import SPLITS, ignore_reason, refuse_split_names
from .parquet import ParquetSource
from .tar_members import COMPRESSED, is_compressed
from .webdataset import WebDatasetSource, is_webdataset_tar

__all__ = ["KINDS", "open_source"]

KINDS = ("auto", "folders", "table", "listing", "archive", "webdataset", "parquet")
_UNDERSTOOD = (
    "a folder of class folders, a folder and LABELS=table.csv, a list of paths and labels (.txt, .csv, .tsv), an "
    "archive of class folders (.zip, .tar, .tar.gz, .tar.bz2, .tar.xz), WebDataset tars or Parquet files"
)
_LISTS = (".txt", ".lst", ".list", ".csv", ".tsv")


def open_source(
    src: str,
    *,
    kind: str = "auto",
    labels: str | None = None,
    columns: str | None = None,
    scan_cache: Path,
    setting: str = "SRC",
) -> Source:
    """The source at `src`, a path, URL, or pattern of several files; `kind` is one of KINDS.

    `labels` is a table of names and labels for a folder without class folders; `columns` the two that count,
    "id,breed", in tables, lists and Parquet files. What a source has to unpack or remember between runs goes to
    the folder `spool`. `setting` is what `src` is called in messages. Raises `ResoluteError` for what is not there
    or not understood; most is read later.
    """
    src = src.removeprefix("file://")
    src = src.rstrip("/") or "/"
    if kind not in KINDS:
        raise ResoluteError(f"KIND: not known, got {kind}, expected one of {', '.join(KINDS)}; correct KIND")
    if labels is not None and kind not in ("auto", "table"):
        raise ResoluteError(f"LABELS: without effect for KIND={kind}, got {labels}, expected none; drop one of them")
    if kind == "table" and labels is None:
        raise ResoluteError("KIND=table: no table given, expected LABELS=labels.csv; set LABELS")
    if labels is not None:
        _require_folder(src, setting)
        return LabelTableSource(src, labels.removeprefix("file://"), columns)
    files = _listed_files(src, setting)
    if kind == "auto":
        kind, files = _detect_kind(src, files, setting)
    elif not files and kind in ("archive", "webdataset", "parquet"):
        suffixes = {
            "webdataset": (".tar", *COMPRESSED),
            "parquet": (".parquet",),
            "archive": (".zip", ".tar", *COMPRESSED),
        }[kind]
        files = _files_with_suffix(src, suffixes) or _files_with_suffix(f"{src}/data", suffixes)
    if columns is not None and kind not in ("table", "listing", "parquet"):
        raise ResoluteError(f"COLUMNS: without effect for a source of kind {kind}, got {columns}; drop COLUMNS")
    if kind == "folders":
        _require_folder(src, setting)
        return ImageFolderSource(src)
    if not files:
        raise ResoluteError(
            f"{src}: no files of kind {kind}, got none, expected at least one; correct {setting} or KIND"
        )
    if kind == "listing":
        return LabelListSource(files[0], columns)
    if kind == "archive":
        return ArchiveSource(files, scan_cache)
    return WebDatasetSource(files, scan_cache) if kind == "webdataset" else ParquetSource(files, columns, scan_cache)


def _listed_files(src: str, setting: str) -> list[str]:
    """The file or files that `src` is or stands for; none if it is a folder."""
    if is_pattern(src):
        return expand_pattern(src)
    found_kind = path_kind(src)
    if not found_kind:
        raise ResoluteError(f"{src}: no such folder, got nothing there, expected {_UNDERSTOOD}; correct {setting}")
    return [src] if found_kind == "file" else []


def _require_folder(src: str, setting: str) -> None:
    found_kind = path_kind(src)
    if found_kind != "folder":
        got = "a file" if found_kind else "nothing there"
        raise ResoluteError(f"{src}: no such folder, got {got}, expected a folder of images; correct {setting}")


def _files_with_suffix(folder: str, suffixes: tuple[str, ...]) -> list[str]:
    if path_kind(folder) != "folder":
        return []
    return [f"{folder}/{e.name}" for e in list_folder(folder) if e.kind == "file" and e.name.lower().endswith(suffixes)]


def _detect_kind(src: str, files: list[str], setting: str) -> tuple[str, list[str]]:
    """The kind of `src`, and the files to read."""
    if files:
        return _file_kind(src, files, setting), files
    parquet = _files_with_suffix(src, (".parquet",)) or _files_with_suffix(f"{src}/data", (".parquet",))
    if parquet:
        return "parquet", parquet
    listed = [entry for entry in list_folder(src) if not ignore_reason(entry.name)]
    folders = [entry.name for entry in listed if entry.kind == "folder"]
    tars = [f"{src}/{entry.name}" for entry in listed if entry.name.lower().endswith((".tar", *COMPRESSED))]
    if tars and not folders:
        return _file_kind(src, tars, setting), tars
    are_splits = bool(folders) and all(name.lower() in SPLITS for name in folders)
    if are_splits and any(entry.kind == "folder" for name in folders for entry in list_folder(f"{src}/{name}")):
        refuse_split_names(src, folders, folders=True)
    return "folders", []


def _file_kind(src: str, files: list[str], setting: str) -> str:
    path = files[0].partition("?")[0] if is_url(files[0]) else files[0]
    lower = path.lower()
    if lower.endswith(".parquet"):
        return "parquet"
    if lower.endswith(".tar") or is_compressed(path):
        return "webdataset" if is_webdataset_tar(files[0]) else "archive"
    if lower.endswith(".zip"):
        return "archive"
    if lower.endswith(_LISTS) and len(files) == 1:
        return "listing"
    raise ResoluteError(
        f"{src}: not understood, got a file called {path.rpartition('/')[2]}, expected {_UNDERSTOOD}; correct {setting}"
    )
