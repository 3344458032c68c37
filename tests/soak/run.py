"""The soak test's main loop: draws events, starts commands, disturbs and restarts them, and checks the outcome."""

from __future__ import annotations

import dataclasses
import functools
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from resolute.benchmarks.cli import chosen
from resolute.errors import ResoluteError
from tests import ROOT

from .events import Event, Faults, draw, problems_of
from .processes import Process, end_leftovers, send
from .scenarios import SCENARIOS, Cycle, Phase, World, make_photos, write_recipes
from .settings import SoakOptions

__all__ = ["Soak"]

_RENAMES = 100  # attempts to bring a folder back
_POLL_S = 0.005
_START_S = 0.5  # no event before: interrupted while it starts, Python itself prints a traceback
_TIMEOUT_S = 600.0  # of a command; the first of train-all compiles for minutes
_SLOWER = {1: 1.0, 2: 1.6, 4: 3.2}  # time of a command by its number of ranks


class Soak:
    """A complete soak test. `findings` grows during `run`."""

    def __init__(self, folder: Path, settings: SoakOptions) -> None:
        """Create the photos. Raises `ResoluteError` for unknown scenarios."""
        usual = [name for name, scenario in SCENARIOS.items() if scenario.usual]
        self._settings, self._names = settings, chosen(settings.only or usual, list(SCENARIOS))
        self.findings: list[dict[str, Any]] = []
        self._events: list[dict[str, Any]] = []
        self._cycles: Counter[str] = Counter()
        self._times_s: dict[str, float] = {}  # of undisturbed phases, by the names of cycle and phase
        self._starts, self._elapsed_s = 0, 0.0
        self._world = World(folder, Faults(folder))
        make_photos(folder / "photos")
        write_recipes(folder)

    def run(self) -> None:
        """Run cycles until there are enough events."""
        began, settings = time.monotonic(), self._settings
        self._make_shards()
        while (name := self._next()) is not None and time.monotonic() - began < 60 * settings.minutes:
            index = self._cycles[name] if settings.index is None else settings.index
            self._cycles[name] += 1
            cycle_began, before = time.monotonic(), (len(self._events), len(self.findings))
            self._run_cycle(name, index)
            self._elapsed_s = time.monotonic() - began
            events = self._events[before[0] :]
            print(
                f"{self._elapsed_s:6.0f} s  {name} {index}: {sum(each['delivered'] for each in events)} of "
                f"{len(events)} events, {time.monotonic() - cycle_began:.1f} s, "
                f"{len(self.findings) - before[1]} findings",
                flush=True,
            )

    def result(self) -> dict[str, Any]:
        by_kind: dict[str, Counter[str]] = {"kill": Counter(), "fault": Counter()}
        for event in self._events:
            if event["delivered"]:
                by_kind[event["kind"]][event["how"]] += 1
        return {
            "seed": self._settings.seed,
            "kills": by_kind["kill"].total(),
            "faults": by_kind["fault"].total(),
            "late": sum(not event["delivered"] for event in self._events),
            "cycles": self._cycles,
            "starts": self._starts,
            "elapsed_s": round(self._elapsed_s, 1),
            "by_kind": by_kind,
            "findings": self.findings,
            "events": self._events,
            "undisturbed_s": {key: round(value, 2) for key, value in self._times_s.items()},
        }

    def _next(self) -> str | None:
        """The scenario with the fewest events; None if there are enough in total."""
        if self._settings.index is not None:
            return next((name for name in self._names if not self._cycles[name]), None)
        delivered = [event for event in self._events if event["delivered"]]
        kinds, names = (Counter(event[field] for event in delivered) for field in ("kind", "scenario"))
        if kinds["kill"] >= self._settings.kills and kinds["fault"] >= self._settings.faults:
            return None
        return min(self._names, key=lambda name: names[name])

    def _make_shards(self) -> None:
        """The set that other scenarios read."""
        self._make_reference(cycle := Cycle(self._world, "prep-folder", 0))
        shutil.copytree(cycle.out, self._world.root / "shards")

    def _make_reference(self, cycle: Cycle) -> None:
        """Run the cycle undisturbed, unless one of its name has been, and keep its results."""
        if cycle.reference.exists():
            return
        for phase in cycle.prepare():
            start, problems = self._start(cycle, phase, None)
            if problems:
                text = " ".join(start.main.stderr.split())[-500:]
                raise ResoluteError(f"soak: undisturbed {cycle.name}: {'; '.join(problems)}: {text}")
            self._times_s[f"{cycle.name} {phase.name}"] = start.main.elapsed_s
        cycle.keep()

    def _run_cycle(self, name: str, index: int) -> None:
        """Run all phases, each with its events, until they succeed; then check their results."""
        self._make_reference(Cycle(self._world, name, index, alone=True))
        cycle, rng = Cycle(self._world, name, index), random.Random(f"{self._settings.seed}:{name}:{index}")
        phases, scenario = cycle.prepare(), cycle.scenario
        events: list[list[Event]] = [[] for _ in phases]
        for _ in range(rng.randrange(3, 8) + 2 * len(phases) - 2):
            drawn = draw(rng, places=scenario.places, loss=scenario.loss)
            rng.choice(events).append(drawn)
        last_event, findings_before = "no event", len(self.findings)
        for phase, phase_events in zip(phases, events, strict=True):
            key = f"{cycle.name} {phase.name}"
            for number, event in enumerate((*phase_events, None)):  # None: undisturbed, which must succeed
                last_event = event.describe() if event is not None else last_event
                expected_s = self._times_s[key] * _SLOWER[cycle.ranks]
                start, problems = self._start(cycle, phase, event, expected_s, rng.getrandbits(32))
                for problem in problems:
                    self._add_finding(cycle, last_event, problem, "".join(each.stderr for each in start.processes))
                cycle.attempt += 1
                if start.succeeded:
                    if number == 0 and not start.delivered:  # why: the first start of all compiles
                        self._times_s[key] = min(self._times_s[key], start.main.elapsed_s)
                    break
        if len(self.findings) == findings_before:
            for problem in cycle.check():
                self._add_finding(cycle, last_event, problem)

    def _start(
        self, cycle: Cycle, phase: Phase, event: Event | None, expected_s: float = 0.0, seed: int = 0
    ) -> tuple[_Start, list[str]]:
        """Start a phase once and wait for its end; returns its problems too."""
        start = _Start(cycle, phase, event, expected_s, random.Random(seed))
        start.run()
        self._starts += 1
        survivors = end_leftovers(grace_s=10.0)  # first: they may still write
        problems = start.problems() + [f"{phase.name}: left a process running: {name}" for name in survivors]
        if event is not None:
            self._events.append(
                {
                    "scenario": cycle.name,
                    "index": cycle.index,
                    "phase": phase.name,
                    "kind": event.kind,
                    "how": event.how,
                    "event": event.describe(),
                    "delivered": start.delivered,
                }
            )
        return start, problems

    def _add_finding(self, cycle: Cycle, event: str, problem: str, stderr: str = "") -> None:
        repeat = f"python -m tests.soak --seed {self._settings.seed} --only {cycle.name} --index {cycle.index}"
        self.findings.append(
            {
                "scenario": cycle.name,
                "index": cycle.index,
                "event": event,
                "problem": problem,
                "stderr": stderr[-4000:].replace(f"{ROOT}/", ""),
                "repeat": repeat,
            }
        )
        print(f"FINDING {cycle.name} {cycle.index}: {problem}\n    after: {event}; {repeat}", flush=True)


