"""Second and third tries for local files and folders: a short outage passes, a longer one ends the command.

Unavailable is what `pipeline.errors.is_unavailable` says: EIO, ESTALE, EACCES, a file that has vanished. Such an error
never becomes a reject; the command ends with a `StorageError`, and the same command continues later.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import TypeVar

from pipeline.errors import StorageError, is_unavailable, strip_credentials

__all__ = ["WAITS_S", "is_retryable", "retry", "unavailable"]

T = TypeVar("T")
WAITS_S = (0.5, 2.5)  # before the second and the third try
# A process without descriptors or memory is not helped by waiting, and storage is not to blame.
_OWN_LIMITS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EBADF, errno.EFAULT})


def is_retryable(error: OSError) -> bool:
    """Whether storage is to blame for `error`, rather than the path itself or this process."""
    return is_unavailable(error) and error.errno not in _OWN_LIMITS


def unavailable(path: str, error: OSError) -> StorageError:
    """The error that ends the command; `path` could not be read in any of the tries."""
    return StorageError(
        f"{strip_credentials(path)}: storage does not deliver it, got '{error.strerror or error}' "
        f"{len(WAITS_S) + 1} times, expected a file or folder that can be read; check the disk, its mount and the "
        "permissions, then run the same command again: finished shards are kept"
    )


def retry(path: str, work: Callable[[], T]) -> T:
    """The result of `work`, tried again while it raises an `OSError` that `is_retryable`.

    Raises `StorageError` that names `path` after the last try, and any other exception at once.
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
    raise AssertionError("the last try returns or raises")
