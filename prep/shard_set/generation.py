"""`GenerationSpec`: what decides the bytes of the shards of a generation, except for its resolutions.

The first run makes generation 0 of a set, and each extension another one. Keys and shards of a generation are numbered
after those of the older ones. Its specification is a file in `records/`, which is written before any shard and never
changed; its manifest, written last, repeats it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from resolute.pipeline.dataset.format import generation_mark
from resolute.pipeline.dataset.manifest import FORMAT, VERSION
from resolute.pipeline.dataset.target import Target
from resolute.prep.shard_set.record import RECORDS

__all__ = ["GenerationSpec", "spec_name"]


def spec_name(generation: int) -> str:
    """The file with the specification of a generation."""
    return f"{RECORDS}/plan{generation_mark(generation, '-')}.json"


@dataclass(frozen=True, kw_only=True)
class GenerationSpec:
    """The specification of a generation.

    `settings` are those that decide the bytes, `codecs` the versions of the libraries that do; `target` and `classes`
    say what the photos are labelled with; `source` is a summary of the photos (`Inputs.summary`). `images`, `first_key`
    and `first_shard` map each split to the number of photos, and to the numbers of the first key and shard; shards have
    `settings["shard_samples"]` photos each, the last one of a split fewer. `previous` is the hash of the older
    generation, None for generation 0. `photos` is the number of rows and the hash of the list of photos, empty until
    that is written; `removed` and `changed` count photos of older generations that the source lacked or had changed.
    """

    number: int = 0
    settings: Mapping[str, Any]
    classes: Sequence[str]
    target: Mapping[str, Any]
    codecs: Mapping[str, str]
    source: Mapping[str, Any]
    images: Mapping[str, int]
    first_key: Mapping[str, int]
    first_shard: Mapping[str, int]
    previous: str | None = None
    removed: int = 0
    changed: int = 0
    photos: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {"format": FORMAT, "version": VERSION, **values, "classes": list(self.classes)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> GenerationSpec:
        """The inverse of `to_json`. Raises `ValueError` for anything else."""
        try:
            return cls(**{name: value for name, value in values.items() if name not in ("format", "version")})
        except TypeError as error:
            raise ValueError(str(error)) from None

    @cached_property
    def hash(self) -> str:
        """SHA-256 (hex), which the records of its shards name."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    @property
    def sample_target(self) -> Target:
        return Target.from_manifest({"target": self.target, "classes": self.classes})

    @property
    def near_copies(self) -> str:
        """The setting NEAR_COPIES."""
        setting: str = self.settings.get("near_copies", "find")
        return setting

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.images)

    def shards(self, split: str) -> range:
        """The numbers of the shards of a split."""
        first = self.first_shard[split]
        return range(first, first - (-self.images[split] // self.settings["shard_samples"]))

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """Yield (split, number) of each shard."""
        return ((split, number) for split in self.splits for number in self.shards(split))

    def __len__(self) -> int:
        """The number of shards."""
        return sum(len(self.shards(split)) for split in self.splits)

    def split_keys(self, split: str) -> range:
        """The keys of the photos of a split."""
        return range(self.first_key[split], self.first_key[split] + self.images[split])

    def keys(self, split: str, number: int) -> range:
        """The keys of the photos of a shard."""
        size = self.settings["shard_samples"]
        return self.split_keys(split)[(number - self.first_shard[split]) * size :][:size]

    def shard_of(self, split: str, key: int) -> int:
        """The number of the shard of a key."""
        return self.first_shard[split] + (key - self.first_key[split]) // int(self.settings["shard_samples"])
