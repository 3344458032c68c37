"""Conversion on a Ray cluster: one shard per Ray task, each in a subprocess that may crash without ending Ray's worker.

Before a node gets its first shard, also one that joins during the run, it is checked: its versions are those of this
process, it sees the photos and OUT as this process does, and can write to OUT. A node that fails the check, or on which
a shard fails that another node then converts, gets no more shards. Tasks write only while this run holds its lock.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from resolute.console import say
from resolute.errors import ResoluteError
from resolute.prep.convert.batch import EncodeOptions
from resolute.prep.shards.writer import ShardSpec
from resolute.prep.sources.archives.containers import container_sizes
from resolute.prep.sources.image_ref import ByteRange
from resolute.prep.storage.output import Store

from .ray_node import check_node, convert_shard, version_query, write_probe
from .stats import RunStats
from .versions import versions

__all__ = ["TASK_BYTES", "convert_on_ray"]

# Memory that a task declares to Ray, which runs only as many on a node as fit. Measured: see LOG.md, "Ray task".
TASK_BYTES = 1 << 30
_MAX_ATTEMPTS = 5  # per shard whose worker or node is lost; then the nodes are not the cause
_ANSWER_S = 120.0  # a node that does not answer for this long is left out
_POLL_S = 2.0  # between two looks for nodes that join or leave


def convert_on_ray(
    address: str | None,
    options: EncodeOptions,
    specs: Iterable[ShardSpec],
    store: Store,
    *,
    photos: Sequence[ByteRange],
    done: Callable[[bytes], None],
    progress: Callable[[RunStats], None],
) -> RunStats:
    """As `prep.execute.local.convert_shards`, on all CPUs of the cluster at `address` (None: Ray's own rules).

    `photos` are a few of the images, by which nodes are checked. A line on stderr names each node that is left out, and
    why. Shards that a lost node had not finished are converted elsewhere. Raises `ResoluteError` if Ray is not
    installed, if the cluster cannot be reached, if no node can be used, or if a shard fails on two nodes, or is lost
    `_MAX_ATTEMPTS` times.
    """
    try:
        import ray
    except ImportError:
        raise ResoluteError(
            "ENGINE=ray: Ray is not installed, expected the package ray; run `pip install 'resolute-vision[ray]'`"
        ) from None
    if store.is_private:
        raise ResoluteError(
            f"ENGINE=ray: got OUT={store.where}, which is in this process's memory, expected a shared disk or an "
            "object store; choose another OUT, or use ENGINE=local"
        )
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
    try:
        return _Run(ray, options, store, photos).convert(iter(specs), done, progress)
    finally:
        if started_here:
            ray.shutdown()


def _check_address(address: str | None) -> None:
    """Raise `OSError` if nothing listens at HOST:PORT; Ray itself would retry for minutes."""
    host, colon, port = (address or "").rpartition("://")[2].rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=10).close()


@dataclass(eq=False)
class _Node:
    """A node that is alive. `slots` is the number of tasks that fit into its CPUs and memory."""

    id: str
    name: str
    slots: int
    running: int = 0
    is_checked: bool = False


@dataclass(eq=False)
class _Shard:
    """A shard to be converted: how often it was lost with its worker, and on which nodes it failed with `error`."""

    spec: ShardSpec
    lost: int = 0
    failed_on: list[_Node] = field(default_factory=list)
    error: ResoluteError | None = None


class _Run:
    """The state of a run: nodes, tasks that run, and shards to be repeated."""

    def __init__(self, ray: Any, options: EncodeOptions, store: Store, photos: Sequence[ByteRange]) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._ray, self._affinity = ray, NodeAffinitySchedulingStrategy
        self._options, self._store = options, store.pinned()
        self._probe = write_probe(store, photos)
        # why no retries by Ray: they would hide which shard keeps failing
        self._convert = ray.remote(num_cpus=1, memory=TASK_BYTES, max_retries=0)(convert_shard)
        # why no CPUs: a node that is busy with other work can still answer
        self._query = ray.remote(num_cpus=0, max_retries=0)(version_query())
        self._check = ray.remote(num_cpus=0, max_retries=0)(check_node)
        self._nodes: dict[str, _Node] = {}  # alive and not left out
        self._left_out: dict[str, str] = {}  # node id -> why
        self._unsaid: list[str] = []  # lines about nodes, printed as soon as one can be used
        self._checks: dict[Any, tuple[_Node, float]] = {}  # task -> its node, time by which it has to answer
        self._tasks: dict[Any, tuple[_Shard, _Node]] = {}
        self._repeat: list[_Shard] = []
        self._sizes: dict[str, int] = {}  # bytes of the archives of the shards so far
        self._polled_s = -float("inf")

    def convert(
        self, specs: Iterator[ShardSpec], done: Callable[[bytes], None], progress: Callable[[RunStats], None]
    ) -> RunStats:
        total, more = RunStats(), True
        try:
            while True:
                self._poll_nodes()
                while more and not self._repeat and self._free_node(None) is not None:
                    spec = next(specs, None)
                    if spec is None:
                        more = False
                    else:
                        self._launch(_Shard(spec))
                for shard in list(self._repeat):
                    if self._launch(shard):
                        self._repeat.remove(shard)
                if not (more or self._repeat or self._tasks):
                    return total
                self._raise_if_stuck()
                pending = [*self._tasks, *self._checks]
                if not pending:
                    time.sleep(_POLL_S)
                    continue
                ready, _ = self._ray.wait(pending, num_returns=1, timeout=_POLL_S)
                for task in ready:
                    if task in self._checks:
                        self._take_check(task)
                    elif (converted := self._take_shard(task)) is not None:
                        records, stats = converted
                        for record in records:
                            done(record)
                        total.merge(stats)
                        progress(total)
        finally:
            for task in [*self._tasks, *self._checks]:
                with suppress(Exception):  # why: the first error counts
                    self._ray.cancel(task, force=True)

    def _poll_nodes(self) -> None:
        """Look for nodes that have joined or left, and end the checks that take too long."""
        now = time.monotonic()
        if now - self._polled_s < _POLL_S:
            return
        self._polled_s = now
        alive = {node["NodeID"]: node for node in self._ray.nodes() if node["Alive"]}
        for node_id in [node_id for node_id in self._nodes if node_id not in alive]:
            del self._nodes[node_id]
        for node_id, facts in alive.items():
            resources = facts["Resources"]
            if not resources.get("CPU") or node_id in self._nodes or node_id in self._left_out:
                continue
            name = f"{facts['NodeManagerHostname']} ({node_id[:8]})"
            slots = int(min(resources["CPU"], resources.get("memory", 0) // TASK_BYTES))
            node = self._nodes[node_id] = _Node(node_id, name, slots)
            if slots < 1:
                self._leave_out(
                    node, f"got {resources.get('memory', 0) / 2**20:.0f} MiB of memory for Ray, expected at least "
                    f"{TASK_BYTES >> 20} for a task; give it more (`ray start --memory`)"
                )  # fmt: skip
            else:
                self._start_check(node, self._query)
        for task, (node, deadline_s) in list(self._checks.items()):
            if now > deadline_s:
                del self._checks[task]
                self._leave_out(node, f"got no answer for {_ANSWER_S:.0f} s, expected one; look at its log")

    def _start_check(self, node: _Node, check: Any, *args: object) -> None:
        task = check.options(scheduling_strategy=self._affinity(node.id, soft=False)).remote(*args)
        self._checks[task] = node, time.monotonic() + _ANSWER_S

    def _take_check(self, task: Any) -> None:
        node, _ = self._checks.pop(task)
        try:
            answer = self._ray.get(task)
        except self._ray.exceptions.RayTaskError as error:
            self._leave_out(node, f"got '{error.cause}', expected an answer; install this version of Resolute on it")
            return
        except self._ray.exceptions.RayError:
            self._nodes.pop(node.id, None)  # why: if it is alive, it is found and checked again
            return
        if isinstance(answer, dict):
            differences = [f"{name}: got {answer.get(name, 'none')}, expected {version}"
                           for name, version in versions().items() if answer.get(name) != version]  # fmt: skip
            if differences:
                self._leave_out(
                    node, f"has other versions, {'; '.join(differences)}; install this machine's versions on it"
                )
            else:
                self._start_check(node, self._check, self._store, self._probe)
        elif answer is not None:
            self._leave_out(node, answer)
        else:
            node.is_checked = True
            for line in self._unsaid:
                say(line)
            self._unsaid.clear()

    def _leave_out(self, node: _Node, why: str) -> None:
        """Give no more shards to a node; what it is converting may still finish."""
        if self._nodes.pop(node.id, None) is None:
            return
        self._left_out[node.id] = f"node {node.name} {why}"
        line = f"ENGINE=ray: left out: {self._left_out[node.id]}"
        if any(other.is_checked for other in self._nodes.values()):
            say(line)
        else:
            self._unsaid.append(line)

    def _free_node(self, shard: _Shard | None) -> _Node | None:
        """The node with the fewest tasks per slot that has room for one more, and on which `shard` has not failed.

        Twice as many tasks as slots, so that the next is there when one ends.
        """
        nodes = [node for node in self._nodes.values() if node.is_checked and node.running < 2 * node.slots
                 and (shard is None or node not in shard.failed_on)]  # fmt: skip
        return min(nodes, key=lambda node: node.running / node.slots, default=None)

    def _launch(self, shard: _Shard) -> bool:
        """Start a shard on a node; False if none has room."""
        node = self._free_node(shard)
        if node is None:
            return False
        archives = {each.path for each in shard.spec.byte_ranges if each.offset >= 0}
        self._sizes |= container_sizes(archives.difference(self._sizes))
        sizes = {path: self._sizes[path] for path in archives.intersection(self._sizes)}
        task = self._convert.options(scheduling_strategy=self._affinity(node.id, soft=False)).remote(
            self._options, shard.spec, self._store, sizes
        )
        self._tasks[task] = shard, node
        node.running += 1
        return True

    def _take_shard(self, task: Any) -> tuple[list[bytes], RunStats] | None:
        """The records and statistics of a shard; None if it has to be converted again."""
        shard, node = self._tasks.pop(task)
        node.running -= 1
        try:
            converted: tuple[list[bytes], RunStats] = self._ray.get(task)
        except self._ray.exceptions.RayTaskError as error:
            if not isinstance(error.cause, ResoluteError):
                raise error.as_instanceof_cause() from None  # why: the message of Ray's own is a full traceback
            shard.failed_on.append(node)
            shard.error = error.cause
            node.is_checked = False  # why: it gets nothing more until another node has shown what is to blame
            checking = {node.id for node, _ in self._checks.values()}
            is_left = any(node.is_checked or node.id in checking for node in self._nodes.values())
            if len(shard.failed_on) > 1 or not is_left:
                raise error.cause from None
            self._repeat.append(shard)
            return None
        except self._ray.exceptions.RayError as error:  # the node, or Ray's worker on it, is lost
            shard.lost += 1
            if shard.lost >= _MAX_ATTEMPTS:
                raise ResoluteError(
                    f"ENGINE=ray: shard {shard.spec.name} was lost {shard.lost} times, got '{type(error).__name__}', "
                    "expected it to finish; check the nodes' memory and logs"
                ) from None
            self._repeat.append(shard)
            self._polled_s = -float("inf")
            return None
        for failed in shard.failed_on:
            self._leave_out(failed, f"cannot convert {shard.spec.name}, another node can: '{shard.error}'")
        return converted

    def _raise_if_stuck(self) -> None:
        """Raise if no node is left for the shards that are."""
        if self._tasks or self._checks or any(node.is_checked for node in self._nodes.values()):
            return
        for shard in self._repeat:
            if shard.error is not None:
                raise shard.error
        reasons = [*self._left_out.values()]
        what = f"{len(reasons)} left out, the first because: {reasons[0]}" if reasons else "none with a CPU"
        raise ResoluteError(
            f"ENGINE=ray: no node can be used, got {what}"
            + ("" if reasons else ", expected at least one; add nodes to the cluster")
        )
