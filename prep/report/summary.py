"""What does a user want to know when prep is done?"""

from __future__ import annotations

import json
from typing import Any

from prep.config import Settings
from prep.plan.input_checks import describe_ignored, size_warnings
from prep.plan.shuffle import WINDOW_SAMPLES, mixing
from prep.prepare import Built, told_by_kind
from prep.storage.output import Store

from .browse import OpenSet

__all__ = ["summary"]

_SHUFFLE_WINDOWS = 4  # fewer tell nothing about the order


def summary(settings: Settings, built: Built, store: Store) -> str:
    """The closing lines, without a final newline."""
    manifest, tally = built.manifest, built.tally
    counts = ", ".join(f"{name} {info['samples']}" for name, info in manifest["splits"].items())
    classes = f"{len(manifest['classes'])} classes"
    if tally is None:
        return f"{store.where}: already there ({counts}; {classes}); nothing to do"
    source = manifest["source"]
    samples = sum(split["samples"] for split in manifest["splits"].values())
    ignored = describe_ignored(built.ignored)
    lines = [f"{store.where}: {samples} images, {classes}, {counts}; ignored: {ignored}"]
    if built.kept:
        made = tally.images - tally.rejects
        lines.append(f"  {built.kept} shards were there and are kept, {made} images were done now")
    lines.append(
        f"  {built.elapsed_s:.1f} s, {tally.images / built.elapsed_s:.0f} images/s with {settings.worker_count} "
        f"workers; {_where_time_went(tally)}"
    )
    for res, info in manifest["resolutions"].items():
        tars = [file["bytes"] for name, file in manifest["files"].items() if _is_tar(name, res)]
        lines.append(
            f"  {res:>4} px: short side {info['short_side']} px, {len(tars)} shards, "
            f"{sum(tars) / 1e6:.1f} MB, {sum(tars) / samples / 1e3:.1f} kB a sample"
        )
    with OpenSet(store, manifest) as opened:
        labels = opened.samples("train")["label"]
        if len(labels) >= _SHUFFLE_WINDOWS * WINDOW_SAMPLES:
            mixed = mixing(labels)
            lines.append(
                f"  shuffle: windows of {WINDOW_SAMPLES} samples are {mixed.measured:.3f} from the overall class mix "
                f"(perfect shuffle {mixed.expected:.3f}, sorted by class near 1)"
            )
        sides = {int(res): info["short_side"] for res, info in manifest["resolutions"].items()}
        sources = (opened.sources(split) for split in manifest["splits"])
        lines += [f"  WARNING: {warning}" for warning in (*built.warnings, *size_warnings(sides, sources))]
    lines += _duplicates(source["duplicates"], store.where)
    lines.append(f"  rejected: {source['rejected']}{_rejects(source['rejected'], store)}")
    return "\n".join(lines)


def _where_time_went(tally: Any) -> str:
    parts = {
        "read": tally.read_s, "decode": tally.decode_s, "resize + encode": tally.convert_s, "write": tally.write_s,
    }  # fmt: skip
    total = sum(parts.values()) or 1.0
    return ", ".join(f"{name} {100 * seconds / total:.0f} %" for name, seconds in parts.items())


def _duplicates(told: dict[str, int], where: str) -> list[str]:
    if not told["groups"]:
        return []
    extra = f"{told['extra']} images are exact copies of others; all are kept"
    lines = [f"  duplicates: {extra}, see {where}/duplicates.jsonl"]
    if told["two_labels"]:
        lines.append(f"  WARNING: {told['two_labels']} files come under two labels or more")
    if told["across_splits"]:
        lines.append(f"  WARNING: {told['across_splits']} files are in train and in val: training sees them")
    return lines


def _rejects(count: int, store: Store) -> str:
    if not count:
        return ""
    reasons = [json.loads(line)["reason"] for line in store.read("rejects.jsonl").splitlines()]
    return f" ({told_by_kind(reasons)}); see {store.where}/rejects.jsonl"


def _is_tar(name: str, res: str) -> bool:
    return name.startswith(f"{res}/") and name.endswith(".tar")
