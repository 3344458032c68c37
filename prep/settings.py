"""What was asked for, and can it be done at all?"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import ResoluteError

__all__ = ["MIN_RES_PX", "Settings", "parse_resolutions"]

MIN_RES_PX = 8
# The usual evaluation: resize to 256, crop 224. Source: Krizhevsky, Sutskever, Hinton, NIPS 2012, section 2.
MARGIN = 256 / 224


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run of prep, checked: whoever holds one may rely on its ranges.

    `src` holds class folders. At most one of `val` (another folder of class folders), `val_list` (a file of
    paths relative to `src`) and `val_frac` (0..1, held out per class) says what validation is; 0.1 of each
    class if none does. `resolutions` are in px, ascending; `quality` is libjpeg's, 1..100; `max_bad` is the
    fraction of images that may be rejected. Raises `ResoluteError` on values out of range.
    """

    src: Path
    out: Path
    resolutions: tuple[int, ...]
    val: Path | None = None
    val_list: Path | None = None
    val_frac: float = 0.1
    margin: float = MARGIN
    quality: int = 90
    workers: int = 0  # 0: as many as this process may use
    max_bad: float = 0.01
    shard_samples: int = 4096
    seed: int = 0
    rebuild: bool = False

    def __post_init__(self) -> None:
        res = self.resolutions
        text = ",".join(map(str, res))
        if not res:
            raise ResoluteError("RES: no resolution, expected px such as 128,160,224; set RES (--res)")
        if min(res) < MIN_RES_PX:
            raise ResoluteError(
                f"RES: too small, got {text}, expected at least {MIN_RES_PX} px each; change RES (--res)"
            )
        if list(res) != sorted(set(res)):
            raise ResoluteError(
                f"RES: not strictly ascending, got {text}, expected {','.join(map(str, sorted(set(res))))}; "
                "change RES (--res)"
            )
        _within("--quality", self.quality, 1, 100)
        _within("--margin", self.margin, 1.0, 8.0)
        _within("--max-bad", self.max_bad, 0.0, 1.0)
        _within("--shard-samples", self.shard_samples, 1, 1 << 20)
        _within("--workers", self.workers, 0, 4096)
        _within("--seed", self.seed, 0, (1 << 63) - 1)
        if not 0.0 < self.val_frac < 1.0:
            raise ResoluteError(
                f"--val-frac: out of range, got {self.val_frac}, expected above 0 and below 1; "
                "hold out 0.1, or name the images with --val or --val-list"
            )
        if self.val is not None and self.val_list is not None:
            raise ResoluteError("--val: given together with --val-list, expected one of them; drop the other")

    @property
    def short_sides(self) -> tuple[int, ...]:
        """Stored short side in px for each resolution: round(res * margin), as `ShardSet.short_side`."""
        return tuple(round(res * self.margin) for res in self.resolutions)

    @property
    def worker_count(self) -> int:
        return self.workers or len(os.sched_getaffinity(0))

    def in_manifest(self) -> dict[str, Any]:
        """What decides the bytes of the set, and nothing else: no paths, no number of workers."""
        val: dict[str, Any] = {"how": "frac", "frac": self.val_frac}
        if self.val is not None or self.val_list is not None:
            val = {"how": "folder" if self.val is not None else "list"}
        return {
            "resolutions": list(self.resolutions),
            "margin": self.margin,
            "quality": self.quality,
            "shard_samples": self.shard_samples,
            "seed": self.seed,
            "val": val,
        }


def parse_resolutions(text: str) -> tuple[int, ...]:
    """`"128,160,224"` -> `(128, 160, 224)`. Raises `ResoluteError` if a part is not a whole number."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ResoluteError(
            f"RES: not a list of numbers, got {text!r}, expected px such as 128,160,224; change RES (--res)"
        ) from None


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ResoluteError(
            f"{name}: out of range, got {value}, expected {low} to {high}; choose a value in range"
        )
