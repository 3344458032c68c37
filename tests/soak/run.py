"""The soak test's main loop: draws events, starts commands, disturbs and restarts them, and checks the outcome."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# why: forks of this process need not import them
import resolute.cli
import resolute.prep.commands
import resolute.prep.run.worker
import resolute.train.cross_validation
import resolute.train.inference.evaluate
import resolute.train.planner.plan
import resolute.train.trainer  # noqa: F401
from resolute.errors import ResoluteError

from .events import Event, problems_of
from .faults import Control
from .objects import object_store
from .processes import (
    Command,
    Process,
    adopt_orphans,
    check_single_threaded,
    end_leftovers,
    load_compiled,
    start,
)
from .scenarios import HANG_S, SCENARIOS, Phase, Scenario, World, chosen_scenarios, make_photos, write_recipes

__all__ = ["Soak"]

_LEASE_S = 90.0  # a killed writer's lease on an object store expires within this time
_POLL_S = 0.002
_NEW_INTERPRETER_FRAC = 0.05  # fraction of the starts disturbed by signals that use a new interpreter, not a fork
_IMPORTS_S = 4.0  # import time of a new interpreter
_SLOWER = {1: 1.0, 2: 1.3, 4: 2.0}  # slowdown by number of ranks


class Soak:
    """A complete soak test. `findings` grows during `run`; `result` and `summary` report what was done."""

    def __init__(
        self, folder: Path, stack: contextlib.ExitStack, *, seed: int, kills: int, faults: int, minutes: float,
        only: Sequence[str] = (), index: int | None = None, keep: bool = False,
    ) -> None:  # fmt: skip
        """Create the photos and start the object store. Raises `ResoluteError` for unknown names in `only`."""
        for word in only:
            if not chosen_scenarios([word]):
                raise ResoluteError(f"--only: got {word}, expected some of {', '.join(SCENARIOS)}; correct it")
        self.seed, self.minimums, self.minutes, self.index, self.keep = seed, (kills, faults), minutes, index, keep
        self.names = chosen_scenarios(only)
        self.notes: list[str] = []
        self.events: list[dict[str, Any]] = []
        self.findings: list[dict[str, Any]] = []
        self.cycles: Counter[str] = Counter()
        self.starts = self.new_interpreters = 0
        self.elapsed_s = 0.0
        self._control = Control(folder / "page") if "LD_PRELOAD" in os.environ else None
        if self._control is None:
            self.notes.append("no C compiler: storage faults are vanished folders and those of the object store")
        store = None
        if any(SCENARIOS[name].remote for name in self.names):
            try:
                store = stack.enter_context(object_store())
            except ResoluteError as error:
                self.notes.append(f"{error}: scenarios with an object store are left out")
                self.names = [name for name in self.names if not SCENARIOS[name].remote]
        self._known = [] if store is None else [store.pid]
        self.world = World(root=folder, store=store)
        self._times: dict[tuple[str, str], float] = {}
        self._requests: dict[tuple[str, str], int] = {}
        self._calls: dict[tuple[str, str, str, int], int] = {}
        self._failed = False  # whether the cycle under way has findings
        adopt_orphans()
        check_single_threaded()
        make_photos(self.world.photos)
        write_recipes(self.world)

    # the complete soak

    def run(self) -> None:
        """Run cycles until there are enough events."""
        began = time.monotonic()
        self._make_shards()
        while (name := self._next()) is not None and time.monotonic() - began < 60 * self.minutes:
            index = self.cycles[name] if self.index is None else self.index
            self.cycles[name] += 1
            cycle_began, before = time.monotonic(), (len(self.events), len(self.findings))
            self._cycle(SCENARIOS[name](self.world, index), f"{self.seed}:{name}:{index}")
            self.elapsed_s = time.monotonic() - began
            done = self.events[before[0] :]
            print(
                f"{self.elapsed_s:6.0f} s  {name} {index}: {sum(e['delivered'] for e in done)} of {len(done)} events, "
                f"{time.monotonic() - cycle_began:.1f} s, {len(self.findings) - before[1]} findings", flush=True,
            )  # fmt: skip
            if self.keep and self.findings:
                self.notes.append(f"kept: {self.world.root}")
                return

    def _delivered(self, kind: str, name: str | None = None) -> int:
        return sum(e["delivered"] and e["kind"] == kind and name in (None, e["scenario"]) for e in self.events)

    def _next(self) -> str | None:
        """The scenario with the smallest fraction of its events; None if there are enough in total."""
        if self.index is not None:
            return next((name for name in self.names if not self.cycles[name]), None)
        kinds = (("kill", "kills", self.minimums[0]), ("fault", "faults", self.minimums[1]))
        lacking = [(kind, field, minimum) for kind, field, minimum in kinds if self._delivered(kind) < minimum]
        if not lacking:
            return None

        def done(name: str) -> float:
            total = sum(minimum * getattr(SCENARIOS[name], field) for _, field, minimum in lacking)
            return sum(self._delivered(kind, name) for kind, _, _ in lacking) / total if total else float("inf")

        return min(self.names, key=done)

    def result(self) -> dict[str, Any]:
        counts: dict[str, Counter[str]] = {"kill": Counter(), "fault": Counter()}
        by_scenario: dict[str, Counter[str]] = {}
        for event in self.events:
            if event["delivered"]:
                counts[event["kind"]][event["how"]] += 1
                by_scenario.setdefault(event["scenario"], Counter())[event["kind"]] += 1
        return {
            "seed": self.seed, "kills": self._delivered("kill"), "faults": self._delivered("fault"),
            "late": sum(not event["delivered"] for event in self.events), "cycles": dict(self.cycles),
            "starts": self.starts, "starts_of_new_interpreters": self.new_interpreters,
            "elapsed_s": round(self.elapsed_s, 1), "notes": self.notes,
            "by_kind": {kind: dict(sorted(values.items())) for kind, values in counts.items()},
            "by_scenario": {name: dict(values) for name, values in by_scenario.items()},
            "undisturbed_s": {" ".join(key): round(value, 2) for key, value in self._times.items()},
            "findings": self.findings, "events": self.events,
        }  # fmt: skip

    def summary(self) -> str:
        lines = [f"note: {note}" for note in self.notes]
        for finding in self.findings:
            lines.append(f"FINDING {finding['scenario']} {finding['index']}: {finding['problem']}\n"
                         f"      after {finding['event']}; {finding['repeat']}")  # fmt: skip
        return "\n".join([
            *lines,
            f"seed {self.seed}: {self._delivered('kill')} kills, {self._delivered('fault')} storage faults in "
            f"{sum(self.cycles.values())} cycles and {self.starts} starts, {self.elapsed_s:.0f} s: "
            f"{len(self.findings)} findings",
        ])  # fmt: skip

    # undisturbed runs

    def _make_shards(self) -> None:
        make = SCENARIOS["prep-folder"](self.world, 0)
        self._undisturbed(make)
        shutil.copytree(make.path("out"), self.world.shards)
        if self.world.store is not None:
            self.world.store.upload(self.world.photos, "photos")
            self.world.store.upload(self.world.shards, "shards")

    def _undisturbed(self, scenario: Scenario, *, count: tuple[str, str, int] | None = None) -> int:
        """Run all phases once, or until the counted one. count: (phase, place, ops) whose calls are returned."""
        scenario.prepare()
        for phase in scenario.phases():
            is_counted = count is not None and phase.name == count[0]
            if count is not None and is_counted and self._control is not None:
                self._control.count(scenario.places()[count[1]].path, count[2])
            process = self._start(scenario, phase, 999)
            status = process.wait(scenario.attempt_s)
            calls = 0 if self._control is None else self._control.counts()[0]
            if self._control is not None:
                self._control.clear()
            survivors = end_leftovers(self._known)
            if status != phase.final or survivors:
                raise ResoluteError(
                    f"soak: undisturbed {scenario.name} ({phase.name}) ended with status {status}, leaving "
                    f"{survivors}, expected {phase.final}: {' '.join((process.stdout + process.stderr).split())[-500:]}"
                )
            key = scenario.key, phase.name
            self._times[key] = min(process.elapsed_s, self._times.get(key, float("inf")))  # why min: the first compiles
            if self.world.store is not None:
                self._requests.setdefault((scenario.key, phase.name), self.world.store.clear()[0])
            if is_counted:
                return calls
        return 0

    def _reference(self, scenario: Scenario) -> Path:
        """Folder with the results of the undisturbed scenario, which runs once."""
        folder = self.world.references.get(scenario.key)
        if folder is None:
            folder = self.world.root / "references" / scenario.key
            folder.mkdir(parents=True)
            if self.world.store is not None:
                self.world.store.clear()
            undisturbed = type(scenario)(self.world, scenario.index, alone=True)
            self._undisturbed(undisturbed)
            undisturbed.keep(folder)
            self.world.references[scenario.key] = folder
            load_compiled()
        return folder

    def _calls_of(self, scenario: Scenario, phase: Phase, place: str, ops: int) -> int:
        """Number of these calls that the undisturbed phase makes on a place."""
        key = (scenario.key, phase.name, place, ops)
        if key not in self._calls:
            alone = type(scenario)(self.world, scenario.index, alone=True)
            self._calls[key] = self._undisturbed(alone, count=(phase.name, place, ops))
        return self._calls[key]

    # one cycle

    def _cycle(self, scenario: Scenario, seed: str) -> None:
        reference = self._reference(scenario)
        rng = random.Random(seed)
        phases = scenario.phases()
        fault_frac = scenario.faults / (scenario.faults + scenario.kills)
        events: list[tuple[int, Event]] = []
        for _ in range(rng.randrange(3, 8) + 2 * len(phases) - 2):
            number = rng.randrange(len(phases))
            event = scenario.draw(
                rng, fault=rng.random() < fault_frac, places=scenario.places(), several=scenario.several,
                loss=scenario.loss, remote=scenario.remote, library=self._control is not None, stop_s=HANG_S,
                victims=1 + len(phases[number].concurrent),
            )  # fmt: skip
            events.append((number, event))
        for number, event in events:
            if event.ops:  # counted before the cycle begins, as that needs its folder
                self._calls_of(scenario, phases[number], event.place, event.ops)
        scenario.prepare()
        self._failed, complete, attempt = False, True, 0
        last_event = "no event"
        for number, phase in enumerate(phases):
            done, remaining = False, 1.0
            for phase_number, event in events:
                if done or phase_number != number:
                    continue
                fresh = (not scenario.remote and scenario.ranks(attempt) == 1 and event.how in
                         ("SIGKILL", "SIGTERM", "SIGINT") and event.target != "worker"
                         and rng.random() < _NEW_INTERPRETER_FRAC)  # fmt: skip
                complete = complete and not fresh
                last_event = event.describe()
                done, took_frac = self._disturbed(
                    scenario, phase, attempt, event, rng, remaining=remaining, fresh=fresh
                )
                remaining *= max(0.3, 1 - 0.8 * took_frac)  # the next start resumes
                attempt += 1
            if not done:
                self._complete(scenario, phase, attempt, last_event)
                attempt += 1
        if not self._failed:
            for problem in scenario.check(reference, complete=complete):
                self._add_finding(scenario, last_event, problem)

    def _complete(self, scenario: Scenario, phase: Phase, attempt: int, last_event: str) -> None:
        """Start the phase undisturbed: it must succeed."""
        until = time.monotonic() + _LEASE_S
        while True:
            process = self._start(scenario, phase, attempt)
            status = process.wait(scenario.attempt_s)
            if status is None:
                process.dump_stacks()
            survivors = end_leftovers(self._known, grace_s=10.0 if status is not None else 0.0)
            if not (self._refused_by_lease(scenario, status, process.stderr) and time.monotonic() < until):
                break
            time.sleep(1.0)
        problems = problems_of(None, status=status, final=phase.final, stderr=process.stderr,
                               what=f"{phase.name}, started again undisturbed")  # fmt: skip
        problems += [f"{phase.name}: left a process running: {name}" for name in survivors]
        for problem in problems:
            self._add_finding(scenario, last_event, problem, process)

    def _disturbed(
        self, scenario: Scenario, phase: Phase, attempt: int, event: Event, rng: random.Random, *, remaining: float,
        fresh: bool,
    ) -> tuple[bool, float]:  # fmt: skip
        """Start the phase, of which the fraction `remaining` is not done yet, and inject the event.

        Returns whether the phase is done, and the fraction of the expected time that the command took.
        fresh: in a new interpreter instead of a fork.
        """
        until = time.monotonic() + _LEASE_S
        while True:
            disturbed = _Attempt(self, scenario, phase, attempt, event, random.Random(rng.random()),
                                 remaining=remaining, fresh=fresh)  # fmt: skip
            process = disturbed.run()
            if not (self._refused_by_lease(scenario, process.status, process.stderr) and time.monotonic() < until):
                break
            time.sleep(1.0)
        survivors = end_leftovers(self._known, grace_s=10.0 if process.status is not None else 0.0)
        problems = disturbed.problems()
        problems += [f"{phase.name}: left a process running: {name}" for name in survivors]
        self.events.append({
            "scenario": scenario.name, "index": scenario.index, "attempt": attempt, "phase": phase.name,
            "kind": event.kind, "how": event.how, "event": event.describe(), "moment_s": round(disturbed.moment_s, 3),
            "delivered": disturbed.delivered, "ranks": scenario.ranks(attempt), "real": fresh,
            "status": [each.status for each in disturbed.processes],
            "stderr_lines": [len(each.stderr.splitlines()) for each in disturbed.processes],
            "elapsed_s": round(process.elapsed_s, 3),
        })  # fmt: skip
        for problem in problems:
            self._add_finding(scenario, event.describe(), problem, process)
        is_done = process.status == phase.final and not disturbed.is_misled
        return is_done, min(1.0, process.elapsed_s / max(1e-3, disturbed.expected_s))

    @staticmethod
    def _refused_by_lease(scenario: Scenario, status: int | None, stderr: str) -> bool:
        return scenario.remote and status == 2 and "another" in stderr and "writing" in stderr

    def _start(self, scenario: Scenario, phase: Phase, attempt: int, *, fresh: bool = False) -> Process:
        self.starts += 1
        self.new_interpreters += fresh
        command = phase.command(attempt)
        if fresh:
            command = dataclasses.replace(command, new_interpreter=True)
        return self.start_command(scenario, command, attempt, "main")

    def start_command(self, scenario: Scenario, command: Command, attempt: int, name: str) -> Process:
        folder = self.world.root / "output" / name
        shutil.rmtree(folder, ignore_errors=True)
        return start(command, folder, prepare=lambda: scenario.in_process(attempt))

    def _add_finding(self, scenario: Scenario, event: str, problem: str, process: Process | None = None) -> None:
        self._failed = True
        root = f"{Path(__file__).resolve().parents[2]}/"
        module = "python -m tests.soak"
        self.findings.append({
            "scenario": scenario.name, "index": scenario.index, "event": event, "problem": problem,
            "stderr": "" if process is None else process.stderr[-4000:].replace(root, ""),
            "repeat": f"{module} --seed {self.seed} --only {scenario.name} --index {scenario.index}",
        })  # fmt: skip
        print(f"FINDING {scenario.name} {scenario.index}: {problem} (after: {event})", flush=True)

    # for _Attempt

    @property
    def control(self) -> Control | None:
        return self._control

    def expected_time_s(self, scenario: Scenario, phase: Phase, ranks: int, *, fresh: bool) -> float:
        return self._times[scenario.key, phase.name] * _SLOWER[ranks] + (_IMPORTS_S if fresh else 0.0)

    def requests_of(self, scenario: Scenario, phase: Phase) -> int:
        return self._requests.get((scenario.key, phase.name), 0)

    def calls_of(self, scenario: Scenario, phase: Phase, event: Event) -> int:
        return self._calls[scenario.key, phase.name, event.place, event.ops]


class _Attempt:
    """One start of a phase with one event.

    delivered: whether the event met a living process. is_misled: whether the command may have worked in an empty folder
    instead of one that was missing when it started.
    """

    def __init__(
        self, soak: Soak, scenario: Scenario, phase: Phase, attempt: int, event: Event, rng: random.Random, *,
        remaining: float, fresh: bool,
    ) -> None:  # fmt: skip
        self.soak, self.scenario, self.phase, self.attempt = soak, scenario, phase, attempt
        self.event, self.rng, self.fresh, self.remaining = event, rng, fresh, remaining
        self.expected_s = soak.expected_time_s(scenario, phase, scenario.ranks(attempt), fresh=fresh) * remaining
        self.processes: list[Process] = []
        self._phases = [phase]  # of each process
        self.delivered, self.is_misled, self.moment_s = False, False, 0.0
        self._expected = set(event.expected)
        self._problems: list[str] = []
        self._scheduled: list[tuple[float, Callable[[], None]]] = []  # (time of the monotonic clock, action)
        self._restore: Callable[[], None] | None = None  # brings a folder back, resumes processes

    def run(self) -> Process:
        """Run the command and its event to the end; returns the main process."""
        event, soak, scenario = self.event, self.soak, self.scenario
        at = event.at * self.remaining
        self.moment_s = event.at * self.expected_s
        if event.remote:
            assert soak.world.store is not None
            soak.world.store.fail(event.how.removeprefix("s3 "), limit=event.limit, wait_s=event.duration_s,
                                  after=int(at * soak.requests_of(scenario, self.phase)))  # fmt: skip
        elif event.ops:
            self._set_control(int(at * soak.calls_of(scenario, self.phase, event)))
        main = soak._start(scenario, self.phase, self.attempt, fresh=self.fresh)
        self.processes.append(main)
        began = time.monotonic()
        for concurrent in self.phase.concurrent:
            moment = began + self.rng.random() * self.expected_s
            self._scheduled.append((moment, functools.partial(self._start_concurrent, concurrent)))
        if not event.remote and not event.ops and not event.victim:
            self._scheduled.append((began + self.moment_s, self._inject))
        while (self._scheduled and main.poll() is None) or any(process.poll() is None for process in self.processes):
            for action in [each for each in self._scheduled if each[0] <= time.monotonic()]:
                self._scheduled.remove(action)
                action[1]()
            if time.monotonic() - began > scenario.attempt_s:
                for process in self.processes:
                    process.dump_stacks()
                break
            time.sleep(_POLL_S)
        if self._restore is not None:
            self._restore()
        if event.remote and soak.world.store is not None:
            self.delivered = soak.world.store.clear()[1] > 0
        elif event.ops and soak.control is not None:
            self.delivered = soak.control.counts()[1] > 0
            soak.control.clear()
        return main

    def problems(self) -> list[str]:
        problems = list(self._problems)
        for number, (phase, process) in enumerate(zip(self._phases, self.processes, strict=True)):
            is_signal = self.event.how in ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGSTOP")
            is_hit = self.delivered and (not is_signal or number == self.event.victim)
            event = dataclasses.replace(self.event, expected=frozenset(self._expected)) if is_hit else None
            final = phase.final if phase.refused is None or process.status != phase.refused else phase.refused
            problems += problems_of(event, status=process.status, final=final, stderr=process.stderr, what=phase.name)
        return problems

    def _set_control(self, after: int) -> None:
        event, control = self.event, self.soak.control
        assert control is not None
        path = self.scenario.places()[event.place].path
        if event.kind == "kill":
            control.kill(path, event.ops, after=after, group=event.target == "all")
        elif event.error:
            control.fail(path, event.ops, error=event.error, after=after, limit=event.limit)
        elif event.how.startswith("slow"):
            control.slow(path, event.ops, wait_s=event.duration_s, after=after, limit=event.limit)
        else:
            control.shorten(path, event.ops, after=after, limit=event.limit)

    def _start_concurrent(self, phase: Phase) -> None:
        number, command = len(self.processes), phase.command(self.attempt)
        self._phases.append(phase)
        self.processes.append(self.soak.start_command(self.scenario, command, self.attempt, f"concurrent{number}"))
        if number == self.event.victim:
            self._scheduled.append((time.monotonic() + self.moment_s / 2, self._inject))

    def _inject(self) -> None:
        if self.event.how.startswith("vanish"):
            self._vanish()
        else:
            self._signal()

    def _signal(self) -> None:
        if self.event.victim >= len(self.processes):
            return
        process = self.processes[self.event.victim]
        members = process.members()
        if process.poll() is not None or not members:
            return
        target, several = self.event.target, self.scenario.ranks(self.attempt) > 1
        if target == "main" and several and self.event.how in ("SIGKILL", "SIGSTOP"):
            target = "all"  # why: what remains of a launcher without ranks is torchrun's responsibility
        if target == "worker":
            workers = [pid for pid in members[1:] if _is_fork(pid)]
            if not workers:  # why: it has not begun to convert
                self._scheduled.append((time.monotonic(), self._inject))
                return
            members = [self.rng.choice(workers)]
        elif target == "one" and len(members) > 1:
            members = [self.rng.choice(members[1:])]
        elif target != "all":
            members = [process.pid]
        number = signal.Signals[self.event.how]
        if number == signal.SIGKILL and process.pid in members:
            self._expected |= {-9, 137}
        self.delivered = True
        process.send(number, members)
        if number == signal.SIGKILL and target == "all":
            process.send(number)  # also processes that were forked in the meantime
        if number == signal.SIGSTOP:
            # why not only at that time: helpers of a command that has ended would stay stopped
            self._restore = functools.partial(process.send, signal.SIGCONT, members)
            self._scheduled.append((time.monotonic() + self.event.duration_s, self._restore))

    def _vanish(self) -> None:
        """Take a folder away by renaming it, like a lost mount, and bring it back later."""
        path = self.scenario.places()[self.event.place].path
        hidden = path.with_name(f"{path.name}.away")
        if not path.exists():
            return
        path.rename(hidden)
        if self.event.how.endswith("empty folder"):
            path.mkdir()
        self.delivered = True
        members = self.processes[0].members()

        def restore() -> None:
            self._restore = None
            with contextlib.suppress(OSError):
                path.rmdir()
            if path.exists():
                names = sorted(str(each.relative_to(path)) for each in path.rglob("*"))
                had_started = any(pid in members for pid in _lock_holders(hidden))
                self.is_misled = not had_started
                if had_started and any(name in ("manifest.json", "last.pt") for name in names):
                    self._problems.append(f"{self.event.place}: written while the folder was missing: {names[:5]}")
                shutil.rmtree(path)
            hidden.rename(path)

        self._restore = restore
        if self.event.duration_s:
            restore_at = time.monotonic() + self.event.duration_s
            self._scheduled.append((restore_at, lambda: self._restore and self._restore()))


def _is_fork(pid: int) -> bool:
    """Whether a process is a fork of this one, as prep's workers are, and not multiprocessing's resource tracker."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes() == Path("/proc/self/cmdline").read_bytes()
    return False


def _lock_holders(folder: Path) -> list[int]:
    """Processes named in the lock files below `folder`. A command without a lock may take an empty folder for new."""
    holders = []
    for path in (*folder.rglob("lock"), *folder.rglob(".lock")):
        with contextlib.suppress(OSError, ValueError, KeyError):
            holders.append(int(json.loads(path.read_text())["pid"]))
    return holders
