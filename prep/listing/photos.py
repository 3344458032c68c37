"""`Photos`: the table of all photos of a source, in ascending order of the bytes of their names, and how it is filled.

The table is in a `Database`, so that the number of photos is not limited by memory; it has a row for each photo:

    position     UINTEGER   from 0
    name         BLOB       relative to the source, or a path or URL, without credentials
    path         BLOB       the archive that holds it, or its URL with credentials; NULL: it is the file `name`
    absolute     BOOLEAN    `name` is a path or URL itself, and not below root
    offset       BIGINT     of its bytes in `path`; -1: the entire file
    nbytes       UBIGINT    from `offset`
    stored_as    UTINYINT   PLAIN, ZIPPED, MISSING or UNSEEN
    size_bytes   UBIGINT    of the image file itself
    target       UINTEGER (class number), UINTEGER[] (class numbers of labels, ascending; of those that are ignored,
                 plus `IGNORED`) or FLOAT[] (values)
    line         UINTEGER   where the target is written, as in `ImageRef`
    group_name   VARCHAR    of the photos that GROUP keeps together; NULL: it is alone
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resolute.pipeline.dataset.target import IGNORED, Target
from resolute.prep.sources.image_ref import MISSING, UNSEEN, ByteRange
from resolute.urls import is_url, without_credentials

from .database import Database, objects

__all__ = ["NewPhotos", "Photos", "listed_servers", "rows_of"]

_BLOCK = 1 << 16  # photos that are inserted at once
_SERVERS = 8  # that are asked whether the network works
_TARGETS = {"class": "UINTEGER", "labels": "UINTEGER[]", "values": "FLOAT[]"}
_SPREAD = 2_654_435_761  # odd: multiples of it visit all 32-bit numbers in a scattered order
_WRITTEN = "if(absolute AND path IS NOT NULL, path, name)"  # the name as the source gives it


@dataclass(frozen=True, kw_only=True)
class Photos:
    """The photos of a source, at least one, in the table `table` of `database`, which only this module names.

    `root` is what names of plain files are relative to; `classes` are all class names by number, including empty
    classes (none if targets are values); `ignored` counts things in the source that are not images of a class, by kind,
    which with the photos are the `listed` entries of the source.
    """

    database: Database
    table: str
    root: str
    count: int
    classes: tuple[str, ...]
    ignored: Mapping[str, int]
    listed: int
    target: Target
    about: tuple[str, ...] = ()  # what the targets were recognised as, with examples, in lines
    warnings: tuple[str, ...] = ()  # what in the source is probably a mistake, in lines
    numbered: bool = False  # the source's labels are class numbers without names of their own
    columns: tuple[str, ...] = ()  # the columns of 0 and 1 of a table, one per class
    class_numbers: Mapping[str, int] | None = None  # of labels that are numbers, if CLASSES says them
    signature: str | None = None  # of the source; None: unknown
    stamps: Mapping[str, str] = field(default_factory=dict)  # the states of `containers` when they were listed

    def __len__(self) -> int:
        return self.count

    @cached_property
    def labels(self) -> NDArray[np.uint32]:
        """(N,) the class number of each photo, if targets are classes."""
        return self.column("target")

    def column(self, expression: str, *values: object) -> NDArray[Any]:
        """(N,) the values of an SQL expression, by position."""
        return np.ascontiguousarray(
            self.database.arrays(f"SELECT {expression} AS x FROM {self.table} ORDER BY position", *values)["x"]
        )

    def name(self, position: int) -> str:
        return os.fsdecode(self.database.one(f"SELECT name FROM {self.table} WHERE position = ?", position))

    def names(self, positions: Iterable[int]) -> list[str]:
        return [self.name(position) for position in positions]

    def all_names(self) -> Iterator[str]:
        """Yield the names of all photos, by position."""
        for (name,) in self.database.rows(f"SELECT name FROM {self.table} ORDER BY position"):
            yield os.fsdecode(name)

    def find(self, names: Sequence[str]) -> NDArray[np.int64]:
        """(n,) the positions of the photos with these names, -1 for those that are not there."""
        found = np.full(len(names), -1, np.int64)
        asked = {"i": np.arange(len(names)), "name": objects(map(os.fsencode, names))}
        for i, position in self.database.run_on(
            asked, f"SELECT i, position FROM {self.table} JOIN columns USING (name)"
        ):
            found[i] = position
        return found

    @property
    def rows(self) -> str:
        """The photos, for queries of other modules.

        The columns are as above, with the full `path` or URL of the file that holds a photo, and `missing` BOOLEAN: it
        was listed and does not exist.
        """
        folder = os.fsencode(self.root.rstrip("/") + "/").hex().upper()
        path = f"coalesce(path, if(absolute, name, unhex('{folder}') || name))"
        return f"(SELECT * REPLACE ({path} AS path), stored_as = {MISSING} AS missing FROM {self.table})"

    def set_groups(self, by: str, groups: Iterable[tuple[int, str]]) -> None:
        """Set `group_name` of the photos whose column `by` has the numbers; an empty text is no group."""
        database = self.database
        database.run("CREATE OR REPLACE TABLE named_groups (number UBIGINT, group_name VARCHAR)")
        named = ((number, text) for number, text in groups if text)
        with database.transaction():
            while block := list(islice(named, _BLOCK)):
                numbers, texts = zip(*block, strict=True)
                database.run_on(
                    {"number": np.array(numbers, np.uint64), "text": objects(texts)},
                    "INSERT INTO named_groups SELECT number, text::VARCHAR FROM columns",
                )
        database.run(
            f"CREATE OR REPLACE TABLE {self.table} AS SELECT p.* EXCLUDE (group_name), g.group_name FROM {self.table} "
            f"p LEFT JOIN named_groups g ON g.number = p.{by} ORDER BY position"
        )
        database.run("DROP TABLE named_groups")

    def places(self) -> Iterator[tuple[int, ByteRange]]:
        """Yield the position and the location of each photo, by position."""
        yield from self._places("true")

    def sampled_places(self, count: int, suffixes: Sequence[str]) -> Iterator[tuple[int, ByteRange]]:
        """As `places`, for up to `count` photos whose names have one of the `suffixes`, scattered over the source.

        Suffixes are ASCII, in lower case, and also stand for those with capitals.
        """
        endings = []
        for suffix in suffixes:
            forms = ("".join(letters) for letters in product(*({c.lower(), c.upper()} for c in suffix)))
            names = ", ".join(sorted(f"'{form.encode().hex().upper()}'" for form in forms))
            endings.append(f"right(hex(name), {2 * len(suffix)}) IN ({names})")
        yield from self._places(
            f"position IN (SELECT position FROM {self.table} WHERE {' OR '.join(endings)} "
            f"ORDER BY (position::UBIGINT * {_SPREAD}) & 4294967295 LIMIT {count})"
        )

    def _places(self, where: str) -> Iterator[tuple[int, ByteRange]]:
        for position, path, offset, nbytes, stored_as, size_bytes in self.database.rows(
            f'SELECT position, path, "offset", nbytes, stored_as, size_bytes FROM {self.rows} WHERE {where} '
            "ORDER BY position"
        ):
            file = os.fsdecode(path)
            yield position, ByteRange(file, offset, nbytes, stored_as, size_bytes, self.stamps.get(file, ""))

    @property
    def containers(self) -> list[str]:
        """The archives that hold photos, sorted."""
        rows = self.database.run(f'SELECT DISTINCT path FROM {self.table} WHERE "offset" >= 0 ORDER BY path')
        return [os.fsdecode(path) for (path,) in rows if path is not None]

    @property
    def is_remote(self) -> bool:
        """Whether the bytes of a photo are behind a URL."""
        return (
            is_url(self.root)
            or any(map(is_url, self.containers))
            or bool(
                self.database.run(
                    f"SELECT 1 FROM {self.table} WHERE absolute AND contains(hex(name), hex('://'::BLOB)) LIMIT 1"
                )
            )
        )

    @property
    def servers(self) -> tuple[str, ...]:
        """The URLs of photos on the web servers that have most of them, one for each, of a source that lists URLs."""
        return listed_servers(self.database, self.rows)

    def path_with_credentials(self) -> str | None:
        """A path or name in the table that is a URL with credentials; None if there is none."""
        rows = self.database.run(f"SELECT path FROM {self.table} WHERE absolute AND path IS NOT NULL LIMIT 1")
        paths = [self.root, *self.containers, *(os.fsdecode(path) for (path,) in rows)]
        return next((path for path in paths if "://" in path and without_credentials(path) != path), None)

    def class_counts(self, chosen: NDArray[np.uint32] | None = None) -> NDArray[np.int64]:
        """(C,) number of photos of each class, of all photos or of those at the positions `chosen`."""
        if self.target.kind == "class":
            labels = self.labels if chosen is None else self.labels[chosen]
            counts: NDArray[np.int64] = np.bincount(labels, minlength=len(self.classes))
            return counts
        counts = np.zeros(len(self.classes), np.int64)
        table = self.table if chosen is None else f"{self.table} JOIN columns USING (position)"
        columns = {"position": np.empty(0, np.uint32) if chosen is None else chosen}
        for number, count in self.database.run_on(
            columns,
            f"SELECT number, count(*) FROM (SELECT unnest(target) AS number FROM {table}) WHERE number < {IGNORED} "
            "GROUP BY number",
        ):
            counts[number] = count
        return counts

    def strata(self) -> NDArray[np.uint32]:
        """(N,) u4: the group of each image, as `Target.strata`: its class; of several its rarest, C without any."""
        if self.target.kind == "class":
            return self.labels
        if self.target.kind == "values":
            return np.full(len(self), len(self.classes), np.uint32)
        order = np.argsort(self.class_counts(), kind="stable")  # rarest first
        ranks = np.empty(len(order), np.uint32)
        ranks[order] = np.arange(len(order))
        # why: the rank of an ignored label is NULL, which `list_min` leaves out
        rarest = self.column(
            "coalesce(list_min(list_transform(target, lambda each: (?::UINTEGER[])[each + 1])), ?)",
            ranks.tolist(),
            len(order),
        )
        strata: NDArray[np.uint32] = np.append(order, len(order)).astype(np.uint32)[rarest.astype(np.int64)]
        return strata

    def ties(self, seed: int) -> NDArray[np.uint64]:
        """(N,) uint64: a random number of each photo, by the name of its group or its own."""
        return self.column("md5_number_lower(?::BLOB || coalesce(encode(group_name), name))", b"%d " % seed)

    def by_class(self) -> dict[str, tuple[int, str]]:
        """{non-empty class: (photos, 16 hex digits over their names and sizes)}, to report which classes changed.

        Of labels, also those without any, and those in which a label is ignored; of values there is one entry, over
        these too. The digits change with the source's content, but not with the way it is packed or its URLs are
        signed.
        """
        of, names = "target", self.classes
        if self.target.kind == "labels":
            of, names = f"unnest(if(len(target) = 0, [{len(self.classes)}], target))", (*self.classes, "(no label)")
        elif self.target.kind == "values":
            of, names = "0", ("(values)",)
        values = "'\\x0A'::BLOB || encode(target::VARCHAR)" if self.target.kind == "values" else "''::BLOB"
        rows = self.database.run(f"""
            SELECT class, count(*), bit_xor(digest) FROM (
                SELECT {of} AS class,
                       md5_number(name || '\\x00'::BLOB || encode(size_bytes::VARCHAR) || {values}) AS digest
                FROM {self.table}
            ) GROUP BY class ORDER BY class
        """)
        return {
            names[number] if number < IGNORED else f"{names[number - IGNORED]} (ignored)": (
                count,
                f"{digest % (1 << 64):016x}",
            )
            for number, count, digest in rows
        }


def rows_of(sources: Mapping[str, Photos]) -> str:
    """The photos of all sources, for queries: `source` VARCHAR, its name, and the columns of `Photos.rows`."""
    each = (f"SELECT '{name}' AS source, * FROM {photos.rows}" for name, photos in sources.items())
    return f"({' UNION ALL '.join(each)})"


def listed_servers(database: Database, rows: str) -> tuple[str, ...]:
    """URLs on different web servers among `rows`, with the columns path and stored_as; those of most rows first.

    They are `servers` for `fetch_many`.
    """
    found = database.run(
        f"SELECT min(path) FROM {rows} WHERE stored_as = {UNSEEN} AND starts_with(path::VARCHAR, 'http') "
        "GROUP BY regexp_extract(path::VARCHAR, '^https?://([^/?#]*)', 1) ORDER BY count(*) DESC, 1 "
        f"LIMIT {_SERVERS}"
    )
    return tuple(os.fsdecode(path) for (path,) in found)


class NewPhotos:
    """The table `table` of `database` while it is filled, in the order of a source, by `add` and then `finish`.

    `kind` is that of the targets. Until `finish` the photos are in the table `listed_TABLE`, whose columns are those
    that `add` takes.
    """

    def __init__(self, database: Database, table: str, kind: str) -> None:
        self._database, self._table, self._kind = database, table, kind
        database.run(
            f"CREATE OR REPLACE TABLE listed_{table} (place UBIGINT, name BLOB, path BLOB, absolute BOOLEAN, "
            f'"offset" BIGINT, nbytes UBIGINT, stored_as UTINYINT, size_bytes UBIGINT, target {_TARGETS[kind]}, '
            "line UINTEGER)"
        )

    def add(self, columns: Mapping[str, NDArray[Any]]) -> None:
        """Add photos: {column: (n,) array} of place, which counts the photos of the source, and of the table's columns
        from name to line.

        Class numbers in `target` are those of labels; lists are text that DuckDB reads.
        """
        target = "target" if self._kind == "class" else f"target::{_TARGETS[self._kind]}"
        self._database.run_on(
            columns,
            f'INSERT INTO listed_{self._table} SELECT place, name, path, absolute, "offset", nbytes, stored_as, '
            f"size_bytes, {target}, line FROM columns",
        )

    def finish(self, numbers: NDArray[np.uint32]) -> tuple[int, str | None]:
        """Make the table, with the class `numbers` (labels,) for labels.

        Returns how many names were repeated, and a name with different targets; the table is then of no use. Of photos
        with the same name the last one is kept, as when an archive is unpacked.
        """
        database, table = self._database, self._table
        target, join, values = "target", "", []
        if self._kind == "class":
            target, join = "number", "JOIN columns ON label = target"
        elif self._kind == "labels":
            target = "list_sort(list_transform(target, lambda each: (?::UINTEGER[])[each + 1]))"
            values = [numbers.tolist()]
        rest = 'name, path, absolute, "offset", nbytes, stored_as, size_bytes, line'
        # why the path of a file: two URLs may differ in their credentials alone
        database.run_on(
            {"label": np.arange(len(numbers), dtype=np.uint32), "number": numbers},
            f"CREATE OR REPLACE TABLE {table} AS SELECT (row_number() OVER (ORDER BY {_WRITTEN}, place) - 1)::UINTEGER "
            f"AS position, {rest}, {target} AS target, NULL::VARCHAR AS group_name FROM listed_{table} {join}",
            *values,
        )
        database.run(f"DROP TABLE listed_{table}")
        ((repeated, conflicting),) = database.run(
            "SELECT count(*), any_value(written) FILTER (target IS DISTINCT FROM other) FROM ("
            f"SELECT {_WRITTEN} AS written, target, lead({_WRITTEN}) OVER by_position AS following, "
            f"lead(target) OVER by_position AS other FROM {table} WINDOW by_position AS (ORDER BY position)) "
            "WHERE written = following"
        )
        if conflicting is not None:
            return 0, os.fsdecode(conflicting)
        if repeated:
            database.run(
                f"CREATE OR REPLACE TABLE {table} AS "
                f"SELECT (row_number() OVER (ORDER BY position) - 1)::UINTEGER AS position, {rest}, target, group_name "
                f"FROM (SELECT *, lead({_WRITTEN}) OVER (ORDER BY position) AS following FROM {table}) "
                f"WHERE following IS DISTINCT FROM {_WRITTEN}"
            )
        return int(repeated), None
