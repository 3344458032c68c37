"""Consistency checks between the index, the lists and the manifest of a set.

Every check raises `Damage` with what is wrong, got and expected.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.shard_set import SAMPLE, SOURCE, STORED, shard_name

from .shard_check import Damage
from .tar_format import BLOCK_BYTES, padded_bytes, tar_end

__all__ = ["check_duplicates", "check_info", "check_names", "check_rejects", "check_samples", "check_sources",
           "check_stored"]  # fmt: skip


def check_samples(rows: NDArray[Any], manifest: Mapping[str, Any], split: str) -> NDArray[np.int64]:
    """Check the SAMPLE records of a split; returns (shards + 1,) int64, the first row of each shard and the total."""
    info = manifest["splits"][split]
    _expect_shape(rows, SAMPLE, info["samples"])
    keys = rows["key"]
    if len(rows) > 1 and not np.all(keys[1:] > keys[:-1]):
        raise Damage(f"keys out of order, got {int(np.argmax(keys[1:] <= keys[:-1]))} ascending ones, expected all")
    for column, limit in (
        ("label", len(manifest["classes"])),
        ("fold", manifest["settings"]["val"].get("folds", 1)),
    ):
        if len(rows) and int(rows[column].max()) >= limit:
            raise Damage(f"{column} out of range, got {rows[column].max()}, expected below {limit}")
    per_shard = manifest["settings"]["shard_samples"]
    numbers, starts = np.unique(keys // per_shard, return_index=True)
    names = [shard_name(split, number) for number in numbers.tolist()]
    if names != info["shards"]:
        raise Damage(f"samples of other shards, got {len(names)} shards, expected the manifest's {len(info['shards'])}")
    return np.append(starts, len(rows)).astype(np.int64)


def check_sources(rows: NDArray[Any], manifest: Mapping[str, Any], split: str) -> None:
    """Check the SOURCE records of a split."""
    _expect_shape(rows, SOURCE, manifest["splits"][split]["samples"])
    for column in ("nbytes", "width", "height"):
        if len(rows) and int(rows[column].min()) < 1:
            raise Damage(f"{column} of row {int(rows[column].argmin())} out of range, got 0, expected at least 1")


def check_stored(
    rows: NDArray[Any],
    manifest: Mapping[str, Any],
    split: str,
    res: str,
    *,
    bounds: NDArray[np.int64],
    sources: NDArray[Any] | None,
    label_digits: int,
) -> None:
    """Check the STORED records of a split at `res`, one shard in memory at a time.

    `bounds` are what `check_samples` returned; `sources` are the SOURCE records, None if they are damaged.
    """
    _expect_shape(rows, STORED, manifest["splits"][split]["samples"])
    short_side = manifest["resolutions"][res]["short_side"]
    for number, name in enumerate(manifest["splits"][split]["shards"]):
        part = slice(int(bounds[number]), int(bounds[number + 1]))
        shard = np.array(rows[part])
        _expect_same("shard", shard["shard"].astype(np.int64), np.full(len(shard), number), name)
        label_bytes = BLOCK_BYTES + padded_bytes(label_digits)
        ends = np.cumsum(BLOCK_BYTES + -(-shard["nbytes"].astype(np.int64) // BLOCK_BYTES) * BLOCK_BYTES + label_bytes)
        starts = np.concatenate([[0], ends[:-1]])
        _expect_same("offset", shard["offset"].astype(np.int64), starts + BLOCK_BYTES, name)
        expected = manifest["files"][f"{res}/{name}.tar"]["bytes"]
        total = int(ends[-1])
        if total + len(tar_end(total)) != expected:
            nbytes = total + len(tar_end(total))
            raise Damage(f"{name}: samples of another tar, got {nbytes} bytes, expected {expected}")
        if sources is not None:
            source = sources[part]
            sides = np.minimum(np.minimum(source["width"], source["height"]), short_side)
            _expect_same("short side", np.minimum(shard["width"], shard["height"]), sides, name)


def check_names(lines: Iterable[bytes], manifest: Mapping[str, Any], split: str) -> None:
    """Check SPLIT.sources.jsonl: one name per sample."""
    count = 0
    for count, line in enumerate(lines, 1):
        if not isinstance(_json(line, count), str):
            raise Damage(f"line {count}: got {line[:40]!r}, expected a name in JSON")
    _expect_equal("lines", count, manifest["splits"][split]["samples"])


def check_rejects(lines: Iterable[bytes], manifest: Mapping[str, Any]) -> None:
    """Check rejects.jsonl: one {path, split, key, reason} per rejected input."""
    count = 0
    for count, line in enumerate(lines, 1):
        row = _json(line, count)
        if not isinstance(row, dict) or set(row) != {"path", "split", "key", "reason"}:
            raise Damage(f"line {count}: got {line[:40]!r}, expected path, split, key and reason")
        if row["split"] not in manifest["splits"]:
            raise Damage(f"line {count}: got split {row['split']}, expected one of the set's")
    _expect_equal("lines", count, manifest["source"]["rejected"])


def check_duplicates(lines: Iterable[bytes], manifest: Mapping[str, Any]) -> None:
    """Check duplicates.jsonl: groups of samples made from identical files."""
    got = {"groups": 0, "extra": 0, "two_labels": 0, "across_splits": 0}
    for count, line in enumerate(lines, 1):
        group = _json(line, count)
        if not isinstance(group, list) or len(group) < 2:
            raise Damage(f"line {count}: got {line[:40]!r}, expected a list of two or more")
        got["groups"] += 1
        got["extra"] += len(group) - 1
        got["two_labels"] += len({row["label"] for row in group}) > 1
        got["across_splits"] += len({row["split"] for row in group}) > 1
    for name, value in manifest["source"]["duplicates"].items():
        _expect_equal(name, got[name], value)


def check_info(data: bytes, manifest: Mapping[str, Any], name: str, bounds: Mapping[str, NDArray[np.int64]]) -> None:
    """Check timm's `_info.json` of the set or of one resolution; `bounds` are those of the undamaged splits."""
    timm_info = _json(data, 1)
    folder = name.rpartition("/")[0]
    prefix = "" if folder else f"{max(map(int, manifest['resolutions']))}/"
    for split, info in manifest["splits"].items():
        row = timm_info["splits"].get(split, {}) if isinstance(timm_info, dict) else {}
        _expect_equal(f"num_samples of {split}", row.get("num_samples"), info["samples"])
        names = [f"{prefix}{shard}.tar" for shard in info["shards"]]
        if row.get("filenames") != names:
            raise Damage(f"filenames of {split}: got others, expected the manifest's {len(names)}")
        if split in bounds and row.get("shard_lengths") != np.diff(bounds[split]).tolist():
            raise Damage(f"shard_lengths of {split}: got others, expected those of index/{split}.npy")


def _expect_shape(rows: NDArray[Any], dtype: np.dtype[Any], count: int) -> None:
    if rows.dtype != dtype or rows.shape != (count,):
        raise Damage(f"other records, got {rows.dtype} {rows.shape}, expected {dtype} ({count},)")


def _expect_same(what: str, got: NDArray[Any], expected: NDArray[Any], shard: str) -> None:
    different = np.flatnonzero(got != expected)
    if len(different):
        i = int(different[0])
        raise Damage(f"{shard}: {what} of its sample {i} is wrong, got {got[i]}, expected {expected[i]}")


def _expect_equal(what: str, got: Any, expected: int) -> None:
    if got != expected:
        raise Damage(f"{what}: got {got}, expected {expected}")


def _json(line: bytes, number: int) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        raise Damage(f"line {number}: got {line[:40]!r}, expected JSON") from None
