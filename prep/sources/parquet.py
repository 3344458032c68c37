"""The source for Parquet files of images and targets, as data sets on the Hugging Face hub are.

Parquet has no random access to a cell, so images are copied once, row by row, into `scan_cache`. Source: the
`datasets` library's features in the metadata: Image, ClassLabel.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from resolute.errors import ResoluteError
from resolute.pipeline.storage.cancel import CancelScope

from .filesystem import file_name
from .image_ref import MAX_BYTES
from .names import is_image
from .parquet_file import ParquetFile, open_parquet
from .scan_cache import ScannedSource, ScanResult, ScanWriter, cached_scan
from .tables.columns import LABEL_COLUMNS, column_names, column_span
from .tables.table import as_cell
from .targets import AUTO, TargetSetting

__all__ = ["ParquetSource", "holds_images"]

_ROWS = 64  # whose images are in memory as Python objects at once
_IMAGE = re.compile(r'BLOB|STRUCT\((.*, )?"?bytes"? BLOB(, .*)?\)')
_NUMBER = re.compile(r"U?(TINY|SMALL|BIG|HUGE)?INT(EGER)?|FLOAT|DOUBLE|BOOLEAN|DECIMAL\(.*\)")
_TARGET = re.compile(rf"({_NUMBER.pattern}|VARCHAR|ENUM\(.*\))(\[\d*\])?")


class ParquetSource(ScannedSource):
    """Parquet files with a column of images (bytes, or a struct of bytes and path) and a column of targets. A `Source`.

    An image's name is FILE/ROW.EXT, in row order. Labels are strings or integers, the latter named if the metadata
    hold a ClassLabel; lists of these are several labels; floats and lists of floats are values. `columns` names the
    two, "image,label", if they are ambiguous, or several columns of numbers, "image,first..last".
    """

    def __init__(
        self, paths: Sequence[str], columns: str | None, scan_cache: Path, setting: TargetSetting = AUTO
    ) -> None:
        super().__init__(paths, scan_cache, unpacks=True, setting=setting)
        self._columns = columns

    def _scan(self, path: str, stop: CancelScope) -> ScanResult:
        with_blank = self._setting.blank == "0"
        how = f"parquet {self._columns}{' with blank rows' if with_blank else ''}"

        def fill(out: ScanWriter) -> None:
            _fill(path, self._columns, out, with_blank=with_blank)

        return cached_scan(self._scan_cache, path, how, fill, unpacks=True, stop=stop)


def holds_images(path: str) -> bool:
    """Whether a Parquet file has a column of images, rather than of their paths."""
    with open_parquet(path) as file:
        return any(map(_IMAGE.fullmatch, file.types.values()))


def _fill(path: str, columns: str | None, out: ScanWriter, *, with_blank: bool = False) -> None:
    """`with_blank`: images whose cells are all blank are used too."""
    name = file_name(path)
    with open_parquet(path) as file:
        image, *targets = _named(path, file, columns) if columns is not None else _guess(path, file)
        _check_types(path, file, image, targets)
        out.label_names = _class_names(file.features.get(targets[0], {})) if len(targets) == 1 else None
        out.columns = targets
        quoted = [f'"{each.replace(chr(34), chr(34) * 2)}"' for each in (image, *targets)]
        data_and_path = (quoted[0], "NULL")
        if file.types[image] != "BLOB":
            has_path = re.search(r'"?path"? VARCHAR', file.types[image])
            data_and_path = (f"{quoted[0]}.bytes", f"{quoted[0]}.path" if has_path else "NULL")
        for number, (data, image_path, *values) in enumerate(file.rows([*data_and_path, *quoted[1:]], _ROWS)):
            out.listed += 1
            row_name = f"{name}/{number:09d}"
            cells = tuple(as_cell(value, f"{path}: row {number}") for value in values)
            if data is None:
                out.ignored["rows without an image's bytes"] += 1
            # those that are unused, or become a reject
            elif not (with_blank or any(cell is not None for cell in cells)) or len(data) > MAX_BYTES:
                out.note(row_name, cells, 0, len(data))
            else:
                suffix = posixpath.splitext(image_path or "")[1] if is_image(image_path or "") else ""
                out.add(f"{row_name}{suffix}", cells, data)


def _class_names(feature: dict[str, Any]) -> list[str] | None:
    """The names of a ClassLabel, or of a sequence of these."""
    inner = feature.get("feature")
    names: list[str] | None = feature.get("names", inner.get("names") if isinstance(inner, dict) else None)
    return names


def _named(path: str, file: ParquetFile, columns: str) -> list[str]:
    """The columns that `COLUMNS` names, the image's first."""
    names, selected = list(file.types), []
    for name in column_names(columns):
        span = column_span(name, lambda each: names.index(each) if each in names else None)
        if span is None:
            raise ResoluteError(
                f"{path}: has no column {name}, got {', '.join(names)}; name the image's and the label's "
                "with COLUMNS=image,label"
            )
        selected += [names[i] for i in span]
    return selected


def _guess(path: str, file: ParquetFile) -> list[str]:
    """The only image column; and the only ClassLabel column, or the first with a usual name, or the only other one."""
    names, types = list(file.types), file.types
    images = [name for name in names if file.features.get(name, {}).get("_type") == "Image"]
    images = images or [name for name in names if _IMAGE.fullmatch(types[name])]
    labels = [name for name in names if _class_names(file.features.get(name, {})) is not None]
    labels = labels or [name for name in names if name.lower() in LABEL_COLUMNS][:1]
    labels = labels or [name for name in names if name not in images and _TARGET.fullmatch(types[name])]
    if len(images) != 1 or len(labels) != 1:
        raise ResoluteError(
            f"{path}: ambiguous columns, got {', '.join(names)}, expected one of images "
            "and one of labels; name them with COLUMNS=image,label"
        )
    return [images[0], labels[0]]


def _check_types(path: str, file: ParquetFile, image: str, targets: list[str]) -> None:
    several = len(targets) > 1
    expected = "numbers" if several else "integers, strings or floats, or lists of these"
    of_targets = _NUMBER if several else _TARGET
    columns = [(image, _IMAGE, "bytes, or a struct with bytes"), *((name, of_targets, expected) for name in targets)]
    for column, pattern, kind in columns:
        if not pattern.fullmatch(file.types[column]):
            raise ResoluteError(
                f"{path}: column {column} has the wrong type, got {file.types[column]}, expected {kind}; name "
                "the image's and the label's with COLUMNS=image,label"
            )
