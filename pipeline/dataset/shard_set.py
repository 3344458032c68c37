"""The shard set format (file names, record dtypes, manifest) and `ShardSet`, which opens and checks a set.

    SHARDS/manifest.json             written last: if it is valid, the set is complete
    SHARDS/RES/SPLIT-NNNNNN.tar      members KEY.jpg, KEY.cls; same keys in the same order at every resolution
    SHARDS/RES/SPLIT-NNNNNN.idx      DALI index of that tar
    SHARDS/index/SPLIT.npy           SAMPLE records, one per sample, in shard order
    SHARDS/index/SPLIT-RES.npy       STORED records: where the sample's JPEG is stored at that resolution
    SHARDS/index/SPLIT.crc.npy       block checksums of SPLIT.npy; SPLIT-RES.crc.npy those of SPLIT-RES.npy
    SHARDS/index/SPLIT.source.npy    SOURCE records: the input file of each sample
    SHARDS/records/                  prep's own: its plan, and what it needs to resume, repair or extend the set

`prep` writes this format and `pipeline` reads it; both use the dtypes and names defined here.
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
from pipeline.storage.base import Files, open_files
from pipeline.storage.local import retry_local

from .index_array import REPAIR, Records, checksums_name, read_checksums
from .source_record import SOURCE_RECORD, parse_record, repair_hint, shards_command

__all__ = ["FORMAT", "SAMPLE", "SOURCE", "STORED", "VERSION", "ShardSet", "Split", "command_with_folds",
           "is_sealed", "is_shard_set", "key_name", "label_digits", "manifest_bytes", "read_manifest", "shard_name",
           "tar_name"]  # fmt: skip

FORMAT, VERSION = "resolute-shards", 3
KEY_DIGITS = 9
# Written only by prep: the first while it runs, the second before any shard.
_PREP_FILES = (".prep", "records/plan.json")
_SIZES_S = 0.3  # time limit for checking tar sizes when a set is opened; the reader detects the rest

# `key`: number in prep's global order, names the members (KEY = 000000042); rejected inputs leave gaps.
# `fold`: 0 unless the set was made with FOLDS.
SAMPLE = np.dtype([("key", "<u8"), ("label", "<u4"), ("fold", "<u4")])
# `offset`, `nbytes`: position of the JPEG in the tar, in bytes; width and height in px.
STORED = np.dtype([("offset", "<u8"), ("nbytes", "<u4"), ("crc32", "<u4"), ("shard", "<u4"),
                   ("width", "<u2"), ("height", "<u2")])  # fmt: skip
# The input file: first 8 bytes of its SHA-256 (little-endian), its size in bytes, its upright width and height in px.
SOURCE = np.dtype([("digest", "<u8"), ("nbytes", "<u4"), ("width", "<u2"), ("height", "<u2")])


def key_name(key: int) -> str:
    return f"{key:0{KEY_DIGITS}d}"


def label_digits(classes: int) -> int:
    """Number of digits of every `.cls` of a set."""
    return max(4, len(str(classes - 1)))


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:06d}"


def tar_name(res: int, shard: str) -> str:
    return f"{res}/{shard}.tar"


@dataclass(frozen=True, kw_only=True)
class Split:
    """One split: `samples` (N,) SAMPLE, `stored[res]` (N,) STORED, and the names of its `shards`.

    Records stay on disk and are verified on first use, see `Records`.
    """

    name: str
    samples: Records
    stored: Mapping[int, Records]
    shards: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.samples)


@dataclass(frozen=True, kw_only=True)
class ShardSet:
    """An open shard set: its manifest is valid, and its index files exist with the expected sizes."""

    files: Files
    classes: tuple[str, ...]
    resolutions: tuple[int, ...]
    margin: float
    hash: str  # of the manifest, 12 hex digits
    splits: Mapping[str, Split]
    digests: Mapping[str, str] = field(default_factory=dict)  # see `contents`; keys about pixels end in "at RES px"
    # third-party tars: `Files.identity` of each when it was indexed
    states: Mapping[str, tuple[int, str]] = field(default_factory=dict, repr=False)
    single_resolution: bool = False  # third-party tars (`open_webdataset`): one stored size serves every `res`
    repair: str = REPAIR  # remedy for damage, in messages
    _known_state: dict[str, tuple[int, str]] = field(default_factory=dict, init=False, repr=False, compare=False)

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

    def identity(self, resolutions: Iterable[int] | None = None) -> str:
        """12 hex digits over `contents`: identifies the data of a run on `resolutions` in its checkpoints."""
        return hashlib.sha256(json.dumps(self.contents(resolutions), sort_keys=True).encode()).hexdigest()[:12]

    def check_unchanged(self, tar: str) -> None:
        """Raise `StorageError` if the set (third-party tars: `tar`) is gone or was replaced since it was opened.

        Adding a resolution is not a change. Call this before reporting a sample as damaged: if the set was replaced,
        there is nothing to skip or repair.
        """
        name = tar if self.single_resolution else "manifest.json"
        what = f"{self.files.where(tar)}: the tar" if self.single_resolution else f"{self.root}: the shard set"
        state = self.files.identity(name)
        if state is None:
            raise StorageError(
                f"{what} is gone, expected it as it was opened; put it back or mount its volume, then run the same "
                "command again: it continues"
            )
        if self.single_resolution:
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
        """Local path of a complete shard; a remote one is downloaded first."""
        return self.files.local(self.tar(res, shard))

    def tar(self, res: int, shard: str) -> str:
        """Name, relative to the root, of the tar that holds `shard` at `res` px."""
        return shard if self.single_resolution else tar_name(res, shard)

    def command_that_adds(self, resolutions: Iterable[int]) -> str:
        """The `make shards` command that adds `resolutions` (px) to this set, for messages."""
        return shards_command(self.root, {*self.resolutions, *resolutions}, _record(self.files))

    def close(self) -> None:
        """Close the files. Records and batches already returned stay valid."""
        self.files.close()

    @classmethod
    def open(
        cls, root: str | Path, *, resolutions: tuple[int, ...] | None = None, fold: int | None = None,
        files: Files | None = None,
    ) -> ShardSet:  # fmt: skip
        """Open the set at `root`, a folder or URL.

        resolutions   those that will be read, in px; None: all
        fold          for a set made with FOLDS=k: this fold (0..k-1) becomes `val`, the others `train`
        files         source of the files; None: `open_files(root)`

        O(1) in the number of samples, except that `fold` reads one column. Shard sizes are checked up to a time limit
        and only locally; the reader detects the rest.
        Raises `ResoluteError` if the manifest is missing, damaged or of another version, a resolution is missing, the
        size of a shard or index or the hash of a checksum file is wrong, or `fold` does not exist; `StorageError` if
        the storage fails.
        """
        files = files or open_files(root)
        root = files.root  # without credentials
        manifest, digest = read_manifest(files)
        stored = tuple(sorted(int(res) for res in manifest["resolutions"]))
        requested = stored if resolutions is None else resolutions
        for res in requested:
            if res not in stored:
                raise ResoluteError(
                    f"{root}: no shards at {res} px, got {','.join(map(str, stored))}; "
                    f"run {shards_command(files.root, {*stored, *requested}, _record(files))}"
                )
        splits = {}
        for name, info in manifest["splits"].items():
            splits[name] = Split(
                name=name,
                samples=_records(files, manifest["files"], f"index/{name}.npy", SAMPLE),
                stored={r: _records(files, manifest["files"], f"index/{name}-{r}.npy", STORED) for r in requested},
                shards=tuple(info["shards"]),
            )
        if not files.remote:
            _check_tars(files, manifest["files"], requested, splits)
        splits = _apply_fold(files.root, splits, manifest["settings"]["val"].get("folds"), fold)
        return cls(
            files=files,
            classes=tuple(manifest["classes"]),
            resolutions=stored,
            margin=manifest["settings"]["margin"],
            hash=digest,
            splits=splits,
            digests=_digests(manifest, requested, fold),
            repair=repair_hint(files.root),
        )


def is_shard_set(folder: str | Path) -> bool:
    """Whether a local folder is a shard set of prep, including unfinished ones and ones with a damaged manifest.

    Raises `StorageError` if the disk does not answer.
    """
    files = open_files(folder)
    if any(files.identity(name) is not None for name in _PREP_FILES):
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
    """Read and check the manifest; returns its tables and its hash (12 hex digits).

    Raises `ResoluteError` if it is missing, damaged or of another version, `StorageError` if it cannot be read.
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
    if not is_sealed(text):
        raise ResoluteError(
            f"{where}: damaged, got bytes that do not match its own hash, expected them as prep wrote them; "
            f"run {shards_command(files.root, _stored(manifest), _record(files))}, which repairs it"
        )
    return manifest, hashlib.sha256(text).hexdigest()[:12]


