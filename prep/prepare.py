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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from resolute.errors import ResoluteError, StorageError
from resolute.files import write_errors
from resolute.pipeline.dataset.format import FORMAT, VERSION, manifest_bytes, rejects_name, shard_name
from resolute.pipeline.storage.scratch import ScratchFolder
from resolute.prep.convert.batch import EncodeOptions
from resolute.prep.convert.codecs import check_codecs, codec_versions
from resolute.prep.execute.stats import RunStats
from resolute.prep.plan.generations import SUPERSEDED, StoredInputs, check_inputs, plan_name, read_inputs, write_inputs
from resolute.prep.plan.input_checks import input_warnings
from resolute.prep.plan.inputs import Inputs, check_no_overlap, list_catalogs, split_inputs
from resolute.prep.plan.set_plan import PLAN_FOLDER, SET_PLAN, SetPlan, ShardLayout, layout_of
from resolute.prep.plan.shard_inputs import ShardInputs
from resolute.prep.plan.shard_plan import FinishedGeneration, GenerationImages, ShardPlan
from resolute.prep.shards.cards import CARD, CROISSANT, write_card
from resolute.prep.shards.cleanup import delete_orphans, delete_partial, start_over
from resolute.prep.shards.duplicates import InputNames
from resolute.prep.shards.existing_set import ExistingSet, describe_differences, open_existing, read_sealed
from resolute.prep.shards.manifest import finalize_set, restore_info_files, write_rejects
from resolute.prep.shards.record import Records, record_name
from resolute.prep.shards.source_record import check_replaced_source, is_other_source, read_record, write_record
from resolute.prep.shards.writer import ShardSpec
from resolute.prep.sources.image_ref import ByteRange
from resolute.prep.sources.scan_cache import delete_old_versions
from resolute.prep.storage.bulk import remove_many
from resolute.prep.storage.output import LOCK, RUN_FOLDER, LocalStore, Store, open_store

from .extension import (
    Finished,
    check_extendable,
    describe_changes,
    extension_plan,
    is_nothing_new,
    open_finished,
    write_changes,
)
from .settings import Settings

__all__ = ["BuildResult", "PlannedSet", "ShardSpecs", "build", "delete_plan_files", "delete_run_files",
           "describe_reasons", "finalize", "missing_shards", "plan_set", "scratch_folder"]  # fmt: skip

_MORE_ROUNDS = 2  # for shards whose files have vanished by the time the manifest is written


@dataclass(frozen=True, kw_only=True)
class BuildResult:
    """Outcome of `build`.

    `stats` covers the images converted by this run and is None if the set was already complete. `kept_shards` counts
    the shards that were finished before; `elapsed_s` is wall time; `warnings` are about the inputs, `notes` about an
    extension by nothing; `ignored` counts things in the source that are not images of a class, by kind.
    """

    manifest: dict[str, Any]
    ignored: Counter[str]
    stats: RunStats | None
    kept_shards: int
    elapsed_s: float
    warnings: Sequence[str] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class PlannedSet:
    """A set that is not finished: its plan, the images of its shards, and the records of those that are finished.

    `missing` maps (split, number) of a shard to the resolutions (px) that it lacks. `check_lock` raises `StorageError`
    if OUT is no longer the locked one. `kept` is the manifest whose generations stay as they are, None if all files are
    derived again; `scratch` is an empty folder of this run.
    """

    plan: SetPlan
    shard_plan: ShardPlan
    records: Records
    missing: Mapping[tuple[str, int], tuple[int, ...]]
    check_lock: Callable[[], None]
    kept: Mapping[str, Any] | None
    scratch: Path

    def kept_rejects(self) -> dict[tuple[str, int], str]:
        """{(split, key): reason} of the images in finished shards."""
        shard_of = self.plan.layout.shard_of
        return {
            (split, key): reason for (split, key), reason in self.records.rejects().items()
            if (split, shard_of(split, key)) not in self.missing
        }  # fmt: skip


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
    store = open_store(settings.out)
    with ExitStack() as stack:
        planned = plan_set(stack, settings, store, describe)
        if isinstance(planned, BuildResult):
            return planned
        plan, records, missing = planned.plan, planned.records, planned.missing
        inputs = planned.shard_plan
        kept_rejects, kept_shards = planned.kept_rejects(), len(plan.layout) - len(missing)
        on_start(sum(len(plan.layout.keys(*shard)) for shard in missing), kept_shards)

        stats = RunStats()

        def count_rejects(current: RunStats) -> None:
            so_far = current
            if stats.images:  # why: of the shards of an older generation
                so_far = RunStats()
                so_far.merge(stats)
                so_far.merge(current)
            progress(so_far)
            if len(kept_rejects) + so_far.rejects > plan.max_rejects:
                rejects = kept_rejects | {(name, key): reason for name, key, reason in so_far.rejected}
                _check_rejects(store, plan, inputs, rejects, so_far=True)

        for on_progress in (count_rejects, *[_ignore_progress] * _MORE_ROUNDS):
            for generation, shards in plan.by_generation(missing).items():
                specs = ShardSpecs(plan, {shard: missing[shard] for shard in shards}, records, inputs.inputs)
                stats.merge(_convert(settings, plan.options(generation), specs, store, records, on_progress))
            # why: the manifest must not list files that were deleted after they were written
            records.drop_lost()
            missing = missing_shards(plan.layout, plan.short_sides, records)
            if not missing:
                break
        else:
            raise StorageError(
                f"{store.where}: files disappear after they are written, got shards without files such as "
                f"{shard_name(*next(iter(missing)))}, expected them to stay; find what deletes them, then run the same "
                "command again"
            )
        manifest = finalize(
            store, plan, records, inputs, planned.check_lock, kept=planned.kept, scratch=planned.scratch
        )
        return BuildResult(
            manifest=manifest, ignored=plan.ignored, stats=stats, kept_shards=kept_shards,
            elapsed_s=time.perf_counter() - started_at, warnings=plan.warnings,
        )  # fmt: skip


