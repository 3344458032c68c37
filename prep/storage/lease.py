"""Cross-machine lock on a prefix of an object store: created exclusively, renewed, and checked before every write.

The lock is the newest object in `.prep/lock/`, which are numbered; it records its holder (host, pid, start time) and
its last renewal. A lock that has not been renewed for 60 s counts as abandoned. A contender takes it over by creating
the next number exclusively, so exactly one of any number of contenders succeeds, and then deletes the old one.

Fencing: `Lease.check` runs before an object appears or is removed, in the holder and in its workers. Once the newest
lock is another's, or was not renewed for 50 s, they never write again. Ages are judged by each machine's own clock: if
clocks differ by more than 50 s, a lock may be taken over too early, and its first holder then ends with an error.

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
_clock = time.time


class _Bucket(Protocol):
    """What a lease needs of a store; names are relative to OUT, and only `read` raises `FileNotFoundError`."""

    @property
    def where(self) -> str: ...
    def names(self, folder: str = "") -> list[str]: ...
    def read(self, name: str) -> bytes: ...
    def put(self, name: str, data: bytes) -> None: ...
    def put_new(self, name: str, data: bytes) -> bool: ...  # False: there is one already
    def delete(self, name: str) -> None: ...


class Lease:
    """The lock that this process holds, or whose copy it got by pickling; outside `held`, `check` does nothing."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._path: str | None = None  # of the lock object while it is held
        self._record: dict[str, Any] = {}
        self._checked_s = -float("inf")
        self._lost: str | None = None

    def check(self, store: _Bucket, *, recent_s: float = 0.0) -> None:
        """Raise `StorageError` unless the lock is held; to be called before each write.

        A check less than `recent_s` seconds old is not repeated.
        """
        if self._path is None:
            return
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
    def held(self, store: _Bucket) -> Iterator[None]:
        """Hold the lock for the duration of the block. Raises `ResoluteError` naming the holder if it is taken."""
        self._path = path = self._acquire(store)
        stop = threading.Event()
        thread = threading.Thread(target=self._renew_until, args=(store, stop), daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(_MARGIN_S)  # why a timeout: a store that hangs must not keep the run from ending
            with suppress(ResoluteError):
                if self._is_own(_newest(store, self._folder)):
                    store.delete(path)
            self._path = self._lost = None

    def _acquire(self, store: _Bucket) -> str:
        names = _names(store, self._folder)
        if _age_s(holder := _newest(store, self._folder)) <= _LEASE_S:
            raise _taken(store, holder)
        self._record = json.loads(holder_record()) | {"token": uuid.uuid4().hex, "renewed": _clock()}
        path = f"{self._folder}/{int(names[-1]) + 1 if names else 1:08d}"
        if not store.put_new(path, json.dumps(self._record).encode()):
            raise _taken(store, _newest(store, self._folder))
        for name in names:
            store.delete(f"{self._folder}/{name}")
        return path

    def _renew_until(self, store: _Bucket, stop: threading.Event) -> None:
        while not stop.wait(_RENEW_S):
            # why suppressed: it is retried in 10 s, and `check` reports a lock that has expired
            with suppress(Exception):
                self._renew(store)

    def _renew(self, store: _Bucket) -> None:
        if self._path is None or self._taken_by(store) is not None:
            return
        record, expires_s = {**self._record, "renewed": _clock()}, self._record["renewed"] + _LEASE_S - _MARGIN_S
        store.put(self._path, json.dumps(record).encode())
        if _clock() > expires_s:  # why deleted: it was written too late, and another run may have begun by now
            self._lost = _not_renewed()
            store.delete(self._path)
        self._record = record

    def _taken_by(self, store: _Bucket) -> str | None:
        """None if the lock is this one and was renewed in time; otherwise a description of what is there instead."""
        record = _newest(store, self._folder)
        if self._is_own(record):
            return _not_renewed() if _age_s(record) > _LEASE_S - _MARGIN_S else None
        return f"another prep on {describe_holder(json.dumps(record).encode())}" if record else "no lock there"

    def _is_own(self, record: dict[str, Any]) -> bool:
        return record.get("token") == self._record["token"]


def _names(store: _Bucket, folder: str) -> list[str]:
    """The lock objects, the newest last."""
    return sorted((name for name in store.names(folder) if name.isdecimal()), key=int)


def _newest(store: _Bucket, folder: str) -> dict[str, Any]:
    """The record of the newest lock; {} if there is none, or a malformed one."""
    for name in _names(store, folder)[-1:]:
        with suppress(FileNotFoundError, ValueError):
            record = json.loads(store.read(f"{folder}/{name}"))
            return record if isinstance(record, dict) else {}
    return {}


def _taken(store: _Bucket, record: dict[str, Any]) -> ResoluteError:
    return ResoluteError(
        f"{store.where}: another prep is writing here, got {describe_holder(json.dumps(record).encode())}, last "
        f"renewed {_age_s(record):.0f} s ago, expected no other; wait for it (the lock of a killed run expires after "
        f"{_LEASE_S:.0f} s) or choose another OUT"
    )


def _age_s(record: dict[str, Any]) -> float:
    renewed = record.get("renewed")
    return _clock() - renewed if isinstance(renewed, int | float) else float("inf")


def _not_renewed() -> str:
    return f"no renewal for {_LEASE_S - _MARGIN_S:.0f} s"
