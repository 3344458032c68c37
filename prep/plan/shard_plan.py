"""`ShardPlan`: the division of each split's images into shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from prep.config import Settings
from prep.convert.reject import NOT_THERE
from prep.shards.writer import ShardSpec
from prep.sources.image_ref import MISSING

from .inputs import Inputs
from .shuffle import shuffled

__all__ = ["ShardPlan"]


class ShardPlan:
    """The samples of each shard, as a pure function of settings and inputs. `plan` is the plan's hash."""

    def __init__(self, settings: Settings, inputs: Inputs, plan: str = "") -> None:
        self._settings, self._inputs, self._plan = settings, inputs, plan

    @property
    def shards(self) -> Mapping[str, int]:
        """{split: number of its shards}"""
        return {name: -(-len(split) // self._settings.shard_samples) for name, split in self._inputs.splits.items()}

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """Yield (split, number) of every shard."""
        return ((name, number) for name, shards in self.shards.items() for number in range(shards))

    def keys(self, name: str, number: int) -> range:
        """The keys of a shard's images."""
        first = number * self._settings.shard_samples
        return range(first, min(first + self._settings.shard_samples, len(self._inputs.splits[name])))

    def _ranks(self, name: str, keys: range | Sequence[int]) -> NDArray[np.int64]:
        """The positions of the samples `keys` among the sorted images of their split."""
        return shuffled(self._settings.seed, name, len(self._inputs.splits[name]), np.asarray(keys, np.int64))

    def spec(
        self, name: str, number: int, resolutions: tuple[int, ...], *, contents: str | None = None,
        limit: int | None = None,
    ) -> ShardSpec:  # fmt: skip
        """Everything needed to convert a shard, or its first `limit` samples, at `resolutions`; see `ShardSpec`."""
        split, keys = self._inputs.splits[name], self.keys(name, number)[:limit]
        ranks = self._ranks(name, keys)
        positions = split.positions[ranks]
        return ShardSpec(
            plan=self._plan,
            contents=contents,
            split=name,
            number=number,
            first_key=keys.start,
            byte_ranges=tuple(split.catalog.byte_range(i) for i in positions.tolist()),
            labels=split.catalog.labels[positions],
            folds=None if split.folds is None else split.folds[ranks],
            resolutions=resolutions,
            short_sides=tuple(self._settings.short_side(res) for res in resolutions),
        )

    def names_of(self, name: str, keys: Sequence[int]) -> list[str]:
        """The names of the input images of samples."""
        split = self._inputs.splits[name]
        return [split.catalog.name(i) for i in split.positions[self._ranks(name, keys)].tolist()]

    def not_there(self, shards: Iterable[tuple[str, int]]) -> dict[tuple[str, int], str]:
        """{(split, key): reason} of the images in `shards` that were already missing when the source was listed."""
        rejects: dict[tuple[str, int], str] = {}
        if not any((catalog.entries["packed"] == MISSING).any() for catalog in self._inputs.catalogs.values()):
            return rejects
        for name, number in shards:
            split, keys = self._inputs.splits[name], self.keys(name, number)
            packed = split.catalog.entries["packed"][split.positions[self._ranks(name, keys)]]
            rejects |= {(name, keys.start + i): NOT_THERE for i in np.flatnonzero(packed == MISSING).tolist()}
        return rejects
