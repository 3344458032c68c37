"""Writes `report.html`, one page to judge a new set by: sample images, targets, sources, rejects, duplicates.

The page is `template.html`; this module computes the values in it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resolute.pipeline.dataset.format import duplicates_name, key_name, near_pairs_name, rejects_name
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.prep.finish import BuildResult
from resolute.prep.storage.output import Store
from resolute.report.page import load, render

from .browse import (
    input_files,
    input_names,
    largest_files,
    read_jpeg,
    read_lines,
    row_of,
    tar_sizes,
    work_seconds,
)
from .charts import SourceCounts, ValueCounts, class_chart, label_chart, labels_per_sample, source_charts
from .near_copies import describe_near_copies, near_copy_figures, near_counts, target_text
from .summary import describe_pixels

__all__ = ["REPORT", "load_template", "write_report"]

REPORT = "report.html"  # not in the manifest: its times differ from run to run
_TEMPLATE = Path(__file__).with_name("template.html")
_SHOWN = 48  # samples per contact sheet
_JPEG_BYTES = 2_000_000  # limit of all contact sheets; the page is a third larger, as base64
_NAMED_CLASSES = 40  # more classes are drawn as a curve, with both ends listed by name
_EXAMPLES = 3  # per kind of reject
_LISTED = 12
_GROUPS = 8
_REASON_CHARS = 200  # characters shown of a reason
_SHOWN_TARGETS = 4  # labels or values under a photo
_CHARTED_VALUES = 12


def load_template() -> None:
    """Do the part of `write_report` that needs no set: to be called while other processes work."""
    load(_TEMPLATE)


def write_report(store: Store, result: BuildResult, shards: ShardSet) -> str:
    """Write `report.html` of the finished set `shards` in `store`; returns its path or URL.

    Raises `ResoluteError` if it cannot be written.
    """
    values = _Report(shards, result).values()
    store.write(REPORT, render(_TEMPLATE, title="Shard set", subtitle=store.where, **values))
    return f"{store.where}/{REPORT}"


class _Report:
    def __init__(self, shards: ShardSet, result: BuildResult) -> None:
        self._set, self._result, self._manifest = shards, result, result.manifest
        self._target = shards.target
        self._sheet_rows = _evenly_spaced(self._manifest["splits"]["train"]["samples"])
        self._input_files = {split: input_files(shards, split) for split in shards.splits}
        self._largest = largest_files(self._input_files, _LISTED)
        slowest = [] if result.stats is None else [entry for entry in result.stats.slowest if entry[0] > 0]
        self._slowest = [(seconds, split, row_of(shards, split, key)) for seconds, split, key in slowest]
        named_rows = {("train", row) for row in self._sheet_rows} | {(split, row) for _, split, row in self._largest}
        named_rows |= {(split, row) for _, split, row in self._slowest if row is not None}
        self._names = input_names(shards, named_rows)

    def values(self) -> dict[str, Any]:
        """The values of the template, by name."""
        ignored = self._result.ignored
        return {
            "headline": self._headline(),
            "warnings": self._result.warnings,
            "resolutions": list(self._resolutions()),
            "sheets": self._sheets(),
            "classes": None if self._target.kind == "values" else self._classes(),
            "labels": self._labels() if self._target.kind == "labels" else None,
            "target_values": self._values() if self._target.kind == "values" else None,
            "sources": self._sources(),
            "pixels": describe_pixels(self._manifest),
            "rejects": self._rejects(),
            "ignored": [(f"{n:,}", kind) for kind, n in ignored.most_common() if n] if ignored else None,
            "duplicates": self._duplicates(),
            "near_copies": self._near_copies(),
            "generations": self._generations(),
            "run": self._run(),
        }

    def _headline(self) -> list[tuple[str, str]]:
        manifest = self._manifest
        splits = manifest["splits"]
        return [
            *((f"{info['samples']:,}", f"{name} samples") for name, info in splits.items()),
            (f"{len(self._target):,}", {"class": "classes"}.get(self._target.kind, self._target.kind)),
            (", ".join(manifest["resolutions"]), "px"),
            (f"{sum(len(info['shards']) for info in splits.values()):,}", "shards per resolution"),
            (_format_bytes(sum(info["bytes"] for info in manifest["files"].values())), "on disk"),
            (f"{manifest['source']['rejected']:,}", "inputs rejected"),
            (f"{manifest['source']['duplicates']['extra']:,}", "exact copies"),
        ]

    def _generations(self) -> list[tuple[object, ...]]:
        """A row per generation, if there are several: what it has added and what had changed in the source by then."""
        generations, splits = self._manifest["generations"], self._manifest["splits"]
        if len(generations) == 1:
            return []
        classes = [0, *(added["classes"] for added in generations)]
        return [
            (
                number,
                *(f"{added['samples'][split]:,}" for split in splits),
                sum(added["shards"].values()),
                added["classes"] - classes[number],
                added["removed"],
                added["changed"],
            )
            for number, added in enumerate(generations)
        ]

    def _resolutions(self) -> Iterator[tuple[object, ...]]:
        samples = sum(info["samples"] for info in self._manifest["splits"].values())
        for res, info in self._manifest["resolutions"].items():
            tars = tar_sizes(self._manifest, res)
            yield res, info["short_side"], len(tars), f"{sum(tars) / 1e6:,.1f}", f"{sum(tars) / samples / 1e3:.1f}"

    def _sheets(self) -> Iterator[dict[str, Any]]:
        train = self._set.splits["train"]
        for res, info in self._manifest["resolutions"].items():
            stored = train.stored[int(res)]
            figures: list[dict[str, Any]] = []
            left = _JPEG_BYTES / len(self._manifest["resolutions"])
            for row in self._sheet_rows:
                record = stored[row]
                jpeg = read_jpeg(self._set, "train", int(res), row)
                left -= len(jpeg)
                if figures and left < 0:
                    break
                side = int(max(record["width"], record["height"]))
                scale = min(1.0, 2 * info["short_side"] / side)  # why: a panorama would take the whole row
                figures.append(
                    {
                        "data": jpeg,
                        "lines": self._target_lines(train.samples[row : row + 1]),
                        "title": f"{key_name(int(train.samples['key'][row]))} {self._names['train', row]}",
                        "width": max(1, round(int(record["width"]) * scale)),  # CSS px
                        "height": max(1, round(int(record["height"]) * scale)),
                    }
                )
            yield {"res": res, "short_side": info["short_side"], "samples": len(stored), "figures": figures}

    def _target_lines(self, sample: NDArray[Any]) -> list[str]:
        """The target of a record (1,) in lines of text."""
        target = self._target
        if target.kind == "class":
            return [target.names[sample["label"][0]]]
        values = target.decode(sample)[0]
        if target.kind == "labels":
            lines = [target.names[c] for c in np.flatnonzero(values > 0)] or ["no label"]
            lines += [f"{target.names[c]} ignored" for c in np.flatnonzero(values < 0)]
        else:
            columns = zip(target.names, values.tolist(), target.units, strict=True)
            lines = [f"{name} {value:.5g} {unit}".rstrip() for name, value, unit in columns]
        more = len(lines) - _SHOWN_TARGETS
        return [*lines[:_SHOWN_TARGETS], f"and {more} more"] if more > 1 else lines

    def _labels(self) -> dict[str, Any]:
        names, samples = self._target.names, self._set.splits["train"].samples
        counts = labels_per_sample(samples, self._target)
        return {
            "mean": f"{(counts * np.arange(len(names) + 1)).sum() / len(samples):.2f}",
            "without": int(counts[0]),
            "chart": label_chart(counts),
        }

    def _values(self) -> dict[str, Any]:
        target = self._target
        counts = ValueCounts(self._set.splits["train"].samples, target)
        columns = zip(target.names, target.units, counts.low, counts.mean, counts.high, strict=True)
        shown = range(min(len(target), _CHARTED_VALUES))
        return {
            "rows": [(name, unit, *(f"{x:.5g}" for x in (low, mean, high))) for name, unit, low, mean, high in columns],
            "charts": [counts.histogram(d, target.names[d], target.units[d]) for d in shown],
        }

    def _classes(self) -> dict[str, Any]:
        classes = self._manifest["classes"]
        counts = {name: self._target.counts(split.samples) for name, split in self._set.splits.items()}
        train = counts["train"]
        rows = [
            (str(name), int(train[c]), ", ".join(f"{split} {int(counts[split][c]):,}" for split in counts))
            for c, name in enumerate(classes)
        ]
        named = len(classes) <= _NAMED_CLASSES
        if not named:
            rows = [rows[c] for c in np.argsort(-train, kind="stable").tolist()]
        return {
            "count": len(classes),
            "fewest": train.min(),
            "most": train.max(),
            "median": f"{np.median(train):,.0f}",
            "empty": int((train == 0).sum()),
            "chart": None if named else class_chart(train),
            "first": rows if named else rows[:_LISTED],
            "last": rows[-_LISTED:],
        }

    def _sources(self) -> dict[str, Any]:
        counts = SourceCounts()
        for sources in self._input_files.values():
            counts.add(sources)
        sides = {res: info["short_side"] for res, info in self._manifest["resolutions"].items()}
        smaller = [(counts.smaller_than(side), side, res) for res, side in sides.items()]
        return {
            "low": counts.quantile(0.05),
            "median": counts.quantile(0.5),
            "high": counts.quantile(0.95),
            "smaller": [(n, side, res) for n, side, res in smaller if n],
            "charts": source_charts(counts, list(sides.values())),
            "largest": [
                (_format_bytes(nbytes), self._name(split, row), split, self._pixels(split, row))
                for nbytes, split, row in self._largest
            ],
        }

    def _pixels(self, split: str, row: int) -> str:
        source = self._input_files[split][row]
        return f"{source['width']} x {source['height']}"

    def _name(self, split: str, row: int | None) -> str:
        return "?" if row is None else self._names[split, row]

    def _rejects(self) -> dict[str, Any]:
        counts: Counter[str] = Counter()
        examples: dict[str, list[str]] = {}
        for row in read_lines(self._set, rejects_name(self._set.generation)):
            kind = row["reason"].partition(":")[0]
            counts[kind] += 1
            if counts[kind] <= _EXAMPLES:
                examples.setdefault(kind, []).append(f"{row['path']}: {row['reason'][:_REASON_CHARS]}")
        by_count = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        return {
            "rejected": self._manifest["source"]["rejected"],
            "images": self._manifest["source"]["images"],
            "reasons": [(f"{n:,}", kind, examples[kind]) for kind, n in by_count],
        }

    def _duplicates(self) -> dict[str, Any]:
        worst: dict[str, list[Any]] = {"different targets": [], "in two splits": [], "": []}
        for group in read_lines(self._set, duplicates_name(self._set.generation)):
            kind = "different targets" if len({_target_of(entry) for entry in group}) > 1 else ""
            kind = kind or ("in two splits" if len({entry["split"] for entry in group}) > 1 else "")
            if len(worst[kind]) < _GROUPS:
                worst[kind].append(group)
        rows = [(len(group), kind, self._inputs(group)) for kind, groups in worst.items() for group in groups]
        return {**self._manifest["source"]["duplicates"], "worst": rows}

    def _inputs(self, group: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
        shown = group[: _EXAMPLES + 1]
        lines = [(entry["path"], f"({target_text(self._target, entry)}, {entry['split']})") for entry in shown]
        if len(group) > len(shown):
            lines[-1] = (lines[-1][0], f"{lines[-1][1]} …")
        return lines

    def _near_copies(self) -> dict[str, Any] | None:
        counts = near_counts(self._manifest)
        if not counts:
            return None
        has_pairs = near_pairs_name(self._set.generation) in self._manifest["files"]
        return {
            "lines": describe_near_copies(self._manifest, self._set),
            "counts": counts,
            "figures": near_copy_figures(self._set) if has_pairs else [],
        }

    def _run(self) -> dict[str, Any] | None:
        stats, elapsed_s = self._result.stats, self._result.elapsed_s
        if stats is None or not stats.images:
            return None
        work = work_seconds(stats)
        total = sum(work.values()) or 1.0
        return {
            "images": stats.images,
            "seconds": f"{elapsed_s:,.1f}",
            "images_per_s": f"{stats.images / elapsed_s:,.0f}",
            "mb_per_s": f"{stats.read_bytes / elapsed_s / 1e6:,.1f}",
            "kept_shards": self._result.kept_shards,
            "work": [(name, value, f"{value:,.1f} s, {100 * value / total:.0f} %") for name, value in work.items()],
            "slowest": [
                (f"{seconds * 1e3:,.1f} ms", self._name(split, row), split) for seconds, split, row in self._slowest
            ],
        }


def _target_of(entry: Mapping[str, Any]) -> str:
    return json.dumps([entry.get(name) for name in ("label", "labels", "ignored", "target")])


def _evenly_spaced(samples: int) -> list[int]:
    """At most `_SHOWN` rows, spread evenly over `samples`."""
    return np.unique(np.linspace(0, samples - 1, min(_SHOWN, samples)).round().astype(int)).tolist()


def _format_bytes(nbytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if nbytes >= scale:
            return f"{nbytes / scale:,.2f} {unit}"
    return f"{nbytes / 1e3:,.1f} kB"
