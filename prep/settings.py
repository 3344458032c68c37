"""The settings of prep's commands; each field is an option of `resolute shards`, `verify` or `jobs`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from resolute.errors import ResoluteError
from resolute.machine import available_cpus
from resolute.settings import described, setting, settings
from resolute.urls import local_path

__all__ = [
    "MARGIN",
    "RESOLUTIONS",
    "JobsFinishOptions",
    "JobsPlanOptions",
    "JobsRangeOptions",
    "Settings",
    "ShardsOptions",
    "VerifyOptions",
]

RESOLUTIONS = (128, 160, 224)  # px, of a new set
# The usual evaluation resizes to 256 px and crops 224. Source: Krizhevsky, Sutskever, Hinton, NIPS 2012, section 2.
MARGIN = 256 / 224
_MAX_SIDE_PX = 65_500  # libjpeg's limit
_OUT = "where `resolute jobs plan` has written the plan: a folder, or a URL such as s3://bucket/set"


@settings("")
class JobsPlanOptions:
    """The settings that decide the contents of a set. Raises `ResoluteError` for values that cannot be combined."""

    src: str = setting(
        "",
        "folder of class folders; flat folder with --labels; list file of paths and labels; zip or "
        "tar of class folders; WebDataset tars or Parquet files (file, folder, pattern); or a URL of these",
        min_length=1,
    )
    out: str = setting("shards", "where to write the shards: a folder, or a URL such as s3://bucket/set", min_length=1)
    res: tuple[Annotated[int, Field(ge=8)], ...] = setting(
        (), "resolutions to train at, px, ascending (default: 128,160,224, or those of the set to extend)"
    )
    kind: Literal["auto", "folders", "table", "listing", "archive", "webdataset", "parquet"] = setting(
        "auto", "format of SRC, if it is not detected"
    )
    labels: str | None = setting(
        None,
        "table with one row per image (CSV, TSV, JSONL or Parquet), for a folder without class folders",
        min_length=1,
    )
    columns: str | None = setting(
        None,
        "image and target columns of a table, list or Parquet file, also several: id,first..last; 0,1 for a "
        "table without a header",
        min_length=1,
    )
    target: str | None = setting(
        None,
        "what the target columns hold, if it is not recognised: class (one per image), labels (any number; with "
        "labels:space, comma, semicolon or bar, as a cell separates them) or values (numbers)",
        min_length=1,
    )
    image: str | None = setting(
        None,
        "extensions of the photos in WebDataset samples with several images, such as jpg or left.jpg, by priority",
        min_length=1,
    )
    zip_names: str | None = setting(
        None, "encoding of the names in zip files that are not marked as UTF-8, such as gbk or shift_jis", min_length=1
    )
    classes: str | None = setting(
        None, "class names, one per line: line n (from 0) names class n; or a map of numbers and names", min_length=1
    )
    val: str | None = setting(None, "separate validation source, of the same kind as SRC", min_length=1)
    val_labels: str | None = setting(
        None,
        "table of the validation images, if --labels does not cover them: those in --val, or without it in the folder "
        "--src",
        min_length=1,
    )
    split: str | None = setting(
        None,
        "column of the table that says train, val (also valid, validation, dev) or test (left out) for each photo; "
        "split:0=train,1=val,2=none for other values; or a regular expression with one group for the names of photos; "
        "none: no column does",
        min_length=1,
    )
    group: str | None = setting(
        None,
        "photos that belong together, such as those of one patient, and stay on one side of every split: a column of "
        "the table; a regular expression with one group for the names of photos; or a CSV file with the columns name "
        "and group; none: no column says it",
        min_length=1,
    )
    val_list: str | None = setting(None, "images of SRC to hold out, one name per line", min_length=1)
    val_frac: float | None = setting(
        None,
        "fraction of every class to hold out, if neither --val nor --val-list is given (default: 0.1); 0: none",
        ge=0,
        lt=1,
    )
    margin: float = setting(MARGIN, "stored short side / resolution", ge=1, le=8)
    quality: int = setting(90, "JPEG quality, as libjpeg counts it", ge=1, le=100)
    max_megapixels: int | None = setting(
        None,
        "megapixels of the largest photo that is not rejected (default: 67.1, 8192 x 8192 px); a worker may take "
        "13 MB of memory for each",
        ge=1,
        le=4000,
    )
    grey_range: Literal["auto"] | Annotated[int, Field(ge=8, le=16)] = setting(
        "auto",
        "bits that samples of 16 bits use, 8 to 16: with 12, 0 to 4095 become black to white; auto: 16, and prep asks "
        "if many such photos are dark",
    )
    max_bad: float | None = setting(
        None,
        "fraction of the images that may be unusable, at least one image unless 0 (default: 0.01, or that of the set "
        "in OUT)",
        ge=0,
        le=1,
    )
    unlabelled: Literal["refuse", "drop", "keep"] = setting(
        "refuse",
        "photos whose label is empty, -1 or a word such as nan, None or unknown: an error, or left out and counted; "
        "keep: such words are names of classes",
    )
    blank: Literal["0", "drop"] | None = setting(
        None,
        "blank cells in several columns of 0 and 1: 0 (the photo does not have the label) or drop (leave out photos "
        "with a blank cell); by default an error",
    )
    uncertain: Literal["0", "1", "ignore"] | None = setting(
        None,
        "cells of -1 in several columns of 0 and 1: 0, 1, or ignore (the label does not count in the loss and in "
        "metrics for this photo); by default an error, except for columns of -1 and 1 alone",
    )
    duplicates: Literal["together", "drop", "keep"] | None = setting(
        None,
        "photos with equal bytes: kept in one split (the default, and an error if --val or --val-list puts them "
        "into two), one of them stored, preferably in val, or all kept where they are",
    )
    near_copies: Literal["find", "all", "none"] = setting(
        "find",
        "photos that show the same picture or the same moment as another one: found, in sets of more than 200000 "
        "photos only those like one of val; all: also within train; none: not looked for",
    )
    shard_samples: int = setting(4096, "samples per shard", ge=1, le=2**20)
    seed: int = setting(0, "of the order and of the held-out images", ge=0, le=2**63 - 1)
    rebuild: bool = setting(False, "start over and replace what prep wrote to OUT before")
    extend: bool = setting(
        False, "add the photos that have come since the set was finished; old shards keep every byte"
    )

    def __post_init__(self) -> None:
        if self.target is not None:
            from resolute.prep.sources.targets import parse_target  # why here: it imports slowly

            parse_target(self.target)
        from resolute.prep.sources.names import SUFFIXES  # why here: it imports slowly

        if unknown := [kind for kind in self.images if f".{kind.rpartition(chr(46))[2]}" not in SUFFIXES]:
            raise ResoluteError(
                f"IMAGE: got {unknown[0]!r}, which is no extension of an image, expected such as jpg or left.jpg; "
                "correct it"
            )
        if self.zip_names is not None and not _is_encoding(self.zip_names):
            raise ResoluteError(
                f"ZIP_NAMES: got {self.zip_names}, which is no encoding of file names, expected one of Python's, such "
                "as gbk, shift_jis or cp1252; correct it"
            )
        if self.val_labels is not None and self.val is None and self.labels is None:
            raise ResoluteError(
                f"VAL_LABELS: got {self.val_labels} without VAL and LABELS, expected the images that it names; set VAL "
                "to their folder, or LABELS to the table of the training images if they are in SRC too"
            )
        res, ascending = list(self.res), sorted({*self.res})
        if res != ascending:
            raise ResoluteError(f"--res: got {_text(res)}, expected it ascending; write it as {_text(ascending)}")
        if max(self.resolutions) * self.margin > _MAX_SIDE_PX:
            raise ResoluteError(
                f"--res: got {_text(res)}, expected at most {_MAX_SIDE_PX / self.margin:.0f} px each, since the side "
                f"of a JPEG is at most {_MAX_SIDE_PX} px; lower it"
            )
        names = ("val" if self.val is not None else "val_labels", "val_list", "val_frac", "split")
        chosen = [name for name in names if getattr(self, name) not in (None, "none")]
        if len(chosen) > 1:
            first, second = (f"--{name.replace('_', '-')}" for name in chosen[:2])
            raise ResoluteError(f"{first}: cannot be combined with {second}, got both, expected one; drop the other")
        if self.split not in (None, "none"):
            from resolute.prep.sources.tables.split_column import parse_split  # why here: as above

            parse_split(self.split or "")
        from resolute.prep.sources.tables.group_column import parse_group  # why here: as above

        parse_group(self.group)
        if self.extend and self.rebuild:
            raise ResoluteError("EXTEND: got it with REBUILD, expected one of both; omit one")
        if self.duplicates == "together" and (self.val_source is not None or self.val_list is not None):
            raise ResoluteError(
                "--duplicates together: has no effect, got val images by VAL or VAL_LIST, expected drop or keep; "
                "choose one"
            )

    @property
    def resolutions(self) -> tuple[int, ...]:
        """The resolutions of the set, px, ascending."""
        return self.res or RESOLUTIONS

    def short_side(self, res: int) -> int:
        """Stored short side in px for training at `res` px: round(res * margin), as `ShardSet.short_side`."""
        return round(res * self.margin)

    @property
    def images(self) -> tuple[str, ...]:
        """The extensions that IMAGE names, in lower case and without a dot in front."""
        return tuple(kind.strip().lstrip(".").lower() for kind in (self.image or "").split(",") if kind.strip())

    @property
    def val_source(self) -> str | None:
        """Where the validation images are: VAL, or SRC if VAL_LABELS or SPLIT names some of its images; None: a part of
        SRC that prep draws."""
        is_named = self.val_labels is not None or self.split not in (None, "none")
        return self.src if self.val is None and is_named else self.val

    @property
    def held_out_frac(self) -> float:
        return 0.1 if self.val_frac is None else self.val_frac

    @property
    def max_bad_frac(self) -> float:
        """The fraction (0..1) of the images that may be unusable."""
        return 0.01 if self.max_bad is None else self.max_bad

    def plan_settings(self) -> dict[str, Any]:
        """The settings that decide the set's bytes at any resolution: no paths, no number of workers."""
        val: dict[str, Any] = {"how": "frac", "frac": self.held_out_frac}
        if self.val_source is not None or self.val_list is not None:
            val = {"how": "folder" if self.val_source is not None else "list"}
        # why only then: plans without these settings stay what they are
        chosen: dict[str, Any] = {} if self.max_megapixels is None else {"max_megapixels": self.max_megapixels}
        chosen |= {} if self.grey_range == "auto" else {"grey_range": self.grey_range}
        chosen |= {} if self.group in (None, "none") else {"group": True}
        chosen |= {} if self.near_copies == "find" else {"near_copies": self.near_copies}
        return {
            "margin": self.margin,
            "quality": self.quality,
            "shard_samples": self.shard_samples,
            "seed": self.seed,
            "val": val,
            **chosen,
        }


