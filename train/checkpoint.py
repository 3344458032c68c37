"""How is a run saved so that it goes on as if nothing had happened?"""

from __future__ import annotations

import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import torch

from pipeline.errors import ResoluteError

__all__ = ["FORMAT", "load", "mark_best", "peek", "save"]

FORMAT = "resolute-checkpoint-1"


def save(path: Path, state: dict[str, Any]) -> None:
    """Write `state` whole or not at all, and on disk when this returns. Raises `ResoluteError` if it can't be."""
    part = path.with_suffix(".part")
    try:
        with part.open("wb") as file:
            torch.save({"format": FORMAT, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        _sync_folder(path.parent)
    except (OSError, RuntimeError) as error:
        # why: torch reports a full disk as a RuntimeError of its zip writer
        cause = error if isinstance(error, OSError) else error.__context__
        reason = (cause.strerror if isinstance(cause, OSError) else None) or str(error).splitlines()[0]
        part.unlink(missing_ok=True)
        raise ResoluteError(
            f"{path}: checkpoint not written ({reason}), the previous one is kept; make room and run again"
        ) from None


def mark_best(last: Path, best: Path) -> None:
    """Give the checkpoint just saved its second name; where links don't exist, copy it."""
    part = best.with_suffix(".part")
    part.unlink(missing_ok=True)
    try:
        os.link(last, part)
    except OSError:
        shutil.copyfile(last, part)
    part.replace(best)
    _sync_folder(best.parent)


def load(path: Path, *, expect: dict[str, Any]) -> dict[str, Any]:
    """The state at `path`, on the CPU, loaded without running foreign code.

    `expect` holds what must be equal: {"recipe": its values, "shards": hash}. Raises `ResoluteError` for a damaged
    or foreign file, and for one of another recipe or shard set, naming what differs.
    """
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        got = state["format"]
    except (OSError, RuntimeError, EOFError, KeyError, TypeError, ValueError, pickle.UnpicklingError,
            zipfile.BadZipFile) as error:  # fmt: skip
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ResoluteError(
            f"{path}: damaged or no checkpoint ({reason[:100]}), expected {FORMAT}; delete it or use another RUN"
        ) from None
    if got != FORMAT:
        raise ResoluteError(f"{path}: got format {got}, expected {FORMAT}; use another RUN")
    for name, value in expect.items():
        if state[name] != value:
            changes = "; ".join(_differences(state[name], value, name))
            raise ResoluteError(f"{path}: made with another {name}: {changes}; use another RUN, or the old {name}")
    return state


def peek(path: Path, key: str) -> Any:
    """One value of a checkpoint; None if there is no such file, or it is one that `load` will refuse."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)[key]
    except (OSError, RuntimeError, EOFError, KeyError, TypeError, ValueError, pickle.UnpicklingError,
            zipfile.BadZipFile):  # fmt: skip
        return None


def _differences(old: Any, new: Any, where: str) -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(key for key in new if key not in old)]
        return [text for key in keys for text in _differences(old.get(key), new.get(key), f"{where}.{key}")]
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return [text for i, (a, b) in pairs for text in _differences(a, b, f"{where}[{i}]")]
    return [] if old == new else [f"{where} got {old!r}, expected {new!r}"]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
