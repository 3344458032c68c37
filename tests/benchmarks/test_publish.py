"""`resolute bench-all` measures what is missing, in order, and keeps what today's code has measured."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from resolute import cli
from resolute.benchmarks import publish, record
from resolute.benchmarks.publish import MEASUREMENTS, is_current
from resolute.benchmarks.record import RESULTS, digest
from resolute.errors import ResoluteError
from resolute.settings import build
from tests import ROOT

PLACES = ("data", "work", "results", "timm", "ffcv", "img2dataset", "picture")


def options_of(command: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The options that a recorded command has with today's programs. Raises `ResoluteError` if it has none."""
    words = shlex.split(command)
    if words[0] == "resolute":
        chosen = cli.COMMANDS[words[1]]
        kind = cli._load(chosen.options)
        return build(kind, cli._parse(f"resolute {words[1]}", chosen, kind, words[2:]) or {})
    module = importlib.import_module(words[2])
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"{words[2]}.__main__")
    found: list[Any] = []

    def program(name: str, kind: type, work: Any, words: Sequence[str], **about: Any) -> int:
        command = cli.Command(help="", options="", program="", positional=about.get("positional", ""))
        found.append(build(kind, cli._parse(name, command, kind, words) or {}))
        return 0

    monkeypatch.setattr(module, "program", program)
    assert module.main(words[3:]) == 0
    return found[0]


