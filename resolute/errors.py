"""The error types of all packages. Each message is one line: where, what, got, expected, and what to do.

Damaged and unavailable are distinguished. Damaged (`DamagedSample`): the bytes were read and are wrong; the sample may
be skipped, rejected or recorded. Unavailable (`StorageError`): storage did not deliver the bytes (EIO, ESTALE, HTTP
403 or 5xx of a store, a timeout, a lost mount); reads are retried until a deadline, then the command ends and can be
run again to continue. An unavailable sample is never skipped, rejected or recorded.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .urls import strip_credentials

__all__ = [
    "DamagedSample",
    "FileEndsEarly",
    "Interrupted",
    "Missing",
    "ResoluteError",
    "StorageError",
    "as_typed",
    "check",
    "check_installed",
    "check_stack",
    "differences",
    "different_values",
    "from_os_error",
    "is_unavailable",
    "strip_credentials",
]

_DAMAGED_ERRNO = frozenset({errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL})


class ResoluteError(Exception):
    """An error in the input or the environment, explained in one line.

    Messages have the form *where: what is wrong, got X, expected Y; do Z*. Command lines print them without a traceback
    and exit with status `exit_status`; any other exception is a bug and keeps its traceback. Credentials in URLs are
    removed.
    """

    exit_status = 2

    def __init__(self, *args: object) -> None:
        super().__init__(*(strip_credentials(arg) if isinstance(arg, str) else arg for arg in args))


class StorageError(ResoluteError):
    """Storage did not deliver existing data, even after retries. Never a reason to skip a sample."""


class Missing(StorageError):
    """An expected file does not exist: deleted, replaced, or on a volume that is no longer mounted."""


class Interrupted(StorageError):
    """A read was cancelled (`Files.interrupt`, `Files.close`); this implies nothing about the storage."""


class DamagedSample(ResoluteError):
    """The bytes of a sample were read but are wrong. The only error that `on_bad_sample = "skip"` skips."""


class FileEndsEarly(DamagedSample):
    """A file ends before the requested range does: `got_bytes` of the range exist, `readable_bytes` of the file."""

    def __init__(self, message: str, got_bytes: int, readable_bytes: int) -> None:
        super().__init__(message)
        self.got_bytes, self.readable_bytes = got_bytes, readable_bytes


def is_unavailable(error: OSError) -> bool:
    """True if `error` means that storage did not answer; False if the path can never be a readable file."""
    return error.errno not in _DAMAGED_ERRNO


def from_os_error(error: OSError) -> StorageError:
    """Convert an OSError to a one-line `StorageError`, for command lines, if nothing more specific handled it."""
    where = error.filename if isinstance(error.filename, str) else "storage"
    return StorageError(
        f"{where}: got '{error.strerror or error}', expected a file system that answers; check the disk, its mount and "
        "the permissions, then run the same command again"
    )


def as_typed(name: str, values: Mapping[str, str]) -> str:
    """A command as the user of this process types it: `resolute shards --src=photos`, or `make shards SRC=photos`.

    values: {name of an option with underscores: its value}, in lower or upper case.
    """
    by_make = "MAKELEVEL" in os.environ  # `make` runs this process
    words = [f"{option.upper()}=" if by_make else f"--{option.lower().replace('_', '-')}=" for option in values]
    quoted = [word + shlex.quote(value) for word, value in zip(words, values.values(), strict=True)]
    return f"`{' '.join(['make' if by_make else 'resolute', name, *quoted])}`"


def check_installed(package: str, *, setting: str, extra: str) -> None:
    """Raise `ResoluteError` if the optional `package`, which the project's `extra` installs, is missing."""
    if not _is_installed(package):
        raise ResoluteError(
            f"{setting}: the package {package} is not installed, expected it; "
            f"run `pip install 'resolute-vision[{extra}]'`"
        )


def check_stack(where: str = "", *, training: bool = False) -> None:
    """Raise `ResoluteError`, with the extras to install, if torch, DALI or (for `training`) timm is missing.

    `where` begins the message.
    """
    missing = [name for name in ("torch", "nvidia.dali", *["timm"] * training) if not _is_installed(name)]
    if not missing:
        return
    stack = ["cuda13"] if missing != ["timm"] else []
    extras = ",".join([*stack, *["train"] * ("timm" in missing)])
    others = ", with cuda12 for NVIDIA drivers 525 to 579, or cpu for any build of torch" if stack else ""
    begin = f"{where}: " if where else ""
    raise ResoluteError(
        f"{begin}not installed: {', '.join(missing)}; run `pip install 'resolute-vision[{extras}]'`{others}"
    )


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


def check(good: bool, key: str, got: object, expected: str) -> None:
    """Raise `ResoluteError` for the setting `key` if `good` is false."""
    if not good:
        raise ResoluteError(f"{key}: got {got}, expected {expected}; correct it")


def differences(got: Any, expected: Any, name: str = "") -> list[str]:
    """Differences between two JSON-like values, one text each, such as "stages[1].res got 48, expected 64"."""
    return [f"{key} got {own!r}, expected {other!r}" for key, own, other in different_values(got, expected, name)]


def different_values(one: Any, other: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(key, value in one, value in the other) of each difference of JSON-like values: ("stages[1].res", 48, 64)."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        dot = f"{name}." if name else ""
        for key in [*one, *(key for key in other if key not in one)]:
            yield from different_values(one.get(key), other.get(key), f"{dot}{key}")
        return
    lists = all(isinstance(value, Sequence) and not isinstance(value, str) for value in (one, other))
    if lists and len(one) == len(other):
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from different_values(a, b, f"{name}[{i}]")
    elif one != other:
        yield name, one, other
