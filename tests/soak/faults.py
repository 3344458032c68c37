"""Storage faults on local folders, injected below Python by the library `faults.c` and controlled by shared memory.

`compile_library` builds the library; processes started with the variables of `preload` obey the `Control`. One fault is
active at a time. `Control.count` only counts calls, so that a fault or kill can be placed at the n-th file call of a
command, at the same point in every repetition.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
from pathlib import Path

from resolute.errors import ResoluteError

__all__ = ["NAME", "OPEN", "READ", "SYNC", "WRITE", "Control", "compile_library", "preload"]

READ, WRITE, OPEN, SYNC, NAME = 1, 2, 4, 8, 16  # kinds of calls; NAME: rename, link, unlink, mkdir, rmdir
_NONE, _COUNT, _ERROR, _SHORT, _SLOW, _KILL = range(6)
_FIELDS = struct.Struct("<iiiiqqqqqq1024s")
_COUNTS = struct.Struct("<qq")
_COUNTS_AT = 16 + 3 * 8
_VARIABLE = "RESOLUTE_SOAK_FAULTS"


def compile_library(folder: Path) -> Path | None:
    """Compile `faults.c` into `folder`; None where there is no C compiler. Raises `ResoluteError` if it fails."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    library = folder / "faults.so"
    words = [compiler, "-shared", "-fPIC", "-O2", "-o", library, Path(__file__).with_name("faults.c"), "-ldl"]
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode:
        raise ResoluteError(f"{compiler}: got '{done.stderr.strip()[-300:]}', expected it to compile faults.c")
    return library


def preload(library: Path, page: Path) -> dict[str, str]:
    """Create the page; returns the environment variables for processes that are to obey its `Control`."""
    page.write_bytes(bytes(_FIELDS.size))
    return {"LD_PRELOAD": str(library), _VARIABLE: str(page)}


class Control:
    """The shared memory page. Every method replaces the active fault; this process itself is not affected.

    prefix: a file or folder; only calls on it and on files below it match. ops: kinds of calls, combined with `|`.
    after: number of matching calls that pass first. limit: number of calls that are hit then, -1 for all.
    """

    def __init__(self, page: Path) -> None:
        with page.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), _FIELDS.size)

    def _set(
        self, action: int, prefix: Path, ops: int, *, after: int = 0, limit: int = -1, error: int = 0, group: int = 0,
        wait_s: float = 0.0,
    ) -> None:  # fmt: skip
        self.clear()
        text = os.fsencode(prefix)
        fields = (action, ops, error, group, after, limit, round(wait_s * 1e6), 0, 0, os.getpid(), text)
        self._page[4:] = _FIELDS.pack(*fields)[4:]
        self._page[:4] = struct.pack("<i", action)  # last: the other fields must be complete when a process sees it

    def clear(self) -> None:
        self._page[:4] = struct.pack("<i", _NONE)

    def count(self, prefix: Path, ops: int) -> None:
        """Only count matching calls."""
        self._set(_COUNT, prefix, ops)

    def fail(self, prefix: Path, ops: int, *, error: int, after: int = 0, limit: int = -1) -> None:
        """Calls fail with this errno."""
        self._set(_ERROR, prefix, ops, after=after, limit=limit, error=error)

    def shorten(self, prefix: Path, ops: int, *, after: int = 0, limit: int = -1) -> None:
        """Reads and writes transfer half of the bytes, as the system may do at any time."""
        self._set(_SHORT, prefix, ops, after=after, limit=limit)

    def slow(self, prefix: Path, ops: int, *, wait_s: float, after: int = 0, limit: int = -1) -> None:
        """Calls wait `wait_s` first."""
        self._set(_SLOW, prefix, ops, after=after, limit=limit, wait_s=wait_s)

    def kill(self, prefix: Path, ops: int, *, after: int, group: bool) -> None:
        """The call after `after` others kills its process or its process group; a write writes half of its bytes."""
        self._set(_KILL, prefix, ops, after=after, limit=1, group=int(group))

    def counts(self) -> tuple[int, int]:
        """(matching calls, calls hit) since the last change."""
        calls, hits = _COUNTS.unpack_from(self._page, _COUNTS_AT)
        return calls, hits
