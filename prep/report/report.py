"""Writes `report.html`, one page to judge a new set by: sample images, class counts, sources, rejects, duplicates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.dataset.shard_set import key_name
from prep.prepare import BuildResult
from prep.storage.output import Store

from .browse import ShardSetReader
from .charts import SourceCounts, class_chart, class_counts, source_chart
from .html import Raw, bars, escape, figure, heading, page, picture, section, sheet, table, text, tiles

__all__ = ["REPORT", "write_report"]

REPORT = "report.html"  # not in the manifest: its times differ from run to run
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
        store.write(REPORT, page("Shard set", store.where, _Report(reader, result).parts()))
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

    def parts(self) -> Iterator[Raw]:
        yield self._headline()
        for warning in self._result.warnings:
            yield text(f"{warning}.", "warn")
        yield section("Stored samples", self._sheets())
        yield section("Classes", self._classes())
        yield section("Sources", self._sources())
        yield section("Rejected inputs", self._rejects())
        yield section("Duplicates", self._duplicates())
        yield section("This run", self._run())

    def _headline(self) -> Raw:
        manifest = self._manifest
        splits = manifest["splits"]
        numbers: list[tuple[object, str]] = [
            (f"{info['samples']:,}", f"{name} samples") for name, info in splits.items()
        ]
        numbers += [
            (f"{len(manifest['classes']):,}", "classes"),
            (", ".join(manifest["resolutions"]), "px"),
            (f"{sum(len(info['shards']) for info in splits.values()):,}", "shards per resolution"),
            (_format_bytes(sum(info["bytes"] for info in manifest["files"].values())), "on disk"),
            (f"{manifest['source']['rejected']:,}", "inputs rejected"),
            (f"{manifest['source']['duplicates']['extra']:,}", "exact copies"),
        ]
        return tiles(numbers)

    def _sheets(self) -> Iterator[Raw]:
        yield self._resolutions()
        classes = self._manifest["classes"]
        labels = self._set.samples("train")["label"]
        samples = self._set.samples("train")
        for number, (res, info) in enumerate(self._manifest["resolutions"].items()):
            stored = self._set.stored("train", res)
            figures: list[str] = []
            total = 0
            for row in self._sheet_rows:
                record = stored[row]
                jpeg = self._set.jpeg("train", res, row)
                total += len(jpeg)
                if figures and total > _SHEET_BYTES:
                    break
                side = int(max(record["width"], record["height"]))
                scale = min(1.0, 2 * info["short_side"] / side)  # why: a panorama would take the whole row
                width, height = (max(1, round(int(record[name]) * scale)) for name in ("width", "height"))
                name = str(classes[labels[row]])
                title = f"{key_name(int(samples['key'][row]))} {self._names['train', row]}"
                image = picture(jpeg, "jpeg", alt=name, width=width, height=height)
                figures.append(figure(image, name, title, max(width, 60)))
            summary = f"{res} px: {len(figures)} of {len(stored)} training samples, short side {info['short_side']} px"
            yield sheet(summary, figures, opened=number == 0)

    def _classes(self) -> Iterator[Raw]:
        classes, splits = self._manifest["classes"], self._manifest["splits"]
        counts = {name: class_counts(self._set.samples(name), len(classes)) for name in splits}
        train = counts["train"]
        counts_text = [", ".join(f"{name} {int(counts[name][c]):,}" for name in counts) for c in range(len(classes))]
        rows = [(str(name), float(train[c]), counts_text[c]) for c, name in enumerate(classes)]
        yield text(f"Training samples per class: {train.min():,} to {train.max():,}, median {np.median(train):,.0f}.")
        missing = int((train == 0).sum())
        if missing:
            yield text(f"{missing} of {len(classes)} classes have no training sample.", "warn")
        if len(classes) <= _NAMED_CLASSES:
            yield bars(rows)
            return
        yield Raw(picture(class_chart(train), "png", alt="training samples per class"))
        order = np.argsort(-train, kind="stable").tolist()
        yield heading("Most samples")
        yield bars([rows[c] for c in order[:_LISTED]])
        yield heading("Fewest samples")
        yield bars([rows[c] for c in order[-_LISTED:]])

    def _sources(self) -> Iterator[Raw]:
        counts = SourceCounts()
        for split in self._manifest["splits"]:
            counts.add(self._set.sources(split))
        low, middle, high = (counts.quantile(part) for part in (0.05, 0.5, 0.95))
        sides = {res: info["short_side"] for res, info in self._manifest["resolutions"].items()}
        yield text(f"Short side of the sources: median {middle} px, 90 % between {low} and {high} px.")
        for res, side in sides.items():
            if smaller := counts.smaller_than(side):
                words = f"{smaller:,} are smaller than the {side} px stored for {res} px; they were not enlarged."
                yield text(words, "soft")
        yield Raw(picture(source_chart(counts, list(sides.values())), "png", alt="sizes of the sources"))
        yield heading("Largest input files")
        rows = [
            (_format_bytes(nbytes), self._name(split, row), split, self._pixels(split, row))
            for nbytes, split, row in self._largest
        ]
        yield table(["size#", "input", "split", "pixels#"], rows)

    def _pixels(self, split: str, row: int) -> str:
        source = self._set.sources(split)[row]
        return f"{source['width']} x {source['height']}"

    def _name(self, split: str, row: int | None) -> str:
        return "?" if row is None else self._names[split, row]

    def _resolutions(self) -> Raw:
        samples = sum(info["samples"] for info in self._manifest["splits"].values())
        rows = []
        for res, info in self._manifest["resolutions"].items():
            tars = [file["bytes"] for name, file in self._manifest["files"].items() if _is_tar(name, res)]
            rows.append(
                (res, info["short_side"], len(tars), f"{sum(tars) / 1e6:,.1f}", f"{sum(tars) / samples / 1e3:.1f}")
            )
        return table(["resolution, px#", "short side, px#", "shards#", "MB#", "kB per sample#"], rows)

    def _rejects(self) -> Iterator[Raw]:
        counts: Counter[str] = Counter()
        examples: dict[str, list[tuple[str, str]]] = {}
        for row in self._set.lines("rejects.jsonl"):
            kind = row["reason"].partition(":")[0]
            counts[kind] += 1
            if counts[kind] <= _EXAMPLES:
                examples.setdefault(kind, []).append((row["path"], row["reason"][:_REASON_CHARS]))
        source = self._manifest["source"]
        yield text(f"{source['rejected']:,} of {source['images']:,} images were rejected.")
        if counts:
            rows = [
                (f"{n:,}", kind, Raw("<br>".join(f"{escape(path)}: {escape(why)}" for path, why in examples[kind])))
                for kind, n in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
            ]
            yield table(["images#", "reason", "examples"], rows)
        if self._result.ignored:
            yield heading("Ignored files")
            yield table(["files#", "kind"], [(f"{n:,}", kind) for kind, n in self._result.ignored.most_common() if n])

    def _duplicates(self) -> Iterator[Raw]:
        counts = self._manifest["source"]["duplicates"]
        extra, groups = counts["extra"], counts["groups"]
        yield text(f"{extra:,} images are exact copies of others, in {groups:,} groups; all are kept.")
        if counts["two_labels"]:
            yield text(f"{counts['two_labels']:,} groups have two or more labels: at least one label is wrong.", "warn")
        if counts["across_splits"]:
            yield text(f"{counts['across_splits']:,} groups are in both train and val: val is contaminated.", "warn")
        worst: dict[str, list[Any]] = {"two labels": [], "in two splits": [], "": []}
        for group in self._set.lines("duplicates.jsonl"):
            kind = "two labels" if len({entry["label"] for entry in group}) > 1 else ""
            kind = kind or ("in two splits" if len({entry["split"] for entry in group}) > 1 else "")
            if len(worst[kind]) < _GROUPS:
                worst[kind].append(group)
        rows = [(len(group), kind, self._inputs(group)) for kind, groups in worst.items() for group in groups]
        if rows:
            yield table(["copies#", "", "inputs"], rows)

    def _inputs(self, group: Sequence[Mapping[str, Any]]) -> Raw:
        lines = []
        for entry in group[: _EXAMPLES + 1]:
            label_and_split = f"({self._manifest['classes'][entry['label']]}, {entry['split']})"
            lines.append(f'{escape(entry["path"])} <span class="soft">{escape(label_and_split)}</span>')
        return Raw("<br>".join(lines) + (" …" if len(group) > len(lines) else ""))

    def _run(self) -> Iterator[Raw]:
        stats, elapsed_s = self._result.stats, self._result.elapsed_s
        if stats is None:
            yield text("The set was already complete; no images were converted.")
            return
        rate = f"{stats.images / elapsed_s:,.0f} images/s, {stats.read_bytes / elapsed_s / 1e6:,.1f} MB/s read"
        yield text(f"{stats.images:,} images in {elapsed_s:,.1f} s: {rate}.")
        yield text(f"{self._result.kept_shards} shards were kept from earlier runs.", "soft")
        parts = [
            ("read", stats.read_s),
            ("decode", stats.decode_s),
            ("resize + encode", stats.convert_s),
            ("write", stats.write_s),
        ]
        total = sum(seconds for _, seconds in parts) or 1.0
        yield heading("Time by kind of work")
        yield bars([(name, value, f"{value:,.1f} s, {100 * value / total:.0f} %") for name, value in parts])
        rows = [(f"{seconds * 1e3:,.1f} ms", self._name(split, row), split)
                for seconds, split, row in self._slowest]  # fmt: skip
        if rows:
            yield heading("Slowest images")
            yield table(["time#", "input", "split"], rows)


def _evenly_spaced(samples: int) -> list[int]:
    """At most `_SHOWN` rows, spread evenly over `samples`."""
    return np.unique(np.linspace(0, samples - 1, min(_SHOWN, samples)).round().astype(int)).tolist()


def _format_bytes(nbytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if nbytes >= scale:
            return f"{nbytes / scale:,.2f} {unit}"
    return f"{nbytes / 1e3:,.1f} kB"


def _is_tar(name: str, res: str) -> bool:
    return name.startswith(f"{res}/") and name.endswith(".tar")
