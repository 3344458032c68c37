"""`Photos`: the table of all photos of a source, in ascending order of the bytes of their names.

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
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.target import IGNORED, Target
from resolute.prep.sources.archives.containers import container_stamps
from resolute.prep.sources.image_ref import MISSING, UNSEEN, ByteRange, Ignored, ImageRef, Source
from resolute.prep.sources.signature import ListingHash, signature_of_files
from resolute.prep.sources.targets import describe_label, is_number
from resolute.urls import is_url, without_credentials

from .classes import MAX_CLASSES, are_listed_names, by_name, by_number
from .database import Database
from .wording import describe_ignored

__all__ = ["Photos", "list_photos", "listed_servers", "objects"]

_BLOCK = 1 << 16  # photos that are inserted at once
_SERVERS = 8  # that are asked whether the network works
_TARGETS = {"class": "UINTEGER", "labels": "UINTEGER[]", "values": "FLOAT[]"}
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

        The columns are as above, with the full `path` of the file that holds a photo, and `missing` BOOLEAN: it was
        listed and does not exist.
        """
        return f"(SELECT * REPLACE ({self._path} AS path), stored_as = {MISSING} AS missing FROM {self.table})"

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

    def places(self, where: str = "true", *values: object) -> Iterator[tuple[int, ByteRange]]:
        """Yield the position and the location of the photos for which the SQL condition holds, by position."""
        for position, path, offset, nbytes, stored_as, size_bytes in self.database.rows(
            f'SELECT position, {self._path}, "offset", nbytes, stored_as, size_bytes FROM {self.table} WHERE {where} '
            "ORDER BY position",
            *values,
        ):
            file = os.fsdecode(path)
            yield position, ByteRange(file, offset, nbytes, stored_as, size_bytes, self.stamps.get(file, ""))

    @property
    def _path(self) -> str:
        """The SQL expression of the full path or URL of the file that holds a photo, BLOB."""
        folder = os.fsencode(self.root.rstrip("/") + "/").hex().upper()
        return f"coalesce(path, if(absolute, name, unhex('{folder}') || name))"

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
        return listed_servers(self.database, f"(SELECT {self._path} AS path, stored_as FROM {self.table})")

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


def objects(values: Iterable[object]) -> NDArray[Any]:
    """(n,) array of Python objects, which may be bytes or lists."""
    values = list(values)
    array = np.empty(len(values), object)
    array[:] = values
    return array


def list_photos(
    source: Source,
    database: Database,
    table: str,
    *,
    classes: Sequence[str] | None = None,
    classes_file: str = "CLASSES",
    class_numbers: Mapping[str, int] | None = None,
    training: Photos | None = None,
    known_classes: Sequence[str] = (),
) -> Photos:
    """Write everything that `source` yields to the new table `table`.

    Class numbers are those of `classes` (the names in `classes_file`, with `class_numbers` for labels that are numbers)
    or, for a validation source, of `training`, which
    also decides whether labels that look like numbers are names; otherwise classes are numbered in order of their
    names' code points, or keep their numbers if the source is `numbered`. Either way the classes of a set that exists,
    `known_classes`, keep their numbers, and further ones follow.

    Raises `ResoluteError` for a source without images; for training, with fewer than two classes; for an unknown class
    or a number out of range; for a photo with two targets; and if the disk refuses.
    """
    labels: dict[str | Ignored, int] = {}
    listing = ListingHash()
    count = _insert(source, database, table, labels, listing)
    found = source.listing
    ignored = Counter(found.ignored)
    if not count:
        ignored_text = describe_ignored(ignored)
        raise ResoluteError(
            f"{source.root}: no classes, got no image with a class (ignored: {ignored_text}), expected one folder per "
            f"class, or one label per image; point {'SRC' if training is None else 'VAL'} at the class folders' parent"
        )
    kind = found.target.kind
    if training is not None:
        classes, class_numbers = training.classes, training.class_numbers
        _check_same_target(source, training)
    names: tuple[str, ...] = ()
    numbers = np.zeros(1, np.uint32)
    numbered = found.numbered and found.label_names is None
    if kind == "values":
        target = Target(kind=kind, names=found.target.names, units=found.target.units)
    else:
        # why not the ignored ones: each is the label of a column too, and these are all there
        own = tuple(label for label in labels if isinstance(label, str))
        # why: if a training part has names such as "10", that is what 10 means, and not the class with that number
        are_names = training is not None and not training.numbered and any(map(is_number, training.classes))
        if training is None and numbered and classes is not None and class_numbers is None:
            are_names = are_listed_names(own, classes, classes_file)
            numbered = not are_names
        names, number_of = _number_classes(
            source,
            own,
            classes,
            classes_file,
            class_numbers,
            training,
            known_classes,
            are_names=are_names,
        )
        target = Target(kind=kind, names=names, ignored=found.target.ignored)
        numbers = np.array(
            [number_of[n] if isinstance(n, str) else number_of[n.label] + IGNORED for n in labels], np.uint32
        )
    if training is None and kind == "class" and len(labels) < 2:
        raise ResoluteError(
            f"{source.root}: too few classes, got one class ({names[int(numbers[0])]}), expected at least two; point "
            "SRC at the folder that holds the class folders"
        )
    repeated = _sort(source, database, table, kind, numbers)
    if repeated:
        ignored["duplicate names"] += repeated
    photos = Photos(
        database=database,
        table=table,
        root=source.root,
        count=count - repeated,
        classes=names,
        ignored=dict(ignored),
        listed=found.listed,
        target=target,
        about=found.target.about,
        warnings=found.target.warnings,
        numbered=numbered,
        columns=found.target.classes,
        class_numbers=class_numbers,
        signature=signature_of_files(source.files, found.stamps) if found.stamps else listing.signature(),
    )
    # why zip without strict: most sources have no stamps
    listed = dict(zip(source.files, found.stamps, strict=False))
    return replace(photos, stamps=container_stamps(photos.containers, listed))


