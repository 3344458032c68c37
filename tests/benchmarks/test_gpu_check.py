"""The GPU check on a CPU: every part runs, a failure, crash or hang of one stops no other, and the page says so."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from resolute.benchmarks.gpu_check.check import overall, run_part
from resolute.benchmarks.gpu_check.parts import PARTS, busy_and_gaps, run, switch_costs
from resolute.benchmarks.gpu_check.result import Part, Result, Settings
from resolute.cli import main

PART = Part(name="pixels", title="Pixels", limit_s=20)


def check(folder: Path, *words: str) -> tuple[int, dict[str, Any]]:
    status = main(["gpu-check", "--device", "cpu", "--threads", "1", "--out", str(folder), *words])
    return status, json.loads((folder / "gpu-check.json").read_text())


def test_some_parts_on_a_cpu(tmp_path: Path, shard_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    only = "device,pixels"
    status, document = check(tmp_path / "out", "--only", only, "--shards", str(shard_root))
    verdicts = {part["part"]: part["verdict"] for part in document["parts"]}
    assert (status, document["verdict"], verdicts) == (0, "passed", dict.fromkeys(only.split(","), "passed"))
    assert str(tmp_path) not in json.dumps(document["settings"])
    page = (tmp_path / "out/report.html").read_text()
    assert all(part["summary"] in page or "&#39;" in page for part in document["parts"])
    assert "2 passed, 0 failed, 0 skipped" in capsys.readouterr().out


@pytest.mark.slow  # starts a dozen processes that train
def test_every_part_runs_on_a_cpu_in_the_order_of_the_list(tmp_path: Path) -> None:
    status, document = check(tmp_path / "out")
    verdicts = {part["part"]: part["verdict"] for part in document["parts"]}
    skipped = {"tests", "sync", "memory"}
    expected = {part.name: "skipped" if part.name in skipped else "passed" for part in PARTS}
    assert (status, list(verdicts), verdicts) == (0, list(expected), expected), document["parts"]


@pytest.mark.parametrize(("code", "verdict", "words"), [
    ("import time; time.sleep(60)", "failed", "no result after 1 s"),
    ("raise SystemExit('no such GPU')", "failed", "ended with status 1: no such GPU"),
    ("import os; os.abort()", "failed", "ended with status -6"),
])  # fmt: skip
def test_a_hang_or_crash_of_a_part_is_its_verdict(tmp_path: Path, code: str, verdict: str, words: str) -> None:
    (tmp_path / "pixels.json").write_text('{"verdict": "passed", "summary": "of an earlier check"}')
    result = run_part(PART, tmp_path, limit_s=1 if "sleep" in code else 20, words=[sys.executable, "-c", code])
    assert result.verdict == verdict
    assert result.summary.startswith(words)


def test_an_exception_in_a_part_is_a_failure_with_its_message(tmp_path: Path) -> None:
    settings = Settings.for_device("cpu", folder=tmp_path, shards=str(tmp_path / "none"), threads=1)
    result = run("pixels", settings)
    assert result.verdict == "failed"
    assert "none" in result.summary


def test_parts_that_could_not_begin_in_time_are_skipped(tmp_path: Path, shard_root: Path) -> None:
    words = "--only", "device,switch", "--shards", str(shard_root), "--minutes", "0.1"
    status, document = check(tmp_path / "out", *words)
    assert status == 0
    assert {part["verdict"] for part in document["parts"]} == {"skipped"}
    assert document["parts"][1]["summary"] == "the 0.1 minutes are over"


def test_the_verdict_is_failed_if_any_part_is() -> None:
    passed, skipped, failed = (Result(verdict=v, summary="") for v in ("passed", "skipped", "failed"))  # type: ignore[arg-type]
    assert overall([passed, skipped]) == ("passed", "1 passed, 0 failed, 1 skipped")
    assert overall([passed, failed, passed]) == ("failed", "2 passed, 1 failed, 0 skipped")


def test_gaps_are_where_no_span_is() -> None:
    spans = [(0.0, 400.0), (100.0, 500.0), (700.0, 800.0), (850.0, 1000.0)]  # gaps of 200 and 50 us
    busy, gaps = busy_and_gaps(reversed(spans))
    assert (busy, gaps) == (0.75, [200.0])
    assert busy_and_gaps([]) == (0.0, [])


def test_a_switch_costs_what_its_first_steps_take_beyond_steady_ones() -> None:
    stages = [0] * 4 + [1] * 8 + [2] * 8
    steps_s = [1.0] * 4 + [3.0] + [2.0] * 7 + [4.0] * 8
    first, second = switch_costs(stages, steps_s)
    assert (first["stage"], first["cost_s"], first["steady_s"], first["slowest_ratio"]) == (1, 1.0, 2.0, 1.5)
    assert (second["stage"], second["cost_s"], second["slowest_ratio"]) == (2, 0.0, 1.0)