@settings("")
class Settings(JobsPlanOptions):
    """The settings of a run of prep: what decides the set's contents, and where its shards are converted."""

    workers: int = setting(0, "worker processes; 0: one per CPU core", ge=0, le=4096)
    engine: Literal["local", "ray", "jobs"] = setting(
        "local", "where shards are converted: this machine, a Ray cluster, or the commands `resolute jobs`"
    )
    ray_address: str | None = setting(
        None, "HOST:PORT of the Ray cluster; by default Ray finds or starts one itself", min_length=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.workers and self.engine == "ray":
            raise ResoluteError(
                f"WORKERS: has no effect with ENGINE=ray, got {self.workers}, expected none, as the cluster's CPUs "
                "decide; omit WORKERS (--workers)"
            )
        if self.ray_address is not None and self.engine != "ray":
            raise ResoluteError(
                "--ray-address: has no effect, got the local engine, expected ENGINE=ray; add it (--engine ray)"
            )

    @property
    def worker_count(self) -> int:
        return self.workers or available_cpus()

    def with_absolute_paths(self) -> Settings:
        """A copy whose sources and OUT mean the same in a process with another working directory."""
        return replace(
            self,
            src=_absolute(self.src),
            val=None if self.val is None else _absolute(self.val),
            out=_absolute(self.out),
        )


@settings("")
class ShardsOptions(Settings):
    dry: bool = setting(False, "write nothing: count images, convert some, estimate bytes and time")


@settings("")
class VerifyOptions:
    shards: Annotated[str, described("folder of the set, or a URL such as s3://bucket/set", min_length=1)]
    workers: int = setting(0, "processes that read and decode; 0: one per CPU core", ge=0, le=4096)


@settings("")
class JobsRangeOptions:
    out: Annotated[str, described(_OUT, min_length=1)]
    range: Annotated[str, described("A:B: shards A to B - 1; either may be left out, and B may be more than there are")]
    workers: int = setting(0, "worker processes; 0: one per CPU core", ge=0, le=4096)


@settings("")
class JobsFinishOptions:
    out: Annotated[str, described(_OUT, min_length=1)]


def _is_encoding(name: str) -> bool:
    try:
        return b"a/1.jpg".decode(name) == "a/1.jpg"
    except (LookupError, ValueError):
        return False


def _absolute(path: str) -> str:
    folder = local_path(path)
    return path if folder is None else str(Path(folder).absolute())


def _text(resolutions: list[int]) -> str:
    return ",".join(map(str, resolutions))
