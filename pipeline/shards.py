"""What is on disk? The manifest and the index of a shard set, opened and checked.

    SHARDS/manifest.json             written last: whoever can read it can trust all the rest
    SHARDS/RES/SPLIT-NNNNNN.tar      members KEY.jpg, KEY.cls; same keys, same order at every resolution
    SHARDS/RES/SPLIT-NNNNNN.idx      DALI index of that tar
    SHARDS/index/SPLIT.npy           SAMPLE records, one a sample, in shard order
    SHARDS/index/SPLIT-RES.npy       STORED records: where that sample's JPEG lies at that resolution
    SHARDS/index/SPLIT.source.npy    SOURCE records: what that sample was made from

`prep` writes this and `pipeline` reads it; both take the record types, names and key formats from here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import ResoluteError

__all__ = ["FORMAT", "SAMPLE", "SOURCE", "STORED", "VERSION", "ShardSet", "Split", "key_name", "label_digits",
           "manifest_bytes", "read_manifest", "shard_name"]  # fmt: skip

FORMAT, VERSION = "resolute-shards", 2
KEY_DIGITS = 9

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


@dataclass(frozen=True, kw_only=True)
class Split:
    """One split of a shard set: `samples` (N,) SAMPLE, `stored[res]` (N,) STORED, `shards` their names."""

    name: str
    samples: NDArray[Any]
    stored: Mapping[int, NDArray[Any]]
    shards: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.samples)


@dataclass(frozen=True, kw_only=True)
class ShardSet:
    """A shard set that was opened: its manifest was read and every file it needs is there, at its size."""

    root: Path
    classes: tuple[str, ...]
    resolutions: tuple[int, ...]
    margin: float
    hash: str  # of the manifest, 12 hex digits: names the data in checkpoints and results
    splits: Mapping[str, Split]

    def short_side(self, res: int) -> int:
        """Nominal stored short side in px: round(res * margin). Smaller images are stored as they came."""
        return round(res * self.margin)

    def path(self, res: int, shard: str) -> Path:
        return self.root / str(res) / f"{shard}.tar"

    @classmethod
    def open(
        cls, root: str | Path, *, resolutions: tuple[int, ...] | None = None, fold: int | None = None
    ) -> ShardSet:
        """Open the set at `root`; `resolutions` (px) are those that will be read, all of them if None.

        A set made with FOLDS=k is opened with `fold` (0..k-1): that fold becomes `val`, the others `train`.
        Raises `ResoluteError` when there is no manifest, it is of another version or damaged, a resolution is
        missing, a shard is not at its size, an index is not what the manifest hashed, or `fold` does not fit.
        """
        root = Path(root)
        manifest, digest = read_manifest(root)
        stored = tuple(sorted(int(res) for res in manifest["resolutions"]))
        wanted = stored if resolutions is None else resolutions
        for res in wanted:
            if res not in stored:
                all_res = ",".join(map(str, sorted({*stored, *wanted})))
                raise ResoluteError(
                    f"{root}: no shards at {res} px, got {','.join(map(str, stored))}; "
                    f"run `make shards RES={all_res} OUT={root}`"
                )
        splits = {}
        for name, info in manifest["splits"].items():
            shards = tuple(info["shards"])
            for res in wanted:
                for shard in shards:
                    _check_size(root, manifest["files"], f"{res}/{shard}.tar")
            splits[name] = Split(
                name=name,
                samples=_load(root, manifest["files"], f"index/{name}.npy", SAMPLE),
                stored={r: _load(root, manifest["files"], f"index/{name}-{r}.npy", STORED) for r in wanted},
                shards=shards,
            )
        splits = _folded(root, splits, manifest["settings"]["val"].get("folds"), fold)
        return cls(
            root=root,
            classes=tuple(manifest["classes"]),
            resolutions=stored,
            margin=manifest["settings"]["margin"],
            hash=digest,
            splits=splits,
        )


def read_manifest(root: Path) -> tuple[dict[str, Any], str]:
    """The manifest's tables and its 12-digit hash. Raises `ResoluteError` if there is none we can use."""
    path = root / "manifest.json"
    try:
        text = path.read_bytes()
        manifest = json.loads(text)
        got = (manifest["format"], manifest["version"])
        whole = got != (FORMAT, VERSION) or text == manifest_bytes(manifest)
    except FileNotFoundError:
        raise ResoluteError(
            f"{path}: not found, expected a finished shard set; run `make shards SRC=photos OUT={root}`"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResoluteError(
            f"{path}: unreadable ({error!r}), expected a {FORMAT} manifest; rebuild with `make shards`"
        ) from None
    if got != (FORMAT, VERSION):
        raise ResoluteError(
            f"{path}: got format {got[0]} version {got[1]}, expected {FORMAT} version {VERSION}; "
            f"rebuild with `make shards REBUILD=1`"
        )
    if not whole:
        raise ResoluteError(
            f"{path}: damaged, got other bytes than its own hash says, expected them as prep wrote them; "
            "run `make shards` again, which repairs it"
        )
    return manifest, hashlib.sha256(text).hexdigest()[:12]


def manifest_bytes(manifest: Mapping[str, Any]) -> bytes:
    """What `manifest` looks like on disk, with `sha256` over all the rest of it: no byte can change unseen."""
    rest = {name: value for name, value in manifest.items() if name != "sha256"}
    digest = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**rest, "sha256": digest}, indent=1) + "\n").encode()


def _folded(root: Path, splits: dict[str, Split], folds: int | None, fold: int | None) -> dict[str, Split]:
    """Make `train` and `val` of a set with folds; other sets stay as they are."""
    if folds is None and fold is None:
        return splits
    if folds is None or fold is None or not 0 <= fold < folds:
        got = "no fold" if fold is None else f"fold {fold}"
        expected = "none: the set has no folds" if folds is None else f"0 to {folds - 1}: the set has {folds} folds"
        raise ResoluteError(f"{root}: got {got}, expected {expected}; correct `fold` in the recipe's [data]")
    every = splits["train"]
    held_out = every.samples["fold"] == fold
    return {
        name: Split(
            name=name, samples=every.samples[chosen], shards=every.shards,
            stored={res: stored[chosen] for res, stored in every.stored.items()},
        )
        for name, chosen in (("train", ~held_out), ("val", held_out))
    }  # fmt: skip


def _check_size(root: Path, files: Mapping[str, Any], name: str) -> None:
    expected = files[name]["bytes"]
    try:
        got = (root / name).stat().st_size
    except OSError as error:
        raise ResoluteError(
            f"{root / name}: {error.strerror}, expected {expected} bytes; run `make shards` again"
        ) from None
    if got != expected:
        raise ResoluteError(
            f"{root / name}: cut short or changed, got {got} bytes, expected {expected}; "
            f"run `make shards` again, with the arguments that made it: it repairs the set"
        )


def _load(root: Path, files: Mapping[str, Any], name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    """A memory-mapped index array, checked against the manifest's size and SHA-256."""
    _check_size(root, files, name)
    with (root / name).open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != files[name]["sha256"]:
        raise ResoluteError(
            f"{root / name}: changed since prep, got SHA-256 {got[:12]}…, expected {files[name]['sha256'][:12]}…; "
            f"run `make verify`, then `make shards` again: it repairs the set"
        )
    array: NDArray[Any] = np.load(root / name, mmap_mode="r")
    assert array.dtype == dtype, (name, array.dtype)
    return array
