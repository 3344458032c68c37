"""A disk cache that outlives a set, or whose files are damaged, returns the bytes of the store."""

from __future__ import annotations

import os
from pathlib import Path

import fsspec
import pytest

from resolute.errors import FileEndsEarly, ResoluteError
from tests.pipeline.storage.test_remote import INDEX, TAR, manifest, opened, s3_server, url  # noqa: F401
from tests.support.s3 import FaultyProxy, proxy  # noqa: F401


def test_a_changed_set_is_never_read_from_old_files(tmp_path: Path, url: str, proxy: FaultyProxy) -> None:  # noqa: F811
    fs, new = fsspec.filesystem("s3"), TAR[::-1]  # as long as the old one
    with opened(url, tmp_path) as files:
        assert files.read("32/a.tar", 0, 9) == TAR[:9]  # known by its ETag
        files.local("manifest.json")
        assert files.read("32/a.tar", 0, 9) == TAR[:9]  # known by its SHA-256
    fs.pipe(f"{url}/32/a.tar", new)
    with opened(url, tmp_path) as files:
        assert files.read("32/a.tar", 0, 9) == new[:9]
        files.local("manifest.json")
        # the old manifest still lists the old tar: the reader detects wrong CRCs and requests fresh bytes
        assert files.read("32/a.tar", 0, 9) == TAR[:9]
        assert files.read("32/a.tar", 0, 9, fresh=True) == new[:9]
        changed = manifest({"32/a.tar": new, "index/a.npy": INDEX})
        fs.pipe(f"{url}/manifest.json", changed)
        assert files.local("manifest.json").read_bytes() == changed
        assert files.read("32/a.tar", 0, 9) == new[:9]
        fs.pipe(f"{url}/index/a.npy", INDEX[::-1])
        with pytest.raises(ResoluteError, match="not what the set's manifest lists"):
            files.local("index/a.npy")


def test_a_tar_of_another_size_than_the_manifest_lists_is_too_short_not_unavailable(tmp_path: Path, url: str) -> None:  # noqa: F811
    fsspec.filesystem("s3").pipe(f"{url}/32/a.tar", TAR[:-100])  # uploaded incompletely
    with opened(url, tmp_path) as files:
        files.local("manifest.json")
        words = rf"another size than the set's manifest lists, got {len(TAR) - 100} bytes, expected {len(TAR)}"
        for fresh in (False, True):
            with pytest.raises(FileEndsEarly, match=words):
                files.read("32/a.tar", 0, 9, fresh=fresh)


def test_other_bytes_are_not_kept_as_those_that_the_manifest_lists(tmp_path: Path, url: str) -> None:  # noqa: F811
    fs = fsspec.filesystem("s3")
    fs.pipe(f"{url}/32/a.tar", TAR[::-1])
    with opened(url, tmp_path) as files:
        files.local("manifest.json")
        assert files.read("32/a.tar", 0, 9) == TAR[::-1][:9]  # its reader finds wrong CRCs
    fs.pipe(f"{url}/32/a.tar", TAR)
    with opened(url, tmp_path) as files:
        files.local("manifest.json")
        assert files.read("32/a.tar", 0, 9) == TAR[:9]


def test_damaged_cached_files_are_downloaded_again(tmp_path: Path, url: str, proxy: FaultyProxy) -> None:  # noqa: F811
    """A copy that was downloaded afresh is trusted as long as it is that copy."""
    with opened(url, tmp_path) as files:
        files.local("manifest.json")
        for _ in range(2):
            assert files.read("32/a.tar", 0, 9) == TAR[:9]
            (path,) = tmp_path.rglob("*.tar")
            before = path.stat().st_mtime_ns
            path.write_bytes(bytes(len(TAR)))  # in place
            os.utime(path, ns=(before, before))  # as by a bad disk
            assert files.read("32/a.tar", 0, 9) == bytes(9)  # its reader finds wrong CRCs
            assert files.read("32/a.tar", 0, 9, fresh=True) == TAR[:9]
            asked = sum(proxy.requests.values())
            assert files.read("32/a.tar", 0, 9, fresh=True) == TAR[:9]  # as for each sample of a damaged file
            assert sum(proxy.requests.values()) == asked
            (path,) = tmp_path.rglob("*.tar")
            path.unlink()  # evicted
            files.release()
        files.read("32/a.tar", 0, 9)
        (path,) = tmp_path.rglob("*.tar")
        os.truncate(path, 5)
        assert files.read("32/a.tar", 0, 9) == TAR[:9]
