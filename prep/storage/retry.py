"""Retries of prep's reads: a short outage is bridged, a longer one ends the command.

`resolute.errors.is_unavailable` decides what counts as unavailable storage: EIO, ESTALE, EACCES, a file that has
vanished. Such an error never becomes a reject; the command ends with a `StorageError` and can be resumed.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TypeVar

from resolute.errors import StorageError, is_unavailable, strip_credentials
from resolute.pipeline.storage.retries import with_retries

__all__ = ["WAITS_S", "is_outage", "is_retryable", "retry"]

T = TypeVar("T")
WAITS_S = (0.5, 2.5)  # before the second and the third attempt
# Limits of this process: waiting does not help, and storage is not to blame.
_OWN_LIMITS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EBADF, errno.EFAULT})
_OUTAGES = frozenset({errno.EIO, errno.ESTALE})


def is_retryable(error: OSError) -> bool:
    """Whether `error` is the storage's fault, rather than that of the path or of this process."""
    return is_unavailable(error) and error.errno not in _OWN_LIMITS


def is_outage(error: OSError) -> bool:
    """Whether the storage failed, rather than answering that the file is missing or refused."""
    return error.errno in _OUTAGES


def retry(path: str, work: Callable[[], T], *, when: Callable[[OSError], bool] = is_retryable) -> T:
    """The result of `work`, repeated after `WAITS_S` while it raises an `OSError` with `when(error)`.

    Raises `StorageError` naming `path` after the last attempt, and any other exception at once.
    """

    def may_pass(error: Exception) -> bool:
        return isinstance(error, OSError) and when(error)

    try:
        return with_retries(work, waits_s=WAITS_S, may_pass=may_pass)
    except OSError as error:
        if not when(error):
            raise
        raise StorageError(
            f"{strip_credentials(path)}: storage is unavailable, got '{error.strerror or error}' "
            f"{len(WAITS_S) + 1} times, expected a readable file or folder; check the disk, its mount and the "
            "permissions, then run the same command again"
        ) from None
