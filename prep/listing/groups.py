"""GROUP: which photos belong together, such as those of one patient, and therefore stay on one side of every split.

A column of the table says it, or a pattern for the photos' names, or a file with names and groups. The names of the
groups are the column `group_name` of the table of photos, NULL for a photo that is alone.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resolute.console import counted
from resolute.errors import ResoluteError
from resolute.prep.sources.filesystem import file_name
from resolute.prep.sources.image_ref import Source
from resolute.prep.sources.label_file import LabelListSource, LabelTableSource
from resolute.prep.sources.parquet import ParquetSource
from resolute.prep.sources.parquet_file import open_parquet
from resolute.prep.sources.part_source import PartSource
from resolute.prep.sources.tables.forms import text_lines
from resolute.prep.sources.tables.group_column import GroupSetting
from resolute.prep.sources.tables.photo_names import AmbiguousName, NameIndex

from .compare import Comparison
from .database import Database
from .photos import Photos, rows_of

__all__ = [
    "describe_groups",
    "fingerprint_of_groups",
    "group_name",
    "group_numbers",
    "set_groups",
    "settled_groups",
]

_PHOTO_HEADS = ("name", "path", "filename", "file_name", "file", "image", "image_id", "photo", "id")
_BLOCK = 1 << 16
_EXPECTED = "a column of a table, a pattern with one group for the photos' names, or a CSV file of names and groups"


def set_groups(setting: GroupSetting, sources: Mapping[str, tuple[Source, Photos]]) -> list[str]:
    """Fill the column `group_name` of the photos of all sources, which were listed just now; returns lines to print.

    Raises `ResoluteError` if the setting does not fit the photos.
    """
    if setting.file is not None:
        return _from_file(setting.file, [photos for _, photos in sources.values()])
    for source, photos in sources.values():
        while isinstance(source, PartSource):
            source = source.whole
        if setting.pattern is not None:
            photos.set_groups("position", enumerate(_matches(setting.pattern, photos)))
        elif isinstance(source, LabelTableSource | LabelListSource):
            photos.set_groups("line", source.table.group_cells())
        elif isinstance(source, ParquetSource):
            photos.set_groups("position", _parquet_cells(str(setting.column), source, photos))
        else:
            raise ResoluteError(
                f"GROUP: got {setting.text}, the name of a column, for {source.root}, which is no table, expected "
                f"{_EXPECTED}; correct it"
            )
    return []


def _matches(pattern: re.Pattern[str], photos: Photos) -> Iterator[str]:
    for name in photos.all_names():
        found = pattern.search(name)
        if found is None:
            raise ResoluteError(
                f"{photos.root}: GROUP={pattern.pattern} does not match, got {name!a}, expected a name in which it "
                "finds a group (the group may match nothing: such a photo is alone); correct GROUP"
            )
        yield _as_text(found[1])


def _parquet_cells(column: str, source: ParquetSource, photos: Photos) -> Iterator[tuple[int, str]]:
    """The position and the cell of each photo of Parquet files, whose names are FILE/ROW.EXT."""
    cells: dict[str, list[str]] = {}
    for path in source.files:
        with open_parquet(path) as file:
            if column not in file.types:
                raise ResoluteError(f"{path}: has no column {column}, got {', '.join(file.types)}; correct GROUP")
            quoted = '"' + column.replace('"', '""') + '"'
            cells[file_name(path)] = [_as_text(value) for (value,) in file.rows([quoted], _BLOCK)]
    for position, name in enumerate(photos.all_names()):
        path, _, row = name.rpartition("/")
        yield position, cells[path][int(row.partition(".")[0])]


def _from_file(path: str, parts: Sequence[Photos]) -> list[str]:
    """Take the groups from a file of names and groups. A photo that it does not name is alone."""
    named = _read_file(path)
    names = list(named)
    is_known = np.zeros(len(names), np.bool_)
    for photos in parts:
        found = photos.find(names)
        absent = np.flatnonzero(found < 0).tolist()
        index = NameIndex(photos.all_names() if absent else (), photos.root, path)
        found[absent] = photos.find([_other_form(index, names[i], path) for i in absent])
        is_known |= found >= 0
        photos.set_groups("position", ((int(found[i]), named[names[i]]) for i in np.flatnonzero(found >= 0)))
    unknown = [names[i] for i in np.flatnonzero(~is_known).tolist()]
    indexes = [NameIndex(photos.all_names(), photos.root, path) for photos in parts] if unknown else []
    for name in unknown[:20]:
        for index in indexes:
            near = index.closest(name)
            if near is not None and near[1]:
                raise ResoluteError(
                    f"{path}: {len(unknown)} of {len(names)} names are no photos, got {name!a}, expected {near[0]!a} "
                    f"(difference: {near[1][0]}); correct the names"
                )
    if not is_known.any():
        raise ResoluteError(
            f"{path}: names no photo, got {(names or [''])[0]!a}, expected names such as {parts[0].name(0)!a}; correct "
            "GROUP"
        )
    if not unknown:
        return []
    return [f"{path}: {len(unknown)} of {counted(len(names), 'name')} are no photos here, such as {unknown[0]!a}"]


def _other_form(index: NameIndex, written: str, path: str) -> str:
    """The photo that `written` names in another form than its path; "" if there is none."""
    try:
        return index.find(written) or ""
    except AmbiguousName:
        raise ResoluteError(
            f"{path}: got {written}, which names several photos, expected a unique name; write their paths"
        ) from None


def _read_file(path: str) -> dict[str, str]:
    """{name of a photo: name of its group}; without those whose group is blank."""
    named: dict[str, str] = {}
    with text_lines(path) as lines:
        rows = csv.reader(lines, delimiter="\t" if path.lower().endswith(".tsv") else ",")
        heads = [head.strip().lower() for head in next(rows, [])]
        photo = next((heads.index(head) for head in _PHOTO_HEADS if head in heads), None)
        if "group" not in heads or photo is None:
            raise ResoluteError(
                f"{path}: got the columns {', '.join(heads)[:80] or 'none'}, expected name and group in its first "
                "line; add them"
            )
        group = heads.index("group")
        for row in rows:
            if len(row) <= max(photo, group):
                if not any(row):
                    continue
                raise ResoluteError(
                    f"{path}: line {rows.line_num} is incomplete, got {','.join(row)[:80]!r}, expected a name and a "
                    "group; correct it"
                )
            text = _as_text(row[group])
            if text and named.setdefault(row[photo], text) != text:
                raise ResoluteError(
                    f"{path}: line {rows.line_num}: got {row[photo]!a} in a second group, {text!a} and "
                    f"{named[row[photo]]!a}, expected one group for each photo; correct it"
                )
    return named


def _as_text(value: Any) -> str:
    """The name of a group; empty for a blank cell."""
    if value is None or (isinstance(value, float) and value != value):
        return ""
    return str(value).strip()


def group_numbers(sources: Mapping[str, Photos]) -> dict[str, NDArray[np.int64]] | None:
    """{source: (N,) int64}: the number of the group of each photo, -1 for one that is alone; None without groups.

    Groups are numbered in order of their names, over all sources.
    """
    database = next(iter(sources.values())).database
    database.run(
        "CREATE OR REPLACE TABLE group_numbers AS SELECT group_name, row_number() OVER (ORDER BY group_name) - 1 AS "
        f"number FROM (SELECT DISTINCT group_name FROM {rows_of(sources)} WHERE group_name IS NOT NULL)"
    )
    if not database.one("SELECT count(*) FROM group_numbers"):
        return None
    return {
        name: database.arrays(
            f"SELECT coalesce(number, -1)::BIGINT AS x FROM {photos.rows} LEFT JOIN group_numbers USING (group_name) "
            "ORDER BY position"
        )["x"]
        for name, photos in sources.items()
    }


def group_name(database: Database, number: int) -> str:
    """The name of a group with a number that `group_numbers` gave."""
    name: str = database.one("SELECT group_name FROM group_numbers WHERE number = ?", number)
    return name


def settled_groups(comparison: Comparison) -> dict[str, NDArray[np.int64]]:
    """{split: numbers} of the groups of which the set has photos there, of those that `group_numbers` has numbered."""
    return {
        split: comparison.database.arrays(
            f"SELECT DISTINCT number::BIGINT AS number FROM {comparison.set_rows} JOIN group_numbers "
            "USING (group_name) WHERE split = ?",
            split,
        )["number"]
        for split in ("train", "val")
    }


def fingerprint_of_groups(sources: Mapping[str, Photos]) -> str | None:
    """16 hex digits over the photos of each group and its name; None without groups."""
    database = next(iter(sources.values())).database
    ((count, digest),) = database.run(
        "SELECT count(*), bit_xor(md5_number(name || '\\x00'::BLOB || encode(group_name))) "
        f"FROM {rows_of(sources)} WHERE group_name IS NOT NULL"
    )
    return f"{digest % (1 << 64):016x}" if count else None


def describe_groups(setting: GroupSetting, sources: Mapping[str, Photos]) -> list[str]:
    """A line about the groups of the photos."""
    database = next(iter(sources.values())).database
    ((groups, grouped, largest, name, photos),) = database.run(
        "SELECT count(*) FILTER (group_name IS NOT NULL), sum(n) FILTER (group_name IS NOT NULL), "
        "max(n) FILTER (group_name IS NOT NULL), arg_max(group_name, n) FILTER (group_name IS NOT NULL), sum(n) "
        f"FROM (SELECT group_name, count(*) AS n FROM {rows_of(sources)} GROUP BY group_name)"
    )
    if not groups:
        return [f"GROUP={setting.text}: no photo has a group"]
    if largest == 1:
        return [f"GROUP={setting.text}: no two of {int(photos)} photos have the same, so that it keeps none together"]
    alone = f", {int(photos - grouped)} photos without one" if photos > grouped else ""
    return [
        f"GROUP={setting.text}: {counted(groups, 'group')} with {int(grouped)} photos, the largest with {largest} "
        f"({name}){alone}; each stays on one side of every split"
    ]
