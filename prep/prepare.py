"""Builds a shard set from any source of photos: plan, missing shards, index and lists, manifest last.

To resume, to repair and to add a resolution are the same: the shards without a valid record are converted, and the
rest of the set is derived from the records.

Finished shards survive any interruption, unavailable storage included: the same command resumes and gives the same
bytes. A run ends as soon as more images are certain to be rejected than `max_bad` allows.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.dataset.shard_set import FORMAT, VERSION, label_digits, manifest_bytes, shard_name
from pipeline.errors import ResoluteError, StorageError
from pipeline.storage.scratch import ScratchFolder
from prep.convert.batch import EncodeOptions
from prep.convert.codecs import check_codecs, codec_versions
from prep.execute.stats import RunStats
from prep.plan.input_checks import input_warnings
from prep.plan.inputs import Inputs, check_no_overlap, list_inputs
from prep.plan.shard_plan import ShardPlan
from prep.shards.cleanup import delete_orphans, delete_partial, start_over
from prep.shards.existing_set import PLAN, ExistingSet, describe_differences, open_existing
from prep.shards.manifest import finalize_set, write_rejects
from prep.shards.record import Records, plan_hash
from prep.shards.source_record import check_replaced_source, is_other_source, read_record, write_record
from prep.shards.writer import ShardSpec
from prep.storage.hashed_file import write_errors
from prep.storage.output import LOCK, RUN_FOLDER, LocalStore, Store, open_store

from .config import Settings

__all__ = ["BuildResult", "build", "describe_reasons"]

_MORE_ROUNDS = 2  # for shards whose files have vanished by the time the manifest is written


@dataclass(frozen=True, kw_only=True)
class BuildResult:
    """Outcome of `build`.

    `stats` covers the images converted by this run and is None if the set was already complete. `kept_shards` counts
    the shards that were finished before; `elapsed_s` is wall time; `warnings` are about the inputs; `ignored` counts
    things in the source that are not images of a class, by kind.
    """

    manifest: dict[str, Any]
    ignored: Counter[str]
    stats: RunStats | None
    kept_shards: int
    elapsed_s: float
    warnings: Sequence[str] = ()


def build(
    settings: Settings,
    *,
    on_start: Callable[[Inputs, int, int], None] = lambda inputs, images, kept_shards: None,
    progress: Callable[[RunStats], None] = lambda stats: None,
) -> BuildResult:
    """Write the shard set that `settings` describe, resume an unfinished one, or recognise a finished one.

    The same settings and photos give the same bytes, for any `workers` and `engine` and however often the run was
    killed. Missing resolutions are added to a finished set and its damaged shards are rebuilt. `on_start(inputs, images
    to convert, kept shards)` is called before the conversion, `progress(stats)` after each batch.

    Raises `ResoluteError` for bad input, a full disk, or if more than `max_bad` of the images are unusable;
    `StorageError` if storage is unavailable.
    """
    started_at = time.perf_counter()
    if settings.engine == "ray":
        settings = settings.with_absolute_paths()
    store = open_store(settings.out)
    check_no_overlap(settings)
    with ExitStack() as stack:
        open_existing(store, rebuild=settings.rebuild)  # why: foreign files are refused before anything is written
        check_lock = stack.enter_context(store.exclusive_lock())
        scratch = _scratch(stack, store)
        scan_cache = _scan_cache(store, scratch)
        try:
            inputs = list_inputs(settings, scratch, scan_cache)
        except StorageError:
            raise  # why the cache is kept: the next run continues with what is already unpacked
        except ResoluteError:
            shutil.rmtree(scan_cache, ignore_errors=True)
            raise
        existing = open_existing(store, rebuild=settings.rebuild)
        plan: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "settings": settings.plan_settings(),
            "classes": list(inputs.classes),
            "codecs": codec_versions() if existing is None or settings.rebuild else existing.plan["codecs"],
            "source": inputs.summary(),
        }
        if existing is not None and settings.rebuild:
            check_replaced_source(store, settings, existing, plan["source"])
            start_over(store)
            existing = None
        elif existing is not None:
            _refuse_other_plan(store, existing, plan, settings)
            if existing.is_complete(store, settings.resolutions):
                _delete_run_files(store)
                if read_record(store) is None:
                    write_record(store, settings)
                assert existing.manifest is not None
                return _result(started_at, settings, existing.manifest, inputs, None, 0)
        delete_partial(store)
        records = Records(store, plan_hash(plan), scratch / "records")
        stack.callback(records.close)
        records.load(damaged=() if existing is None else existing.damaged)
        shard_plan = ShardPlan(settings, inputs, records.plan)
        resolutions = _resolutions(settings, existing, shard_plan, records)
        missing = _missing(shard_plan, records, resolutions)
        if existing is not None and missing:
            what = "an unfinished run" if existing.manifest is None else "a set"
            check_codecs(plan["codecs"], f"{store.where}: {what} that")
        if existing is None:
            store.write(PLAN, manifest_bytes(plan))
        write_record(store, settings)
        check_rejects = partial(_check_rejects, settings, store, inputs, shard_plan)
        kept_rejects = {
            (split, key): reason for (split, key), reason in records.rejects().items()
            if (split, key // settings.shard_samples) not in missing
        }  # fmt: skip
        check_rejects(kept_rejects | shard_plan.not_there(missing))
        kept_shards = sum(shard_plan.shards.values()) - len(missing)
        on_start(inputs, sum(len(shard_plan.keys(*shard)) for shard in missing), kept_shards)

        def count_rejects(stats: RunStats) -> None:
            progress(stats)
            if len(kept_rejects) + stats.rejects > settings.max_bad * inputs.images:
                check_rejects(kept_rejects | {(name, key): reason for name, key, reason in stats.rejected}, so_far=True)

        options = EncodeOptions(
            quality=settings.quality, label_digits=label_digits(len(inputs.classes)), codecs=plan["codecs"]
        )
        stats = RunStats()
        for on_progress in (count_rejects, *[_ignore_progress] * _MORE_ROUNDS):
            if missing:
                specs = (
                    shard_plan.spec(*shard, missing_res, contents=records.contents(*shard))
                    for shard, missing_res in missing.items()
                )
                stats.merge(_convert(settings, options, specs, store, records, on_progress))
            # why: the manifest must not list files that were deleted after they were written
            records.drop_lost()
            missing = _missing(shard_plan, records, resolutions)
            if not missing:
                break
        else:
            raise StorageError(
                f"{store.where}: files disappear after they are written, got shards without files such as "
                f"{shard_name(*next(iter(missing)))}, expected them to stay; find what deletes them, then run the same "
                "command again"
            )
        check_rejects(records.rejects())
        check_lock()
        sides = {res: settings.short_side(res) for res in resolutions}
        manifest = finalize_set(store, plan, sides, shard_plan.shards, records, shard_plan.names_of)
        delete_orphans(store, manifest["files"])
        _delete_run_files(store)
        return _result(started_at, settings, manifest, inputs, stats, kept_shards)


def _resolutions(
    settings: Settings, existing: ExistingSet | None, shard_plan: ShardPlan, records: Records
) -> tuple[int, ...]:
    """The resolutions (px) of the set: those asked for, and those that a finished set has already."""
    finished = set() if existing is None else set(existing.resolutions)
    if existing is not None and existing.manifest is None:  # why: its manifest may be damaged
        finished = set.intersection(*(set(records.resolutions(*shard)) for shard in shard_plan))
    return tuple(sorted({*settings.resolutions, *finished}))


def _missing(
    shard_plan: ShardPlan, records: Records, resolutions: tuple[int, ...]
) -> dict[tuple[str, int], tuple[int, ...]]:
    """{(split, number): missing resolutions} of the shards that are not finished at all `resolutions`."""
    missing = {
        shard: tuple(res for res in resolutions if res not in records.resolutions(*shard)) for shard in shard_plan
    }
    return {shard: missing_res for shard, missing_res in missing.items() if missing_res}


def _scratch(stack: ExitStack, store: Store) -> Path:
    """A folder for this run's lists: inside OUT if OUT is local, so that a killed run leaves nothing elsewhere."""
    folder = store.root / RUN_FOLDER / "lists" if isinstance(store, LocalStore) else None
    if folder is not None:
        with write_errors(folder):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(mode=0o700)  # why: it holds URLs with credentials
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        return folder
    return stack.enter_context(ScratchFolder())


