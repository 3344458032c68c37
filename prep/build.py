"""Builds a shard set from any source of photos: plan, convert the missing shards, finish.

To resume, to repair and to add a resolution are the same: the shards without a valid record are converted, and the
rest of the set is derived from the records.

Finished shards survive any interruption, unavailable storage included: the same command resumes and gives the same
bytes. A run ends as soon as more images are certain to be rejected than `max_bad` allows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from resolute.errors import StorageError
from resolute.pipeline.dataset.format import shard_name
from resolute.prep.run.stats import RunStats
from resolute.prep.run.work import convert, names_of_records, save
from resolute.prep.shard_set.work_list import Shard
from resolute.prep.storage.output import open_output

from .finish import BuildResult, check_rejects, finish
from .plan import Plan, plan
from .settings import Settings

__all__ = ["build"]

_ROUNDS = 3  # the first one, and those for shards whose files have vanished by the time the manifest is written


def build(
    settings: Settings,
    *,
    describe: Callable[[str], None] = lambda line: None,
    on_start: Callable[[int, int], None] = lambda images, kept_shards: None,
    progress: Callable[[RunStats], None] = lambda stats: None,
) -> BuildResult:
    """Write the shard set that `settings` describe, resume an unfinished one, or recognise a finished one.

    The same settings and photos give the same bytes, for any `workers` and `engine` and however often the run was
    killed. Missing resolutions are added to a finished set and its damaged shards are rebuilt. `describe(line)` is
    called for what the targets of a table were recognised as, then `on_start(images to convert, kept shards)` before
    the conversion, `progress(stats)` after each batch.

    Raises `ResoluteError` for bad input, a full disk, or if more than `max_bad` of the images are unusable;
    `StorageError` if storage is unavailable.
    """
    started_at = time.perf_counter()
    if settings.engine == "ray":
        settings = settings.with_absolute_paths()
    store = open_output(settings.out)
    with ExitStack() as stack:
        planned = plan(stack, settings, store, describe)
        if isinstance(planned, BuildResult):
            return planned
        work, missing = planned.work, planned.missing
        todo, kept_shards = work.todo, len(work.todo) - len(missing)
        on_start(todo.number_of_images(missing), kept_shards)

        def count_rejects(so_far: RunStats) -> None:
            progress(so_far)
            if len(planned.rejects) + so_far.rejects > todo.max_rejects:
                rejects = {**planned.rejects, **{(name, key): reason for name, key, reason in so_far.rejected}}
                check_rejects(store, todo, planned.names, rejects, so_far=True)

        stats = RunStats()
        for number in range(_ROUNDS):
            stats.merge(_convert(settings, planned, missing, _ignore_progress if number else count_rejects))
            # why: the manifest must not list files that were deleted after they were written
            work.records.drop_lost()
            missing = work.missing()
            if not missing:
                break
        else:
            raise StorageError(
                f"{store.where}: files disappear after they are written, got shards without files such as "
                f"{shard_name(*next(iter(missing)))}, expected them to stay; find what deletes them, then run the same "
                "command again"
            )
        manifest = finish(store, todo, work.records, planned.names, planned.check_lock, planned.scratch)
        return BuildResult(
            manifest=manifest,
            ignored=todo.ignored,
            listed=todo.listed,
            stats=stats,
            kept_shards=kept_shards,
            elapsed_s=time.perf_counter() - started_at,
            warnings=todo.warnings,
        )


def _convert(
    settings: Settings,
    planned: Plan,
    missing: Mapping[Shard, tuple[int, ...]],
    progress: Callable[[RunStats], None],
) -> RunStats:
    """Convert the missing shards, here or on a Ray cluster; their records are then in the work's."""
    work = planned.work
    if settings.engine != "ray" or not missing:
        return convert(work, missing, workers=settings.worker_count, progress=progress)
    from resolute.prep.run.ray import convert_on_ray

    save(work, missing, planned.scratch, planned.check_lock)
    numbers = [number for number, shard in enumerate(work.todo) if shard in missing]
    stats = convert_on_ray(
        settings.ray_address, settings.out, numbers, progress, max_megapixels=settings.max_megapixels
    )
    work.records.load(names=names_of_records(work.todo, missing))
    return stats


def _ignore_progress(stats: RunStats) -> None:
    pass
