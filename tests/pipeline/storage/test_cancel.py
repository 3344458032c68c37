"""Scopes of reads: cancelled by their owner, alone or with those within them."""

from __future__ import annotations

from unittest.mock import Mock

from resolute.pipeline.storage.cancel import CancelScope


def test_a_scope_is_cancelled_with_its_parent_and_not_with_others() -> None:
    parent = CancelScope()
    one, other = parent.child(), parent.child()
    one.cancel()
    assert (parent.cancelled(), one.cancelled(), other.cancelled()) == (False, True, False)
    parent.cancel()
    assert other.wait(0)
    assert parent.child().cancelled()


def test_requests_are_ended_only_while_they_run() -> None:
    scope, ended, running, late = CancelScope(), Mock(), Mock(), Mock()
    with scope.ending(ended):
        pass
    with scope.ending(running):
        scope.cancel()
    with scope.ending(late):
        late.assert_called_once_with()
    running.assert_called_once_with()
    ended.assert_not_called()
