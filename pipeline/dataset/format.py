"""The shard set format: file names, record dtypes and the manifest.

    SHARDS/manifest.json             written last: if it is valid, the set is complete, see `manifest.py`
    SHARDS/manifest.g000.RES-RES.json   that of a generation at these resolutions
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
are those of all generations, one after another. The manifest lists those of the generations.

`prep` writes this format and `pipeline` reads it; both use the dtypes and names defined here.
"""

from __future__ import annotations

import numpy as np

__all__ = [
    "GROUP",
    "SAMPLE",
    "SOURCE",
    "STORED",
    "duplicates_name",
    "generation_mark",
    "groups_name",
    "index_name",
    "key_name",
    "label_digits",
    "names_name",
    "near_copies_name",
    "near_pairs_name",
    "rejects_name",
    "shard_name",
    "source_name",
    "tar_name",
]

KEY_DIGITS = 9

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
