"""The Makefile: values are passed unchanged, mistakes are refused, the demo is used if nothing else is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import pytest_collection_modifyitems
from tests.support.fake_make import Make


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return Make(tmp_path)


ODD = ["o'brien", 'say "hi"', "two  words", "$(touch x)", "$(shell touch x)", "`touch x`", "a\ntouch x\n", "cost$5",
       "a#b", "\\", "*", "; touch x", "-x", "a=b", "wds/{000..146}.tar", "größe"]  # fmt: skip


@pytest.mark.parametrize("value", ODD)
def test_values_are_passed_unchanged_and_never_evaluated_by_a_shell(make: Make, value: str) -> None:
    (call,) = make.calls("shards", f"SRC={value}", f"OUT={value}", f"LABELS={value}")
    assert {f"--src={value}", f"--out={value}", f"--labels={value}"} <= set(call)
    (make.folder / "calls").unlink()
    targets = ("train", "verify", "show", "lr", "lr-find", "plan", "eval", "bench", "bench-all", "predict")
    calls = make.calls(*targets, f"SHARDS={value}", f"RUN={value}", f"SRC={value}", f"OUT={value}")
    words = {"verify": {value}, "show": {value}, "predict": {f"--src={value}", f"--out={value}", value},
             "eval": {value, f"--shards={value}"}}  # fmt: skip
    for target, call in zip(targets, calls, strict=True):
        assert words.get(target, {f"--shards={value}"}) <= set(call), target
    assert not (make.folder / "x").exists()


def test_values_from_the_environment_are_never_evaluated_by_a_shell(make: Make) -> None:
    (call,) = make.calls("shards", SRC="$(shell touch x)'", OUT="a b")
    assert {"--src=$(shell touch x)'", "--out=a b"} <= set(call)
    assert not (make.folder / "x").exists()


def test_folds_for_prep_are_refused_with_what_to_do_instead(make: Make) -> None:
    refusal = make.refusal("shards", "SRC=photos", "FOLDS=5")
    assert "FOLDS: without effect in `make shards`" in refusal
    assert "`make train FOLDS=5`; VAL_FRAC=0 makes one that holds out nothing" in refusal
    prepared, trained = make.calls("shards", "train", "SRC=photos", "VAL_FRAC=0", "FOLDS=5")
    assert "--val-frac=0" in prepared
    assert "--folds=5" in trained
    assert not any("folds" in word for word in prepared)


@pytest.mark.parametrize(
    ("words", "guess"),
    [
        (["shards", "src=photos"], "src: not a variable of this Makefile; did you mean SRC?"),
        (["shards", "SRC=photos", "VALFRAC=0.2"], "did you mean VAL_FRAC?"),
        (["shards", "SRC=photos", "LABEL=x.csv"], "did you mean LABELS?"),
        (["train", "EPOCHS=3"], "EPOCHS: not a variable of this Makefile; what a recipe sets goes into the recipe"),
        (["train", "x'$(touch y)=3"], "not a variable"),
    ],
)
def test_unknown_variables_are_refused_with_a_suggestion(make: Make, words: list[str], guess: str) -> None:
    assert guess in make.refusal(*words)
    assert not (make.folder / "y").exists()


@pytest.mark.parametrize(
    ("words", "name"),
    [(["train", "SRC=photos"], "SRC"), (["verify", "OUT=shards"], "OUT"), (["shards", "SRC=a", "SHARDS=b"], "SHARDS"),
     (["keys", "RECIPE=x"], "RECIPE"), (["test", "WORKERS=2"], "WORKERS"),
     (["bench", "SHARDS=mine", "WORKERS=2"], "WORKERS")],
)  # fmt: skip
def test_variables_without_effect_are_refused(make: Make, words: list[str], name: str) -> None:
    assert f"{name}: without effect in `make {words[0]}`" in make.refusal(*words)


def test_variables_of_any_goal_are_accepted(make: Make) -> None:
    prep, train = make.calls("shards", "train", "SRC=photos", "OUT=s", "RUN=x")
    assert {"--src=photos", "--out=s"} <= set(prep)
    assert {"--shards=s", "--run=x"} <= set(train)


@pytest.mark.parametrize("name", ["SRC", "OUT", "VAL"])
def test_an_empty_value_is_refused(make: Make, name: str) -> None:
    """`make shards SRC="$FOLDER"` with an empty FOLDER must not build the demo's shards."""
    assert f"{name}: got an empty value" in make.refusal("shards", f"{name}=")


@pytest.mark.parametrize("name", ["OUT", "KIND", "LABELS", "COLUMNS", "CLASSES", "VAL", "VAL_LIST"])
def test_settings_of_other_photos_never_use_the_demo(make: Make, name: str) -> None:
    (call,) = make.calls("shards", f"{name}=x")
    assert call[:3] == ["-m", "resolute.prep", "--src="]


