"""A set made by separate commands: `jobs plan`, any number of `jobs range` on any machines, and `jobs finish`.

The plan lists the sources once and writes what the others need to OUT/.prep/plan: the table of the photos of all
shards, one Parquet file, and `SetPlan`, last. A job converts a range of the shards. Since the bytes of a shard follow
from its inputs alone, jobs may overlap, be killed and be repeated. The finish derives the rest of the set from the
records of all shards, as `build.build` does. Plan and finish hold OUT's lock; jobs hold none.
"""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from resolute.errors import ResoluteError
from resolute.prep.listing.database import Database
from resolute.prep.run.planned import AGAIN, convert_range, names_of_records, read_set_plan, write_plan
from resolute.prep.run.stats import RunStats
from resolute.prep.shard_set.existing_set import open_existing, read_damaged, read_sealed
from resolute.prep.shard_set.record import Records
from resolute.prep.shard_set.set_photos import SetPhotos, local_photos, lost_photos
from resolute.prep.shard_set.set_plan import PLAN_FOLDER, SET_PLAN, SetPlan
from resolute.prep.shard_set.shard_plan import missing_shards
from resolute.prep.storage.output import Store, open_store

from .build import BuildResult, delete_run_files, finalize, plan_set, scratch_folder
from .settings import Settings

__all__ = ["convert_jobs", "finalize_jobs", "parse_range", "plan_jobs"]

_MAX_NAMED = 8  # ranges of missing shards in a message


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

    `settings.engine` must be "jobs"; `describe` is as in `build`. Raises as `build` before its
    conversion does.
    """
    settings = settings.with_absolute_paths()
    store = open_store(settings.out)
    with ExitStack() as stack:
        work = plan_set(stack, settings, store, describe)
        if isinstance(work, BuildResult):
            return work
        write_plan(store, work.shard_plan, work.missing, work.scratch, work.check_lock)
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


def convert_jobs(
    out: str,
    selected: tuple[int, int | None],
    *,
    workers: int,
    on_start: Callable[[int, int], None] = lambda images, kept_shards: None,
    progress: Callable[[RunStats], None] = lambda stats: None,
) -> str:
    """Convert a range of the planned shards, as `convert_range`; returns the counts in one line."""
    store = open_store(out)
    if not read_sealed(store, SET_PLAN) and _is_finished(store):
        return f"{store.where}: the set is finished, nothing to do"
    shards, kept, stats = convert_range(out, selected, workers=workers, on_start=on_start, progress=progress)
    return (
        f"{store.where}: {_count(shards, 'shard')} converted ({_count(stats.images - stats.rejects, 'image')}), "
        f"{kept} already there, {_count(stats.rejects, 'image')} rejected"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _is_finished(store: Store) -> bool:
    """Whether OUT holds a set that lacks nothing."""
    existing = open_existing(store, rebuild=False)
    return existing is not None and existing.is_complete(store, existing.resolutions)


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
        plan = None if existing is not None and not store.names(PLAN_FOLDER) else read_set_plan(store)
        resolutions = plan.short_sides if plan is not None else existing.resolutions if existing is not None else ()
        is_extension = existing is not None and plan is not None and len(plan.plans) > len(existing.plans)
        if existing is not None and not is_extension and existing.is_complete(store, resolutions):
            delete_run_files(store)
            assert existing.manifest is not None
            return BuildResult(
                manifest=existing.manifest,
                ignored=Counter(),
                stats=None,
                kept_shards=0,
                elapsed_s=time.perf_counter() - started_at,
            )
        plan = plan or read_set_plan(store)
        if plan.layout.first and (existing is None or existing.manifest is None or not is_extension):
            raise ResoluteError(
                f"{store.where}: not the set that the plan extends, got one without a valid manifest.json or with "
                f"other generations, expected it as it was; {AGAIN}"
            )
        if found := sorted(read_damaged(store) - plan.damaged):
            raise ResoluteError(
                f"{store.where}: damaged since the plan was made, got {len(found)} files listed by `resolute "
                f"verify`, such as {found[0]}, expected none; {AGAIN}, then convert the shards that are missing"
            )
        records = Records(store, plan.hash_of, scratch / "records")
        stack.callback(records.close)
        records.load(names=names_of_records(plan, plan.layout) if plan.layout.first else None)
        missing = missing_shards(plan.layout, plan.short_sides, records)
        if missing:
            raise _missing_error(store, out, np.flatnonzero([shard in missing for shard in plan.layout]))
        database = Database(scratch)
        stack.callback(database.close)
        photos = SetPhotos.open(database, _photo_files(store, plan, scratch))
        kept = existing.manifest if existing is not None and plan.layout.first else None
        manifest = finalize(store, plan, records, photos, check_lock, kept=kept, scratch=scratch)
        return BuildResult(
            manifest=manifest,
            ignored=plan.ignored,
            listed=plan.listed,
            stats=RunStats(),
            kept_shards=len(plan.layout),
            elapsed_s=time.perf_counter() - started_at,
            warnings=plan.warnings,
        )


def _missing_error(store: Store, out: str, missing: NDArray[np.int64]) -> ResoluteError:
    """The error for shards that are not finished; `missing` are their numbers, ascending, at least one."""
    runs = np.split(missing, np.flatnonzero(np.diff(missing) > 1) + 1)
    ranges = ", ".join([f"{run[0]}:{run[-1] + 1}" for run in runs[:_MAX_NAMED]] + ["…"] * (len(runs) > _MAX_NAMED))
    return ResoluteError(
        f"{store.where}: not all shards are finished, got {len(missing)} missing, numbers {ranges}, expected none; run "
        f"`resolute jobs range --out {shlex.quote(out)} --range {missing[0]}:{missing[-1] + 1}`, which leaves "
        "finished shards as they are"
    )


def _photo_files(store: Store, plan: SetPlan, scratch: Path) -> list[Path]:
    """The lists of the photos of all generations, local files."""
    files = []
    for generation, own in enumerate(plan.plans):
        path = local_photos(store, generation, own, scratch)
        if path is None:
            raise lost_photos(store, generation)
        files.append(path)
    return files
