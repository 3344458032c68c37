"""A disk cache that outlives a set returns the bytes of the store."""

from __future__ import annotations

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


@pytest.mark.parametrize("length", [0, -100])
def test_a_changed_tar_is_downloaded_anew_once_for_all_processes_that_have_opened_the_set(
    tmp_path: Path,
    url: str,  # noqa: F811
    proxy: FaultyProxy,  # noqa: F811
    length: int,
) -> None:
    """Other bytes of the same length, or fewer; all samples of the tar are damaged, and each is read afresh."""
    new, path = TAR[::-1][: length or None], "/bucket/set/32/a.tar"
    with opened(url, tmp_path) as one, opened(url, tmp_path) as two, opened(url, tmp_path) as three:
        for files in (one, two, three):
            files.local("manifest.json")
        assert two.read("32/a.tar", 0, 9) == TAR[:9]
        fsspec.filesystem("s3").pipe(f"{url}/32/a.tar", new)
        proxy.requests.clear()
        for files in (one, two, one, three, two):
            for offset in (0, 99):
                if length:
                    with pytest.raises(FileEndsEarly):
                        files.read("32/a.tar", offset, 9, fresh=True)
                else:
                    assert files.read("32/a.tar", offset, 9, fresh=True) == new[offset:][:9]
                    assert files.read("32/a.tar", offset, 9) == new[offset:][:9]
            if files is one:
                asked = proxy.requests[path]
        assert proxy.requests[path] == asked <= 4
        fsspec.filesystem("s3").pipe(f"{url}/32/a.tar", TAR)
        with opened(url, tmp_path) as later:
            later.local("manifest.json")
            assert later.read("32/a.tar", 0, 9, fresh=True) == TAR[:9]


def test_a_tar_that_is_damaged_in_the_store_is_downloaded_anew_once_by_all_processes(
    tmp_path: Path,
    url: str,  # noqa: F811
    proxy: FaultyProxy,  # noqa: F811
) -> None:
    """Its bytes are those that the manifest lists: prep stored wrong ones."""
    with opened(url, tmp_path) as one, opened(url, tmp_path) as two:
        for files in (one, two):
            files.local("manifest.json")
            files.read("32/a.tar", 0, 9)
        proxy.requests.clear()
        for _ in range(3):
            for files in (one, two):
                assert files.read("32/a.tar", 0, 9, fresh=True) == TAR[:9]
        assert proxy.requests == {"/bucket/set/32/a.tar": 1}
