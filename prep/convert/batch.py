"""The messages between a run and its worker processes: options and batches go out, batch results come back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from prep.sources.image_ref import ByteRange

__all__ = ["Batch", "BatchResult", "EncodeOptions", "Times"]


@dataclass(frozen=True, kw_only=True)
class EncodeOptions:
    """Options common to all images of a run.

    `quality` is libjpeg's, 1..100; `label_digits` the width of a label file; `codecs` the `codec_versions` that a
    worker must have, None if any will do.
    """

    quality: int
    label_digits: int
    codecs: Mapping[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Consecutive samples of a shard: the key of the first, where their images are stored, and their class numbers.

    `short_sides` are in px, one per resolution. Images in `skip` (position in `byte_ranges` -> reason) are rejected
    without being touched, because they have crashed or hung a worker.
    """

    first_key: int
    byte_ranges: tuple[ByteRange, ...]
    labels: tuple[int, ...]
    short_sides: tuple[int, ...]
    skip: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Times:
    """A worker's seconds by kind of work; `slowest` is the (seconds, key) of the slowest image."""

    read_s: float = 0.0
    decode_s: float = 0.0
    convert_s: float = 0.0  # resize and encode
    slowest: tuple[float, int] = (0.0, 0)


@dataclass(frozen=True, kw_only=True)
class BatchResult:
    """A converted batch.

    `tars[r]` are the tar members at resolution r, padded to 512-byte blocks. `samples` is (n,) SAMPLE with `fold` 0,
    `sources` (n,) SOURCE, and `stored[r]` (n,) STORED with offsets from the start of `tars[r]` and `shard` 0. `rejects`
    are (key, reason); `read_bytes` counts the bytes of the input files.
    """

    tars: tuple[bytes, ...]
    samples: NDArray[Any]
    sources: NDArray[Any]
    stored: tuple[NDArray[Any], ...]
    rejects: tuple[tuple[int, str], ...]
    read_bytes: int
    times: Times
