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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from resolute.errors import ResoluteError, StorageError
from resolute.files import write_errors
from resolute.pipeline.dataset.format import FORMAT, VERSION, manifest_bytes, shard_name
from resolute.prep.convert.codecs import check_codecs, codec_versions
from resolute.prep.listing.checks import input_warnings
from resolute.prep.listing.compare import Comparison
from resolute.prep.listing.database import Database
from resolute.prep.listing.inputs import Inputs, check_no_overlap, list_sources, split_inputs
from resolute.prep.run.planned import delete_plan_files
from resolute.prep.run.stats import RunStats
from resolute.prep.shard_set.cards import CARD, write_card
from resolute.prep.shard_set.cleanup import delete_orphans, delete_partial, start_over
from resolute.prep.shard_set.existing_set import (
    MANIFEST,
    ExistingSet,
    describe_differences,
    open_existing,
    plan_name,
    read_sealed,
)
from resolute.prep.shard_set.manifest import finalize_set, restore_info_files, write_rejects
from resolute.prep.shard_set.record import Records, record_name
from resolute.prep.shard_set.set_photos import SetPhotos, local_photos, lost_photos, photos_name, put_file, write_photos
from resolute.prep.shard_set.set_plan import PLAN_FOLDER, SET_PLAN, SetPlan, ShardLayout, layout_of
from resolute.prep.shard_set.shard_plan import (
    ShardPlan,
    ShardSpecs,
    missing_shards,
    plan_older,
    plan_photos,
    start_planned,
)
from resolute.prep.shard_set.source_record import (
    check_replaced_source,
    is_other_source,
    read_record,
    variables_of,
    with_remembered,
    write_record,
)
from resolute.prep.sources.archives.containers import content_hash
from resolute.prep.sources.scan_cache import delete_old_versions
from resolute.prep.storage.output import LOCK, RUN_FOLDER, LocalStore, Store, open_store
from resolute.scratch import ScratchFolder

from .extend import (
    check_extendable,
    compare_with_set,
    describe_changes,
    extension_inputs,
    extension_plan,
    write_changes,
)
from .grey_range import check_all, check_sample
from .settings import Settings
from .unchanged import source_signature

__all__ = [
    "BuildResult",
    "Work",
    "build",
    "delete_run_files",
    "describe_reasons",
    "finalize",
    "plan_set",
    "scratch_folder",
]

_ARCHIVES = f"{RUN_FOLDER}/archives.json"  # while a set is unfinished: its plan, and the hash of its archives' contents
_REJECTS = f"{RUN_FOLDER}/rejects.jsonl"  # of a run that failed; those of a finished set stay as they are
_MORE_ROUNDS = 2  # for shards whose files have vanished by the time the manifest is written


@dataclass(frozen=True, kw_only=True)
class BuildResult:
    """Outcome of `build`.

    `stats` covers the images converted by this run and is None if the set was already complete. `kept_shards` counts
    the shards that were finished before; `elapsed_s` is wall time; `warnings` are about the inputs, `notes` about an
    extension by nothing; `ignored` counts things in the source that are not images of a class, by kind, and `listed`
    all entries of the source (0: unknown).
    """

    manifest: dict[str, Any]
    ignored: Counter[str]
    stats: RunStats | None
    kept_shards: int
    elapsed_s: float
    listed: int = 0
    warnings: Sequence[str] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Work:
    """A set that is not finished: its plan, the photos of its shards, and the records of those that are finished.

    `missing` maps (split, number) of a shard to the resolutions (px) that it lacks. `check_lock` raises `StorageError`
    if OUT is no longer the locked one. `kept` is the manifest whose generations stay as they are, None if all files are
    derived again; `scratch` is an empty folder of this run.
    """

    plan: SetPlan
    shard_plan: ShardPlan
    photos: SetPhotos
    records: Records
    missing: Mapping[tuple[str, int], tuple[int, ...]]
    check_lock: Callable[[], None]
    kept: Mapping[str, Any] | None
    scratch: Path

    def kept_rejects(self) -> dict[tuple[str, int], str]:
        """{(split, key): reason} of the images in finished shards."""
        shard_of = self.plan.layout.shard_of
        return {
            (split, key): reason
            for (split, key), reason in self.records.rejects().items()
            if (split, shard_of(split, key)) not in self.missing
        }


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
        work = plan_set(stack, settings, store, describe)
        if isinstance(work, BuildResult):
            return work
        plan, records, missing = work.plan, work.records, work.missing
        kept_rejects, kept_shards = work.kept_rejects(), len(plan.layout) - len(missing)
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
                _check_rejects(store, plan, work.photos, rejects, so_far=True)

        for on_progress in (count_rejects, *[_ignore_progress] * _MORE_ROUNDS):
            stats.merge(_convert(settings, store, work, missing, on_progress))
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
        manifest = finalize(store, plan, records, work.photos, work.check_lock, kept=work.kept, scratch=work.scratch)
        return BuildResult(
            manifest=manifest,
            ignored=plan.ignored,
            listed=plan.listed,
            stats=stats,
            kept_shards=kept_shards,
            elapsed_s=time.perf_counter() - started_at,
            warnings=plan.warnings,
        )


