"""Opens the sources that the settings name: SRC, and VAL if it is set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from resolute.prep.settings import Settings
from resolute.prep.sources.detect import open_source, plain_path
from resolute.prep.sources.filesystem import path_kind
from resolute.prep.sources.image_ref import Source
from resolute.prep.sources.label_file import FolderFiles, table_covers
from resolute.prep.sources.targets import TargetSetting, parse_target

__all__ = ["open_sources"]


def open_sources(settings: Settings, scan_cache: Path) -> Iterator[tuple[str, Source]]:
    """Yield "train" and its source, then "val" and its source if there is one.

    The first is to be iterated before the next is asked for, whose targets are of the kind that was recognised.
    `scan_cache` takes what has to be unpacked to be read. Raises `ResoluteError` for sources that are missing.
    """
    listed = _folders_of_a_table(settings)
    labels = (settings.labels or "").removeprefix("file://")
    is_shared = bool(listed) and table_covers(labels, settings.columns, *listed.values())
    setting = parse_target(settings.target)._replace(drop_unlabelled=settings.unlabelled == "drop")
    src = open_source(
        settings.src,
        kind=settings.kind,
        labels=settings.labels,
        columns=settings.columns,
        target=setting,
        elsewhere=settings.val if is_shared else None,
        listed=listed,
        scan_cache=scan_cache,
    )
    yield "train", src
    if settings.val is not None:
        target = TargetSetting(src.target.kind, src.target.separator, setting.drop_unlabelled)
        yield (
            "val",
            open_source(
                settings.val,
                kind=settings.kind,
                labels=settings.labels if is_shared else settings.val_labels,
                columns=settings.columns,
                target=target,
                elsewhere=settings.src if is_shared else None,
                listed=listed,
                scan_cache=scan_cache,
                setting="VAL",
            ),
        )


def _folders_of_a_table(settings: Settings) -> dict[str, FolderFiles]:
    """The files of SRC and of VAL, by path, if LABELS is the only table and may name images of both; else none."""
    if settings.labels is None or settings.val is None or settings.val_labels is not None:
        return {}
    paths = [plain_path(settings.src), plain_path(settings.val)]
    if paths[0] == paths[1] or any(path_kind(path) != "folder" for path in paths):
        return {}
    return {path: FolderFiles(path) for path in paths}
