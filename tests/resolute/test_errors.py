"""Credentials are stripped from messages; unavailable storage is distinguished from damage."""

from __future__ import annotations

import errno

import pytest

from resolute.errors import as_typed, is_unavailable, strip_credentials


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://user:secret@host/a.jpg: not there", "https://host/a.jpg: not there"),
        ("s3://KEY:SECRET@bucket/x and gs://b/y", "s3://bucket/x and gs://b/y"),
        (
            "https://h/a?X-Amz-Signature=abc&X-Amz-Credential=k/2&part=1",
            "https://h/a?X-Amz-Signature=***&X-Amz-Credential=***&part=1",
        ),
        ("https://h/a?sig=a:b=: not there, got no.", "https://h/a?sig=***: not there, got no."),
        ("photos/a@b.jpg: no image", "photos/a@b.jpg: no image"),
        ("https://h/design=1/a.jpg?id=3", "https://h/design=1/a.jpg?id=3"),
    ],
)
def test_only_credentials_are_stripped(text: str, expected: str) -> None:
    assert strip_credentials(text) == expected


def test_storage_errors_count_as_unavailable_and_impossible_paths_do_not() -> None:
    for number in (errno.EIO, errno.ESTALE, errno.EACCES, errno.ENOENT, errno.ETIMEDOUT, errno.EINTR):
        assert is_unavailable(OSError(number, ""))
    for number in (errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
        assert not is_unavailable(OSError(number, ""))


def test_a_command_in_a_message_is_that_of_make_if_make_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "shards", {"SRC": "my photos", "val_labels": "a.csv"}
    assert as_typed(*words) == "`resolute shards --src='my photos' --val-labels=a.csv`"
    monkeypatch.setenv("MAKELEVEL", "1")
    assert as_typed(*words) == "`make shards SRC='my photos' VAL_LABELS=a.csv`"
