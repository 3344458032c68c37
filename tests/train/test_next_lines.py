"""The command after `next:` runs as printed, whatever the command that printed it was given."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from resolute.cli import COMMANDS, main
from tests.conftest import make_photos

Run = Callable[[str], str]


@pytest.fixture
def run(quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """run(line): runs a line as a user types it in an empty folder with photos; returns the command after `next:`."""
    monkeypatch.chdir(tmp_path)
    make_photos(tmp_path / "my photos", classes=2, each=10)

    def call(line: str) -> str:
        program, *words = shlex.split(line)
        assert program == "resolute"
        assert main(words) == 0, capsys.readouterr()
        found = re.findall(r"^next: `(.*)`$", capsys.readouterr().out, re.MULTILINE)
        assert len(found) <= 1
        return found[0] if found else ""

    return call


def _chain(run: Run, line: str, *, last: str = "export") -> list[str]:
    """The names of the commands that follow each other, from `line` on to `last`, which runs too."""
    names = [""]
    while line and names[-1] != last:
        names.append(next(name for name in COMMANDS if f"{line} ".startswith(f"resolute {name} ")))
        line = run(line)
    return names[1:]


SHARDS = "resolute shards 'my photos' --out 'my set' --res 32,48 --val-frac 0.2 --workers 1"
OTHER = "--set optim.lr=0.02 --set 'model.name=test_resnet'"


@pytest.mark.slow
def test_each_command_leads_to_the_next(run: Run) -> None:
    assert _chain(run, SHARDS) == ["shards", "train", "eval", "export"]
    shutil.rmtree("runs")  # else the next ones have another recipe than the run of this name
    assert _chain(run, f"resolute show 'my set' {OTHER}", last="train") == ["show", "plan", "train"]
    shutil.rmtree("runs")
    assert _chain(run, "resolute lr --samples 100 --recipe demo") == ["lr"]
    steps = f"resolute lr-find 'my set' {OTHER} --steps 25 --max-lr 0.5"
    assert _chain(run, steps, last="train") == ["lr-find", "lr", "train"]
    recipe = "resolute recipe 'my recipe.toml' --shards 'my set' --model test_resnet"
    assert _chain(run, recipe, last="train") == ["recipe", "train"]
    assert run("resolute train 'my set' --recipe 'my recipe.toml' --run again") == "resolute eval --run=runs/again"
    assert _chain(run, "resolute train --run again --more-epochs 2", last="eval") == ["train", "eval"]
    for line in ("verify 'my set'", "predict runs/again --src 'my photos' --out pred.csv", "report runs/again", "keys"):
        assert run(f"resolute {line}") == ""
    assert run("resolute compare runs/again runs/again-plus-2") == ""


def test_the_tests_here_cover_every_command_that_another_one_follows() -> None:
    source = Path(__file__).read_text()
    assert [name for name, command in COMMANDS.items() if command.then and f'"{name}"' not in source] == []


@pytest.mark.slow
def test_a_set_that_jobs_have_made_is_trained_on(run: Run) -> None:
    plan = "resolute jobs plan --src 'my photos' --out 'my set' --res 32,48 --val-frac 0.2"
    assert _chain(run, plan, last="train") == ["jobs plan", "jobs range", "jobs finish", "train"]
