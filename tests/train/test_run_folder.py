"""RUN means the same run for every command, and a mistake in it is one line that makes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.errors import ResoluteError
from train import trainer as runs_module
from train.__main__ import main
from train.run_folder import existing_run, new_run

READERS: dict[str, Callable[[str], list[str]]] = {
    "eval": lambda run: ["--shards", "shards", "--", run], "export": lambda run: ["--", run],
    "report": lambda run: ["--", run], "predict": lambda run: ["--src", "photos", "--", run],
}  # fmt: skip


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with runs/first, runs/group/second, the folds runs/cv/fold-0, and a folder `first` that is no run."""
    for name in ("first", "group/second", "cv/fold-0"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "last.pt").touch()
    (tmp_path / "first").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "run.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("first", "runs/first"), ("runs/first", "runs/first"), ("./runs/first", "runs/first"),
        ("runs/first/", "runs/first"), ("group/second", "runs/group/second"), ("cv", "runs/cv"),
        ("cv/fold-0", "runs/cv/fold-0"), ("runs/first/last.pt", "runs/first/last.pt"),
        ("first/last.pt", "runs/first/last.pt"), ("elsewhere", "elsewhere"), ("./elsewhere", "elsewhere"),
    ],
)  # fmt: skip
def test_a_name_and_a_path_mean_the_same_run(checkout: Path, target: str, path: str) -> None:
    assert existing_run(target) == Path(path)
    assert existing_run(str(checkout / path)) == checkout / path


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("first", "runs/first"), ("runs/first", "runs/first"), ("new", "runs/new"), ("runs/new", "runs/new"),
        ("./runs/new", "runs/new"), ("group/new", "runs/group/new"), ("./new", "new"), ("elsewhere", "runs/elsewhere"),
        ("./elsewhere", "elsewhere"), ("runs/runs/x", "runs/runs/x"),
    ],
)  # fmt: skip
def test_training_continues_a_run_by_any_of_its_names_and_never_below_runs_twice(
    checkout: Path, target: str, path: str
) -> None:
    before = sorted(checkout.rglob("*"))
    assert new_run(target) == Path(path)
    assert sorted(checkout.rglob("*")) == before


WRONG = ["", "  ", ".", "..", "./", "runs", "runs/..", "runs/.", "/", "-x", "--out", "x" * 300]


@pytest.mark.parametrize("target", WRONG)
def test_what_is_no_run_of_its_own_is_refused_with_the_runs_that_are_there(
    checkout: Path, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(checkout.rglob("*"))
    for name, words in READERS.items():
        assert main([name, *words(target)]) == 2, name
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert "runs in runs: cv, first, group/second" in err
    assert main(["train", "--shards", "shards", "--recipe", "r.toml", f"--run={target}"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert sorted(checkout.rglob("*")) == before


def test_a_run_that_is_not_there_is_told_with_those_that_are(checkout: Path) -> None:
    with pytest.raises(ResoluteError, match=r"at runs/frist or frist; runs in runs: cv, first, group/second$"):
        existing_run("frist")
    with pytest.raises(ResoluteError, match="there are no runs in other yet"):
        existing_run("frist", runs=Path("other"))
    with pytest.raises(ResoluteError, match="which is a file"):
        new_run("first/last.pt")


@pytest.mark.parametrize(("target", "folder"), [("q", "runs/q"), ("runs/q", "runs/q"), (None, "runs/r")])
def test_the_trainer_gets_the_folder(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, target: str | None, folder: str
) -> None:
    folders = []
    monkeypatch.setattr(runs_module, "run", lambda options, ranks: folders.append(options.folder) or 0)
    assert main(["train", "--shards", "s", "--recipe", "r.toml", *([] if target is None else ["--run", target])]) == 0
    assert folders == [Path(folder)]