def _insert(
    source: Source, database: Database, table: str, labels: dict[str | Ignored, int], listing: ListingHash
) -> int:
    """Insert the photos into `listed_TABLE`, in the order of the source, and add them to `listing`; returns their
    number.

    Labels are numbered in order of first appearance, in the caller's table `labels`.
    """
    count, images, kind = 0, iter(source), ""
    with database.transaction():
        while block := list(islice(images, _BLOCK)):
            if not kind:  # why here: the source knows its targets when it has yielded the first image
                kind = source.listing.target.kind
                labels.update({name: n for n, name in enumerate(source.listing.target.classes)})
                database.run(
                    f"CREATE OR REPLACE TABLE listed_{table} (place UBIGINT, name BLOB, path BLOB, absolute BOOLEAN, "
                    f'"offset" BIGINT, '
                    f"nbytes UBIGINT, stored_as UTINYINT, size_bytes UBIGINT, target {_TARGETS[kind]}, line UINTEGER)"
                )
            fields = list(zip(*block, strict=True))
            target = "target" if kind == "class" else f"target::{_TARGETS[kind]}"
            database.run_on(
                _columns(source, fields, kind, labels, count),
                f'INSERT INTO listed_{table} SELECT place, name, path, absolute, "offset", nbytes, stored_as, '
                f"size_bytes, {target}, line FROM columns",
            )
            listing.add(fields)
            count += len(block)
    return count


def _columns(
    source: Source, fields: Sequence[Sequence[Any]], kind: str, labels: dict[str | Ignored, int], first: int
) -> dict[str, NDArray[Any]]:
    """The columns of `listed_TABLE` for the fields of a block of images, after the `first` images; labels as text."""
    texts, own_labels, sizes, containers, offsets, stored_as, file_sizes, lines = fields
    paths: list[bytes | None] = [os.fsencode(container) if container else None for container in containers]
    names = os.fsencode("\0".join(texts)).split(b"\0")  # why at once: it is five times as fast
    pairs = zip(texts, containers, strict=True)
    absolute = np.array([not within and (name[:1] == "/" or is_url(name)) for name, within in pairs], np.bool_)
    for i in np.flatnonzero(absolute).tolist():
        name = texts[i]
        if "@" in name or "=" in name:  # it may hold credentials
            shown = os.fsencode(without_credentials(name))
            if shown != names[i]:
                names[i], paths[i] = shown, names[i]
    targets: NDArray[Any]
    if kind == "class":
        for label in dict.fromkeys(own_labels):
            labels.setdefault(label, len(labels))
        targets = np.fromiter(map(labels.__getitem__, own_labels), np.uint32, len(texts))
    elif kind == "labels":
        numbers = ([labels.setdefault(each, len(labels)) for each in label] for label in own_labels)
        targets = objects(str(sorted(set(row))) for row in numbers)
    else:  # why text: DuckDB takes the type of a column of lists from the first rows, which may be empty
        targets = objects(str(np.asarray(label, "<f4").tolist()) for label in own_labels)
    if len(labels) > MAX_CLASSES:
        raise ResoluteError(
            f"{source.root}: too many classes, got more than {MAX_CLASSES} different labels such as "
            f"{list(labels)[-1][:80]!r}, expected class names; name the column or file that holds them"
        )
    nbytes = np.array(sizes, np.uint64)
    of_files = np.array(file_sizes, np.int64)
    return {
        "place": np.arange(first, first + len(texts), dtype=np.uint64),
        "name": objects(names),
        "path": objects(paths),
        "absolute": absolute,
        "offset": np.array(offsets, np.int64),
        "nbytes": nbytes,
        "stored_as": np.array(stored_as, np.uint8),
        "size_bytes": np.where(of_files < 0, nbytes, of_files.astype(np.uint64)),
        "target": targets,
        "line": np.array(lines, np.uint32),
    }


