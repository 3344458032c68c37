"""Opening files: local folders are read in place, bad URLs are explained, and only transient errors are retried."""

from __future__ import annotations

import errno
import importlib
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import fsspec
import pytest

from resolute.errors import Interrupted, ResoluteError, StorageError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.storage.base import open_files
from resolute.pipeline.storage.local import retry_local
from resolute.pipeline.storage.read_at import read_at
from tests import ROOT
from tests.conftest import make_photos
from tests.pipeline.storage.test_remote import TAR, read_everywhere, settings
from tests.support.cli import prep


def test_a_folder_is_read_in_place(tmp_path: Path) -> None:
    (tmp_path / "32").mkdir()
    (tmp_path / "32" / "a.tar").write_bytes(TAR)
    for root in (tmp_path, f"file://{tmp_path}"):
        with open_files(root) as files:
            assert not files.remote
            assert files.size("32/a.tar") == len(TAR)
            assert files.size("32/gone.tar") is None
            assert files.size("32/a.tar/below") is None
            assert files.local("32/a.tar") == tmp_path / "32" / "a.tar"
            assert files.where("32/a.tar") == str(tmp_path / "32" / "a.tar")
            assert files.prefetch("32/a.tar")
            read_everywhere(files)
            with pytest.raises(FileNotFoundError):
                files.local("gone")
            with pytest.raises(ResoluteError, match=r"a\.tar: ends too early, got 7 bytes at offset .*, expected 8"):
                files.read("32/a.tar", len(TAR) - 7, 8)
            with pytest.raises(ResoluteError, match="gone: not found, expected a file of the set"):
                files.read("gone", 0, 8)
            assert pickle.loads(pickle.dumps(files)).root == files.root
    with pytest.raises(ResoluteError, match="got a cache for a folder"):
        open_files(tmp_path, cache=settings(tmp_path))


def test_the_package_of_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.delitem(importlib.import_module("fsspec.registry")._registry, "hf", raising=False)
    with pytest.raises(ResoluteError, match=r"no driver for hf://, got '.*huggingface_hub.*', expected its package"):
        open_files("hf://datasets/user/set", cache=settings(tmp_path))
    with pytest.raises(ResoluteError, match="not understood"):
        open_files("nosuch://b/set", cache=settings(tmp_path))
    with pytest.raises(ResoluteError, match=r"not understood, got '.*Account must be specified'"):
        open_files("az://container/set", cache=settings(tmp_path))
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    for scheme in ("s3", "https"):
        with pytest.raises(ResoluteError, match=r"the package obstore is not installed, .* `pip install obstore`"):
            open_files(f"{scheme}://b/set", cache=settings(tmp_path))


def test_only_transient_errors_of_a_disk_are_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resolute.pipeline.storage.local._FIRST_WAIT_S", 0.001)
    broken, refused = OSError(errno.EIO, "broken"), PermissionError(errno.EACCES, "denied")
    assert retry_local(Mock(side_effect=[broken, broken, b"x"]), "a") == b"x"
    with pytest.raises(StorageError, match="a: access is refused"):
        retry_local(Mock(side_effect=[refused, b"x"]), "a")
    with pytest.raises(StorageError, match="a: cannot be read, got 'broken' at the last of 10 tries"):
        retry_local(Mock(side_effect=broken), "a")
    (stop := threading.Event()).set()
    with pytest.raises(Interrupted):
        retry_local(Mock(side_effect=broken), "a", stop=stop)


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


def test_submitted_tasks_never_keep_a_process_from_ending() -> None:
    code = """
import threading, time
from resolute.pipeline.storage.base import open_files
from resolute.pipeline.storage.threads import DaemonPool
pool = DaemonPool(2, name="pool", files=open_files("."))
begun = threading.Event()
for _ in range(100):
    pool.submit(lambda: (begun.set(), time.sleep(600)))
begun.wait()
print("end", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          timeout=60, check=True)  # fmt: skip
    assert done.stdout == "end\n"
