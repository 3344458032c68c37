"""A set made by separate commands: `jobs plan`, any number of `jobs range` on any machines, and `jobs finish`.

The plan lists the sources once and writes what the others need to OUT/.prep/plan: the table of the photos of all
shards, one Parquet file, and `SetPlan`, last. A job converts a range of the shards. Since the bytes of a shard follow
from its inputs alone, jobs may overlap, be killed and be repeated. The finish derives the rest of the set from the
records of all shards, as `build.build` does. Jobs share OUT's lock; plan and finish hold it alone.
"""

from __future__ import annotations

import shlex
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.format import manifest_bytes, shard_name
from resolute.pipeline.storage.scratch import ScratchFolder
from resolute.prep.convert.codecs import check_codecs
from resolute.prep.execute.local import convert_shards
from resolute.prep.execute.process_pool import open_pool
from resolute.prep.execute.stats import RunStats
from resolute.prep.plan.database import Database
from resolute.prep.plan.set_photos import SetPhotos, file_info, local_photos, lost_photos, put_file, quoted
from resolute.prep.plan.set_plan import PLAN_FOLDER, SET_PLAN, SetPlan
from resolute.prep.plan.shard_plan import ShardPlan
from resolute.prep.shards.cleanup import delete_partial_shards
from resolute.prep.shards.existing_set import PLAN, open_existing, plan_name, read_damaged, read_sealed
from resolute.prep.shards.record import RECORDS, Records, plan_hash, record_name, record_names
from resolute.prep.sources.archives.containers import check_containers, container_sizes
from resolute.prep.storage.bulk import remove_many
from resolute.prep.storage.output import Store, open_store

from .build import (
    BuildResult,
    ShardSpecs,
    Work,
    delete_plan_files,
    delete_run_files,
    finalize,
    missing_shards,
    plan_set,
    scratch_folder,
)
from .settings import Settings

__all__ = ["convert_range", "finalize_jobs", "parse_range", "plan_jobs"]

_PHOTOS = f"{PLAN_FOLDER}/photos.parquet"
_FILES = f"{PLAN_FOLDER}/files.json"  # size and hash of _PHOTOS; {path: bytes} of the archives that hold photos
_MAX_NAMED = 8  # ranges of missing shards in a message
_AGAIN = "run `resolute jobs plan` again, with the settings of the set"


def parse_range(text: str) -> tuple[int, int | None]:
    """Parse `"40:80"` to `(40, 80)`, `":80"` to `(0, 80)` and `"40:"` to `(40, None)`. Raises `ResoluteError`."""
    start, colon, stop = text.partition(":")
    if colon and all(not bound or (bound.isascii() and bound.isdecimal()) for bound in (start, stop)):
        first, end = int(start or 0), int(stop) if stop else None
        if end is None or first < end:
            return first, end
    raise ResoluteError(
        f"--range: got {text!r}, expected A:B with A below B, which means the shards A to B - 1, counted from 0 over "
        "all splits; either may be left out; correct it"
    )


def plan_jobs(settings: Settings, describe: Callable[[str], None] = lambda line: None) -> BuildResult | str:
    """Plan a set for jobs; returns the commands to run next, or the result of a finished set.

    `settings.engine` must be "jobs"; `describe` is as in `prepare.build`. Raises as `prepare.build` before its
    conversion does.
    """
    settings = settings.with_absolute_paths()
    store = open_store(settings.out)
    with ExitStack() as stack:
        work = plan_set(stack, settings, store, describe)
        if isinstance(work, BuildResult):
            return work
        if settings.out.startswith("memory://"):
            raise ResoluteError(
                f"{store.where}: ends with this process, got a plan for jobs, expected an OUT that they can read; "
                "choose another OUT"
            )
        _write_plan(store, work)
        plan, missing = work.plan, work.missing
    first, parts = 0, []
    for split, shards in plan.layout.shards.items():
        parts.append(f"{split} {first}:{first + len(shards)}")
        first += len(shards)
    out = shlex.quote(settings.out)
    return (
        f"{store.where}: planned {_count(first, 'shard')}, numbered {', '.join(parts)}; {first - len(missing)} of them "
        f"{'is' if first - len(missing) == 1 else 'are'} finished. Run next, as any number of jobs with a range each:\n"
        f"  resolute jobs range --out {out} --range 0:{first}\n"
        "and when all of them have ended:\n"
        f"  resolute jobs finish --out {out}"
    )


