"""The shard set format: file names, record dtypes and the manifest.

    SHARDS/manifest.json             written last: if it is valid, the set is complete
    SHARDS/RES/SPLIT-NNNNNN.tar      members KEY.jpg and KEY.cls (KEY.json unless targets are classes);
                                     same keys in the same order at every resolution
    SHARDS/RES/SPLIT-NNNNNN.idx      DALI index of that tar
    SHARDS/index/SPLIT.npy           SAMPLE records (of `Target.sample_dtype`), one per sample, in shard order
    SHARDS/index/SPLIT-RES.npy       STORED records: where the sample's JPEG is stored at that resolution
    SHARDS/index/SPLIT.source.npy    SOURCE records: the input file of each sample
    SHARDS/index/groups.npy          GROUP records of the samples that belong together, if there are any
    SHARDS/records/                  prep's own: its plan, and what it needs to resume, repair or extend the set

Photos that were added later form generations: the first run makes generation 0, each extension another. Generation g
has shards of its own, numbered after the older ones, and index files of its own with the rows of these shards alone,
`index/SPLIT.g001.npy` and so on, so that an extension changes no older file of shards or index. The samples of a set
are those of all generations, one after another. The manifest lists the generations.

`prep` writes this format and `pipeline` reads it; both use the dtypes and names defined here.
"""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from resolute.errors import ResoluteError
from resolute.pipeline.storage.base import Files
from resolute.pipeline.storage.local import retry_local
from resolute.urls import is_url

from .source_record import missing_set_hint, read_record, repair_hint, shards_command

__all__ = [
    "FORMAT",
    "GROUP",
    "READ_VERSIONS",
    "SAMPLE",
    "SOURCE",
    "STORED",
    "VERSION",
    "WITH_GROUPS",
    "WRITE_VERSIONS",
    "duplicates_name",
    "generation_mark",
    "groups_name",
    "index_name",
    "is_sealed",
    "key_name",
    "label_digits",
    "manifest_bytes",
    "names_name",
    "near_copies_name",
    "near_pairs_name",
    "read_manifest",
    "rejects_name",
    "shard_name",
    "source_name",
    "tar_name",
]

FORMAT, VERSION = "resolute-shards", 6
WITH_GROUPS = 7  # the version of a set with a GROUP file, which older code would ignore
WRITE_VERSIONS = (VERSION, WITH_GROUPS)  # of sets that prep can resume and extend
READ_VERSIONS = (5, *WRITE_VERSIONS)  # of sets that can be trained on and verified
KEY_DIGITS = 9
_LOOKED_AT = 10_000  # names of a folder that is no shard set. why so few: it may be any, such as /usr
# Written only by prep: the first while it runs, the second before any shard.
_PREP_FILES = (".prep", "records/plan.json")

# `key`: number in prep's global order, names the members (KEY = 000000042); rejected inputs leave gaps.
# `label`: the class number. Sets with other targets have another column in its place, see `Target`.
SAMPLE = np.dtype([("key", "<u8"), ("label", "<u4")])
# `offset`, `nbytes`: position of the JPEG in the tar, in bytes; width and height in px.
STORED = np.dtype(
    [("offset", "<u8"), ("nbytes", "<u4"), ("crc32", "<u4"), ("shard", "<u4"), ("width", "<u2"), ("height", "<u2")]
)
# The input file: first 8 bytes of its SHA-256 (little-endian), its size in bytes, its upright width and height in px.
SOURCE = np.dtype([("digest", "<u8"), ("nbytes", "<u4"), ("width", "<u2"), ("height", "<u2")])

# Samples of a set, sorted by split (0: train, 1: val) and key, that belong together: those with the same `group`, from
# 1, as GROUP says; those with the same `near`, from 1, show the same picture or the same moment. 0: none. A
# generation's file is about the samples up to and including it; one without such samples has none.
GROUP = np.dtype([("split", "u1"), ("key", "<u8"), ("group", "<u4"), ("near", "<u4")])


def key_name(key: int) -> str:
    return f"{key:0{KEY_DIGITS}d}"


def label_digits(classes: int) -> int:
    """Number of digits of every `.cls` of a set."""
    return max(4, len(str(classes - 1)))


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:06d}"


def tar_name(res: int, shard: str) -> str:
    return f"{res}/{shard}.tar"


def generation_mark(generation: int, sep: str = ".g") -> str:
    """The suffix in the file names of a generation: empty for generation 0, `.g001` for generation 1."""
    return f"{sep}{generation:03d}" if generation else ""


