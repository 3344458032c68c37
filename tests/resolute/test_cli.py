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


def options_of(name: str) -> Any:
    return cli._load(COMMANDS[name].options)


def test_help_lists_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    words = capsys.readouterr().out.split()
    assert {name.split()[0] for name in COMMANDS} <= {*words}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_every_option_and_what_it_does(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*name.split(), "--help"]) == 0
    out = capsys.readouterr().out
    for setting in definitions(options_of(name)):
        assert option_name(setting.name) in out
        assert setting.help
        assert setting.help.split()[0] in out


@pytest.mark.parametrize("name", ["shards", "train", "eval", "bench", "gpu-check"])
def test_help_and_mistakes_load_nothing_slow(name: str) -> None:
    code = f"""
import sys
from resolute.cli import main
assert main(["{name}", "--help"]) == 0
assert main(["{name}", "--no-such-option", "1"]) == 2
print({{"torch", "numpy", "numba", "timm", "fsspec"}} & {{*sys.modules}}, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "set()"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["shrads"], 'resolute: Unknown command "shrads". Did you mean "shards"; see `resolute --help`'),
        (["jobs", "finsh"], 'resolute: Unknown command "finsh". Did you mean "finish"; see `resolute --help`'),
        (["shards", "--scr", "x"], "resolute shards: Unknown option: --scr. Did you mean --src?"),
        (["verify"], "resolute verify: --shards: missing, expected text"),
        (["verify", "a", "b"], "resolute verify: got b, expected no more values"),
        (["shards", "--src="], "resolute shards: --src: got an empty value"),
        (["shards", "--quality", "101"], "resolute shards: --quality: got '101', expected integer, 1 to 100"),
        (["shards", "--res", "64,x"], "resolute shards: --res: got 'x', expected list of numbers, at least 8"),
        (["shards", "--kind", "zip"], 'resolute shards: --kind: got \'zip\', expected "auto", "folders"'),
        (["train", "--shards", "a", "--recipe", "b", "--from"], "resolute train: "),
        (["jobs", "plan", "--src", "a", "--workers", "2"], "resolute jobs plan: Unknown option: --workers"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith(line), err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("text", "is_on"), [("=1", True), ("=true", True), ("", True), ("=0", False), ("=no", False)])
def test_flags_take_a_value_as_make_passes_it(text: str, is_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    monkeypatch.setattr("resolute.prep.commands.shards", taken.append)
    assert main(["shards", "--src", "a", f"--rebuild{text}"]) == 0
    assert taken[0].rebuild is is_on


def test_values_may_begin_with_a_dash_and_lists_have_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    monkeypatch.setattr("resolute.prep.commands.shards", taken.append)
    assert main(["shards", "--src=-a b", "--res", "32,48", "--max-bad", "1"]) == 0
    assert (taken[0].src, taken[0].res, taken[0].max_bad) == ("-a b", (32, 48), 1.0)


def test_a_first_value_needs_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    for program in ("report", "compare"):
        monkeypatch.setattr(f"resolute.train.report.page.{program}", taken.append)
    assert main(["report", "first"]) == main(["report", "--run", "first"]) == 0
    assert main(["compare", "a", "b c", "--out", "x.html"]) == 0
    assert [taken[0].run, taken[1].run, taken[2].runs] == ["first", "first", ("a", "b c")]
    assert taken[2].out == Path("x.html")


def test_the_shell_can_complete_commands_and_options() -> None:
    script = cli._app(complete=True).generate_completion(shell="bash")
    assert "lr-find" in script
    assert "--max-bad" in script


@pytest.mark.parametrize(("environ", "printed"), [
    ({}, "resolute verify: interrupted\n"),
    ({"LOCAL_RANK": "1"}, ""),  # `resolute --gpus` and torchrun say it once for all their processes
])  # fmt: skip
def test_ctrl_c_is_one_line_of_the_process_that_was_started(
    environ: dict[str, str], printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    program = COMMANDS["verify"].program
    monkeypatch.setattr(cli, "_load", lambda where: interrupted if where == program else _load(where))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert main(["verify", "--shards", "none"]) == 130
    assert capsys.readouterr().err == printed
