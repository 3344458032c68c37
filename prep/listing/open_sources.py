"""Opens the sources that the settings name: SRC, and VAL if it is set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from resolute.prep.settings import Settings
from resolute.prep.sources.detect import open_source, plain_path
from resolute.prep.sources.filesystem import path_kind
from resolute.prep.sources.image_ref import Source
from resolute.prep.sources.label_file import FolderFiles, table_covers
from resolute.prep.sources.part_source import PartSource
from resolute.prep.sources.tables.group_column import parse_group
from resolute.prep.sources.tables.split_column import Part, SplitSetting, parse_split
from resolute.prep.sources.targets import parse_target

__all__ = ["open_sources"]


def open_sources(
    settings: Settings,
    scan_cache: Path,
    classes: Callable[[], Sequence[str]] = tuple,
    *,
    named_classes: Sequence[str] = (),
) -> Iterator[tuple[str, Source]]:
    """Yield "train" and its source, then "val" and its source if there is one.

    The first is to be iterated before the next is asked for, whose targets are of the kind that was recognised;
    `classes()` are then the classes of the training part. Labels and class folders with the names `named_classes` are
    classes without a question. `scan_cache` takes what has to be unpacked to be read. Raises `ResoluteError` for
    sources that are missing.
    """
    listed = _folders_of_tables(settings)
    labels = (settings.labels or "").removeprefix("file://")
    paths = [plain_path(path) for path in (settings.src, settings.val_source) if path is not None]
    is_shared = (
        settings.val_labels is None
        and len(listed) == 2
        and table_covers(labels, settings.columns, *(listed[path] for path in paths))
    )
    setting = parse_target(settings.target)._replace(
        drop_unlabelled=settings.unlabelled == "drop",
        keep_words=settings.unlabelled == "keep",
        named=frozenset(named_classes),
        blank=settings.blank,
        uncertain=settings.uncertain,
    )
    split = None if settings.split in (None, "none") else parse_split(settings.split)
    group = parse_group(settings.group)
    is_divided = settings.val_source is not None or settings.val_list is not None or settings.split is not None
    opened = partial(
        _open,
        split=split,
        group=None if group is None else group.column,
        kind=settings.kind,
        listed=listed,
        max_bad=settings.max_bad_frac,
        image=settings.images,
        zip_names=settings.zip_names,
        named_classes=named_classes,
        scan_cache=scan_cache,
    )
    columns_are_of_val = settings.labels is None and settings.val_labels is not None
    src = opened(
        settings.src,
        labels=settings.labels,
        columns=None if columns_are_of_val else settings.columns,
        target=setting,
        elsewhere=settings.val if is_shared else None,
        also=settings.val_labels if settings.val is None else None,
        asks_for_split=not is_divided,
        hints_at_group=settings.group is None,
    )
    yield "train", src
    if settings.val_source is not None:
        val = opened(
            settings.val_source,
            labels=settings.labels if is_shared or split is not None else settings.val_labels,
            part="val",
            columns=settings.columns,
            target=setting._replace(
                kind=src.listing.target.kind, separator=src.listing.target.separator, signs=src.listing.target.signs
            ),
            elsewhere=settings.src if is_shared else None,
            only_rows=settings.val is None,
            known_classes=classes(),
            setting="VAL",
        )
        yield "val", val


def _open(src: str, *, split: SplitSetting | None, part: Part = "train", **options: Any) -> Source:
    """`open_source`, for the photos of `part` if there is a `split`."""
    if split is None or split.pattern is None:
        return open_source(src, split=split, part=part, **options)
    return PartSource(open_source(src, **{**options, "asks_for_split": False}), split, part)


def _folders_of_tables(settings: Settings) -> dict[str, FolderFiles]:
    """The files of SRC and of VAL, by path, if tables name images of both, or of one twice; else none."""
    if settings.labels is None or settings.val_source is None:
        return {}
    paths = dict.fromkeys(plain_path(path) for path in (settings.src, settings.val_source))
    if (settings.val_labels is None) != (len(paths) == 2) or any(path_kind(path) != "folder" for path in paths):
        return {}
    return {path: FolderFiles(path, settings.labels.removeprefix("file://")) for path in paths}
