"""The inputs of a run: every candidate photo with its class and split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.target import Target
from resolute.prep.settings import Settings
from resolute.prep.sources.archive import ArchiveSource
from resolute.prep.sources.folders.image_folder import ImageFolderSource
from resolute.prep.sources.image_ref import Source
from resolute.prep.sources.part_source import PartSource
from resolute.prep.sources.tables.group_column import parse_group
from resolute.prep.sources.webdataset import WebDatasetSource
from resolute.urls import is_url

from .class_file import read_classes
from .copies import ExactCopies, find_copies, refuse_same_files
from .database import Database
from .groups import describe_groups, fingerprint_of_groups, group_numbers, set_groups
from .label_checks import LabelledBy, refuse_doubtful_labels
from .list_photos import list_photos
from .open_sources import open_sources
from .photos import Photos
from .splits import Split, make_splits

__all__ = ["COPIES", "Inputs", "check_no_overlap", "copies_of", "list_sources", "split_inputs"]

COPIES = "exact copies"  # the kind under which photos that DUPLICATES=drop leaves out are counted


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """All candidate photos, by source ("train", and "val" if it has a source), and those of a generation by split.

    `ignored` counts things in the sources that are not images, by kind.
    """

    splits: Mapping[str, Split]
    sources: Mapping[str, Photos]
    ignored: Counter[str]
    copies: ExactCopies | None = None  # None: not looked for

    @property
    def target(self) -> Target:
        return self.sources["train"].target

    @property
    def about(self) -> tuple[str, ...]:
        """Lines that describe the recognised targets of a table, with examples."""
        return self.sources["train"].about

    @property
    def classes(self) -> tuple[str, ...]:
        return self.sources["train"].classes

    @property
    def images(self) -> int:
        return sum(map(len, self.sources.values()))

    @property
    def listed(self) -> int:
        """The number of entries that were listed: the images, those left out as copies, and what is `ignored`."""
        return sum(photos.listed for photos in self.sources.values())

    @property
    def stamps(self) -> dict[str, str]:
        """The states of the archives that hold photos, when they were listed: {path: stamp}."""
        return {path: stamp for photos in self.sources.values() for path, stamp in photos.stamps.items()}

    def summary(self) -> dict[str, Any]:
        """Summary of the sources for plan and manifest: the number of images and fingerprints.

        `splits` maps a split to a fingerprint of its members; `classes` maps "SPLIT CLASS" to (images, fingerprint of
        their names and sizes), so that a change can be attributed to a class.
        """
        by_class = {
            f"{name} {label}": list(count_and_digest)
            for name, photos in self.sources.items()
            for label, count_and_digest in photos.by_class().items()
        }
        groups = fingerprint_of_groups(self.sources)
        return {
            "images": self.images,
            "splits": {name: split.fingerprint() for name, split in self.splits.items()},
            "classes": by_class,
            **({} if groups is None else {"groups": groups}),
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


def list_sources(
    settings: Settings, database: Database, scan_cache: Path, *, known_classes: Sequence[str] = ()
) -> tuple[dict[str, Photos], Counter[str]]:
    """The photos of the sources that `settings` name ("train", and "val" if it has a source), and what is ignored.

    They are listed in `database`; `scan_cache` takes what has to be unpacked to be read. `known_classes` keep their
    numbers. Raises `ResoluteError` for sources that are missing or hold too little.
    """
    class_file = None if settings.classes is None else read_classes(Path(settings.classes))
    sources: dict[str, Photos] = {}
    ignored: Counter[str] = Counter()
    named = (*known_classes, *(class_file.names if class_file is not None else ()))
    opened: dict[str, tuple[Source, Photos]] = {}
    for name, source in open_sources(settings, scan_cache, lambda: sources["train"].classes, named_classes=named):
        _refuse_unreachable(settings, source)
        if name == "train":
            photos = list_photos(
                source,
                database,
                name,
                classes=None if class_file is None else class_file.names,
                classes_file=settings.classes or "CLASSES",
                class_numbers=None if class_file is None else class_file.numbers,
                known_classes=known_classes,
            )
            if class_file is not None and class_file.about is not None:
                photos = replace(photos, about=(class_file.about, *photos.about))
            if class_file is None and source.listing.label_names is None and photos.target.kind != "values":
                refuse_doubtful_labels(
                    settings.labels or settings.src,
                    photos.classes,
                    photos.class_counts(),
                    kind=photos.target.kind,
                    numbered=photos.numbered,
                    labelled_by=_labelled_by(source),
                    is_chosen=settings.target is not None,
                    known=known_classes,
                )
        else:
            photos = list_photos(source, database, name, training=sources["train"])
        sources[name] = photos
        opened[name] = (source, photos)
        ignored.update(photos.ignored)
    if (group := parse_group(settings.group)) is not None:
        lines = set_groups(group, opened)
        lines += describe_groups(group, sources)
        sources["train"] = replace(sources["train"], about=(*sources["train"].about, *lines))
    if "val" in sources:
        refuse_same_files(
            sources["train"], sources["val"], settings.src, settings.val_labels or settings.val or settings.src
        )
    if settings.engine != "local":
        for photos in sources.values():
            _refuse_credentials(photos)
    return sources, ignored


def split_inputs(settings: Settings, sources: Mapping[str, Photos], ignored: Counter[str]) -> Inputs:
    """The inputs of generation 0. Raises `ResoluteError` for an empty split, and a list that names unknown images."""
    copies = copies_of(settings, sources)
    splits = make_splits(
        sources["train"],
        val=sources.get("val"),
        val_list=None if settings.val_list is None else Path(settings.val_list),
        val_frac=settings.held_out_frac,
        seed=settings.seed,
        copies=copies,
        drop=settings.duplicates == "drop",
        groups=group_numbers(sources),
    )
    left_out = sum(map(len, sources.values())) - sum(map(len, splits.values()))
    return Inputs(splits=splits, sources=sources, ignored=ignored + Counter({COPIES: left_out}), copies=copies)


def copies_of(settings: Settings, sources: Mapping[str, Photos]) -> ExactCopies | None:
    """The exact copies among the photos; None if they are not to be looked for."""
    has_val = settings.val_source is not None or settings.val_list is not None or settings.held_out_frac > 0
    if settings.duplicates == "keep" or (settings.duplicates is None and not has_val):
        return None
    return find_copies(sources, remote=settings.duplicates is not None)


def _labelled_by(source: Source) -> LabelledBy:
    """What gives the photos of a source their labels."""
    source = source.whole if isinstance(source, PartSource) else source
    if isinstance(source, ImageFolderSource | ArchiveSource):
        return "folders"
    return "samples" if isinstance(source, WebDatasetSource) else "table"


def _refuse_unreachable(settings: Settings, source: Source) -> None:
    """Raise `ResoluteError` if images would be unpacked to a local disk that other nodes cannot read."""
    if source.unpacks and settings.engine != "local" and is_url(settings.out):
        engine = "ENGINE=ray" if settings.engine == "ray" else "`resolute jobs plan`"
        raise ResoluteError(
            f"{source.root}: must be unpacked where all nodes can read it, got {engine} and OUT={settings.out}, "
            "expected OUT on a shared disk; use such an OUT, unpack the source first, or use ENGINE=local"
        )


def _refuse_credentials(photos: Photos) -> None:
    """Raise `ResoluteError` for images that jobs can only read with credentials that would then lie in OUT."""
    if path := photos.path_with_credentials():
        raise ResoluteError(
            f"{photos.root}: got a URL with credentials, '{path}', which a plan for jobs would write to OUT, expected "
            "the store's own credentials (environment variables on all machines); use these, or ENGINE=local, which "
            "writes none"
        )