def plan_set(
    stack: ExitStack, settings: Settings, store: Store, describe: Callable[[str], None] = lambda line: None
) -> PlannedSet | BuildResult:
    """List the inputs, and compare them with what is in OUT; the result of a finished set, or what is missing.

    Writes the plan and the list of photos of a new generation, and source.json. `stack` takes over the exclusive lock
    of OUT and temporary files. Raises `ResoluteError` for bad input, for a set of other settings or photos, and if too
    many images are already rejected.
    """
    started_at = time.perf_counter()
    check_no_overlap(settings)
    open_existing(store, rebuild=settings.rebuild)  # why: foreign files are refused before anything is written
    if settings.extend:
        check_extendable(store, settings, open_existing(store, rebuild=False))
    check_lock = stack.enter_context(store.exclusive_lock())
    scratch = scratch_folder(stack, store)
    scan_cache = _scan_cache(store, scratch)
    existing = open_existing(store, rebuild=settings.rebuild)
    if settings.extend:
        check_extendable(store, settings, existing)
        assert existing is not None
        assert existing.manifest is not None
        if existing.lost(store):
            restore_info_files(store, existing.manifest, layout_of(existing.plans), scratch)
    old = None if settings.rebuild else existing
    finished: Finished | None = None
    try:
        catalogs, ignored = list_catalogs(
            settings, scratch, scan_cache, known_classes=() if old is None else old.plan["classes"]
        )
        if old is not None and (settings.extend or len(old.plans) > 1):
            finished = open_finished(store, settings, old, catalogs, ignored, scratch)
            inputs = finished.inputs
        else:
            inputs = split_inputs(settings, catalogs, ignored)
    except StorageError:
        raise  # why the cache is kept: the next run continues with what is already unpacked
    except ResoluteError:
        if not store.names(PLAN_FOLDER):  # why: jobs read images from the cache
            shutil.rmtree(scan_cache, ignore_errors=True)
        raise
    if not store.names(PLAN_FOLDER):  # why: as above
        delete_old_versions(scan_cache, {path for catalog in inputs.catalogs.values() for path in catalog.containers})
    for line in inputs.about:
        describe(line)
    plans = _plans(store, settings, existing, finished, inputs)
    if existing is not None and settings.rebuild:
        check_replaced_source(store, settings, existing, plans[0]["source"])
        start_over(store)
        existing = None
    elif existing is not None and settings.extend:
        assert finished is not None
        write_changes(store, settings, finished)
        if is_nothing_new(finished) and existing.is_complete(store, settings.resolutions):
            return _nothing_to_add(store, settings, existing, finished, started_at)
    elif existing is not None:
        _refuse_other_plan(store, existing, plans[-1], settings)
        if existing.is_complete(store, settings.resolutions):
            delete_partial(store)  # such as that of a report whose writer was killed
            delete_run_files(store)
            if read_record(store) is None:
                write_record(store, settings)
            assert existing.manifest is not None
            if CROISSANT in existing.manifest["files"] and store.size(CARD) is None:  # why: older sets have neither
                write_card(store, existing.manifest)
            return BuildResult(
                manifest=existing.manifest, ignored=inputs.ignored, stats=None, kept_shards=0,
                elapsed_s=time.perf_counter() - started_at,
            )  # fmt: skip
    delete_partial(store)
    if existing is not None and finished is not None and settings.extend and is_nothing_new(finished):
        plans = existing.plans  # why: there are only resolutions to add
    damaged = frozenset() if existing is None else existing.damaged
    # files of finished generations stay as they are, unless a resolution is added or something is to be repaired
    is_addition = existing is not None and set(settings.resolutions) <= set(existing.resolutions)
    first = len(plans) - 1 if settings.extend and is_addition else 0
    layout = layout_of(plans, first=first)
    set_plan = SetPlan(
        plans=plans, src=settings.src, layout=layout, max_bad=settings.max_bad, ignored=inputs.ignored,
        short_sides={}, damaged=damaged,
        warnings=tuple(input_warnings(settings, inputs, is_extension=finished is not None)),
    )  # fmt: skip
    records = Records(store, set_plan.hash_of, scratch / "records")
    stack.callback(records.close)
    own_names = [record_name(shard_name(*shard), res) for shard in layout for res in settings.resolutions]
    records.load(names=own_names if first else None, damaged=damaged)
    resolutions = _resolutions(settings, existing, layout, records)
    set_plan = replace(set_plan, short_sides={res: settings.short_side(res) for res in resolutions})
    shard_plan = _shard_plan(store, settings, set_plan, inputs, finished, records)
    missing = missing_shards(layout, resolutions, records)
    for generation, shards in set_plan.by_generation(missing).items():
        if existing is not None:
            what = "an unfinished run" if existing.manifest is None else "a set"
            check_codecs(plans[generation]["codecs"], f"{store.where}: {what}")
        if finished is not None:
            shard_plan.check_there(shards)
    _write_plans(store, set_plan, inputs, finished, existing)
    write_record(store, settings)
    planned = PlannedSet(
        plan=set_plan, shard_plan=shard_plan, records=records, missing=missing, check_lock=check_lock,
        kept=existing.manifest if existing is not None and first else None, scratch=scratch,
    )  # fmt: skip
    rejects = planned.kept_rejects() | shard_plan.not_there(missing)
    _check_rejects(store, set_plan, shard_plan, rejects)
    return planned


