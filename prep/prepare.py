"""Builds a shard set from any source of photos: plan, missing shards, index and lists, manifest last.

Finished shards survive any interruption, unavailable storage included: the same command resumes and gives the same
bytes. A run ends as soon as more images are certain to be rejected than `max_bad` allows.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.dataset.shard_set import FORMAT, VERSION, label_digits, shard_name
from pipeline.errors import ResoluteError, StorageError
from pipeline.storage.scratch import ScratchFolder
from prep.convert.batch import EncodeOptions
from prep.convert.codecs import check_codecs, codec_versions
from prep.convert.reject import NOT_THERE
from prep.execute.stats import RunStats
from prep.plan.input_checks import input_warnings
from prep.plan.inputs import Inputs, check_no_overlap, list_inputs
from prep.plan.shuffle import shuffled
from prep.plan.splits import Split
from prep.shards.cleanup import delete_orphans, delete_partial
from prep.shards.existing_set import MANIFEST, ExistingSet, lost_files, open_existing
from prep.shards.journal import Journal, delete_journal, describe_differences
from prep.shards.manifest import SplitTotals, SplitView, count_split, finalize_set, write_rejects
from prep.shards.source_record import check_replaced_source, is_other_source, read_record, write_record
from prep.shards.writer import ShardRecord, ShardSpec
from prep.sources.image_ref import MISSING
from prep.storage.hashed_file import write_errors
from prep.storage.output import RUN_FOLDER, LocalStore, Store, open_store

from .config import Settings

__all__ = ["BuildResult", "ShardPlan", "build", "describe_reasons"]

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
        _open_existing(stack, store, settings)  # why: foreign files are refused before anything is written
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
        plan: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "settings": settings.plan_settings(),
            "classes": list(inputs.classes),
            "source": inputs.summary(),
        }
        existing = _open_existing(stack, store, settings)
        if existing is not None:
            _refuse_other_plan(store, existing, plan, settings)
        plan |= {"codecs": codec_versions()} if existing is None else existing.codecs
        if existing is not None:
            if not existing.damaged and set(settings.resolutions) <= set(existing.resolutions):
                _delete_run_files(store)
                if read_record(store) is None:
                    write_record(store, settings)
                return _result(started_at, settings, dict(existing.manifest), inputs, None, 0)
            if any(ShardPlan(settings, inputs, existing).missing()):
                check_codecs(plan.get("codecs"), f"{store.where}: a set that")
        if settings.rebuild:
            check_replaced_source(store, settings, plan["source"])
        delete_partial(store)
        if settings.rebuild:
            delete_journal(store)
        journal = Journal(store, plan, scratch / "journal")
        stack.callback(journal.close)
        write_record(store, settings)
        if existing is None and store.size(MANIFEST) is not None:
            store.remove(MANIFEST)  # why: it lists files that are about to be replaced
            store.sync("")
        shard_plan = ShardPlan(settings, inputs, existing, journal)
        shard_plan.drop_lost(store, include_existing=False)
        specs = list(shard_plan.missing())
        kept_shards = shard_plan.shards - len(specs)
        views = {name: shard_plan.view(name) for name in inputs.splits}
        check_rejects = partial(_check_rejects, settings, store, inputs, views)
        kept_rejects = shard_plan.rejects_outside({spec[:2] for spec in specs})
        check_rejects(kept_rejects | shard_plan.known_rejects([spec[:2] for spec in specs]))
        on_start(inputs, sum(images for *_, images in specs), kept_shards)

        def count_rejects(stats: RunStats) -> None:
            progress(stats)
            if len(kept_rejects) + stats.rejects > settings.max_bad * inputs.images:
                check_rejects(kept_rejects | {(name, key): reason for name, key, reason in stats.rejected}, so_far=True)

        stats = RunStats()
        for on_progress in (count_rejects, *[_ignore_progress] * _MORE_ROUNDS):
            missing = (shard_plan.spec(*spec[:3]) for spec in specs)
            stats.merge(_convert(settings, inputs, missing, store, journal, on_progress, plan))
            # why: the manifest must not list files that were deleted after an earlier run wrote them
            shard_plan.drop_lost(store, include_existing=True)
            specs = list(shard_plan.missing())
            if not specs:
                break
        else:
            name, number, *_ = specs[0]
            raise StorageError(
                f"{store.where}: files disappear after they are written, got shards without files such as "
                f"{shard_name(name, number)}, expected them to stay; find what deletes them, then run the same "
                "command again"
            )
        counts = {name: count_split(name, view) for name, view in views.items()}
        check_rejects({(name, key): reason for name, totals in counts.items() for key, reason in totals.rejects})
        sides = {res: settings.short_side(res) for res in shard_plan.resolutions}
        check_lock()
        manifest = finalize_set(store, plan, sides, views, counts)
        delete_orphans(store, manifest["files"])
        _delete_run_files(store)
        return _result(started_at, settings, manifest, inputs, stats, kept_shards)


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
    delete_journal(store)
    if isinstance(store, LocalStore):
        shutil.rmtree(_scan_cache(store, store.root), ignore_errors=True)


class ShardPlan:
    """Every shard of the set: which samples it holds, what is recorded of it, and which resolutions it lacks."""

    def __init__(
        self, settings: Settings, inputs: Inputs, existing: ExistingSet | None = None, journal: Journal | None = None
    ) -> None:
        self._settings, self._inputs, self._existing, self._journal = settings, inputs, existing, journal
        available = () if existing is None else existing.resolutions
        self.resolutions = tuple(sorted({*settings.resolutions, *available}))
        self._per_shard = settings.shard_samples
        self._lost: set[str] = set()

    @property
    def shards(self) -> int:
        return sum(self._shards_of(name) for name in self._inputs.splits)

    def _shards_of(self, name: str) -> int:
        return -(-len(self._inputs.splits[name].positions) // self._per_shard)

    def _keys(self, name: str, number: int) -> range:
        first = number * self._per_shard
        return range(first, min(first + self._per_shard, len(self._inputs.splits[name].positions)))

    def missing(self) -> Iterator[tuple[str, int, tuple[int, ...], int]]:
        """Yield (split, number, missing resolutions, images) of each incomplete shard."""
        for name in self._inputs.splits:
            for number in range(self._shards_of(name)):
                record = self._known_record(name, number)
                available = () if record is None else record.stored
                missing_res = tuple(res for res in self.resolutions if res not in available)
                if missing_res:
                    yield name, number, missing_res, len(self._keys(name, number))

    def spec(
        self, name: str, number: int, resolutions: tuple[int, ...], limit: int | None = None
    ) -> ShardSpec:
        """Everything needed to convert a shard, or its first `limit` samples, at `resolutions`."""
        split, keys = self._inputs.splits[name], self._keys(name, number)[:limit]
        ranks = shuffled(self._settings.seed, name, len(split.positions), np.arange(keys.start, keys.stop))
        positions = split.positions[ranks]
        return ShardSpec(
            split=name,
            number=number,
            first_key=keys.start,
            byte_ranges=tuple(split.catalog.byte_range(i) for i in positions.tolist()),
            labels=split.catalog.labels[positions],
            folds=None if split.folds is None else split.folds[ranks],
            resolutions=resolutions,
            short_sides=tuple(self._settings.short_side(res) for res in resolutions),
        )

    def rejects_outside(self, shards: Set[tuple[str, int]]) -> dict[tuple[str, int], str]:
        """{(split, key): reason} of all shards except `shards`, a set of (split, number)."""
        rejects: dict[tuple[str, int], str] = {}
        for name in self._inputs.splits:
            for number in range(self._shards_of(name)):
                record = None if (name, number) in shards else self._known_record(name, number)
                rejects |= {} if record is None else {(name, key): reason for key, reason in record.rejects}
        return rejects

    def known_rejects(self, shards: Iterable[tuple[str, int]]) -> dict[tuple[str, int], str]:
        """{(split, key): reason} of the images in `shards` that were already missing when the source was listed."""
        rejects: dict[tuple[str, int], str] = {}
        if not any((catalog.entries["packed"] == MISSING).any() for catalog in self._inputs.catalogs.values()):
            return rejects
        for name, number in shards:
            split, keys = self._inputs.splits[name], self._keys(name, number)
            ranks = shuffled(self._settings.seed, name, len(split.positions), np.arange(keys.start, keys.stop))
            packed = split.catalog.entries["packed"][split.positions[ranks]]
            rejects |= {(name, keys.start + i): NOT_THERE for i in np.flatnonzero(packed == MISSING).tolist()}
        return rejects

    def view(self, name: str) -> SplitView:
        return SplitView(
            shards=self._shards_of(name),
            record=lru_cache(2)(partial(self._complete_record, name)),
            names_of=partial(self._names_of, self._inputs.splits[name], name),
        )

    def _names_of(self, split: Split, name: str, keys: Sequence[int]) -> list[str]:
        ranks = shuffled(self._settings.seed, name, len(split.positions), np.asarray(keys, np.int64))
        return [split.catalog.name(i) for i in split.positions[ranks].tolist()]

    def _known_record(self, name: str, number: int) -> ShardRecord | None:
        """The record of a shard in the journal or the finished set; the journal takes precedence.

        Resolutions with a lost file are left out.
        """
        existing = None if self._existing is None else self._existing.get(name, number)
        journaled = None if self._journal is None else self._journal.get(name, number)
        record = existing if journaled is None else journaled.with_earlier(existing)
        return record.without(self._lost) if record is not None and self._lost else record

    def drop_lost(self, store: Store, *, include_existing: bool) -> None:
        """Count shards as missing from now on if their files are missing or have another size.

        `include_existing`: check the files of the finished set too, not only those in the journal.
        """
        self._lost = set()
        records = self._complete_records() if include_existing else iter(self._journal or ())
        self._lost = lost_files(store, {name: file.nbytes for record in records for name, file in record.files.items()})

    def _complete_records(self) -> Iterator[ShardRecord]:
        for name in self._inputs.splits:
            for number in range(self._shards_of(name)):
                yield self._complete_record(name, number)

    def _complete_record(self, name: str, number: int) -> ShardRecord:
        record = self._known_record(name, number)
        assert record is not None, (name, number)
        return record


def _open_existing(stack: ExitStack, store: Store, settings: Settings) -> ExistingSet | None:
    existing = open_existing(store, rebuild=settings.rebuild)
    return None if existing is None else stack.enter_context(existing)


def _refuse_other_plan(store: Store, existing: ExistingSet, plan: Mapping[str, Any], settings: Settings) -> None:
    """Raise `ResoluteError`, listing the differences, unless the finished set was made by this plan."""
    manifest = existing.manifest
    old_plan = {
        **{name: manifest[name] for name in ("format", "version", "classes")},
        "settings": {name: value for name, value in manifest["settings"].items() if name != "resolutions"},
        "source": {name: manifest["source"][name] for name in plan["source"]},
    }
    if old_plan != plan:
        record = read_record(store)
        description = describe_differences(old_plan, plan)
        if is_other_source(record, settings):
            assert record is not None
            raise ResoluteError(
                f"{store.where}: a finished set of other photos, made from {record['SRC']}, {description}; choose "
                "another OUT"
            )
        raise ResoluteError(
            f"{store.where}: a finished set of another kind, {description}; rebuild it with REBUILD=1 (--rebuild) or "
            "choose another OUT"
        )


def _check_rejects(
    settings: Settings,
    store: Store,
    inputs: Inputs,
    views: Mapping[str, SplitView],
    rejects: Mapping[tuple[str, int], str],
    *,
    so_far: bool = False,
) -> None:
    """Raise `ResoluteError` if there are more `rejects` than allowed, or if they are all that a split holds.

    `rejects` maps (split, key) to a reason; on failure they are written to rejects.jsonl. `so_far`: the run is not
    finished and more may follow.
    """
    by_split: dict[str, list[tuple[int, str]]] = {name: [] for name in views}
    for (name, key), reason in sorted(rejects.items()):
        by_split[name].append((key, reason))
    allowed = settings.max_bad * inputs.images
    empty = next((name for name, rows in by_split.items() if len(rows) == len(inputs.splits[name])), None)
    if len(rejects) <= allowed and empty is None:
        return
    write_rejects(store, views, {name: SplitTotals(rejects=rows) for name, rows in by_split.items()})
    description = describe_reasons(rejects.values())
    if len(rejects) > allowed:
        raise ResoluteError(
            f"{settings.src}: too many unusable images, got {len(rejects)} of {inputs.images}"
            f"{' so far' if so_far else ''} ({description}), expected at most {int(allowed)} "
            f"(--max-bad {settings.max_bad}); see {store.where}/rejects.jsonl"
        )
    assert empty is not None
    raise ResoluteError(
        f"{settings.src}: no image of {empty} is usable, got {len(by_split[empty])} rejects "
        f"({description}), expected at least one sample; see {store.where}/rejects.jsonl"
    )


def _convert(
    settings: Settings,
    inputs: Inputs,
    specs: Iterator[ShardSpec],
    store: Store,
    journal: Journal,
    progress: Callable[[RunStats], None],
    plan: Mapping[str, Any],
) -> RunStats:
    options = EncodeOptions(
        quality=settings.quality, label_digits=label_digits(len(inputs.classes)), codecs=plan.get("codecs")
    )
    first = next(specs, None)
    if first is None:
        return RunStats()

    def all_specs() -> Iterator[ShardSpec]:
        yield first
        yield from specs

    if settings.engine == "ray":
        from prep.execute.ray import convert_on_ray

        return convert_on_ray(settings.ray_address, options, all_specs(), store, done=journal.add, progress=progress)
    from prep.execute.local import convert_shards
    from prep.execute.process_pool import open_pool

    with open_pool(settings.worker_count) as pool:
        return convert_shards(pool, options, all_specs(), store, done=journal.add, progress=progress)


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
