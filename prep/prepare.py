"""Builds a shard set from any source of photos: plan, missing shards, index and lists, manifest last.

An interruption of any kind, unavailable storage included, keeps the finished shards; the same command then continues
and gives the same bytes. More rejects than `max_bad` allows end the run as soon as they are certain.
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
from prep.convert.batch import Job
from prep.convert.codecs import check_codecs, codec_versions
from prep.convert.reject import NOT_THERE
from prep.execute.stats import Tally
from prep.plan.input_checks import input_warnings
from prep.plan.inputs import Inputs, check_places, find_inputs
from prep.plan.shuffle import shuffled
from prep.plan.splits import Split
from prep.shards.cleanup import remove_parts, remove_stale
from prep.shards.existing_set import MANIFEST, Base, find_base, lost_files
from prep.shards.journal import Journal, forget, told_differences
from prep.shards.manifest import Finished, SplitView, count, finish, write_rejects
from prep.shards.source_record import check_replaced_source, is_other_source, read_record, write_record
from prep.shards.writer import ShardSpec, Written
from prep.sources.image_ref import MISSING
from prep.storage.hashed_file import writing
from prep.storage.output import WORK, Folder, Store, open_store

from .config import Settings

__all__ = ["Built", "Work", "build", "told_by_kind"]

_MORE_ROUNDS = 2  # for shards whose files were there, and are not when the manifest is about to promise them


@dataclass(frozen=True, kw_only=True)
class Built:
    """What `build` did. `tally` covers the images done now, `kept` counts the shards that were there already.
    `tally` is None where the whole set was. `elapsed_s`: wall time."""

    manifest: dict[str, Any]
    ignored: Counter[str]
    tally: Tally | None
    kept: int
    elapsed_s: float
    warnings: Sequence[str] = ()  # about the inputs


def build(
    settings: Settings,
    *,
    found: Callable[[Inputs, int, int], None] = lambda inputs, images, kept: None,
    progress: Callable[[Tally], None] = lambda tally: None,
) -> Built:
    """Write the shard set that `settings` describe, go on with an unfinished one, or find it finished.

    The same settings and photos give the same bytes, whatever `workers` and `engine` are and however often a
    run was killed. A finished set gets the resolutions it lacks, and its damaged shards again. `found` is told
    the inputs, the images there are to do and the shards that are kept, before work starts. Raises
    `ResoluteError` for bad input, a full disk, or more than `max_bad` of unusable images.
    """
    began = time.perf_counter()
    if settings.engine == "ray":
        settings = settings.with_absolute_paths()
    store = open_store(settings.out)
    check_places(settings)
    with ExitStack() as stack:
        _open_base(stack, store, settings)  # why: what is not ours is refused before anything is written there
        stack.enter_context(store.alone())
        scratch = _scratch(stack, store)
        spool = _spool(store, scratch)
        try:
            inputs = find_inputs(settings, scratch, spool)
        except StorageError:
            raise  # why: the next run continues with what is unpacked already
        except ResoluteError:
            shutil.rmtree(spool, ignore_errors=True)
            raise
        plan: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "settings": settings.in_plan(),
            "classes": list(inputs.classes),
            "source": inputs.told(),
        }
        base = _open_base(stack, store, settings)
        if base is not None:
            _refuse_another(store, base, plan, settings)
        plan |= {"codecs": codec_versions()} if base is None else base.codecs
        if base is not None:
            if not base.damaged and set(settings.resolutions) <= set(base.resolutions):
                _forget(store)
                if read_record(store) is None:
                    write_record(store, settings)
                return _built(began, settings, dict(base.manifest), inputs, None, 0)
            if any(Work(settings, inputs, base).missing()):
                check_codecs(plan.get("codecs"), f"{store.where}: a set that")
        if settings.rebuild:
            check_replaced_source(store, settings, plan["source"])
        remove_parts(store)
        if settings.rebuild:
            forget(store)
        journal = Journal(store, plan, scratch / "journal")
        stack.callback(journal.close)
        write_record(store, settings)
        if base is None and store.size(MANIFEST) is not None:
            store.remove(MANIFEST)  # why: it would promise what is about to be replaced
            store.sync("")
        work = Work(settings, inputs, base, journal)
        work.drop_lost(store, of_base=False)
        specs = list(work.missing())
        kept = work.shards - len(specs)
        views = {name: work.view(name) for name in inputs.splits}
        check = partial(_check_rejects, settings, store, inputs, views)
        kept_rejects = work.rejects_without({spec[:2] for spec in specs})
        check(kept_rejects | work.known_rejects([spec[:2] for spec in specs]))
        found(inputs, sum(images for *_, images in specs), kept)

        def count_rejects(tally: Tally) -> None:
            progress(tally)
            if len(kept_rejects) + tally.rejects > settings.max_bad * inputs.images:
                check(kept_rejects | {(name, key): reason for name, key, reason in tally.rejected}, so_far=True)

        tally = Tally()
        for follow in (count_rejects, *[_ignore_progress] * _MORE_ROUNDS):
            tally.merge(_convert(settings, inputs, (work.spec(*s[:3]) for s in specs), store, journal, follow, plan))
            # why: files may have been deleted since the run that wrote them; the manifest must not promise them
            work.drop_lost(store, of_base=True)
            specs = list(work.missing())
            if not specs:
                break
        else:
            name, number, *_ = specs[0]
            raise StorageError(
                f"{store.where}: files vanish as soon as they are written, got shards without files such as "
                f"{shard_name(name, number)}, expected them to stay; look for whatever deletes them, then run the same "
                "command again"
            )
        counts = {name: count(name, view) for name, view in views.items()}
        check({(name, key): reason for name, part in counts.items() for key, reason in part.rejects})
        sides = {res: settings.short_side(res) for res in work.resolutions}
        manifest = finish(store, plan, sides, views, counts)
        remove_stale(store, manifest["files"])
        _forget(store)
        return _built(began, settings, manifest, inputs, tally, kept)


def _scratch(stack: ExitStack, store: Store) -> Path:
    """A folder for this run's lists: beside the shards if they are local, so that a kill leaves nothing elsewhere."""
    place = store.root / WORK / "lists" if isinstance(store, Folder) else None
    if place is not None:
        with writing(place):
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(mode=0o700)  # why: URLs in it have their credentials
            stack.callback(shutil.rmtree, place, ignore_errors=True)
        return place
    return stack.enter_context(ScratchFolder())


