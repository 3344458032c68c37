"""Groups of byte-identical input photos, found by the digests of their bytes in the records."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resolute.pipeline.dataset.target import Target

from .set_photos import SetPhotos
from .tar_format import target_file

__all__ = ["Duplicates", "target_json"]


class Duplicates:
    """Finds the samples that were made from identical files, among those of `photos`.

    Its tables `digests` (split, key, digest) and `duplicates` (digest, split, key, name, target) are its own.
    """

    def __init__(self, photos: SetPhotos) -> None:
        self._photos, self._database = photos, photos.database
        self._database.run("CREATE OR REPLACE TABLE digests (split VARCHAR, key UBIGINT, digest UBIGINT)")

    def add(self, split: str, pieces: Iterable[tuple[NDArray[Any], NDArray[Any]]]) -> None:
        """Take up samples of a split, (keys, digests) of equal length."""
        with self._database.transaction():
            for keys, digests in pieces:
                self._database.run_on(
                    {"key": np.ascontiguousarray(keys), "digest": np.ascontiguousarray(digests)},
                    "INSERT INTO digests SELECT ?, key, digest FROM columns",
                    split,
                )

    def find(self) -> dict[str, int]:
        """Find the groups among all samples so far.

        Returns the number of groups, of samples beyond the first of each, of groups with different targets, and of
        groups in two splits.
        """
        self._database.run(
            "CREATE OR REPLACE TABLE duplicates AS SELECT digest, split, key, name, target FROM (SELECT * FROM digests "
            f"QUALIFY count(*) OVER (PARTITION BY digest) > 1) JOIN {self._photos.rows} USING (split, key) "
            "ORDER BY digest, split, key"
        )
        names = ("groups", "extra", "two_labels", "across_splits")
        (counts,) = self._database.run(
            "SELECT count(*), coalesce(sum(samples) - count(*), 0)::BIGINT, count(*) FILTER (targets > 1), "
            "count(*) FILTER (splits > 1) FROM (SELECT count(*) AS samples, count(DISTINCT target) AS targets, "
            "count(DISTINCT split) AS splits FROM duplicates GROUP BY digest)"
        )
        return dict(zip(names, counts, strict=True))

    def lines(self, target: Target) -> Iterator[bytes]:
        """One JSON line per group: [{path, split, key, label}, …], or `labels` or `target` as in the tars."""
        rows = self._database.rows("SELECT * FROM duplicates ORDER BY digest, split, key")
        for _, group in groupby(rows, itemgetter(0)):
            entries = [
                {"path": os.fsdecode(name), "split": split, "key": key, **target_json(target, own)}
                for _, split, key, name, own in group
            ]
            yield (json.dumps(entries) + "\n").encode()


def target_json(target: Target, own: Any) -> dict[str, Any]:
    """The target of a photo, as the table of photos holds it, in the words of the tars."""
    if target.kind == "class":
        return {"label": own}
    samples = target.encode([0], [own])
    _, content = target_file(target.kind, samples[target.kind][0], 0)
    table: dict[str, Any] = json.loads(content)
    return table