def _sort(source: Source, database: Database, table: str, kind: str, numbers: NDArray[np.uint32]) -> int:
    """Make `table` of `listed_TABLE`, with class numbers for labels; returns the number of repeated names.

    Of photos with the same name the last one is kept, as when an archive is unpacked.
    """
    target, join, values = "target", "", []
    if kind == "class":
        target, join = "number", "JOIN columns ON label = target"
    elif kind == "labels":
        target, values = "list_sort(list_transform(target, lambda each: (?::UINTEGER[])[each + 1]))", [numbers.tolist()]
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
        raise _two_targets(source, os.fsdecode(conflicting))
    if repeated:
        database.run(
            f"CREATE OR REPLACE TABLE {table} AS "
            f"SELECT (row_number() OVER (ORDER BY position) - 1)::UINTEGER AS position, {rest}, target, group_name "
            f"FROM (SELECT *, lead({_WRITTEN}) OVER (ORDER BY position) AS following FROM {table}) "
            f"WHERE following IS DISTINCT FROM {_WRITTEN}"
        )
    return int(repeated)


def _two_targets(source: Source, name: str) -> ResoluteError:
    """The error for an image with two different targets, which are looked up in the source again."""
    images = [image for image in source if image.name == name]
    first = images[0]
    conflicting = next(image for image in images if image.label != first.label)
    target = source.listing.target
    texts = []
    for image in (first, conflicting):
        text = repr(describe_label(image.label, target.names, target.units))
        texts.append(f"{text} in line {image.line}" if image.line else text)
    what = "belongs to two classes" if target.kind == "class" else "has two targets"
    return ResoluteError(
        f"{name}: {what}, got {' and '.join(texts)}, expected one row per image with all of its labels; correct them"
    )


def _check_same_target(source: Source, training: Photos) -> None:
    """Raise `ResoluteError` unless the targets of a validation source are of the kind and names of `training`."""
    own, target = source.listing.target, training.target
    if own.kind != target.kind:
        raise ResoluteError(
            f"{source.root}: targets of another kind, got {own.kind}, expected {target.kind} as in {training.root}; "
            "correct VAL, or set TARGET"
        )
    expected, got = set(training.columns), set(own.classes or own.columns)
    # why not in one class by several columns: one that is missing is then a class without photos
    is_by_columns = own.kind == "labels" if own.classes else not got.isdisjoint(expected)
    if expected and got != expected and is_by_columns:
        both = ((expected - got, "lacks"), (got - expected, "adds"))
        texts = [f"{verb} {', '.join(sorted(columns))[:200]}" for columns, verb in both if columns]
        raise ResoluteError(
            f"{source.root}: other columns, got a table that {' and '.join(texts)}, expected the {len(expected)} of "
            "SRC's table, since a missing one would count as 0 for all photos; correct VAL_LABELS or COLUMNS"
        )
    if target.kind == "values" and (own.names, own.units) != (target.names, target.units):
        raise ResoluteError(
            f"{source.root}: other values, got {', '.join(own.names)[:200]}, expected {', '.join(target.names)[:200]} "
            f"in this order, as in {training.root}; correct VAL, or name the columns with COLUMNS"
        )


def _number_classes(
    source: Source,
    labels: Sequence[str],
    classes: Sequence[str] | None,
    listed_in: str,
    class_numbers: Mapping[str, int] | None,
    training: Photos | None,
    known: Sequence[str],
    *,
    are_names: bool,
) -> tuple[tuple[str, ...], Mapping[str, int]]:
    src, trained_on = source.root, training.root if training is not None else None

    def first_with(label: str) -> ImageRef | None:
        has_label = (
            image
            for image in source
            if label == image.label or (not isinstance(image.label, str) and label in image.label)
        )
        return next(has_label, None)

    def locate(label: str) -> str:
        image = first_with(label)
        return f" in line {image.line}" if image is not None and image.line else ""

    for label in labels:
        if not _is_encodable(label):  # why: JSON can hold half a character
            image = first_with(label)
            name = label if image is None else image.name
            raise ResoluteError(f"{src}: {name!r} has no text as its label, got {label!r}, expected text; correct it")
    if source.listing.numbered:
        names, numbers = by_number(
            labels,
            names=source.listing.label_names,
            classes=classes,
            src=src,
            listed_in=listed_in,
            training=trained_on,
            are_names=are_names,
            listed=class_numbers,
            locate=locate,
        )
        # why: photos of the last classes may be gone
        return (tuple(known) if names == tuple(known[: len(names)]) else names), numbers
    if classes is None and known:
        classes = (*known, *sorted(set(labels) - set(known)))
    return by_name(
        labels,
        classes=classes,
        src=src,
        listed_in=listed_in,
        training=trained_on,
        listed=class_numbers,
        locate=locate,
    )


def _is_encodable(text: str) -> bool:
    """Whether `text` has bytes, valid UTF-8 or not, as names in folders and archives have."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True