def command_with_folds(files: Files, manifest: Mapping[str, Any]) -> str:
    """The `make shards` command that makes a set with folds from the same photos, for messages."""
    record = {name: value for name, value in (_record(files) or {}).items() if not name.startswith("VAL")}
    if record:
        record["FOLDS"] = "5"
    return shards_command(f"{files.root}-folds", _stored(manifest), record)


def _record(files: Files) -> dict[str, str] | None:
    """The arguments the set was made with, for messages; None if they are unknown or cannot be read."""
    try:
        return parse_record(files.local(SOURCE_RECORD).read_bytes())
    except (OSError, ResoluteError):
        return None


def _stored(manifest: Mapping[str, Any]) -> list[int]:
    """Resolutions (px) of a manifest of any version, for messages."""
    resolutions = manifest.get("resolutions")
    return [int(res) for res in resolutions if str(res).isdecimal()] if isinstance(resolutions, dict) else []


def _digests(manifest: Mapping[str, Any], resolutions: Iterable[int], fold: int | None) -> dict[str, str]:
    """The digests of `ShardSet.contents`. Those of images follow from STORED, which holds each image's CRC-32."""
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
    """`manifest` as written to disk; its last entry, `sha256`, covers all bytes before it."""
    unsealed = {name: value for name, value in manifest.items() if name != "sha256"}
    text = json.dumps(unsealed, indent=1).removesuffix("\n}").encode()
    return text + _seal(text)


