"""Decides what is to be made of a set: lists the sources, compares them with what is in OUT, and writes the plan.

A new set, a run that was interrupted, a resolution that is added, a repair and an extension differ only in which
generations are to be made and at which resolutions. The shards of these without a valid record are then converted.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from resolute.errors import ResoluteError, StorageError
from resolute.pipeline.dataset.format import shard_name
from resolute.pipeline.dataset.manifest import MANIFEST, manifest_bytes
from resolute.prep.convert.codecs import check_codecs, codec_versions
from resolute.prep.listing.checks import input_warnings
from resolute.prep.listing.compare import Comparison
from resolute.prep.listing.database import Database
from resolute.prep.listing.inputs import Inputs, check_no_overlap, list_sources, split_inputs
from resolute.prep.run.work import Work
from resolute.prep.shard_set.cards import CARD, write_card
from resolute.prep.shard_set.cleanup import delete_orphans, delete_partial, start_over
from resolute.prep.shard_set.existing_set import (
    ExistingSet,
    describe_differences,
    open_existing,
    read_sealed,
    read_spec,
)
from resolute.prep.shard_set.generation import GenerationSpec, spec_name
from resolute.prep.shard_set.manifest import write_info_files
from resolute.prep.shard_set.planned_photos import (
    PLANNED,
    PlannedPhotos,
    missing_shards,
    plan_no_photos,
    plan_older,
    plan_photos,
)
from resolute.prep.shard_set.record import Records, record_name
from resolute.prep.shard_set.set_photos import SetPhotos, local_photos, lost_photos, photos_name, put_file, write_photos
from resolute.prep.shard_set.set_source import (
    check_replaced_source,
    is_other_source,
    read_source_json,
    variables_of,
    with_remembered,
    write_source_json,
)
from resolute.prep.shard_set.work_list import PLAN_FOLDER, WORK_LIST, Shard, WorkList
from resolute.prep.sources.archives.containers import content_hash
from resolute.prep.sources.scan_cache import delete_old_versions
from resolute.prep.storage.output import RUN_FOLDER, Store

from .extend import (
    check_extendable,
    compare_with_set,
    describe_changes,
    extension_inputs,
    extension_spec,
    write_changes,
)
from .finish import BuildResult, check_rejects, delete_run_files, scan_cache_folder, scratch_folder
from .grey_range import check_sample
from .settings import Settings
from .unchanged import source_signature

__all__ = ["Plan", "first_spec", "plan"]

_ARCHIVES = f"{RUN_FOLDER}/archives.json"  # while a set is unfinished: its plan, and the hash of its archives' contents


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be made: `work`, of which the shards in `missing` {shard: resolutions} are not finished.

    `names` are the photos of all generations, `rejects` {(split, key): reason} those that are known to be rejected.
    `check_lock` raises `StorageError` if OUT is no longer the locked one; `scratch` is an empty folder of this run.
    """

    work: Work
    missing: Mapping[Shard, tuple[int, ...]]
    names: SetPhotos
    rejects: Mapping[tuple[str, int], str]
    check_lock: Callable[[], None]
    scratch: Path


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


# The generations of the set, the number of those that stay as they are, and the resolutions (px) of the others: None
# for those asked for, and those that all shards have. Or, if nothing is to be made, notes.
_Wanted = tuple[tuple[GenerationSpec, ...], int, set[int] | None] | list[str]


