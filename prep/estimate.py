"""The dry run: counts all inputs, converts a random sample and estimates bytes and time. Writes nothing to OUT."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

from numpy.typing import NDArray

from resolute.console import counted
from resolute.pipeline.storage.scratch import ScratchFolder
from resolute.prep.convert.batch import BatchResult, EncodeOptions
from resolute.prep.execute.process_pool import open_pool
from resolute.prep.execute.stats import RunStats
from resolute.prep.plan.input_checks import describe_ignored, describe_target, input_warnings, size_warnings
from resolute.prep.plan.inputs import Inputs, check_no_overlap, list_catalogs, list_inputs
from resolute.prep.plan.set_plan import ShardLayout
from resolute.prep.plan.shard_inputs import ShardInputs
from resolute.prep.plan.shard_plan import GenerationImages, ShardPlan
from resolute.prep.shards.existing_set import open_existing
from resolute.prep.storage.output import open_store

from .extension import check_extendable, describe_changes, extension_plan, open_finished
from .settings import Settings

__all__ = ["dry_run"]

_SAMPLE_IMAGES = 512
_NAMED = 8  # classes listed by name


def dry_run(settings: Settings) -> str:
    """Report counts, classes and estimated bytes and time, without a final newline. Raises `ResoluteError` as prep
    would."""
    check_no_overlap(settings)
    with ScratchFolder() as folder:
        inputs, lines = _inputs(settings, folder)
        split = next((name for name, images in inputs.splits.items() if len(images)), None)
        if split is None:
            return "\n".join([*lines, "  nothing was written"])
        sides = {res: settings.short_side(res) for res in settings.resolutions}
        spec = _sample(settings, inputs, split).spec(sides)
        samples = inputs.target.sample_dtype
        options = EncodeOptions(quality=settings.quality, label_digits=4, samples=samples)
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
    warnings = input_warnings(settings, inputs, is_extension=settings.extend)
    warnings += size_warnings(sides, sources)
    lines += [f"  WARNING: {warning}" for warning in warnings]
    return "\n".join([*lines, "  nothing was written"])


def _duration(seconds: float) -> str:
    minutes = seconds / 60
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def _inputs(settings: Settings, folder: Path) -> tuple[Inputs, list[str]]:
    """The images to convert, and lines about them."""
    if not settings.extend:
        inputs = list_inputs(settings, folder, folder / "spool")
        return inputs, [
            *inputs.about,
            f"{settings.src}: {counted(inputs.images, 'image')}, {describe_target(inputs.target)}, {_counts(inputs)}; "
            f"ignored: {describe_ignored(inputs.ignored)}",
            *_copies(settings, inputs),
        ]
    store = open_store(settings.out)
    existing = open_existing(store, rebuild=False)
    check_extendable(store, settings, existing)
    assert existing is not None
    catalogs, ignored = list_catalogs(settings, folder, folder / "spool", known_classes=existing.plan["classes"])
    finished = open_finished(store, settings, existing, catalogs, ignored, folder)
    plan, comparison = extension_plan(store, settings, existing, finished), finished.comparison
    new_classes = plan["classes"][len(existing.plan["classes"]) :]
    named = f" ({', '.join(new_classes[:_NAMED])}{', …' if len(new_classes) > _NAMED else ''})" if new_classes else ""
    changes = describe_changes(None, len(comparison.removed), len(comparison.changed), dropped=settings.drop)
    return finished.inputs, [
        *finished.inputs.about,
        f"{settings.src}: {counted(comparison.added, 'new photo')} for {store.where} ({_counts(finished.inputs)}), "
        f"{counted(len(new_classes), 'new class', plural='new classes')}{named}; ignored: {describe_ignored(ignored)}",
        *_copies(settings, finished.inputs),
        *(f"  {line}" for line in changes),
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


def _sample(settings: Settings, inputs: Inputs, split: str) -> ShardInputs:
    """Random images of a split, as one shard."""
    images = {name: len(own) for name, own in inputs.splits.items()}
    layout = ShardLayout(generations=(images,), shard_samples=settings.shard_samples)
    plan = ShardPlan(
        seed=settings.seed, layout=layout, images=[GenerationImages(inputs.splits)], rejected={}, where=settings.out,
        src=settings.src,
    )  # fmt: skip
    return plan.inputs(split, 0, limit=_SAMPLE_IMAGES)
