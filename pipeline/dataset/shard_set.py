"""`ShardSet`: an open shard set, with the records of its samples by split and resolution, and its division into folds.

Opening checks the manifest, that index files and local shards have the sizes listed there, and the hashes of index
files up to 1 GiB, which takes about 0.1 s per million samples. Images are checked when they are read.
"""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resolute.errors import ResoluteError, StorageError, differences
from resolute.pipeline.storage.base import Files
from resolute.pipeline.storage.local import retry_local
from resolute.pipeline.storage.open_files import open_files

from .format import GROUP, STORED, groups_name, index_name, key_name, names_name, tar_name
from .groups import components, deal, together
from .manifest import read_manifest
from .source_json import read_source_json, repair_hint, shards_command
from .target import Target

__all__ = ["ShardSet", "Split", "fold_numbers", "stored_resolutions"]

REPAIR = "run `resolute verify` on this set: it finds all damage and prints the command that repairs it"
_HASHED_BYTES = 1 << 30  # larger index files are checked by `resolute verify` alone
_SIZES_S = 0.3  # time limit for checking tar sizes when a set is opened; the reader detects the rest


@dataclass(frozen=True, kw_only=True)
class Split:
    """One split: `samples` (N,) of `Target.sample_dtype`, `stored[res]` (N,) STORED, and the names of its `shards`.

    Samples with the same number in `group` (N,) uint32 are kept together by GROUP; those with the same number in `near`
    (N,) show the same picture or the same moment; 0: none. The numbers are those of the set, not of the split; None if
    the set has none.

    The arrays are read-only maps of the index files; those of a fold or of several generations are in memory.
    """

    name: str
    samples: NDArray[np.void]
    stored: Mapping[int, NDArray[np.void]]
    shards: tuple[str, ...]
    group: NDArray[np.uint32] | None = None
    near: NDArray[np.uint32] | None = None

    def __len__(self) -> int:
        return len(self.samples)

    def subset(self, name: str, chosen: NDArray[np.bool_]) -> Split:
        """The split `name` of the `chosen` (N,) samples, in the same order."""
        stored = {res: records[chosen] for res, records in self.stored.items()}
        group, near = (None if each is None else each[chosen] for each in (self.group, self.near))
        return replace(self, name=name, samples=self.samples[chosen], stored=stored, group=group, near=near)

    def related(self, other: Split) -> NDArray[np.bool_]:
        """(N,) whether a sample of `other` is in the group of this sample, or shows the same picture or moment."""
        found = np.zeros(len(self), np.bool_)
        for own, others in ((self.group, other.group), (self.near, other.near)):
            if own is not None and others is not None:
                found |= together(own, others)
        return found


