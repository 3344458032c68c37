"""Opening files: a missing driver is explained, any driver of fsspec is read, and short reads are completed."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import fsspec
import pytest

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.storage.open_files import open_files
from resolute.pipeline.storage.read_at import read_at
from tests.conftest import make_photos
from tests.pipeline.storage.test_remote import TAR, read_everywhere, settings
from tests.support.cli import prep


def test_the_package_of_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.delitem(importlib.import_module("fsspec.registry")._registry, "hf", raising=False)
    with pytest.raises(ResoluteError, match=r"no driver for hf://, got '.*huggingface_hub.*', expected its package"):
        open_files("hf://datasets/user/set", cache=settings(tmp_path))
    with pytest.raises(ResoluteError, match="not understood"):
        open_files("nosuch://b/set", cache=settings(tmp_path))
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    for scheme in ("s3", "https"):
        with pytest.raises(ResoluteError, match=r"the package obstore is not installed, .* `pip install obstore`"):
            open_files(f"{scheme}://b/set", cache=settings(tmp_path))


def test_any_driver_of_fsspec_is_read(tmp_path: Path) -> None:
    fs = fsspec.filesystem("memory")
    fs.pipe("/whole-tars/32/a.tar", TAR)
    with open_files("memory://whole-tars", cache=settings(tmp_path)) as files:
        assert files.file_version("32/a.tar") is not None
        assert files.file_version("gone") is None
        read_everywhere(files)


def test_short_reads_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pread(2)` may return fewer bytes than asked for: here half of them, in prep and when a set is opened too."""
    photos = make_photos(tmp_path / "photos", classes=2, each=6)
    (tmp_path / "file").write_bytes(TAR[:1024])
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, nbytes, at: real(fd, -(-nbytes // 2), at))
    with (tmp_path / "file").open("rb") as file:
        for nbytes, offset in ((0, 0), (700, 3), (2000, 0), (10, 1024), (10, 1020)):
            assert read_at(file.fileno(), nbytes, offset) == TAR[:1024][offset : offset + nbytes]
    assert prep(["--src", photos, "--out", tmp_path / "out", "--res", "32", "--workers", "1"]) == 0
    samples = ShardSet.open(tmp_path / "out").splits["train"].samples
    assert len(samples[0 : len(samples)]) == len(samples) > 0
