"""Messages between a run and its worker processes: what goes to them, and what comes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from prep.sources.image_ref import ByteRange

__all__ = ["Batch", "BatchResult", "EncodeOptions", "Times"]


@dataclass(frozen=True, kw_only=True)
class EncodeOptions:
    """What is the same for every image: JPEG quality, digits of a label, `codec_versions` that workers must have."""

    quality: int
    label_digits: int
    codecs: Mapping[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Consecutive samples of one shard: the first one's key, where they lie and their class numbers.

    `short_sides` are in px, one a tar. Images in `skip` (position in `places` -> reason) are not touched: they
    have killed a worker.
    """

    first_key: int
    byte_ranges: tuple[ByteRange, ...]
    labels: tuple[int, ...]
    short_sides: tuple[int, ...]
    skip: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Times:
    """A worker's seconds, by what they went into; `slow`: the (seconds, key) of the slowest image."""

    read_s: float = 0.0
    decode_s: float = 0.0
    convert_s: float = 0.0  # resize and encode
    slowest: tuple[float, int] = (0.0, 0)


@dataclass(frozen=True, kw_only=True)
class BatchResult:
    """What a task became.

    `tars[r]` holds its members at resolution r, whole 512-byte blocks. `samples` (n,) SAMPLE (`fold` 0);
    `sources` (n,) SOURCE; `stored[r]` (n,) STORED counts offsets from the start of `tars[r]` and leaves
    `shard` 0; `rejects` are (key, reason). `read_bytes`: of the input files.
    """

    tars: tuple[bytes, ...]
    samples: NDArray[Any]
    sources: NDArray[Any]
    stored: tuple[NDArray[Any], ...]
    rejects: tuple[tuple[int, str], ...]
    read_bytes: int
    times: Times
