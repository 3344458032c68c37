"""Detects the format of SRC and opens the matching source."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from resolute.errors import ResoluteError
from resolute.urls import local_path

from .archive import ArchiveSource
from .archives.tar_members import COMPRESSED, is_compressed
from .filesystem import common_root, expand_pattern, file_name, is_pattern, list_folder, path_kind, without_query
from .folders.image_folder import ImageFolderSource
from .folders.look import Look
from .image_ref import Source
from .label_file import FolderFiles, LabelListSource, LabelTableSource
from .names import ignore_reason, is_image
from .parquet import ParquetSource, holds_images
from .tables.split_column import Part, SplitSetting
from .targets import AUTO, TargetSetting
from .webdataset import WebDatasetSource, are_in_folders, is_webdataset_tar

__all__ = ["KINDS", "open_source", "plain_path"]

KINDS = ("auto", "folders", "table", "listing", "archive", "webdataset", "parquet")
_ACCEPTED = (
    "a folder of class folders, a folder and LABELS=table.csv, a list of paths and labels (.txt, .csv, .tsv, .jsonl, "
    "COCO's .json), an archive of class folders (.zip, .tar, .tar.gz, .tar.bz2, .tar.xz), WebDataset tars or Parquet "
    "files"
)
_SUFFIXES = {"webdataset": (".tar", *COMPRESSED), "archive": (".zip", ".tar", *COMPRESSED), "parquet": (".parquet",)}
_LISTS = (".txt", ".lst", ".list", ".csv", ".tsv", ".jsonl", ".ndjson", ".json")
# Source: https://huggingface.co/docs/datasets/image_dataset, "ImageFolder".
_METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")


def open_source(
    src: str,
    *,
    kind: str = "auto",
    labels: str | None = None,
    columns: str | None = None,
    target: TargetSetting = AUTO,
    elsewhere: str | None = None,
    also: str | None = None,
    only_rows: bool = False,
    listed: Mapping[str, FolderFiles] | None = None,
    known_classes: Sequence[str] = (),
    named_classes: Sequence[str] = (),
    max_bad: float = 1.0,
    image: Sequence[str] = (),
    zip_names: str | None = None,
    scan_cache: Path,
    setting: str = "SRC",
    split: SplitSetting | None = None,
    part: Part = "train",
    asks_for_split: bool = False,
    group: str | None = None,
    hints_at_group: bool = False,
) -> Source:
    """Open the source at `src`, a path, URL, or pattern of several files; `kind` is one of KINDS.

    `labels` is a table of names and labels for a folder of photos, and `also` the table of other photos of that folder,
    whose own source has `only_rows`. `columns` names the image and target columns ("id,breed") of tables, lists and
    Parquet files, and `target` says what these mean. `elsewhere` is another folder whose images `labels` names too;
    `listed` are folders that have been listed already, by `plain_path`. `known_classes` are those of the training part
    if this is VAL; class folders with these names or `named_classes` need no question (`Look`). `max_bad` (0..1) is the
    part of a table's images that may be missing; `image` is for `WebDatasetSource`, and `zip_names` for
    `ArchiveSource`. `scan_cache` is a folder for what a source has to unpack or remember between
    runs. `setting` names `src` in messages.
    `split` and `part` choose some of a table's photos, and `asks_for_split`, `group` and `hints_at_group` are as for
    `choose_columns`. Most of the source is read only when it is iterated. Raises `ResoluteError` for a missing
    or unrecognised source.
    """
    src = plain_path(src)
    division: dict[str, Any] = {
        "split": split,
        "part": part,
        "asks_for_split": asks_for_split,
        "group": group,
        "hints_at_group": hints_at_group,
    }
    if kind not in KINDS:
        raise ResoluteError(f"KIND: unknown, got {kind}, expected one of {', '.join(KINDS)}; correct KIND")
    if labels is not None and kind not in ("auto", "table") and setting == "SRC":
        raise ResoluteError(f"LABELS: has no effect for KIND={kind}, got {labels}, expected none; drop one of them")
    if kind == "table" and labels is None:
        raise ResoluteError("KIND=table: got no table, expected LABELS=labels.csv; set LABELS")
    note = None
    if labels is None and kind == "auto" and (labels := _metadata_file(src, setting)) is not None:
        note = f"{labels}: read as the table of the images in {src} (with KIND=folders, class folders are read instead)"
    if labels is not None:
        if setting == "SRC":
            _refuse_unused(src, "table", [], image, zip_names)
        _require_folder(src, setting)
        table = labels.removeprefix("file://")
        return LabelTableSource(
            src,
            table,
            columns,
            target,
            elsewhere=None if elsewhere is None else plain_path(elsewhere),
            only_files=setting == "VAL" and elsewhere is not None,
            only_rows=only_rows,
            also=None if also is None else also.removeprefix("file://"),
            listed=listed,
            known_classes=known_classes,
            max_bad=max_bad,
            setting="LABELS" if setting == "SRC" or elsewhere is not None else "VAL_LABELS",
            note=note,
            **division,
        )
    files = _listed_files(src, setting)
    is_certain = kind != "auto"
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
    if setting == "SRC":
        _refuse_unused(src, kind, files, image, zip_names)
    if target.kind not in (None, "class") and kind in ("folders", "archive"):
        raise ResoluteError(
            f"TARGET: got {target.kind} for {src}, in which class folders tell the classes, expected class; "
            + ("drop TARGET, or add LABELS=table.csv" if setting == "SRC" else "set VAL_LABELS=table.csv")
        )
    if target.of_bits is not None and target.signs is None and kind in ("folders", "archive", "webdataset"):
        name, _, value = target.of_bits.partition("=")
        raise ResoluteError(
            f"{name}: has no effect for KIND={kind}, got {value}, expected it for a table with several columns of 0 "
            f"and 1; drop {name}, or add LABELS=table.csv"
        )
    if split is not None and kind != "listing":
        raise ResoluteError(
            f"SPLIT: has no effect for KIND={kind}, got {split.text}, expected it for a table, or a pattern with one "
            "group for the names of photos, such as SPLIT='(train|val)/'; correct it"
        )
    known = (*known_classes, *named_classes)
    if kind == "folders":
        _require_folder(src, setting)
        look_at_folders = None if is_certain else partial(Look, src, setting=setting, known=known)
        return ImageFolderSource(src, look_at_folders, target)
    if not files:
        raise ResoluteError(f"{src}: got no files of kind {kind}, expected at least one; correct {setting} or KIND")
    if kind == "listing":
        return LabelListSource(
            files[0],
            columns,
            target,
            known_classes=known_classes,
            max_bad=max_bad,
            setting=setting,
            **division,
        )
    if kind == "archive":
        look = partial(Look, common_root(files), setting=setting, files=files, known=known)
        look_at_folders = None if is_certain else look
        return ArchiveSource(files, scan_cache, look_at_folders, target, known=known, zip_names=zip_names)
    if kind == "webdataset":
        return WebDatasetSource(files, scan_cache, target, note, image)
    return ParquetSource(files, columns, scan_cache, target)


def _refuse_unused(src: str, kind: str, files: Sequence[str], image: Sequence[str], zip_names: str | None) -> None:
    if image and kind != "webdataset":
        raise ResoluteError(f"IMAGE: has no effect for KIND={kind}, got {','.join(image)}, expected none; drop IMAGE")
    if zip_names is not None and not any(file_name(path).lower().endswith(".zip") for path in files):
        raise ResoluteError(f"ZIP_NAMES: has no effect for {src}, got {zip_names}, expected zip files; drop ZIP_NAMES")


def plain_path(src: str) -> str:
    """A path without `file://` and without a slash at its end."""
    folder = local_path(src)
    return (src if folder is None else folder).rstrip("/") or "/"


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


def _metadata_file(src: str, setting: str) -> str | None:
    """The table of a folder in the form of Hugging Face's ImageFolder; None if `src` is none.

    Raises `ResoluteError` if its folders could be classes.
    """
    if is_pattern(src) or path_kind(src) != "folder":
        return None
    listed = [entry for entry in list_folder(src) if not ignore_reason(entry.name)]
    tables = [entry.name for entry in listed if entry.kind == "file" and entry.name in _METADATA]
    if not tables:
        return None
    path = f"{src}/{tables[0]}"
    folders = [entry.name for entry in listed if entry.kind == "folder"]
    has_photos = any(entry.kind == "file" and is_image(entry.name) for entry in listed)
    if len(tables) > 1 or (len(folders) > 1 and not has_photos):
        got = " and ".join(tables) if len(tables) > 1 else f"{tables[0]} and {len(folders)} folders ({folders[0]}, …)"
        labels = "LABELS" if setting == "SRC" else "VAL_LABELS"
        raise ResoluteError(
            f"{src}: got {got}, expected one that says the classes; set {labels}={shlex.quote(path)} for the table, or "
            "KIND=folders for class folders"
        )
    return path


def _detect_kind(src: str, files: list[str], setting: str) -> tuple[str, list[str]]:
    """(kind of `src`, files to read)."""
    if files:
        return _file_kind(src, files, setting), files
    parquet = _files_of_kind(src, "parquet")
    if parquet and not _are_of_tars(src, parquet):
        return "parquet", parquet
    listed = [entry for entry in list_folder(src) if not ignore_reason(entry.name)]
    folders = [entry.name for entry in listed if entry.kind == "folder"]
    tars = [f"{src}/{entry.name}" for entry in listed if entry.name.lower().endswith((".tar", *COMPRESSED))]
    if tars and not folders:
        return _file_kind(src, tars, setting), tars
    zips = [entry.name for entry in listed if entry.name.lower().endswith(".zip")]
    if zips and not folders and not any(is_image(entry.name) for entry in listed):
        raise ResoluteError(
            f"{src}: no class folders, got zip files such as {zips[0]}, expected {_ACCEPTED}; use "
            f"{setting}={shlex.quote(f'{src}/*.zip')} for all of them as one source, or unpack them"
        )
    return "folders", []


def _are_of_tars(src: str, parquet: Sequence[str]) -> bool:
    """Whether Parquet files without images have tars of the same names in `src`, as img2dataset writes them."""
    tars = {entry.name.rpartition(".")[0] for entry in list_folder(src) if entry.name.lower().endswith(".tar")}
    return not tars.isdisjoint(file_name(path).rpartition(".")[0] for path in parquet) and not holds_images(parquet[0])


def _file_kind(src: str, files: list[str], setting: str) -> str:
    path = without_query(files[0])
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
