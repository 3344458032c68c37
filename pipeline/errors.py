"""The error types of all packages: each message is one line that says where, what, got, expected, and what to do.

Damaged and unavailable are two different things. Damaged (`DamagedSample`): the bytes are there and wrong; such a
sample may be skipped, rejected or recorded. Unavailable (`StorageError`): storage did not deliver the bytes (EIO,
ESTALE, HTTP 403 or 5xx, a timeout, a vanished mount); it is retried until a deadline, then ends the command, and the
same command continues later. An unavailable sample is never skipped, rejected or recorded.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["DamagedSample", "FileEndsEarly", "Interrupted", "Missing", "ResoluteError", "StorageError", "check",
           "differences", "from_os_error", "is_unavailable", "strip_credentials"]  # fmt: skip

_DAMAGED_ERRNO = frozenset({errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL})
_USER_INFO = re.compile(r"(?<=://)[^/@\s'\"]*@")
_SECRET_QUERY = re.compile(
    r"(?i)([?&;](?:[\w.-]*(?:token|signature|secret|credential|password|passwd|access[_-]?key|api[_-]?key)[\w.-]*"
    r"|sig|se|sp|sv|sr|policy|expires|key-pair-id|awsaccesskeyid|googleaccessid))=(?:[^&\s'\"]*[^&\s'\":,;.])?"
)


class ResoluteError(Exception):
    """Bad input or a bad environment, explained in one line.

    The message reads *where: what is wrong, got X, expected Y; do Z.* Command lines print it without a
    traceback and exit with status 2; anything else that escapes is a bug of ours and keeps its traceback.
    Credentials of URLs in it are removed.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(strip_credentials(arg) if isinstance(arg, str) else arg for arg in args))


class StorageError(ResoluteError):
    """Storage did not deliver bytes that should be there, after all retries. Never a reason to skip a sample."""


class Missing(StorageError):
    """A file that should be there is not: deleted, replaced, or on a volume that is no longer mounted."""


class Interrupted(StorageError):
    """A read was ended from outside (`Files.interrupt`, `Files.close`); it says nothing about the storage."""


class DamagedSample(ResoluteError):
    """The bytes of one sample are there and wrong. The only error that `on_bad_sample = "skip"` may skip."""


class FileEndsEarly(DamagedSample):
    """A file is there but shorter than the bytes asked of it: `got_bytes` of them were there."""

    def __init__(self, message: str, got_bytes: int) -> None:
        super().__init__(message)
        self.got_bytes = got_bytes


def is_unavailable(error: OSError) -> bool:
    """True if `error` means that storage did not answer; False if the path itself can never name a readable file."""
    return error.errno not in _DAMAGED_ERRNO


def from_os_error(error: OSError) -> StorageError:
    """What the system refused, as one line: for command lines, where nothing more specific has caught it."""
    where = error.filename if isinstance(error.filename, str) else "storage"
    return StorageError(
        f"{where}: got '{error.strerror or error}', expected a file system that answers; check the disk, its mount and "
        "the permissions, then run the same command again"
    )


def strip_credentials(text: str) -> str:
    """`text` without the user names, passwords, tokens and signatures of the URLs in it.

    Everything that is printed, logged, reported or recorded passes through here first.
    """
    return _SECRET_QUERY.sub(r"\1=***", _USER_INFO.sub("", text))


def check(good: bool, key: str, got: object, expected: str) -> None:
    """Raise `ResoluteError` for the recipe's `key` unless `good`."""
    if not good:
        raise ResoluteError(f"{key}: got {got}, expected {expected}; change it in the recipe")


def differences(got: Any, expected: Any, name: str = "") -> list[str]:
    """What differs between two values as JSON has them, one text for each: "stages[1].res got 48, expected 64"."""
    if isinstance(got, Mapping) and isinstance(expected, Mapping):
        dot = f"{name}." if name else ""
        keys = [*got, *(key for key in expected if key not in got)]
        return [text for key in keys for text in differences(got.get(key), expected.get(key), f"{dot}{key}")]
    lists = all(isinstance(value, Sequence) and not isinstance(value, str) for value in (got, expected))
    if lists and len(got) == len(expected):
        pairs = enumerate(zip(got, expected, strict=True))
        return [text for i, (a, b) in pairs for text in differences(a, b, f"{name}[{i}]")]
    return [] if got == expected else [f"{name} got {got!r}, expected {expected!r}"]
