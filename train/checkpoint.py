"""Checkpoints of a run: written atomically, sealed with a SHA-256, and checked before use.

RUN/step-00000123.pt   the newest few, named by optimizer steps done; each ends in the SHA-256 of its content
RUN/last.pt, best.pt   links to the newest one and to the one with the best validation
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import re
import struct
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch

from resolute.console import counted
from resolute.errors import ResoluteError, StorageError, different_values
from resolute.files import atomic_file, atomic_link, write_errors
from resolute.train.recipe import RECIPE_FILE
from resolute.train.recipe.upgrade import old_key

__all__ = [
    "FORMAT",
    "LAST",
    "DamagedCheckpoint",
    "keep_newest",
    "link",
    "load",
    "newest",
    "peek",
    "resume",
    "save",
    "step_file",
]

FORMAT = "resolute-checkpoint-2"
LAST = "last.pt"
_SEAL_BYTES = 64  # SHA-256 in hex digits
_MAX_CHANGES, _MAX_SHOWN = 4, 60  # of differences, and characters of a value, in a message
_WRONG_CONTENT = (RuntimeError, EOFError, KeyError, TypeError, ValueError, pickle.UnpicklingError, zipfile.BadZipFile)


class DamagedCheckpoint(ResoluteError):
    """The file is damaged, not a checkpoint of this project, or missing next to others of its run."""


def step_file(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.pt"


def save(path: Path, state: dict[str, Any]) -> str:
    """Write `state` atomically and durably; returns the file's SHA-256 in hex.

    Raises `ResoluteError` if it cannot be written.
    """
    with write_errors(path, keeps_old=True), atomic_file(path) as file:
        try:
            torch.save({"format": FORMAT, **state}, file)
        except RuntimeError as error:
            # why: torch's zip writer wraps I/O errors, such as a full disk, in a RuntimeError
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
        return _seal(file)


def link(path: Path, name: Path) -> None:
    """Hard-link checkpoint `path` as `name`, or copy it where links are unsupported. Raises `ResoluteError`."""
    with write_errors(name, keeps_old=True):
        atomic_link(path, name)


def keep_newest(folder: Path, count: int, *, newest: int) -> None:
    """Delete all step files except the `count` newest up to step `newest`; later ones are from an abandoned run."""
    steps = [step for step in _steps(folder) if step <= newest]
    for step in set(_steps(folder)) - set(steps[:count]):
        step_file(folder, step).unlink(missing_ok=True)


def load(path: Path, *, expect: dict[str, Any]) -> dict[str, Any]:
    """The state at `path`, on the CPU, plus the file's `sha256`; unpickling cannot run code.

    `expect` holds what must match: {"recipe": its values, "data": `ShardSet.contents`}. Raises `DamagedCheckpoint` for
    a damaged, missing or foreign file, `StorageError` if it cannot be read, and `ResoluteError` naming the differences
    for another recipe or shard set.
    """
    try:
        with path.open("rb") as file:  # why opened once: a training run may replace the file meanwhile
            digest = _unsealed(file)
            file.seek(0)
            state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        file_format = state["format"]
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path}: not found, expected a checkpoint; use another RUN") from None
    except OSError as error:
        raise _unavailable(path, error) from None
    except _WRONG_CONTENT as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DamagedCheckpoint(
            f"{path}: damaged, or not a checkpoint ({reason[:100]}), expected {FORMAT}; delete it or use another RUN"
        ) from None
    if file_format != FORMAT:
        raise DamagedCheckpoint(f"{path}: got format {file_format}, expected {FORMAT}; use another RUN")
    _check_same(path, state, expect)
    return {**state, "sha256": digest}


def _check_same(path: Path, state: dict[str, Any], expect: dict[str, Any]) -> None:
    if "recipe" in expect and old_key(state["recipe"]):
        raise ResoluteError(
            f"{path}: made by an earlier version of Resolute, expected a run of this one; finish it with that version, "
            "or use another RUN"
        )
    if "recipe" in expect and (changes := _recipe_changes(state["recipe"], expect["recipe"])):
        more = f" and {len(changes) - _MAX_CHANGES} more" if len(changes) > _MAX_CHANGES else ""
        own = path.parent / RECIPE_FILE
        kept = f" ({own})" if own.exists() else ""
        raise ResoluteError(
            f"{path}: made with another recipe: {'; '.join(changes[:_MAX_CHANGES])}{more}; use another RUN for this "
            f"recipe, or the run's own{kept}"
        )
    if "data" in expect:
        old, new = state["data"], expect["data"]
        if names := [
            name for name in [*old, *(name for name in new if name not in old)] if old.get(name) != new.get(name)
        ]:
            same = ", ".join(name for name in new if name not in names)
            raise ResoluteError(
                f"{path}: made with other data: got a set that differs in {', '.join(names)}"
                f"{f' (equal: {same})' if same else ''}, expected the run's own; use another RUN, or the old set"
            )


def _recipe_changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What differs in two recipes' values, a text each; of stages, those that both have, and their number."""
    counts = [len(values["stages"]) for values in (old, new)]
    texts = [f"the run has {counted(counts[0], 'stage')}, the recipe {counts[1]}"] if counts[0] != counts[1] else []
    run, recipe = ({**values, "stages": values["stages"][: min(counts)]} for values in (old, new))
    return texts + [
        f"{key}: the run has {_short(own)}, the recipe {_short(other)}"
        for key, own, other in different_values(run, recipe)
    ]


