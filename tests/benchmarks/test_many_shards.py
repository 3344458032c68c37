"""Requests of prep's jobs on an object store: a job's do not grow with the set, and plan files are deleted at once."""

from __future__ import annotations

import json
from pathlib import Path

from resolute.benchmarks.prep.many_shards import SlowStore, main


def test_a_job_makes_no_more_requests_in_a_larger_set(tmp_path: Path) -> None:
    requests = []
    for shards in (110, 220):
        SlowStore.objects.clear()
        out = tmp_path / f"{shards}.json"
        assert main(["--shards", str(shards), "--latency", "0", "--out", str(out)]) == 0
        result = json.loads(out.read_text())
        assert result["finalize"]["requests"]["DELETE"] < 10
        assert result["finalize"]["requests"]["GET"] >= 3 * shards  # a record for each resolution
        assert result["no-op prep"]["requests"]["GET"] < 20
        requests.append(result["the same again"]["requests"])
    assert requests[0] == requests[1]
