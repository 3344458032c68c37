"""How do shards get done on a Ray cluster? One shard a task, each in a crash-proof process beside Ray's worker.

Sources and OUT must be reachable under the same names from every node: a shared disk or an object store.
"""

from __future__ import annotations

import atexit
import functools
import logging
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pipeline.errors import ResoluteError

from .chunk import Job
from .engine import convert_shards
from .pool import Pool
from .shard import ShardSpec, Written, read_written
from .store import Store
from .tally import Tally

__all__ = ["convert_on_ray"]

_TRIES = 5  # of one shard, each on another worker: more means that it is not the nodes


def convert_on_ray(
    address: str | None,
    job: Job,
    specs: Iterable[ShardSpec],
    store: Store,
    *,
    done: Callable[[Written], None],
    progress: Callable[[Tally], None],
) -> Tally:
    """As `engine.convert_shards`, over all CPUs of the cluster at `address` (None: Ray's own rules).

    A lost node costs the shards it had not finished: they are done again elsewhere. Raises `ResoluteError` if
    Ray is not installed, the cluster cannot be reached, or a shard is lost again and again.
    """
    try:
        import ray
    except ImportError:
        raise ResoluteError(
            "ENGINE=ray: Ray is not installed, expected the package ray; pip install '.[ray]'"
        ) from None
    ours = not ray.is_initialized()
    if ours:
        try:
            _knock(address)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError) as error:
            raise ResoluteError(
                f"RAY_ADDRESS: no cluster at {address}, got '{error}', expected a running one; start it with "
                "`ray start`, or correct the address"
            ) from None
    try:
        return _spread(ray, job, specs, store, done, progress)
    finally:
        if ours:
            ray.shutdown()


def _knock(address: str | None) -> None:
    """Raises OSError if nobody listens at HOST:PORT: Ray itself would try for minutes."""
    host, colon, port = (address or "").rpartition("://")[2].rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=10).close()


def _spread(
    ray: Any,
    job: Job,
    specs: Iterable[ShardSpec],
    store: Store,
    done: Callable[[Written], None],
    progress: Callable[[Tally], None],
) -> Tally:
    # why: Ray's own retries would hide which shard is lost for ever; SPREAD fills the nodes evenly
    remote = ray.remote(num_cpus=1, max_retries=0, scheduling_strategy="SPREAD")(_do)
    total = Tally()
    source = iter(specs)
    flying: dict[Any, tuple[ShardSpec, int]] = {}

    def ahead() -> int:
        """Two tasks a CPU: the next is there when one is done, and nodes may come and go."""
        return 2 * max(1, int(ray.cluster_resources().get("CPU", 1)))

    def launch(spec: ShardSpec, tries: int) -> None:
        flying[remote.remote(job, spec, store)] = (spec, tries)

    more = True
    while True:
        while more and len(flying) < ahead():
            spec = next(source, None)
            if spec is None:
                more = False
            else:
                launch(spec, 1)
        if not flying:
            return total
        ready, _ = ray.wait(list(flying), num_returns=1)
        spec, tries = flying.pop(ready[0])
        try:
            data, tally = ray.get(ready[0])
        except ray.exceptions.RayTaskError as error:
            raise error.as_instanceof_cause() from None
        except ray.exceptions.RayError as error:  # the node or Ray's worker on it is lost
            if tries >= _TRIES:
                raise ResoluteError(
                    f"ENGINE=ray: shard {spec.split} {spec.number} was lost {tries} times, got "
                    f"'{type(error).__name__}', expected a node to finish it; look at the nodes' memory and logs"
                ) from None
            launch(spec, tries + 1)
            continue
        done(read_written(data))
        total.merge(tally)
        progress(total)


def _do(job: Job, spec: ShardSpec, store: Store) -> tuple[bytes, Tally]:
    """Runs on a node: one shard, safe in the store when it returns."""
    found: list[Written] = []
    tally = convert_shards(_pool(), job, _one(spec), store, done=found.append, progress=lambda _: None)
    return found[0].to_bytes(), tally


def _one(spec: ShardSpec) -> Iterator[ShardSpec]:
    yield spec


@functools.cache
def _pool() -> Pool:
    """One process for images, kept from shard to shard: a decoder that dies must not take Ray's worker along."""
    pool = Pool(1)
    atexit.register(pool.end)
    return pool