def _write_plan(store: Store, work: Work) -> None:
    store.remove(SET_PLAN)  # why first: from here on, an old plan is not complete any more
    delete_plan_files(store)
    # why: a job has to see as missing what is missing here, such as shards that `verify` found damaged
    lost = {record_name(shard_name(*shard), res) for shard, resolutions in work.missing.items() for res in resolutions}
    remove_many(store, sorted(lost.intersection(record_names(store))))
    store.sync(RECORDS)
    path = work.scratch / "plan.parquet"
    work.shard_plan.copy_to(path)
    put_file(store, _PHOTOS, path)
    sizes = container_sizes(work.shard_plan.containers)
    store.write(_FILES, manifest_bytes({"plan": work.plan.hashes[-1], "photos": file_info(path), "bytes": sizes}))
    work.check_lock()
    store.write(SET_PLAN, work.plan.to_bytes())


def convert_range(
    out: str,
    selected: tuple[int, int | None],
    *,
    workers: int,
    on_start: Callable[[int, int], None] = lambda images, kept_shards: None,
    progress: Callable[[RunStats], None] = lambda stats: None,
) -> str:
    """Convert those of the shards `selected` (first, end) that are not finished, in `workers` processes.

    Returns the counts in one line. `on_start(images to convert, kept shards)` is called before the conversion,
    `progress(stats)` after each batch. Raises `ResoluteError` without a complete plan for OUT, or on a machine with
    other decoders; `StorageError` if storage is unavailable.
    """
    store = open_store(out)
    if not read_sealed(store, SET_PLAN) and _is_finished(store):
        return f"{store.where}: the set is finished, nothing to do"
    _read_set_plan(store)  # why also before the lock: a folder that is not ours is left alone
    with ExitStack() as stack:
        check_lock = stack.enter_context(store.shared_lock())
        plan = _read_set_plan(store)
        scratch = stack.enter_context(ScratchFolder())
        records = Records(store, plan.hash_of, scratch / "records")
        stack.callback(records.close)
        shards = list(plan.layout)[slice(*selected)]
        records.load(names=_record_names(plan, shards))
        missing = missing_shards(shards, plan.short_sides, records)
        stats = RunStats()
        if missing:
            for generation in plan.by_generation(missing):
                where = f"machine {socket.gethostname()}: {store.where}"
                check_codecs(plan.options(generation).codecs, where)
            # why: a job that is killed and repeated again and again would fill the disk
            delete_partial_shards(store, [shard_name(*shard) for shard in missing])
            on_start(sum(len(plan.layout.keys(*shard)) for shard in missing), len(shards) - len(missing))
            shard_plan = _shard_plan(stack, store, plan, scratch)
            with open_pool(workers) as pool:
                for generation, own in plan.by_generation(missing).items():
                    specs = ShardSpecs(shard_plan, {shard: missing[shard] for shard in own}, records)
                    stats.merge(convert_shards(
                        pool, plan.options(generation), specs, store, done=lambda record: None, progress=progress
                    ))  # fmt: skip
        check_lock()
    return (
        f"{store.where}: {_count(len(missing), 'shard')} converted ({_count(stats.images - stats.rejects, 'image')}), "
        f"{len(shards) - len(missing)} already there, {_count(stats.rejects, 'image')} rejected"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _is_finished(store: Store) -> bool:
    """Whether OUT holds a set that lacks nothing."""
    existing = open_existing(store, rebuild=False)
    return existing is not None and existing.is_complete(store, existing.resolutions)


def _shard_plan(stack: ExitStack, store: Store, plan: SetPlan, scratch: Path) -> ShardPlan:
    """The photos of the shards in the plan, of which the archives are checked."""
    files = read_sealed(store, _FILES)
    path = None if store.size(_PHOTOS) is None else store.local(_PHOTOS, scratch)
    if files.get("plan") != plan.hashes[-1] or path is None or file_info(path) != files["photos"]:
        raise ResoluteError(
            f"{store.where}/{_PHOTOS}: got none or a damaged one, expected what `resolute jobs plan` wrote; {_AGAIN}"
        )
    check_containers(files["bytes"])
    database = Database(scratch)
    stack.callback(database.close)
    return ShardPlan(database=database, plan=plan, where=store.where, rows=f"read_parquet('{quoted(path)}')")


def finalize_jobs(out: str) -> BuildResult:
    """Complete the set at OUT from the shards that jobs have converted.

    Raises `ResoluteError` if shards are missing, naming the command that converts them, if too many images were
    rejected, or without a complete plan, unless the set is finished.
    """
    started_at = time.perf_counter()
    store = open_store(out)
    open_existing(store, rebuild=False)  # why: foreign files are refused before anything is written
    with ExitStack() as stack:
        check_lock = stack.enter_context(store.exclusive_lock())
        scratch = scratch_folder(stack, store)
        existing = open_existing(store, rebuild=False)
        plan = None if existing is not None and not store.names(PLAN_FOLDER) else _read_set_plan(store)
        resolutions = plan.short_sides if plan is not None else existing.resolutions if existing is not None else ()
        is_extension = existing is not None and plan is not None and len(plan.plans) > len(existing.plans)
        if existing is not None and not is_extension and existing.is_complete(store, resolutions):
            delete_run_files(store)
            assert existing.manifest is not None
            return BuildResult(
                manifest=existing.manifest, ignored=Counter(), stats=None, kept_shards=0,
                elapsed_s=time.perf_counter() - started_at,
            )  # fmt: skip
        plan = plan or _read_set_plan(store)
        if plan.layout.first and (existing is None or existing.manifest is None or not is_extension):
            raise ResoluteError(
                f"{store.where}: not the set that the plan extends, got one without a valid manifest.json or with "
                f"other generations, expected it as it was; {_AGAIN}"
            )
        if found := sorted(read_damaged(store) - plan.damaged):
            raise ResoluteError(
                f"{store.where}: damaged since the plan was made, got {len(found)} files listed by `resolute "
                f"verify`, such as {found[0]}, expected none; {_AGAIN}, then convert the shards that are missing"
            )
        records = Records(store, plan.hash_of, scratch / "records")
        stack.callback(records.close)
        records.load(names=_record_names(plan, plan.layout) if plan.layout.first else None)
        missing = missing_shards(plan.layout, plan.short_sides, records)
        if missing:
            raise _missing_error(store, out, np.flatnonzero([shard in missing for shard in plan.layout]))
        database = Database(scratch)
        stack.callback(database.close)
        photos = SetPhotos.open(database, _photo_files(store, plan, scratch))
        kept = existing.manifest if existing is not None and plan.layout.first else None
        manifest = finalize(store, plan, records, photos, check_lock, kept=kept, scratch=scratch)
        return BuildResult(
            manifest=manifest, ignored=plan.ignored, stats=RunStats(), kept_shards=len(plan.layout),
            elapsed_s=time.perf_counter() - started_at, warnings=plan.warnings,
        )  # fmt: skip


def _missing_error(store: Store, out: str, missing: NDArray[np.int64]) -> ResoluteError:
    """The error for shards that are not finished; `missing` are their numbers, ascending, at least one."""
    runs = np.split(missing, np.flatnonzero(np.diff(missing) > 1) + 1)
    ranges = ", ".join([f"{run[0]}:{run[-1] + 1}" for run in runs[:_MAX_NAMED]] + ["…"] * (len(runs) > _MAX_NAMED))
    return ResoluteError(
        f"{store.where}: not all shards are finished, got {len(missing)} missing, numbers {ranges}, expected none; run "
        f"`resolute jobs range --out {shlex.quote(out)} --range {missing[0]}:{missing[-1] + 1}`, which leaves "
        "finished shards as they are"
    )


def _record_names(plan: SetPlan, shards: Iterable[tuple[str, int]]) -> list[str]:
    return [record_name(shard_name(*shard), res) for shard in shards for res in plan.short_sides]


def _read_set_plan(store: Store) -> SetPlan:
    """The plan for jobs. Raises `ResoluteError` if it is missing or incomplete, or not that of the set at OUT."""
    values = read_sealed(store, SET_PLAN)
    try:
        if not values:
            raise ValueError("none in .prep/plan, or an incomplete one, expected a complete one")
        return SetPlan.parse(values, _read_plans(store))
    except ValueError as error:
        raise ResoluteError(f"{store.where}: no plan for jobs, got {error}; {_AGAIN}") from None


def _read_plans(store: Store) -> list[dict[str, Any]]:
    """The plans of all generations, that of an unfinished extension included."""
    plans = [read_sealed(store, PLAN)]
    while plan := read_sealed(store, plan_name(len(plans))):
        if plan.get("previous") != plan_hash(plans[-1]):
            break  # left by an extension of another set
        plans.append(plan)
    return plans


def _photo_files(store: Store, plan: SetPlan, scratch: Path) -> list[Path]:
    """The lists of the photos of all generations, local files."""
    files = []
    for generation, own in enumerate(plan.plans):
        path = local_photos(store, generation, own, scratch)
        if path is None:
            raise lost_photos(store, generation)
        files.append(path)
    return files
