"""Detects the format of SRC and opens the matching source."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from resolute.errors import ResoluteError

from .archive import ArchiveSource
from .archives.tar_members import COMPRESSED, is_compressed
from .filesystem import expand_pattern, is_pattern, list_folder, path_kind
from .image_folder import ImageFolderSource
from .image_ref import Source, is_url
from .label_file import FolderFiles, LabelListSource, LabelTableSource
from .names import SPLITS, ignore_reason, refuse_split_names
from .parquet import ParquetSource, holds_images
from .targets import AUTO, TargetSetting
from .webdataset import WebDatasetSource, are_in_folders, is_webdataset_tar

__all__ = ["KINDS", "open_source", "plain_path"]

KINDS = ("auto", "folders", "table", "listing", "archive", "webdataset", "parquet")
_ACCEPTED = (
    "a folder of class folders, a folder and LABELS=table.csv, a list of paths and labels (.txt, .csv, .tsv, .jsonl), "
    "an archive of class folders (.zip, .tar, .tar.gz, .tar.bz2, .tar.xz), WebDataset tars or Parquet files"
)
_SUFFIXES = {"webdataset": (".tar", *COMPRESSED), "archive": (".zip", ".tar", *COMPRESSED), "parquet": (".parquet",)}
_LISTS = (".txt", ".lst", ".list", ".csv", ".tsv", ".jsonl", ".ndjson")


def open_source(
    src: str,
    *,
    kind: str = "auto",
    labels: str | None = None,
    columns: str | None = None,
    target: TargetSetting = AUTO,
    elsewhere: str | None = None,
    listed: Mapping[str, FolderFiles] | None = None,
    scan_cache: Path,
    setting: str = "SRC",
) -> Source:
    """Open the source at `src`, a path, URL, or pattern of several files; `kind` is one of KINDS.

    `labels` is a table of names and labels for a folder without class folders; `columns` names the image and label
    and target columns ("id,breed") of tables, lists and Parquet files, `target` what these mean. `elsewhere` is
    another folder whose images `labels` names too; `listed` are folders that have been listed already, by `plain_path`.
    `scan_cache` is a folder for what a source has to unpack or
    remember between runs. `setting` names `src` in messages. Most of the source is read only when it is iterated.
    Raises `ResoluteError` for a missing or unrecognised source.
    """
    src = plain_path(src)
    if kind not in KINDS:
        raise ResoluteError(f"KIND: unknown, got {kind}, expected one of {', '.join(KINDS)}; correct KIND")
    if labels is not None and kind not in ("auto", "table"):
        raise ResoluteError(f"LABELS: has no effect for KIND={kind}, got {labels}, expected none; drop one of them")
    if kind == "table" and labels is None:
        raise ResoluteError("KIND=table: got no table, expected LABELS=labels.csv; set LABELS")
    if labels is not None:
        _require_folder(src, setting)
        return LabelTableSource(
            src,
            labels.removeprefix("file://"),
            columns,
            target,
            elsewhere=None if elsewhere is None else plain_path(elsewhere),
            only_files=setting == "VAL" and elsewhere is not None,
            listed=listed,
        )
    files, note = _listed_files(src, setting), None
    if kind == "auto":
        kind, files = _detect_kind(src, files, setting)
        if kind == "webdataset" and are_in_folders(files[0]):
            note = (
                f"{files[0]}: read as WebDataset samples, labelled by their .txt or .json; if the folders are the "
                "classes, set KIND=archive"
            )
    elif not files and kind in _SUFFIXES:
        files = _files_of_kind(src, kind)
    if columns is not None and kind not in ("table", "listing", "parquet") and setting == "SRC":
        raise ResoluteError(f"COLUMNS: has no effect for KIND={kind}, got {columns}, expected none; drop COLUMNS")
    if target.kind not in (None, "class") and kind in ("folders", "archive"):
        raise ResoluteError(
            f"TARGET: got {target.kind} for {src}, in which class folders tell the classes, expected class; "
            + ("drop TARGET, or add LABELS=table.csv" if setting == "SRC" else "set VAL_LABELS=table.csv")
        )
    if kind == "folders":
        _require_folder(src, setting)
        return ImageFolderSource(src)
    if not files:
        raise ResoluteError(f"{src}: got no files of kind {kind}, expected at least one; correct {setting} or KIND")
    if kind == "listing":
        return LabelListSource(files[0], columns, target)
    if kind == "archive":
        return ArchiveSource(files, scan_cache)
    if kind == "webdataset":
        return WebDatasetSource(files, scan_cache, target, note)
    return ParquetSource(files, columns, scan_cache, target)


def plain_path(src: str) -> str:
    """A path without `file://` and without a slash at its end."""
    return src.removeprefix("file://").rstrip("/") or "/"


def _listed_files(src: str, setting: str) -> list[str]:
    """The files that `src` names; none if it is a folder."""
    if is_pattern(src):
        return expand_pattern(src)
    entry_kind = path_kind(src)
    if not entry_kind:
        raise ResoluteError(f"{src}: no such folder, got nothing there, expected {_ACCEPTED}; correct {setting}")
    return [src] if entry_kind == "file" else []


def _require_folder(src: str, setting: str) -> None:
    entry_kind = path_kind(src)
    if entry_kind != "folder":
        got = "a file" if entry_kind else "nothing there"
        raise ResoluteError(f"{src}: no such folder, got {got}, expected a folder of images; correct {setting}")


def _files_of_kind(src: str, kind: str) -> list[str]:
    """The files of that kind in the folder `src`, or else in its folder `data`."""
    for folder in (src, f"{src}/data"):
        listed = list_folder(folder) if path_kind(folder) == "folder" else []
        files = [e.name for e in listed if e.kind == "file" and e.name.lower().endswith(_SUFFIXES[kind])]
        if files:
            return [f"{folder}/{name}" for name in files]
    return []


def _detect_kind(src: str, files: list[str], setting: str) -> tuple[str, list[str]]:
    """(kind of `src`, files to read)."""
    if files:
        return _file_kind(src, files, setting), files
    if parquet := _files_of_kind(src, "parquet"):
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
        return "parquet" if len(files) > 1 or holds_images(files[0]) else "listing"
    if lower.endswith(".tar") or is_compressed(path):
        return "webdataset" if is_webdataset_tar(files[0]) else "archive"
    if lower.endswith(".zip"):
        return "archive"
    if lower.endswith(_LISTS) and len(files) == 1:
        return "listing"
    raise ResoluteError(
        f"{src}: not recognised, got a file named {path.rpartition('/')[2]}, expected {_ACCEPTED}; correct {setting}"
    )
