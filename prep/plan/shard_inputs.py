"""`ShardInputs`: the images of one shard, and the file that takes them to another process or machine.

The file is one line of JSON, the ENTRY rows of the images, their targets if these are not classes, the blob of their
names, and the SHA-256 of all that: less than 100 bytes per image, besides labels or values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from resolute.pipeline.dataset.format import shard_name
from resolute.prep.shards.record import pack_rows, unpack_rows
from resolute.prep.shards.writer import ShardSpec

from .catalog import ENTRY, ByteRanges, Catalog

__all__ = ["ShardInputs"]

_FORMAT = "resolute-shard-inputs-2"


@dataclass(frozen=True, kw_only=True)
class ShardInputs:
    """The images of a shard, in key order; those in `skip` (place -> reason) are rejected without being read."""

    split: str
    number: int
    first_key: int
    images: Catalog
    skip: Mapping[int, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return shard_name(self.split, self.number)

    def spec(self, short_sides: Mapping[int, int], *, plan: str = "", contents: str | None = None) -> ShardSpec:
        """Everything needed to convert the shard; `short_sides` maps resolution to stored short side, both px."""
        return ShardSpec(
            plan=plan,
            contents=contents,
            split=self.split,
            number=self.number,
            first_key=self.first_key,
            byte_ranges=ByteRanges(self.images),
            labels=self.images.target_column(),
            resolutions=tuple(short_sides),
            short_sides=tuple(short_sides.values()),
            skip=self.skip,
        )

    def to_bytes(self, plan: str) -> bytes:
        """The file's content; `plan` is the hash of the set's plan."""
        header = {
            "format": _FORMAT,
            "plan": plan,
            "split": self.split,
            "number": self.number,
            "first_key": self.first_key,
            "images": len(self.images),
            "root": self.images.root,
            "containers": self.images.containers,
            "skip": list(self.skip.items()),
        }
        targets = b""
        if self.images.targets is not None:
            column = self.images.target_column()
            header["targets"] = [column.dtype.str, column.shape[1]]
            targets = column.tobytes()
        return pack_rows(header, self.images.entries.tobytes(), targets, self.images.names[:])

    @classmethod
    def parse(cls, data: bytes, plan: str) -> ShardInputs:
        """The inverse of `to_bytes`. Raises `ValueError` for damaged data, another version or another plan."""
        header, rows = unpack_rows(data)
        if (header.get("format"), header.get("plan")) != (_FORMAT, plan):
            raise ValueError("the file of another plan or version")
        count, end, targets = header["images"], header["images"] * ENTRY.itemsize, None
        if "targets" in header:
            dtype, width = header["targets"]
            targets = np.frombuffer(rows, dtype, count * width, end).reshape(count, width)
            end += targets.nbytes
        return cls(
            split=header["split"], number=header["number"], first_key=header["first_key"], skip=dict(header["skip"]),
            images=Catalog(
                root=header["root"], entries=np.frombuffer(rows, ENTRY, count), names=rows[end:],
                containers=tuple(header["containers"]), classes=(), ignored={}, targets=targets,
            ),
        )  # fmt: skip
