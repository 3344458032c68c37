"""The Makefile: variables become options of `resolute` unchanged, and the demo is used if nothing else is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from resolute.cli import COMMANDS as COMMANDS_OF_RESOLUTE
from tests.conftest import pytest_collection_modifyitems
from tests.support.fake_make import Make


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return Make(tmp_path)


ODD = ["o'brien", 'say "hi"', "two  words", "$(touch x)", "$(shell touch x)", "`touch x`", "a\ntouch x\n", "cost$5",
       "a#b", "\\", "*", "; touch x", "-x", "a=b", "wds/{000..146}.tar", "größe"]  # fmt: skip


COMMANDS = ("shards", "verify", "show", "lr", "lr-find", "plan", "train", "predict", "eval", "export", "report",
            "bench", "bench-all", "gpu-check", "keys")  # fmt: skip
DEMO = [["-m", "resolute.pipeline.examples.demo_photos", "--out", "demo/photos"],
        ["-m", "resolute", "shards", "--src", "demo/photos", "--out", "demo/shards"]]  # fmt: skip


@pytest.mark.parametrize("value", ODD)
def test_values_are_passed_unchanged_and_never_evaluated_by_a_shell(make: Make, value: str) -> None:
    calls = make.calls(*COMMANDS, f"SHARDS={value}", f"OUT={value}", f"VAL_LIST={value}")
    for command, call in zip(COMMANDS, calls, strict=True):
        assert call[:3] == ["-m", "resolute", command]
        assert {f"--shards={value}", f"--out={value}", f"--val-list={value}"} <= set(call)
    assert not (make.folder / "x").exists()


def test_every_command_of_resolute_that_is_not_for_jobs_is_a_target() -> None:
    assert {*COMMANDS, "compare"} == {name for name in COMMANDS_OF_RESOLUTE if " " not in name}


@pytest.mark.parametrize("name", ["FOO", "src", "x'$(touch y)"])
def test_unknown_variables_are_left_to_the_command_which_refuses_them(make: Make, name: str) -> None:
    (call,) = make.calls("shards", "SRC=photos", f"{name}=3")
    assert f"--{name.partition('$')[0].lower()}=3" in call  # make itself expands names
    assert not (make.folder / "y").exists()


def test_variables_of_targets_without_any_are_refused(make: Make) -> None:
    assert "WORKERS: without effect in `make test`" in make.refusal("test", "WORKERS=2")


def test_an_empty_value_is_passed_on_and_does_not_become_the_demo(make: Make) -> None:
    """`make shards SRC="$FOLDER"` with an empty FOLDER must not build the demo's shards."""
    assert make.calls("shards", "SRC=") == [["-m", "resolute", "shards", "--src="]]


@pytest.mark.parametrize("name", ["OUT", "KIND", "LABELS", "COLUMNS", "CLASSES", "VAL", "VAL_LIST"])
def test_settings_of_other_photos_never_use_the_demo(make: Make, name: str) -> None:
    (call,) = make.calls("shards", f"{name}=x")
    assert not any("demo" in word for word in call)


@pytest.mark.parametrize("target", ["eval", "predict", "export", "report"])
def test_a_run_is_used_with_its_own_set_and_never_with_the_demo(make: Make, target: str) -> None:
    assert make.calls(target, "RUN=x") == [["-m", "resolute", target, "--run=x"]]


def test_without_settings_the_demo_is_built_and_used(make: Make) -> None:
    shards = ["-m", "resolute", "shards", "--src=demo/photos", "--out=demo/shards", "--res=64"]
    assert make.calls("shards", "RES=64") == [DEMO[0], shards]
    for target in ("verify", "show", "lr", "lr-find", "plan", "train", "bench", "bench-all"):
        (make.folder / "calls").unlink()
        *made, call = make.calls(target)
        assert made == DEMO
        assert call[:4] == ["-m", "resolute", target, "--shards=demo/shards"]
    (make.folder / "calls").unlink()
    assert len(make.calls("train", "SHARDS=mine")) == 1


@pytest.mark.parametrize("value", ["a b", "a'b", "a$b", "a;touch x", "(a)", "a\nb"])
def test_special_characters_in_venv_are_refused(make: Make, value: str) -> None:
    assert "VENV: got" in make.refusal("keys", f"VENV={value}")
    assert not (make.folder / "x").exists()


def test_runs_to_compare_are_separated_at_spaces_and_never_evaluated_by_a_shell(make: Make) -> None:
    (call,) = make.calls("compare", "RUNS=first group/second * $(touch x)", "OUT=a b.html")
    assert call == ["-m", "resolute", "compare", "first", "group/second", "*", "$(touch", "x)", "--out=a b.html"]
    assert not (make.folder / "x").exists()


def test_only_tests_whose_limits_are_in_seconds_are_repeated(make: Make, request: pytest.FixtureRequest) -> None:
    timed, other = (pytest.Function.from_parent(request.node.parent, name=name, callobj=lambda: None) for name in "ab")
    timed.add_marker("timing")
    pytest_collection_modifyitems([timed, other])
    mark = timed.get_closest_marker("flaky")
    assert mark is not None
    assert mark.kwargs == {"reruns": 1}
    assert other.get_closest_marker("flaky") is None
    assert not [word for call in make.calls("test", "test-all") for word in call if "rerun" in word]