@dataclass(frozen=True, kw_only=True)
class ShardSet:
    """An open shard set: its manifest is valid, and its index files exist with the expected sizes.

    Photos that were added later are a new generation of the set; `generation` is the one that is open, which holds
    the samples of all older ones too. `generations` is their number in the set.
    """

    files: Files
    target: Target  # what samples are labelled with, and the names of classes or values
    resolutions: tuple[int, ...]
    margin: float
    hash: str  # of the manifest, 12 hex digits
    splits: Mapping[str, Split]
    digests: Mapping[str, str] = field(default_factory=dict)  # see `contents`; keys about pixels end in "at RES px"
    generation: int = 0
    generations: int = 1
    grey_bits: int = 16  # that samples of 16 bits use, in the photos that it was made from
    repair: str = REPAIR  # remedy for damage, in messages
    _known_state: dict[str, tuple[int, str]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __repr__(self) -> str:
        splits = ", ".join(f"{len(split)} {name}" for name, split in self.splits.items())
        names = {"class": "classes", "labels": "labels", "values": "values"}[self.target.kind]
        sizes = "/".join(map(str, self.resolutions))
        return f"ShardSet {Path(self.root).name}: {splits}, {len(self.target)} {names}, {sizes} px"

    def short_side(self, res: int) -> int:
        """Nominal stored short side in px: round(res * margin). Smaller images are not enlarged."""
        return round(res * self.margin)

    def contents(self, resolutions: Iterable[int] | None = None) -> dict[str, str]:
        """Digests of everything a run on `resolutions` (px; None: all open ones) reads from this set, by name.

        Two sets have equal contents exactly if such runs get the same labels, classes, images and folds; other
        resolutions do not matter. Raises `ResoluteError` for a resolution that is not open.
        """
        is_open = sorted({res for split in self.splits.values() for res in split.stored})
        requested = is_open if resolutions is None else sorted(set(resolutions))
        if missing := [res for res in requested if any(res not in split.stored for split in self.splits.values())]:
            raise ResoluteError(f"{self.root}: {missing[0]} px is not open, got {is_open}; name it in ShardSet.open")
        ends = tuple(f" at {res} px" for res in requested)
        return {name: digest for name, digest in self.digests.items() if " at " not in name or name.endswith(ends)}

    def fingerprint(self, resolutions: Iterable[int] | None = None) -> str:
        """12 hex digits over `contents`: identifies the data of a run on `resolutions` in its checkpoints."""
        return hashlib.sha256(json.dumps(self.contents(resolutions), sort_keys=True).encode()).hexdigest()[:12]

    def check_unchanged(self) -> None:
        """Raise `StorageError` if the set is gone or was replaced since it was opened.

        Adding a resolution or a generation is not a change. Call this before reporting a sample as damaged: if the set
        was replaced, there is nothing to skip or repair.
        """
        what = f"{self.root}: the shard set"
        state = self.files.file_version("manifest.json")
        if state is None:
            raise StorageError(
                f"{what} is gone, expected it as it was opened; put it back or mount its volume, then run the same "
                "command again: it continues"
            )
        if state == self._known_state.get("unchanged"):
            return
        try:
            is_open = sorted({res for split in self.splits.values() for res in split.stored})
            with copy.copy(self.files) as again:  # why a copy: these files stay those of the manifest that was opened
                digests = _digests(read_manifest(again)[0], is_open, self.generation)
        except StorageError:
            raise
        except (ResoluteError, KeyError, IndexError, TypeError) as error:
            raise StorageError(
                f"{what} was replaced while it was read, got a manifest that cannot be used ({error}), expected "
                "the one that was opened; put the old set back, or start a new run"
            ) from None
        changes = differences(digests, {name: digest for name, digest in self.digests.items() if name != "fold"})
        if changes:
            raise StorageError(
                f"{what} was replaced while it was read: {'; '.join(changes[:3])}; put the old one back and run the "
                "same command again, or start a new run"
            )
        self._known_state["unchanged"] = state

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names; none if the targets are values."""
        return self.target.classes

    @property
    def root(self) -> str:
        """The folder or URL, for messages."""
        return self.files.root

    def path(self, res: int, shard: str) -> Path:
        """Local path of a complete shard; a remote one is downloaded first."""
        return self.files.local(tar_name(res, shard))

    def photo_names(self, split: str) -> list[str]:
        """The name of the input file of each sample of `split`, relative to its source."""
        keys: list[int] = self.splits[split].samples[:]["key"].tolist()
        known: dict[int, bytes] = {}
        whole = self.stored_split(split)
        for generation in range(self.generation + 1):
            name = names_name(whole, generation)
            if self.files.size(name) is not None:  # else this generation has no samples in the split
                lines = retry_local(self.files.local(name).read_bytes, self.files.where(name)).splitlines()
                own = np.load(self.files.local(index_name(whole, generation)), mmap_mode="r")["key"].tolist()
                known.update(zip(own, lines, strict=True))
        return [json.loads(known[key]) if key in known else key_name(key) for key in keys]

    def stored_split(self, split: str) -> str:
        """The split of the set that the samples of `split` are from: with a fold, all are from the training split."""
        return "train" if "fold" in self.digests else split

    def command_that_adds(self, resolutions: Iterable[int]) -> str:
        """The `make shards` command that adds `resolutions` (px) to this set, for messages."""
        return shards_command(self.root, {*self.resolutions, *resolutions}, read_source_json(self.files))

    def close(self) -> None:
        """Close the files. Records and batches already returned stay valid."""
        self.files.close()

    def __enter__(self) -> ShardSet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @classmethod
    def open(
        cls,
        root: str | Path,
        *,
        resolutions: tuple[int, ...] | None = None,
        generation: int | None = None,
        fold: int | None = None,
        folds: int | None = None,
        files: Files | None = None,
    ) -> ShardSet:
        """Open the set at `root`, a folder or URL.

        resolutions   those that will be used, in px: each is read from the smallest stored one that is at least as
                      large; None: all stored ones
        generation    the state of the set to open, see `ShardSet`; None: the newest
        fold, folds   one run of a cross-validation, see `with_fold`; None: the splits as they are
        files         source of the files; None: `open_files(root)`

        Shard sizes are checked up to a time limit and only locally; the reader detects the rest.
        Raises `ResoluteError` if the manifest is missing, damaged or of another version, a resolution is above all
        stored ones, a generation or fold is missing, or the size of a shard or the size or hash of an index file is
        wrong; `StorageError` if the storage fails.
        """
        files = files or open_files(root)
        root = files.root  # without credentials
        if (fold is None) != (folds is None):
            raise ResoluteError(f"{root}: got fold={fold} and folds={folds}, expected both or none; correct them")
        manifest, digest = read_manifest(files)
        stored = tuple(sorted(int(res) for res in manifest["resolutions"]))
        needed = stored if resolutions is None else resolutions
        if max(needed, default=0) > stored[-1]:
            raise ResoluteError(
                f"{root}: no shards at {max(needed)} px, got {','.join(map(str, stored))}; "
                f"run {shards_command(files.root, {*stored, *needed}, read_source_json(files))}"
            )
        requested = tuple(sorted({next(size for size in stored if size >= res) for res in needed}))
        generations = manifest["generations"]
        generation = len(generations) - 1 if generation is None else generation
        if not 0 <= generation < len(generations):
            raise ResoluteError(
                f"{root}: got a set without generation {generation}, which the run was started on, expected one with "
                f"generations 0 to {generation}; put that set back, or start a new run"
            )
        splits = {name: _split(files, manifest, name, requested, generation) for name in manifest["splits"]}
        if (name := groups_name(generation)) in manifest["files"]:
            splits = _with_groups(splits, _index_array(files, manifest["files"], name, GROUP))
        if not files.remote:
            _check_tars(files, manifest["files"], requested, splits)
        shards = cls(
            files=files,
            target=_target(manifest, generation),
            resolutions=stored,
            margin=manifest["settings"]["margin"],
            hash=digest,
            splits=splits,
            digests=_digests(manifest, requested, generation),
            repair=repair_hint(files.root),
            generation=generation,
            generations=len(generations),
            grey_bits=manifest["settings"].get("grey_range", 16),
        )
        return shards if fold is None or folds is None else shards.with_fold(fold, folds)

    def with_fold(self, fold: int, folds: int) -> ShardSet:
        """This set for one run of a cross-validation: `val` is fold `fold` of the training split, `train` the others.

        `folds` is the number of folds, `fold` counts from 0. The samples of `val` take no part. Samples that belong
        together, by `Split.group` or `Split.near`, are in the same fold. Reads one column of the index. Raises
        `ResoluteError` if there is no such fold, or a fold would be empty.
        """
        if not 0 <= fold < folds or "fold" in self.digests:
            expected = "a set without a fold" if "fold" in self.digests else f"0 to {folds - 1}"
            raise ResoluteError(f"{self.root}: got fold {fold} of {folds}, expected {expected}; choose another")
        whole = self.splits["train"]
        if not 2 <= folds <= len(whole):
            raise ResoluteError(
                f"{self.root}: got {folds} folds, expected 2 to {len(whole)}, the number of training samples; "
                "choose another number of folds"
            )
        groups, of_groups = None, ""
        if whole.group is not None and whole.near is not None:
            groups = components(whole.group, whole.near)
            if groups.max(initial=-1) >= 0:
                of_groups = f", groups {hashlib.sha256(groups.tobytes()).hexdigest()[:12]}"
        held_out = fold_numbers(self.target.strata(whole.samples), folds, groups=groups) == fold
        if held_out.all() or not held_out.any():
            raise ResoluteError(
                f"{self.root}: got {folds} folds, of which fold {fold} would hold {int(held_out.sum())} of the "
                f"{len(whole)} training samples, since those of a group stay together; choose fewer folds"
            )
        splits = {"train": whole.subset("train", ~held_out), "val": whole.subset("val", held_out)}
        return replace(self, splits=splits, digests={**self.digests, "fold": f"{fold} of {folds}{of_groups}"})


def fold_numbers(
    strata: NDArray[np.integer[Any]], folds: int, *, seed: int = 0, groups: NDArray[np.int64] | None = None
) -> NDArray[np.uint32]:
    """The fold, 0 to `folds` - 1, of each sample, given the strata (N,) of a split in its order: (N,) uint32.

    Strata are classes, see `Target.strata`. Samples of one of the `groups` (N,), -1 for a sample without, are in one
    fold. Without groups fold sizes differ by at most one, in each class and in total; with them they are as even as the
    groups allow, see `deal`. The folds are the same on every machine and for every number of shards and resolutions.
    Takes 0.1 s for 1.3 million samples, and about 10 µs for each group.
    """
    # a random order: 32 random bits each, above the position, which makes them distinct
    # why a raw stream: numpy keeps it the same in all versions. Source: NEP 19, "Random number generator policy"
    draws = np.random.PCG64(seed).random_raw(len(strata)) >> np.uint64(32) << np.uint64(32)
    draws |= np.arange(len(strata), dtype=np.uint64)
    if groups is not None and groups.max(initial=-1) >= 0:
        return deal(strata, groups, [1 / folds] * folds, draws)
    order = np.sort(draws).astype(np.uint32)
    # why the smallest type: numpy sorts 16 bits several times faster
    shuffled = strata[order].astype(np.min_scalar_type(strata.max(initial=0)))
    by_class = order[np.argsort(shuffled, kind="stable")]
    numbers = np.empty(len(strata), np.uint32)
    # dealt in turn, through one class after another
    numbers[by_class] = np.arange(len(strata), dtype=np.uint32) % np.uint32(folds)
    return numbers


def _digests(manifest: Mapping[str, Any], resolutions: Iterable[int], generation: int) -> dict[str, str]:
    """The digests of `ShardSet.contents`. Those of images follow from STORED, which holds each image's CRC-32.

    Those of a generation include those of the older ones.
    """
    listed, generations = manifest["files"], manifest["generations"]
    digests = {"classes": hashlib.sha256(json.dumps(_classes(manifest, generation)).encode()).hexdigest()[:12]}
    if manifest["target"]["kind"] != "class":
        digests["target"] = hashlib.sha256(json.dumps(manifest["target"]).encode()).hexdigest()[:12]
    for split in sorted(manifest["splits"]):
        for number, added in enumerate(generations[: generation + 1]):
            of = f" of generation {number}" if number else ""
            if not added["samples"][split]:
                continue
            digests[f"{split} samples and labels{of}"] = listed[index_name(split, number)]["sha256"][:12]
            for res in resolutions:
                digests[f"{split} images{of} at {res} px"] = listed[index_name(split, number, res=res)]["sha256"][:12]
    for res in resolutions:
        digests[f"short side at {res} px"] = str(manifest["resolutions"][str(res)]["short_side"])
    return digests


def _target(manifest: Mapping[str, Any], generation: int) -> Target:
    """The target as of `generation`."""
    return Target.from_manifest({**manifest, "classes": _classes(manifest, generation)})


def _classes(manifest: Mapping[str, Any], generation: int) -> list[str]:
    """The class names as of `generation`."""
    generations, classes = manifest["generations"], list(manifest["classes"])
    return classes if generation + 1 == len(generations) else classes[: generations[generation]["classes"]]


def _split(
    files: Files, manifest: Mapping[str, Any], name: str, resolutions: tuple[int, ...], generation: int
) -> Split:
    """The split `name` as of `generation`."""
    listed, generations = manifest["files"], manifest["generations"][: generation + 1]
    numbers = [number for number, added in enumerate(generations) if added["samples"][name]]
    # why of each generation: a set of classes takes more bytes when classes were added
    dtypes = [_target(manifest, number).sample_dtype for number in numbers]

    def joined(res: int | None = None) -> NDArray[np.void]:
        parts = [
            _index_array(files, listed, index_name(name, number, res=res), dtype if res is None else STORED)
            for number, dtype in zip(numbers, dtypes, strict=True)
        ]
        return _joined(parts, _target(manifest, generation).sample_dtype if res is None else STORED)

    shards = sum(added["shards"][name] for added in generations)
    return Split(
        name=name,
        samples=joined(),
        stored={res: joined(res) for res in resolutions},
        shards=tuple(manifest["splits"][name]["shards"][:shards]),
    )


def _with_groups(splits: Mapping[str, Split], rows: NDArray[np.void]) -> dict[str, Split]:
    """The splits with the numbers of the groups that GROUP records give to their samples."""
    grouped = {}
    for name, split in splits.items():
        own = rows[rows["split"] == (name == "val")]
        order = np.argsort(split.samples["key"], kind="stable")
        at = order[np.searchsorted(split.samples["key"], own["key"], sorter=order).clip(max=max(0, len(split) - 1))]
        group, near = np.zeros(len(split), np.uint32), np.zeros(len(split), np.uint32)
        group[at], near[at] = own["group"], own["near"]
        grouped[name] = replace(split, group=group, near=near)
    return grouped


def stored_resolutions(contents: Iterable[str]) -> tuple[int, ...]:
    """The stored resolutions, in px, that the names of `ShardSet.contents` are about."""
    return tuple(sorted({int(name.split()[-2]) for name in contents if " at " in name}))


def _check_tars(
    files: Files, listed: Mapping[str, Any], resolutions: tuple[int, ...], splits: Mapping[str, Split]
) -> None:
    """Compare tar sizes with the manifest, as many as fit into `_SIZES_S`."""
    end = time.monotonic() + _SIZES_S
    for split in splits.values():
        for res in resolutions:
            for shard in split.shards:
                name = tar_name(res, shard)
                _check_size(files, name, files.size(name), listed[name]["bytes"])
                if time.monotonic() > end:
                    return


def _check_size(files: Files, name: str, got: int | None, expected: int) -> None:
    if got is None:
        raise ResoluteError(f"{files.where(name)}: not found, expected {expected} bytes; {repair_hint(files.root)}")
    if got != expected:
        raise ResoluteError(
            f"{files.where(name)}: cut short or changed, got {got} bytes, expected {expected}; "
            f"{repair_hint(files.root)}"
        )


def _index_array(files: Files, listed: Mapping[str, Any], name: str, dtype: np.dtype[Any]) -> NDArray[np.void]:
    """Map an index file, (N,) of `dtype`, whose size and, up to `_HASHED_BYTES`, hash are as in the manifest."""
    path, where = _local(files, listed, name), files.where(name)
    if listed[name]["bytes"] <= _HASHED_BYTES:
        expected, got = listed[name]["sha256"], retry_local(lambda: _sha256(path), where)
        if got != expected:
            raise ResoluteError(
                f"{where}: changed since prep, got SHA-256 {got[:12]}…, expected {expected[:12]}…; {REPAIR}"
            )
    try:
        # why not `memmap` itself: indexing its subclass of an array takes ten times as long
        array = np.asarray(retry_local(lambda: np.load(path, mmap_mode="r", allow_pickle=False), where))
    except ValueError as error:
        raise ResoluteError(f"{where}: damaged, got '{error}', expected a .npy file; {REPAIR}") from None
    if array.dtype != dtype or array.ndim != 1:
        raise ResoluteError(f"{where}: damaged, got {array.shape} records of {array.dtype}, expected {dtype}; {REPAIR}")
    return array


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _joined(parts: Sequence[NDArray[np.void]], dtype: np.dtype[Any]) -> NDArray[np.void]:
    """The records of several arrays, one array after another, as one of `dtype`.

    The fields of the arrays have the names of `dtype`; one that is a shorter vector there is followed by zeros.
    """
    if len(parts) == 1 and parts[0].dtype == dtype:
        return parts[0]
    out, start = np.zeros(sum(map(len, parts)), dtype), 0
    for part in parts:
        own, start = out[start : start + len(part)], start + len(part)
        for name in dtype.names or ():
            column = part[name]
            own[name][(slice(None), *map(slice, column.shape[1:]))] = column
    return out


def _local(files: Files, listed: Mapping[str, Any], name: str) -> Path:
    try:
        path = files.local(name)
        got = retry_local(path.stat, files.where(name)).st_size
    except FileNotFoundError:
        _check_size(files, name, None, listed[name]["bytes"])
        raise
    _check_size(files, name, got, listed[name]["bytes"])
    return path
