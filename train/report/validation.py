"""The errors of the best validation of a run: RUN/validation.json, and its part of the report.

By kind of target: confusion matrix, most confused classes with photos, accuracy per class; average precision and F1 per
label; or predicted against true values with the distribution of the errors.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from resolute.console import counted
from resolute.errors import ResoluteError
from resolute.files import output_file
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.plan.plan import Plan
from resolute.report.charts import Chart, Series, chart, without_outliers
from resolute.train.score import METRICS, with_interval

__all__ = ["FILE", "confused_photos", "errors_of_values", "read_validation", "sections", "write_validation"]

FILE = "validation.json"
_PAIRS = 8  # most confused pairs shown with photos
_SIDE = 112  # of a photo in the report, px
_ROWS = 100  # of a table
_NAMED = 30  # classes whose names fit beside the matrix
_COUNTED = 15  # classes whose counts fit into its cells
_LEVELS = (0.0, 0.05, 0.2, 0.4, 0.7)  # lower ends of the shades, as a fraction of the row


def write_validation(folder: Path, record: Mapping[str, Any], details: Mapping[str, Mapping[str, Any]]) -> None:
    """Write RUN/validation.json: the details of the better weights of the epoch `record`. Raises `ResoluteError`.

    `details`: by weights, as from `Validation.finish`.
    """
    kind = next(kind for kind, metrics in METRICS.items() if metrics[0].key in record)
    key = METRICS[kind][0].key
    weights = max(details, key=lambda name: _or_lowest(record[key if name == "raw" else f"ema_{key}"]))
    table = {"kind": kind, "epoch": record["epoch"], "res": record["eval_res"], "weights": weights, **details[weights]}
    _write(folder, table)


def _or_lowest(value: float | None) -> float:
    return -float("inf") if value is None else value


def _write(folder: Path, table: Mapping[str, Any]) -> None:
    with output_file(folder / FILE) as file:
        file.write((json.dumps(table) + "\n").encode())


def read_validation(folder: Path) -> dict[str, Any] | None:
    """The content of RUN/validation.json; None if there is none. Raises `ResoluteError` if it is damaged."""
    path = folder / FILE
    try:
        table = json.loads(path.read_bytes())
        table["kind"], table["epoch"]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ResoluteError(f"{path}: cannot be read ({error.strerror}); make it readable") from None
    except (ValueError, KeyError, TypeError):
        raise ResoluteError(f"{path}: damaged, expected the details of a validation; delete it") from None
    return dict(table)


def confused_photos(
    folder: Path,
    shards: ShardSet,
    *,
    mean: tuple[float, float, float],
    std: tuple[float, float, float],
    crop_pct: float | None,
) -> None:
    """Add photos of the most confused pairs to RUN/validation.json, as the network saw them in validation.

    `crop_pct`: the recipe's `eval.crop_pct`. Photos that cannot be read are left out.
    """
    from torch import cat  # why here: reports of finished runs need neither torch nor DALI

    from resolute.pipeline.loader.loader import Loader

    table = read_validation(folder)
    if table is None or not table.get("confused") or "photos" in table:
        return
    pairs = table["confused"][:_PAIRS]
    wanted = sorted({sample for pair in pairs for sample in pair["samples"]})
    chosen = np.zeros(len(shards.splits["val"]), np.bool_)
    chosen[wanted] = True
    subset = dataclasses.replace(shards, splits={"val": shards.splits["val"].subset("val", chosen)})
    photos: dict[int, str] = {}
    try:
        plan = Plan.evaluation(subset, [table["res"]], batch_size=len(wanted), crop_pct=crop_pct)
        # why one: rank 0 writes the report alone
        with Loader(plan, num_threads=1, mean=mean, std=std, world_size=1) as loader:
            images = cat([batch.images for batch in loader]).permute(0, 2, 3, 1).numpy()
    except ResoluteError:
        return
    pixels = np.rint((images * np.array(std) + np.array(mean)) * 255).clip(0, 255).astype(np.uint8)
    for sample, image in zip(wanted, pixels, strict=True):
        photos[sample] = base64.b64encode(_jpeg(image)).decode()
    _write(folder, {**table, "photos": photos})


def _jpeg(pixels: np.ndarray[Any, Any]) -> bytes:
    buffer, image = io.BytesIO(), Image.fromarray(pixels)
    image.thumbnail((_SIDE, _SIDE), Image.Resampling.BICUBIC)
    image.save(buffer, "JPEG", quality=80)
    return buffer.getvalue()


def sections(table: Mapping[str, Any] | None, epochs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The values of the report's template, from the content of RUN/validation.json; None if it is not of `epochs`."""
    if table is None or table["epoch"] not in {epoch["epoch"] for epoch in epochs}:
        return None
    title = f"Validation of epoch {table['epoch']}, {table['weights']} weights, {table['res']} px"
    return {
        "title": title,
        "matrix": None,
        "note": "",
        "sheets": [],
        "charts": [],
        "tables": [],
        **_PARTS[table["kind"]](table),
    }


