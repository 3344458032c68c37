"""`WorkList`: the generations of a set that are to be made, and all else that a run has to know except for the photos.

It is a file in OUT/.prep/plan while jobs make a set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from math import floor
from typing import Any

from resolute.errors import strip_credentials
from resolute.pipeline.dataset.manifest import manifest_bytes
from resolute.prep.storage.output import RUN_FOLDER

from .generation import GenerationSpec

__all__ = ["PLAN_FOLDER", "WORK_LIST", "Shard", "WorkList"]

Shard = tuple[str, int]  # split and number
PLAN_FOLDER = f"{RUN_FOLDER}/plan"  # in OUT while jobs make a set: the photos of its shards
WORK_LIST = f"{PLAN_FOLDER}/set.json"  # written last: if it is valid, the plan is complete
_FORMAT = "resolute-jobs-3"


@dataclass(frozen=True, kw_only=True)
class WorkList:
    """What is to be made of a set: all shards of `generations`, consecutive ones, at the resolutions of `short_sides`.

    `src` is the source, for messages; `short_sides` maps resolution to stored short side, both px; `max_bad` (0..1) is
    the fraction of images that may be rejected. `ignored` counts things in the source that are not images of a class,
    by kind, and `listed` all entries; `warnings` are about the inputs; `damaged` are the files that `verify` had listed
    when the list was made; `signature` is the state of the source then, None if it is unknown; `variables` are those of
    source.json.
    """

    generations: tuple[GenerationSpec, ...]
    src: str
    short_sides: Mapping[int, int]
    max_bad: float
    ignored: Counter[str]
    listed: int = 0
    warnings: tuple[str, ...] = ()
    damaged: frozenset[str] = frozenset()
    signature: Mapping[str, str] | None = None
    variables: Mapping[str, str]

    def __iter__(self) -> Iterator[Shard]:
        return (shard for spec in self.generations for shard in spec)

    def __len__(self) -> int:
        """The number of shards."""
        return sum(map(len, self.generations))

    @property
    def images(self) -> dict[str, int]:
        """{split: number of its images}"""
        first = self.generations[0]
        return {split: sum(spec.images[split] for spec in self.generations) for split in first.splits}

    @property
    def max_rejects(self) -> int:
        """The number of images that may be rejected: at least one, unless `max_bad` is 0."""
        share = self.max_bad * sum(self.images.values())
        return max(int(self.max_bad > 0), floor(round(share, 6)))  # why rounded: 0.29 * 100 is 28.999999999999996

    def hash_of(self, split: str, number: int) -> str:
        """The hash of the generation of a shard; "" if there is no such shard."""
        specs = (spec for spec in self.generations if split in spec.images and number in spec.shards(split))
        return next((spec.hash for spec in specs), "")

    def keys(self, split: str, number: int) -> range:
        """The keys of the images of a shard."""
        return next(spec for spec in self.generations if number in spec.shards(split)).keys(split, number)

    def shard_of(self, split: str, key: int) -> int:
        """The number of the shard of a key."""
        return next(spec for spec in self.generations if key in spec.split_keys(split)).shard_of(split, key)

    def number_of_images(self, shards: Iterable[Shard]) -> int:
        return sum(len(self.keys(*shard)) for shard in shards)

    def to_bytes(self) -> bytes:
        """The file for jobs, in which a generation is its number and hash: its specification is in OUT anyway."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return manifest_bytes(
            {
                "format": _FORMAT,
                **values,
                "generations": [[spec.number, spec.hash] for spec in self.generations],
                "src": strip_credentials(self.src),
                "short_sides": {str(res): side for res, side in self.short_sides.items()},
                "damaged": sorted(self.damaged),
            }
        )

    @classmethod
    def parse(cls, values: Mapping[str, Any], spec_of: Callable[[int], GenerationSpec | None]) -> WorkList:
        """The inverse of `to_bytes`; `spec_of(number)` are the generations of the set, None for one that is not there.

        Raises `ValueError` for a file of another version, or of other generations.
        """
        if values.get("format") != _FORMAT:
            raise ValueError(f"format {values.get('format')}, expected {_FORMAT}")
        found = [spec_of(number) for number, _ in values["generations"]]
        specs = tuple(spec for spec in found if spec is not None)
        if [spec.hash for spec in specs] != [own for _, own in values["generations"]]:
            raise ValueError("shards planned with other settings, photos or codecs, expected those of the set in OUT")
        return cls(
            **{name: value for name, value in values.items() if name != "format"}
            | {
                "generations": specs,
                "short_sides": {int(res): side for res, side in values["short_sides"].items()},
                "ignored": Counter(values["ignored"]),
                "warnings": tuple(values["warnings"]),
                "damaged": frozenset(values["damaged"]),
            }
        )
