"""Finds the photos of a set that show the same picture or the same moment as another one, and lists them.

The records of the shards describe the photos. The index finds pairs with similar descriptors, and each pair is verified
on thumbnails of what the tars hold. There are three grades, by the score of the pair:

    0.95 and more    "grouped": the same picture for certain, or the same moment; one group, by all such pairs
    0.90 to 0.95     "warned": told, if the two are in different splits or have different targets
    0.80 to 0.90     "counted": mostly pictures of the same thing, such as one product

Nothing is ever left out of the set. Files with equal bytes are in one group without verification.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resolute.machine import available_cpus
from resolute.pipeline.dataset.format import (
    STORED,
    groups_name,
    near_copies_name,
    near_pairs_name,
    shard_name,
    tar_name,
)
from resolute.pipeline.dataset.target import Target
from resolute.prep.near_copies.descriptor import HASHES, has_hashes
from resolute.prep.near_copies.index import CANDIDATE, Index, equal_hashes
from resolute.prep.near_copies.verification import score
from resolute.prep.shard_set.set_photos import SetPhotos
from resolute.prep.storage.bulk import read_many
from resolute.prep.storage.hashed_file import FileInfo
from resolute.prep.storage.output import Store

from .duplicates import target_json
from .groups import Numbers
from .record import ShardRecord, record_name
from .stored_pixels import Thumbnails

__all__ = ["COUNTED", "GROUPED", "WARNED", "NearCopies", "NearPairs", "kept_near_copies", "read_records"]

GROUPED, WARNED, COUNTED = 0.95, 0.90, 0.80  # least scores
MAX_ALL = 200_000  # photos of a set in which all are compared with all
_PIECE = 2048  # pairs that are verified before the next ones are chosen
_ENOUGH = 8  # verified pairs of each of two photos in one group, after which these two need not be compared
_ROUNDS = 8  # different pictures with equal hashes that are told apart
_MIN_PAIRS, _PAIRS_PER_PHOTO = 100_000, 2  # the most pairs of a set that are verified, a third of a millisecond each


@dataclass(frozen=True)
class NearPairs:
    """What was found among the samples of a set.

    `counts` is the manifest's entry, `numbers` the groups; `table` and `pairs` are the contents of the two files, empty
    if there is nothing to list.
    """

    counts: dict[str, int]
    numbers: Numbers
    table: bytes
    pairs: bytes

    def write(self, store: Store, generation: int) -> dict[str, FileInfo]:
        """Write the files of a generation, but for the one of the groups; returns {name: what is written}."""
        files = {near_copies_name(generation): self.table, near_pairs_name(generation): self.pairs}
        return {name: store.write(name, content) for name, content in files.items() if content}


def read_records(store: Store, split: str, shards: Iterable[int], res: int) -> Iterator[ShardRecord | None]:
    """The records of finished shards in a store; None for those that are damaged or gone."""
    for data in read_many(store, [record_name(shard_name(split, number), res) for number in shards]):
        try:
            yield ShardRecord.parse(data)
        except ValueError:
            yield None


@dataclass
class _Rows:
    """The samples of a set, by split and key: a row each."""

    splits: NDArray[np.str_]
    keys: NDArray[np.uint64]
    digests: NDArray[np.uint64]
    hashes: NDArray[np.uint64]  # (n, HASHES)
    stored: NDArray[np.void]  # STORED with `shard` the number of the tar in `tars`
    tars: list[str]

    def __len__(self) -> int:
        return len(self.keys)


@dataclass
class NearCopies:
    """Finds pairs among the samples of the records that were added, whose tars are those at `res` px."""

    store: Store
    photos: SetPhotos
    res: int
    _records: dict[tuple[str, int], ShardRecord] = field(default_factory=dict)

    def add(self, records: Iterable[ShardRecord | None]) -> None:
        """Take up the samples of finished shards."""
        for record in records:
            if record is not None:
                self._records[record.split, record.number] = record

    def find(self, target: Target, *, everything: bool = False, groups: Numbers | None = None) -> NearPairs:
        """Find the pairs among all samples so far.

        `everything`: compare all with all, however many there are. `groups` are those of GROUP: in a large set their
        samples are compared with all others, as those of val are.
        """
        rows = self._rows()
        asking = np.ones(len(rows), np.bool_)
        if len(rows) > MAX_ALL and not everything:
            asking = rows.splits == "val"
            for split, (keys, numbers) in (groups or {}).items():
                asking |= (rows.splits == split) & np.isin(rows.keys, keys[numbers > 0])
        search = _Search(rows, Thumbnails(self.store, rows.tars, *_places(rows)))
        search.run(asking)
        return self._described(rows, search, asking, target)

    def _rows(self) -> _Rows:
        ordered = [record for _, record in sorted(self._records.items()) if len(record.samples)]

        def joined(parts: Iterable[NDArray[Any]], empty: NDArray[Any]) -> NDArray[Any]:
            return np.concatenate([empty, *parts])

        stored = joined((record.stored for record in ordered), np.empty(0, STORED))
        if ordered:
            stored["shard"] = np.repeat(np.arange(len(ordered)), [len(record.samples) for record in ordered])
        none = np.zeros((0, HASHES), np.uint64)
        return _Rows(
            splits=np.repeat(
                np.array([record.split for record in ordered], np.str_), [len(record.samples) for record in ordered]
            ),
            keys=joined((record.samples["key"] for record in ordered), np.empty(0, np.uint64)),
            digests=joined((record.sources["digest"] for record in ordered), np.empty(0, np.uint64)),
            hashes=joined(
                (
                    np.zeros((len(record.samples), HASHES), np.uint64) if record.hashes is None else record.hashes
                    for record in ordered
                ),
                none,
            ),
            stored=stored,
            tars=[tar_name(self.res, shard_name(record.split, record.number)) for record in ordered],
        )

    def _described(self, rows: _Rows, search: _Search, asking: NDArray[np.bool_], target: Target) -> NearPairs:
        near = search.groups()
        is_val = rows.splits == "val"
        has_train = np.zeros(int(near.max(initial=0)) + 1, np.bool_)
        has_train[near[~is_val]] = True
        has_train[0] = False
        pairs = [pair for pair in search.pairs if pair[2] >= WARNED]
        shown = np.unique(np.concatenate([np.flatnonzero(near), *(pair[:2] for pair in pairs)]).astype(np.int64))
        about = dict(zip(shown.tolist(), self.photos.about(rows.splits[shown], rows.keys[shown]), strict=True))
        differ = {pair[:2]: about[pair[0]][1] != about[pair[1]][1] for pair in pairs}
        grouped = [pair for pair in pairs if pair[2] >= GROUPED]
        warned = [pair for pair in pairs if pair[2] < GROUPED]
        counts = {
            "pairs": len(grouped),
            "photos": int((near > 0).sum()),
            "across_splits": int(has_train[near[is_val]].sum()),
            "two_labels": sum(differ[pair[:2]] for pair in grouped),
            "warned": len(warned),
            "warned_across_splits": sum(rows.splits[a] != rows.splits[b] for a, b, _ in warned),
            "warned_two_labels": sum(differ[pair[:2]] for pair in warned),
            "counted": sum(COUNTED <= pair[2] < WARNED for pair in search.pairs),
        }
        more = {
            "asked": int(asking.sum()) if not asking.all() else 0,
            "cut_short": search.cut_short,
            "undescribed": sum(len(each.samples) for each in self._records.values() if each.hashes is None),
        }
        nearest = search.nearest()
        return NearPairs(
            counts={name: int(count) for name, count in (counts | {k: n for k, n in more.items() if n}).items()},
            numbers={split: (rows.keys[own], near[own]) for split, own in (("train", ~is_val), ("val", is_val))},
            table=_table(rows, near, nearest, about),
            pairs=b"".join(_pair_lines(rows, pairs, about, target)),
        )


def _places(rows: _Rows) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    return rows.stored["shard"], rows.stored["offset"], rows.stored["nbytes"]


class _Search:
    """The pairs among rows, and the groups that they form.

    `pairs` are (row, row, score), of at least `COUNTED`; `cut_short` counts the photos that were not compared with all
    that are like them, because too many are.
    """

    def __init__(self, rows: _Rows, thumbnails: Thumbnails) -> None:
        self._rows, self._thumbnails = rows, thumbnails
        self.pairs: list[tuple[int, int, float]] = []
        self.cut_short = 0
        self._leaders = np.arange(len(rows))  # another row of the same group, or itself
        self._verified = np.zeros(len(rows), np.int64)  # grouped pairs of each row
        self._same_bytes = np.zeros(len(rows), np.bool_)

    def run(self, asking: NDArray[np.bool_]) -> None:
        """Compare the rows where `asking` with all others."""
        first = self._join_equal_files()
        asks = np.zeros(len(asking), np.bool_)
        asks[first[asking]] = True  # of files with equal bytes the first one asks
        described = np.flatnonzero((first == np.arange(len(first))) & has_hashes(self._rows.hashes))
        leader = described[equal_hashes(self._rows.hashes[described])]
        self._compare_equal(described, leader, asks)
        asks[leader[asks[described]]] = True
        leaders = np.unique(leader)
        candidates, cut_short = Index(self._rows.hashes[leaders]).candidates(
            np.flatnonzero(asks[leaders]), threads=available_cpus()
        )
        self.cut_short += cut_short
        most = max(_MIN_PAIRS, _PAIRS_PER_PHOTO * len(self._rows))
        if len(candidates) > most:
            closest = np.sort(np.argsort(candidates["bits"], kind="stable")[:most])
            left_out = np.setdiff1d(np.arange(len(candidates)), closest)
            self.cut_short += len(np.unique(candidates["asked"][left_out]))
            candidates = candidates[closest]
        candidates["asked"], candidates["found"] = leaders[candidates["asked"]], leaders[candidates["found"]]
        self._verify(candidates)

    def _join_equal_files(self) -> NDArray[np.int64]:
        """Put files with equal bytes into one group; returns the first row with the bytes of each."""
        _, first, inverse = np.unique(self._rows.digests, return_index=True, return_inverse=True)
        own = first[inverse].astype(np.int64)
        self._leaders[:] = own
        copies = own != np.arange(len(own))
        self._same_bytes[copies] = self._same_bytes[own[copies]] = True
        return own

    def _compare_equal(self, rows: NDArray[np.int64], leader: NDArray[np.int64], asks: NDArray[np.bool_]) -> None:
        """Compare photos with equal hashes with the first of them, not each with each: placeholders are many.

        Those that show another picture are compared with the first of the rest, and so on.
        """
        wanted = np.isin(leader, leader[asks[rows]])
        rest, leading = rows[wanted], leader[wanted].copy()
        for _ in range(_ROUNDS):
            rest, leading = rest[rest != leading], leading[rest != leading]
            if not len(rest):
                return
            pairs = np.zeros(len(rest), CANDIDATE)
            pairs["asked"], pairs["found"] = leading, rest
            is_other = self._verify(pairs) < GROUPED
            rest, leading = rest[is_other], leading[is_other]
            _, first, inverse = np.unique(leading, return_index=True, return_inverse=True)
            leading = rest[first[inverse]] if len(rest) else leading
        self.cut_short += len(rest)

    def _verify(self, candidates: NDArray[np.void]) -> NDArray[np.float64]:
        """The scores of the candidates, -1 for those that need none; joins the groups of those that are grouped."""
        scores = np.full(len(candidates), -1.0)
        with ThreadPoolExecutor(available_cpus()) as pool:
            for start in range(0, len(candidates), _PIECE):
                piece = candidates[start : start + _PIECE]
                asked, found = piece["asked"].astype(np.int64), piece["found"].astype(np.int64)
                is_known = self._leaders[asked] == self._leaders[found]
                is_known &= np.minimum(self._verified[asked], self._verified[found]) >= _ENOUGH
                wanted = np.flatnonzero(~is_known)
                self._thumbnails.load([*asked[wanted], *found[wanted]])
                scores[start + wanted] = list(pool.map(self._score, piece[wanted].tolist(), chunksize=16))
                for i in wanted.tolist():
                    self._take(int(asked[i]), int(found[i]), float(scores[start + i]))
        return scores

    def _score(self, candidate: tuple[int, int, int, int, int, int]) -> float:
        asked, found, _, part, mirrored, same_part = candidate
        stored = self._rows.stored[asked]
        value = score(
            self._thumbnails[asked],
            self._thumbnails[found],
            part=part,
            same_part=bool(same_part),
            mirrored=bool(mirrored),
            width=int(stored["width"]),
            height=int(stored["height"]),
        )
        return round(value, 4)

    def _take(self, asked: int, found: int, value: float) -> None:
        if value >= COUNTED:
            self.pairs.append((min(asked, found), max(asked, found), value))
        if value >= GROUPED:
            self._verified[[asked, found]] += 1
            one, other = sorted((self._leader(asked), self._leader(found)))
            self._leaders[other] = one

    def _leader(self, row: int) -> int:
        """The first row of a row's group."""
        while (leader := int(self._leaders[row])) != row:
            self._leaders[row] = self._leaders[leader]
            row = leader
        return row

    def groups(self) -> NDArray[np.uint32]:
        """(n,) the group of each row, from 1 in the order of their first rows; 0: it is alone."""
        leaders = np.array([self._leader(row) for row in range(len(self._rows))], np.int64)
        found, inverse, sizes = np.unique(leaders, return_inverse=True, return_counts=True)
        numbers = np.zeros(len(found), np.uint32)
        numbers[sizes > 1] = np.arange(1, int((sizes > 1).sum()) + 1)
        return numbers[inverse] if len(found) else np.empty(0, np.uint32)

    def nearest(self) -> NDArray[np.float64]:
        """(n,) the highest score of each row with another one of its group."""
        best = np.zeros(len(self._rows))
        for one, other, value in self.pairs:
            if value >= GROUPED:
                best[one], best[other] = max(best[one], value), max(best[other], value)
        best[self._same_bytes] = 1.0
        return best


