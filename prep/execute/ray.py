"""Conversion on a Ray cluster: one shard per Ray task, each in a subprocess that may crash without ending Ray's worker.

Sources and OUT must be reachable under the same names from every node: on a shared disk or in an object store. Before a
node gets a shard, it is asked for a file of OUT and for some photos; a node that sees different bytes ends the run.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import itertools
import logging
import socket
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pipeline.errors import ResoluteError
from prep.convert.batch import EncodeOptions
from prep.convert.decode import Reject
from prep.shards.writer import ShardSpec
from prep.sources.fetch import fetch
from prep.sources.image_ref import ByteRange
from prep.storage.output import RUN_FOLDER, Store

from .local import convert_shards
from .process_pool import Pool
from .stats import RunStats

__all__ = ["convert_on_ray"]

_MAX_ATTEMPTS = 5  # per shard, each on another worker; then the nodes are not the cause
_ANSWER_S = 120.0  # a node that does not answer for this long counts as lost

_passed_probes: set[Probe] = set()  # why: also a node that joins later checks, once, before its first shard


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Files that every node must see exactly as this machine does: a file of OUT, and photos with their SHA-256."""

    name: str
    content: bytes
    photos: tuple[tuple[ByteRange, bytes], ...]


def convert_on_ray(
    address: str | None,
    options: EncodeOptions,
    specs: Iterable[ShardSpec],
    store: Store,
    *,
    done: Callable[[bytes], None],
    progress: Callable[[RunStats], None],
) -> RunStats:
    """As `prep.execute.local.convert_shards`, on all CPUs of the cluster at `address` (None: Ray's own rules).

    Shards that a lost node had not finished are converted elsewhere. Raises `ResoluteError` if Ray is not installed, if
    the cluster cannot be reached, if a node does not see the photos or OUT under the same names, or if a shard is lost
    `_MAX_ATTEMPTS` times.
    """
    try:
        import ray
    except ImportError:
        raise ResoluteError(
            "ENGINE=ray: Ray is not installed, expected the package ray; run pip install -e '.[ray]'"
        ) from None
    started_here = not ray.is_initialized()
    if started_here:
        try:
            _check_address(address)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError) as error:
            raise ResoluteError(
                f"RAY_ADDRESS: no cluster at {address}, got '{error}', expected a running cluster; start it with "
                "`ray start`, or correct the address"
            ) from None
    try:
        return _run_shards(ray, options, specs, store, done, progress)
    finally:
        if started_here:
            ray.shutdown()


def _check_address(address: str | None) -> None:
    """Raise `OSError` if nothing listens at HOST:PORT; Ray itself would retry for minutes."""
    host, colon, port = (address or "").rpartition("://")[2].rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=10).close()


def _run_shards(
    ray: Any,
    options: EncodeOptions,
    specs: Iterable[ShardSpec],
    store: Store,
    done: Callable[[bytes], None],
    progress: Callable[[RunStats], None],
) -> RunStats:
    # why no retries by Ray: they would hide which shard keeps failing. SPREAD fills the nodes evenly
    remote = ray.remote(num_cpus=1, max_retries=0, scheduling_strategy="SPREAD")(_convert_shard)
    total = RunStats()
    source = iter(specs)
    first = next(source, None)
    if first is None:
        return total
    probe = _write_probe(store, first)
    _check_nodes(ray, store, probe)
    source = itertools.chain([first], source)
    running: dict[Any, tuple[ShardSpec, int]] = {}

    def max_running() -> int:
        """Two tasks per CPU, so that the next is there when one ends; read again because nodes come and go."""
        return 2 * max(1, int(ray.cluster_resources().get("CPU", 1)))

    def launch(spec: ShardSpec, attempts: int) -> None:
        running[remote.remote(options, spec, store, probe)] = (spec, attempts)

    more = True
    while True:
        while more and len(running) < max_running():
            spec = next(source, None)
            if spec is None:
                more = False
            else:
                launch(spec, 1)
        if not running:
            return total
        ready, _ = ray.wait(list(running), num_returns=1)
        spec, attempts = running.pop(ready[0])
        try:
            records, stats = ray.get(ready[0])
        except ray.exceptions.RayTaskError as error:
            # why: the message of Ray's own copy is a full traceback
            raise (error.cause if isinstance(error.cause, ResoluteError) else error.as_instanceof_cause()) from None
        except ray.exceptions.RayError as error:  # the node, or Ray's worker on it, is lost
            if attempts >= _MAX_ATTEMPTS:
                raise ResoluteError(
                    f"ENGINE=ray: shard {spec.split} {spec.number} was lost {attempts} times, got "
                    f"'{type(error).__name__}', expected it to finish; check the nodes' memory and logs"
                ) from None
            launch(spec, attempts + 1)
            continue
        for record in records:
            done(record)
        total.merge(stats)
        progress(total)


