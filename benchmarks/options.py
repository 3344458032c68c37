"""The settings of `resolute bench`, `bench-all` and `gpu-check`; each field is an option of the command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from resolute.machine import available_cpus
from resolute.settings import described, setting, settings

__all__ = ["BenchAllOptions", "BenchOptions", "GpuCheckOptions", "SetOptions"]

Device = Literal["auto", "cpu", "cuda"]


@settings("")
class SetOptions:
    """The shard set to measure."""

    shards: Annotated[str, described("shard set (folder or URL)", min_length=1)]
    res: tuple[Annotated[int, Field(ge=1)], ...] = setting((), "resolutions, px (default: all of the set)")
    device: Device = setting("auto", "auto: a GPU if there is one")
    threads: Annotated[int, described("our CPU threads = the DataLoader's workers: all cores by default", ge=1)] = (
        Field(default_factory=available_cpus)
    )
    batch_size: int | None = setting(None, "samples per batch (default: 64, or all of a smaller set)", ge=2)
    model: str = setting("resnet10t", "timm model to train")


@settings("")
class BenchOptions(SetOptions):
    seconds: float = setting(90.0, "about how long the command may take", gt=0, le=3600)
    out: Path | None = setting(None, "page to write (default: bench/bench.html)")


@settings("")
class BenchAllOptions(SetOptions):
    only: tuple[str, ...] = setting(("loader", "change", "training"), "parts to run")
    seconds: float = setting(5.0, "time of each measurement", gt=0, le=3600)
    rounds: int = setting(3, "interleaved rounds of everything", ge=1)
    out: Path | None = setting(None, "JSON file to write (default: bench/DEVICE.json)")


@settings("")
class GpuCheckOptions:
    device: Device = setting("auto", "auto: a GPU if there is one; on a CPU sizes are tiny and times mean nothing")
    shards: str | None = setting(None, "shard set (default: made from demo photos)", min_length=1)
    only: tuple[str, ...] = setting((), "parts to run (default: all)")
    minutes: float | None = setting(
        None, "parts that could not begin by then are skipped (default: 15, on a CPU 60)", gt=0
    )
    threads: Annotated[int, described("CPU threads: all cores by default", ge=1)] = Field(
        default_factory=available_cpus
    )
    out: Path = setting(Path("gpu-check"), "folder to write to")