def _table(
    rows: _Rows, near: NDArray[np.uint32], nearest: NDArray[np.float64], about: Mapping[int, tuple[str, Any]]
) -> bytes:
    """The CSV table of the photos in groups; none without groups."""
    grouped = np.flatnonzero(near)
    if not len(grouped):
        return b""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["group", "name", "split", "distance"])
    for row in grouped[np.argsort(near[grouped], kind="stable")].tolist():
        writer.writerow([int(near[row]), about[row][0], rows.splits[row], f"{1 - nearest[row]:.4f}"])
    return text.getvalue().encode(errors="surrogateescape")


def _pair_lines(
    rows: _Rows, pairs: Iterable[tuple[int, int, float]], about: Mapping[int, tuple[str, Any]], target: Target
) -> Iterator[bytes]:
    """One JSON line per pair, the most alike first."""
    for one, other, value in sorted(pairs, key=lambda pair: (-pair[2], *pair[:2])):
        photos = [
            {
                "path": about[row][0],
                "split": str(rows.splits[row]),
                "key": int(rows.keys[row]),
                **target_json(target, about[row][1]),
            }
            for row in (one, other)
        ]
        yield (json.dumps({"score": value, "photos": photos}) + "\n").encode()


def kept_near_copies(
    store: Store, files: Mapping[str, Any], generation: int, counts: dict[str, int]
) -> NearPairs | None:
    """What a finished set with these `files` says about a generation; None if one of them is not as it was."""
    contents = {}
    for name in (near_copies_name(generation), near_pairs_name(generation), groups_name(generation)):
        contents[name] = b""
        if name in files:
            try:
                contents[name] = store.read(name)
            except FileNotFoundError:
                return None
            if hashlib.sha256(contents[name]).hexdigest() != files[name]["sha256"]:
                return None
    table, pairs, groups = contents.values()
    numbers = {}
    if groups:
        rows = np.load(io.BytesIO(groups))
        for number, split in enumerate(("train", "val")):
            own = rows[rows["split"] == number]
            numbers[split] = (own["key"], own["near"])
    return NearPairs(counts=counts, numbers=numbers, table=table, pairs=pairs)