def _plans(
    store: Store, settings: Settings, existing: ExistingSet | None, finished: Finished | None, inputs: Inputs
) -> tuple[dict[str, Any], ...]:
    """The plans of all generations of the set to be made, the newest one for the source as it is now."""
    if existing is not None and finished is not None:
        if settings.extend:
            return *existing.plans, extension_plan(store, settings, existing, finished)
        source = {**inputs.summary(), "splits": existing.plan["source"]["splits"]}
        own = {"settings": settings.plan_settings(), "classes": list(inputs.classes), "source": source}
        return *existing.plans[:-1], {**existing.plan, **own}
    return ({
        "format": FORMAT,
        "version": VERSION,
        "generation": 0,
        "settings": settings.plan_settings(),
        "classes": list(inputs.classes),
        "target": inputs.target.to_json(),
        "codecs": codec_versions() if existing is None or settings.rebuild else existing.plan["codecs"],
        "source": inputs.summary(),
        "images": {split: len(images) for split, images in inputs.splits.items()},
    },)  # fmt: skip


def _nothing_to_add(
    store: Store, settings: Settings, existing: ExistingSet, finished: Finished, started_at: float
) -> BuildResult:
    """The result of an extension by nothing; deletes what an unfinished one has left."""
    assert existing.manifest is not None
    delete_orphans(store, existing.manifest["files"])
    delete_run_files(store)
    comparison = finished.comparison
    changes = describe_changes(
        store.where, len(comparison.removed), len(comparison.changed), dropped=settings.drop
    )
    return BuildResult(
        manifest=existing.manifest, ignored=finished.inputs.ignored, stats=None, kept_shards=0,
        elapsed_s=time.perf_counter() - started_at, notes=("no new photos in the source", *changes),
    )  # fmt: skip