class _Start:
    """One start of a phase, with one event or none.

    processes: the main command, then concurrent ones. delivered: whether the event met a living process.
    """

    def __init__(self, cycle: Cycle, phase: Phase, event: Event | None, expected_s: float, rng: random.Random) -> None:
        """expected_s: the time that the command would take undisturbed."""
        self._cycle, self._phase, self._event, self._expected_s, self._rng = cycle, phase, event, expected_s, rng
        self._moment_s = max(_START_S, event.at * expected_s) if event is not None else 0.0
        self.delivered = False
        self.processes: list[Process] = []
        self._phases: list[Phase] = []  # of each process
        self._hung: list[Process] = []  # that had not ended after `_TIMEOUT_S`
        self._victim: Process | None = None  # of a signal
        self._is_killed = False  # whether the victim's main process was
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._restore: Callable[[], None] = lambda: None  # brings a folder back

    @property
    def main(self) -> Process:
        return self.processes[0]

    @property
    def succeeded(self) -> bool:
        """Whether the phase is done. Not after a folder vanished: another may have been written in its place."""
        is_lost = self.delivered and self._event is not None and self._event.how.startswith("vanish")
        return self.main.status in self._phase.success and not is_lost

    def run(self) -> None:
        """Run the command and its event to the end."""
        self._add_process(self._phase)
        if self._event is not None:
            self._later(self._moment_s, self._inject)
            for phase in self._phase.concurrent:
                self._later(self._rng.random() * self._expected_s, functools.partial(self._add_process, phase))
        until = time.monotonic() + _TIMEOUT_S
        while any(process.status is None for process in self.processes) and time.monotonic() < until:
            for timer in [each for each in self._timers if each[0] <= time.monotonic()]:
                self._timers.remove(timer)
                timer[1]()
            time.sleep(_POLL_S)
        self._restore()
        self._hung = [process for process in self.processes if process.status is None]
        for process in self.processes:
            process.abort()
        self.delivered = self._cycle.world.faults.clear() > 0 or self.delivered

    def problems(self) -> list[str]:
        """Problems with the commands' exit statuses and outputs."""
        problems = []
        for phase, process in zip(self._phases, self.processes, strict=True):
            event = self._event if self.delivered else None
            if event is not None and event.is_signal:
                expected = event.expected | ({-9, 137} if self._is_killed else set())
                event = dataclasses.replace(event, expected=expected) if process is self._victim else None
            status = None if process in self._hung else process.status
            problems += problems_of(
                event,
                status=status,
                success=phase.success,
                stderr=process.stderr,
                what=phase.name,
                ranks=self._cycle.ranks,
            )
        return problems

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self._timers.append((time.monotonic() + seconds, action))

    def _add_process(self, phase: Phase) -> None:
        cycle, ranks = self._cycle, self._cycle.ranks
        words = [*phase.words, *(["--gpus", ranks, "--restarts", 0] if ranks > 1 else [])]
        self._phases.append(phase)
        self.processes.append(Process("resolute", words, cycle.env, cycle.world.root / "output"))

    def _inject(self) -> None:
        event = self._event
        assert event is not None
        if event.action:
            self._cycle.world.faults.inject(event, self._cycle.path(event.place))
        elif event.place:
            self._vanish(event, self._cycle.path(event.place))
        elif running := [process for process in self.processes if process.status is None]:
            self._victim = self._rng.choice(running)
            self._signal(event, self._victim)

    def _signal(self, event: Event, process: Process) -> None:
        number, pids = signal.Signals[event.how], [process.pid]
        # why all ranks: what remains of them without their launcher is torchrun's responsibility
        is_launcher = event.target == "main" and number == signal.SIGKILL and self._cycle.ranks > 1
        if event.target == "all" or is_launcher:
            pids = process.members()
        elif event.target == "one" and (workers := process.workers()):
            pids = [self._rng.choice(workers)]
        self._is_killed = number == signal.SIGKILL and process.pid in pids
        self.delivered = True
        send(number, pids)
        while self._is_killed and len(pids) > 1 and (pids := process.members()):
            send(number, pids)  # also processes that were forked in the meantime

    def _vanish(self, event: Event, path: Path) -> None:
        """Take a folder away by renaming it, like a lost mount, and bring it back later."""
        hidden = path.with_name(f"{path.name}.away")
        if not path.exists():
            return
        path.rename(hidden)
        if event.how.endswith("empty folder"):
            path.mkdir()
        self.delivered = True

        def restore() -> None:
            for _ in range(_RENAMES if hidden.exists() else 0):
                shutil.rmtree(path, ignore_errors=True)
                with suppress(OSError):  # why again: a process may have written into the empty folder in between
                    hidden.rename(path)
                    break

        self._restore = restore
        if event.duration_s:
            self._later(event.duration_s, restore)
