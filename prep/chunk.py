"""What goes to a worker process, and what comes back?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

__all__ = ["Chunk", "Job", "Task"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is the same for every image: short sides in px, JPEG quality, digits of a label."""

    short_sides: tuple[int, ...]
    quality: int
    label_digits: int


@dataclass(frozen=True, kw_only=True)
class Task:
    """Consecutive samples of one shard: the first one's key, full paths and class numbers."""

    first_key: int
    paths: tuple[str, ...]
    labels: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """What a task became.

    `tars[r]` holds its members at resolution r, whole 512-byte blocks. `samples` (n,) SAMPLE; `stored[r]`
    (n,) STORED counts offsets from the start of `tars[r]` and leaves `shard` 0; `rejects` are (key, reason).
    """

    tars: tuple[bytes, ...]
    samples: NDArray[Any]
    stored: tuple[NDArray[Any], ...]
    rejects: tuple[tuple[int, str], ...]
