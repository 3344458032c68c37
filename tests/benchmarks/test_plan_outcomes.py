"""The benchmark of proposals: every budget is proposed, then trained, and compared with the command's wall time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from resolute.benchmarks.training.plan_outcomes import main, outcome, table
from resolute.errors import ResoluteError
from resolute.train.planner.estimate import to_json
from tests.benchmarks.test_training import FORECAST, tiny, write_log


def fake(words: Sequence[str]) -> None:
    """A plan of 50 s that writes its recipe, or a training of 18 s."""
    flags = dict(zip(words[1::2], words[2::2], strict=True))
    if words[0] == "plan":
        assert flags["--budget"] == "1m"
        Path(flags["--suggest"]).write_text("# a proposal\n")
        Path(flags["--json"]).write_text(json.dumps(to_json(FORECAST, 60.0, [flags["--suggest"] + ": written"])))
    else:
        assert Path(flags["--recipe"]).read_text() == "# a proposal\n"
        folder = Path(flags["--runs"]) / flags["--run"]
        folder.mkdir(parents=True)
        write_log(folder / "run.jsonl", [(64, 0.5)], top1=0.5)


def test_forecast_and_outcome_are_those_of_plan_and_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 7.0, 7.0, 47.0])
    monkeypatch.setattr("resolute.benchmarks.training.plan_outcomes.time.perf_counter", lambda: next(clock))
    got = outcome(Path("base.toml"), Path("set"), "1m", settings=["--threads", "1"], folder=tmp_path, run=fake)
    assert (got["plan_s"], got["wall_s"], got["forecast_s"], got["budget_s"]) == (7.0, 40.0, 50.0, 60.0)
    assert (got["ratio"], got["used"]) == (50 / 40, 40 / 60)
    assert got["parts_ratio"]["training"] == 30 / got["train_s"]
    assert got["recipe"] == "# a proposal\n"
    text = table([got, got | {"ratio": 0.95}])
    assert "64x2" in text
    assert "largest error 25.0 %, target 10 %: missed" in text
    assert "target 10 %: met" in table([got | {"ratio": 0.95}])


def test_all_cases_and_budgets_are_in_the_result(
    shard_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case, out = f"{tiny(tmp_path, 'a', [(32, 1)])}={shard_root}", tmp_path / "out.json"
    words = ["--cases", f"{case},{case}", "--budgets", "1m,1m", "--device", "cpu", "--out", str(out)]
    assert main(words, run=fake) == 0
    result = json.loads(out.read_text())
    assert [(run["base"], run["set"]) for run in result["runs"]] == [("a", shard_root.name)] * 4
    assert result["summary"]["ratio"]["median"] > 1
    assert str(tmp_path) not in out.read_text()
    assert "proposal.toml" not in out.read_text()  # it was in a temporary folder
    assert "forecast 50.0 s" in capsys.readouterr().out


@pytest.mark.parametrize(("cases", "budgets", "message"), [
    ("a.toml", "1m", "--cases: got a.toml, expected recipe.toml=shards"),
    ("a.toml={set}", "soon", "--budgets: got 'soon', expected a time like 90s"),
    ("no.toml={set}", "1m", "no.toml: no readable recipe"),
])  # fmt: skip
def test_mistakes_are_reported_before_any_training(
    cases: str, budgets: str, message: str, shard_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(words: Sequence[str]) -> None:
        raise AssertionError(words)

    words = ["--cases", cases.format(set=shard_root), "--budgets", budgets, "--device", "cpu"]
    assert main([*words, "--out", str(tmp_path / "x.json")], run=refused) == 2
    assert message in capsys.readouterr().err


def test_a_failure_names_the_case(shard_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def failing(words: Sequence[str]) -> None:
        raise ResoluteError("no memory")

    words = ["--cases", f"{tiny(tmp_path, 'a', [(32, 1)])}={shard_root}", "--budgets", "1m", "--device", "cpu"]
    assert main([*words, "--out", str(tmp_path / "x.json")], run=failing) == 2
    assert f"a, {shard_root.name}, 1m: no memory" in capsys.readouterr().err
