"""`open_webdataset`: opens third-party WebDataset tars as a `ShardSet`, without converting them.

    shards = open_webdataset("imagenet/", val="*validation*")
    shards = open_webdataset("s3://bucket/train-{000000..000146}.tar", val=0.01)

The first call reads all tars and decodes every image, which takes minutes for a million images; the index is stored
for later calls. The tars' one stored size serves every resolution, so the decoding and resizing work that shards of
prep save is paid in every epoch.
"""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

import numpy as np
from braceexpand import braceexpand

from resolute.errors import ResoluteError, StorageError, strip_credentials
from resolute.machine import available_cpus
from resolute.pipeline.dataset.format import is_shard_set
from resolute.pipeline.dataset.shard_set import EveryRes, ShardSet, Split
from resolute.pipeline.dataset.target import CLASS, Target, TargetKind
from resolute.pipeline.storage.base import is_url, open_files
from resolute.pipeline.storage.disk_cache import CacheSettings

from .index import REPAIR, ForeignIndex, open_index
from .sample_check import SampleFields

__all__ = ["open_webdataset"]

_MARGIN = 256 / 224  # as for shards of prep: validation takes the centre 0.875 of the short side
_VAL = "*val*"
_TARS = ("*.tar", "*.tar.gz", "*.tgz")  # compressed ones are refused rather than ignored


def _log_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def open_webdataset(
    source: str | Path | Sequence[str | Path], *, val: str | float | None = None,
    image: str | Sequence[str] = SampleFields.image, label: str | Sequence[str] | None = None,
    target: TargetKind = CLASS,
    classes: str | Path | Sequence[str] | None = None, threads: int | None = None,
    index: str | Path | None = None, cache: CacheSettings | None = None, log: Callable[[str], None] = _log_to_stderr,
) -> ShardSet:  # fmt: skip
    """Open tars of KEY.jpg and KEY.cls (or png, webp, bmp; numbers in .json) for `Plan` and `Loader`.

    source   a folder (searched recursively), a pattern with * or {000..146}, or a list of these; URLs (s3://, gs://,
             http://) in full or with {}, since stores are not listed
    val      the validation split: a pattern for tar names relative to the source's folder, or a fraction of the
             samples (0 to 1, chosen by a hash of the key). None: the tars with "val" in their names, if any
    image    extensions of images (everything after the first dot of the file name, as in WebDataset)
    label    extensions of labels, the first that a sample has; "json:KEY" selects a key of a JSON file. None: cls or
             json, and json for other targets than classes
    target   "class": a label is a number; "labels": a list of numbers, or of names of `classes`, in the JSON file's
             `labels`; "values": a number or a list of numbers in its `target`
    classes  class names, or names of the values, or a file with one per line; None: numbers as names
    threads  decoding threads while indexing; None: one per core
    index    folder for the index; None: `.resolute-index` beside the tars, or the cache folder
    cache    for URLs, as in `open_files`
    log      receives progress lines of the indexing; default: stderr

    EXIF orientation is applied, as by DALI. Unusable samples (no label, damaged, not decodable by DALI) are left out,
    counted, logged and listed in the index's rejects.jsonl. Tars whose size or modification time changed are indexed
    again. Processes that open the same tars concurrently share one indexing pass.
    Raises `ResoluteError` if there are no tars, one is compressed or truncated, no sample is usable, `val` selects
    none or all samples, there are fewer class names than classes, or samples have different numbers of values.
    """
    if threads is not None and threads < 1:
        raise ResoluteError(f"threads: out of range, got {threads}, expected at least 1; choose another")
    root, names = _tars(source)
    files = open_files(root, cache=cache)
    if target not in get_args(TargetKind):
        raise ResoluteError(f"target: got {target}, expected {', '.join(get_args(TargetKind))}; choose one")
    if isinstance(classes, str | Path):
        classes = _lines(Path(classes))
    label = label or (SampleFields.label if target == CLASS else ("json",))
    fields = SampleFields(image=_extensions(image), label=_extensions(label), target=target,
                          classes=tuple(classes or ()) if target == "labels" else ())  # fmt: skip
    # why checked before indexing: it may take hours
    for name, extensions in (("image", fields.image), ("label", fields.label)):
        if not all(extensions):
            example = getattr(SampleFields, name)[0]
            raise ResoluteError(f"{name}: got an empty extension, expected one such as {example}; correct it")
    if isinstance(val, (int, float)) and not 0 < val < 1:
        raise ResoluteError(f"{files.root}: got val {val}, expected a fraction above 0, below 1; change it")
    try:
        tar_index = open_index(files, names, fields, threads=threads or available_cpus(),
                               folder=None if index is None else Path(index), log=log)  # fmt: skip
        class_names = _class_names(classes, tar_index, target, files.root)
        splits = _splits(tar_index, names, val, files.root)
    except BaseException:
        files.close()
        raise
    classes_hash = hashlib.sha256(json.dumps(class_names).encode()).hexdigest()[:12]
    return ShardSet(
        files=files, target=_target(target, class_names), resolutions=(), margin=_MARGIN, splits=splits,
        single_resolution=True, repair=REPAIR,
        hash=hashlib.sha256(json.dumps([tar_index.hash, val, class_names]).encode()).hexdigest()[:12],
        states=dict(zip(names, tar_index.states, strict=True)),
        digests={"classes": classes_hash, "val": str(val), "tars, labels and images": tar_index.hash},
    )  # fmt: skip


def _target(kind: TargetKind, names: tuple[str, ...]) -> Target:
    return Target(kind=kind, names=names, units=("",) * len(names) if kind == "values" else ())