def plan_set(
    stack: ExitStack, settings: Settings, store: Store, describe: Callable[[str], None] = lambda line: None
) -> Work | BuildResult:
    """List the sources, and compare them with what is in OUT; the result of a finished set, or what is to be made.

    Writes the plan and the list of photos of a new generation, and source.json. `stack` takes over the exclusive lock
    of OUT and temporary files. Raises `ResoluteError` for bad input, for a set of other settings or photos, and if too
    many images are already rejected.
    """
    started_at = time.perf_counter()
    check_no_overlap(settings)
    # why also before the lock: foreign files are refused before anything is written
    existing = open_existing(store, rebuild=settings.rebuild)
    if settings.extend:
        check_extendable(store, settings, existing)
    check_lock = stack.enter_context(store.exclusive_lock())
    scratch = scratch_folder(stack, store)
    existing = open_existing(store, rebuild=settings.rebuild)
    settings = with_remembered(settings, store)
    if settings.extend:
        existing = check_extendable(store, settings, existing)
        if existing.manifest is not None and existing.lost(store):
            restore_info_files(store, existing.manifest, layout_of(existing.plans), scratch)
    database = Database(scratch)
    stack.callback(database.close)
    sources = _list(settings, store, database, None if settings.rebuild else existing, scratch)
    for line in sources.inputs.about:
        describe(line)
    if existing is None or settings.rebuild:
        plan: _Plan | _Nothing = _new(sources, existing)
    elif settings.extend:
        plan = _extend(sources, existing)
    elif existing.manifest is None:
        plan = _resume(sources, existing)
    elif not set(settings.resolutions) <= set(existing.resolutions):
        plan = _add_resolutions(sources, existing)
    else:
        plan = _repair(sources, existing)
    if isinstance(plan, _Nothing):
        return BuildResult(
            manifest=plan.manifest,
            ignored=sources.inputs.ignored,
            stats=None,
            kept_shards=0,
            elapsed_s=time.perf_counter() - started_at,
            notes=plan.notes,
        )
    return _work(stack, sources, plan, check_lock, scratch)


@dataclass(frozen=True, kw_only=True)
class _Sources:
    """The photos of the sources as they are now; `comparison` with those of a set that they are to extend, or whose
    generations are several.
    """

    settings: Settings
    store: Store
    database: Database
    inputs: Inputs
    comparison: Comparison | None

    def signature(self) -> dict[str, str] | None:
        """The state of the sources when they were listed; None if that of one is unknown."""
        return source_signature(self.settings, {name: photos.signature for name, photos in self.inputs.sources.items()})


