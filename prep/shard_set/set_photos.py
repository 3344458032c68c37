"""The photos of a set, as OUT keeps them: a Parquet file for each generation, `records/photos.parquet`, `photos-001…`.

It has a row for each photo that was listed, sorted by split and key:

    split        VARCHAR    train or val
    key          UBIGINT    of the sample
    name         BLOB       of the photo in its source, without credentials
    size_bytes   UBIGINT    of the image file
    target       as in the table of photos (`photos.py`)
    missing      BOOLEAN    the photo was listed and did not exist
    group_name   VARCHAR    of the photos that GROUP keeps together, NULL for one that is alone; this column is there
                            only if the generation has groups

A photo may be gone from the source later, so the file cannot be derived again. The specification of the generation
holds the number of rows and a SHA-256 over these. The same photos and settings give the same
specification, and with the same version of DuckDB, which Parquet files name, the same bytes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.format import generation_mark
from resolute.prep.listing.database import Database, objects
from resolute.prep.shard_set.generation import GenerationSpec
from resolute.prep.shard_set.record import RECORDS
from resolute.prep.storage.output import Store
from resolute.scratch import ScratchFolder

__all__ = [
    "SetPhotos",
    "file_info",
    "local_photos",
    "lost_photos",
    "photo_files",
    "photos_name",
    "put_file",
    "write_photos",
]

_COLUMNS = "split, key, name, size_bytes, target, missing"
_GROUP = ", group_name"


def photos_name(generation: int) -> str:
    """The file with the photos of a generation."""
    return f"{RECORDS}/photos{generation_mark(generation, '-')}.parquet"


def write_photos(database: Database, planned: str, spec: GenerationSpec, scratch: Path) -> tuple[Path, GenerationSpec]:
    """Write the photos of a generation, of the rows `planned` (see `planned_photos.py`), to a file in `scratch`.

    Returns the file, and the complete specification.
    """
    path = scratch / Path(photos_name(spec.number)).name
    # why not the columns of places: these differ from machine to machine, and may hold credentials
    of_generation = f"FROM {planned} WHERE generation = {spec.number}"
    has_groups = database.one(f"SELECT count(group_name) > 0 {of_generation}")
    rows = f"SELECT {_COLUMNS}{_GROUP if has_groups else ''} {of_generation} ORDER BY split, key"
    database.run(f"COPY ({rows}) TO '{database.path(path)}' (FORMAT parquet, COMPRESSION zstd)")
    return path, replace(spec, photos=_rows_info(database, rows))


def put_file(store: Store, name: str, path: Path) -> None:
    """Copy a local file to `store`."""
    with path.open("rb") as source, store.create(name) as file:
        while piece := source.read(1 << 20):
            file.write(piece)


def local_photos(store: Store, spec: GenerationSpec, scratch: Path) -> Path | None:
    """The file of a generation, or a copy in `scratch`; None if it is missing or damaged."""
    name = photos_name(spec.number)
    if store.size(name) in (None, 0):
        return None
    path = store.local(name, scratch)
    return path if _file_rows_info(path) == spec.photos else None


def photo_files(store: Store, generations: Iterable[GenerationSpec], scratch: Path) -> list[Path]:
    """Local files with the photos of these generations, copies in `scratch` if need be.

    Raises `ResoluteError` if one is missing or damaged.
    """
    files = []
    for spec in generations:
        path = local_photos(store, spec, scratch)
        if path is None:
            raise lost_photos(store, spec.number)
        files.append(path)
    return files


def lost_photos(store: Store, generation: int) -> ResoluteError:
    return ResoluteError(
        f"{store.where}/{photos_name(generation)}: got none or a damaged one, expected the list of the photos of "
        f"generation {generation}, which cannot be derived again; restore it, or start over with REBUILD=1 (--rebuild)"
    )


@dataclass(frozen=True)
class SetPhotos:
    """The photos of all generations of a set: the view `set_photos` in `database`, which only this module names.

    `files` are local ones, by generation.
    """

    database: Database
    files: tuple[Path, ...]

    def groups_until(self, generation: int) -> dict[str, tuple[NDArray[np.uint64], NDArray[np.uint32]]]:
        """{split: (keys, numbers)} of the photos that GROUP keeps together with others, numbered from 1.

        They are those of the generations up to `generation`.
        """
        found = {}
        for split in ("train", "val"):
            rows = self.database.arrays(
                "SELECT key, number::UINTEGER AS number FROM (SELECT split, key, dense_rank() OVER (ORDER BY "
                "group_name) AS number, count(*) OVER (PARTITION BY group_name) AS photos FROM set_photos "
                "WHERE group_name IS NOT NULL AND generation <= ?) WHERE split = ? AND photos > 1 ORDER BY key",
                generation,
                split,
            )
            found[split] = (np.asarray(rows["key"], np.uint64), np.asarray(rows["number"], np.uint32))
        return found

    @classmethod
    def open(cls, database: Database, files: Sequence[Path]) -> SetPhotos:
        """`files` are those of the generations, the oldest first."""
        rows = " UNION ALL ".join(
            f"SELECT {n}::UINTEGER AS generation, {_COLUMNS}"
            f"{_GROUP if _has_groups(database, path) else ', NULL::VARCHAR AS group_name'} "
            f"FROM read_parquet('{database.path(path)}')"
            for n, path in enumerate(files)
        )
        database.run(f"CREATE OR REPLACE VIEW set_photos AS {rows}")
        return cls(database, tuple(files))

    @property
    def rows(self) -> str:
        """The photos, for queries of other modules: all columns above, and generation UINTEGER."""
        return "set_photos"

    def about(self, splits: NDArray[Any], keys: NDArray[np.uint64]) -> list[tuple[str, Any]]:
        """(name, target) of the photos of samples, by their splits (n,) str and keys (n,)."""
        found = self.database.run_on(
            {"i": np.arange(len(keys)), "split": splits.astype(object), "key": keys},
            "SELECT i, name, target FROM set_photos p JOIN columns c ON p.split = c.split::VARCHAR AND p.key = c.key "
            "ORDER BY i",
        )
        return [(os.fsdecode(name), target) for _, name, target in found]

    def names(self, keys: Sequence[tuple[str, int]]) -> list[str]:
        """The names of the photos of samples (split, key)."""
        asked = {
            "i": np.arange(len(keys)),
            "split": objects(split for split, _ in keys),
            "key": np.array([key for _, key in keys], np.uint64),
        }
        found = self.database.run_on(
            asked, "SELECT i, name FROM set_photos p JOIN columns c ON p.split = c.split::VARCHAR AND p.key = c.key"
        )
        names = {i: os.fsdecode(name) for i, name in found}
        return [names[i] for i in range(len(keys))]

    def of_split(self, split: str, generation: int) -> Iterator[tuple[int, str]]:
        """Yield (key, name) of the photos of a generation, by key."""
        rows = self.database.rows(
            "SELECT key, name FROM set_photos WHERE generation = ? AND split = ? ORDER BY key", generation, split
        )
        return ((key, os.fsdecode(name)) for key, name in rows)


def _has_groups(database: Database, path: Path) -> bool:
    """Whether the photos in a file have groups."""
    names = database.run(f"DESCRIBE SELECT * FROM read_parquet('{database.path(path)}')")
    return any(name == "group_name" for name, *_ in names)


def _rows_info(database: Database, rows: str) -> dict[str, Any]:
    """Number and SHA-256 of the rows of a query, in its order."""
    count, digest = 0, hashlib.sha256()
    for row in database.rows(rows):
        count += 1
        digest.update(f"{row!r}\n".encode())
    return {"rows": count, "sha256": digest.hexdigest()}


def _file_rows_info(path: Path) -> dict[str, Any] | None:
    """`_rows_info` of a file; None if it cannot be read."""
    import duckdb

    with ScratchFolder() as scratch, closing(Database(scratch)) as database, suppress(duckdb.Error, ResoluteError):
        columns = f"{_COLUMNS}{_GROUP if _has_groups(database, path) else ''}"
        rows = f"SELECT {columns} FROM read_parquet('{database.path(path)}') ORDER BY split, key"
        return _rows_info(database, rows)
    return None


def file_info(path: Path) -> dict[str, Any]:
    """Size in bytes and SHA-256 of a local file."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
