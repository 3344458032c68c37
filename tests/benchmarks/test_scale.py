"""The benchmark of prep by the number of photos, on few of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from resolute.benchmarks.prep.scale import main

STEPS = ("plan", "start of a job", "finish", "nothing to do", "plan of 1 % more")


@pytest.mark.slow
def test_every_step_is_measured_for_lists_and_tars(tmp_path: Path) -> None:
    out = tmp_path / "scale.json"
    words = ["--photos", "9000", "--tars", "12", "--work", str(tmp_path), "--out", str(out)]
    assert main(words) in (0, None)
    result = json.loads(out.read_text())
    assert [row["photos"] for row in result["lists"]] == [9000]
    for row in result["lists"]:
        assert all(row[step]["seconds"] > 0 and row[step]["peak_mib"] > 10 for step in STEPS)
    assert [row["latency_s"] for row in result["tars"]] == [0.03, 0.2]
    assert all(row["ratio"] > 1 for row in result["tars"])
    assert list(tmp_path.iterdir()) == [out], "the made-up files are gone"
