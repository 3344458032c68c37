"""Completes a set whose shards are all converted: everything else is derived from their records, the manifest last."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resolute.errors import ResoluteError
from resolute.files import write_errors
from resolute.prep.run.stats import RunStats
from resolute.prep.run.work import AGAIN, delete_plan_files
from resolute.prep.shard_set.cleanup import delete_orphans
from resolute.prep.shard_set.existing_set import stored_manifest
from resolute.prep.shard_set.manifest import finalize_set, write_rejects
from resolute.prep.shard_set.record import Records
from resolute.prep.shard_set.set_photos import SetPhotos
from resolute.prep.shard_set.set_source import write_source_json
from resolute.prep.shard_set.work_list import WorkList
from resolute.prep.storage.output import LOCK, RUN_FOLDER, LocalStore, Store
from resolute.scratch import ScratchFolder

from .grey_range import check_all

__all__ = [
    "BuildResult",
    "check_rejects",
    "delete_run_files",
    "describe_reasons",
    "finish",
    "scan_cache_folder",
    "scratch_folder",
]

_REJECTS = f"{RUN_FOLDER}/rejects.jsonl"  # of a run that failed; those of a finished set stay as they are


@dataclass(frozen=True, kw_only=True)
class BuildResult:
    """Outcome of `build` and of the commands for jobs: a finished set.

    `stats` covers the images converted by this run and is None if the set was already complete. `kept_shards` counts
    the shards that were finished before; `elapsed_s` is wall time; `warnings` are about the inputs, `notes` about an
    extension by nothing; `ignored` counts things in the source that are not images of a class, by kind, and `listed`
    all entries of the source (0: unknown).
    """

    manifest: dict[str, Any]
    ignored: Counter[str]
    stats: RunStats | None
    kept_shards: int
    elapsed_s: float
    listed: int = 0
    warnings: Sequence[str] = ()
    notes: Sequence[str] = ()


def finish(
    store: Store,
    todo: WorkList,
    records: Records,
    photos: SetPhotos,
    check_lock: Callable[[], None],
    scratch: Path,
) -> dict[str, Any]:
    """Derive everything else from the records of all shards, delete what does not belong, and return the manifest.

    Raises `ResoluteError` if too many images were rejected, if OUT no longer holds the set that is to be extended, and
    as `check_all`.
    """
    first, older = todo.generations[0], None
    if first.number:
        older = stored_manifest(store)
        if older is None or [own["plan"] for own in older["generations"]][first.number - 1 :] != [first.previous]:
            raise ResoluteError(
                f"{store.where}: not the set that the plan extends, got one without a valid manifest.json or with "
                f"other generations, expected it as it was; {AGAIN}"
            )
    check_rejects(store, todo, photos, records.rejects())
    check_all(todo, records)
    check_lock()
    manifest = finalize_set(store, todo, records, photos, older, scratch)
    delete_orphans(store, manifest["files"])
    write_source_json(store, todo.variables, todo.signature)
    delete_run_files(store)
    return manifest


def check_rejects(
    store: Store,
    todo: WorkList,
    photos: SetPhotos,
    rejects: Mapping[tuple[str, int], str],
    *,
    so_far: bool = False,
) -> None:
    """Raise `ResoluteError` if there are more `rejects` than allowed, or if they are all that a split holds.

    `rejects` maps (split, key) to a reason; on failure they are written to `_REJECTS`. `so_far`: the run is not
    finished and more may follow.
    """
    images = todo.images
    counts = Counter(name for name, _ in rejects)
    empty = None  # why: an extension may have no sample in a split
    if not todo.generations[0].number:
        empty = next((name for name in images if counts[name] == images[name]), None)
    if len(rejects) <= todo.max_rejects and empty is None:
        return
    write_rejects(store, _REJECTS, rejects, photos)
    description = describe_reasons(rejects.values())
    if len(rejects) > todo.max_rejects:
        raise ResoluteError(
            f"{todo.src}: too many unusable images, got {len(rejects)} of {sum(images.values())}"
            f"{' so far' if so_far else ''} ({description}), expected at most {todo.max_rejects} "
            f"(MAX_BAD={todo.max_bad}); see {store.where}/{_REJECTS}, then mend them or raise MAX_BAD (--max-bad)"
        )
    assert empty is not None
    raise ResoluteError(
        f"{todo.src}: no image of {empty} is usable, got {counts[empty]} rejects "
        f"({description}), expected at least one sample; see {store.where}/{_REJECTS}, then mend them"
    )


def describe_reasons(reasons: Iterable[str]) -> str:
    """Count the rejects by kind, which is the part of a reason before its colon: `3 truncated, 1 not an image`."""
    kinds = Counter(reason.partition(":")[0] for reason in reasons)
    return ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items(), key=lambda item: (-item[1], item[0])))


def scratch_folder(stack: ExitStack, store: Store) -> Path:
    """An empty folder for this run, which holds the lock alone: inside OUT if OUT is local, so that a killed run leaves
    nothing elsewhere; the next run deletes it."""
    folder = store.root / RUN_FOLDER / "lists" if isinstance(store, LocalStore) else None
    if folder is not None:
        with write_errors(folder):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(mode=0o700)  # why: it holds URLs with credentials
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        return folder
    return stack.enter_context(ScratchFolder())


def scan_cache_folder(store: Store, scratch: Path) -> Path:
    """Folder for unpacked sources without random access: inside OUT if OUT is local, so that it survives a kill."""
    return store.root / RUN_FOLDER / "scan_cache" if isinstance(store, LocalStore) else scratch / "scan_cache"


def delete_run_files(store: Store) -> None:
    """Delete what lies in OUT only until the set is finished."""
    delete_plan_files(store)
    for name in store.names(RUN_FOLDER):
        if f"{RUN_FOLDER}/{name}" != LOCK:
            store.remove(f"{RUN_FOLDER}/{name}")
    if isinstance(store, LocalStore):
        shutil.rmtree(scan_cache_folder(store, store.root), ignore_errors=True)
