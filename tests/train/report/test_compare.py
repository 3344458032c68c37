"""The page of several runs: its curves and tables are those of their logs, and it names in what the runs differ."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from resolute.cli import main
from resolute.errors import ResoluteError
from resolute.train.report.page import first_reached_s, open_runs, page
from resolute.train.score import best_score
from tests.support.synthetic_log import write_log
from tests.train.report.parsed_page import charts, rows


def _rewrite(folder: Path, records: list[dict[str, Any]]) -> None:
    (folder / "run.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def _best(epoch: dict[str, Any]) -> float:
    score = best_score(epoch)
    assert score is not None
    return score


def test_curves_and_tables_are_those_of_the_logs(tmp_path: Path) -> None:
    kinds: dict[str, dict[str, Any]] = {"short": {"ema": False}, "long": {"epochs_of_last": 6, "switch_s": 0.5}}
    logs = {
        name: [record for record in write_log(tmp_path / name, **options) if record["kind"] == "epoch"]
        for name, options in kinds.items()
    }
    runs = open_runs([str(tmp_path / name) for name in logs])
    text = page(runs).decode()
    drawn = charts(text)
    for title, x in (("Accuracy against time", "elapsed_s"), ("Accuracy against epochs", "epoch")):
        for series, (name, epochs) in zip(drawn[title]["series"], logs.items(), strict=True):
            assert series["name"] == name
            assert series["x"] == pytest.approx([epoch[x] for epoch in epochs], rel=1e-4)
            assert series["y"] == pytest.approx([100 * _best(epoch) for epoch in epochs], rel=1e-4)
    for series, run in zip(drawn["Step time"]["series"], runs, strict=True):
        assert len(series["x"]) <= 303
        assert max(series["y"]) == pytest.approx(1e3 * run.log.binned(300)["time_s"].max(), rel=1e-4)
    best = max(_best(epoch) for epoch in logs["short"])
    reached = [next(epoch["elapsed_s"] for epoch in epochs if _best(epoch) >= best) for epochs in logs.values()]
    assert [first_reached_s(run, best) for run in runs] == reached
    assert rows(text, "Time to top-1")[-1] == [f"{100 * best:.2f} %", *(f"{s:.1f} s" for s in reached)]
    assert [row[:2] for row in rows(text, "Runs")[1:]] == [["short", "made_up"], ["long", "made_up"]]
    assert [row[4] for row in rows(text, "Runs")[1:]] == [run.text(run.best[1]) for run in runs]
    heads, *stages = rows(text, "Stages")
    cost = heads.index("change cost s")
    first, *changes = [row for row in stages if row[0] == "long"]
    assert first[cost] == "-"
    assert all(0.45 < float(row[cost].split()[0]) < 0.55 for row in changes)
    assert rows(text, "What differs in the recipes")[1:] == [["stages[2].epochs", "2", "6"]]
    assert "The times are not comparable" not in text


def test_folds_are_compared_under_their_own_names_without_those_that_have_just_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for fold in range(3):
        records = write_log(tmp_path / "cv" / f"fold-{fold}", steps=4)
    _rewrite(tmp_path / "cv" / "fold-2", records[:1])
    write_log(tmp_path / "fold-0", steps=4)
    runs = open_runs([str(tmp_path / "cv"), str(tmp_path / "fold-0")])
    assert [run.name for run in runs] == ["cv/fold-0", "cv/fold-1", "fold-0"]
    text = page(runs).decode()
    scores = [100 * run.best[1] for run in runs[:2]]
    mean = f"{statistics.mean(scores):.2f} ± {statistics.stdev(scores):.2f} %"
    assert [row[4] for row in rows(text, "Runs") if row[0] == "cv: mean ± deviation"] == [mean]
    assert main(["report", str(tmp_path / "cv")]) == 0
    assert "cv/fold-1" in (tmp_path / "cv" / "report.html").read_text(encoding="utf-8")
    (tmp_path / "cv" / "fold-1" / "run.jsonl").unlink()
    assert main(["report", str(tmp_path / "cv")]) == 0
    assert main(["compare", str(tmp_path / "cv")]) == 2
    assert "RUN: got 1 run, expected 2 to 12" in capsys.readouterr().err


def test_the_command_writes_a_page_or_says_what_cannot_be_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(2):
        records = write_log(tmp_path / f"r{number}", steps=1)
    (tmp_path / "new").mkdir()
    _rewrite(tmp_path / "new", records[:1])
    for name, message in (("new", "no validated epoch yet"), ("absent", "no run or checkpoint")):
        with pytest.raises(ResoluteError, match=message):
            open_runs([str(tmp_path / word) for word in ("r0", name)])
    out = ["--out", str(tmp_path / "c.html")]
    assert main(["compare", str(tmp_path / "r0"), str(tmp_path / "r1/../r0"), *out]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "RUN: got 1 run, expected 2 to 12 different ones; name others" in line
    assert main(["compare", str(tmp_path / "r0"), str(tmp_path / "r1"), *out]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("Best top-1: ")
    assert printed[-1] == str(tmp_path / "c.html")
    assert (tmp_path / "c.html").read_text().startswith("<!doctype html>")
