"""The source for Parquet files of images and labels, as data sets on the Hugging Face hub are.

Parquet has no random access to a cell, so images are copied once, batch by batch, into `scan_cache`. Source: the
`datasets` library's features in the schema metadata, key "huggingface": Image, ClassLabel.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from resolute.errors import ResoluteError

from .filesystem import file_name, open_file
from .image_ref import MAX_BYTES
from .label_file import LABEL_COLUMNS, column_names, column_span
from .names import is_image
from .scan_cache import ScannedSource, ScanResult, ScanWriter, Stop, cached_scan
from .targets.scanned_target import RowLabel
from .targets.target_cells import AUTO, TargetSetting

__all__ = ["ParquetSource"]

_BATCH_ROWS = 64
_BATCH_BYTES = 1 << 26  # average bytes of cells per batch, which keeps batches of large images small


class ParquetSource(ScannedSource):
    """Parquet files with a column of images (bytes, or a struct of bytes and path) and a column of targets. A `Source`.

    An image's name is FILE/ROW.EXT, in row order. Labels are strings or integers, the latter named if the schema holds
    a ClassLabel; lists of these are several labels; floats and lists of floats are values. `columns` names the two,
    "image,label", if they are ambiguous, or several columns of numbers, "image,first..last".
    """

    def __init__(
        self, paths: Sequence[str], columns: str | None, scan_cache: Path, setting: TargetSetting = AUTO
    ) -> None:
        super().__init__(paths, scan_cache, copies=True, setting=setting)
        self._columns = columns

    def _scan(self, path: str, stop: Stop) -> ScanResult:
        how = f"parquet {self._columns}"
        return cached_scan(
            self._scan_cache, path, how, lambda out: _fill(path, self._columns, out), copies=True, stop=stop
        )  # fmt: skip


def _fill(path: str, columns: str | None, out: ScanWriter) -> None:
    try:
        import pyarrow.parquet as pq
    except ImportError:
        raise ResoluteError(
            f"{path}: Parquet needs pyarrow, got none, expected it to be installed; "
            "run `pip install 'resolute-vision[parquet]'`"
        ) from None
    name, row_number = file_name(path), 0
    with open_file(path) as raw, pq.ParquetFile(raw) as file:
        schema = file.schema_arrow
        features = _features(schema)
        image, *targets = _named(path, schema, columns) if columns is not None else _guess(path, schema, features)
        _check_types(path, schema, image, targets)
        out.label_names = _class_names(features.get(targets[0], {})) if len(targets) == 1 else None
        out.columns = targets
        of_floats = _holds_floats(schema.field(targets[0]).type)
        for batch in file.iter_batches(batch_size=_batch_rows(file.metadata), columns=[image, *targets]):
            cells, columns_of = batch.column(image), [batch.column(target).to_pylist() for target in targets]
            for cell, *target_cells in zip(cells, *columns_of, strict=True):
                label_value = _label(path, row_number, targets, target_cells, of_floats=of_floats)
                value = cell.as_py()
                data, image_path = (value or {}).get("bytes") if isinstance(value, dict) else value, ""
                if isinstance(value, dict):
                    image_path = value.get("path") or ""
                if data is None:
                    out.ignored["rows without an image's bytes"] += 1
                elif label_value is None or len(data) > MAX_BYTES:  # is not used, or becomes a reject
                    out.note(f"{name}/{row_number:09d}", label_value, 0, len(data))
                else:
                    suffix = posixpath.splitext(image_path)[1] if is_image(image_path) else ""
                    out.add(f"{name}/{row_number:09d}{suffix}", label_value, data)
                row_number += 1


def _batch_rows(metadata: Any) -> int:
    """Rows to read at once, so that large cells take about `_BATCH_BYTES`."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    row_bytes = max((group.total_byte_size // max(1, group.num_rows) for group in groups), default=0)
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(1, row_bytes)))


def _features(schema: Any) -> dict[str, dict[str, Any]]:
    """{column: feature} as written by `datasets`; empty for other files."""
    try:
        metadata = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = metadata["info"]["features"]
    except (ValueError, KeyError, TypeError):
        return {}
    return {name: feature for name, feature in features.items() if isinstance(feature, dict)}


