"""`ShardPlan`: the division of each split's images into shards, a pure function of settings and inputs.

The images of one shard are computed from its number alone, without a list of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from resolute.errors import ResoluteError
from resolute.prep.convert.reject import NOT_THERE
from resolute.prep.shards.duplicates import InputNames
from resolute.prep.sources.image_ref import MISSING

from .catalog import Catalog
from .generations import Comparison
from .set_plan import ShardLayout
from .shard_inputs import ShardInputs
from .shuffle import shuffled
from .splits import Split

__all__ = ["FinishedGeneration", "GenerationImages", "ShardPlan"]


class GenerationImages:
    """The images of one generation, by split and index: the place of each among its sorted images."""

    def __init__(self, splits: Mapping[str, Split]) -> None:
        self._splits = splits

    def catalog(self, split: str) -> Catalog:
        return self._splits[split].catalog

    def positions(self, split: str, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """(n,) positions in the catalogue, -1 for images that are gone or have changed."""
        return self._splits[split].positions[indices].astype(np.int64)

    def names(self, split: str, indices: NDArray[np.int64]) -> list[str]:
        catalog = self.catalog(split)
        return [catalog.name(i) for i in self.positions(split, indices).tolist()]


class FinishedGeneration(GenerationImages):
    """As `GenerationImages`, for a finished generation: `number` of `comparison`."""

    def __init__(self, comparison: Comparison, catalogs: Mapping[str, Catalog], number: int) -> None:
        self._comparison, self._catalogs, self._number = comparison, catalogs, number

    def catalog(self, split: str) -> Catalog:
        return self._catalogs.get(split, self._catalogs["train"])

    def positions(self, split: str, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._comparison.positions[self._number][split][indices]

    def names(self, split: str, indices: NDArray[np.int64]) -> list[str]:
        return [self._comparison.name((self._number, split, i)) for i in indices.tolist()]


@dataclass(frozen=True, kw_only=True)
class ShardPlan(InputNames):
    """The samples of each shard of `layout`; `images` are those of its generations, which are divided by `seed`.

    `rejected` {(split, key): reason} are the inputs of finished generations that are not in the set; they are rejected
    again without being read.
    """

    seed: int
    layout: ShardLayout
    images: Sequence[GenerationImages]
    rejected: Mapping[tuple[str, int], str]
    where: str  # OUT and SRC, for messages
    src: str

    @property
    def containers(self) -> list[str]:
        """The archives that hold images, sorted."""
        catalogs = [images.catalog(split) for images in self.images for split in self.layout.generations[0]]
        return sorted({path for catalog in catalogs for path in catalog.containers})

    def _indices(self, split: str, generation: int, keys: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """The indices of the samples `keys` of a generation among the sorted images of their split."""
        own = self.layout.keys_of(split, generation)
        local = np.asarray(keys, np.int64) - own.start
        return shuffled(self.seed, split, len(own), local, generation=generation)

    def inputs(self, split: str, number: int, *, limit: int | None = None) -> ShardInputs:
        """The images of a shard, or its first `limit` images. Raises `ResoluteError` if some are gone."""
        keys, generation = self.layout.keys(split, number)[:limit], self.layout.generation(split, number)
        images = self.images[generation]
        positions = images.positions(split, self._indices(split, generation, keys))
        skip = {i: self.rejected[split, key] for i, key in enumerate(keys) if (split, key) in self.rejected}
        lost = [i for i in np.flatnonzero(positions < 0).tolist() if i not in skip]
        if lost:
            raise self._lost({(split, number): [keys[i] for i in lost]})
        return ShardInputs(
            split=split, number=number, first_key=keys.start, skip=skip,
            images=images.catalog(split).select(np.maximum(positions, 0)),
        )  # fmt: skip

    def check_there(self, shards: Iterable[tuple[str, int]]) -> None:
        """Raise `ResoluteError` if images of `shards` are gone or have changed since these were made."""
        lost = {}
        for split, number in shards:
            keys, generation = self.layout.keys(split, number), self.layout.generation(split, number)
            positions = self.images[generation].positions(split, self._indices(split, generation, keys))
            gone = [keys[i] for i in np.flatnonzero(positions < 0).tolist() if (split, keys[i]) not in self.rejected]
            if gone:
                lost[split, number] = gone
        if lost:
            raise self._lost(lost)

    def _lost(self, lost: Mapping[tuple[str, int], Sequence[int]]) -> ResoluteError:
        (split, _), keys = next(iter(lost.items()))
        (first,) = self.names(split, keys[:1])
        count, shards = sum(map(len, lost.values())), len(lost)
        return ResoluteError(
            f"{self.where}: {shards} shard{'s'[:shards != 1]} cannot be made, got {count} of their photos gone from "
            f"{self.src} or changed, such as {first}, expected them as they were; put them back, or start over with "
            "REBUILD=1 (--rebuild)"
        )

    def names(self, split: str, keys: Sequence[int]) -> list[str]:
        generations = self.layout.generations_of_keys(split, keys)
        names = [""] * len(keys)
        for generation in np.unique(generations).tolist():
            chosen = np.flatnonzero(generations == generation)
            indices = self._indices(split, generation, np.asarray(keys, np.int64)[chosen])
            for at, name in zip(chosen.tolist(), self.images[generation].names(split, indices), strict=True):
                names[at] = name
        return names

    def not_there(self, shards: Iterable[tuple[str, int]]) -> dict[tuple[str, int], str]:
        """{(split, key): reason} of the images in `shards` that were already missing when the source was listed."""
        rejects: dict[tuple[str, int], str] = {}
        for split, number in shards:
            keys, generation = self.layout.keys(split, number), self.layout.generation(split, number)
            images = self.images[generation]
            packed = images.catalog(split).entries["packed"]
            if not (packed == MISSING).any():
                continue
            positions = images.positions(split, self._indices(split, generation, keys))
            missing = (positions >= 0) & (packed[positions] == MISSING)
            rejects |= {(split, keys.start + i): NOT_THERE for i in np.flatnonzero(missing).tolist()}
        return rejects
