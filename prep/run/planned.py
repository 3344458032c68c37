"""The conversion of planned shards on any machine: the plan in OUT/.prep/plan, and `convert_range`, which follows it.

The plan is the table of the photos of all shards, one Parquet file, and `SetPlan`, written last. Since the bytes of a
shard follow from the plan and the photos alone, ranges may overlap, be killed and be repeated, and no lock is held.

A file appears only if OUT still has the plan that the conversion began with, which is read again just before; a record
names its plan, and does not count in another. What remains is a file that was being renamed or uploaded at that moment
and replaces one of a later plan: its size differs from that in the record, so `finish` has the shard made again, or
else, if it happens to be the same, `resolute verify` reports the file.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.format import manifest_bytes, shard_name
from resolute.prep.convert.codecs import check_codecs
from resolute.prep.listing.database import Database
from resolute.prep.shard_set.cleanup import delete_partial_shards
from resolute.prep.shard_set.existing_set import PLAN, plan_name, read_sealed
from resolute.prep.shard_set.record import RECORDS, Records, plan_hash, record_name, record_names
from resolute.prep.shard_set.set_photos import file_info, put_file
from resolute.prep.shard_set.set_plan import PLAN_FOLDER, SET_PLAN, SetPlan
from resolute.prep.shard_set.shard_plan import ShardPlan, ShardSpecs, missing_shards
from resolute.prep.sources.archives.containers import check_containers
from resolute.prep.storage.bulk import remove_many
from resolute.prep.storage.output import Store, open_store
from resolute.scratch import ScratchFolder

from .local import convert_shards
from .pool import open_pool
from .stats import RunStats

__all__ = [
    "AGAIN",
    "Converted",
    "convert_range",
    "delete_plan_files",
    "names_of_records",
    "read_set_plan",
    "write_plan",
]

_PHOTOS = f"{PLAN_FOLDER}/photos.parquet"
_FILES = f"{PLAN_FOLDER}/files.json"  # size and hash of _PHOTOS; {path: stamp} of the archives that hold photos
AGAIN = "run `resolute jobs plan` again, with the settings of the set"


class Converted(NamedTuple):
    """What `convert_range` has done: numbers of shards, and the totals of their images."""

    shards: int
    kept_shards: int  # those that were finished before
    stats: RunStats


def write_plan(
    store: Store,
    shard_plan: ShardPlan,
    missing: Mapping[tuple[str, int], tuple[int, ...]],
    scratch: Path,
    check_lock: Callable[[], None],
) -> None:
    """Write what `convert_range` needs; `missing` {(split, number): resolutions} are the shards to be made.

    Raises `ResoluteError` if no other process can read it.
    """
    if store.where.startswith("memory://"):
        raise ResoluteError(
            f"{store.where}: ends with this process, got a plan for jobs or Ray, expected an OUT that all nodes can "
            "read; choose another OUT"
        )
    plan = shard_plan.plan
    store.remove(SET_PLAN)  # why first: from here on, an old plan is not complete any more
    delete_plan_files(store)
    # why: a job has to see as missing what is missing here, such as shards that `verify` found damaged
    lost = {record_name(shard_name(*shard), res) for shard, resolutions in missing.items() for res in resolutions}
    remove_many(store, sorted(lost.intersection(record_names(store))))
    store.sync(RECORDS)
    path = scratch / "plan.parquet"
    shard_plan.copy_to(path)
    put_file(store, _PHOTOS, path)
    files = {"plan": plan.hashes[-1], "photos": file_info(path), "archives": shard_plan.own_stamps}
    store.write(_FILES, manifest_bytes(files))
    check_lock()
    store.write(SET_PLAN, plan.to_bytes())


def delete_plan_files(store: Store) -> None:
    """Delete what `write_plan` wrote, the mark that it is complete first."""
    store.remove(SET_PLAN)
    remove_many(store, [f"{PLAN_FOLDER}/{name}" for name in store.names(PLAN_FOLDER)])
    store.remove_folder(PLAN_FOLDER)


def convert_range(
    out: str,
    selected: tuple[int, int | None],
    *,
    workers: int,
    on_start: Callable[[int, int], None] = lambda images, kept_shards: None,
    progress: Callable[[RunStats], None] = lambda stats: None,
) -> Converted:
    """Convert those of the planned shards `selected` (first, end) that are not finished, in `workers` processes.

    `on_start(images to convert, kept shards)` is called before the conversion, `progress(stats)` after each batch.
    Raises `ResoluteError` without a complete plan for OUT, or on a machine with other decoders; `StorageError` if
    storage is unavailable.
    """
    store = open_store(out).pinned(SET_PLAN)  # why first: a plan that replaces the one read must not be the pinned one
    plan = read_set_plan(store)
    stats = RunStats()
    with ExitStack() as stack:
        scratch = stack.enter_context(ScratchFolder())
        records = Records(store, plan.hash_of, scratch / "records")
        stack.callback(records.close)
        shards = list(plan.layout)[slice(*selected)]
        records.load(names=names_of_records(plan, shards))
        missing = missing_shards(shards, plan.short_sides, records)
        if not missing:
            return Converted(0, len(shards), stats)
        for generation in plan.by_generation(missing):
            check_codecs(plan.options(generation).codecs, f"machine {socket.gethostname()}: {store.where}")
        # why: a job that is killed and repeated again and again would fill the disk
        delete_partial_shards(store, [shard_name(*shard) for shard in missing])
        on_start(sum(len(plan.layout.keys(*shard)) for shard in missing), len(shards) - len(missing))
        try:
            shard_plan = _shard_plan(stack, store, plan, scratch)
            with open_pool(workers) as pool:
                for generation, own in plan.by_generation(missing).items():
                    specs = ShardSpecs(shard_plan, {shard: missing[shard] for shard in own}, records)
                    stats.merge(
                        convert_shards(
                            pool,
                            shard_plan.options(generation),
                            specs,
                            store,
                            sizes=specs.sizes,
                            done=lambda record: None,
                            progress=progress,
                        )
                    )
        except ResoluteError:
            store.check_pin()  # why: a plan that was replaced explains any other error
            raise
    return Converted(len(missing), len(shards) - len(missing), stats)


def _shard_plan(stack: ExitStack, store: Store, plan: SetPlan, scratch: Path) -> ShardPlan:
    """The photos of the shards in the plan, of which the archives are checked."""
    files = read_sealed(store, _FILES)
    path = None if store.size(_PHOTOS) is None else store.local(_PHOTOS, scratch)
    stamps = files.get("archives")  # None: written by an older version
    if files.get("plan") != plan.hashes[-1] or path is None or file_info(path) != files["photos"] or stamps is None:
        raise ResoluteError(
            f"{store.where}/{_PHOTOS}: got none or a damaged one, expected what `resolute jobs plan` wrote; {AGAIN}"
        )
    check_containers(stamps)
    database = Database(scratch)
    stack.callback(database.close)
    rows = f"read_parquet('{database.path(path)}')"
    return ShardPlan(database=database, plan=plan, where=store.where, stamps=stamps, rows=rows)


def names_of_records(plan: SetPlan, shards: Iterable[tuple[str, int]]) -> list[str]:
    """The names of the records of shards at all resolutions of the plan."""
    return [record_name(shard_name(*shard), res) for shard in shards for res in plan.short_sides]


def read_set_plan(store: Store) -> SetPlan:
    """The plan in OUT. Raises `ResoluteError` if it is missing or incomplete, or not that of the set at OUT."""
    values = read_sealed(store, SET_PLAN)
    try:
        if not values:
            raise ValueError("none in .prep/plan, or an incomplete one, expected a complete one")
        return SetPlan.parse(values, _read_plans(store))
    except ValueError as error:
        raise ResoluteError(
            f"{store.where}: no plan for jobs, got {error}; check that OUT is that of all machines, or {AGAIN}"
        ) from None


def _read_plans(store: Store) -> list[dict[str, Any]]:
    """The plans of all generations, that of an unfinished extension included."""
    plans = [read_sealed(store, PLAN)]
    while plan := read_sealed(store, plan_name(len(plans))):
        if plan.get("previous") != plan_hash(plans[-1]):
            break  # left by an extension of another set
        plans.append(plan)
    return plans
