"""The inputs of a run: every candidate image with its class and split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import ResoluteError
from prep.config import Settings
from prep.sources.detect import open_source
from prep.sources.image_ref import Source, is_url

from .catalog import Catalog, write_catalog
from .classes import read_classes
from .splits import Split, make_splits

__all__ = ["Inputs", "check_no_overlap", "list_inputs"]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """All candidate images by split; `ignored` counts things in the sources that are not images, by kind."""

    classes: tuple[str, ...]
    splits: Mapping[str, Split]
    catalogs: Mapping[str, Catalog]
    ignored: Counter[str]

    @property
    def images(self) -> int:
        return sum(len(split) for split in self.splits.values())

    def summary(self) -> dict[str, Any]:
        """Summary of the sources for plan and manifest: the number of images and fingerprints.

        `splits` maps a split to a fingerprint of its members; `classes` maps "SPLIT CLASS" to (images, fingerprint of
        their names and sizes), so that a change can be attributed to a class.
        """
        by_class = {
            f"{name} {label}": list(count_and_digest)
            for name, catalog in self.catalogs.items()
            for label, count_and_digest in catalog.by_class().items()
        }
        return {
            "images": self.images,
            "splits": {name: split.fingerprint() for name, split in self.splits.items()},
            "classes": by_class,
        }


def check_no_overlap(settings: Settings) -> None:
    """Raise `ResoluteError` if OUT is inside SRC or VAL, or these overlap. URLs and patterns are not checked."""
    paths = {"SRC": settings.src, "VAL": settings.val}
    sources = {name: Path(path) for name, path in paths.items() if path and not is_url(path)}
    if not is_url(settings.out):
        for name, path in sources.items():
            if Path(settings.out).resolve().is_relative_to(path.resolve()):
                raise ResoluteError(
                    f"{settings.out}: is inside {name}, got {path}, expected a folder outside the photos; "
                    "choose another OUT"
                )
    if len(sources) == 2:
        src_path, val_path = sources["SRC"].resolve(), sources["VAL"].resolve()
        if src_path.is_relative_to(val_path) or val_path.is_relative_to(src_path):
            raise ResoluteError(
                f"{settings.val}: overlaps SRC, got {settings.src}, expected two separate sources; "
                "correct VAL, or hold out a fraction of SRC with --val-frac"
            )


def list_inputs(settings: Settings, scratch: Path, scan_cache: Path) -> Inputs:
    """List the sources that `settings` name and split them.

    Lists are written to `scratch`; `scan_cache` takes what has to be unpacked to be read. Raises `ResoluteError` for
    sources that are missing or hold too little, and for lists that do not match them.
    """
    class_names = None if settings.classes is None else read_classes(Path(settings.classes))
    src = open_source(
        settings.src, kind=settings.kind, labels=settings.labels, columns=settings.columns, scan_cache=scan_cache
    )
    _refuse_unreachable_copies(settings, src)
    train = write_catalog(src, scratch / "train", classes=class_names, classes_file=settings.classes or "CLASSES")
    catalogs, ignored, val = {"train": train}, Counter(train.ignored), None
    if settings.val is not None:
        val_src = open_source(settings.val, kind=settings.kind, scan_cache=scan_cache, setting="VAL")
        _refuse_unreachable_copies(settings, val_src)
        val = write_catalog(val_src, scratch / "val", training=train)
        catalogs["val"] = val
        ignored.update(val.ignored)
    splits = make_splits(
        train, val=val, val_list=None if settings.val_list is None else Path(settings.val_list),
        val_frac=settings.held_out_frac, folds=settings.folds or 0, seed=settings.seed,
    )  # fmt: skip
    return Inputs(classes=train.classes, splits=splits, catalogs=catalogs, ignored=ignored)


def _refuse_unreachable_copies(settings: Settings, source: Source) -> None:
    """Raise `ResoluteError` if images would be unpacked to a local disk that other nodes cannot read."""
    if source.copies and settings.engine == "ray" and is_url(settings.out):
        raise ResoluteError(
            f"{source.root}: must be unpacked where all nodes can read it, got ENGINE=ray and OUT={settings.out}, "
            "expected OUT on a shared disk; use such an OUT, unpack the source first, or use ENGINE=local"
        )
