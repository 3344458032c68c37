"""Bounded memory of workers: one that converts large files holds one at a time, and reads it when its turn comes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from resolute.prep.convert.batch import Batch, EncodeOptions
from resolute.prep.convert.decode import Reject
from resolute.prep.run import worker
from resolute.prep.sources.fetch import fetch_many
from resolute.prep.sources.image_ref import ByteRange
from tests import ROOT

# A process of its own, as `serve` changes signals; getrusage's peak would be that of its parent, if that is larger.
WORKER = """
import json, sys
from resolute.prep.run import worker
from resolute.prep.convert.batch import Batch, EncodeOptions
from resolute.prep.sources.image_ref import ByteRange
def peak_mib():
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))) >> 10
class Connection:
    def __init__(self, task):
        self.tasks, self.results = [task] * 2, []
    def recv(self):
        if not self.tasks: raise EOFError
        return len(self.tasks), EncodeOptions(quality=90, label_digits=1), None, self.tasks.pop()
    def send(self, answer):
        self.results.append(answer[1])
class Current: value = -1
byte_ranges = tuple(ByteRange(path) for path in sys.argv[1:])
conn = Connection(Batch(first_key=0, byte_ranges=byte_ranges, labels=(0,) * 16, short_sides=(16,)))
before = peak_mib()
worker.serve(conn, Current())
reasons = [reason for chunk in conn.results for _, reason in chunk.rejects]
print(json.dumps({"MiB": peak_mib() - before, "reasons": reasons}))
"""


@pytest.mark.slow
def test_a_worker_holds_one_large_file_at_a_time(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.jpg" for i in range(16)]
    for path in paths:
        path.touch()
        os.truncate(path, 100 << 20)
    done = subprocess.run(
        [sys.executable, "-c", WORKER, *map(str, paths)], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-600:]
    report = json.loads(done.stdout)
    assert report["reasons"] == ["not an image"] * 32
    assert report["MiB"] < 250  # and not 32 times 100 MiB


def test_slow_storage_is_not_counted_as_a_hanging_decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at: list[int] = []
    current = [-2]

    def fetch(places: Sequence[ByteRange], **options: int) -> list[bytes | Reject | None]:
        if options:  # ahead of their turn
            return fetch_many(places, **options)
        at.append(current[-1])
        return [Reject("seen")]

    (tmp_path / "a.jpg").touch()
    os.truncate(tmp_path / "a.jpg", worker._AHEAD_BYTES + 1)
    monkeypatch.setattr(worker, "fetch_many", fetch)
    places = (ByteRange(str(tmp_path / "a.jpg")),) * 2
    task = Batch(first_key=0, byte_ranges=places, labels=(0, 0), short_sides=())
    chunk = worker.convert(EncodeOptions(quality=90, label_digits=1), task, current.append)
    assert at == [-1, -1]
    assert chunk.rejects == ((0, "seen"), (1, "seen"))