def _write_probe(store: Store, spec: ShardSpec) -> Probe:
    """Write a file for the nodes to find, which lasts as long as the run. Photos that cannot be read are left out."""
    content = uuid.uuid4().hex.encode()
    store.write(f"{RUN_FOLDER}/reachable", content)
    photos = []
    for byte_range in (spec.byte_ranges[0], spec.byte_ranges[-1]):
        with suppress(Reject):
            photos.append((byte_range, hashlib.sha256(fetch(byte_range)).digest()))
    return Probe(name=f"{RUN_FOLDER}/reachable", content=content, photos=tuple(photos))


def _check_nodes(ray: Any, store: Store, probe: Probe) -> None:
    """Raise `ResoluteError` unless every node that may get a shard sees what `probe` names."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as affinity

    # why no CPUs: a node that is busy with other work can still answer
    check = ray.remote(num_cpus=0, max_retries=0)(_check_node)
    answers = [
        check.options(scheduling_strategy=affinity(node["NodeID"], soft=False)).remote(store, probe)
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("CPU")
    ]
    for answer in answers:
        try:
            ray.get(answer, timeout=_ANSWER_S)
        except ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, ResoluteError) else error.as_instanceof_cause()) from None
        except ray.exceptions.RayError:
            continue  # a lost node gets no shard


def _check_node(store: Store, probe: Probe) -> None:
    """Runs on a node. Raises `ResoluteError` unless it sees what `probe` names and can write to OUT."""
    if probe in _passed_probes:
        return
    node = f"ENGINE=ray: node {socket.gethostname()}"
    try:
        content = store.read(probe.name)
    except OSError:
        content = None
    if content != probe.content:
        raise ResoluteError(
            f"{node} does not see OUT as this machine does, got {'nothing' if content is None else 'another file'} at "
            f"{store.where}/{probe.name}, expected the file just written there; give every node the same OUT, on a "
            "shared disk or in an object store"
        )
    store.create(f"{probe.name}-{uuid.uuid4().hex[:12]}").discard()
    for byte_range, digest in probe.photos:
        try:
            same = hashlib.sha256(fetch(byte_range)).digest() == digest
            problem = "" if same else "other bytes"
        except (Reject, ResoluteError, OSError) as error:
            problem = str(error)
        if problem:
            raise ResoluteError(
                f"{node} does not see the photos as this machine does, got '{problem}' for {byte_range.path}, expected "
                "the file that is here under that name; give every node the same photos, on a shared disk or at a URL"
            )
    _passed_probes.add(probe)


def _convert_shard(options: EncodeOptions, spec: ShardSpec, store: Store, probe: Probe) -> tuple[list[bytes], RunStats]:
    """Runs on a node: convert one shard, whose files and records are durable when it returns."""
    _check_node(store, probe)
    records: list[bytes] = []
    stats = convert_shards(_pool(), options, [spec], store, done=records.append, progress=lambda _: None)
    return records, stats


@functools.cache
def _pool() -> Pool:
    """One decoding process, kept from shard to shard, so that a crashing decoder does not end Ray's worker."""
    pool = Pool(1)
    atexit.register(pool.end)
    return pool