def _scan_cache(store: Store, scratch: Path) -> Path:
    """Folder for unpacked sources without random access: inside OUT if OUT is local, so that it survives a kill."""
    return store.root / RUN_FOLDER / "spool" if isinstance(store, LocalStore) else scratch / "spool"


def _delete_run_files(store: Store) -> None:
    for name in store.names(RUN_FOLDER):
        if f"{RUN_FOLDER}/{name}" != LOCK:
            store.remove(f"{RUN_FOLDER}/{name}")
    if isinstance(store, LocalStore):
        shutil.rmtree(_scan_cache(store, store.root), ignore_errors=True)


def _refuse_other_plan(store: Store, existing: ExistingSet, plan: Mapping[str, Any], settings: Settings) -> None:
    """Raise `ResoluteError`, listing the differences, unless the set at OUT was planned like this."""
    if existing.plan == plan:
        return
    differences = describe_differences(existing.plan, plan)
    record = read_record(store)
    if existing.manifest is not None and is_other_source(record, settings):
        assert record is not None
        raise ResoluteError(
            f"{store.where}: a finished set of other photos, made from {record['SRC']}, {differences}; choose "
            "another OUT"
        )
    if existing.manifest is not None:
        raise ResoluteError(
            f"{store.where}: a finished set of another kind, {differences}; rebuild it with REBUILD=1 (--rebuild) or "
            "choose another OUT"
        )
    raise ResoluteError(
        f"{store.where}: an unfinished run with other settings, {differences}; undo the change, start over with "
        "REBUILD=1 (--rebuild), or choose another OUT"
    )


