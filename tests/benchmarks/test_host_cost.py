"""The host cost of a batch is measured for every graph on a machine without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from resolute.benchmarks.host_cost import CASES, PARTS, main


def test_every_case_has_times_of_every_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "cost.json"
    words = ["--rounds", "1", "--batches", "2", "--batch-size", "16", "--pause-ms", "1", "--out", str(out)]
    assert main(words) == 0
    results = json.loads(out.read_text())["host_cost"]
    assert [result["case"] for result in results] == [" ".join(case) for case in CASES]
    for result in results:
        assert result["cpu_ms"]["median"] == pytest.approx(
            sum(result[f"{part}_ms"]["median"] for part in PARTS), rel=0.5
        )
        assert min(result[f"{part}_ms"]["median"] for part in ("plan", "submit", "feed", "take")) > 0
    assert "cuda gpu rich" in capsys.readouterr().out
