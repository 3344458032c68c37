"""The console summary at the end of a run."""

from __future__ import annotations

import json

from prep.config import Settings
from prep.execute.stats import RunStats
from prep.plan.input_checks import describe_ignored, size_warnings
from prep.plan.shuffle import WINDOW_SAMPLES, mixing
from prep.prepare import BuildResult, describe_reasons
from prep.storage.output import Store

from .browse import ShardSetReader, tar_sizes, work_seconds

__all__ = ["summary"]

_SHUFFLE_WINDOWS = 4  # with fewer windows the measure says nothing


def summary(settings: Settings, result: BuildResult, store: Store) -> str:
    """The closing lines, without a final newline."""
    manifest, stats = result.manifest, result.stats
    counts = ", ".join(f"{name} {info['samples']}" for name, info in manifest["splits"].items())
    classes = f"{len(manifest['classes'])} classes"
    if stats is None:
        return f"{store.where}: already there ({counts}; {classes}); nothing to do"
    source = manifest["source"]
    samples = sum(split["samples"] for split in manifest["splits"].values())
    ignored = describe_ignored(result.ignored)
    lines = [f"{store.where}: {samples} images, {classes}, {counts}; ignored: {ignored}"]
    if result.kept_shards:
        converted = stats.images - stats.rejects
        lines.append(f"  {result.kept_shards} shards were kept, {converted} images were converted now")
    lines.append(
        f"  {result.elapsed_s:.1f} s, {stats.images / result.elapsed_s:.0f} images/s with {settings.worker_count} "
        f"workers; {_time_shares(stats)}"
    )
    for res, info in manifest["resolutions"].items():
        tars = tar_sizes(manifest, res)
        lines.append(
            f"  {res:>4} px: short side {info['short_side']} px, {len(tars)} shards, "
            f"{sum(tars) / 1e6:.1f} MB, {sum(tars) / samples / 1e3:.1f} kB per sample"
        )
    with ShardSetReader(store, manifest) as reader:
        labels = reader.samples("train")["label"]
        if len(labels) >= _SHUFFLE_WINDOWS * WINDOW_SAMPLES:
            mixed = mixing(labels)
            lines.append(
                f"  shuffle: windows of {WINDOW_SAMPLES} samples differ by {mixed.measured:.3f} from the overall class "
                f"mix (random order {mixed.expected:.3f}, sorted by class near 1)"
            )
        sides = {int(res): info["short_side"] for res, info in manifest["resolutions"].items()}
        sources = (reader.sources(split) for split in manifest["splits"])
        lines += [f"  WARNING: {warning}" for warning in (*result.warnings, *size_warnings(sides, sources))]
    lines += _duplicates(source["duplicates"], store.where)
    lines.append(f"  rejected: {source['rejected']}{_rejects(source['rejected'], store)}")
    return "\n".join(lines)


def _time_shares(stats: RunStats) -> str:
    work = work_seconds(stats)
    total = sum(work.values()) or 1.0
    return ", ".join(f"{name} {100 * seconds / total:.0f} %" for name, seconds in work.items())


def _duplicates(counts: dict[str, int], where: str) -> list[str]:
    if not counts["groups"]:
        return []
    extra = f"{counts['extra']} images are exact copies of others; all are kept"
    lines = [f"  duplicates: {extra}, see {where}/duplicates.jsonl"]
    if counts["two_labels"]:
        lines.append(f"  WARNING: {counts['two_labels']} files have two or more labels")
    if counts["across_splits"]:
        lines.append(f"  WARNING: {counts['across_splits']} files are in both train and val: val is contaminated")
    return lines


def _rejects(count: int, store: Store) -> str:
    if not count:
        return ""
    reasons = [json.loads(line)["reason"] for line in store.read("rejects.jsonl").splitlines()]
    return f" ({describe_reasons(reasons)}); see {store.where}/rejects.jsonl"