@dataclass(frozen=True, kw_only=True)
class _Nothing:
    """There is nothing to be made: the set with this manifest has it all."""

    manifest: dict[str, Any]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What is to be made: shards of the generations with these `plans`, from number `first` on.

    Records do not count if they are in `damaged` or of files that are; `kept` is the manifest whose older generations
    stay as they are; `resolutions` (px) None are those that all shards have, and those asked for.
    """

    plans: tuple[dict[str, Any], ...]
    first: int = 0
    damaged: frozenset[str] = frozenset()
    kept: dict[str, Any] | None = None
    resolutions: tuple[int, ...] | None = None
    what: str = "a set"  # in messages


def _new(sources: _Sources, existing: ExistingSet | None) -> _Plan:
    """A new set, in place of the `existing` one if that is to be rebuilt."""
    plan = _new_plan(sources, codec_versions())
    check_sample(sources.settings, sources.inputs)
    if existing is not None:
        check_replaced_source(sources.store, sources.settings, existing, plan["source"])
        start_over(sources.store)
    return _Plan(plans=(plan,), resolutions=sources.settings.resolutions)


def _resume(sources: _Sources, existing: ExistingSet) -> _Plan:
    """A set whose run was interrupted: its finished shards are kept."""
    _check_same_plan(sources, existing)
    return _Plan(plans=existing.plans, damaged=existing.damaged, what="an unfinished run")


def _add_resolutions(sources: _Sources, existing: ExistingSet) -> _Plan:
    """A finished set that lacks resolutions: all shards are converted at these."""
    _check_same_plan(sources, existing)
    both = sorted({*sources.settings.resolutions, *existing.resolutions})
    return _Plan(plans=existing.plans, damaged=existing.damaged, resolutions=tuple(both))


def _repair(sources: _Sources, existing: ExistingSet) -> _Plan | _Nothing:
    """A finished set, of which files may be gone or damaged: these are made again."""
    _check_same_plan(sources, existing)
    store, manifest = sources.store, existing.manifest
    assert manifest is not None
    if existing.is_complete(store, sources.settings.resolutions):
        delete_partial(store)  # such as that of a report whose writer was killed
        delete_run_files(store)
        write_record(store, variables_of(sources.settings), sources.signature())
        if store.size(CARD) is None:
            write_card(store, manifest)
        return _Nothing(manifest=manifest)
    return _Plan(plans=existing.plans, damaged=existing.damaged, resolutions=tuple(existing.resolutions))


def _extend(sources: _Sources, existing: ExistingSet) -> _Plan | _Nothing:
    """A finished set to which the photos are added that are new in the source: a generation of shards of their own."""
    settings, store, comparison = sources.settings, sources.store, sources.comparison
    assert comparison is not None
    assert existing.manifest is not None
    plan = extension_plan(settings, store, existing, sources.inputs, comparison)
    write_changes(store, comparison)
    has_resolutions = set(settings.resolutions) <= set(existing.resolutions)
    both = tuple(sorted({*settings.resolutions, *existing.resolutions}))
    if comparison.added:
        first = len(existing.plans) if has_resolutions else 0  # why: a new resolution is one of all generations
        kept = existing.manifest if has_resolutions else None
        return _Plan(plans=(*existing.plans, plan), first=first, kept=kept, resolutions=both)
    if not has_resolutions:
        return _Plan(plans=existing.plans, resolutions=both)
    delete_orphans(store, existing.manifest["files"])  # what an unfinished extension has left
    delete_run_files(store)
    changes = describe_changes(store.where, comparison.removed, comparison.changed)
    return _Nothing(manifest=existing.manifest, notes=("no new photos in the source", *changes))


def _list(settings: Settings, store: Store, database: Database, old: ExistingSet | None, scratch: Path) -> _Sources:
    """List the sources, and divide into splits what is to be made of them."""
    scan_cache, comparison = _scan_cache(store, scratch), None
    try:
        sources, ignored = list_sources(
            settings, database, scan_cache, known_classes=() if old is None else old.plan["classes"]
        )
        if old is not None and (settings.extend or len(old.plans) > 1):
            comparison = compare_with_set(store, old, sources, scratch)
            inputs = extension_inputs(settings, old, sources, ignored, comparison)
        else:
            inputs = split_inputs(settings, sources, ignored)
    except StorageError:
        raise  # why the cache is kept: the next run continues with what is already unpacked
    except ResoluteError:
        if not store.names(PLAN_FOLDER):  # why: jobs read images from the cache
            shutil.rmtree(scan_cache, ignore_errors=True)
        raise
    if not store.names(PLAN_FOLDER):  # why: as above
        delete_old_versions(scan_cache, {path for photos in sources.values() for path in photos.containers})
    return _Sources(settings=settings, store=store, database=database, inputs=inputs, comparison=comparison)


def _new_plan(sources: _Sources, codecs: dict[str, str]) -> dict[str, Any]:
    inputs = sources.inputs
    return {
        "format": FORMAT,
        "version": VERSION,
        "generation": 0,
        "settings": sources.settings.plan_settings(),
        "classes": list(inputs.classes),
        "target": inputs.target.to_json(),
        "codecs": codecs,
        "source": inputs.summary(),
        "images": {split: len(photos) for split, photos in inputs.splits.items()},
    }


def _check_same_plan(sources: _Sources, existing: ExistingSet) -> None:
    """Raise `ResoluteError`, listing the differences, unless the settings and the photos are those of the set."""
    old = existing.plan
    plan = _new_plan(sources, old["codecs"])
    if len(existing.plans) > 1:  # why: the splits of `inputs` are those of photos to add
        plan = {**old, **{name: plan[name] for name in ("settings", "classes", "source")}}
        plan["source"] = {**plan["source"], "splits": old["source"]["splits"]}
    if {**plan, "photos": old["photos"]} != old:
        _refuse_other_plan(sources.store, existing, plan, sources.settings)


def _work(stack: ExitStack, sources: _Sources, wanted: _Plan, check_lock: Callable[[], None], scratch: Path) -> Work:
    """Make the table of the photos of the missing shards, and write the plan."""
    settings, store, database = sources.settings, sources.store, sources.database
    if settings.engine != "jobs":
        store.remove(SET_PLAN)  # why: so that jobs of an earlier plan write nothing more
    delete_partial(store)
    layout, newest = layout_of(wanted.plans, first=wanted.first), len(wanted.plans) - 1
    is_new = "photos" not in wanted.plans[-1]  # the newest generation, whose photos are those of `inputs`
    if is_new or newest == 0:
        plan_photos(database, sources.inputs.splits, layout, generation=newest, seed=settings.seed)
    else:
        start_planned(database)
    plans, files = _write_photos(sources, wanted, layout, scratch)
    set_plan = SetPlan(
        plans=plans,
        src=settings.src,
        layout=layout,
        max_bad=settings.max_bad_frac,
        ignored=sources.inputs.ignored,
        listed=sources.inputs.listed,
        short_sides={},
        damaged=wanted.damaged,
        signature=sources.signature(),
        variables=variables_of(settings),
        warnings=tuple(input_warnings(settings, sources.inputs, is_extension=sources.comparison is not None)),
    )
    records = Records(store, set_plan.hash_of, scratch / "records")
    stack.callback(records.close)
    own_names = None
    if wanted.first:
        own_names = [record_name(shard_name(*shard), res) for shard in layout for res in settings.resolutions]
    records.load(names=own_names, damaged=wanted.damaged)
    resolutions = wanted.resolutions
    if resolutions is None:  # why: of a set that is finished, but for its manifest, all resolutions count
        finished = set.intersection(*(set(records.resolutions(*shard)) for shard in layout))
        resolutions = tuple(sorted({*settings.resolutions, *finished}))
    set_plan = replace(set_plan, short_sides={res: settings.short_side(res) for res in resolutions})
    missing = missing_shards(layout, resolutions, records)
    shard_plan = ShardPlan(database=database, plan=set_plan, where=store.where, stamps=sources.inputs.stamps)
    older = [shard for shard in missing if layout.generation(*shard) < newest + (not is_new)]
    for generation in set_plan.by_generation(older):
        check_codecs(plans[generation]["codecs"], f"{store.where}: {wanted.what}")
    if newest and older:
        plan_older(database, sources.inputs.sources, layout, older, records.rejects())
    shard_plan.check_there()
    if shard_plan.stamps:
        own = [shard for shard in layout if layout.generation(*shard) == newest]
        _check_same_archives(store, shard_plan, has_shards=any(records.resolutions(*shard) for shard in own))
    if store.size(MANIFEST) is None:  # why: that of a finished set describes it until it is replaced
        write_record(store, variables_of(settings))
    work = Work(
        plan=set_plan,
        shard_plan=shard_plan,
        photos=SetPhotos.open(database, files),
        records=records,
        missing=missing,
        check_lock=check_lock,
        kept=wanted.kept,
        scratch=scratch,
    )
    _check_rejects(store, set_plan, work.photos, work.kept_rejects() | shard_plan.not_there(missing))
    return work


def _check_same_archives(store: Store, shard_plan: ShardPlan, *, has_shards: bool) -> None:
    """Record what the archives of an unfinished set hold.

    `has_shards`: it has finished shards. Raises `ResoluteError` if these were made of other archives, whose photos have
    the same names and sizes.
    """
    state = {"plan": shard_plan.plan.hashes[-1], "contents": content_hash(shard_plan.stamps)}
    known = read_sealed(store, _ARCHIVES)
    if has_shards and known.get("plan") == state["plan"] and known != state:
        raise ResoluteError(
            f"{store.where}: an unfinished run of other archives, got photos in {shard_plan.plan.src} of the same "
            "names and sizes, but another content than finished shards were made of, expected the archives as they "
            "were; put them back, start over with REBUILD=1 (--rebuild), or choose another OUT"
        )
    if known != state:
        store.write(_ARCHIVES, manifest_bytes(state))


def _write_photos(
    sources: _Sources, wanted: _Plan, layout: ShardLayout, scratch: Path
) -> tuple[tuple[dict[str, Any], ...], list[Path]]:
    """Write the list of photos and the plan of each generation that lacks them; returns plans and local list files."""
    store, plans, files = sources.store, list(wanted.plans), []
    for generation, plan in enumerate(plans):
        path = None
        if "photos" in plan and photos_name(generation) not in wanted.damaged:
            path = local_photos(store, generation, plan, scratch)
        if path is None:
            if len(plans) > 1 and "photos" in plan:
                raise lost_photos(store, generation)
            path, plans[generation] = write_photos(sources.database, generation, plan, scratch)
            if plan.get("photos") not in (None, plans[generation]["photos"]):
                raise lost_photos(store, generation)
            plan = plans[generation]
            put_file(store, photos_name(generation), path)
        files.append(path)
        if generation >= layout.first and read_sealed(store, plan_name(generation)) != plan:
            store.write(plan_name(generation), manifest_bytes(plan))
    return tuple(plans), files


def finalize(
    store: Store,
    plan: SetPlan,
    records: Records,
    photos: SetPhotos,
    check_lock: Callable[[], None],
    *,
    kept: Mapping[str, Any] | None,
    scratch: Path,
) -> dict[str, Any]:
    """Derive everything else from the records of all shards, delete what does not belong, and return the manifest.

    `kept` and `scratch` are as for `finalize_set`. Raises `ResoluteError` if too many images were rejected, and as
    `check_all`.
    """
    _check_rejects(store, plan, photos, records.rejects())
    check_all(plan, records)
    check_lock()
    manifest = finalize_set(store, plan, records, photos, kept, scratch)
    delete_orphans(store, manifest["files"])
    if plan.variables is not None:  # of jobs that an older version planned
        write_record(store, plan.variables, plan.signature)
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
    photos: SetPhotos,
    rejects: Mapping[tuple[str, int], str],
    *,
    so_far: bool = False,
) -> None:
    """Raise `ResoluteError` if there are more `rejects` than allowed, or if they are all that a split holds.

    `rejects` maps (split, key) to a reason; on failure they are written to `_REJECTS`. `so_far`: the run is not
    finished and more may follow.
    """
    images = plan.layout.images
    counts = Counter(name for name, _ in rejects)
    empty = None  # why: an extension may have no sample in a split
    if not plan.layout.first:
        empty = next((name for name in images if counts[name] == images[name]), None)
    if len(rejects) <= plan.max_rejects and empty is None:
        return
    write_rejects(store, _REJECTS, rejects, photos)
    description = describe_reasons(rejects.values())
    if len(rejects) > plan.max_rejects:
        raise ResoluteError(
            f"{plan.src}: too many unusable images, got {len(rejects)} of {sum(images.values())}"
            f"{' so far' if so_far else ''} ({description}), expected at most {plan.max_rejects} "
            f"(MAX_BAD={plan.max_bad}); see {store.where}/{_REJECTS}, then mend them or raise MAX_BAD (--max-bad)"
        )
    assert empty is not None
    raise ResoluteError(
        f"{plan.src}: no image of {empty} is usable, got {counts[empty]} rejects "
        f"({description}), expected at least one sample; see {store.where}/{_REJECTS}, then mend them"
    )


def _convert(
    settings: Settings,
    store: Store,
    work: Work,
    missing: Mapping[tuple[str, int], tuple[int, ...]],
    progress: Callable[[RunStats], None],
) -> RunStats:
    """Convert the missing shards; their records are then in `work.records`."""
    if settings.engine == "ray" and missing:
        from resolute.prep.run.planned import names_of_records, write_plan
        from resolute.prep.run.ray import convert_on_ray

        write_plan(store, work.shard_plan, missing, work.scratch, work.check_lock)
        numbers = [number for number, shard in enumerate(work.plan.layout) if shard in missing]
        stats = convert_on_ray(
            settings.ray_address, settings.out, numbers, progress, max_megapixels=settings.max_megapixels
        )
        work.records.load(names=names_of_records(work.plan, missing))
        return stats
    from resolute.prep.run.local import convert_shards
    from resolute.prep.run.pool import open_pool

    stats = RunStats()
    for generation, shards in work.plan.by_generation(missing).items():
        specs = ShardSpecs(work.shard_plan, {shard: missing[shard] for shard in shards}, work.records)
        with open_pool(settings.worker_count) as pool:
            stats.merge(
                convert_shards(
                    pool,
                    work.shard_plan.options(generation),
                    specs,
                    store,
                    sizes=specs.sizes,
                    done=work.records.add,
                    progress=progress,
                )
            )
    return stats


def _ignore_progress(stats: RunStats) -> None:
    pass


def describe_reasons(reasons: Iterable[str]) -> str:
    """Count the rejects by kind, which is the part of a reason before its colon: `3 truncated, 1 not an image`."""
    kinds = Counter(reason.partition(":")[0] for reason in reasons)
    return ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items(), key=lambda item: (-item[1], item[0])))