def published() -> dict[str, dict[str, Any]]:
    """The result files, by name."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))}


def write_rates(path: Path, *, missing: int = 0) -> None:
    """A result of `whole --rates` in which each tool has its best rate by chance."""
    top1 = {"ours": (0.5, 0.6, 0.59), "timm": (0.3, 0.49, 0.5)}
    runs = [
        {"tool": tool, "lr": lr, "top1": value}
        for tool, values in top1.items()
        for lr, value in zip((0.03, 0.1, 0.3), values, strict=True)
    ]
    path.write_text(json.dumps({"rates": {tool: [0.03, 0.1, 0.3] for tool in top1}, "runs": runs, "missing": missing}))


def test_all_tools_train_with_the_learning_rate_that_is_best_on_average(tmp_path: Path) -> None:
    (whole,) = (each for each in MEASUREMENTS if each.name == "whole")
    places = {name: str(tmp_path) for name in PLACES}
    path = tmp_path / "whole-rates.json"
    write_rates(path)
    command = whole.command(places, tmp_path / "whole.json")
    assert command[command.index("--lr") + 1] == "ours=0.1,timm=0.1"
    write_rates(path, missing=2)
    with pytest.raises(
        ResoluteError, match=r"whole-rates\.json: got 2 trainings that are missing, expected a finished"
    ):
        whole.command(places, tmp_path / "whole.json")
    path.unlink()
    with pytest.raises(ResoluteError, match="measure it first, with --only whole-rates"):
        whole.command(places, tmp_path / "whole.json")


@pytest.mark.parametrize("measurement", MEASUREMENTS, ids=lambda each: each.name)
def test_every_command_parses_with_todays_programs(
    measurement: publish.Measurement, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    places = {name: str(tmp_path / name) for name in PLACES}
    if measurement.rates:
        (tmp_path / "results").mkdir()
        write_rates(tmp_path / "results" / f"{measurement.rates}.json")
    command = shlex.join(publish.shown(measurement.command(places, tmp_path / "out.json")))
    assert options_of(command, monkeypatch).out == tmp_path / "out.json"


def test_result_files_are_unedited_and_their_commands_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, result in published().items():
        assert result.get("digest") == digest(result), name
        assert re.fullmatch("[0-9a-f]{12}", result["commit"]), name
        options_of(result["command"], monkeypatch)


def test_pages_cite_every_result_file() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    cited = {name for page in pages for name in re.findall(r"results/([\w-]+)\.json", page.read_text(encoding="utf-8"))}
    assert sorted(set(published()) - cited) == []


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with code, a page and a result."""
    root = tmp_path / "checkout"
    for name in ("train/x.py", "docs/x.md", "benchmarks/results/x.json"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("{}")
    commit(root, "init", "-q")
    monkeypatch.setattr(record, "_ROOT", root)
    monkeypatch.setattr(publish, "_ROOT", root)
    return root


def commit(root: Path, *first: str) -> None:
    who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    for words in (first, ("add", "."), (*who, "commit", "-qm", "x")):
        if words:
            subprocess.run(["git", *words], cwd=root, check=True)


COMMAND = ["-m", "resolute.benchmarks.whole", "--photos", "/data/photos", "--seeds", "0"]


def measure(root: Path, **more: Any) -> Path:
    path = root / "benchmarks/results/x.json"
    record.write(
        path,
        {
            "command": "python -m resolute.benchmarks.whole --photos photos --seeds 0",
            "commit": record.commit(),
            **more,
        },
        quiet=True,
    )
    return path


def test_a_result_is_current_until_code_changes(checkout: Path) -> None:
    path = measure(checkout)
    assert is_current(path, COMMAND)
    (checkout / "docs/x.md").write_text("new")
    commit(checkout)
    assert is_current(path, COMMAND)
    (checkout / "train/x.py").write_text("new")
    assert not is_current(path, COMMAND)


def test_a_result_of_another_command_is_measured_again(checkout: Path) -> None:
    path = measure(checkout)
    assert not is_current(path, [*COMMAND[:-1], "1"])
    assert not is_current(checkout / "benchmarks/results/y.json", COMMAND)


def test_an_unfinished_result_is_continued(checkout: Path) -> None:
    assert is_current(measure(checkout, missing=0), COMMAND)
    assert not is_current(measure(checkout, missing=3), COMMAND)


def test_pages_and_results_do_not_make_a_commit_dirty_but_code_does(checkout: Path) -> None:
    at = record.commit() or ""
    (checkout / "docs/x.md").write_text("new")
    measure(checkout)
    assert record.commit() == at
    (checkout / "train/x.py").write_text("new")
    assert record.commit() == f"{at}-dirty"


def run(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[list[str]]]:
    """Status of `resolute bench-all`, and the programs that it would have run."""
    started: list[list[str]] = []
    monkeypatch.setattr(publish, "_run", lambda command, *, name: started.append(command))
    monkeypatch.setattr(publish, "busy_cores", lambda: 0.0)
    return cli.main(["bench-all", *words]), started


def test_what_cannot_be_measured_is_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(publish, "_WEIGHTS", Path("none/model.safetensors"))
    words = ["--data", "photos", "--only", "whole,peers-switch,finetune-clothing,siblings"]
    status, started = run(words, monkeypatch)
    assert status == 0
    assert [command[1] for command in started] == ["resolute.benchmarks.siblings"]
    assert started[0][-1] == str(tmp_path / "bench/all/siblings.json")
    out = capsys.readouterr().out
    assert "whole: left out; it needs --timm and --ffcv-python" in out
    assert "peers-switch: left out; it needs --ffcv-python" in out
    assert "finetune-clothing: left out; it needs none/model.safetensors (`python -m resolute.benchmarks." in out


def test_shard_sets_are_made_before_the_programs_that_read_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, started = run(["--data", "photos", "--only", "storage"], monkeypatch)
    assert status == 0
    assert [command[1:3] for command in started] == [
        ["resolute", "shards"],
        ["resolute.benchmarks.storage", "--shards"],
    ]


def test_publishing_needs_a_commit_without_changes(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkout / "train/x.py").write_text("new")
    status, started = run(["--data", "photos", "--publish"], monkeypatch)
    assert (status, started) == (2, [])
    assert "expected a commit without changes; commit them first" in capsys.readouterr().err


def test_nothing_is_measured_on_a_busy_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(publish, "_CALM_S", 0.0)
    monkeypatch.setattr(publish, "busy_cores", lambda: 1.2)
    monkeypatch.setattr(publish, "_run", lambda command, *, name: pytest.fail(name))
    assert cli.main(["bench-all", "--data", "photos", "--only", "siblings"]) == 2
    assert "got 1.2 cores in use by other work, expected none" in capsys.readouterr().err


def test_busy_cores_are_counted() -> None:
    process = subprocess.Popen(["sh", "-c", "while :; do :; done"])
    try:
        assert publish.busy_cores(0.5) > 0.5
    finally:
        process.kill()
        process.wait()
