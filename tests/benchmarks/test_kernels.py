"""The table of kernels has a row for each kernel, and unknown capabilities are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from resolute.benchmarks.kernels import main


@pytest.mark.slow
def test_every_kernel_is_in_the_table_and_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "kernels.json"
    assert main(["--capabilities", "80", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["kernels"]
    printed = capsys.readouterr().out.splitlines()[3:-2]
    assert len(rows) == len(printed) == 17
    for row, line in zip(rows, printed, strict=True):
        assert line.split("  ")[1] == row["kernel"]
        assert line.split()[-8:-3] == [f"{row[key]:,}" for key in
                                       ("capability", "registers", "local_bytes", "shared_bytes", "code_bytes")]


def test_an_unknown_capability_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--capabilities", "70"]) == 2
    assert "--capabilities: got 70, expected some of 75,80,86,89,90,100" in capsys.readouterr().err
