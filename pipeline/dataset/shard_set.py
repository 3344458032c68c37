"""Shard sets on disk or behind a URL: the manifest and the index, opened and checked.

    SHARDS/manifest.json             written last: whoever can read it can trust all the rest
    SHARDS/RES/SPLIT-NNNNNN.tar      members KEY.jpg, KEY.cls; same keys, same order at every resolution
    SHARDS/RES/SPLIT-NNNNNN.idx      DALI index of that tar
    SHARDS/index/SPLIT.npy           SAMPLE records, one a sample, in shard order
    SHARDS/index/SPLIT-RES.npy       STORED records: where that sample's JPEG lies at that resolution
    SHARDS/index/SPLIT.crc.npy       checksums of the blocks of SPLIT.npy; SPLIT-RES.crc.npy those of SPLIT-RES.npy
    SHARDS/index/SPLIT.source.npy    SOURCE records: what that sample was made from

`prep` writes this and `pipeline` reads it; both take the record types, names and key formats from here.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.errors import ResoluteError, StorageError, differences
from pipeline.storage.files import Files, open_files, retry_local

from .index_array import REPAIR, Records, checksums_name, read_checksums
from .source_record import SOURCE_RECORD, parse_record, repair_hint, shards_command

__all__ = ["FORMAT", "SAMPLE", "SOURCE", "STORED", "VERSION", "ShardSet", "Split", "command_with_folds",
           "is_shard_set", "key_name", "label_digits", "manifest_bytes", "read_manifest", "shard_name",
           "tar_name"]  # fmt: skip

FORMAT, VERSION = "resolute-shards", 3
KEY_DIGITS = 9
# Only prep writes these: the first while it works, the second at its end.
_TRACES = (".prep", "index/train.npy")
_SIZES_S = 0.3  # the most that opening spends on sizes of tars; the reader notices the others

# A sample's number in prep's global order names its members (KEY = 000000042); rejected inputs leave gaps.
# `fold` is 0 unless the set was made with FOLDS.
SAMPLE = np.dtype([("key", "<u8"), ("label", "<u4"), ("fold", "<u4")])
# `offset` and `nbytes` are those of the JPEG itself inside the tar, in bytes; width and height in px.
STORED = np.dtype([("offset", "<u8"), ("nbytes", "<u4"), ("crc32", "<u4"), ("shard", "<u4"),
                   ("width", "<u2"), ("height", "<u2")])  # fmt: skip
# The input file: first 8 bytes of its SHA-256 (little-endian), its bytes, and its upright width and height in px.
SOURCE = np.dtype([("digest", "<u8"), ("nbytes", "<u4"), ("width", "<u2"), ("height", "<u2")])


def key_name(key: int) -> str:
    return f"{key:0{KEY_DIGITS}d}"


def label_digits(classes: int) -> int:
    """Digits of every `.cls`: the same for a whole set."""
    return max(4, len(str(classes - 1)))


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:06d}"


def tar_name(res: int, shard: str) -> str:
    return f"{res}/{shard}.tar"


@dataclass(frozen=True, kw_only=True)
class Split:
    """One split of a shard set: `samples` (N,) SAMPLE, `stored[res]` (N,) STORED, `shards` their names.

    The records stay on disk and are checked when they are used: see `Records`.
    """

    name: str
    samples: Records
    stored: Mapping[int, Records]
    shards: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.samples)


@dataclass(frozen=True, kw_only=True)
class ShardSet:
    """A shard set that was opened: its manifest was read and the index it needs is there, at its size."""

    files: Files
    classes: tuple[str, ...]
    resolutions: tuple[int, ...]
    margin: float
    hash: str  # of the manifest, 12 hex digits: names the data in checkpoints and results
    splits: Mapping[str, Split]
    digests: Mapping[str, str] = field(default_factory=dict)  # see `contents`; the keys of pixels end in "at RES px"
    # of each tar that others made, its `Files.identity` when it was indexed
    states: Mapping[str, tuple[int, str]] = field(default_factory=dict, repr=False)
    one_size: bool = False  # tars that others made (`open_webdataset`): named as their files are, for every `res`
    repair: str = REPAIR  # what to do about damage, for messages
    _known_state: dict[str, tuple[int, str]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def short_side(self, res: int) -> int:
        """Nominal stored short side in px: round(res * margin). Smaller images are stored as they came."""
        return round(res * self.margin)

    def contents(self, resolutions: Iterable[int] | None = None) -> dict[str, str]:
        """Digests of all that a run on `resolutions` (px, those that are open if None) gets from this set, by name.

        Equal for two sets exactly if these runs get the same labels, classes, images and folds; other resolutions of
        the set do not count. A message can say which of the names differ. Raises `ResoluteError` for a resolution that
        is not open.
        """
        is_open = sorted({res for split in self.splits.values() for res in split.stored})
        wanted = is_open if resolutions is None else sorted(set(resolutions))
        if missing := [res for res in wanted if any(res not in split.stored for split in self.splits.values())]:
            raise ResoluteError(f"{self.root}: {missing[0]} px is not open, got {is_open}; name it in ShardSet.open")
        ends = tuple(f" at {res} px" for res in wanted)
        return {name: digest for name, digest in self.digests.items() if " at " not in name or name.endswith(ends)}

    def identity(self, resolutions: Iterable[int] | None = None) -> str:
        """12 hex digits over `contents`: what names the data of a run on `resolutions` in checkpoints."""
        return hashlib.sha256(json.dumps(self.contents(resolutions), sort_keys=True).encode()).hexdigest()[:12]

    def check_unchanged(self, tar: str) -> None:
        """Raise `StorageError` if the set, or `tar` of tars that others made, is gone or no longer the one opened.

        A resolution that was added meanwhile is no change. Ask before a sample is called damaged: what lies at a set's
        place may be another set by now, and then there is nothing to skip or repair.
        """
        name = tar if self.one_size else "manifest.json"
        what = f"{self.files.where(tar)}: the tar" if self.one_size else f"{self.root}: the shard set"
        state = self.files.identity(name)
        if state is None:
            raise StorageError(
                f"{what} is gone, expected it as it was opened; put it back or mount its volume, then run the same "
                "command again: it continues"
            )
        if self.one_size:
            names = ("bytes", "time of change or ETag")
            expected = self.states.get(tar, state)
            changes = differences(dict(zip(names, state, strict=True)), dict(zip(names, expected, strict=True)))
        elif state == self._known_state.get("unchanged"):
            return
        else:
            try:
                is_open = sorted({res for split in self.splits.values() for res in split.stored})
                fold = self.digests.get("fold")
                digests = _digests(read_manifest(self.files)[0], is_open, None if fold is None else int(fold))
            except StorageError:
                raise
            except (ResoluteError, KeyError, TypeError) as error:
                raise StorageError(
                    f"{what} was replaced while it was read, got a manifest that cannot be used ({error}), expected "
                    "the one that was opened; put the old set back, or start a new run"
                ) from None
            changes = differences(digests, self.digests)
        if changes:
            raise StorageError(
                f"{what} was replaced while it was read: {'; '.join(changes[:3])}; put the old one back and run the "
                "same command again, or start a new run"
            )
        self._known_state["unchanged"] = state

    @property
    def root(self) -> str:
        """The folder or URL, for messages."""
        return self.files.root

    def path(self, res: int, shard: str) -> Path:
        """A shard as a whole file on this machine; of a remote set a copy, which takes a download."""
        return self.files.local(self.tar(res, shard))

    def tar(self, res: int, shard: str) -> str:
        """The name, below the root, of the tar that holds `shard` for `res` px."""
        return shard if self.one_size else tar_name(res, shard)

    def command_that_adds(self, resolutions: Iterable[int]) -> str:
        """The `make shards` that gives this set `resolutions` (px) besides its own, for messages."""
        return shards_command(self.root, {*self.resolutions, *resolutions}, _record(self.files))

    def close(self) -> None:
        """End what the files keep open. Records and batches already handed out stay valid."""
        self.files.close()

    @classmethod
    def open(
        cls, root: str | Path, *, resolutions: tuple[int, ...] | None = None, fold: int | None = None,
        files: Files | None = None,
    ) -> ShardSet:  # fmt: skip
        """Open the set at `root`; `resolutions` (px) are those that will be read, all of them if None.

        `files` is where its files come from, `open_files(root)` if None. A set made with FOLDS=k is opened with
        `fold` (0..k-1): that fold becomes `val`, the others `train`. Costs the same for any number of samples, but
        with folds, whose column is read.
        Raises `ResoluteError` when there is no manifest, it is of another version or damaged, a resolution is
        missing, a shard or an index is not at its size, checksums are not what the manifest hashed, or `fold` does
        not fit; `StorageError` if the storage does not deliver. Of a remote set, or of one with very many shards, the
        reader notices shards of other sizes.
        """
        files = files or open_files(root)
        root = files.root  # without credentials
        manifest, digest = read_manifest(files)
        stored = tuple(sorted(int(res) for res in manifest["resolutions"]))
        wanted = stored if resolutions is None else resolutions
        for res in wanted:
            if res not in stored:
                raise ResoluteError(
                    f"{root}: no shards at {res} px, got {','.join(map(str, stored))}; "
                    f"run {shards_command(files.root, {*stored, *wanted}, _record(files))}"
                )
        splits = {}
        for name, info in manifest["splits"].items():
            splits[name] = Split(
                name=name,
                samples=_records(files, manifest["files"], f"index/{name}.npy", SAMPLE),
                stored={r: _records(files, manifest["files"], f"index/{name}-{r}.npy", STORED) for r in wanted},
                shards=tuple(info["shards"]),
            )
        if not files.remote:
            _check_tars(files, manifest["files"], wanted, splits)
        splits = _folded(files.root, splits, manifest["settings"]["val"].get("folds"), fold)
        return cls(
            files=files,
            classes=tuple(manifest["classes"]),
            resolutions=stored,
            margin=manifest["settings"]["margin"],
            hash=digest,
            splits=splits,
            digests=_digests(manifest, wanted, fold),
            repair=repair_hint(files.root),
        )


def is_shard_set(folder: str | Path) -> bool:
    """Whether prep made what lies in a folder on a disk, also if it is unfinished or its manifest damaged or gone.

    Raises `StorageError` if the disk does not answer.
    """
    files = open_files(folder)
    if any(files.identity(name) is not None for name in _TRACES):
        return True
    if files.identity("manifest.json") is None:
        return False
    text = retry_local(files.local("manifest.json").read_bytes, files.where("manifest.json"))
    try:
        manifest = json.loads(text)
    except ValueError:
        return True
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT


def read_manifest(files: Files) -> tuple[dict[str, Any], str]:
    """The manifest's tables and its 12-digit hash.

    Raises `ResoluteError` if there is none that can be used, `StorageError` if it cannot be read.
    """
    where = files.where("manifest.json")
    try:
        text = retry_local(files.local("manifest.json").read_bytes, where)
        manifest = json.loads(text)
        got = (manifest["format"], manifest["version"])
    except FileNotFoundError:
        raise ResoluteError(
            f"{where}: not found, expected a finished shard set; run {shards_command(files.root, (), _record(files))}"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise ResoluteError(
            f"{where}: unreadable ({error!r}), expected a {FORMAT} manifest; {repair_hint(files.root)}"
        ) from None
    if got != (FORMAT, VERSION):
        raise ResoluteError(
            f"{where}: got format {got[0]} version {got[1]}, expected {FORMAT} version {VERSION}; "
            f"rebuild it: run {shards_command(files.root, _stored(manifest), _record(files), rebuild=True)}"
        )
    if not _is_sealed(text):
        raise ResoluteError(
            f"{where}: damaged, got other bytes than its own hash says, expected them as prep wrote them; "
            f"run {shards_command(files.root, _stored(manifest), _record(files))}, which repairs it"
        )
    return manifest, hashlib.sha256(text).hexdigest()[:12]


def command_with_folds(files: Files, manifest: Mapping[str, Any]) -> str:
    """The `make shards` that makes another set, beside this one and of the same photos, with folds."""
    record = {name: value for name, value in (_record(files) or {}).items() if not name.startswith("VAL")}
    if record:
        record["FOLDS"] = "5"
    return shards_command(f"{files.root}-folds", _stored(manifest), record)


def _record(files: Files) -> dict[str, str] | None:
    """What the set was made from, for messages; None if that is not known, or cannot be read now."""
    try:
        return parse_record(files.local(SOURCE_RECORD).read_bytes())
    except (OSError, ResoluteError):
        return None


def _stored(manifest: Mapping[str, Any]) -> list[int]:
    """The resolutions (px) of a manifest that may be of another version, for messages."""
    resolutions = manifest.get("resolutions")
    return [int(res) for res in resolutions if str(res).isdecimal()] if isinstance(resolutions, dict) else []


def _digests(manifest: Mapping[str, Any], resolutions: Iterable[int], fold: int | None) -> dict[str, str]:
    """The digests of `ShardSet.contents`, from the manifest. STORED records hold the CRC-32 of each image."""
    listed = manifest["files"]
    digests = {"classes": hashlib.sha256(json.dumps(manifest["classes"]).encode()).hexdigest()[:12]}
    if fold is not None:
        digests["fold"] = str(fold)
    for split in sorted(manifest["splits"]):
        digests[f"{split} samples and labels"] = listed[f"index/{split}.npy"]["sha256"][:12]
        for res in resolutions:
            digests[f"{split} images at {res} px"] = listed[f"index/{split}-{res}.npy"]["sha256"][:12]
    for res in resolutions:
        digests[f"short side at {res} px"] = str(manifest["resolutions"][str(res)]["short_side"])
    return digests


def manifest_bytes(manifest: Mapping[str, Any]) -> bytes:
    """What `manifest` looks like on disk, `sha256` over all before it at its end: no byte can change unseen."""
    rest = {name: value for name, value in manifest.items() if name != "sha256"}
    text = json.dumps(rest, indent=1).removesuffix("\n}").encode()
    return text + _seal(text)


def _seal(text: bytes) -> bytes:
    return b',\n "sha256": "%s"\n}\n' % hashlib.sha256(text).hexdigest().encode()


def _is_sealed(text: bytes) -> bool:
    """Whether these are `manifest_bytes`. Why not write them again: that takes seconds for 10 000s of shards."""
    end = len(text) - len(_seal(b""))
    return end > 0 and text[end:] == _seal(text[:end])


def _folded(root: str, splits: dict[str, Split], folds: int | None, fold: int | None) -> dict[str, Split]:
    """Make `train` and `val` of a set with folds; other sets stay as they are."""
    if folds is None and fold is None:
        return splits
    if folds is None or fold is None or not 0 <= fold < folds:
        got = "no fold" if fold is None else f"fold {fold}"
        expected = "none: the set has no folds" if folds is None else f"0 to {folds - 1}: the set has {folds} folds"
        raise ResoluteError(f"{root}: got {got}, expected {expected}; correct `fold` in the recipe's [data]")
    every = splits["train"]
    held_out = every.samples["fold"] == fold
    parts = {}
    for name, chosen in (("train", ~held_out), ("val", held_out)):
        places = np.flatnonzero(chosen).astype(np.uint32)
        stored = {res: records.part(places) for res, records in every.stored.items()}
        parts[name] = Split(name=name, samples=every.samples.part(places), shards=every.shards, stored=stored)
    return parts


def _check_tars(
    files: Files, known: Mapping[str, Any], resolutions: tuple[int, ...], splits: Mapping[str, Split]
) -> None:
    """Compare the sizes of the tars that will be read with the manifest's, as many as it can in a moment."""
    end = time.monotonic() + _SIZES_S
    for split in splits.values():
        for res in resolutions:
            for shard in split.shards:
                name = tar_name(res, shard)
                _check_size(files, name, files.size(name), known[name]["bytes"])
                if time.monotonic() > end:
                    return


def _check_size(files: Files, name: str, got: int | None, expected: int) -> None:
    if got is None:
        raise ResoluteError(
            f"{files.where(name)}: not found, expected {expected} bytes; {repair_hint(files.root)}"
        )
    if got != expected:
        raise ResoluteError(
            f"{files.where(name)}: cut short or changed, got {got} bytes, expected {expected}; "
            f"{repair_hint(files.root)}"
        )


def _records(files: Files, known: Mapping[str, Any], name: str, dtype: np.dtype[Any]) -> Records:
    """An index array and its checksums, both at their sizes; the checksums as the manifest hashed them."""
    path, beside = (_local(files, known, one) for one in (name, checksums_name(name)))
    crcs = read_checksums(beside, known[checksums_name(name)]["sha256"], files.where(checksums_name(name)))
    return Records(path, crcs, dtype, where=files.where(name))


def _local(files: Files, known: Mapping[str, Any], name: str) -> Path:
    try:
        path = files.local(name)
        got = retry_local(path.stat, files.where(name)).st_size
    except FileNotFoundError:
        _check_size(files, name, None, known[name]["bytes"])
        raise
    _check_size(files, name, got, known[name]["bytes"])
    return path