def _extensions(rules: str | Sequence[str]) -> tuple[str, ...]:
    """Lower-case extensions without a leading dot; a JSON key after a colon is unchanged."""
    parts = [rule.partition(":") for rule in ((rules,) if isinstance(rules, str) else rules)]
    return tuple(kind.lower().lstrip(".") + colon + key for kind, colon, key in parts)


def _tars(source: str | Path | Sequence[str | Path]) -> tuple[str, list[str]]:
    """The common root folder or URL of all tars, and their sorted names relative to it."""
    sources = [str(source)] if isinstance(source, str | Path) else [str(pattern) for pattern in source]
    paths = sorted(path for pattern in sources for path in _expand(pattern))
    shown = strip_credentials(", ".join(sources[:3]))
    if not paths:
        where = shown or "source"
        raise ResoluteError(f"{where}: no tars found, expected files like train-000.tar; correct the source")
    if len(set(paths)) < len(paths):
        raise ResoluteError(f"{shown}: got a tar twice, expected each once; correct the list")
    folders = {path.rpartition("/")[0] for path in paths}
    if not any(map(is_url, paths)):
        _refuse_copies(paths)
    if any(map(is_url, paths)):
        columns = zip(*(folder.split("/") for folder in folders), strict=False)
        root = "/".join(parts[0] for parts in itertools.takewhile(lambda parts: len(set(parts)) == 1, columns))
        if "://" not in root or root.endswith(":/"):
            raise ResoluteError(f"{shown}: got tars of several stores, expected them below one URL; copy them together")
        return root, [path[len(root) + 1 :] for path in paths]
    root = str(Path(os.path.commonpath([folder or "." for folder in folders]))) if len(folders) > 1 else folders.pop()
    return root or ".", [os.path.relpath(path, root or ".") for path in paths]


def _expand(pattern: str) -> list[str]:
    """The tars that a path, pattern or URL names. Raises `ResoluteError` for a shard set of prep."""
    if is_url(pattern):
        urls = _braces(pattern)
        if any(not url.endswith((".tar", ".tar.gz", ".tgz")) or "*" in url for url in urls):
            raise ResoluteError(
                f"{strip_credentials(pattern)}: expected URLs of .tar files, since stores are not listed; "
                "write them as train-{000000..000146}.tar"
            )
        return urls
    paths: list[str] = []
    for name in [pattern] if Path(pattern).exists() else _braces(pattern):  # why: a real name may contain braces
        if Path(name).is_dir():
            if is_shard_set(name):
                raise _made_by_prep(name)
            paths += [str(path) for kind in _TARS for path in Path(name).rglob(kind)]
        elif glob.has_magic(name) and not Path(name).exists():
            paths += glob.glob(name, recursive=True)  # noqa: PTH207  # why: Path.glob takes no absolute pattern
        else:
            paths.append(name)  # a missing file is reported when its size is read
    return paths


def _refuse_copies(paths: Sequence[str]) -> None:
    """Raise if the tars are a shard set's at several resolutions: each photo would be several samples."""
    resolutions: dict[Path, set[str]] = {}
    for folder in {Path(path).parent for path in paths}:
        if folder.name.isdigit():
            resolutions.setdefault(folder.parent, set()).add(folder.name)
    for root, names in resolutions.items():
        if len(names) > 1 and is_shard_set(root):
            raise _made_by_prep(str(root))


def _made_by_prep(root: str) -> ResoluteError:
    return ResoluteError(
        f"{root}: got a shard set of prep, which holds each photo once per resolution, expected third-party tars; "
        "open it with ShardSet.open, or pass only this folder as SHARDS"
    )


def _braces(pattern: str) -> list[str]:
    try:
        return list(braceexpand(pattern))
    except ValueError:
        shown = strip_credentials(pattern)
        raise ResoluteError(f"{shown}: unbalanced braces, expected a pattern like train-{{000..146}}.tar") from None


def _class_names(
    classes: Sequence[str] | None, index: ForeignIndex, kind: TargetKind, root: str
) -> tuple[str, ...]:
    if kind == "values":
        names = tuple(classes or (f"value{n}" for n in range(index.classes)))
        if len(names) != index.classes:
            expected = f"{index.classes}, one per value"
            raise ResoluteError(f"{root}: got {len(names)} names, expected {expected}; correct them")
        return names
    if classes is None:
        return tuple(map(str, range(index.classes)))
    names = tuple(classes)
    if len(names) < index.classes:
        raise ResoluteError(
            f"{root}: got {len(names)} class names, expected {index.classes}: the largest label is "
            f"{index.classes - 1}; add the missing ones"
        )
    return names


def _lines(path: Path) -> tuple[str, ...]:
    try:
        return tuple(path.read_text(encoding="utf-8").splitlines())
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be read, got '{error.strerror}', expected one class name per line; correct the path"
        ) from None
    except UnicodeDecodeError:
        raise ResoluteError(f"{path}: not UTF-8, expected one class name per line; save it as UTF-8") from None


def _splits(index: ForeignIndex, names: Sequence[str], val: str | float | None, root: str) -> dict[str, Split]:
    if isinstance(val, str) or val is None:
        patterns = _braces(_VAL if val is None else val)
        held = [any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns) for name in names]
        mask = np.repeat(held, index.counts)
        if val is not None and not any(held):
            raise ResoluteError(f"{root}: val '{val}' matches no tar, the first is {names[0]}; correct it")
    else:
        mask = index.samples["hash"] < np.uint32(round(val * 2**32) if val < 1 else 0)
    if val is not None and (not mask.any() or mask.all()):
        raise ResoluteError(
            f"{root}: val {val!r} selects {mask.sum()} of {len(mask)} samples, expected some for each split; change it"
        )
    whole = Split(name="", samples=index.samples, stored=EveryRes(index.stored), shards=tuple(names))
    return {"train": whole.subset("train", ~mask), "val": whole.subset("val", mask)}
