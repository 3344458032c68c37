"""Tables of predictions: as `resolute predict` writes them by default, a column per class, or those of a competition.

A submission has the header, the ids and the order of the competition's sample. Its columns are names of classes, labels
or values; or it has one column, which holds the predicted class, the predicted labels with spaces between them, or the
value.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from resolute.errors import ResoluteError
from resolute.prep.sources.names import is_image
from resolute.train.model.outputs import Outputs

__all__ = [
    "HALF",
    "Sample",
    "Table",
    "default_table",
    "match_photos",
    "read_sample",
    "submission",
    "true_cells",
    "true_columns",
    "wide_table",
]

HALF = 0.5  # probability from which on a label is predicted
_SHOWN = 3  # ids in a message


@dataclass(frozen=True, kw_only=True)
class Table:
    """The first column, which names the photos, the others, and their cells for a prediction (C or D,)."""

    key: str
    columns: list[str]
    cells: Callable[[torch.Tensor], list[str]]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A competition's sample of a submission."""

    path: Path
    header: list[str]
    ids: list[str]


def default_table(head: Outputs, *, topk: int, threshold: float = HALF) -> Table:
    """The most likely classes; the predicted labels and the probability of each; or the values."""
    names = head.target.names
    if head.target.kind == "values":
        return Table(key="image", columns=[f"predicted {name}" for name in names], cells=_values)
    if head.target.kind == "labels":
        return Table(
            key="image",
            columns=["predicted", *names],
            cells=lambda prediction: ["|".join(_above(names, prediction, threshold)), *_probabilities(prediction)],
        )

    def cells(prediction: torch.Tensor) -> list[str]:
        values, indices = prediction.topk(topk)
        pairs = zip(indices.tolist(), _probabilities(values), strict=True)
        return [text for index, value in pairs for text in (names[index], value)]

    columns = [f"{what}{k}" for k in range(1, topk + 1) for what in ("class", "prob")]
    return Table(key="image", columns=columns, cells=cells)


def wide_table(head: Outputs) -> Table:
    """The probability of each class."""
    return Table(key="image", columns=list(head.target.names), cells=_probabilities)


def read_sample(path: Path) -> Sample:
    """Raises `ResoluteError` if it is no table of at least two columns and one row."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            header, *rows = csv.reader(file)
        ids = [row[0] for row in rows if row]
    except (OSError, ValueError, csv.Error) as error:  # a ValueError: empty, or not UTF-8
        reason = error.strerror if isinstance(error, OSError) else "not a CSV file"
        raise ResoluteError(
            f"--sample: {path} cannot be read ({reason}), expected sample_submission.csv; correct it"
        ) from None
    if len(header) < 2 or not ids:
        raise ResoluteError(
            f"--sample: {path} has {len(header)} columns and {len(ids)} rows, expected ids and at "
            "least one other column; correct it"
        )
    return Sample(path=path, header=header, ids=ids)


def submission(sample: Sample, head: Outputs, *, threshold: float = HALF) -> Table:
    """Raises `ResoluteError` if the sample's columns are not those of the run."""
    names, kind = head.target.names, head.target.kind
    key, *columns = sample.header
    if {*columns} <= {*names}:
        chosen = [names.index(name) for name in columns]
        as_text = _values if kind == "values" else _probabilities
        return Table(key=key, columns=columns, cells=lambda prediction: as_text(prediction[chosen]))
    if len(columns) > 1 or (kind == "values" and len(names) > 1):
        unknown = next(name for name in columns if name not in names)
        what = "classes" if kind == "class" else kind
        raise ResoluteError(
            f"--sample: {sample.path} has the column {unknown!r}, expected one column besides the ids, "
            f"or names of the run's {what} ({', '.join(names[:_SHOWN])} …); correct it"
        )
    if kind == "values":
        return Table(key=key, columns=columns, cells=_values)
    if kind == "labels":
        return Table(key=key, columns=columns, cells=lambda values: [" ".join(_above(names, values, threshold))])
    return Table(key=key, columns=columns, cells=lambda values: [names[int(values.argmax())]])


def match_photos(sample: Sample, paths: Sequence[Path], root: Path) -> list[tuple[str, Path]]:
    """The sample's (id, photo) pairs, in its order.

    An id is the path of a photo below `root`, or its file name; each with or without its suffix, all in the same way.
    Raises `ResoluteError` for ids without a photo or with several.
    """
    tried = []
    ways: tuple[Callable[[Path], Path], ...] = (
        Path,
        _stem,
        lambda path: Path(path.name),
        lambda path: _stem(Path(path.name)),
    )
    for name_of in ways:
        found = defaultdict[Path, list[Path]](list)
        for path in paths:
            found[name_of(path.relative_to(root))].append(path)
        pairs = {key: found.get(name_of(Path(key)), []) for key in sample.ids}
        faults = {key: photos for key, photos in pairs.items() if len(photos) != 1}
        if not faults:
            return [(key, pairs[key][0]) for key in sample.ids]
        tried.append(faults)
    wrong = min(tried, key=lambda faults: sum(not photos for photos in faults.values()))
    absent = [key for key, photos in wrong.items() if not photos]
    if absent:
        more = ", …" if len(absent) > _SHOWN else ""
        raise ResoluteError(
            f"--sample: {len(absent)} of {len(sample.ids)} ids have no photo in {root} "
            f"({', '.join(absent[:_SHOWN])}{more}), expected one each; correct SRC"
        )
    key, photos = next(iter(wrong.items()))
    raise ResoluteError(
        f"--sample: the id {key} fits {len(photos)} photos, {photos[0]} and {photos[1]} for example, "
        "expected one; use paths as ids, or correct SRC"
    )


def true_columns(head: Outputs) -> list[str]:
    """The columns of `true_cells`."""
    if head.target.kind == "values":
        return [f"true {name}" for name in head.target.names]
    return ["label" if head.target.kind == "class" else "labels"]


def true_cells(head: Outputs, target: torch.Tensor, classes: tuple[str, ...]) -> list[str]:
    """`target`: a row of `Batch.targets`, of classes with the names `classes`."""
    if head.target.kind == "values":
        return _values(target)
    return [classes[int(target)] if head.target.kind == "class" else "|".join(_above(classes, target, HALF))]


def _stem(path: Path) -> Path:
    """The path without the suffix of an image file; "v1.2" has none."""
    return path.with_suffix("") if is_image(path.name) else path


def _above(names: Sequence[str], probabilities: torch.Tensor, threshold: float) -> list[str]:
    return [name for name, value in zip(names, probabilities.tolist(), strict=True) if value >= threshold]


def _probabilities(values: torch.Tensor) -> list[str]:
    return [f"{value:.6f}" for value in values.tolist()]


def _values(values: torch.Tensor) -> list[str]:
    return [f"{value:.7g}" for value in values.tolist()]