def _spool(store: Store, scratch: Path) -> Path:
    """Where sources without random access are unpacked: beside the shards, so that it survives a kill."""
    return store.root / WORK / "spool" if isinstance(store, Folder) else scratch / "spool"


def _forget(store: Store) -> None:
    forget(store)
    if isinstance(store, Folder):
        shutil.rmtree(_spool(store, store.root), ignore_errors=True)


class Work:
    """Which shards are there, which are missing something, and what each holds."""

    def __init__(
        self, settings: Settings, inputs: Inputs, base: Base | None = None, journal: Journal | None = None
    ) -> None:
        self._settings, self._inputs, self._base, self._journal = settings, inputs, base, journal
        has = () if base is None else base.resolutions
        self.resolutions = tuple(sorted({*settings.resolutions, *has}))
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
        """(split, number, resolutions to do, images) of each shard that lacks something."""
        for name in self._inputs.splits:
            for number in range(self._shards_of(name)):
                written = self._there(name, number)
                has = () if written is None else written.stored
                todo = tuple(res for res in self.resolutions if res not in has)
                if todo:
                    yield name, number, todo, len(self._keys(name, number))

    def spec(
        self, name: str, number: int, resolutions: tuple[int, ...], limit: int | None = None
    ) -> ShardSpec:
        """A shard to be done, or its first `limit` samples."""
        split, keys = self._inputs.splits[name], self._keys(name, number)[:limit]
        ranks = shuffled(self._settings.seed, name, len(split.positions), np.arange(keys.start, keys.stop))
        positions = split.positions[ranks]
        return ShardSpec(
            split=name,
            number=number,
            first_key=keys.start,
            places=tuple(split.catalog.location(i) for i in positions.tolist()),
            labels=split.catalog.labels[positions],
            folds=None if split.folds is None else split.folds[ranks],
            resolutions=resolutions,
            short_sides=tuple(self._settings.short_side(res) for res in resolutions),
        )

    def rejects_without(self, todo: Set[tuple[str, int]]) -> dict[tuple[str, int], str]:
        """{(split, key): reason} of all shards but those in `todo`, (split, number)."""
        rejects: dict[tuple[str, int], str] = {}
        for name in self._inputs.splits:
            for number in range(self._shards_of(name)):
                written = None if (name, number) in todo else self._there(name, number)
                rejects |= {} if written is None else {(name, key): reason for key, reason in written.rejects}
        return rejects

    def known_rejects(self, todo: Iterable[tuple[str, int]]) -> dict[tuple[str, int], str]:
        """{(split, key): reason} of the images in `todo` that were not there when the source was listed."""
        rejects: dict[tuple[str, int], str] = {}
        if not any((catalog.entries["packed"] == MISSING).any() for catalog in self._inputs.catalogs.values()):
            return rejects
        for name, number in todo:
            split, keys = self._inputs.splits[name], self._keys(name, number)
            ranks = shuffled(self._settings.seed, name, len(split.positions), np.arange(keys.start, keys.stop))
            packed = split.catalog.entries["packed"][split.positions[ranks]]
            rejects |= {(name, keys.start + i): NOT_THERE for i in np.flatnonzero(packed == MISSING).tolist()}
        return rejects

    def view(self, name: str) -> SplitView:
        return SplitView(
            shards=self._shards_of(name),
            written=lru_cache(2)(partial(self._written, name)),
            names_of=partial(self._names_of, self._inputs.splits[name], name),
        )

    def _names_of(self, split: Split, name: str, keys: Sequence[int]) -> list[str]:
        ranks = shuffled(self._settings.seed, name, len(split.positions), np.asarray(keys, np.int64))
        return [split.catalog.name(i) for i in split.positions[ranks].tolist()]

    def _there(self, name: str, number: int) -> Written | None:
        """What the journal and the finished set hold of a shard; the journal counts where both do.

        Resolutions with a lost file are left out.
        """
        base = None if self._base is None else self._base.get(name, number)
        done = None if self._journal is None else self._journal.get(name, number)
        there = base if done is None else done.with_earlier(base)
        return there.without(self._lost) if there is not None and self._lost else there

    def drop_lost(self, store: Store, *, of_base: bool) -> None:
        """Count shards as missing, from now on, whose files are not there or have another size.

        `of_base`: look also at the files of the finished set, and not just at those that the journal knows.
        """
        self._lost = set()
        records = self._written_all() if of_base else iter(self._journal or ())
        self._lost = lost_files(store, {name: file.nbytes for one in records for name, file in one.files.items()})

    def _written_all(self) -> Iterator[Written]:
        for name in self._inputs.splits:
            for number in range(self._shards_of(name)):
                yield self._written(name, number)

    def _written(self, name: str, number: int) -> Written:
        written = self._there(name, number)
        assert written is not None, (name, number)
        return written


