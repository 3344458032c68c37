"""The photos of a source that belong to one part, train or val, by a pattern for their names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from resolute.errors import ResoluteError

from .image_ref import ImageRef, Listing, Source
from .tables.split_column import LEFT_OUT, Part, SplitSetting

__all__ = ["PartSource"]


class PartSource:
    """A `Source`: those of `whole` whose names give `part`.

    The source of train counts what is left out and what is no photo, that of val its photos alone.
    """

    def __init__(self, source: Source, split: SplitSetting, part: Part) -> None:
        self.whole, self._split, self._part = source, split, part
        self._ignored: Counter[str] = Counter()
        self._listed = 0

    @property
    def listing(self) -> Listing:
        return replace(self.whole.listing, ignored=self._ignored, listed=self._listed)

    @property
    def root(self) -> str:
        return self.whole.root

    @property
    def unpacks(self) -> bool:
        return self.whole.unpacks

    @property
    def files(self) -> Sequence[str]:
        return self.whole.files

    def __iter__(self) -> Iterator[ImageRef]:
        assert self._split.pattern is not None
        self._ignored.clear()
        counts: Counter[Part | None] = Counter()
        for image in self.whole:
            found = self._split.pattern.search(image.name)
            if found is None or found[1] is None:
                raise ResoluteError(
                    f"{self.root}: SPLIT={self._split.text} does not match, got {image.name!a}, expected a name in "
                    "which its group matches train, val or test; correct SPLIT"
                )
            part = self._split.part(found[1], f"{self.root}: {image.name}")
            counts[part] += 1
            if part == self._part:
                yield image
        self._listed = counts[self._part]
        if self._part == "train":
            self._ignored.update(self.whole.listing.ignored)
            self._ignored[LEFT_OUT] += counts[None]
            self._listed = self.whole.listing.listed - counts["val"]
            self._ignored += Counter()