def _shard_plan(
    store: Store, settings: Settings, plan: SetPlan, inputs: Inputs, finished: Finished | None, records: Records
) -> ShardPlan:
    images: list[GenerationImages] = [] if finished is None else [
        FinishedGeneration(finished.comparison, inputs.catalogs, n) for n in range(len(finished.stored))
    ]  # fmt: skip
    if len(images) < len(plan.plans):
        images.append(GenerationImages(inputs.splits))
    rejected = {} if finished is None else {**finished.rejected, **records.rejects()}
    return ShardPlan(
        seed=settings.seed, layout=plan.layout, images=images, rejected=rejected, where=store.where, src=settings.src
    )


def _write_plans(
    store: Store, plan: SetPlan, inputs: Inputs, finished: Finished | None, existing: ExistingSet | None
) -> None:
    """Write the plan of the newest generation, and the lists of the photos of all that are to be made."""
    newest, own = len(plan.plans) - 1, plan.plans[-1]
    if read_sealed(store, plan_name(newest)) != own:
        store.write(plan_name(newest), manifest_bytes(own))
    for generation in range(plan.layout.first, newest + 1):
        try:
            check_inputs(store, generation, plan.hashes[generation])
        except ResoluteError:
            if finished is not None and generation < len(finished.stored):
                raise
            superseded = np.empty(0, SUPERSEDED) if finished is None else finished.comparison.superseded
            write_inputs(store, generation, own, inputs.splits, superseded)


def _resolutions(
    settings: Settings, existing: ExistingSet | None, layout: ShardLayout, records: Records
) -> tuple[int, ...]:
    """The resolutions (px) of the set: those asked for, and those that a finished set has already."""
    finished = set() if existing is None else set(existing.resolutions)
    if existing is not None and existing.manifest is None:  # why: its manifest may be damaged
        finished = set.intersection(*(set(records.resolutions(*shard)) for shard in layout))
    return tuple(sorted({*settings.resolutions, *finished}))


def missing_shards(
    shards: Iterable[tuple[str, int]], resolutions: Iterable[int], records: Records
) -> dict[tuple[str, int], tuple[int, ...]]:
    """{(split, number): missing resolutions} of those of the `shards` that are not finished at all `resolutions`."""
    missing = {shard: tuple(res for res in resolutions if res not in records.resolutions(*shard)) for shard in shards}
    return {shard: missing_res for shard, missing_res in missing.items() if missing_res}


class ShardSpecs:
    """The specification of each shard in `missing`, made when it is needed."""

    def __init__(
        self, plan: SetPlan, missing: Mapping[tuple[str, int], tuple[int, ...]], records: Records,
        inputs_of: Callable[[str, int], ShardInputs],
    ) -> None:  # fmt: skip
        self._plan, self._missing, self._records, self._inputs_of = plan, missing, records, inputs_of

    def __len__(self) -> int:
        return len(self._missing)

    def __iter__(self) -> Iterator[ShardSpec]:
        for shard, resolutions in self._missing.items():
            sides = {res: self._plan.short_sides[res] for res in resolutions}
            contents = self._records.contents(*shard)
            yield self._inputs_of(*shard).spec(sides, plan=self._plan.hash_of(*shard), contents=contents)

    def photos(self) -> list[ByteRange]:
        """A few of the images: the first and the last of the first and the last shard of each split."""
        by_split = {split: [shard for shard in self._missing if shard[0] == split] for split, _ in self._missing}
        ends = [shard for shards in by_split.values() for shard in dict.fromkeys((shards[0], shards[-1]))]
        inputs = [self._inputs_of(*shard) for shard in ends]
        return [
            each.images.byte_range(i)
            for each in inputs for i in dict.fromkeys((0, len(each.images) - 1)) if i not in each.skip
        ]  # fmt: skip


def finalize(
    store: Store, plan: SetPlan, records: Records, inputs: InputNames, check_lock: Callable[[], None], *,
    kept: Mapping[str, Any] | None, scratch: Path,
) -> dict[str, Any]:  # fmt: skip
    """Derive everything else from the records of all shards, delete what does not belong, and return the manifest.

    `kept` and `scratch` are as for `finalize_set`. Raises `ResoluteError` if too many images were rejected.
    """
    _check_rejects(store, plan, inputs, records.rejects())
    check_lock()

    def stored(generation: int) -> StoredInputs:
        return read_inputs(store, generation, plan.hashes[generation], scratch)

    manifest = finalize_set(store, plan, records, inputs, stored, kept, scratch)
    delete_orphans(store, manifest["files"])
    delete_run_files(store)
    return manifest


