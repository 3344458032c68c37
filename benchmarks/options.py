"""The settings of `resolute bench` and `bench-all`, and of `loader` and `change`; each field is an option."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from resolute.machine import available_cpus
from resolute.settings import described, setting, settings

__all__ = ["BenchAllOptions", "BenchOptions", "ChangeOptions", "LoaderOptions", "PeerOptions", "SetOptions"]

Device = Literal["auto", "cpu", "cuda"]


@settings("")
class SetOptions:
    """The shard set to measure, and how often."""

    shards: Annotated[str, described("shard set (folder or URL)", min_length=1)]
    res: tuple[Annotated[int, Field(ge=1)], ...] = setting((), "resolutions, px (default: all of the set)")
    batch_size: int | None = setting(None, "samples per batch (default: 64, or all of a smaller set)", ge=2)
    rounds: int = setting(3, "interleaved rounds of everything", ge=1)


@settings("")
class BenchOptions(SetOptions):
    rounds: int = setting(1, "interleaved rounds of everything; from 2, tables show the range", ge=1)
    parts: tuple[str, ...] = setting(("loader", "training", "change"), "what to measure")
    device: Device = setting("auto", "auto: a GPU if there is one")
    threads: Annotated[int, described("our CPU threads = the DataLoader's workers: all cores by default", ge=1)] = (
        Field(default_factory=available_cpus)
    )
    model: str = setting("resnet10t", "timm model to train")
    seconds: float = setting(90.0, "about how long a round may take", gt=0, le=3600)
    out: Path | None = setting(
        None, "page to write, its values beside it as .json; a .json file: these alone (default: bench/bench.html)"
    )


@settings("")
class PeerOptions(SetOptions):
    """Options of the programs that compare loaders. Other tools read the set's files, so it must be a local folder."""

    only: tuple[str, ...] = setting((), "loaders to measure (default: all that are available)")
    workers: int = setting(2, "processes or threads per loader, and cores that they share", ge=1)
    ffcv_python: str | None = setting(
        None, "interpreter of an environment with FFCV (default: $FFCV_PYTHON)", min_length=1
    )


@settings("")
class LoaderOptions(PeerOptions):
    seconds: float = setting(5.0, "length of a measurement", gt=0, le=3600)
    out: Path | None = setting(None, "JSON file to write (default: bench/loader.json)")


@settings("")
class ChangeOptions(PeerOptions):
    batches: int = setting(40, "batches at each resolution", ge=1)
    out: Path | None = setting(None, "JSON file to write (default: bench/change.json)")


@settings("")
class BenchAllOptions:
    """Options of `resolute bench-all`: the data and the other tools that its measurements read."""

    data: Annotated[Path, described("folder of the data sets: clothing10, imagenette224, imagenette224_more, …")]
    publish: bool = setting(False, "renew the files in benchmarks/results and the pages; else write to bench/all")
    only: tuple[str, ...] = setting((), "measurements (default: all)")
    timm: Path | None = setting(None, "checkout of timm, whose train.py is compared")
    ffcv_python: str | None = setting(None, "interpreter with FFCV (benchmarks/loaders/ffcv.py says how)")
    img2dataset: str | None = setting(None, "interpreter with img2dataset")
    minutes: float = setting(600.0, "start no measurement after that many minutes", gt=0)
    work: Path = setting(Path("bench/work"), "folder for shards and other working files, kept between runs")
