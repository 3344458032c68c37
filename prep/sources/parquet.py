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

from pipeline.errors import ResoluteError

from .filesystem import file_name, open_file
from .image_ref import MAX_BYTES
from .label_file import LABEL_COLUMNS, two_columns
from .names import is_image
from .scan_cache import ScannedSource, ScanResult, ScanWriter, cached_scan

__all__ = ["ParquetSource"]

_BATCH_ROWS = 64
_BATCH_BYTES = 1 << 26  # average bytes of cells per batch, which keeps batches of large images small


class ParquetSource(ScannedSource):
    """Parquet files with a column of images (bytes, or a struct of bytes and path) and a column of labels. A `Source`.

    An image's name is FILE/ROW.EXT, in row order. Labels are strings or numbers, the latter named if the schema holds a
    ClassLabel. `columns` names the two, "image,label", if they are ambiguous.
    """

    def __init__(self, paths: Sequence[str], columns: str | None, scan_cache: Path) -> None:
        super().__init__(paths, scan_cache, copies=True)
        self._columns = columns

    def _scan(self, path: str) -> ScanResult:
        how = f"parquet {self._columns}"
        return cached_scan(self._scan_cache, path, how, lambda out: _fill(path, self._columns, out), copies=True)


def _fill(path: str, columns: str | None, out: ScanWriter) -> None:
    try:
        import pyarrow.parquet as pq
    except ImportError:
        raise ResoluteError(
            f"{path}: Parquet needs pyarrow, got none, expected it to be installed; "
            "run `pip install -e '.[parquet]'`"
        ) from None
    name, row_number = file_name(path), 0
    with open_file(path) as raw, pq.ParquetFile(raw) as file:
        schema = file.schema_arrow
        features = _features(schema)
        image, label = two_columns(columns) if columns is not None else _guess(path, schema, features)
        for column in (image, label):
            if column not in schema.names:
                raise ResoluteError(
                    f"{path}: has no column {column}, got {', '.join(schema.names)}; name the image's and the label's "
                    "with COLUMNS=image,label"
                )
        _check_types(path, schema, image, label)
        out.label_names = features.get(label, {}).get("names")
        for batch in file.iter_batches(batch_size=_batch_rows(file.metadata), columns=[image, label]):
            cells, labels = batch.column(image), batch.column(label).to_pylist()
            for cell, label_value in zip(cells, labels, strict=True):
                value = cell.as_py()
                data, image_path = (value or {}).get("bytes") if isinstance(value, dict) else value, ""
                if isinstance(value, dict):
                    image_path = value.get("path") or ""
                if data is None:
                    out.ignored["rows without an image's bytes"] += 1
                elif label_value is None or label_value in ("", -1):  # -1: Source: datasets' ClassLabel, no label
                    out.ignored["unlabelled"] += 1
                elif len(data) > MAX_BYTES:  # becomes a reject
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


def _guess(path: str, schema: Any, features: dict[str, dict[str, Any]]) -> tuple[str, str]:
    """The only column of images, and the only ClassLabel or else the first column with a usual name."""
    images = [name for name in schema.names if features.get(name, {}).get("_type") == "Image"]
    images = images or [field.name for field in schema if _holds_bytes(field.type)]
    labels = [name for name in schema.names if features.get(name, {}).get("_type") == "ClassLabel"]
    labels = labels or [name for name in schema.names if name.lower() in LABEL_COLUMNS][:1]
    if len(images) != 1 or len(labels) != 1:
        raise ResoluteError(
            f"{path}: ambiguous columns, got {', '.join(schema.names)}, expected one of images "
            "and one of labels; name them with COLUMNS=image,label"
        )
    return images[0], labels[0]


def _holds_bytes(kind: Any) -> bool:
    import pyarrow.types as types

    if types.is_struct(kind):
        kind = next((kind.field(i).type for i in range(kind.num_fields) if kind.field(i).name == "bytes"), None)
    return kind is not None and (types.is_binary(kind) or types.is_large_binary(kind))


def _check_types(path: str, schema: Any, image: str, label: str) -> None:
    import pyarrow.types as types

    kinds = {name: schema.field(name).type for name in (image, label)}
    kind = kinds[label].value_type if types.is_dictionary(kinds[label]) else kinds[label]
    is_label = types.is_integer(kind) or types.is_string(kind) or types.is_large_string(kind)
    for column, fits, expected in (
        (image, _holds_bytes(kinds[image]), "bytes, or a struct with bytes"),
        (label, is_label, "integers or strings"),
    ):
        if not fits:
            raise ResoluteError(
                f"{path}: column {column} has the wrong type, got {kinds[column]}, expected {expected}; name "
                "the image's and the label's with COLUMNS=image,label"
            )