def _of_classes(table: Mapping[str, Any]) -> dict[str, Any]:
    confusion, classes = table["confusion"], table["classes"]
    photos = {int(sample): base64.b64decode(data) for sample, data in table.get("photos", {}).items()}
    sheets = []
    for pair in table["confused"][:_PAIRS]:
        figures = [
            {
                "data": photos[sample],
                "title": f"{pair['label']} taken for {pair['predicted']}",
                "lines": [],
                "width": _SIDE,
                "height": _SIDE,
            }
            for sample in pair["samples"]
            if sample in photos
        ]
        if figures:
            count = counted(pair["count"], "photo")
            sheets.append((f"{pair['label']} taken for {pair['predicted']}: {count}", figures))
    worst = sorted((row for row in classes if row["samples"]), key=lambda row: row["accuracy"])[:_ROWS]
    pairs = [(pair["label"], pair["predicted"], f"{pair['count']:,}") for pair in table["confused"][:20]]
    size = confusion["classes_per_cell"]
    note = "Rows are the true classes, columns the predicted ones, both in the order of the set, the first at the top "
    note += "left; shades are fractions of the row."
    if size > 1:
        note += f" Each row and column holds {size} adjacent classes."
    return {
        "matrix": _matrix(confusion["counts"], [row["name"] for row in classes]),
        "note": note,
        "sheets": sheets,
        "tables": [
            ("Most confused", ["class", "taken for", "photos#"], pairs),
            (
                _listed("Accuracy per class", len(worst), len(classes), "lowest"),
                ["class", "photos#", "accuracy %#"],
                [(row["name"], f"{row['samples']:,}", with_interval(row["accuracy"], row["samples"])) for row in worst],
            ),
        ],
    }


def _listed(title: str, shown: int, count: int, which: str) -> str:
    return title if shown == count else f"{title}: the {shown:,} {which} of {count:,}"


def _matrix(counts: Sequence[Sequence[int]], names: Sequence[str]) -> dict[str, Any]:
    """Cells of unit size as SVG paths by shade; names and numbers if they fit."""
    n = len(counts)
    shades: list[list[str]] = [[] for _ in _LEVELS]
    for y, row in enumerate(counts):
        total = sum(row)
        for x, count in enumerate(row):
            if count:
                level = max(k for k, low in enumerate(_LEVELS) if count / total >= low)
                shades[level].append(f"M{x} {y}h1v1h-1z")
    named = len(names) == n <= _NAMED
    margin = 0.4 * max((len(name[:24]) for name in names), default=0) if named else 0.0
    return {
        "view_box": f"{-margin:.1f} 0 {n + margin:.1f} {n}",
        "size": n,
        "paths": [(f"area cells a l{k}", "".join(cells)) for k, cells in enumerate(shades, 1) if cells],
        "names": [name[:24] for name in names] if named else [],
        "numbers": [(x + 0.5, y + 0.65, count) for y, row in enumerate(counts) for x, count in enumerate(row) if count]
        if n <= _COUNTED
        else [],
    }


def _of_labels(table: Mapping[str, Any]) -> dict[str, Any]:
    rows = [row for row in table["classes"] if row["samples"]]
    if len(rows) > _ROWS:
        rows = sorted(rows, key=lambda row: row["ap"])[:_ROWS]
    lines = [
        (
            row["name"],
            f"{row['samples']:,}",
            *(f"{100 * row[key]:.2f}" for key in ("ap", "f1", "best_f1")),
            f"{row['threshold']:.3f}",
        )
        for row in rows
    ]
    heads = ["label", "photos#", "average precision %#", "F1 at 0.5 %#", "best F1 %#", "at probability#"]
    unused = len(table["classes"]) - sum(bool(row["samples"]) for row in table["classes"])
    note = f"{unused:,} labels have no photo in the validation split and do not count." if unused else ""
    return {
        "note": note,
        "tables": [
            (
                _listed("Labels", len(rows), len(table["classes"]) - unused, "with the lowest average precision"),
                heads,
                lines,
            )
        ],
    }


def errors_of_values(table: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, RMSE with its unit) of each value in a validation's details; none for other kinds of targets."""
    return [
        (column["name"], f"{_short(column['rmse'])} {column['unit']}".rstrip()) for column in table.get("columns", ())
    ]


def _of_values(table: Mapping[str, Any]) -> dict[str, Any]:
    charts: list[Chart | None] = []
    for column in table["columns"]:
        name, unit = column["name"], column["unit"]
        points = sorted((true, got) for true, got in column["points"] if got is not None)
        if not points:
            continue
        # why: one outlier would press all other points together
        low, high = without_outliers([value for point in points for value in point])
        shown = [point for point in points if low <= min(point) and max(point) <= high]
        beyond = counted(len(points) - len(shown), "photo")
        true, predicted = zip(*shown, strict=True)
        ends = [min(true), max(true)]
        charts.append(
            chart(
                f"{name}: predicted and true",
                [
                    Series(name="a photo", colour="a", kind="points", x=true, y=predicted),
                    Series(name="predicted = true", colour="soft", kind="dash", x=ends, y=ends),
                ],
                unit=unit,
                x_name="true",
                zero=False,
                note=f"Without {beyond} far from the others." if len(shown) < len(points) else "",
            )
        )
        edges, counts = column["errors"]["edges"], column["errors"]["counts"]
        outside = column["errors"].get("outside", 0)
        charts.append(
            chart(
                f"{name}: errors",
                [Series(name="photos", colour="b", kind="columns", x=edges[:-1], right=edges[1:], y=counts)],
                unit="photos",
                x_name=f"predicted - true, {unit}" if unit else "predicted - true",
                note=f"{counted(outside, 'photo')} with larger errors." if outside else "",
            )
        )
    rows = [
        (column["name"], column["unit"], *(_short(column[key]) for key in ("mae", "rmse", "r2")))
        for column in table["columns"]
    ]
    return {"charts": [*filter(None, charts)], "tables": [("Values", ["value", "unit", "MAE#", "RMSE#", "R²#"], rows)]}


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


_PARTS = {"class": _of_classes, "labels": _of_labels, "values": _of_values}
