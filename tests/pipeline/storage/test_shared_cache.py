"""A disk cache shared by several processes, or outliving a set, returns the bytes of the store."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import pytest

from resolute.errors import ResoluteError
from tests import ROOT
from tests.pipeline.storage.test_remote import INDEX, STEP, TAR, manifest, opened, s3_server, url  # noqa: F401
from tests.support.s3 import FaultyProxy, proxy  # noqa: F401


def test_a_changed_set_is_never_read_from_old_chunks(tmp_path: Path, url: str, proxy: FaultyProxy) -> None:  # noqa: F811
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


READ_ALL = """
import random, sys, time
from pathlib import Path
from resolute.pipeline.storage.disk_cache import CacheSettings
from resolute.pipeline.storage.base import open_files
url, folder, step, total, seed = sys.argv[1:]
step, total = int(step), int(total)
settings = CacheSettings(folder=Path(folder), limit_bytes=4 << 20, chunk_bytes=step, stall_s=30.0)
with open_files(url, cache=settings) as files:
    files.local("manifest.json"), files.local("index/a.npy")
    print("ready", flush=True)
    sys.stdin.readline()
    order = list(range(0, total, step))
    random.Random(int(seed)).shuffle(order)
    for at in order:
        sys.stdout.write(files.read("32/a.tar", at, min(step, total - at)).hex() + f" {at}\\n")
"""


def reading(where: str, folder: Path, seed: int) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", READ_ALL, where, str(folder), str(STEP), str(len(TAR)), str(seed)]
    return subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            text=True, env=os.environ)  # fmt: skip


def test_processes_share_chunks_and_survive_the_kill_of_one_of_them(
    tmp_path: Path, url: str, proxy: FaultyProxy  # noqa: F811
) -> None:
    proxy.faults.append("hang")  # the first request of any process
    doomed = reading(url, tmp_path, 0)
    assert doomed.stdin
    assert doomed.stdout
    proxy.faults.clear()
    assert doomed.stdout.readline() == "ready\n"
    asked = dict(proxy.requests)
    proxy.faults.append("hang")
    doomed.stdin.write("\n")
    doomed.stdin.flush()
    while len(proxy.requests) == len(asked):
        time.sleep(0.01)
    doomed.kill()  # in the middle of a fetch
    doomed.communicate()
    (lost,) = set(proxy.requests) - set(asked)
    both = [reading(url, tmp_path, seed) for seed in (1, 2)]
    for process in both:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
    proxy.slow_bytes_per_s = 1 << 20
    for process in both:
        out, _ = process.communicate("\n", timeout=60)
        assert process.returncode == 0
        parts = dict(reversed(line.split()) for line in out.splitlines())
        assert b"".join(bytes.fromhex(parts[str(at)]) for at in range(0, len(TAR), STEP)) == TAR
    assert {key: n for key, n in proxy.requests.items() if n > 1} == {lost: 2}
    assert not list(tmp_path.rglob("*.part"))
