"""Events of the soak test: kills and storage faults drawn from a seed, and the exit statuses that must follow.

An event is a pure function of the random numbers and of its scenario's properties (workers, ranks, places, object
store), independent of the machine and of earlier events: `--only NAME --index N` with the same seed repeats a cycle.
"""

from __future__ import annotations

import errno
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .faults import NAME, OPEN, READ, SYNC, WRITE

__all__ = ["Event", "Place", "draw"]

# torch's C++ logs, and prep's notes about the shards that it keeps and the labels of a list, are not errors
_NOISE = re.compile(
    r"\[?[WEI]\d{4} |\[rank\d|frame #\d|Exception raised from|resolute [\w ]+: already there: \d+ shards?"
    r"|resolute [\w ]+: .*: a class for each of \d+ photos |resolute [\w ]+:   line \d"
)
_CHANGES = WRITE | SYNC | NAME
_SIGNALS = {"SIGTERM": {143, -15}, "SIGINT": {130, -2}, "SIGHUP": {129, -1}}


@dataclass(frozen=True, kw_only=True)
class Place:
    """A local folder or file of a scenario. reads, writes: what its command does there. vanishes: may be taken away."""

    path: Path
    reads: bool = False
    writes: bool = False
    vanishes: bool = False


@dataclass(frozen=True, kw_only=True)
class Event:
    """An event that hits one run of a command.

    kind: "kill" or "fault". how: what happens. target: "all", "main", "one" (a worker or rank, if there is one) or
    "worker" (as soon as there is one) for signals.
    at: when, a fraction of the undisturbed run: of its time, or of its calls on `place` where `ops` is set.
    limit: number of calls or requests that are hit (-1: until the command ends). duration_s: of a stop, of a missing
    folder (0: until the command ends), or of a slow call. victim: number of the command, if the scenario runs several
    at the same time. expected: exit statuses that are correct for it, besides success. says: if set, the command must
    fail with a line that holds this.
    """

    kind: str
    how: str
    at: float
    expected: frozenset[int]
    must_succeed: bool = False
    target: str = ""
    place: str = ""
    ops: int = 0
    limit: int = 0
    duration_s: float = 0.0
    error: int = 0
    victim: int = 0
    says: str = ""

    @property
    def remote(self) -> bool:
        """Whether the object store injects it."""
        return self.how.startswith("s3 ")

    def describe(self) -> str:
        times = {0: "", -1: ", from then on"}.get(self.limit, f", {self.limit} times")
        words = [self.how, self.target, f"on {self.place}" if self.place else "",
                 f"for {self.duration_s:.1f} s" if self.duration_s else "", f"at {self.at:.3f}"]  # fmt: skip
        return " ".join(word for word in words if word) + times + (f", process {self.victim}" if self.victim else "")


def draw(
    rng: random.Random, *, fault: bool, places: Mapping[str, Place], several: bool, loss: frozenset[int], remote: bool,
    library: bool, stop_s: float, victims: int = 1,
) -> Event:  # fmt: skip
    """Draw an event for a scenario with these properties. several: whether it has workers or ranks. loss: exit statuses
    that are correct, besides success, if one of them is killed. library: whether `faults.c` could be compiled."""
    at, victim = rng.random(), rng.randrange(victims)
    if not fault:
        return _kill(rng, at, places, several=several, loss=loss, library=library, stop_s=stop_s, victim=victim)
    local = [name for name, place in places.items() if library or place.vanishes]
    if remote and (not local or rng.random() < 0.75):
        return _remote(rng, at)
    return _local(rng, at, rng.choice(local), places, library)


def _kill(
    rng: random.Random, at: float, places: Mapping[str, Place], *, several: bool, loss: frozenset[int], library: bool,
    stop_s: float, victim: int,
) -> Event:  # fmt: skip
    written = [name for name, place in places.items() if place.writes]
    choice = rng.random()
    if choice < 0.25 and written and library:  # at a file call: for example between two steps of a save
        return Event(
            kind="kill", how="SIGKILL at a file call", at=at, place=rng.choice(written), ops=_CHANGES, limit=1,
            target=rng.choice(["all", "all", "one"]), expected=frozenset({-9, 137, 2}),
        )  # fmt: skip
    target = rng.choice(["all", "main", "one"]) if several else "all"
    if choice < 0.55:
        expected = loss if target == "one" else frozenset({-9, 137})
        return Event(kind="kill", how="SIGKILL", target=target, at=at, expected=expected, victim=victim)
    if choice < 0.80:
        how = rng.choice(["SIGTERM", "SIGTERM", "SIGTERM", "SIGINT", "SIGHUP"])
        target = "main" if target == "one" else target
        return Event(kind="kill", how=how, target=target, at=at, expected=frozenset(_SIGNALS[how]), victim=victim)
    return Event(kind="kill", how="SIGSTOP", target=target, at=at, duration_s=stop_s * rng.uniform(1.2, 2.0),
                 victim=victim, expected=frozenset(), must_succeed=True)  # fmt: skip


