"""Photos and sets on the Hugging Face Hub."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from resolute.errors import ResoluteError, StorageError
from resolute.prep.sources.fetch import fetch_many
from resolute.prep.sources.image_ref import UNSEEN, ByteRange
from resolute.prep.storage.output import open_output
from tests.support.hub import TOKEN, Hub
from tests.support.source_formats import make_tree
from tests.support.trees import tree

Prep = Callable[..., Any]


def test_a_set_cannot_be_written_to_a_repository_that_does_not_exist(hub: Hub) -> None:
    with pytest.raises(ResoluteError, match=r"the store refused the request, got '.*repository not found"):
        open_output("hf://datasets/user/none").write("x", b"")


@pytest.mark.slow
def test_a_set_on_the_hub_from_photos_on_the_hub_equals_the_local_set(
    hub: Hub, photos: Path, tmp_path: Path, prep: Prep
) -> None:
    for path in [*photos.rglob("*.JPEG")]:  # half of them will do
        path.unlink()
    src, argv = hub.add(photos, "user/photos"), ("--res", "32", "--shard-samples", 20)
    (hub.root / "user" / "set").mkdir()
    (hub.root / "user" / "set" / ".gitattributes").write_text("*.tar filter=lfs\n")
    out, stored = "hf://datasets/user/set/shards", hub.root / "user" / "set" / "shards"
    ran = prep("--src", src, "--out", out, *argv)
    assert ran.status == 0, ran.err
    assert prep("--src", photos, "--out", tmp_path / "s", *argv).status == 0
    assert tree(stored) == tree(tmp_path / "s")
    assert "already there" in prep("--src", src, "--out", out, *argv).out
    # why a process of its own: workers of this one may know the environment before the Hub
    command = [sys.executable, "-m", "resolute", "verify", "--workers", "1", out]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ": sound, 30 samples, " in ran.stdout


@pytest.mark.slow
def test_the_token_is_neither_printed_nor_written(
    hub: Hub, photos: Path, tmp_path: Path, prep: Prep, monkeypatch: pytest.MonkeyPatch
) -> None:
    src, argv = hub.add(photos, "user/photos"), ("--res", "32", "--shard-samples", 20)
    hub.handler.token = TOKEN
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    ran = [prep("--src", src, "--out", tmp_path / "s", *argv)]
    assert ran[0].status == 0, ran[0].err
    monkeypatch.setenv("HF_TOKEN", TOKEN[::-1])
    ran += [prep("--src", src, "--out", out, *argv) for out in (tmp_path / "t", "hf://datasets/user/photos/set")]
    for refused in ran[1:]:
        assert (refused.status, refused.err.count("\n")) == (2, 1), refused.err
    for path in (tmp_path / "s").rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes()
    for secret in (TOKEN, TOKEN[::-1]):
        assert all(secret not in each.out + each.err for each in ran)


@pytest.mark.parametrize("status", [401, 503])
def test_a_hub_that_refuses_or_fails_rejects_no_photo_and_hides_no_set(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    make_tree(tmp_path / "repo")
    url = hub.add(tmp_path / "repo", "user/photos")
    monkeypatch.setattr("resolute.prep.sources.fetch._REMOTE_WAITS_S", (0.0,))
    monkeypatch.setattr("huggingface_hub.utils._http._DEFAULT_RETRY_ON_STATUS_CODES", ())
    hub.handler.status = status
    with pytest.raises(StorageError, match=rf"cannot be fetched, got 'HTTP status {status}' 2 times"):
        fetch_many([ByteRange(f"{url}/cat/0.jpg", stored_as=UNSEEN)])
    with pytest.raises(ResoluteError, match="the store refused the request"):
        open_output(url).names()
