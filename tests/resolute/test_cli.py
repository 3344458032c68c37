"""`resolute COMMAND`: options from settings classes, mistakes in one line, and answers without slow imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from resolute import __version__, cli
from resolute.cli import COMMANDS, _load, main
from resolute.settings import definitions, option_name
from resolute.train.recipe import RECIPES


def test_help_lists_all_commands_and_their_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__
    assert main(["--help"]) == 0
    assert {name.split()[0] for name in COMMANDS} <= {*capsys.readouterr().out.split()}
    for name, command in COMMANDS.items():
        assert main([*name.split(), "--help"]) == 0
        out = capsys.readouterr().out
        for setting in definitions(cli._load(command.options)):
            assert option_name(setting.name) in out
            assert setting.help
            assert setting.help.split()[0] in out


def test_help_and_mistakes_load_nothing_slow() -> None:
    code = """
import sys
from resolute.cli import main
for name in ("shards", "train", "eval", "bench", "gpu-check"):
    assert main([name, "--help"]) == 0
    assert main([name, "--no-such-option", "1"]) == 2
print({"torch", "numpy", "numba", "timm", "fsspec"} & {*sys.modules}, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "set()"


@pytest.mark.parametrize(("words", "line"), [
    (["jobs", "finsh"], 'resolute: Unknown command "finsh". Did you mean "finish"; see `resolute --help`'),
    (["shards", "--scr", "x"], "resolute shards: Unknown option: --scr. Did you mean --src?"),
    (["verify"], "resolute verify: --shards: missing, expected text"),
    (["verify", "a", "b"], "resolute verify: got b, expected no more values"),
    (["shards", "--src="], "resolute shards: --src: got an empty value"),
    (["shards", "--quality", "101"], "resolute shards: --quality: got '101', expected integer, 1 to 100"),
    (["shards", "--res", "64,x"], "resolute shards: --res: got 'x', expected list of numbers, at least 8"),
    (["shards", "--kind", "zip"], 'resolute shards: --kind: got \'zip\', expected "auto", "folders"'),
    (["train", "--shards", "a", "--recipe", "b", "--from"], "resolute train: "),
])  # fmt: skip
def test_a_mistake_is_one_line(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith(line), err
    assert err.count("\n") == 1


def test_values_are_taken_as_make_and_people_write_them(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    monkeypatch.setattr("resolute.prep.commands.shards", taken.append)
    for program in ("report", "compare"):
        monkeypatch.setattr(f"resolute.train.report.page.{program}", taken.append)
    for text, is_on in (("=1", True), ("=true", True), ("", True), ("=0", False), ("=no", False)):
        assert main(["shards", "--src", "a", f"--rebuild{text}"]) == 0
        assert taken.pop().rebuild is is_on
    assert main(["shards", "--src=-a b", "--res", "32,48", "--max-bad", "1"]) == 0
    assert (taken[-1].src, taken[-1].res, taken[-1].max_bad) == ("-a b", (32, 48), 1.0)
    assert main(["report", "first"]) == main(["report", "--run", "first"]) == 0  # a first value needs no name
    assert [taken[-2].run, taken[-1].run] == ["first", "first"]
    assert main(["compare", "a", "b c", "--out", "x.html"]) == 0
    assert (taken[-1].runs, taken[-1].out) == (("a", "b c"), Path("x.html"))


@pytest.mark.parametrize(("words", "line"), [
    (["shards", "--src", "photos", "--out", "my set"], "next: `resolute show --shards='my set'`\n"),
    (["shards", "--src", "photos", "--dry"], ""),
    (["plan", "--shards", "set", "--recipe", "demo", "--run", "a"],
     f"next: `resolute train --shards=set --recipe={RECIPES / 'demo.toml'}"),
    (["jobs", "plan", "--src", "photos", "--out", "set"], "next: `resolute jobs range --out=set --range=:`\n"),
    (["verify", "set"], ""),
])  # fmt: skip
def test_a_command_ends_with_the_next_one(
    words: list[str], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "demo").mkdir()  # as `make demo` does; the recipe of that name is another thing
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "_load", lambda where: _load(where) if "Options" in where else lambda options: 0)
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(line)
    assert bool(printed) == bool(line)
    monkeypatch.setattr(cli, "_load", lambda where: _load(where) if "Options" in where else lambda options: 1)
    assert main(words) == 1
    assert capsys.readouterr().out == ""


def test_the_shell_can_complete_commands_and_options() -> None:
    script = cli._app(complete=True).generate_completion(shell="bash")
    assert "lr-find" in script
    assert "--max-bad" in script


@pytest.mark.parametrize(("rank", "printed"), [
    (None, "resolute verify: interrupted\n"),
    ("1", ""),  # `resolute --gpus` and torchrun say it once for all their processes
])  # fmt: skip
def test_ctrl_c_is_one_line_of_the_process_that_was_started(
    rank: str | None, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    program = COMMANDS["verify"].program
    monkeypatch.setattr(cli, "_load", lambda where: interrupted if where == program else _load(where))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank:
        monkeypatch.setenv("LOCAL_RANK", rank)
    assert main(["verify", "--shards", "none"]) == 130
    assert capsys.readouterr().err == printed
