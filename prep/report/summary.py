"""The console summary at the end of a run."""

from __future__ import annotations

from typing import Any

from resolute.console import counted
from resolute.pipeline.dataset.format import duplicates_name, rejects_name
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.dataset.target import Target
from resolute.prep.convert.batch import PixelFacts
from resolute.prep.extend import describe_changes
from resolute.prep.finish import BuildResult, describe_reasons
from resolute.prep.listing.checks import size_warnings
from resolute.prep.listing.wording import describe_ignored, describe_target
from resolute.prep.run.stats import RunStats
from resolute.prep.storage.output import Store
from resolute.prep.unchanged import already_there

from .browse import input_files, read_lines, tar_sizes, work_seconds
from .near_copies import describe_near_copies

__all__ = ["describe_pixels", "nothing_done", "summary"]


def nothing_done(result: BuildResult, store: Store) -> str:
    """The closing lines of a run that had nothing to do."""
    return "\n".join([already_there(store.where, result.manifest), *(f"  {note}" for note in result.notes)])


def summary(result: BuildResult, stats: RunStats, shards: ShardSet, *, workers: int = 0) -> str:
    """The closing lines, without a final newline, about the finished set `shards`.

    `workers` is the number of processes that converted images; 0: it is not known, and not named.
    """
    manifest = result.manifest
    counts = ", ".join(f"{name} {info['samples']}" for name, info in manifest["splits"].items())
    classes = describe_target(Target.from_manifest(manifest))
    source = manifest["source"]
    samples = sum(split["samples"] for split in manifest["splits"].values())
    ignored = describe_ignored(result.ignored)
    where = shards.root
    lines = [f"{where}: {counted(samples, 'image')}, {classes}, {counts}; ignored: {ignored}"]
    if result.kept_shards:
        converted = stats.images - stats.rejects
        lines.append(f"  kept {counted(result.kept_shards, 'shard')}, converted {counted(converted, 'image')} now")
    if stats.images:
        rate = f"{stats.images / result.elapsed_s:.0f} images/s" + f" with {counted(workers, 'worker')}" * bool(workers)
        lines.append(f"  {result.elapsed_s:.1f} s, {rate}; {_time_shares(stats)}")
    lines += _generations(manifest, where)
    for res, info in manifest["resolutions"].items():
        tars = tar_sizes(manifest, res)
        lines.append(
            f"  {res:>4} px: short side {info['short_side']} px, {counted(len(tars), 'shard')}, "
            f"{sum(tars) / 1e6:.1f} MB, {sum(tars) / samples / 1e3:.1f} kB per sample"
        )
    lines += [f"  {line}" for line in describe_pixels(manifest)]
    if without := _without_labels(shards):
        lines.append(f"  without a label: {counted(without, 'image')}")
    if unknown := sum(int(shards.target.ignored_counts(split.samples).sum()) for split in shards.splits.values()):
        lines.append(f"  ignored in the loss and in metrics: {counted(unknown, 'label')} of images")
    sides = {int(res): info["short_side"] for res, info in manifest["resolutions"].items()}
    sources = (input_files(shards, split) for split in shards.splits)
    lines += [f"  WARNING: {warning}" for warning in (*result.warnings, *size_warnings(sides, sources))]
    newest = shards.generation
    if result.listed and not newest:  # why: the sources of an extension list the photos of the set too
        lines.append(
            f"  listed {result.listed} = {samples} stored + {source['rejected']} rejected + "
            f"{sum(result.ignored.values())} ignored"
        )
    lines += _duplicates(source["duplicates"], f"{where}/{duplicates_name(newest)}")
    lines += [f"  {line}" for line in describe_near_copies(manifest, shards)]
    lines.append(f"  rejected: {_rejects(source['rejected'], shards)}")
    return "\n".join(lines)


def describe_pixels(manifest: dict[str, Any]) -> list[str]:
    """Lines about photos whose colours were converted, if there are any."""
    facts = PixelFacts.total(PixelFacts(**added.get("pixels", {})) for added in manifest["generations"])
    lines = []
    if facts.converted:
        lines.append(f"colour profile converted to sRGB: {counted(facts.converted, 'image')}")
    if facts.unusable:
        lines.append(f"colour profile unusable, so ignored: {counted(facts.unusable, 'image')}")
    return lines


def _without_labels(shards: ShardSet) -> int:
    """The number of samples with an empty set of labels."""
    if shards.target.kind != "labels":
        return 0
    rows = (shards.target.packed_labels(split.samples) for split in shards.splits.values())
    step = 1 << 16
    return sum(int((~part[at : at + step].any(1)).sum()) for part in rows for at in range(0, len(part), step))


def _generations(manifest: dict[str, Any], where: str) -> list[str]:
    """Lines about the newest generation, if there are several."""
    generations = manifest["generations"]
    if len(generations) == 1:
        return []
    newest, before = generations[-1], generations[-2]
    added = ", ".join(f"{name} {count}" for name, count in newest["samples"].items())
    classes = newest["classes"] - before["classes"]
    text = f"  generation {len(generations) - 1} added {added}, {counted(classes, 'new class', plural='new classes')}"
    return [text, *(f"  {line}" for line in describe_changes(where, newest["removed"], newest["changed"]))]


def _time_shares(stats: RunStats) -> str:
    work = work_seconds(stats)
    total = sum(work.values()) or 1.0
    return ", ".join(f"{name} {100 * seconds / total:.0f} %" for name, seconds in work.items())


def _duplicates(counts: dict[str, int], path: str) -> list[str]:
    if not counts["groups"]:
        return []
    extra = counted(counts["extra"], "exact copy of another image", plural="exact copies of other images")
    lines = [f"  duplicates: {extra}; all are kept, see {path}"]
    if counts["two_labels"]:
        groups = counted(counts["two_labels"], "group")
        lines.append(f"  WARNING: copies with different targets, one of which is wrong: {groups}")
    if counts["across_splits"]:
        lines.append(
            f"  WARNING: {counted(counts['across_splits'], 'file')} in both train and val, which makes val look too "
            "good; leave them out of train with DUPLICATES=drop REBUILD=1 (--duplicates drop --rebuild)"
        )
    return lines


def _rejects(count: int, shards: ShardSet) -> str:
    if not count:
        return "0"
    name = rejects_name(shards.generation)
    reasons = [row["reason"] for row in read_lines(shards, name)]
    return f"{count} ({describe_reasons(reasons)}); see {shards.root}/{name}"