def _open_base(stack: ExitStack, store: Store, settings: Settings) -> Base | None:
    base = find_base(store, rebuild=settings.rebuild)
    return None if base is None else stack.enter_context(base)


def _refuse_another(store: Store, base: Base, plan: Mapping[str, Any], settings: Settings) -> None:
    """Raises `ResoluteError`, telling what differs, unless the finished set has this plan."""
    manifest = base.manifest
    was = {
        **{name: manifest[name] for name in ("format", "version", "classes")},
        "settings": {name: value for name, value in manifest["settings"].items() if name != "resolutions"},
        "source": {name: manifest["source"][name] for name in plan["source"]},
    }
    if was != plan:
        record = read_record(store)
        told = told_differences(was, plan)
        if is_other_source(record, settings):
            assert record is not None
            raise ResoluteError(
                f"{store.where}: a finished set of other photos, made from {record['SRC']}, {told}; choose another OUT"
            )
        raise ResoluteError(
            f"{store.where}: a finished set of another kind, {told}; rebuild it with REBUILD=1 (--rebuild) or choose "
            "another OUT"
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
    """Raises `ResoluteError` if there are more `rejects` than allowed, or a split holds nothing else.

    `rejects`: (split, key) -> reason. rejects.jsonl lists them then. `so_far`: there may be more of them.
    """
    by_split: dict[str, list[tuple[int, str]]] = {name: [] for name in views}
    for (name, key), reason in sorted(rejects.items()):
        by_split[name].append((key, reason))
    allowed = settings.max_bad * inputs.images
    empty = next((name for name, rows in by_split.items() if len(rows) == len(inputs.splits[name])), None)
    if len(rejects) <= allowed and empty is None:
        return
    write_rejects(store, views, {name: Finished(rejects=rows) for name, rows in by_split.items()})
    told = told_by_kind(rejects.values())
    if len(rejects) > allowed:
        raise ResoluteError(
            f"{settings.src}: too many unusable images, got {len(rejects)} of {inputs.images}"
            f"{' so far' if so_far else ''} ({told}), expected at most {int(allowed)} (--max-bad {settings.max_bad}); "
            f"see {store.where}/rejects.jsonl"
        )
    assert empty is not None
    raise ResoluteError(
        f"{settings.src}: no image of {empty} is usable, got {len(by_split[empty])} rejects "
        f"({told}), expected at least one sample; see {store.where}/rejects.jsonl"
    )


def _convert(
    settings: Settings,
    inputs: Inputs,
    specs: Iterator[ShardSpec],
    store: Store,
    journal: Journal,
    progress: Callable[[Tally], None],
    plan: Mapping[str, Any],
) -> Tally:
    job = Job(
        quality=settings.quality, label_digits=label_digits(len(inputs.classes)), codecs=plan.get("codecs")
    )
    first = next(specs, None)
    if first is None:
        return Tally()

    def every() -> Iterator[ShardSpec]:
        yield first
        yield from specs

    if settings.engine == "ray":
        from prep.execute.ray import convert_on_ray

        return convert_on_ray(settings.ray_address, job, every(), store, done=journal.add, progress=progress)
    from prep.execute.local import convert_shards
    from prep.execute.process_pool import open_pool

    with open_pool(settings.worker_count) as pool:
        return convert_shards(pool, job, every(), store, done=journal.add, progress=progress)


def _ignore_progress(tally: Tally) -> None:
    pass


def _built(
    began: float, settings: Settings, manifest: dict[str, Any], inputs: Inputs, tally: Tally | None, kept: int
) -> Built:
    return Built(
        manifest=manifest, ignored=inputs.ignored, tally=tally, kept=kept, elapsed_s=time.perf_counter() - began,
        warnings=() if tally is None else input_warnings(settings, inputs),
    )


def told_by_kind(reasons: Iterable[str]) -> str:
    """How often each kind of reject reason, the part before a colon, comes: `3 truncated, 1 not an image`."""
    kinds = Counter(reason.partition(":")[0] for reason in reasons)
    return ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items(), key=lambda item: (-item[1], item[0])))