def plan(
    stack: ExitStack, settings: Settings, store: Store, describe: Callable[[str], None] = lambda line: None
) -> Plan | BuildResult:
    """List the sources, and compare them with what is in OUT; the result of a finished set, or what is to be made.

    Writes the specification and the list of photos of a new generation, and source.json. `describe(line)` is called for
    what the targets of a table were recognised as. `stack` takes over the exclusive lock of OUT and temporary files.
    Raises `ResoluteError` for bad input, for a set of other settings or photos, and if too many images are already
    rejected.
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
        if existing.manifest is not None and existing.lost(store):  # an extension was killed just before it wrote them
            write_info_files(store, existing.manifest)
    database = Database(scratch)
    stack.callback(database.close)
    sources = _list(settings, store, database, None if settings.rebuild else existing, scratch)
    for line in sources.inputs.about:
        describe(line)
    if existing is None or settings.rebuild:
        wanted = _new(sources, existing)
        existing = None
    elif settings.extend:
        wanted = _extend(sources, existing)
    elif existing.manifest is None:
        wanted = _resume(sources, existing)
    elif not set(settings.resolutions) <= set(existing.resolutions):
        wanted = _add_resolutions(sources, existing)
    else:
        wanted = _repair(sources, existing)
    if isinstance(wanted, list):
        assert existing is not None
        assert existing.manifest is not None
        return BuildResult(
            manifest=existing.manifest,
            ignored=sources.inputs.ignored,
            stats=None,
            kept_shards=0,
            elapsed_s=time.perf_counter() - started_at,
            notes=wanted,
        )
    return _plan(stack, sources, existing, *wanted, check_lock, scratch)


def _new(sources: _Sources, existing: ExistingSet | None) -> _Wanted:
    """A new set, in place of the `existing` one if that is to be rebuilt."""
    spec = first_spec(sources.settings, sources.inputs, codec_versions())
    check_sample(sources.settings, sources.inputs)
    if existing is not None:
        check_replaced_source(sources.store, sources.settings, existing, spec.source)
        start_over(sources.store)
    return (spec,), 0, set(sources.settings.resolutions)


def _resume(sources: _Sources, existing: ExistingSet) -> _Wanted:
    """A set whose run was interrupted: its finished shards are kept."""
    _check_same(sources, existing)
    return existing.generations, 0, None


def _add_resolutions(sources: _Sources, existing: ExistingSet) -> _Wanted:
    """A finished set that lacks resolutions: all shards are converted at these."""
    _check_same(sources, existing)
    return existing.generations, 0, {*sources.settings.resolutions, *existing.resolutions}


def _repair(sources: _Sources, existing: ExistingSet) -> _Wanted:
    """A finished set, of which files may be gone or damaged: these are made again."""
    _check_same(sources, existing)
    store, manifest = sources.store, existing.manifest
    assert manifest is not None
    if existing.is_complete(store, sources.settings.resolutions):
        delete_partial(store)  # such as that of a report whose writer was killed
        delete_run_files(store)
        write_source_json(store, variables_of(sources.settings), sources.signature())
        if store.size(CARD) is None:
            write_card(store, manifest)
        return []
    return existing.generations, 0, set(existing.resolutions)


def _extend(sources: _Sources, existing: ExistingSet) -> _Wanted:
    """A finished set to which the photos are added that are new in the source: a generation of shards of their own."""
    settings, store, comparison = sources.settings, sources.store, sources.comparison
    assert comparison is not None
    assert existing.manifest is not None
    spec = extension_spec(settings, store, existing, sources.inputs, comparison)
    write_changes(store, comparison)
    has_resolutions = set(settings.resolutions) <= set(existing.resolutions)
    both = {*settings.resolutions, *existing.resolutions}
    if comparison.added:
        first = spec.number if has_resolutions else 0  # why: a new resolution is one of all generations
        return (*existing.generations, spec), first, both
    if not has_resolutions:
        return existing.generations, 0, both
    delete_orphans(store, existing.manifest["files"])  # what an unfinished extension has left
    delete_run_files(store)
    return ["no new photos in the source", *describe_changes(store.where, comparison.removed, comparison.changed)]


def _list(settings: Settings, store: Store, database: Database, old: ExistingSet | None, scratch: Path) -> _Sources:
    """List the sources, and divide into splits what is to be made of them."""
    scan_cache, comparison = scan_cache_folder(store, scratch), None
    try:
        sources, ignored = list_sources(
            settings, database, scan_cache, known_classes=() if old is None else old.newest.classes
        )
        if old is not None and (settings.extend or len(old.generations) > 1):
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


def first_spec(settings: Settings, inputs: Inputs, codecs: Mapping[str, str]) -> GenerationSpec:
    """The specification of generation 0 of a set of these inputs."""
    images = {split: len(photos) for split, photos in inputs.splits.items()}
    return GenerationSpec(
        settings=settings.plan_settings(),
        classes=list(inputs.classes),
        target=inputs.target.to_json(),
        codecs=codecs,
        source=inputs.summary(),
        images=images,
        first_key=dict.fromkeys(images, 0),
        first_shard=dict.fromkeys(images, 0),
    )


def _check_same(sources: _Sources, existing: ExistingSet) -> None:
    """Raise `ResoluteError`, listing the differences, unless the settings and the photos are those of the set."""
    old = existing.newest
    now = first_spec(sources.settings, sources.inputs, old.codecs)
    if old.number:  # why: the splits of `inputs` are those of photos to add
        source = {**now.source, "splits": old.source["splits"]}
        now = replace(old, settings=now.settings, classes=now.classes, source=source)
    now = replace(now, photos=old.photos)
    if now.hash != old.hash:
        _refuse_other(sources.store, existing, now, sources.settings)


def _plan(
    stack: ExitStack,
    sources: _Sources,
    existing: ExistingSet | None,
    generations: tuple[GenerationSpec, ...],
    first: int,
    resolutions: set[int] | None,
    check_lock: Callable[[], None],
    scratch: Path,
) -> Plan:
    """The plan to make the `generations` from number `first` on, whose missing shards get a table of their photos.

    Records do not count if `verify` had listed them or their files. Writes the specifications and lists of photos.
    """
    settings, store, database = sources.settings, sources.store, sources.database
    damaged = frozenset() if existing is None else existing.damaged
    if settings.engine != "jobs":
        store.remove(WORK_LIST)  # why: so that jobs of an earlier plan write nothing more
    delete_partial(store)
    newest = generations[-1]
    is_new = not newest.photos  # the newest generation, whose photos are those of `inputs`
    if is_new or not newest.number:
        plan_photos(database, sources.inputs.splits, newest, seed=settings.seed)
    else:
        assert sources.comparison is not None  # of a set of several generations
        plan_no_photos(database, sources.comparison.set_rows)
    generations, files = _write_photos(sources, generations, first, damaged, scratch)
    todo = WorkList(
        generations=generations[first:],
        src=settings.src,
        max_bad=settings.max_bad_frac,
        ignored=sources.inputs.ignored,
        listed=sources.inputs.listed,
        short_sides={},
        damaged=damaged,
        signature=sources.signature(),
        variables=variables_of(settings),
        warnings=tuple(input_warnings(settings, sources.inputs, is_extension=sources.comparison is not None)),
    )
    records = Records(store, todo.hash_of, scratch / "records")
    stack.callback(records.close)
    own_names = None
    if first:
        own_names = [record_name(shard_name(*shard), res) for shard in todo for res in settings.resolutions]
    records.load(names=own_names, damaged=damaged)
    if resolutions is None:  # why: of a set that is finished, but for its manifest, all resolutions count
        finished = set.intersection(*(set(records.resolutions(*shard)) for shard in todo))
        resolutions = {*settings.resolutions, *finished}
    todo = replace(todo, short_sides={res: settings.short_side(res) for res in sorted(resolutions)})
    photos = PlannedPhotos(database=database, work=todo, where=store.where, stamps=sources.inputs.stamps)
    missing = missing_shards(todo, todo.short_sides, records)
    known = todo.generations[:-1] if is_new else todo.generations  # whose shards may have been made before
    older = [shard for spec in known for shard in spec if shard in missing]
    what = "a set" if existing is None or existing.manifest is not None else "an unfinished run"
    for spec in known:
        if not missing.keys().isdisjoint(spec):
            check_codecs(spec.codecs, f"{store.where}: {what}")
    if newest.number and older:
        assert sources.comparison is not None
        plan_older(sources.inputs.sources, sources.comparison, todo, older, records.rejects())
    photos.check_there()
    if photos.stamps:
        has_shards = any(records.resolutions(*shard) for shard in todo.generations[-1])
        _check_same_archives(store, photos, has_shards=has_shards)
    if store.size(MANIFEST) is None:  # why: that of a finished set describes it until it is replaced
        write_source_json(store, variables_of(settings))
    rejects = {at: why for at, why in records.rejects().items() if (at[0], todo.shard_of(*at)) not in missing}
    names = SetPhotos.open(database, files)
    check_rejects(store, todo, names, rejects | photos.not_there(missing))
    work = Work(store=store, todo=todo, photos=photos, records=records)
    return Plan(work=work, missing=missing, names=names, rejects=rejects, check_lock=check_lock, scratch=scratch)


def _check_same_archives(store: Store, photos: PlannedPhotos, *, has_shards: bool) -> None:
    """Record what the archives of an unfinished set hold.

    `has_shards`: it has finished shards. Raises `ResoluteError` if these were made of other archives, whose photos have
    the same names and sizes.
    """
    state = {"plan": photos.work.generations[-1].hash, "contents": content_hash(photos.stamps)}
    known = read_sealed(store, _ARCHIVES)
    if has_shards and known.get("plan") == state["plan"] and known != state:
        raise ResoluteError(
            f"{store.where}: an unfinished run of other archives, got photos in {photos.work.src} of the same "
            "names and sizes, but another content than finished shards were made of, expected the archives as they "
            "were; put them back, start over with REBUILD=1 (--rebuild), or choose another OUT"
        )
    if known != state:
        store.write(_ARCHIVES, manifest_bytes(state))


def _write_photos(
    sources: _Sources, generations: tuple[GenerationSpec, ...], first: int, damaged: frozenset[str], scratch: Path
) -> tuple[tuple[GenerationSpec, ...], list[Path]]:
    """Write the list of photos and the specification of each generation, from number `first` on, that lacks them.

    Returns the generations, complete, and local files with the photos of each.
    """
    store, complete, files = sources.store, [], []
    for spec in generations:
        name, path = photos_name(spec.number), None
        if spec.photos and name not in damaged:
            path = local_photos(store, spec, scratch)
        if path is None:
            if len(generations) > 1 and spec.photos:
                raise lost_photos(store, spec.number)
            path, written = write_photos(sources.database, PLANNED, spec, scratch)
            if spec.photos not in ({}, written.photos):
                raise lost_photos(store, spec.number)
            spec = written
            put_file(store, name, path)
        complete.append(spec)
        files.append(path)
        if spec.number >= first and read_spec(store, spec.number) != spec:
            store.write(spec_name(spec.number), manifest_bytes(spec.to_json()))
    return tuple(complete), files


def _refuse_other(store: Store, existing: ExistingSet, now: GenerationSpec, settings: Settings) -> None:
    """Raise `ResoluteError`, listing the differences between the set at OUT and what is wanted `now`."""
    differences = describe_differences(existing.newest.to_json(), now.to_json())
    record = read_source_json(store)
    if existing.manifest is not None and existing.newest.settings == now.settings:
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