@pytest.mark.parametrize("target", ["eval", "predict", "export", "report"])
def test_a_missing_run_is_passed_as_empty(make: Make, target: str) -> None:
    """Each command refuses it with a list of the runs."""
    (call,) = make.calls(target)
    assert call[:3] == ["-m", "resolute.train", target]
    assert call[-2:] == ["--", ""]


@pytest.mark.parametrize("target", ["eval", "predict"])
def test_a_run_is_used_with_its_own_set_and_never_with_the_demo(make: Make, target: str) -> None:
    assert make.calls(target, "RUN=x") == [["-m", "resolute.train", target, "--", "x"]]
    (make.folder / "calls").unlink()
    assert "WORKERS: without effect" in make.refusal(target, "RUN=x", "WORKERS=2")


def test_without_settings_the_demo_is_built_and_used(make: Make) -> None:
    photos = ["-m", "resolute.pipeline.examples.demo_photos", "--out", "demo/photos"]
    assert [call[:4] for call in make.calls("shards", "RES=64")] == [photos, ["-m", "resolute.prep", "--src=demo/photos",
                                                                              "--out=demo/shards"]]  # fmt: skip
    for target in ("verify", "show", "lr", "lr-find", "plan", "train", "bench", "bench-all"):
        (make.folder / "calls").unlink()
        first, second, third = make.calls(target)
        assert first == photos
        assert second == ["-m", "resolute.prep", "--src", "demo/photos", "--out", "demo/shards"]
        assert "demo/shards" in third or "--shards=demo/shards" in third
    (make.folder / "calls").unlink()
    assert len(make.calls("train", "SHARDS=mine")) == 1


@pytest.mark.parametrize(("value", "is_on"), [("1", True), ("yes", True), ("0", False), ("no", False)])
def test_switches_accept_0_and_no(make: Make, value: str, is_on: bool) -> None:
    (call,) = make.calls("shards", "SRC=a", f"REBUILD={value}", f"DRY={value}")
    assert ("--rebuild" in call, "--dry-run" in call) == (is_on, is_on)


@pytest.mark.parametrize("value", ["a b", "a'b", "a$b", "a;touch x", "(a)", "a\nb"])
def test_special_characters_in_venv_are_refused(make: Make, value: str) -> None:
    assert "VENV: got" in make.refusal("keys", f"VENV={value}")
    assert not (make.folder / "x").exists()


def test_help_names_every_variable(make: Make) -> None:
    text = make("help").stdout
    assert "shards: SRC KIND LABELS" in text
    assert "predict: RUN SRC VAL CLASSES TARGET OUT DEVICE" in text


def test_every_command_that_reads_a_set_accepts_third_party_tars(make: Make) -> None:
    for target in ("train", "plan", "eval", "predict", "lr", "lr-find", "show", "bench", "bench-all"):
        source = "SRC" if target == "predict" else "SHARDS"
        (call,) = make.calls(target, f"{source}=wds/", "VAL=*val*", "CLASSES=names.txt")
        assert {"--val=*val*", "--classes=names.txt"} <= set(call), target
        (make.folder / "calls").unlink()
    prep, train = make.calls("shards", "train", "SRC=photos", "VAL=other")
    assert "--val=other" in prep
    assert "--val=other" not in train


def test_a_plan_takes_a_budget_and_the_file_of_a_proposal(make: Make) -> None:
    (call,) = make.calls("plan", "SHARDS=a", "BUDGET=11m", "SUGGEST=my plan.toml", "JSON=plan.json")
    assert {"--budget=11m", "--suggest=my plan.toml", "--json=plan.json"} <= set(call)
    (make.folder / "calls").unlink()
    assert "SUGGEST: without effect in `make train`" in make.refusal("train", "SUGGEST=my.toml")


def test_runs_to_compare_are_separated_at_spaces_and_never_evaluated_by_a_shell(make: Make) -> None:
    (call,) = make.calls("compare", "RUNS=first group/second * $(touch x)", "OUT=a b.html")
    assert call == ["-m", "resolute.train", "compare", "--out=a b.html", "--", "first", "group/second", "*", "$(touch", "x)"]
    assert not (make.folder / "x").exists()


def test_the_short_benchmark_takes_a_model_and_a_page(make: Make) -> None:
    (call,) = make.calls("bench", "SHARDS=a", "MODEL=resnet50", "OUT=my page.html", "RES=128,160")
    assert call[:2] == ["-m", "resolute.benchmarks.brief"]
    assert {"--shards=a", "--model=resnet50", "--out=my page.html", "--res=128,160"} <= set(call)


def test_only_tests_whose_limits_are_in_seconds_are_repeated(make: Make, request: pytest.FixtureRequest) -> None:
    timed, other = (pytest.Function.from_parent(request.node.parent, name=name, callobj=lambda: None) for name in "ab")
    timed.add_marker("timing")
    pytest_collection_modifyitems([timed, other])
    mark = timed.get_closest_marker("flaky")
    assert mark is not None
    assert mark.kwargs == {"reruns": 1}
    assert other.get_closest_marker("flaky") is None
    assert not [word for call in make.calls("test", "test-all") for word in call if "rerun" in word]