def _class_names(feature: dict[str, Any]) -> list[str] | None:
    """The names of a ClassLabel, or of a sequence of these."""
    inner = feature.get("feature")
    names: list[str] | None = feature.get("names", inner.get("names") if isinstance(inner, dict) else None)
    return names


def _label(path: str, row: int, columns: list[str], cells: list[Any], *, of_floats: bool) -> RowLabel | None:
    """The target in a row; None if it has none. `of_floats`: the only column holds lists of floats."""
    if len(cells) > 1:
        if all(cell is None for cell in cells):
            return None
        if None in cells:
            raise ResoluteError(
                f"{path}: row {row}: got nothing in column {columns[cells.index(None)]}, expected a number; fill it "
                "in, or leave the column out of COLUMNS"
            )
        return {"columns": [cell if isinstance(cell, float) else int(cell) for cell in cells]}
    (cell,) = cells
    if not isinstance(cell, list):
        return None if cell == "" else cell
    if None in cell:
        raise ResoluteError(
            f"{path}: row {row}: got nothing in the list in column {columns[0]}, expected names or numbers; correct it"
        )
    return {"values" if of_floats else "labels": cell}


def _named(path: str, schema: Any, columns: str) -> list[str]:
    """The columns that `COLUMNS` names, the image's first."""
    names, selected = list(schema.names), []
    for name in column_names(columns):
        span = column_span(name, lambda each: names.index(each) if each in names else None)
        if span is None:
            raise ResoluteError(
                f"{path}: has no column {name}, got {', '.join(names)}; name the image's and the label's "
                "with COLUMNS=image,label"
            )
        selected += [names[i] for i in span]
    return selected


def _guess(path: str, schema: Any, features: dict[str, dict[str, Any]]) -> list[str]:
    """The only column of images, and the only column of ClassLabels, or the first with a usual name, or the only other.
    """
    images = [name for name in schema.names if features.get(name, {}).get("_type") == "Image"]
    images = images or [field.name for field in schema if _holds_bytes(field.type)]
    labels = [name for name in schema.names if _class_names(features.get(name, {})) is not None]
    labels = labels or [name for name in schema.names if name.lower() in LABEL_COLUMNS][:1]
    labels = labels or [name for name in schema.names if name not in images and _is_target(schema.field(name).type)]
    if len(images) != 1 or len(labels) != 1:
        raise ResoluteError(
            f"{path}: ambiguous columns, got {', '.join(schema.names)}, expected one of images "
            "and one of labels; name them with COLUMNS=image,label"
        )
    return [images[0], labels[0]]


def _holds_bytes(kind: Any) -> bool:
    import pyarrow.types as types

    if types.is_struct(kind):
        kind = next((kind.field(i).type for i in range(kind.num_fields) if kind.field(i).name == "bytes"), None)
    return kind is not None and (types.is_binary(kind) or types.is_large_binary(kind))


def _is_list(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _holds_floats(kind: Any) -> bool:
    import pyarrow.types as types

    return _is_list(kind) and bool(types.is_floating(kind.value_type))


def _is_target(kind: Any, *, is_one_of_several: bool = False) -> bool:
    """Whether a column of this type can hold targets."""
    import pyarrow.types as types

    if is_one_of_several:
        return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))
    kind = kind.value_type if _is_list(kind) else kind
    kind = kind.value_type if types.is_dictionary(kind) else kind
    is_number = types.is_integer(kind) or types.is_floating(kind)
    return bool(is_number or types.is_string(kind) or types.is_large_string(kind))


def _check_types(path: str, schema: Any, image: str, targets: list[str]) -> None:
    several = len(targets) > 1
    expected = "numbers" if several else "integers, strings or floats, or lists of these"
    columns = [(image, _holds_bytes(schema.field(image).type), "bytes, or a struct with bytes")]
    columns += [(name, _is_target(schema.field(name).type, is_one_of_several=several), expected) for name in targets]
    for column, fits, kind in columns:
        if not fits:
            raise ResoluteError(
                f"{path}: column {column} has the wrong type, got {schema.field(column).type}, expected {kind}; name "
                "the image's and the label's with COLUMNS=image,label"
            )
