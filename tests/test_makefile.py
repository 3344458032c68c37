"""The Makefile: variables become options of `resolute` unchanged, and the demo is used if nothing else is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from resolute.cli import COMMANDS as COMMANDS_OF_RESOLUTE
from tests.support.fake_make import Make


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return Make(tmp_path)


ODD = [
    "o'brien",
    'say "hi"',
    "two  words",
    "$(touch x)",
    "$(shell touch x)",
    "`touch x`",
    "a\ntouch x\n",
    "cost$5",
    "a#b",
    "\\",
    "*",
    "; touch x",
    "-x",
    "a=b",
    "wds/{000..146}.tar",
    "größe",
]
COMMANDS = (
    "shards",
    "verify",
    "show",
    "lr",
    "lr-find",
    "plan",
    "train",
    "predict",
    "eval",
    "export",
    "report",
    "bench",
    "bench-all",
    "recipe",
    "keys",
)
DEMO = [
    ["-m", "resolute.pipeline.examples.demo_photos", "--out", "demo/photos"],
    ["-m", "resolute", "shards", "--src", "demo/photos", "--out", "demo/shards"],
]


def test_values_are_passed_unchanged_and_never_evaluated_by_a_shell(make: Make) -> None:
    odd = {f"VAL_LIST{number}": value for number, value in enumerate(ODD)}
    calls = make.calls(*COMMANDS, "SHARDS=s", "OUT=o", *(f"{name}={value}" for name, value in odd.items()))
    for command, call in zip(COMMANDS, calls, strict=True):
        assert call[:3] == ["-m", "resolute", command]
        assert {f"--val-list{number}={value}" for number, value in enumerate(ODD)} <= set(call)
    assert not (make.folder / "x").exists()


def test_runs_to_compare_are_separated_at_spaces_and_never_evaluated_by_a_shell(make: Make) -> None:
    (call,) = make.calls("compare", "RUNS=first group/second * $(touch x)", "OUT=a b.html")
    assert call == ["-m", "resolute", "compare", "first", "group/second", "*", "$(touch", "x)", "--out=a b.html"]
    assert not (make.folder / "x").exists()


def test_every_command_of_resolute_that_is_not_for_jobs_is_a_target() -> None:
    assert {*COMMANDS, "compare"} == {name for name in COMMANDS_OF_RESOLUTE if " " not in name}


def test_unknown_variables_are_left_to_the_command_which_refuses_them(make: Make) -> None:
    (call,) = make.calls("shards", "SRC=photos", "FOO=3", "x'$(touch y)=3")
    assert {"--foo=3", "--x'=3"} <= set(call)  # make itself expands names
    assert not (make.folder / "y").exists()


def test_variables_of_targets_without_any_are_refused(make: Make) -> None:
    assert "WORKERS: without effect in `make test`" in make.refusal("test", "WORKERS=2")


@pytest.mark.parametrize("value", ["a b", "a$b;touch x", "a\nb"])
def test_special_characters_in_venv_are_refused(make: Make, value: str) -> None:
    assert "VENV: got" in make.refusal("keys", f"VENV={value}")
    assert not (make.folder / "x").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("shards", "SRC="),  # `make shards SRC="$FOLDER"` with an empty FOLDER
        ("shards", "OUT=x"),
        ("shards", "VAL_LIST=x"),
        ("train", "SHARDS=mine"),
        ("train", "MORE_EPOCHS=3"),
        ("recipe", "OUT=my.toml"),
        ("eval", "RUN=x"),
        ("predict", "RUN=x"),
    ],
)
def test_whoever_names_other_data_never_gets_the_demo(make: Make, words: tuple[str, str]) -> None:
    (call,) = make.calls(*words)
    name, _, value = words[1].partition("=")
    assert f"--{name.lower().replace('_', '-')}={value}" in call
    assert not any("demo/" in word or "photos" in word for word in call)


def test_without_settings_the_demo_is_built_and_used(make: Make) -> None:
    shards = ["-m", "resolute", "shards", "--src=demo/photos", "--out=demo/shards", "--res=64"]
    assert make.calls("shards", "RES=64") == [DEMO[0], shards]
    for target in ("verify", "show", "lr", "lr-find", "plan", "train", "bench"):
        (make.folder / "calls").unlink()
        *made, call = make.calls(target)
        assert made == DEMO
        assert call[:4] == ["-m", "resolute", target, "--shards=demo/shards"]