def _local(rng: random.Random, at: float, name: str, places: Mapping[str, Place], library: bool) -> Event:
    place = places[name]
    possible: list[str] = ["vanish", "vanish"] if place.vanishes else []
    if library:
        possible += ["EIO read", "EIO read", "short read", "slow read"] if place.reads else []
        possible += ["ENOSPC", "EIO write", "short write"] if place.writes else []
    how = rng.choice(possible)
    limit = rng.choice([1, 2, -1, -1])
    if how == "vanish":
        duration_s = rng.choice([0.0, rng.uniform(0.05, 1.5)])
        return Event(kind="fault", how=rng.choice(["vanish", "vanish, empty folder"]), place=name, at=at,
                     duration_s=duration_s, expected=frozenset({2}))  # fmt: skip
    if how == "EIO read":
        ops, error = READ | rng.choice([0, OPEN]), rng.choice([errno.EIO, errno.EIO, errno.ESTALE, errno.EINTR])
        how = f"{errno.errorcode[error]} read"
        if error == errno.EINTR and limit < 0:
            limit = 20  # why: Python repeats interrupted calls forever (PEP 475), and no kernel interrupts all of them
        return Event(kind="fault", how=how, place=name, at=at, ops=ops, limit=limit, error=error,
                     expected=frozenset({2}), must_succeed=limit > 0 and not place.writes)  # fmt: skip
    if how in ("ENOSPC", "EIO write"):
        error = errno.ENOSPC if how == "ENOSPC" else errno.EIO
        ops = WRITE if how == "ENOSPC" else rng.choice([WRITE, SYNC, WRITE | SYNC])
        return Event(kind="fault", how=how, place=name, at=at, ops=ops, limit=limit, error=error,
                     expected=frozenset({2}))  # fmt: skip
    ops = {"short read": READ, "slow read": READ, "short write": WRITE}[how]
    limit = rng.randrange(5, 30) if how == "slow read" else -1
    return Event(kind="fault", how=how, place=name, at=at, ops=ops, limit=limit, duration_s=rng.uniform(0.02, 0.1),
                 expected=frozenset(), must_succeed=True)  # fmt: skip


def _remote(rng: random.Random, at: float) -> Event:
    how = rng.choice(["503", "503", "500", "403", "hang", "slow", "cut"])
    limit = {"403": -1, "hang": rng.randrange(1, 3), "slow": rng.randrange(3, 12)}.get(how, rng.choice([1, 2, 3, -1]))
    # why 1 s: a lock is renewed with three requests, and the soak's lasts a few seconds
    duration_s = rng.uniform(0.3, 1.0 if how == "slow" else 2.0)
    return Event(kind="fault", how=f"s3 {how}", at=at, limit=limit, duration_s=duration_s,
                 expected=frozenset({2}), must_succeed=limit > 0)  # fmt: skip


def problems_of(
    event: Event | None, *, status: int | None, final: int, stderr: str, what: str
) -> list[str]:
    """Problems with a command's exit status and stderr. final: the exit status of success."""
    if status is None:
        return [f"{what} did not end"]
    lines = [line for line in stderr.splitlines() if line.strip() and not _NOISE.match(line)]
    correct = {final} | (set() if event is None or event.must_succeed else event.expected)
    problems = []
    if "Traceback" in stderr:
        problems.append(f"{what}: traceback")
    if status not in correct:
        problems.append(f"{what}: got exit status {status}, expected {' or '.join(map(str, sorted(correct)))}")
    if event is not None and event.says not in stderr:
        problems.append(f"{what}: got no line with '{event.says}'")
    # why 1 line with status 1: verify reports that its list of damaged files could not be written
    allowed = {2: 1, 0: 0, 1: int(event is not None)}.get(status, 1)
    if len(lines) > allowed or (status == 2 and not lines):
        problems.append(f"{what}: got {len(lines)} lines on stderr with status {status}, expected {allowed}")
    return problems
