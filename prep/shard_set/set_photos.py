"""The photos of a set, as OUT keeps them: a Parquet file for each generation, `records/photos.parquet`, `photos-001…`.

It has a row for each photo that was listed, sorted by split and key:

    split        VARCHAR    train or val
    key          UBIGINT    of the sample
    name         BLOB       of the photo in its source, without credentials
    size_bytes   UBIGINT    of the image file
    target       as in the table of photos (`photos.py`)
    missing      BOOLEAN    the photo was listed and did not exist

A photo may be gone from the source later, so the file cannot be derived again. The plan of the generation holds its
size and SHA-256, and the file holds the rest of the plan; the same photos and settings give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.format import generation_mark
from resolute.prep.listing.database import Database
from resolute.prep.listing.photos import objects
from resolute.prep.shard_set.record import RECORDS
from resolute.prep.storage.output import Store
from resolute.scratch import ScratchFolder

__all__ = [
    "SetPhotos",
    "file_info",
    "local_photos",
    "lost_photos",
    "photos_name",
    "put_file",
    "stored_plan",
    "write_photos",
]

_COLUMNS = "split, key, name, size_bytes, target, missing"


def photos_name(generation: int) -> str:
    """The file with the photos of a generation."""
    return f"{RECORDS}/photos{generation_mark(generation, '-')}.parquet"


def write_photos(
    database: Database, generation: int, plan: Mapping[str, Any], scratch: Path
) -> tuple[Path, dict[str, Any]]:
    """Write the photos of a generation in the table `planned` to a file in `scratch`; returns it and the complete plan.

    `plan` is the plan without the entry `photos`, which is the size and hash of the file.
    """
    path = scratch / Path(photos_name(generation)).name
    own = json.dumps({name: value for name, value in plan.items() if name != "photos"}).replace("'", "''")
    # why not the columns of places: these differ from machine to machine, and may hold credentials
    database.run(
        f"COPY (SELECT {_COLUMNS} FROM planned WHERE generation = {generation}) TO '{database.path(path)}' "
        f"(FORMAT parquet, COMPRESSION zstd, KV_METADATA {{plan: '{own}'}})"
    )
    return path, {**plan, "photos": file_info(path)}


def stored_plan(store: Store, generation: int) -> dict[str, Any]:
    """The plan in the file with the photos of a generation; {} if there is none that can be read."""
    import duckdb

    if store.size(photos_name(generation)) is None:
        return {}
    with ScratchFolder() as scratch, closing(Database(scratch)) as database:
        path = store.local(photos_name(generation), scratch)
        sql = "SELECT value FROM parquet_kv_metadata(?) WHERE key = 'plan'::BLOB"
        with suppress(duckdb.Error, ResoluteError):  # of a file that is damaged
            rows = database.run(sql, database.path(path))
            return {**json.loads(rows[0][0]), "photos": file_info(path)} if rows else {}
    return {}


def put_file(store: Store, name: str, path: Path) -> None:
    """Copy a local file to `store`."""
    with path.open("rb") as source, store.create(name) as file:
        while piece := source.read(1 << 20):
            file.write(piece)


def local_photos(store: Store, generation: int, plan: Mapping[str, Any], scratch: Path) -> Path | None:
    """The file of the generation with that plan, or a copy in `scratch`; None if it is missing or damaged."""
    name = photos_name(generation)
    if store.size(name) != plan["photos"]["bytes"]:
        return None
    path = store.local(name, scratch)
    return path if file_info(path) == plan["photos"] else None


def lost_photos(store: Store, generation: int) -> ResoluteError:
    return ResoluteError(
        f"{store.where}/{photos_name(generation)}: got none or a damaged one, expected the list of the photos of "
        f"generation {generation}, which cannot be derived again; restore it, or start over with REBUILD=1 (--rebuild)"
    )


@dataclass(frozen=True)
class SetPhotos:
    """The photos of all generations of a set: the view `set_photos` with a column `generation` in `database`."""

    database: Database

    @classmethod
    def open(cls, database: Database, files: Sequence[Path]) -> SetPhotos:
        """`files` are those of the generations, the oldest first."""
        rows = " UNION ALL ".join(
            f"SELECT {n}::UINTEGER AS generation, {_COLUMNS} FROM read_parquet('{database.path(path)}')"
            for n, path in enumerate(files)
        )
        database.run(f"CREATE OR REPLACE VIEW set_photos AS {rows}")
        return cls(database)

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
            "SELECT key, name FROM set_photos WHERE generation = ? AND split = ?", generation, split
        )
        return ((key, os.fsdecode(name)) for key, name in rows)


def file_info(path: Path) -> dict[str, Any]:
    """Size in bytes and SHA-256 of a local file."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