def _check_rejects(
    settings: Settings,
    store: Store,
    inputs: Inputs,
    shard_plan: ShardPlan,
    rejects: Mapping[tuple[str, int], str],
    *,
    so_far: bool = False,
) -> None:
    """Raise `ResoluteError` if there are more `rejects` than allowed, or if they are all that a split holds.

    `rejects` maps (split, key) to a reason; on failure they are written to rejects.jsonl. `so_far`: the run is not
    finished and more may follow.
    """
    counts = Counter(name for name, _ in rejects)
    allowed = settings.max_bad * inputs.images
    empty = next((name for name, split in inputs.splits.items() if counts[name] == len(split)), None)
    if len(rejects) <= allowed and empty is None:
        return
    write_rejects(store, rejects, shard_plan.names_of)
    description = describe_reasons(rejects.values())
    if len(rejects) > allowed:
        raise ResoluteError(
            f"{settings.src}: too many unusable images, got {len(rejects)} of {inputs.images}"
            f"{' so far' if so_far else ''} ({description}), expected at most {int(allowed)} "
            f"(--max-bad {settings.max_bad}); see {store.where}/rejects.jsonl"
        )
    assert empty is not None
    raise ResoluteError(
        f"{settings.src}: no image of {empty} is usable, got {counts[empty]} rejects "
        f"({description}), expected at least one sample; see {store.where}/rejects.jsonl"
    )


def _convert(
    settings: Settings,
    options: EncodeOptions,
    specs: Iterable[ShardSpec],
    store: Store,
    records: Records,
    progress: Callable[[RunStats], None],
) -> RunStats:
    if settings.engine == "ray":
        from prep.execute.ray import convert_on_ray

        return convert_on_ray(settings.ray_address, options, specs, store, done=records.add, progress=progress)
    from prep.execute.local import convert_shards
    from prep.execute.process_pool import open_pool

    with open_pool(settings.worker_count) as pool:
        return convert_shards(pool, options, specs, store, done=records.add, progress=progress)


def _ignore_progress(stats: RunStats) -> None:
    pass


def _result(
    started_at: float,
    settings: Settings,
    manifest: dict[str, Any],
    inputs: Inputs,
    stats: RunStats | None,
    kept_shards: int,
) -> BuildResult:
    return BuildResult(
        manifest=manifest, ignored=inputs.ignored, stats=stats, kept_shards=kept_shards,
        elapsed_s=time.perf_counter() - started_at, warnings=() if stats is None else input_warnings(settings, inputs),
    )  # fmt: skip


def describe_reasons(reasons: Iterable[str]) -> str:
    """Count the rejects by kind, which is the part of a reason before its colon: `3 truncated, 1 not an image`."""
    kinds = Counter(reason.partition(":")[0] for reason in reasons)
    return ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items(), key=lambda item: (-item[1], item[0])))