def scratch_folder(stack: ExitStack, store: Store) -> Path:
    """An empty folder for this run, which holds the lock alone: inside OUT if OUT is local, so that a killed run leaves
    nothing elsewhere; the next run deletes it."""
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


def delete_plan_files(store: Store) -> None:
    """Delete what `resolute jobs plan` wrote for jobs, the mark that it is complete last."""
    names = [f"{PLAN_FOLDER}/{name}" for name in store.names(PLAN_FOLDER)]
    remove_many(store, [name for name in names if name != SET_PLAN])
    store.remove(SET_PLAN)
    store.remove_folder(PLAN_FOLDER)


def delete_run_files(store: Store) -> None:
    """Delete what lies in OUT only until the set is finished."""
    delete_plan_files(store)
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
    if existing.manifest is not None and existing.plan["settings"] == plan["settings"]:
        differences += "; EXTEND=1 (--extend) adds new photos to the set"
    if existing.manifest is not None and is_other_source(record, settings):
        assert record is not None
        raise ResoluteError(
            f"{store.where}: a finished set of other photos, made from {record['SRC']}: {differences}; choose "
            "another OUT"
        )
    if existing.manifest is not None:
        raise ResoluteError(
            f"{store.where}: a finished set of another kind: {differences}; rebuild it with REBUILD=1 (--rebuild) or "
            "choose another OUT"
        )
    raise ResoluteError(
        f"{store.where}: an unfinished run with other settings: {differences}; undo the change, start over with "
        "REBUILD=1 (--rebuild), or choose another OUT"
    )


def _check_rejects(
    store: Store,
    plan: SetPlan,
    inputs: InputNames,
    rejects: Mapping[tuple[str, int], str],
    *,
    so_far: bool = False,
) -> None:
    """Raise `ResoluteError` if there are more `rejects` than allowed, or if they are all that a split holds.

    `rejects` maps (split, key) to a reason; on failure they are written to rejects.jsonl. `so_far`: the run is not
    finished and more may follow.
    """
    images, newest = plan.layout.images, len(plan.plans) - 1
    counts = Counter(name for name, _ in rejects)
    empty = None  # why: an extension may have no sample in a split
    if not plan.layout.first:
        empty = next((name for name in images if counts[name] == images[name]), None)
    if len(rejects) <= plan.max_rejects and empty is None:
        return
    write_rejects(store, rejects, inputs, generation=newest)
    description = describe_reasons(rejects.values())
    if len(rejects) > plan.max_rejects:
        raise ResoluteError(
            f"{plan.src}: too many unusable images, got {len(rejects)} of {sum(images.values())}"
            f"{' so far' if so_far else ''} ({description}), expected at most {int(plan.max_rejects)} "
            f"(--max-bad {plan.max_bad}); see {store.where}/{rejects_name(newest)}"
        )
    assert empty is not None
    raise ResoluteError(
        f"{plan.src}: no image of {empty} is usable, got {counts[empty]} rejects "
        f"({description}), expected at least one sample; see {store.where}/{rejects_name(newest)}"
    )


def _convert(
    settings: Settings,
    options: EncodeOptions,
    specs: ShardSpecs,
    store: Store,
    records: Records,
    progress: Callable[[RunStats], None],
) -> RunStats:
    if settings.engine == "ray":
        from resolute.prep.execute.ray import convert_on_ray

        return convert_on_ray(
            settings.ray_address, options, specs, store, photos=specs.photos(), done=records.add, progress=progress
        )
    from resolute.prep.execute.local import convert_shards
    from resolute.prep.execute.process_pool import open_pool

    with open_pool(settings.worker_count) as pool:
        return convert_shards(pool, options, specs, store, done=records.add, progress=progress)


def _ignore_progress(stats: RunStats) -> None:
    pass


def describe_reasons(reasons: Iterable[str]) -> str:
    """Count the rejects by kind, which is the part of a reason before its colon: `3 truncated, 1 not an image`."""
    kinds = Counter(reason.partition(":")[0] for reason in reasons)
    return ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items(), key=lambda item: (-item[1], item[0])))
