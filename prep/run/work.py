"""`Work`: the shards of a set that are to be made; and `convert`, which makes them, here or on any machine.

The command that made the list converts its shards itself, or saves the list in OUT/.prep/plan for jobs and for the
tasks of Ray: the table of the photos of all shards, one Parquet file, and the `WorkList`, written last. Since the bytes
of a shard follow from these alone, ranges may overlap, be killed and be repeated, and no lock is held.

A file appears only if OUT still has the list that the conversion began with, which is read again just before; a record
names its generation, and does not count in another. What remains is a file that was being renamed or uploaded at that
moment and replaces one of a later plan: its size differs from that in the record, so `finish` has the shard made again,
or else, if it happens to be the same, `resolute verify` reports the file.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.format import shard_name
from resolute.pipeline.dataset.manifest import manifest_bytes
from resolute.prep.convert.codecs import check_codecs
from resolute.prep.listing.database import Database
from resolute.prep.shard_set.cleanup import delete_partial_shards
from resolute.prep.shard_set.existing_set import read_sealed, read_spec
from resolute.prep.shard_set.planned_photos import PlannedPhotos, ShardSpecs, missing_shards
from resolute.prep.shard_set.record import RECORDS, Records, record_name, record_names
from resolute.prep.shard_set.set_photos import file_info, put_file
from resolute.prep.shard_set.work_list import PLAN_FOLDER, WORK_LIST, Shard, WorkList
from resolute.prep.sources.archives.containers import check_containers
from resolute.prep.storage.bulk import remove_many
from resolute.prep.storage.output import Store, open_output
from resolute.scratch import ScratchFolder

from .local import convert_shards
from .pool import open_pool
from .stats import RunStats

__all__ = [
    "AGAIN",
    "Converted",
    "Work",
    "convert",
    "convert_range",
    "delete_plan_files",
    "names_of_records",
    "read_work_list",
    "save",
]

_PHOTOS = f"{PLAN_FOLDER}/photos.parquet"
_FILES = f"{PLAN_FOLDER}/files.json"  # size and hash of _PHOTOS; {path: stamp} of the archives that hold photos
AGAIN = "run `resolute jobs plan` again, with the settings of the set"


@dataclass(frozen=True, kw_only=True)
class Work:
    """The shards of a set that are to be made, the photos that they are made of, and the records of finished ones."""

    store: Store
    todo: WorkList
    photos: PlannedPhotos
    records: Records

    def missing(self, shards: Iterable[Shard] | None = None) -> dict[Shard, tuple[int, ...]]:
        """{shard: missing resolutions} of those of the `shards` (None: all) that are not finished."""
        return missing_shards(self.todo if shards is None else shards, self.todo.short_sides, self.records)


class Converted(NamedTuple):
    """What `convert_range` has done: numbers of shards, and the totals of their images."""

    shards: int
    kept_shards: int  # those that were finished before
    stats: RunStats


def convert(
    work: Work, missing: Mapping[Shard, tuple[int, ...]], *, workers: int, progress: Callable[[RunStats], None]
) -> RunStats:
    """Convert the `missing` shards {shard: resolutions} in `workers` processes; their records are then in the work's.

    `progress(totals so far)` is called after each batch. Raises as `convert_shards`.
    """
    total = RunStats()

    def report(current: RunStats) -> None:
        so_far = current
        if total.images:  # of the shards of an older generation
            so_far = RunStats()
            so_far.merge(total)
            so_far.merge(current)
        progress(so_far)

    for generation in work.todo.generations:
        own = {shard: missing[shard] for shard in generation if shard in missing}
        if own:
            specs = ShardSpecs(work.photos, generation, own, work.records)
            with open_pool(workers) as pool:
                stats = convert_shards(
                    pool,
                    work.photos.options(generation),
                    specs,
                    work.store,
                    sizes=specs.sizes,
                    done=work.records.add,
                    progress=report,
                )
            total.merge(stats)
    return total


def convert_range(
    out: str,
    selected: tuple[int, int | None],
    *,
    workers: int,
    on_start: Callable[[int, int], None] = lambda images, kept_shards: None,
    progress: Callable[[RunStats], None] = lambda stats: None,
) -> Converted:
    """Convert those of the saved shards `selected` (first, end) that are not finished, in `workers` processes.

    `on_start(images to convert, kept shards)` is called before the conversion, `progress(stats)` after each batch.
    Raises `ResoluteError` without a complete plan for OUT, or on a machine with other decoders; `StorageError` if
    storage is unavailable.
    """
    store = open_output(out).pinned(WORK_LIST)  # why first: a list that replaces it is not pinned
    todo = read_work_list(store)
    with ExitStack() as stack:
        scratch = stack.enter_context(ScratchFolder())
        records = Records(store, todo.hash_of, scratch / "records")
        stack.callback(records.close)
        shards = list(todo)[slice(*selected)]
        records.load(names=names_of_records(todo, shards))
        missing = missing_shards(shards, todo.short_sides, records)
        if not missing:
            return Converted(0, len(shards), RunStats())
        for generation in todo.generations:
            if any(shard in missing for shard in generation):
                check_codecs(generation.codecs, f"machine {socket.gethostname()}: {store.where}")
        # why: a job that is killed and repeated again and again would fill the disk
        delete_partial_shards(store, [shard_name(*shard) for shard in missing])
        on_start(todo.number_of_images(missing), len(shards) - len(missing))
        try:
            work = Work(store=store, todo=todo, photos=_photos(stack, store, todo, scratch), records=records)
            stats = convert(work, missing, workers=workers, progress=progress)
        except ResoluteError:
            store.check_pin()  # why: a list that was replaced explains any other error
            raise
    return Converted(len(missing), len(shards) - len(missing), stats)


def save(work: Work, missing: Mapping[Shard, tuple[int, ...]], scratch: Path, check_lock: Callable[[], None]) -> None:
    """Write to OUT what `convert_range` needs; `missing` {shard: resolutions} are the shards to be made.

    Raises `ResoluteError` if no other process can read it.
    """
    store = work.store
    if store.where.startswith("memory://"):
        raise ResoluteError(
            f"{store.where}: ends with this process, got a plan for jobs or Ray, expected an OUT that all nodes can "
            "read; choose another OUT"
        )
    store.remove(WORK_LIST)  # why first: from here on, an old plan is not complete any more
    delete_plan_files(store)
    # why: a job has to see as missing what is missing here, such as shards that `verify` found damaged
    lost = {record_name(shard_name(*shard), res) for shard, resolutions in missing.items() for res in resolutions}
    remove_many(store, sorted(lost.intersection(record_names(store))))
    store.sync(RECORDS)
    path = scratch / "plan.parquet"
    work.photos.copy_to(path)
    put_file(store, _PHOTOS, path)
    newest = work.todo.generations[-1].hash
    files = {"plan": newest, "photos": file_info(path), "archives": work.photos.own_stamps}
    store.write(_FILES, manifest_bytes(files))
    check_lock()
    store.write(WORK_LIST, work.todo.to_bytes())


def delete_plan_files(store: Store) -> None:
    """Delete what `save` wrote, the mark that it is complete first."""
    store.remove(WORK_LIST)
    remove_many(store, [f"{PLAN_FOLDER}/{name}" for name in store.names(PLAN_FOLDER)])
    store.remove_folder(PLAN_FOLDER)


def read_work_list(store: Store) -> WorkList:
    """The list in OUT. Raises `ResoluteError` if it is missing or incomplete, or not that of the set at OUT."""
    values = read_sealed(store, WORK_LIST)
    try:
        if not values:
            raise ValueError("none in .prep/plan, or an incomplete one, expected a complete one")
        return WorkList.parse(values, lambda number: read_spec(store, number))
    except ValueError as error:
        raise ResoluteError(
            f"{store.where}: no plan for jobs, got {error}; check that OUT is that of all machines, or {AGAIN}"
        ) from None


def names_of_records(todo: WorkList, shards: Iterable[Shard]) -> list[str]:
    """The names of the records of shards at all resolutions of the list."""
    return [record_name(shard_name(*shard), res) for shard in shards for res in todo.short_sides]


def _photos(stack: ExitStack, store: Store, todo: WorkList, scratch: Path) -> PlannedPhotos:
    """The photos of the shards that were saved, of which the archives are checked."""
    files = read_sealed(store, _FILES)
    path = None if store.size(_PHOTOS) is None else store.local(_PHOTOS, scratch)
    if files.get("plan") != todo.generations[-1].hash or path is None or file_info(path) != files["photos"]:
        raise ResoluteError(
            f"{store.where}/{_PHOTOS}: got none or a damaged one, expected what `resolute jobs plan` wrote; {AGAIN}"
        )
    check_containers(files["archives"])
    database = Database(scratch)
    stack.callback(database.close)
    rows = f"read_parquet('{database.path(path)}')"
    return PlannedPhotos(database=database, work=todo, where=store.where, stamps=files["archives"], rows=rows)