def _seal(text: bytes) -> bytes:
    return b',\n "sha256": "%s"\n}\n' % hashlib.sha256(text).hexdigest().encode()


def is_sealed(text: bytes) -> bool:
    """Whether `text` ends with the correct seal. why not serialise again: seconds for 10 000s of shards."""
    end = len(text) - len(_seal(b""))
    return end > 0 and text[end:] == _seal(text[:end])


def _apply_fold(root: str, splits: dict[str, Split], folds: int | None, fold: int | None) -> dict[str, Split]:
    """Split a set with folds into `train` and `val`; other sets are returned unchanged."""
    if folds is None and fold is None:
        return splits
    if folds is None or fold is None or not 0 <= fold < folds:
        got = "no fold" if fold is None else f"fold {fold}"
        expected = "none: the set has no folds" if folds is None else f"0 to {folds - 1}: the set has {folds} folds"
        raise ResoluteError(f"{root}: got {got}, expected {expected}; correct `fold` in the recipe's [data]")
    unfolded = splits["train"]
    held_out = unfolded.samples["fold"] == fold
    folded = {}
    for name, mask in (("train", ~held_out), ("val", held_out)):
        rows = np.flatnonzero(mask).astype(np.uint32)
        stored = {res: records.subset(rows) for res, records in unfolded.stored.items()}
        samples = unfolded.samples.subset(rows)
        folded[name] = Split(name=name, samples=samples, shards=unfolded.shards, stored=stored)
    return folded


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


def _records(files: Files, listed: Mapping[str, Any], name: str, dtype: np.dtype[Any]) -> Records:
    """Open an index array; checks its size, and the size and SHA-256 of its checksums."""
    path, crc_path = (_local(files, listed, file) for file in (name, checksums_name(name)))
    crcs = read_checksums(crc_path, listed[checksums_name(name)]["sha256"], files.where(checksums_name(name)))
    return Records(path, crcs, dtype, where=files.where(name))


def _local(files: Files, listed: Mapping[str, Any], name: str) -> Path:
    try:
        path = files.local(name)
        got = retry_local(path.stat, files.where(name)).st_size
    except FileNotFoundError:
        _check_size(files, name, None, listed[name]["bytes"])
        raise
    _check_size(files, name, got, listed[name]["bytes"])
    return path
