"""`Comparison`: the sources as they are now beside the photos of a finished set, compared by name, size and target."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resolute.errors import ResoluteError
from resolute.prep.sources.archives.tar_members import is_archive

from .database import Database, objects
from .photos import Photos, rows_of

__all__ = ["Comparison", "compare"]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """For each source, by position: `known` (N,) bool, whether the photo needs no conversion, because it is in the set,
    or was rejected and has not changed since; `split_of` (N,) u1, 1 + the number in `splits` of the split that a photo
    of this name has been in, 0: none.

    Only this module names its tables: `compared` has a row (generation, split, key, rejected, source, position, same)
    for each photo of the set; `position` is NULL if the source lacks it, `same` is whether its size and target are what
    they were. `rejected` has (split, key, reason) of those that are not in the set.
    """

    database: Database
    set_rows: str  # the photos of the set, as `SetPhotos.rows`
    splits: tuple[str, ...]
    known: Mapping[str, NDArray[np.bool_]]
    split_of: Mapping[str, NDArray[np.uint8]]
    removed: int  # photos in the set that the source lacks now
    changed: int  # those that have another size or target now

    @property
    def added(self) -> int:
        """The number of photos to add."""
        return sum(int((~known).sum()) for known in self.known.values())

    def changes(self) -> Iterator[tuple[str, str, str]]:
        """Yield (name, split, "removed" or "changed") of photos in the set."""
        for name, split, is_removed in self.database.rows(
            "SELECT name, split, position IS NULL AS removed "
            f"FROM compared JOIN {self.set_rows} USING (generation, split, key) "
            "WHERE NOT rejected AND (position IS NULL OR NOT same) ORDER BY removed DESC, generation, split, name"
        ):
            yield os.fsdecode(name), split, "removed" if is_removed else "changed"

    def gone(self, names: Iterable[str]) -> set[str]:
        """Those of the names that photos of the set have and the source lacks."""
        found = self.database.run_on(
            {"name": objects(map(os.fsencode, names))},
            f"SELECT DISTINCT name FROM columns JOIN {self.set_rows} USING (name) "
            "JOIN compared USING (generation, split, key) WHERE position IS NULL",
        )
        return {os.fsdecode(name) for (name,) in found}

    def add_rejected(self, rejects: Mapping[tuple[str, int], str]) -> None:
        """Add {(split, key): reason} of photos that are not in the set; the reasons of known ones stay."""
        self.database.run_on(
            _reject_columns(rejects),
            "INSERT INTO rejected SELECT c.split::VARCHAR, c.key, c.reason::VARCHAR FROM columns c "
            "ANTI JOIN rejected r ON r.split = c.split::VARCHAR AND r.key = c.key",
        )

    @property
    def rows(self) -> str:
        """The photos of the set, for queries of other modules.

        The columns are split, key, source and position (NULL: the photo is gone or has changed), and reason (NULL: it
        is in the set).
        """
        return (
            "(SELECT c.split, c.key, c.source, if(c.same, c.position, NULL) AS position, r.reason FROM compared c "
            "LEFT JOIN rejected r USING (split, key))"
        )

    def class_counts(self, split: str, classes: int) -> NDArray[np.int64]:
        """(classes,) the photos of the set by class, in a split; (1,) all of them if targets are not classes."""
        counts = np.zeros(classes, np.int64)
        of = "target" if self.database.one(f"SELECT typeof(target) FROM {self.set_rows} LIMIT 1") == "UINTEGER" else "0"
        rows = self.database.run(
            f"SELECT {of} AS class, count(*) FROM {self.set_rows} ANTI JOIN rejected USING (split, key) "
            "WHERE split = ? GROUP BY class",
            split,
        )
        for number, count in rows:
            counts[number] = count
        return counts


def _reject_columns(rejects: Mapping[tuple[str, int], str]) -> dict[str, NDArray[Any]]:
    """The columns split, key and reason of {(split, key): reason}, for `Database.run_on`."""
    return {
        "split": objects(split for split, _ in rejects),
        "key": np.array([key for _, key in rejects], np.uint64),
        "reason": objects(rejects.values()),
    }


def compare(
    database: Database,
    set_rows: str,
    sources: Mapping[str, Photos],
    splits: Sequence[str],
    rejected: Mapping[tuple[str, int], str],
) -> Comparison:
    """Compare the photos of a set, `set_rows` (see `SetPhotos.rows`), with the `sources` as they are now.

    `rejected` {(split, key): reason} are those that are not in the set. Photos that have changed stay as they are,
    except for a rejected one, which is to be added. Raises `ResoluteError` if the name of a photo of the set has become
    that of another, since a further archive comes before its own.
    """
    database.run_on(
        _reject_columns(rejected),
        "CREATE OR REPLACE TABLE rejected AS "
        "SELECT split::VARCHAR AS split, key, reason::VARCHAR AS reason FROM columns",
    )
    # why: without a source of their own, the photos of val are among those of train
    source_of = "split" if len(sources) > 1 else "'train'"
    database.run(f"""
        CREATE OR REPLACE TABLE compared AS
        SELECT s.generation, s.split, s.key, r.reason IS NOT NULL AS rejected, s.source, n.position,
               n.size_bytes = s.size_bytes AND n.target = s.target AND n.missing = s.missing AS same
        FROM (SELECT *, {source_of} AS source FROM {set_rows}) s
        LEFT JOIN {rows_of(sources)} n ON n.name = s.name AND n.source = s.source
        LEFT JOIN rejected r ON r.split = s.split AND r.key = s.key
    """)
    known, split_of = {}, {}
    for name, photos in sources.items():
        known[name], split_of[name] = np.zeros(len(photos), np.bool_), np.zeros(len(photos), np.uint8)
        found = database.arrays(
            "SELECT position, list_position(?, split)::UTINYINT AS split, same OR NOT rejected AS known FROM compared "
            "WHERE source = ? AND position IS NOT NULL ORDER BY generation",
            list(splits),
            name,
        )
        known[name][found["position"][found["known"]]] = True
        split_of[name][found["position"]] = found["split"]
    ((removed, changed),) = database.run(
        "SELECT count(*) FILTER (position IS NULL), count(*) FILTER (NOT same) FROM compared WHERE NOT rejected"
    )
    if changed:
        for name, photos in sources.items():
            _refuse_renamed(photos, set_rows, name, ~known[name])
    return Comparison(
        database=database,
        set_rows=set_rows,
        splits=tuple(splits),
        known=known,
        split_of=split_of,
        removed=removed,
        changed=changed,
    )


def _refuse_renamed(photos: Photos, set_rows: str, source: str, is_new: NDArray[np.bool_]) -> None:
    """Raise `ResoluteError` if a photo of the set has another name now, its old one and its archive's in front."""
    changed: dict[str, set[int]] = {}
    for name, size in photos.database.rows(
        f"SELECT s.name, s.size_bytes FROM compared JOIN {set_rows} s USING (generation, split, key) "
        "WHERE compared.source = ? AND NOT same",
        source,
    ):
        changed.setdefault(os.fsdecode(name), set()).add(size)
    if not changed:
        return
    for position, name, size in photos.database.rows(
        f'SELECT position, name, size_bytes FROM {photos.rows} WHERE "offset" >= 0 ORDER BY position'
    ):
        archive, _, own = os.fsdecode(name).partition("/")
        while own and is_new[position]:
            if is_archive(archive) and size in changed.get(own, ()):
                raise ResoluteError(
                    f"{photos.root}: the set holds {own} of {archive}, got a photo of that name in a further archive "
                    f"that comes before {archive}, expected it after; rename the further archive, or start over with "
                    "REBUILD=1 (--rebuild)"
                )
            folder, _, own = own.partition("/")
            archive += f"/{folder}"
