"""ENGINE=ray: ranges of a planned set as tasks of a Ray cluster, which repeats those that it loses."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Callable, Sequence
from typing import Any

from resolute.errors import ResoluteError, StorageError

from .stats import RunStats
from .work import Converted, convert_range

__all__ = ["TASK_BYTES", "convert_on_ray"]

# Memory that a task declares to Ray, which runs only as many on a node as fit. Measured: see LOG.md, "Ray task".
TASK_BYTES = 1 << 30
_BASE_MB, _MB_PER_MEGAPIXEL = 200, 13  # of a task with a higher limit of pixels than usual
_PER_CPU = 8  # tasks for each CPU of the cluster: small enough to end together, large enough for their start
_RETRIES = 5  # of a task whose node or worker is lost, or whose storage is unavailable


def convert_on_ray(
    address: str | None,
    out: str,
    shards: Sequence[int],
    progress: Callable[[RunStats], None],
    *,
    max_megapixels: int | None = None,
) -> RunStats:
    """Convert the `shards` (ascending numbers) of the planned set at `out` on all CPUs of the cluster at `address`.

    `address` None: Ray's own rules. `progress(totals so far)` is called after each task; `max_megapixels` is as in
    `EncodeOptions`. Raises `ResoluteError` if Ray is not installed or the cluster cannot be reached, and the errors of
    `convert_range`, which then name the node.
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
    memory = max(TASK_BYTES, (_BASE_MB + _MB_PER_MEGAPIXEL * (max_megapixels or 0)) * 1_000_000)
    task: Any = ray.remote(_convert).options(
        num_cpus=1, memory=memory, max_retries=_RETRIES, retry_exceptions=[StorageError]
    )
    cpus = max(1, int(ray.cluster_resources().get("CPU", 1)))
    running = [task.remote(out, each) for each in _ranges(shards, _PER_CPU * cpus)]
    total = RunStats()
    try:
        while running:
            done, running = ray.wait(running)
            for each in done:
                total.merge(ray.get(each).stats)
            progress(total)
    except ray.exceptions.RayTaskError as error:
        cause: Any = error.cause
        if isinstance(cause, ImportError):
            cause = ResoluteError(
                f"cannot import Resolute, got '{cause}', expected this version with all it needs; install it there "
                "with `pip install 'resolute-vision[ray]'`, then run the same command again"
            )
        if not isinstance(cause, ResoluteError):
            raise error.as_instanceof_cause() from None
        node = re.search(r"\bip=([^,)\s]+)", str(error))  # why: Ray's errors of two types lose the attribute `ip`
        cause.args = (f"node {node[1] if node else 'unknown'}: {cause}",)
        raise cause from None
    except ray.exceptions.RayError as error:
        raise ResoluteError(
            f"ENGINE=ray: a task was lost {_RETRIES + 1} times, got '{type(error).__name__}', expected it to finish; "
            "check the nodes' memory and logs, then run the same command again: finished shards are kept"
        ) from None
    finally:
        # why no ray.cancel: Ray aborts this process if a task ends at that moment. The end of the connection ends all
        # tasks; those of a caller that had connected itself run on, and write nothing that the plan does not ask for.
        if started_here:
            ray.shutdown()
    return total


def _convert(out: str, selected: tuple[int, int]) -> Converted:
    return convert_range(out, selected, workers=1)


def _ranges(shards: Sequence[int], count: int) -> list[tuple[int, int]]:
    """About `count` ranges (first, end) with as many of the `shards` each; what lies between these is finished."""
    size = max(1, len(shards) // count)
    parts = [shards[first : first + size] for first in range(0, len(shards), size)]
    return [(part[0], part[-1] + 1) for part in parts]


def _check_address(address: str | None) -> None:
    """Raise `OSError` if nothing listens at HOST:PORT; Ray itself would retry for minutes."""
    host, colon, port = (address or "").rpartition("://")[2].rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=10).close()
