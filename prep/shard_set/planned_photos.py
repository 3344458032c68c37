"""`PlannedPhotos`: the photos of the shards that are to be made, as rows of one table, by split and key.

The table `planned` has the columns of `set_photos.py` and generation, path (full; NULL: the photo is gone or has
changed), offset, nbytes, stored_as (as in `photos.py`) and skip (why it is rejected without being read, or NULL). The
place of a photo in the shards is a pure function of settings and inputs.

For jobs on other machines the table is one Parquet file, of which a job reads the rows of its shards.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.format import label_digits
from resolute.prep.convert.batch import EncodeOptions
from resolute.prep.listing.compare import Comparison
from resolute.prep.listing.database import Database, objects
from resolute.prep.listing.photos import Photos, listed_servers, rows_of
from resolute.prep.listing.splits import Split
from resolute.prep.shard_set.record import Records
from resolute.prep.shard_set.writer import ShardSpec
from resolute.prep.sources.image_ref import MISSING, ByteRange
from resolute.prep.sources.reject import NOT_THERE

from .generation import GenerationSpec
from .shuffle import shuffled
from .work_list import Shard, WorkList

__all__ = ["PLANNED", "PlannedPhotos", "ShardSpecs", "missing_shards", "plan_no_photos", "plan_older", "plan_photos"]

PLANNED = "planned"  # the table, for queries of other modules
_CHUNK = 1 << 20


def plan_photos(database: Database, splits: Mapping[str, Split], spec: GenerationSpec, *, seed: int) -> None:
    """Make the table `planned` of the photos of a new generation; the photos of `splits` are disjoint."""
    parts = []
    for n, split in enumerate(splits):
        photos, keys = splits[split].photos, spec.split_keys(split)
        order = np.empty(len(keys), np.uint32)  # the place among the keys of each photo, by name
        for first in range(0, len(keys), _CHUNK):
            own = np.arange(first, min(first + _CHUNK, len(keys)), dtype=np.int64)
            order[shuffled(seed, split, len(keys), own, generation=spec.number)] = own
        database.run_on(
            {"position": splits[split].positions, "i": order},
            f"CREATE OR REPLACE TABLE keys_{n} AS SELECT position, i FROM columns",
        )
        parts.append(
            f"SELECT {n} AS number, {spec.number}::UINTEGER AS generation, '{split}' AS split, "
            f"i::UBIGINT + {keys.start} AS key, name, size_bytes, target, missing, group_name, "
            f'path, "offset", nbytes, stored_as FROM {photos.rows} JOIN keys_{n} USING (position)'
        )
    database.run(
        "CREATE TABLE planned AS SELECT * EXCLUDE (number), NULL::VARCHAR AS skip "
        f"FROM ({' UNION ALL '.join(parts)}) ORDER BY number, key"
    )
    for n in range(len(splits)):
        database.run(f"DROP TABLE keys_{n}")


def plan_no_photos(database: Database, set_rows: str) -> None:
    """Make the table `planned`, without rows, for photos of a set, `set_rows` (see `SetPhotos.rows`)."""
    database.run(
        'CREATE TABLE planned AS SELECT *, NULL::BLOB AS path, NULL::BIGINT AS "offset", NULL::UBIGINT AS nbytes, '
        f"NULL::UTINYINT AS stored_as, NULL::VARCHAR AS skip FROM {set_rows} LIMIT 0"
    )


def plan_older(
    sources: Mapping[str, Photos],
    comparison: Comparison,
    work: WorkList,
    shards: Iterable[Shard],
    rejects: Mapping[tuple[str, int], str],
) -> None:
    """Add the photos of these `shards` to `planned`, from the set and its comparison with the sources.

    `rejects` {(split, key): reason} are rejected again, as those are that the comparison knows.
    """
    database = comparison.database
    comparison.add_rejected(rejects)
    ranges = [(split, work.keys(split, number)) for split, number in shards]
    database.run_on(
        {
            "split": objects(split for split, _ in ranges),
            "first": np.array([keys.start for _, keys in ranges], np.uint64),
            "stop": np.array([keys.stop for _, keys in ranges], np.uint64),
        },
        "CREATE OR REPLACE TABLE wanted AS SELECT split::VARCHAR AS split, first, stop FROM columns",
    )
    database.run(
        'INSERT INTO planned BY NAME SELECT DISTINCT ON (s.split, s.key) s.*, p.path, p."offset", p.nbytes, '
        f"p.stored_as, c.reason AS skip FROM {comparison.set_rows} s "
        "JOIN wanted w ON s.split = w.split AND s.key >= w.first AND s.key < w.stop "
        f"JOIN {comparison.rows} c ON c.split = s.split AND c.key = s.key "
        f"LEFT JOIN {rows_of(sources)} p ON p.source = c.source AND p.position = c.position ORDER BY s.split, s.key"
    )


@dataclass(frozen=True, kw_only=True)
class PlannedPhotos:
    """The shards of a set to be made, and their photos: `rows`, the table `planned` or a Parquet file.

    `stamps` are the states of the archives that hold them, as in `Photos`.
    """

    database: Database
    work: WorkList
    where: str  # OUT, for messages
    stamps: Mapping[str, str]
    rows: str = PLANNED

    def spec(
        self,
        generation: GenerationSpec,
        split: str,
        number: int,
        resolutions: Sequence[int],
        *,
        contents_sha256: str | None,
        limit: int | None = None,
    ) -> ShardSpec:
        """Everything needed to convert a shard of a generation, or its first `limit` photos, at `resolutions` (px).

        `contents_sha256` is as in `ShardSpec`. Raises `ResoluteError` if photos are gone.
        """
        keys = generation.keys(split, number)[:limit]
        rows = self.database.run(
            f'SELECT key, path, "offset", nbytes, stored_as, size_bytes, target, skip FROM {self.rows} '
            "WHERE split = ? AND key BETWEEN ? AND ? ORDER BY key",
            split,
            keys.start,
            keys.stop - 1,
        )
        if [row[0] for row in rows] != list(keys):
            raise ResoluteError(
                f"{self.where}: the plan lacks photos of shard {number} of {split}, got {len(rows)}, expected "
                f"{len(keys)}; start over with REBUILD=1 (--rebuild)"
            )
        samples = generation.sample_target.encode(keys, [row[6] for row in rows])
        return ShardSpec(
            generation_hash=generation.hash,
            contents_sha256=contents_sha256,
            split=split,
            number=number,
            first_key=keys.start,
            byte_ranges=tuple(self._place(*row[1:6]) for row in rows),
            labels=samples[str((samples.dtype.names or ())[-1])],
            resolutions=tuple(resolutions),
            short_sides=tuple(self.work.short_sides[res] for res in resolutions),
            skip={i: row[7] for i, row in enumerate(rows) if row[7] is not None},
        )

    def _place(self, path: bytes | None, offset: int, nbytes: int, stored_as: int, size_bytes: int) -> ByteRange:
        if path is None:
            return ByteRange("", stored_as=MISSING)
        file = os.fsdecode(path)
        return ByteRange(file, offset, nbytes, stored_as, size_bytes, self.stamps.get(file, ""))

    def check_there(self) -> None:
        """Raise `ResoluteError` if photos of finished shards that are to be made again are gone or have changed."""
        lost = self.database.run(
            f"SELECT split, key, name FROM {self.rows} WHERE path IS NULL AND skip IS NULL "
            "ORDER BY generation, split, key"
        )
        if lost:
            shards = len({(split, self.work.shard_of(split, key)) for split, key, _ in lost})
            raise ResoluteError(
                f"{self.where}: {shards} shard{'s'[: shards != 1]} cannot be made, got {len(lost)} of their photos "
                f"gone from {self.work.src} or changed, such as {os.fsdecode(lost[0][2])}, expected them as they were; "
                "put them back, or start over with REBUILD=1 (--rebuild)"
            )

    def not_there(self, shards: Iterable[Shard]) -> dict[tuple[str, int], str]:
        """{(split, key): reason} of the photos of `shards` that did not exist when the source was listed."""
        wanted, shard_of = set(shards), self.work.shard_of
        rows = self.database.run(f"SELECT split, key FROM {self.rows} WHERE stored_as = {MISSING} AND skip IS NULL")
        return {(split, key): NOT_THERE for split, key in rows if (split, shard_of(split, key)) in wanted}

    @property
    def own_stamps(self) -> dict[str, str]:
        """The states of the archives that hold photos of these shards: {path: stamp}."""
        rows = self.database.run(f'SELECT DISTINCT path FROM {self.rows} WHERE "offset" >= 0 ORDER BY path')
        return {path: self.stamps[path] for path in (os.fsdecode(row[0]) for row in rows)}

    @cached_property
    def servers(self) -> tuple[str, ...]:
        """URLs on different web servers, for `fetch_many`."""
        return listed_servers(self.database, self.rows)

    def options(self, generation: GenerationSpec) -> EncodeOptions:
        """How the shards of a generation are converted."""
        settings, target = generation.settings, generation.sample_target
        return EncodeOptions(
            quality=settings["quality"],
            label_digits=label_digits(len(generation.classes)),
            samples=target.sample_dtype,
            codecs=generation.codecs,
            max_megapixels=settings.get("max_megapixels"),
            grey_bits=settings.get("grey_range", 16),
            described_side=min(self.work.short_sides.values()) if generation.near_copies != "none" else 0,
            servers=self.servers,
        )

    def copy_to(self, path: Path) -> None:
        """Write the rows to a Parquet file."""
        self.database.run(
            f'COPY (SELECT split, key, path, "offset", nbytes, stored_as, size_bytes, target, skip FROM {self.rows}) '
            f"TO '{self.database.path(path)}' (FORMAT parquet, COMPRESSION zstd)"
        )


@dataclass(frozen=True)
class ShardSpecs:
    """The specification of each of the `missing` shards of a generation, {shard: resolutions}, made when needed."""

    photos: PlannedPhotos
    generation: GenerationSpec
    missing: Mapping[Shard, tuple[int, ...]]
    records: Records

    @property
    def sizes(self) -> list[int]:
        """The samples of each shard."""
        return [len(self.generation.keys(*shard)) for shard in self.missing]

    def __iter__(self) -> Iterator[ShardSpec]:
        for shard, resolutions in self.missing.items():
            contents_sha256 = self.records.contents_sha256(*shard)
            yield self.photos.spec(self.generation, *shard, resolutions, contents_sha256=contents_sha256)


def missing_shards(
    shards: Iterable[Shard], resolutions: Iterable[int], records: Records
) -> dict[Shard, tuple[int, ...]]:
    """{shard: missing resolutions} of those of the `shards` that are not finished at all `resolutions` (px)."""
    missing = {shard: tuple(res for res in resolutions if res not in records.resolutions(*shard)) for shard in shards}
    return {shard: missing_res for shard, missing_res in missing.items() if missing_res}
