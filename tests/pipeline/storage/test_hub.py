"""Sets on the Hugging Face Hub: every byte or a clear error, as from other stores."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from resolute.errors import Missing, ResoluteError, StorageError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.storage.cache import CacheSettings
from resolute.pipeline.storage.open_files import open_files
from tests.pipeline.storage.test_remote import SET, opened, read_everywhere
from tests.support.hub import TOKEN, Hub, hub_at, running_hub
from tests.support.s3 import FaultyProxy


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """A Hub with the repository user/set."""
    (tmp_path / "server").mkdir()
    with running_hub(tmp_path / "server") as hub:
        for name, data in SET.items():
            path = hub.root / "user" / "set" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        yield hub


@pytest.fixture
def hub_proxy(hub: Hub) -> Iterator[FaultyProxy]:
    """A proxy in front of the Hub; the client's own retries do not wait."""
    faulty_proxy = FaultyProxy(hub.address.partition("://")[2])
    with (
        hub_at(f"http://{faulty_proxy.address}"),
        mock.patch("huggingface_hub.utils._http.time", mock.Mock(wraps=time, sleep=lambda seconds: None)),
    ):
        yield faulty_proxy
    faulty_proxy.close()


URL = "hf://datasets/user/set"


def test_every_byte_of_a_set_on_a_failing_hub_is_read(tmp_path: Path, hub_proxy: FaultyProxy) -> None:
    hub_proxy.each = [503, 429, "cut", "short", "drop"]
    with opened(URL, tmp_path, tries=8, stall_s=5.0) as files:
        assert files.local("manifest.json").read_bytes() == SET["manifest.json"]
        assert files.file_version("32/none.tar") is None
        read_everywhere(files)


def test_a_revision_is_read_and_a_changed_file_is_seen(tmp_path: Path, hub: Hub) -> None:
    hub.add(hub.root / "user" / "set", "user/set@v1")
    with opened(URL, tmp_path, stall_s=5.0) as files, opened(f"{URL}@v1", tmp_path) as old:
        before = files.file_version("32/a.tar")
        (hub.root / "user" / "set" / "32" / "a.tar").write_bytes(b"changed")
        after = files.file_version("32/a.tar")
        assert before is not None
        assert after is not None
        assert after[0] == 7
        assert after[1] != before[1]
        assert old.file_version("32/a.tar") == before
    with opened(f"{URL}@v2", tmp_path) as files:
        assert files.file_version("32/a.tar") is None


@pytest.mark.parametrize(
    ("status", "error", "words"),
    [
        (403, StorageError, "access is refused, got 'HTTP status 403'"),
        (404, Missing, "not found, expected a file"),
        (503, StorageError, "cannot be read, got 'HTTP status 503' after 2 tries or 40 s"),
    ],
)
def test_an_error_of_the_hub_is_reported_and_asked_for_again_only_if_it_may_change(
    tmp_path: Path, hub_proxy: FaultyProxy, status: int, error: type[Exception], words: str
) -> None:
    with opened(URL, tmp_path, tries=2, stall_s=20.0) as files:
        files.local("manifest.json")
        hub_proxy.requests.clear()
        hub_proxy.always = status
        with pytest.raises(error, match=words):
            files.read("32/a.tar", 0, 1)
        assert (sum(hub_proxy.requests.values()) > 1) == (status == 503)


def test_a_private_set_needs_the_token_which_no_message_shows(
    tmp_path: Path, hub: Hub, shard_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, cache = hub.add(shard_root, "user/private"), CacheSettings(folder=tmp_path / "cache", tries=2)
    hub.handler.token = TOKEN
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    opened_set = ShardSet.open(url, files=open_files(url, cache=cache))
    assert len(opened_set.splits["train"]) == 75
    cached = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert cached
    assert not any(TOKEN.encode() in path.read_bytes() for path in cached)
    for token in (TOKEN + "x", ""):
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(ResoluteError, match=r"manifest\.json: access is refused, got 'HTTP status 401'") as caught:
            ShardSet.open(url, files=open_files(url, cache=cache))
        assert TOKEN not in str(caught.value)