def _short(value: Any) -> str:
    text = "nothing" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def newest(folder: Path, name: str) -> Path:
    """The file to resume from: `name`, or the newest step file if the first save ended before `last.pt` was linked."""
    path, names = folder / name, _names(folder)
    if name != LAST or name in names:
        return path
    return next((step_file(folder, step) for step in _steps(folder)), path)


def resume(path: Path, *, expect: dict[str, Any]) -> dict[str, Any] | None:
    """The state at `path` in a run's folder, to resume from; None if the run has no checkpoints yet.

    Raises as `load` does; for a damaged file, the message names the newest good checkpoint, if any.
    """
    folder = path.parent
    if not any(name.endswith(".pt") for name in _names(folder)):
        if path.name != LAST:
            raise ResoluteError(f"--from: got {path}, which does not exist, expected a checkpoint of the run; omit it")
        return None
    try:
        state = load(path, expect=expect)
    except DamagedCheckpoint as error:
        for candidate in [*(step_file(folder, step) for step in _steps(folder)), folder / "best.pt"]:
            if (step := _good_step(candidate, expect)) is not None:
                raise DamagedCheckpoint(
                    f"{str(error).rpartition(';')[0]}; {candidate.name} (step {step}) is good: resume with "
                    f"--from {candidate.name}"
                ) from None
        raise
    log, expected = folder / "run.jsonl", state["meter"]["log_bytes"]
    if (size := log.stat().st_size if log.exists() else 0) < expected:
        raise ResoluteError(
            f"{log}: truncated or missing, got {size} bytes, expected {expected}; restore it or use another RUN"
        )
    return state


def peek(path: Path, key: str) -> Any:
    """The value of `key` in a checkpoint; None if the file does not exist or `load` will report it as damaged.

    Raises `StorageError` if it cannot be read.
    """
    try:
        path.open("rb").close()  # why: torch does not distinguish I/O errors from damaged files
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)[key]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unavailable(path, error) from None
    except _WRONG_CONTENT:
        return None


def _unavailable(path: Path, error: OSError) -> StorageError:
    advice = {
        errno.EACCES: "make it readable, or use another RUN",
        errno.EPERM: "make it readable, or use another RUN",
        errno.EISDIR: "use another RUN",
        errno.ENOTDIR: "use another RUN",
    }.get(error.errno or 0, "run again when the storage responds; the file may be intact")
    return StorageError(f"{path}: cannot be read, got '{error.strerror or error}', expected a readable file; {advice}")


def _good_step(path: Path, expect: dict[str, Any]) -> int | None:
    try:
        return int(load(path, expect=expect)["step"])
    except ResoluteError:
        return None


def _names(folder: Path) -> list[str]:
    """Names of the files in `folder`; empty if it does not exist. Raises `StorageError` if it cannot be listed."""
    try:
        return os.listdir(folder)  # noqa: PTH208  # why: Path.glob treats an unreadable folder as empty
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _unavailable(folder, error) from None


def _steps(folder: Path) -> list[int]:
    """Step numbers of the step files in `folder`, newest first."""
    matches = (re.fullmatch(r"step-(\d{8,})\.pt", name) for name in _names(folder))
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def _seal(file: BinaryIO) -> str:
    """Append the file's SHA-256 as the zip comment, which readers skip; returns the SHA-256 of the complete file.

    why: torch does not verify the zip's checksums, so a corrupted weight would load unnoticed.
    """
    file.seek(-2, os.SEEK_END)  # a zip's last field is the length of its comment, 0 so far
    file.write(struct.pack("<H", _SEAL_BYTES))
    file.seek(0)
    sha = hashlib.file_digest(file, "sha256")  # type: ignore[arg-type]
    seal = sha.hexdigest().encode()
    file.write(seal)
    sha.update(seal)
    return sha.hexdigest()


def _unsealed(file: BinaryIO) -> str:
    """The SHA-256 of the complete file; raises `ValueError` if the seal at its end does not match the content."""
    sha, left = hashlib.sha256(), os.fstat(file.fileno()).st_size - _SEAL_BYTES
    while left > 0 and (block := file.read(min(left, 1 << 20))):
        sha.update(block)
        left -= len(block)
    seal = file.read()
    if seal != sha.hexdigest().encode():
        raise ValueError("its content does not match the SHA-256 at its end")
    sha.update(seal)
    return sha.hexdigest()
