"""The dry run: counts all inputs, converts a random sample and estimates bytes and time. Writes nothing to OUT."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from numpy.typing import NDArray

from pipeline.storage.scratch import ScratchFolder
from prep.convert.batch import EncodeOptions
from prep.execute.process_pool import open_pool
from prep.execute.stats import RunStats
from prep.plan.input_checks import describe_ignored, input_warnings, size_warnings
from prep.plan.inputs import check_no_overlap, list_inputs
from prep.plan.shard_plan import ShardPlan

from .config import Settings

__all__ = ["dry_run"]

_SAMPLE_IMAGES = 512


def dry_run(settings: Settings) -> str:
    """Report counts, classes and estimated bytes and time, without a final newline. Raises `ResoluteError` as prep
    would."""
    check_no_overlap(settings)
    with ScratchFolder() as folder:
        inputs = list_inputs(settings, folder, folder / "spool")
        spec = ShardPlan(settings, inputs).spec("train", 0, settings.resolutions, limit=_SAMPLE_IMAGES)
        stats, sizes = RunStats(), [0] * len(settings.resolutions)
        sources: list[NDArray[Any]] = []
        with open_pool(settings.worker_count) as pool:
            results = pool.run(EncodeOptions(quality=settings.quality, label_digits=4), spec.batches())
            start_s = None
            for result in results:
                if start_s is None:  # why: the first result includes the start-up of the processes
                    start_s, first_images = perf_counter(), len(result.samples) + len(result.rejects)
                stats.add("train", result)
                sizes = [size + len(tar) for size, tar in zip(sizes, result.tars, strict=True)]
                sources.append(result.sources)
        assert start_s is not None
        timed_images = stats.images - first_images
        rate = timed_images / (perf_counter() - start_s) if timed_images else None
    images, per_image = inputs.images, inputs.images / stats.images
    lines = [
        f"{settings.src}: {images} images, {len(inputs.classes)} classes, "
        + ", ".join(f"{name} {len(split.positions)}" for name, split in inputs.splits.items())
        + f"; ignored: {describe_ignored(inputs.ignored)}",
        f"  estimated from {stats.images} random images, of which {stats.rejects} were rejected:",
    ]
    for res, size in zip(settings.resolutions, sizes, strict=True):
        lines.append(
            f"  {res:>4} px: short side {settings.short_side(res)} px, about {size * per_image / 1e6:.0f} MB, "
            f"{size / stats.images / 1e3:.1f} kB per sample"
        )
    lines.append(f"  in total about {sum(sizes) * per_image / 1e9:.2f} GB in {settings.out}")
    if rate is not None:
        workers = f"{settings.worker_count} workers"
        lines.append(f"  time: about {_duration(images / rate)} at {rate:.0f} images/s with {workers}")
    warnings = input_warnings(settings, inputs)
    warnings += size_warnings({res: settings.short_side(res) for res in settings.resolutions}, sources)
    lines += [f"  WARNING: {warning}" for warning in warnings]
    return "\n".join([*lines, "  nothing was written"])


def _duration(seconds: float) -> str:
    minutes = seconds / 60
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