def index_name(split: str, generation: int = 0, *, res: int | str | None = None) -> str:
    """The index array of a split's rows of one generation: STORED at `res` (px), SAMPLE if it is None."""
    return f"index/{split}{'' if res is None else f'-{res}'}{generation_mark(generation)}.npy"


def source_name(split: str, generation: int = 0) -> str:
    """The SOURCE array of a split's rows of one generation."""
    return f"index/{split}{generation_mark(generation)}.source.npy"


def groups_name(generation: int = 0) -> str:
    """The GROUP array of the samples up to and including a generation."""
    return f"index/groups{generation_mark(generation)}.npy"


def names_name(split: str, generation: int = 0) -> str:
    """The names of the input files of a split's samples of one generation, one JSON string per line."""
    return f"index/{split}{generation_mark(generation)}.sources.jsonl"


def rejects_name(generation: int = 0) -> str:
    """The list of the inputs that were rejected, up to and including a generation."""
    return f"rejects{generation_mark(generation)}.jsonl"


def duplicates_name(generation: int = 0) -> str:
    """The list of the groups of identical inputs, up to and including a generation."""
    return f"duplicates{generation_mark(generation)}.jsonl"


def near_copies_name(generation: int = 0) -> str:
    """The table of the photos that show the same picture or the same moment, up to and including a generation."""
    return f"near_copies{generation_mark(generation)}.csv"


def near_pairs_name(generation: int = 0) -> str:
    """The list of the pairs of these photos, and of those that are less alike, up to and including a generation."""
    return f"near_copies{generation_mark(generation)}.jsonl"


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
        is_unfinished = any(files.file_version(name) is not None for name in _PREP_FILES)
        if not is_unfinished and _are_tars(files.root):
            raise ResoluteError(
                f"{files.root}: got WebDataset tars, expected a finished shard set; make one of them: run `resolute "
                f"shards --src {files.root} --out shards`"
            ) from None
        record = read_record(files)
        hint = missing_set_hint(shards_command(files.root, (), record), record)
        raise ResoluteError(f"{where}: not found, expected a finished shard set; {hint}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ResoluteError(
            f"{where}: unreadable ({error!r}), expected a {FORMAT} manifest; {repair_hint(files.root)}"
        ) from None
    if got not in [(FORMAT, version) for version in READ_VERSIONS]:
        raise ResoluteError(
            f"{where}: got format {got[0]} version {got[1]}, expected {FORMAT} version {VERSION}; "
            f"rebuild it: run {shards_command(files.root, _stored(manifest), read_record(files), rebuild=True)}"
        )
    if not is_sealed(text):
        raise ResoluteError(
            f"{where}: damaged, got bytes that do not match its own hash, expected them as prep wrote them; "
            f"run {shards_command(files.root, _stored(manifest), read_record(files))}, which repairs it"
        )
    if left_out := sum(sum(added.get("dropped", {}).values()) for added in manifest.get("generations", [])[-1:]):
        raise ResoluteError(
            f"{where}: made with DROP=1 by an earlier version, got a set that leaves out {left_out} photos of its "
            "shards, expected one that holds all of them; use that version, or rebuild the set: run "
            f"{shards_command(files.root, _stored(manifest), read_record(files), rebuild=True)}"
        )
    return manifest, hashlib.sha256(text).hexdigest()[:12]


def _are_tars(root: str) -> bool:
    """Whether a path or URL without a manifest is one of tars, a pattern or a folder of some."""
    if root.endswith((".tar", ".tar.gz", ".tgz")) or "{" in root or glob.has_magic(root):
        return ".tar" in root or ".tgz" in root
    return not is_url(root) and _holds_tars(Path(root))


def _holds_tars(folder: Path) -> bool:
    """Whether a folder, or one in it, holds tars, by its first names and the first ones one level below."""
    names = list(islice(_paths(folder), _LOOKED_AT))
    below = chain.from_iterable(map(_paths, names))
    return any(path.suffix == ".tar" for path in chain(names, islice(below, _LOOKED_AT)))


def _paths(folder: Path) -> Iterator[Path]:
    """The paths in a folder; none if it is a file, or cannot be read."""
    with suppress(OSError):
        yield from folder.iterdir()


def _stored(manifest: Mapping[str, Any]) -> list[int]:
    """Resolutions (px) of a manifest of any version, for messages."""
    resolutions = manifest.get("resolutions")
    return [int(res) for res in resolutions if str(res).isdecimal()] if isinstance(resolutions, dict) else []


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
