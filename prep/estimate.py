"""What would a run come to? Everything is counted, a random sample is converted, nothing is written."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from numpy.typing import NDArray

from pipeline.storage.scratch import ScratchFolder
from prep.convert.batch import Job
from prep.execute.process_pool import open_pool
from prep.execute.stats import Tally
from prep.plan.input_checks import describe_ignored, input_warnings, size_warnings
from prep.plan.inputs import check_places, find_inputs

from .config import Settings
from .prepare import Work

__all__ = ["dry_run"]

_SAMPLE = 512  # images


def dry_run(settings: Settings) -> str:
    """Counts, classes, estimated bytes and time, without a final newline. Raises `ResoluteError` as prep would."""
    check_places(settings)
    with ScratchFolder() as folder:
        inputs = find_inputs(settings, folder, folder / "spool")
        spec = Work(settings, inputs).spec("train", 0, settings.resolutions, limit=_SAMPLE)
        tally, sizes = Tally(), [0] * len(settings.resolutions)
        sources: list[NDArray[Any]] = []
        with open_pool(settings.worker_count) as pool:
            chunks = pool.run(Job(quality=settings.quality, label_digits=4), spec.tasks())
            began = None
            for chunk in chunks:
                if began is None:  # why: the first one has waited for the processes to start
                    began, first = perf_counter(), len(chunk.samples) + len(chunk.rejects)
                tally.add("train", chunk)
                sizes = [size + len(tar) for size, tar in zip(sizes, chunk.tars, strict=True)]
                sources.append(chunk.sources)
        assert began is not None
        timed = tally.images - first
        rate = timed / (perf_counter() - began) if timed else None
    images, per_image = inputs.images, inputs.images / tally.images
    lines = [
        f"{settings.src}: {images} images, {len(inputs.classes)} classes, "
        + ", ".join(f"{name} {len(split.positions)}" for name, split in inputs.splits.items())
        + f"; ignored: {describe_ignored(inputs.ignored)}",
        f"  from a sample of {tally.images} images, {tally.rejects} of them rejected:",
    ]
    for res, size in zip(settings.resolutions, sizes, strict=True):
        lines.append(
            f"  {res:>4} px: short side {settings.short_side(res)} px, about {size * per_image / 1e6:.0f} MB, "
            f"{size / tally.images / 1e3:.1f} kB a sample"
        )
    lines.append(f"  together about {sum(sizes) * per_image / 1e9:.2f} GB in {settings.out}")
    if rate is not None:
        workers = f"{settings.worker_count} workers"
        lines.append(f"  time: about {_told(images / rate)} at {rate:.0f} images/s with {workers}")
    warnings = input_warnings(settings, inputs)
    warnings += size_warnings({res: settings.short_side(res) for res in settings.resolutions}, sources)
    lines += [f"  WARNING: {warning}" for warning in warnings]
    return "\n".join([*lines, "  nothing was written"])


def _told(seconds: float) -> str:
    minutes = seconds / 60
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
