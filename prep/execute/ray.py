"""ENGINE=ray: ranges of a planned set as tasks of a Ray cluster, which repeats those that it loses."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from typing import Any

from resolute.errors import ResoluteError, StorageError

from .planned import Converted, convert_range
from .stats import RunStats

__all__ = ["TASK_BYTES", "convert_on_ray"]

# Memory that a task declares to Ray, which runs only as many on a node as fit. Measured: see LOG.md, "Ray task".
TASK_BYTES = 1 << 30
_PER_CPU = 8  # tasks for each CPU of the cluster: small enough to end together, large enough for their start
_RETRIES = 5  # of a task whose node or worker is lost, or whose storage is unavailable


def convert_on_ray(address: str | None, out: str, shards: int, progress: Callable[[RunStats], None]) -> RunStats:
    """Convert the `shards` planned shards of the set at `out` on all CPUs of the cluster at `address`.

    `address` None: Ray's own rules. `progress(totals so far)` is called after each task. Raises `ResoluteError` if Ray
    is not installed or the cluster cannot be reached, and the errors of `convert_range`.
    """
    try:
        import ray
    except ImportError:
        raise ResoluteError(
            "ENGINE=ray: Ray is not installed, expected the package ray; run `pip install 'resolute-vision[ray]'`"
        ) from None
    started_here = not ray.is_initialized()
    if started_here:
        try:
            _check_address(address)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError) as error:
            raise ResoluteError(
                f"RAY_ADDRESS: no cluster at {address}, got '{error}', expected a running cluster; start it with "
                "`ray start`, correct the address, or, if the cluster demands a token, set RAY_AUTH_MODE=token"
            ) from None
    task: Any = ray.remote(_convert).options(
        num_cpus=1, memory=TASK_BYTES, max_retries=_RETRIES, retry_exceptions=[StorageError]
    )  # fmt: skip
    size = max(1, int(shards / (_PER_CPU * max(1, ray.cluster_resources().get("CPU", 1)))))
    running = [task.remote(out, (first, first + size)) for first in range(0, shards, size)]
    total = RunStats()
    try:
        while running:
            done, running = ray.wait(running)
            for each in done:
                total.merge(ray.get(each).stats)
            progress(total)
    except ray.exceptions.RayTaskError as error:
        cause: Any = error.cause
        raise cause if isinstance(cause, ResoluteError) else error.as_instanceof_cause() from None
    except ray.exceptions.RayError as error:
        raise ResoluteError(
            f"ENGINE=ray: a task was lost {_RETRIES + 1} times, got '{type(error).__name__}', expected it to finish; "
            "check the nodes' memory and logs, then run the same command again: finished shards are kept"
        ) from None
    finally:
        for each in running:
            ray.cancel(each, force=True)
        if started_here:
            ray.shutdown()
    return total


def _convert(out: str, selected: tuple[int, int]) -> Converted:
    return convert_range(out, selected, workers=1)


def _check_address(address: str | None) -> None:
    """Raise `OSError` if nothing listens at HOST:PORT; Ray itself would retry for minutes."""
    host, colon, port = (address or "").rpartition("://")[2].rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=10).close()
