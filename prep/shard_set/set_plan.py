"""`SetPlan`: a set to be made, all but its images; and `ShardLayout`, the division of its splits into shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import floor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resolute.errors import strip_credentials
from resolute.pipeline.dataset.format import label_digits, manifest_bytes
from resolute.pipeline.dataset.target import Target
from resolute.prep.convert.batch import EncodeOptions
from resolute.prep.shard_set.record import plan_hash
from resolute.prep.storage.output import RUN_FOLDER

__all__ = ["PLAN_FOLDER", "SET_PLAN", "SetPlan", "ShardLayout", "layout_of", "near_copies_of"]

PLAN_FOLDER = f"{RUN_FOLDER}/plan"  # in OUT while jobs make a set: the photos of its shards
SET_PLAN = f"{PLAN_FOLDER}/set.json"  # written last: if it is valid, the plan is complete
_FORMAT = "resolute-jobs-2"


@dataclass(frozen=True, kw_only=True)
class ShardLayout:
    """The shards of each split: `shard_samples` images each, the last of a generation fewer.

    `generations` has for each generation {split: number of its images}; keys and shards of a generation are numbered
    after those of the older ones. Only generations from `first` on are to be made: `images`, `shards`, the length and
    the iteration are about those. Iterating yields (split, number) of every shard: all of the first split, then those
    of the next.
    """

    generations: tuple[Mapping[str, int], ...]
    shard_samples: int
    first: int = 0

    @cached_property
    def _first_keys(self) -> dict[str, NDArray[np.int64]]:
        """{split: first key of each generation, and the end}"""
        return {split: np.cumsum([0, *self._images(split)]) for split in self.generations[0]}

    @cached_property
    def _first_shards(self) -> dict[str, NDArray[np.int64]]:
        """{split: first shard of each generation, and the end}"""
        counts = {split: [-(-n // self.shard_samples) for n in self._images(split)] for split in self.generations[0]}
        return {split: np.cumsum([0, *numbers]) for split, numbers in counts.items()}

    def _images(self, split: str) -> list[int]:
        return [images.get(split, 0) for images in self.generations]

    @property
    def images(self) -> dict[str, int]:
        """{split: number of its images}"""
        return {split: sum(self._images(split)[self.first :]) for split in self.generations[0]}

    @property
    def shards(self) -> dict[str, range]:
        """{split: numbers of its shards}"""
        return {split: range(int(starts[self.first]), int(starts[-1])) for split, starts in self._first_shards.items()}

    def __len__(self) -> int:
        return sum(map(len, self.shards.values()))

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return ((split, number) for split, shards in self.shards.items() for number in shards)

    def shards_of(self, split: str, generation: int) -> range:
        """The numbers of a generation's shards."""
        starts = self._first_shards[split]
        return range(int(starts[generation]), int(starts[generation + 1]))

    def keys_of(self, split: str, generation: int) -> range:
        """The keys of a generation's images."""
        starts = self._first_keys[split]
        return range(int(starts[generation]), int(starts[generation + 1]))

    def has(self, split: str, number: int) -> bool:
        """Whether there is such a shard, in any generation."""
        return split in self._first_shards and 0 <= number < self._first_shards[split][-1]

    def generation(self, split: str, number: int) -> int:
        """The generation of a shard."""
        return int(np.searchsorted(self._first_shards[split], number, side="right")) - 1

    def keys(self, split: str, number: int) -> range:
        """The keys of a shard's images."""
        generation = self.generation(split, number)
        keys = self.keys_of(split, generation)
        first = keys.start + (number - self.shards_of(split, generation).start) * self.shard_samples
        return range(first, min(first + self.shard_samples, keys.stop))

    def generations_of_keys(self, split: str, keys: Sequence[int] | NDArray[Any]) -> NDArray[np.int64]:
        """(n,) the generations of samples."""
        return np.searchsorted(self._first_keys[split], np.asarray(keys, np.int64), side="right") - 1

    def shard_of(self, split: str, key: int) -> int:
        """The shard of a sample."""
        generation = int(self.generations_of_keys(split, [key])[0])
        inside = (key - self.keys_of(split, generation).start) // self.shard_samples
        return self.shards_of(split, generation).start + inside


