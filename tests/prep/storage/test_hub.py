"""Photos and sets on the Hugging Face Hub, and URLs that no installed driver knows."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from resolute.errors import ResoluteError, StorageError
from resolute.prep.sources.fetch import fetch_many
from resolute.prep.sources.image_ref import UNSEEN, ByteRange
from resolute.prep.storage.output import open_store
from tests.support.cli import verify
from tests.support.hub import TOKEN, Hub
from tests.support.source_formats import (
    assert_same_images,
    jpeg,
    list_source,
    make_tree,
    pack,
    pack_parquet,
    pack_samples,
)
from tests.support.trees import tree

Prep = Callable[..., Any]


@pytest.mark.slow
def test_photos_are_read_from_the_hub(tmp_path: Path, work: Path, hub: Hub) -> None:
    """Every format from a store: tests/prep/sources/test_remote.py."""
    files = make_tree(tmp_path / "repo" / "photos")
    pack(tmp_path / "repo", "zip", files, "photos/")
    samples = [("0.jpg", jpeg(0), {"cls": b"0"}), ("1.jpg", jpeg(1), {"cls": b"1"})]
    pack_samples(tmp_path / "repo" / "x-0.tar", samples)
    pack_parquet(tmp_path / "repo" / "x.parquet", [(jpeg(i), "", i % 2) for i in range(4)], None)
    url = hub.add(tmp_path / "repo", "user/photos")
    for src in ("photos", "p.zip"):
        assert_same_images(list_source(work, f"{url}/{src}"), files)
    for src, images in (("x-*.tar", 2), ("x.parquet", 4)):
        assert len(list_source(work, f"{url}/{src}")) == images
    assert_same_images(list_source(work, f"{hub.add(tmp_path / 'repo', 'user/photos@v1')}/photos"), files)


def test_a_set_cannot_be_written_to_a_repository_that_does_not_exist(hub: Hub) -> None:
    with pytest.raises(ResoluteError, match=r"the store refused the request, got '.*repository not found"):
        open_store("hf://datasets/user/none").write("x", b"")


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


_LOAD = """
import sys, datasets
for streaming in (True, False):
    loaded = datasets.load_dataset("user/set", "48px", split="validation", streaming=streaming)
    print([row["__key__"] for row in loaded], loaded.features["cls"].names, [row["jpg"].size for row in loaded][0])
"""


@pytest.mark.slow
def test_load_dataset_reads_a_set_from_the_hub(hub: Hub, shard_root: Path, tmp_path: Path) -> None:
    hub.add(shard_root, "user/set")
    done = subprocess.run([sys.executable, "-c", _LOAD], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    once, again = done.stdout.splitlines()
    assert once == again
    assert once.count("'0") == 15
    assert "['class0', 'class1', 'class2']" in once


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
        fetch_many([ByteRange(f"{url}/cat/0.jpg", packed=UNSEEN)])
    with pytest.raises(ResoluteError, match="the store refused the request"):
        open_store(url).names()


def test_a_url_without_a_driver_is_one_line_that_names_its_package(
    photos: Path, tmp_path: Path, prep: Prep, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "paramiko", None)
    for url, words in (
        ("sftp://host/x", "no driver for sftp://, got '.*paramiko.*', expected its package"),
        ("nosuch://bucket/x", "not understood, got 'Protocol not known: nosuch', expected a folder or a URL"),
    ):
        for argv in (("--src", url, "--out", tmp_path / "s"), ("--src", photos, "--out", url),
                     ("--src", photos, "--labels", f"{url}.csv", "--out", tmp_path / "s")):  # fmt: skip
            ran = prep(*argv, "--res", "32")
            assert (ran.status, ran.err.count("\n")) == (2, 1), ran.err
            assert re.search(f"{url}.*: {words}", ran.err), ran.err
        assert verify([url]) == 2
        assert re.search(f"{url}: {words}", capfd.readouterr().err)
