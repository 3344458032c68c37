"""How does a shard set come about, from folders of photos to a manifest?"""

from __future__ import annotations

import io
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import ResoluteError
from pipeline.shards import FORMAT, VERSION

from .chunk import Job
from .place import MANIFEST, UNFINISHED, claimed, finish, is_there, remove_stale
from .pool import open_pool
from .settings import Settings
from .sources import Sources, find_sources
from .split import Progress, WrittenSplit, write_split
from .writer import FileInfo, sync_folder, write_file

__all__ = ["Built", "build", "told_by_kind"]


@dataclass(frozen=True, kw_only=True)
class Built:
    """What `build` did. `splits` is None where the finished set was there already. `elapsed_s`: wall time."""

    sources: Sources
    manifest: dict[str, Any]
    splits: Mapping[str, WrittenSplit] | None
    elapsed_s: float


def build(
    settings: Settings, *, found: Callable[[Sources], None] | None = None, progress: Progress | None = None
) -> Built:
    """Write the shard set that `settings` describe, or find it finished.

    The same settings and photos give the same bytes, whatever `settings.workers` is. `found` is told the
    sources before work starts. Raises `ResoluteError` for bad input, a full disk, or more than `max_bad` of
    unusable images; no manifest is there then.
    """
    began = time.perf_counter()
    sources = find_sources(settings)
    source = {"images": sources.count, "fingerprint": sources.fingerprint()}
    wanted = {"settings": settings.in_manifest(), "source": source}
    manifest = is_there(settings.out, wanted, rebuild=settings.rebuild)
    splits = None
    if manifest is None:
        if found is not None:
            found(sources)
        digits = max(4, len(str(len(sources.classes) - 1)))
        job = Job(short_sides=settings.short_sides, quality=settings.quality, label_digits=digits)
        with claimed(settings.out, settings.resolutions):
            with open_pool(settings.worker_count) as pool:
                splits = {
                    name: write_split(settings, name, photos, job, pool, progress or _quiet)
                    for name, photos in sources.splits.items()
                }
            rejects = _write_rejects(settings, sources, splits)
            manifest = _finish(settings, sources, splits, rejects, source)
    return Built(
        sources=sources, manifest=manifest, splits=splits, elapsed_s=time.perf_counter() - began
    )


def told_by_kind(reasons: Iterable[str]) -> str:
    """How often each kind of reject reason, the part before a colon, comes: `3 truncated, 1 not an image`."""
    kinds = Counter(reason.partition(":")[0] for reason in reasons)
    return ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items(), key=lambda item: (-item[1], item[0])))


def _quiet(finished: int, rejected: int) -> None:
    pass


def _write_rejects(settings: Settings, sources: Sources, splits: Mapping[str, WrittenSplit]) -> FileInfo:
    """rejects.jsonl, written whatever comes next; raises if there are too many or a split is empty."""
    rows = [
        {"path": path, "split": name, "reason": reason}
        for name in sorted(splits)
        for path, reason in splits[name].rejects
    ]
    path = settings.out / "rejects.jsonl"
    info = write_file(path, "".join(json.dumps(row) + "\n" for row in rows).encode())
    told = told_by_kind(row["reason"] for row in rows)
    allowed = settings.max_bad * sources.count
    if len(rows) > allowed:
        raise ResoluteError(
            f"{settings.src}: too many unusable images, got {len(rows)} of {sources.count} ({told}), "
            f"expected at most {int(allowed)} (--max-bad {settings.max_bad}); see {path}"
        )
    for name, split in splits.items():
        if not len(split.samples):
            raise ResoluteError(
                f"{settings.src}: no image of {name} is usable, got {len(split.rejects)} rejects ({told}), "
                f"expected at least one sample; see {path}"
            )
    return info


def _finish(
    settings: Settings,
    sources: Sources,
    splits: Mapping[str, WrittenSplit],
    rejects: FileInfo,
    source: Mapping[str, Any],
) -> dict[str, Any]:
    """Index, timm's info files and, when all that is safe on disk, the manifest."""
    out, resolutions = settings.out, settings.resolutions
    files = {"rejects.jsonl": rejects}
    for name, split in splits.items():
        files |= split.files
        files[f"index/{name}.npy"] = _save(out / "index" / f"{name}.npy", split.samples)
        for res, stored in zip(resolutions, split.stored, strict=True):
            files[f"index/{name}-{res}.npy"] = _save(out / "index" / f"{name}-{res}.npy", stored)
        lines = "".join(json.dumps(path) + "\n" for path in split.paths).encode()
        files[f"index/{name}.sources.jsonl"] = write_file(out / "index" / f"{name}.sources.jsonl", lines)
    # why: timm opens "wds/..." at one resolution's folder, or at the set's own for the largest
    for folder, prefix in [(str(res), "") for res in resolutions] + [("", f"{resolutions[-1]}/")]:
        name = f"{folder}/_info.json".lstrip("/")
        files[name] = write_file(out / name, _json(_timm_info(splits, prefix)))
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "settings": settings.in_manifest(),
        "classes": list(sources.classes),
        "resolutions": {
            str(res): {"short_side": short_side}
            for res, short_side in zip(resolutions, settings.short_sides, strict=True)
        },
        "splits": {
            name: {"samples": len(split.samples), "shards": list(split.shards)}
            for name, split in splits.items()
        },
        "files": {
            name: {"bytes": info.nbytes, "sha256": info.sha256} for name, info in sorted(files.items())
        },
        "source": {**source, "rejected": sum(len(split.rejects) for split in splits.values())},
    }
    remove_stale(out, {*files, MANIFEST, UNFINISHED})
    for folder in ["index", *map(str, resolutions), ""]:
        sync_folder(out / folder)
    write_file(out / MANIFEST, _json(manifest))
    sync_folder(out)
    finish(out)
    return manifest


def _save(path: Path, records: NDArray[Any]) -> FileInfo:
    buffer = io.BytesIO()
    np.save(buffer, records, allow_pickle=False)
    return write_file(path, buffer.getvalue())


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def _timm_info(splits: Mapping[str, WrittenSplit], prefix: str) -> dict[str, Any]:
    """Source: timm's data/readers/reader_wds.py, `_parse_split_info`."""
    return {
        "splits": {
            name: {
                "name": name,
                "num_samples": len(split.samples),
                "filenames": [f"{prefix}{shard}.tar" for shard in split.shards],
                "shard_lengths": list(split.shards.values()),
            }
            for name, split in splits.items()
        }
    }
