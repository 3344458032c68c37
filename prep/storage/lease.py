"""Cross-machine lock on a prefix of an object store: created exclusively, renewed, and checked before every write.

The lock is the object `.prep/lock/N`, which records its holder (host, pid, start time) and its last renewal. A lock
that has not been renewed for 60 s counts as abandoned. A contender takes it over by creating `.prep/lock/N+1`
exclusively, so exactly one of any number of contenders succeeds, and then deletes the old one.

Fencing: `Lease.check` runs before an object appears or is removed. A holder that failed to renew in time, or whose lock
object is gone or replaced, never writes again. Contenders judge a lock's age by their own clocks: if clocks differ by
more than 50 s, a lock may be taken over too early, and its first holder then ends with an error.

"Exclusively" means `If-None-Match: *` on S3 and the driver's `mode="create"` elsewhere (gs, az: the same). On a store
that ignores it, two runs that start at the same instant may both begin; the one that wrote the lock object first then
stops at its next check, before it makes another object appear.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from resolute.errors import ResoluteError, StorageError
from resolute.lock import describe_holder, holder_record

__all__ = ["Lease"]

_LEASE_S = 60.0  # a lock that was renewed longer ago counts as abandoned
_MARGIN_S = 10.0  # the holder stops writing this long before its lock expires
_RENEW_S = 10.0
_CONTENTIONS = 8  # attempts before giving up when several runs start at once


class LockStore(Protocol):
    """The store operations that a lease needs; none of them checks the lease. All raise `ResoluteError` on failure."""

    @property
    def where(self) -> str: ...
    def names(self, folder: str = "") -> list[str]: ...
    def read(self, name: str) -> bytes: ...  # raises FileNotFoundError
    def put(self, name: str, data: bytes) -> None: ...
    def put_new(self, name: str, data: bytes) -> bool: ...  # False if the object exists
    def delete(self, name: str) -> None: ...


class Lease:
    """State of the lock that this process holds; outside `held`, `check` does nothing.

    A pickled copy, in a worker process or on another machine, can check the lock but not renew it. Whether the holder
    has failed to, it judges by the time in the lock object.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._name: str | None = None  # name of the lock object while it is held
        self._record: dict[str, Any] = {}
        self._valid_until_s: float | None = None  # by `_clock`; None in a copy
        self._checked_s = -float("inf")
        self._lost: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_valid_until_s": None, "_checked_s": -float("inf")}

    def check(self, store: LockStore, *, recent_s: float = 0.0) -> None:
        """Raise `StorageError` unless the lock is held; to be called before each write.

        A check less than `recent_s` seconds old is not repeated.
        """
        if self._name is None:
            return
        if self._lost is None and self._valid_until_s is not None and _clock() > self._valid_until_s:
            self._lost = _not_renewed()
        if self._lost is None and _clock() - self._checked_s >= recent_s:
            started_at = _clock()
            self._lost = self._taken_by(store)
            self._checked_s = started_at
        if self._lost is not None:
            raise StorageError(
                f"{store.where}: this run has lost its lock on OUT, got {self._lost}, expected to be the only writer; "
                "nothing more is written, run the same command again"
            )

    @contextmanager
    def held(self, store: LockStore) -> Iterator[None]:
        """Hold the lock for the duration of the block. Raises `ResoluteError` naming the holder if it is taken."""
        self._record = json.loads(holder_record()) | {"token": uuid.uuid4().hex}
        self._acquire(store)
        stop = threading.Event()
        thread = threading.Thread(target=self._renew_until, args=(store, stop), daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(_MARGIN_S)  # why a timeout: a store that hangs must not keep the run from ending
            with suppress(ResoluteError, FileNotFoundError):
                if self._taken_by(store) is None:
                    store.delete(f"{self._folder}/{self._name}")
            self._name = self._lost = None

    def _acquire(self, store: LockStore) -> None:
        for _ in range(_CONTENTIONS):
            names = self._names(store)
            self._refuse_live(store, names)
            own_name = f"{int(names[-1]) + 1 if names else 1:08d}"
            started_at = _clock()
            if not store.put_new(f"{self._folder}/{own_name}", self._renewed()):
                continue
            # why: since the listing another run may have taken and released the lock, which restarts the numbers
            if not set(self._names(store)) <= {*names, own_name}:
                store.delete(f"{self._folder}/{own_name}")
                continue
            for name in names:
                store.delete(f"{self._folder}/{name}")
            self._name, self._valid_until_s = own_name, started_at + _LEASE_S - _MARGIN_S
            return
        raise _taken(store, "several contenders")

    def _refuse_live(self, store: LockStore, names: list[str]) -> None:
        """Raise `ResoluteError` if a lock in `names` has not expired."""
        for name in names:
            record = _read(store, f"{self._folder}/{name}")
            if record is not None and not _expired(record):
                holder = describe_holder(json.dumps(record).encode())
                raise _taken(store, f"{holder}, last renewed {_age_s(record):.0f} s ago")

    def _renew_until(self, store: LockStore, stop: threading.Event) -> None:
        while self._lost is None and not stop.wait(_RENEW_S):
            # why suppressed: it is retried in 10 s, and `check` reports a lock that has expired
            with suppress(Exception):
                self._renew(store)

    def _renew(self, store: LockStore) -> None:
        started_at = _clock()
        lost = self._taken_by(store)
        if lost is None and self._names(store)[-1:] != [self._name]:
            lost = "a newer lock beside it"
        if lost is None:
            store.put(f"{self._folder}/{self._name}", self._renewed())
            assert self._valid_until_s is not None
            if _clock() <= self._valid_until_s:
                self._valid_until_s = started_at + _LEASE_S - _MARGIN_S
                return
            # why deleted: it was written too late, and another run may hold the lock by now
            lost = _not_renewed()
            store.delete(f"{self._folder}/{self._name}")
        self._lost = lost

    def _taken_by(self, store: LockStore) -> str | None:
        """None if the lock object is there and ours; otherwise a description of the new holder, or of the failure."""
        record = _read(store, f"{self._folder}/{self._name}")
        if record is not None and record.get("token") == self._record["token"]:
            is_stale = self._valid_until_s is None and _age_s(record) > _LEASE_S - _MARGIN_S
            return _not_renewed() if is_stale else None
        for name in reversed(self._names(store)):
            record = record or _read(store, f"{self._folder}/{name}")
        return f"another prep on {describe_holder(json.dumps(record).encode())}" if record else "no lock there"

    def _names(self, store: LockStore) -> list[str]:
        """The locks, the newest last."""
        return sorted((name for name in store.names(self._folder) if name.isdecimal()), key=int)

    def _renewed(self) -> bytes:
        return json.dumps({**self._record, "renewed": time.time()}).encode()


def _taken(store: LockStore, holder: str) -> ResoluteError:
    return ResoluteError(
        f"{store.where}: another prep is writing here, got {holder}, expected no other; wait for it (the lock of "
        f"a killed run expires after {_LEASE_S:.0f} s) or choose another OUT"
    )


def _read(store: LockStore, name: str) -> dict[str, Any] | None:
    """A lock's record; None if the object is gone, {} if it is malformed."""
    try:
        record = json.loads(store.read(name))
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _age_s(record: dict[str, Any]) -> float:
    renewed = record.get("renewed")
    return time.time() - renewed if isinstance(renewed, int | float) else float("inf")


def _expired(record: dict[str, Any]) -> bool:
    return _age_s(record) > _LEASE_S


def _not_renewed() -> str:
    return f"no renewal for {_LEASE_S - _MARGIN_S:.0f} s"


def _clock() -> float:
    """Monotonic seconds, which also count while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
