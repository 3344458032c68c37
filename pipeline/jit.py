"""Compilation with numba: on the first call, cached on disk until any file with compiled functions changes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from numba import extending, njit
from numba.core.ccallback import CFunc
from numba.core.sigutils import normalize_signature

__all__ = [
    "c_function",
    "compiled",
    "compiled_at_import",
    "has_cache",
    "intrinsic",
    "is_cached",
    "name_in_stamp",
    "numba_interrupts",
]

intrinsic: Any = extending.intrinsic  # why Any: in its type hints, callers pass the typing context too


def _stamp() -> tuple[tuple[str, int, int], ...]:
    """Path, mtime and size of every file that contains the word "compiled".

    why not only of files with compiled functions: these also inline constants, such as those of `plan/autoaugment.py`.
    """
    root = Path(__file__).parent
    files = [path for path in sorted(root.rglob("*.py")) if b"compiled" in path.read_bytes()]
    states = [(path, path.stat()) for path in files]
    return tuple((str(path.relative_to(root)), state.st_mtime_ns, state.st_size) for path, state in states)


_STAMP = _stamp()


def compiled(function: Callable[..., Any]) -> Any:
    """Compile `function` on its first call (not at import) to machine code that releases the GIL.

    Division by zero gives inf or nan, as in NumPy. Array bounds are not checked.
    """
    try:
        dispatcher = njit(cache=True, nogil=True, error_model="numpy")(function)
    except RuntimeError:  # no writable cache folder: compile in each run, which takes seconds
        return njit(nogil=True, error_model="numpy")(function)
    _extend_stamp(dispatcher)
    return dispatcher


def compiled_at_import(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """A decorator: compile for `signature` as soon as the function is defined, or load the result of an earlier run.

    For the worker processes of prep, which inherit what the fork server has imported.
    """

    def compile_(function: Callable[..., Any]) -> Any:
        try:
            dispatcher = njit(error_model="numpy", cache=True)(function)
        except RuntimeError:  # why: no cache folder is writable; compiling takes seconds per run
            return njit(signature, error_model="numpy")(function)
        name_in_stamp(dispatcher)
        dispatcher.compile(signature)
        dispatcher.disable_compile()
        return dispatcher

    return compile_


def c_function(function: Callable[..., Any], signature: Any) -> Any:
    """Compile `function` to a C function whose `.address` is valid while the object lives; cached as by `compiled`.

    Source: `numba.cfunc`, which compiles before its cache stamp can be extended.
    """
    c_func = CFunc(function, normalize_signature(signature), locals={}, options={"error_model": "numpy"})
    with contextlib.suppress(RuntimeError):  # no writable cache folder
        c_func.enable_caching()
        _extend_stamp(c_func)
    c_func.compile()
    return c_func


def is_cached(function: Any) -> bool:
    """Whether a function of `compiled` needs no compilation: it was compiled in this process, or is in the cache."""
    if function.signatures or not has_cache(function):
        return bool(function.signatures)
    kind = function.targetctx.codegen().magic_tuple()  # why: machines with other CPUs may share the cache
    return any(key[1] == kind for key in function._cache._cache_file._load_index())


def has_cache(function: Any) -> bool:
    """Whether what is compiled of a function of `compiled` is kept for later processes."""
    return function.stats.cache_path is not None


@contextlib.contextmanager
def numba_interrupts() -> Iterator[None]:
    """Raise what a signal handler raised while numba prepared a call, such as Ctrl-C's KeyboardInterrupt.

    numba ignores such an exception, upon which Python raises a SystemError with the exception as its cause.
    """
    try:
        yield
    except SystemError as error:
        if error.__cause__ is None:
            raise
        raise error.__cause__ from None


def name_in_stamp(function: Any, *more: Any) -> None:
    """Have results in the cache of a compiled function count only for its module's name of today.

    numba's stamp is a hash of the function's file, and its results import the module that the function was in when it
    was compiled, which fails if the same file has been the module of another package.
    """
    cache_file = function._cache._cache_file
    cache_file._source_stamp = (cache_file._source_stamp, function.__module__, *more)


def _extend_stamp(function: Any) -> None:
    # why: numba's own stamp covers only the function's file, not the files of functions it calls
    name_in_stamp(function, _STAMP)
