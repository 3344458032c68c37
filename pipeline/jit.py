"""Compiled functions: by numba, on their first call, kept on disk until any file of compiled functions changes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit
from numba.core.ccallback import CFunc
from numba.core.sigutils import normalize_signature

__all__ = ["c_function", "compiled"]


def _stamp() -> tuple[tuple[str, int, int], ...]:
    """Path, time and size of every file of the package with compiled functions in it, those they inline included."""
    root = Path(__file__).parent
    files = [path for path in sorted(root.rglob("*.py")) if b"compiled" in path.read_bytes()]
    states = [(path, path.stat()) for path in files]
    return tuple((str(path.relative_to(root)), state.st_mtime_ns, state.st_size) for path, state in states)


_STAMP = _stamp()


def compiled(function: Callable[..., Any]) -> Any:
    """`function` as machine code that releases the GIL: compiled when it is first called, not at import.

    Division by zero gives inf or nan as in NumPy. Nothing checks bounds: do that before.
    """
    try:
        made = njit(cache=True, nogil=True, error_model="numpy")(function)
    except RuntimeError:  # why: neither this folder nor the user's own is writable; compiling costs seconds, once a run
        return njit(nogil=True, error_model="numpy")(function)
    _keep_for_stamp(made)
    return made


def c_function(function: Callable[..., Any], signature: Any) -> Any:
    """`function` as a C function, its `.address` valid while it lives; kept and with rules as `compiled`.

    Source: `numba.cfunc`, which compiles before it can be told what else the kept code depends on.
    """
    made = CFunc(function, normalize_signature(signature), locals={}, options={"error_model": "numpy"})
    with contextlib.suppress(RuntimeError):  # why: as above
        made.enable_caching()
        _keep_for_stamp(made)
    made.compile()
    return made


def _keep_for_stamp(made: Any) -> None:
    # why: numba compiles again when the function's own file changes, not when that of a function it calls does
    kept = made._cache._cache_file
    kept._source_stamp = (kept._source_stamp, _STAMP)
