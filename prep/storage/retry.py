"""Retries for local files and folders: a short outage is bridged, a longer one ends the command.

`resolute.errors.is_unavailable` decides what counts as unavailable storage: EIO, ESTALE, EACCES, a file that has
vanished. Such an error never becomes a reject; the command ends with a `StorageError` and can be resumed.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import TypeVar

from resolute.errors import StorageError, is_unavailable, strip_credentials

__all__ = ["WAITS_S", "is_retryable", "retry", "unavailable"]

T = TypeVar("T")
WAITS_S = (0.5, 2.5)  # before the second and the third attempt
# Limits of this process: waiting does not help, and storage is not to blame.
_OWN_LIMITS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EBADF, errno.EFAULT})


def is_retryable(error: OSError) -> bool:
    """Whether `error` is the storage's fault, rather than that of the path or of this process."""
    return is_unavailable(error) and error.errno not in _OWN_LIMITS


def unavailable(path: str, error: OSError) -> StorageError:
    """The error that ends the command after every attempt to read `path` has failed."""
    return StorageError(
        f"{strip_credentials(path)}: storage is unavailable, got '{error.strerror or error}' "
        f"{len(WAITS_S) + 1} times, expected a readable file or folder; check the disk, its mount and the "
        "permissions, then run the same command again"
    )


def retry(path: str, work: Callable[[], T]) -> T:
    """The result of `work`, repeated while it raises an `OSError` that `is_retryable`.

    Raises `StorageError` naming `path` after the last attempt, and any other exception at once.
    """
    for wait_s in (*WAITS_S, None):
        try:
            return work()
        except OSError as error:
            if not is_retryable(error):
                raise
            if wait_s is None:
                raise unavailable(path, error) from None
            time.sleep(wait_s)
    raise AssertionError("the last attempt returns or raises")
