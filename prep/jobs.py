"""A set made by separate commands: `jobs plan`, any number of `jobs range` on any machines, and `jobs finish`.

The plan lists the sources once and writes what the others need to OUT/.prep/plan: the table of the photos of all
shards, one Parquet file, and `WorkList`, last. A job converts a range of the shards. Since the bytes of a shard follow
from its inputs alone, jobs may overlap, be killed and be repeated. The finish derives the rest of the set from the
records of all shards, as `build.build` does. Plan and finish hold OUT's lock; jobs hold none.
"""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from resolute.errors import ResoluteError
from resolute.prep.listing.database import Database
from resolute.prep.run.stats import RunStats
from resolute.prep.run.work import AGAIN, convert_range, names_of_records, read_work_list, save
from resolute.prep.shard_set.existing_set import open_existing, read_damaged, read_sealed
from resolute.prep.shard_set.planned_photos import missing_shards
from resolute.prep.shard_set.record import Records
from resolute.prep.shard_set.set_photos import SetPhotos, photo_files
from resolute.prep.shard_set.work_list import PLAN_FOLDER, WORK_LIST
from resolute.prep.storage.output import Store, open_output

from .finish import BuildResult, delete_run_files, finish, scratch_folder
from .plan import plan
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
    store = open_output(settings.out)
    with ExitStack() as stack:
        planned = plan(stack, settings, store, describe)
        if isinstance(planned, BuildResult):
            return planned
        save(planned.work, planned.missing, planned.scratch, planned.check_lock)
        todo, missing = planned.work.todo, planned.missing
    first, parts = 0, []
    for spec in todo.generations:
        for split in spec.splits:
            end = first + len(spec.shards(split))
            parts.append(f"{split} {first}:{end}")
            first = end
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
    store = open_output(out)
    if not read_sealed(store, WORK_LIST) and _is_finished(store):
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
    store = open_output(out)
    open_existing(store, rebuild=False)  # why: foreign files are refused before anything is written
    with ExitStack() as stack:
        check_lock = stack.enter_context(store.exclusive_lock())
        scratch = scratch_folder(stack, store)
        existing = open_existing(store, rebuild=False)
        todo = None if existing is not None and not store.names(PLAN_FOLDER) else read_work_list(store)
        resolutions = todo.short_sides if todo is not None else existing.resolutions if existing is not None else ()
        extends = todo is not None and existing is not None and todo.generations[-1].number > existing.newest.number
        if existing is not None and not extends and existing.is_complete(store, resolutions):
            delete_run_files(store)
            assert existing.manifest is not None
            return BuildResult(
                manifest=existing.manifest,
                ignored=Counter(),
                stats=None,
                kept_shards=0,
                elapsed_s=time.perf_counter() - started_at,
            )
        todo = todo or read_work_list(store)
        if found := sorted(read_damaged(store) - todo.damaged):
            raise ResoluteError(
                f"{store.where}: damaged since the plan was made, got {len(found)} files listed by `resolute "
                f"verify`, such as {found[0]}, expected none; {AGAIN}, then convert the shards that are missing"
            )
        records = Records(store, todo.hash_of, scratch / "records")
        stack.callback(records.close)
        first = todo.generations[0].number
        records.load(names=names_of_records(todo, todo) if first else None)
        missing = missing_shards(todo, todo.short_sides, records)
        if missing:
            raise _missing_error(store, out, np.flatnonzero([shard in missing for shard in todo]))
        database = Database(scratch)
        stack.callback(database.close)
        older = () if existing is None else existing.generations[:first]
        photos = SetPhotos.open(database, photo_files(store, (*older, *todo.generations), scratch))
        manifest = finish(store, todo, records, photos, check_lock, scratch)
        return BuildResult(
            manifest=manifest,
            ignored=todo.ignored,
            listed=todo.listed,
            stats=RunStats(),
            kept_shards=len(todo),
            elapsed_s=time.perf_counter() - started_at,
            warnings=todo.warnings,
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
