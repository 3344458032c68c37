"""Writes `report.html`, one page to judge a new set by: sample images, class counts, sources, rejects, duplicates.

The page is `template.html`; this module computes the values in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.dataset.shard_set import key_name
from pipeline.report.page import render
from prep.prepare import BuildResult
from prep.storage.output import Store

from .browse import ShardSetReader, tar_sizes, work_seconds
from .charts import SourceCounts, class_chart, class_counts, source_chart

__all__ = ["REPORT", "write_report"]

REPORT = "report.html"  # not in the manifest: its times differ from run to run
_TEMPLATE = Path(__file__).with_name("template.html")
_SHOWN = 48  # samples per contact sheet
_SHEET_BYTES = 8_000_000  # limit of JPEG bytes per sheet, reached only by very large resolutions
_NAMED_CLASSES = 40  # more classes are drawn as a curve, with both ends listed by name
_EXAMPLES = 3  # per kind of reject
_LISTED = 12
_GROUPS = 8
_REASON_CHARS = 200  # characters shown of a reason


def write_report(store: Store, result: BuildResult) -> str:
    """Write `report.html` of a finished set; returns its path or URL. Memory does not grow with the set.

    Raises `ResoluteError` if it cannot be written.
    """
    with ShardSetReader(store, result.manifest) as reader:
        values = _Report(reader, result).values()
        store.write(REPORT, render(_TEMPLATE, title="Shard set", subtitle=store.where, **values))
    return f"{store.where}/{REPORT}"


class _Report:
    def __init__(self, reader: ShardSetReader, result: BuildResult) -> None:
        self._set, self._result, self._manifest = reader, result, result.manifest
        self._sheet_rows = _evenly_spaced(self._manifest["splits"]["train"]["samples"])
        self._largest = reader.largest(_LISTED)
        self._slowest = [] if result.stats is None else [
            (seconds, split, reader.row(split, key)) for seconds, split, key in result.stats.slowest if seconds > 0
        ]  # fmt: skip
        named_rows = {("train", row) for row in self._sheet_rows} | {(split, row) for _, split, row in self._largest}
        named_rows |= {(split, row) for _, split, row in self._slowest if row is not None}
        self._names = reader.names(named_rows)

    def values(self) -> dict[str, Any]:
        """The values of the template, by name."""
        ignored = self._result.ignored
        return {
            "headline": self._headline(),
            "warnings": self._result.warnings,
            "resolutions": list(self._resolutions()),
            "sheets": self._sheets(),
            "classes": self._classes(),
            "sources": self._sources(),
            "rejects": self._rejects(),
            "ignored": [(f"{n:,}", kind) for kind, n in ignored.most_common() if n] if ignored else None,
            "duplicates": self._duplicates(),
            "run": self._run(),
        }

    def _headline(self) -> list[tuple[str, str]]:
        manifest = self._manifest
        splits = manifest["splits"]
        return [
            *((f"{info['samples']:,}", f"{name} samples") for name, info in splits.items()),
            (f"{len(manifest['classes']):,}", "classes"),
            (", ".join(manifest["resolutions"]), "px"),
            (f"{sum(len(info['shards']) for info in splits.values()):,}", "shards per resolution"),
            (_format_bytes(sum(info["bytes"] for info in manifest["files"].values())), "on disk"),
            (f"{manifest['source']['rejected']:,}", "inputs rejected"),
            (f"{manifest['source']['duplicates']['extra']:,}", "exact copies"),
        ]

    def _resolutions(self) -> Iterator[tuple[object, ...]]:
        samples = sum(info["samples"] for info in self._manifest["splits"].values())
        for res, info in self._manifest["resolutions"].items():
            tars = tar_sizes(self._manifest, res)
            yield res, info["short_side"], len(tars), f"{sum(tars) / 1e6:,.1f}", f"{sum(tars) / samples / 1e3:.1f}"

    def _sheets(self) -> Iterator[dict[str, Any]]:
        classes, samples = self._manifest["classes"], self._set.samples("train")
        for res, info in self._manifest["resolutions"].items():
            stored = self._set.stored("train", res)
            figures: list[dict[str, Any]] = []
            total = 0
            for row in self._sheet_rows:
                record = stored[row]
                jpeg = self._set.jpeg("train", res, row)
                total += len(jpeg)
                if figures and total > _SHEET_BYTES:
                    break
                side = int(max(record["width"], record["height"]))
                scale = min(1.0, 2 * info["short_side"] / side)  # why: a panorama would take the whole row
                figures.append({
                    "jpeg": jpeg,
                    "label": classes[samples["label"][row]],
                    "title": f"{key_name(int(samples['key'][row]))} {self._names['train', row]}",
                    "width": max(1, round(int(record["width"]) * scale)),  # CSS px
                    "height": max(1, round(int(record["height"]) * scale)),
                })
            yield {"res": res, "short_side": info["short_side"], "samples": len(stored), "figures": figures}

    def _classes(self) -> dict[str, Any]:
        classes, splits = self._manifest["classes"], self._manifest["splits"]
        counts = {name: class_counts(self._set.samples(name), len(classes)) for name in splits}
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
        for split in self._manifest["splits"]:
            counts.add(self._set.sources(split))
        sides = {res: info["short_side"] for res, info in self._manifest["resolutions"].items()}
        smaller = [(counts.smaller_than(side), side, res) for res, side in sides.items()]
        return {
            "low": counts.quantile(0.05),
            "median": counts.quantile(0.5),
            "high": counts.quantile(0.95),
            "smaller": [(n, side, res) for n, side, res in smaller if n],
            "chart": source_chart(counts, list(sides.values())),
            "largest": [
                (_format_bytes(nbytes), self._name(split, row), split, self._pixels(split, row))
                for nbytes, split, row in self._largest
            ],
        }

    def _pixels(self, split: str, row: int) -> str:
        source = self._set.sources(split)[row]
        return f"{source['width']} x {source['height']}"

    def _name(self, split: str, row: int | None) -> str:
        return "?" if row is None else self._names[split, row]

    def _rejects(self) -> dict[str, Any]:
        counts: Counter[str] = Counter()
        examples: dict[str, list[str]] = {}
        for row in self._set.lines("rejects.jsonl"):
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
        worst: dict[str, list[Any]] = {"two labels": [], "in two splits": [], "": []}
        for group in self._set.lines("duplicates.jsonl"):
            kind = "two labels" if len({entry["label"] for entry in group}) > 1 else ""
            kind = kind or ("in two splits" if len({entry["split"] for entry in group}) > 1 else "")
            if len(worst[kind]) < _GROUPS:
                worst[kind].append(group)
        rows = [(len(group), kind, self._inputs(group)) for kind, groups in worst.items() for group in groups]
        return {**self._manifest["source"]["duplicates"], "worst": rows}

    def _inputs(self, group: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
        classes, shown = self._manifest["classes"], group[: _EXAMPLES + 1]
        lines = [(entry["path"], f"({classes[entry['label']]}, {entry['split']})") for entry in shown]
        if len(group) > len(shown):
            lines[-1] = (lines[-1][0], f"{lines[-1][1]} …")
        return lines

    def _run(self) -> dict[str, Any] | None:
        stats, elapsed_s = self._result.stats, self._result.elapsed_s
        if stats is None:
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


def _evenly_spaced(samples: int) -> list[int]:
    """At most `_SHOWN` rows, spread evenly over `samples`."""
    return np.unique(np.linspace(0, samples - 1, min(_SHOWN, samples)).round().astype(int)).tolist()


def _format_bytes(nbytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if nbytes >= scale:
            return f"{nbytes / scale:,.2f} {unit}"
    return f"{nbytes / 1e3:,.1f} kB"
