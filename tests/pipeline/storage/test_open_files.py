"""Opening files: local folders are read in place, bad URLs are explained, and only transient errors are retried."""

from __future__ import annotations

import importlib
import pickle
import sys
from pathlib import Path

import pytest

from resolute.errors import ResoluteError
from resolute.pipeline.storage.base import open_files
from resolute.pipeline.storage.retry import is_final, wait_s
from tests.pipeline.storage.test_remote import TAR, read_everywhere, settings


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
            assert files.prefetch("32/a.tar", 0, 1)
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


def test_the_package_of_a_missing_driver_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    monkeypatch.delitem(importlib.import_module("fsspec.registry")._registry, "s3", raising=False)
    for scheme, package in (("s3", "s3fs"), ("gs", "gcsfs")):
        with pytest.raises(ResoluteError, match=rf"no driver for {scheme}://, got '.*{package}.*', expected its"):
            open_files(f"{scheme}://b/set", cache=settings(tmp_path))
    with pytest.raises(ResoluteError, match="not understood"):
        open_files("nosuch://b/set", cache=settings(tmp_path))


def test_retry_delays_double_with_jitter() -> None:
    for tried, longest in ((1, 0.25), (2, 0.5), (5, 4.0), (30, 20.0)):
        waits = [wait_s(tried, 0.25) for _ in range(200)]
        assert longest / 2 <= min(waits) < longest * 0.55
        assert longest * 0.95 < max(waits) <= longest


def test_only_transient_errors_are_retried() -> None:
    for error in (OSError("reset"), TimeoutError(), ConnectionResetError(104, "x"), ValueError("odd")):
        assert not is_final(error)
    for final in (FileNotFoundError("x"), PermissionError("x"), OSError(22, "bad argument")):
        assert is_final(final)
