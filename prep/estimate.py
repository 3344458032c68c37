"""The dry run: counts all inputs, converts a random sample and estimates bytes and time. Writes nothing to OUT."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

from numpy.typing import NDArray

from resolute.console import counted
from resolute.prep.convert.batch import BatchResult, EncodeOptions
from resolute.prep.convert.codecs import codec_versions
from resolute.prep.listing.checks import input_warnings, size_warnings
from resolute.prep.listing.database import Database
from resolute.prep.listing.inputs import Inputs, check_no_overlap, list_sources, split_inputs
from resolute.prep.listing.wording import describe_ignored, describe_target
from resolute.prep.run.pool import open_pool
from resolute.prep.run.stats import RunStats
from resolute.prep.shard_set.existing_set import open_existing
from resolute.prep.shard_set.planned_photos import PlannedPhotos, plan_photos
from resolute.prep.shard_set.set_source import variables_of, with_remembered
from resolute.prep.shard_set.work_list import WorkList
from resolute.prep.shard_set.writer import ShardSpec
from resolute.prep.storage.output import open_output
from resolute.scratch import ScratchFolder

from .extend import check_extendable, compare_with_set, describe_changes, extension_inputs, extension_spec
from .grey_range import check_sample
from .plan import first_spec
from .settings import Settings

__all__ = ["dry_run"]

_SAMPLE_IMAGES = 512
_NAMED = 8  # classes listed by name


def dry_run(settings: Settings) -> str:
    """Report counts, classes and estimated bytes and time, without a final newline. Raises `ResoluteError` as prep
    would."""
    check_no_overlap(settings)
    settings = with_remembered(settings, open_output(settings.out))
    with ExitStack() as stack:
        folder = stack.enter_context(ScratchFolder())
        database = Database(folder)
        stack.callback(database.close)
        inputs, lines = _inputs(settings, database, folder)
        if not settings.extend:
            check_sample(settings, inputs)
        split = next((name for name, images in inputs.splits.items() if len(images)), None)
        if split is None:
            return "\n".join([*lines, "  nothing was written"])
        sides = {res: settings.short_side(res) for res in settings.resolutions}
        spec, options = _sample(settings, inputs, split, sides)
        stats, sizes = RunStats(), [0] * len(settings.resolutions)
        sources: list[NDArray[Any]] = []
        with open_pool(settings.worker_count) as pool:
            start_s = None
            for _, result in pool.run(options, spec.batches()):
                assert isinstance(result, BatchResult)
                if start_s is None:  # why: the first result includes the start-up of the processes
                    start_s, first_images = perf_counter(), len(result.samples) + len(result.rejects)
                stats.add(split, result)
                sizes = [size + len(tar) for size, tar in zip(sizes, result.tars, strict=True)]
                sources.append(result.sources)
        warnings = input_warnings(settings, inputs, is_extension=settings.extend) + size_warnings(sides, sources)
        assert start_s is not None
        timed_images = stats.images - first_images
        rate = timed_images / (perf_counter() - start_s) if timed_images else None
    images = sum(map(len, inputs.splits.values()))
    per_image = images / stats.images
    lines.append(f"  estimated from {counted(stats.images, 'random image')}, rejected {stats.rejects}:")
    for (res, side), size in zip(sides.items(), sizes, strict=True):
        lines.append(
            f"  {res:>4} px: short side {side} px, about {size * per_image / 1e6:.0f} MB, "
            f"{size / stats.images / 1e3:.1f} kB per sample"
        )
    lines.append(f"  in total about {sum(sizes) * per_image / 1e9:.3g} GB in {settings.out}")
    if rate is not None:
        workers = counted(settings.worker_count, "worker")
        lines.append(f"  time: about {_duration(images / rate)} at {rate:.0f} images/s with {workers}")
    lines += [f"  WARNING: {warning}" for warning in warnings]
    return "\n".join([*lines, "  nothing was written"])


def _duration(seconds: float) -> str:
    minutes = seconds / 60
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def _inputs(settings: Settings, database: Database, folder: Path) -> tuple[Inputs, list[str]]:
    """The images to convert, and lines about them."""
    if not settings.extend:
        inputs = split_inputs(settings, *list_sources(settings, database, folder / "scan_cache"))
        return inputs, [
            *inputs.about,
            f"{settings.src}: {counted(inputs.images, 'image')}, {describe_target(inputs.target)}, {_counts(inputs)}; "
            f"ignored: {describe_ignored(inputs.ignored)}",
            *_copies(settings, inputs),
        ]
    store = open_output(settings.out)
    existing = check_extendable(store, settings, open_existing(store, rebuild=False))
    sources, ignored = list_sources(settings, database, folder / "scan_cache", known_classes=existing.newest.classes)
    comparison = compare_with_set(store, existing, sources, folder)
    inputs = extension_inputs(settings, existing, sources, ignored, comparison)
    spec = extension_spec(settings, store, existing, inputs, comparison)
    new_classes = spec.classes[len(existing.newest.classes) :]
    named = f" ({', '.join(new_classes[:_NAMED])}{', …' if len(new_classes) > _NAMED else ''})" if new_classes else ""
    return inputs, [
        *inputs.about,
        f"{settings.src}: {counted(comparison.added, 'new photo')} for {store.where} ({_counts(inputs)}), "
        f"{counted(len(new_classes), 'new class', plural='new classes')}{named}; ignored: {describe_ignored(ignored)}",
        *_copies(settings, inputs),
        *(f"  {line}" for line in describe_changes(None, comparison.removed, comparison.changed)),
    ]


def _copies(settings: Settings, inputs: Inputs) -> list[str]:
    """A line about exact copies, if there are any."""
    if inputs.copies is None or not inputs.copies.extra:
        return []
    fate = "left out" if settings.duplicates == "drop" else "kept in one split with the photo that they copy"
    extra = counted(inputs.copies.extra, "exact copy of another image", plural="exact copies of other images")
    return [f"  duplicates: {extra}; {fate}"]


def _counts(inputs: Inputs) -> str:
    return ", ".join(f"{name} {len(split)}" for name, split in inputs.splits.items())


def _sample(
    settings: Settings, inputs: Inputs, split: str, sides: Mapping[int, int]
) -> tuple[ShardSpec, EncodeOptions]:
    """Random images of a split, as one shard, and how it is converted."""
    generation = first_spec(settings, inputs, codec_versions())
    todo = WorkList(
        generations=(generation,),
        src=settings.src,
        short_sides=sides,
        max_bad=settings.max_bad_frac,
        ignored=inputs.ignored,
        variables=variables_of(settings),
    )
    database = inputs.sources["train"].database
    plan_photos(database, inputs.splits, generation, seed=settings.seed)
    photos = PlannedPhotos(database=database, work=todo, where=settings.out, stamps=inputs.stamps)
    spec = photos.spec(generation, split, 0, tuple(sides), contents_sha256=None, limit=_SAMPLE_IMAGES)
    return spec, photos.options(generation)
