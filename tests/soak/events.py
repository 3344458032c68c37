"""Events of the soak test: kills and storage faults, drawn from a seed; and how a command may end after one.

`Faults` controls `faults.c`, a library that injects storage faults below Python.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
import re
import struct
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["NAME", "OPEN", "READ", "SYNC", "WRITE", "Event", "Faults", "draw", "problems_of"]

READ, WRITE, OPEN, SYNC, NAME = 1, 2, 4, 8, 16  # kinds of calls; NAME: rename, link, unlink, mkdir, rmdir
_ACTIONS = ("none", "fail", "shorten", "kill")
_CONTROL = struct.Struct("<iiiiqqqq1024s")  # `struct control` of faults.c, which begins with the action
_HITS_AT = 16 + 3 * 8
_KILLS_FRAC = 0.7  # of all events


@dataclass(frozen=True, kw_only=True)
class Event:
    """An event that hits one start of a command.

    kind: "kill" or "fault". how: what happens. at: when, a fraction of the time that the command takes undisturbed.
    target: the processes that get a signal: "all", "main", or "one" worker or rank (the main process if there is none).
    place: the folder that vanishes, or on whose files faults.c hits `calls`. action: of faults.c: "fail" with errno
    `error`, "shorten" (reads and writes transfer half of the bytes), "kill" (half of a write is done).
    after: calls that pass first. limit: number of them that are hit, -1: until the command ends.
    duration_s: of a missing folder (0: until the command ends).
    expected: exit statuses that are correct, besides success.
    """

    kind: str
    how: str
    at: float
    expected: frozenset[int] = frozenset()
    target: str = ""
    place: str = ""
    action: str = ""
    calls: int = 0
    error: int = 0
    after: int = 0
    limit: int = 0
    duration_s: float = 0.0

    @property
    def is_signal(self) -> bool:
        return bool(self.target) and not self.action

    def describe(self) -> str:
        times = {0: "", -1: ", from then on"}.get(self.limit, f", {self.limit} times")
        words = [
            self.how,
            self.target,
            f"on {self.place}" if self.place else "",
            f"for {self.duration_s:.1f} s" if self.duration_s else "",
            f"at {self.at:.3f}",
        ]
        return " ".join(word for word in words if word) + times


class Faults:
    """The library, compiled into a folder, and the page of shared memory that says what it does; one fault at a time.

    variables: environment of the processes that obey it; this process is not affected.
    """

    def __init__(self, folder: Path) -> None:
        library, page, source = folder / "faults.so", folder / "page", Path(__file__).with_name("faults.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"], check=True)
        page.write_bytes(bytes(_CONTROL.size))
        with page.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), _CONTROL.size)
        self.variables = {"LD_PRELOAD": str(library), "RESOLUTE_SOAK_FAULTS": str(page)}

    def inject(self, event: Event, path: Path) -> None:
        """Replace the active fault by that of an event, on `path` and below it. It kills a process, or its group."""
        self.clear()
        action, group = _ACTIONS.index(event.action), event.target == "all"
        fields = (event.calls, event.error, group, event.after, event.limit, 0, 0, os.fsencode(path))
        self._page[4:] = _CONTROL.pack(action, *fields)[4:]
        self._page[:4] = struct.pack("<i", action)  # last: processes may see it at once

    def clear(self) -> int:
        """End the fault; returns the number of calls that it has hit."""
        self._page[:4] = struct.pack("<i", 0)
        (hits,) = struct.unpack_from("<q", self._page, _HITS_AT)
        struct.pack_into("<q", self._page, _HITS_AT, 0)
        return int(hits)


def draw(rng: random.Random, *, places: Mapping[str, Sequence[str]], loss: frozenset[int]) -> Event:
    """An event for a scenario with these properties (see `Scenario`)."""
    at = rng.uniform(rng.choice([0.0, 0.4]), 1.0)  # why more later: the first part is imports
    if rng.random() < _KILLS_FRAC:
        return _kill(rng, at, places, loss)
    name = rng.choice(list(places))
    return _local(rng, at, name, places[name])


def _few(rng: random.Random) -> int:
    """Calls that pass first, 0 to 62 and mostly few: to stop between two steps of a save, for example."""
    return int(2 ** rng.uniform(0, 6)) - 1


def _kill(rng: random.Random, at: float, places: Mapping[str, Sequence[str]], loss: frozenset[int]) -> Event:
    written = [name for name, place in places.items() if "writes" in place]
    target, choice = rng.choice(["all", "main", "one"]) if loss else "all", rng.random()
    if choice < 0.25 and written:
        return Event(
            kind="kill",
            how="SIGKILL at a file call",
            at=at,
            action="kill",
            calls=WRITE | SYNC | NAME,
            place=rng.choice(written),
            after=_few(rng),
            limit=1,
            target=rng.choice(["all", "all", "one"]),
            expected=frozenset({-9, 137, 2}),
        )
    if choice < 0.65:
        expected = loss if target == "one" else frozenset({-9, 137})
        return Event(kind="kill", how="SIGKILL", at=at, target=target, expected=expected)
    how, number = rng.choice([*[("SIGTERM", 15)] * 3, ("SIGINT", 2), ("SIGHUP", 1)])
    target = "main" if target == "one" else target
    return Event(kind="kill", how=how, at=at, target=target, expected=frozenset({128 + number, -number}))


_LOCAL = {  # how: (what happens at the place, action, calls, errno)
    "EIO read": ("reads", "fail", READ, errno.EIO),
    "ESTALE read": ("reads", "fail", READ | OPEN, errno.ESTALE),
    "short read": ("reads", "shorten", READ, 0),
    "ENOSPC": ("writes", "fail", WRITE, errno.ENOSPC),
    "EIO write": ("writes", "fail", WRITE | SYNC, errno.EIO),
    "short write": ("writes", "shorten", WRITE, 0),
    "vanish": ("vanishes", "", 0, 0),
    "vanish, empty folder": ("vanishes", "", 0, 0),
}


def _local(rng: random.Random, at: float, name: str, place: Sequence[str]) -> Event:
    how = rng.choice([how for how, fault in _LOCAL.items() if fault[0] in place])
    _, action, calls, error = _LOCAL[how]
    limit, duration_s, may_fail = 0, 0.0, True
    if action == "fail":
        limit = rng.choice([1, 2, -1, -1])
        may_fail = limit < 0 or "writes" in place  # else the call is repeated
    elif action:
        limit, may_fail = -1, False
    else:
        duration_s = rng.choice([0.0, rng.uniform(0.05, 1.5)])
    return Event(
        kind="fault",
        how=how,
        at=at,
        place=name,
        action=action,
        calls=calls,
        error=error,
        limit=limit,
        after=_few(rng),
        duration_s=duration_s,
        expected=frozenset({2} if may_fail else ()),
    )


# no errors: logs of torch, notes of prep about shards that it keeps, and two lines of multiprocessing's helper about a
# killed process, after which it cleans up
_NOISE = re.compile(
    r"\[?[WEI]\d{4} |\[rank\d|frame #\d|Exception raised from|resolute [\w ]+: already there: \d+ "
    r"|.*resource_tracker: There appear to be \d+ leaked|  warnings\.warn\('resource_tracker"
)


def problems_of(
    event: Event | None, *, status: int | None, success: Sequence[int], stderr: str, what: str, ranks: int = 1
) -> list[str]:
    """Problems with a command's exit status and stderr. event: that has hit it, if any."""
    if status is None:
        return [f"{what} did not end"]
    lines = [line for line in stderr.splitlines() if line.strip() and not _NOISE.match(line)]
    correct = {*success, *(event.expected if event is not None else ())}
    problems = []
    if "Traceback" in stderr:
        problems.append(f"{what}: traceback")
    if status not in correct:
        problems.append(f"{what}: got exit status {status}, expected {' or '.join(map(str, sorted(correct)))}")
    # why 1 line with status 1: verify reports that its list of damaged files could not be written
    # why 2 with ranks: one of a rank that lost another, one of the process that started them
    allowed = {0: 0, 1: int(event is not None)}.get(status, min(ranks, 2))
    if len(lines) > allowed or (status == 2 and not lines):
        problems.append(f"{what}: got {len(lines)} lines on stderr with status {status}, expected {allowed}")
    return problems
