"""The messages between a run and its worker processes: options and batches go out, batch results come back."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resolute.pipeline.dataset.format import SAMPLE
from resolute.prep.sources.image_ref import ByteRange

__all__ = ["Batch", "BatchResult", "EncodeOptions", "PixelFacts", "Times", "receive_answer", "send_answer"]


@dataclass(frozen=True, kw_only=True)
class EncodeOptions:
    """Options common to all images of a run.

    `quality` is libjpeg's, 1..100; `samples` the `Target.sample_dtype` of the set, `label_digits` the width of a class
    number in its file; `codecs` the `codec_versions` that a worker must have, None if any will do. Photos of more than
    `max_megapixels` are rejected; None: of more than `decode.MAX_PIXELS`. 16-bit samples use `grey_bits` of their bits.
    `servers` are as in `fetch_many`. Photos are described (`near_copies/descriptor.py`) by the pixels that are stored
    with the short side `described_side` (px); 0: they are not.
    """

    quality: int
    label_digits: int
    samples: np.dtype[Any] = SAMPLE
    codecs: Mapping[str, str] | None = None
    max_megapixels: int | None = None
    grey_bits: int = 16
    servers: tuple[str, ...] = ()
    described_side: int = 0


@dataclass(frozen=True, kw_only=True)
class PixelFacts:
    """What decoding found out about photos that were accepted.

    Counts of those that were `converted` from another colour profile to sRGB, of those whose profile was `unusable`
    and ignored, and of those that are `deep` (16-bit samples), with the `largest` sample of these.
    """

    converted: int = 0
    unusable: int = 0
    deep: int = 0
    largest: int = 0

    @classmethod
    def total(cls, parts: Iterable[PixelFacts]) -> PixelFacts:
        rows = list(parts)
        return cls(
            converted=sum(row.converted for row in rows),
            unusable=sum(row.unusable for row in rows),
            deep=sum(row.deep for row in rows),
            largest=max((row.largest for row in rows), default=0),
        )

    def to_json(self) -> dict[str, int]:
        """The facts that are not 0, the inverse of `PixelFacts(**values)`."""
        return {name: int(value) for name, value in asdict(self).items() if value}


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Consecutive samples of a shard: the key of the first, where their images are stored, and their targets.

    `labels` are class numbers, or (n, …) targets as in `EncodeOptions.samples`.
    `short_sides` are in px, one per resolution. Images in `skip` (position in `byte_ranges` -> reason) are rejected
    without being touched, because they have crashed or hung a worker.
    """

    first_key: int
    byte_ranges: tuple[ByteRange, ...]
    labels: Sequence[int] | NDArray[Any]
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

    `tars[r]` are the tar members at resolution r, padded to 512-byte blocks. `samples` is (n,) `EncodeOptions.samples`,
    `sources` (n,) SOURCE, and `stored[r]` (n,) STORED with offsets from the start of `tars[r]` and `shard` 0. `rejects`
    are (key, reason); `read_bytes` counts the bytes of the input files; `facts` are about the samples. `hashes` is (n,
    HASHES) uint64, None unless the photos were described.
    """

    tars: tuple[bytes | bytearray, ...]
    samples: NDArray[Any]
    sources: NDArray[Any]
    stored: tuple[NDArray[Any], ...]
    rejects: tuple[tuple[int, str], ...]
    read_bytes: int
    times: Times
    facts: PixelFacts = PixelFacts()
    hashes: NDArray[np.uint64] | None = None


def send_answer(conn: Connection, number: int, answer: Any) -> None:
    """Send `answer`; the tars of a `BatchResult`, most of its bytes, are not pickled, which saves copies of them."""
    tars = answer.tars if isinstance(answer, BatchResult) else ()
    conn.send((number, replace(answer, tars=()) if tars else answer, [len(tar) for tar in tars]))
    for tar in tars:
        view = memoryview(tar)
        while view:
            view = view[os.write(conn.fileno(), view) :]


def receive_answer(conn: Connection) -> tuple[int, Any]:
    """The (number, answer) of `send_answer`. Raises `EOFError` or `OSError` if the sender has died."""
    number, answer, sizes = conn.recv()
    tars = tuple(bytearray(size) for size in sizes)
    for tar in tars:
        view = memoryview(tar)
        while view:
            received = os.readv(conn.fileno(), [view])
            if not received:
                raise EOFError
            view = view[received:]
    return number, replace(answer, tars=tars) if tars else answer
