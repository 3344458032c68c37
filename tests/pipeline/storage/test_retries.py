"""Repeated reads: after errors that may pass, as often as planned, until they are cancelled."""

from __future__ import annotations

import time
from unittest.mock import Mock

import pytest

from resolute.errors import Interrupted
from resolute.pipeline.storage.cancel import CancelScope
from resolute.pipeline.storage.retries import backoff, with_retries


def is_timeout(error: Exception) -> bool:
    return isinstance(error, TimeoutError)


def test_a_read_is_repeated_after_errors_that_may_pass_and_the_last_one_is_raised() -> None:
    work = Mock(side_effect=[TimeoutError(), TimeoutError(), "answer"])
    assert with_retries(work, waits_s=(0.0, 0.0), may_pass=is_timeout) == "answer"
    last = TimeoutError("last")
    work = Mock(side_effect=[TimeoutError(), last])
    with pytest.raises(TimeoutError) as error:
        with_retries(work, waits_s=(0.0,), may_pass=is_timeout)
    assert error.value is last
    work = Mock(side_effect=[KeyError(), "never"])
    with pytest.raises(KeyError):
        with_retries(work, waits_s=(0.0,), may_pass=is_timeout)
    assert work.call_count == 1


def test_a_wait_ends_with_its_scope() -> None:
    scope = CancelScope()

    def work() -> None:
        scope.cancel()
        raise TimeoutError

    began = time.monotonic()
    with pytest.raises(Interrupted, match=r"a\.tar: the read was interrupted"):
        with_retries(work, waits_s=(60.0,), may_pass=is_timeout, scope=scope, where="a.tar")
    assert time.monotonic() - began < 30


def test_waits_grow_up_to_a_limit() -> None:
    waits = list(backoff(12, 0.5))
    assert len(waits) == 11
    assert all(min(0.5 * 2**n, 20) / 2 <= wait <= min(0.5 * 2**n, 20) for n, wait in enumerate(waits))
