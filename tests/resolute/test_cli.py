"""`resolute COMMAND`: options from settings classes, mistakes in one line, and answers without slow imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from resolute import __version__, cli
from resolute.cli import COMMANDS, main
from resolute.settings import definitions, option_name


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
for name in ("shards", "train", "eval", "bench", "bench-all"):
    assert main([name, "--help"]) == 0
    assert main([name, "--no-such-option", "1"]) == 2
print({"torch", "numpy", "numba", "timm", "fsspec"} & {*sys.modules}, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "set()"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["jobs", "finsh"], 'resolute: Unknown command "finsh". Did you mean "finish"? See `resolute --help`'),
        (["shards", "--scr", "x"], "resolute shards: --scr: no such option; did you mean --src?"),
        (["shards", "--resolution=128"], "resolute shards: --resolution: no such option; did you mean --res?"),
        (["train", "a", "--gpu", "2"], "resolute train: --gpu: no such option; did you mean --gpus? (or "),
        (["train", "a", "--lr", "2"], "resolute train: --lr: no such option; did you mean --set optim.lr=VALUE?"),
        (
            ["plan", "a", "--img-size", "2"],
            "resolute plan: --img-size: no such option; did you mean --set 'stages[0].res",
        ),
        (["predict", "a", "--ema"], "resolute predict: --ema: no such option; did you mean --weights ema?"),
        (["eval", "a", "--zzz", "2"], "resolute eval: --zzz: no such option; see `resolute eval --help`"),
        (["verify"], "resolute verify: --shards: missing, expected text"),
        (["shards", "--src="], "resolute shards: --src: got an empty value"),
        (["shards", "--quality", "101"], "resolute shards: --quality: got '101', expected integer, 1 to 100"),
        (["train", "--shards", "a", "--recipe", "b", "--from"], "resolute train: "),
    ],
)
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


def test_the_shell_can_complete_commands_and_options() -> None:
    script = cli._app(complete=True).generate_completion(shell="bash")
    assert "lr-find" in script
    assert "--max-bad" in script