@dataclass(frozen=True, kw_only=True)
class SetPlan:
    """Everything about a set to be made but its images.

    `plans` are the plans of its generations, each the content of its file in records/; `src` is the source, for
    messages; `short_sides` maps resolution to stored short side, both px; `max_bad` (0..1) is the fraction of images
    that may be rejected. `ignored` counts things in the source that are not images of a class, by kind, and `listed`
    all entries (0: unknown); `warnings` are about the inputs; `damaged` are the files that `verify` had listed when the
    plan was made; `signature` is the state of the source then, None if it is unknown; `variables` are those of
    source.json.
    """

    plans: tuple[Mapping[str, Any], ...]
    src: str
    layout: ShardLayout
    short_sides: Mapping[int, int]
    max_bad: float
    ignored: Counter[str]
    warnings: tuple[str, ...]
    damaged: frozenset[str]
    listed: int = 0
    signature: Mapping[str, str] | None = None
    variables: Mapping[str, str] | None = None

    @property
    def max_rejects(self) -> int:
        """The number of images that may be rejected: at least one, unless `max_bad` is 0."""
        share = self.max_bad * sum(self.layout.images.values())
        return max(int(self.max_bad > 0), floor(round(share, 6)))  # why rounded: 0.29 * 100 is 28.999999999999996

    @cached_property
    def hashes(self) -> tuple[str, ...]:
        """`plan_hash` of each generation."""
        return tuple(map(plan_hash, self.plans))

    def hash_of(self, split: str, number: int) -> str:
        """The hash of the plan of a shard's generation; "" if there is no such shard."""
        return self.hashes[self.layout.generation(split, number)] if self.layout.has(split, number) else ""

    def options(self, generation: int) -> EncodeOptions:
        plan = self.plans[generation]
        return EncodeOptions(
            quality=plan["settings"]["quality"],
            label_digits=label_digits(len(plan["classes"])),
            samples=Target.from_manifest(plan).sample_dtype,
            codecs=plan["codecs"],
            max_megapixels=plan["settings"].get("max_megapixels"),
            grey_bits=plan["settings"].get("grey_range", 16),
            described_side=min(self.short_sides.values(), default=0) if near_copies_of(plan) != "none" else 0,
        )

    def by_generation(self, shards: Iterable[tuple[str, int]]) -> dict[int, list[tuple[str, int]]]:
        """`shards` by generation, ascending."""
        groups: dict[int, list[tuple[str, int]]] = {}
        for shard in shards:
            groups.setdefault(self.layout.generation(*shard), []).append(shard)
        return dict(sorted(groups.items()))

    def to_bytes(self) -> bytes:
        """The file for jobs, without `plans`, which OUT has anyway: the hash of the newest, which names the others."""
        return manifest_bytes(
            {
                "format": _FORMAT,
                "plan": self.hashes[-1],
                "src": strip_credentials(self.src),
                "first": self.layout.first,
                "short_sides": {str(res): side for res, side in self.short_sides.items()},
                "max_bad": self.max_bad,
                "ignored": self.ignored,
                "listed": self.listed,
                "warnings": self.warnings,
                "damaged": sorted(self.damaged),
                "signature": self.signature,
                "variables": self.variables,
            }
        )

    @classmethod
    def parse(cls, values: Mapping[str, Any], plans: Sequence[Mapping[str, Any]]) -> SetPlan:
        """The inverse of `to_bytes`. Raises `ValueError` for a file of another version, or of other `plans`."""
        if values.get("format") != _FORMAT:
            raise ValueError(f"format {values.get('format')}, expected {_FORMAT}")
        hashes = list(map(plan_hash, plans))
        if values["plan"] not in hashes:
            raise ValueError("shards planned with other settings, photos or codecs, expected those of the set in OUT")
        # why: plans of an extension that was abandoned may follow
        plans = tuple(plans[: hashes.index(values["plan"]) + 1])
        return cls(
            plans=plans,
            src=values["src"],
            layout=layout_of(plans, first=values["first"]),
            short_sides={int(res): side for res, side in values["short_sides"].items()},
            max_bad=values["max_bad"],
            ignored=Counter(values["ignored"]),
            listed=values.get("listed", 0),
            warnings=tuple(values["warnings"]),
            damaged=frozenset(values["damaged"]),
            signature=values.get("signature"),
            variables=values.get("variables"),
        )


def near_copies_of(plan: Mapping[str, Any]) -> str:
    """The setting NEAR_COPIES of a plan."""
    setting: str = plan["settings"].get("near_copies", "find")
    return setting


def layout_of(plans: Sequence[Mapping[str, Any]], *, first: int = 0) -> ShardLayout:
    """The layout of a set whose generations have these plans."""
    return ShardLayout(
        generations=tuple(plan["images"] for plan in plans),
        shard_samples=plans[0]["settings"]["shard_samples"],
        first=first,
    )
