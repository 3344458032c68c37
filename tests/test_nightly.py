"""The nightly check: a value below its limit fails, and accuracy is checked where photos are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import nightly


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Results of the programs, instead of running them; "ran": their modules or commands, in order."""
    monkeypatch.delenv("RESOLUTE_PHOTOS", raising=False)
    known: dict[str, Any] = {"ours_times": 4.0, "pillow_s": [31.0, 21.0, 91.0], "top1": 0.9, "ran": []}

    def run(module: str, *words: str) -> None:
        known["ran"].append(words[0] if module == "resolute" else module.rpartition(".")[2])
        options = dict(word.removeprefix("--").split("=") for word in words if "=" in word)
        loaders = {"ours": {}, "v2": {"ours_times": {"median": known["ours_times"]}}}
        prep = {"prep": {"seconds": [12.0] * 3, "few_seconds": [2.0] * 3}}
        for tool, factor in (("pillow + ShardWriter", 1.0), ("pillow, bicubic", 0.9)):
            prep[tool] = {"seconds": [1 + (s - 1) * factor for s in known["pillow_s"]], "few_seconds": [1.0] * 3}
        results = {
            "loader": {"loader": {"res": [{"res": 128, "loaders": loaders}]}},
            "prep": {"seconds": prep},
            "eval": {"rows": [{"top1": 0.1}, {"top1": known["top1"]}]},
        }
        if (name := known["ran"][-1]) in results:
            file = Path(options["run"], "eval.json") if name == "eval" else Path(options["out"])
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(results[name]))

    monkeypatch.setattr(nightly, "_run", run)
    return known


def test_without_photos_the_speed_is_checked_on_generated_ones(
    programs: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert nightly.main([]) == 0
    assert programs["ran"] == ["demo_photos", "shards", "loader", "prep"]
    out = capsys.readouterr().out
    assert "accuracy: not checked, since RESOLUTE_PHOTOS" in out
    # the median of the rounds' ratios, without start-up
    words = [line.split() for line in out.splitlines()]
    assert ["prep", "/", "pillow", "+", "ShardWriter", "3.000", "1.5", "good"] in words


@pytest.mark.parametrize("low", [{"ours_times": 2.9}, {"pillow_s": [15.0, 15.9, 90.0]}, {"top1": 0.69}])
def test_a_value_below_its_limit_fails(
    programs: dict[str, Any],
    low: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RESOLUTE_PHOTOS", str(tmp_path))
    assert nightly.main([]) == 0
    assert programs["ran"] == ["shards", "loader", "prep", "train", "eval"]
    capsys.readouterr()
    programs.update(low)
    assert nightly.main([]) == 1
    assert capsys.readouterr().out.count("TOO LOW") == 1


def test_photos_that_are_not_there_are_an_error(programs: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert nightly.main(["--photos", "nowhere"]) == 2
    assert "RESOLUTE_PHOTOS: got nowhere, expected a folder of class folders; correct it" in capsys.readouterr().err
    assert programs["ran"] == []
