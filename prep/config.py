"""`Settings` of a prep run: immutable, and validated on construction."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from resolute.errors import ResoluteError
from resolute.machine import available_cpus
from resolute.prep.sources.image_ref import is_url
from resolute.prep.sources.targets.target_cells import parse_target

__all__ = ["MIN_RES_PX", "Settings", "parse_resolutions"]

MIN_RES_PX = 8
_MAX_SIDE_PX = 65_500  # libjpeg's limit
RESOLUTIONS = "128,160,224"
# The usual evaluation resizes to 256 px and crops 224. Source: Krizhevsky, Sutskever, Hinton, NIPS 2012, section 2.
MARGIN = 256 / 224


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one run of prep, range-checked.

    `src` and `val` are any source that `prep.sources` reads: folders, archives, lists, patterns, URLs. At most one of
    `val`, `val_list` (a file of names in `src`) and `val_frac` (0..1, held out of each class; 0: there is no
    validation split) may be set; without any, 0.1 of each class is held out. `labels` is a table for a folder without
    class folders (and `val_labels` one for `val`), `columns` its image and target columns, `target` what these mean
    (`parse_target`; None: it is recognised), `classes` a file of class names in order. `resolutions` are in px,
    ascending; `quality` is libjpeg's, 1..100; `max_bad` (0..1) is the fraction of images that may be rejected;
    `unlabelled` is "refuse", or "drop" to leave out images without a target;
    `duplicates` says what becomes of exact copies: "together" keeps those of a photo in one split, "drop" stores one of
    them, "keep" does not compare images; None is "together", or where the splits are given an error if a photo has a
    copy in the other one, and then images behind URLs are not compared; `workers` 0 means one per CPU, and is the only
    value with Ray. `extend` adds new photos to a finished set, and with `drop` leaves out those that are gone or have
    changed. `engine` says where shards are converted: in this process, on a Ray cluster, or by separate jobs.

    Raises `ResoluteError` for a value out of range.
    """

    src: str
    out: str
    resolutions: tuple[int, ...]
    kind: str = "auto"
    labels: str | None = None
    columns: str | None = None
    target: str | None = None
    classes: str | None = None
    val: str | None = None
    val_labels: str | None = None
    val_list: str | None = None
    val_frac: float | None = None
    margin: float = MARGIN
    quality: int = 90
    workers: int = 0  # 0: as many as this process may use
    max_bad: float = 0.01
    unlabelled: str = "refuse"
    duplicates: str | None = None
    shard_samples: int = 4096
    seed: int = 0
    rebuild: bool = False
    extend: bool = False
    drop: bool = False
    engine: str = "local"
    ray_address: str | None = None

    def __post_init__(self) -> None:
        for name in (
            "src", "out", "labels", "columns", "target", "classes", "val", "val_labels", "val_list", "ray_address"
        ):  # fmt: skip
            if getattr(self, name) == "":
                flag = f"--{name.replace('_', '-')}"
                raise ResoluteError(f"{flag}: got an empty value, expected a value; set {name.upper()} or leave it out")
        parse_target(self.target)
        if self.val_labels is not None and (self.labels is None or self.val is None):
            raise ResoluteError(
                f"VAL_LABELS: has no effect, got {self.val_labels} without {'VAL' if self.labels else 'LABELS'}, "
                "expected it beside LABELS and VAL (--val-labels); add that, or drop VAL_LABELS"
            )
        res = self.resolutions
        text = ",".join(map(str, res))
        if not res:
            raise ResoluteError("RES: got no resolution, expected px such as 128,160,224; set RES (--res)")
        if min(res) < MIN_RES_PX:
            raise ResoluteError(
                f"RES: too small, got {text}, expected at least {MIN_RES_PX} px each; change RES (--res)"
            )
        _check_range("--margin", self.margin, 1.0, 8.0)
        if max(res) * self.margin > _MAX_SIDE_PX:
            raise ResoluteError(
                f"RES: too large, got {text}, expected at most {_MAX_SIDE_PX / self.margin:.0f} px each, since "
                f"the side of a JPEG is at most {_MAX_SIDE_PX} px; change RES (--res)"
            )
        if list(res) != sorted(set(res)):
            raise ResoluteError(
                f"RES: not strictly ascending, got {text}, expected {','.join(map(str, sorted(set(res))))}; "
                "change RES (--res)"
            )
        _check_range("--quality", self.quality, 1, 100)
        _check_range("--max-bad", self.max_bad, 0.0, 1.0)
        _check_range("--shard-samples", self.shard_samples, 1, 1 << 20)
        _check_range("--workers", self.workers, 0, 4096)
        _check_range("--seed", self.seed, 0, (1 << 63) - 1)
        if self.val_frac is not None and not 0.0 <= self.val_frac < 1.0:
            raise ResoluteError(
                f"--val-frac: out of range, got {self.val_frac}, expected at least 0 and below 1; "
                "hold out 0.1, or name the images with --val or --val-list"
            )
        chosen = [name for name in ("val", "val_list", "val_frac") if getattr(self, name) is not None]
        if len(chosen) > 1:
            first, second = (f"--{name.replace('_', '-')}" for name in chosen[:2])
            raise ResoluteError(f"{first}: cannot be combined with {second}, got both, expected one; drop the other")
        if self.extend and self.rebuild:
            raise ResoluteError("EXTEND: got it with REBUILD, expected one of both; omit one")
        if self.drop and not self.extend:
            raise ResoluteError("DROP: has no effect alone, got no EXTEND, expected both; add EXTEND=1 (--extend)")
        if self.unlabelled not in ("refuse", "drop"):
            raise ResoluteError(f"--unlabelled: got {self.unlabelled!r}, expected refuse or drop; choose one")
        if self.duplicates not in (None, "together", "drop", "keep"):
            raise ResoluteError(f"--duplicates: got {self.duplicates!r}, expected together, drop or keep; choose one")
        if self.duplicates == "together" and (self.val is not None or self.val_list is not None):
            raise ResoluteError(
                "--duplicates together: has no effect, got val images by VAL or VAL_LIST, expected drop or keep; "
                "choose one"
            )
        if self.engine not in ("local", "ray", "jobs"):
            raise ResoluteError(f"--engine: got {self.engine!r}, expected local or ray; choose one")
        if self.workers and self.engine == "ray":
            raise ResoluteError(
                f"WORKERS: has no effect with ENGINE=ray, got {self.workers}, expected none, as the cluster's CPUs "
                "decide; omit WORKERS (--workers)"
            )
        if self.ray_address is not None and self.engine != "ray":
            raise ResoluteError(
                "--ray-address: has no effect, got the local engine, expected ENGINE=ray; add it (--engine ray)"
            )

    def short_side(self, res: int) -> int:
        """Stored short side in px for training at `res` px: round(res * margin), as `ShardSet.short_side`."""
        return round(res * self.margin)

    @property
    def held_out_frac(self) -> float:
        return 0.1 if self.val_frac is None else self.val_frac

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

    def plan_settings(self) -> dict[str, Any]:
        """The settings that decide the set's bytes at any resolution: no paths, no number of workers."""
        val: dict[str, Any] = {"how": "frac", "frac": self.held_out_frac}
        if self.val is not None or self.val_list is not None:
            val = {"how": "folder" if self.val is not None else "list"}
        return {
            "margin": self.margin,
            "quality": self.quality,
            "shard_samples": self.shard_samples,
            "seed": self.seed,
            "val": val,
        }


def _absolute(path: str) -> str:
    path = path.removeprefix("file://").removeprefix("local://")
    return path if is_url(path) else str(Path(path).absolute())


def parse_resolutions(text: str) -> tuple[int, ...]:
    """Parse `"128,160,224"` to `(128, 160, 224)`. Raises `ResoluteError` unless every item is an integer."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ResoluteError(
            f"RES: not a list of numbers, got {text!r}, expected px such as 128,160,224; change RES (--res)"
        ) from None


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ResoluteError(
            f"{name}: out of range, got {value}, expected {low} to {high}; choose a value in range"
        )
