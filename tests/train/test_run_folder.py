"""RUN names the same run in every command, and a wrong RUN is reported with a list of the runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from resolute.cli import main
from resolute.errors import ResoluteError
from resolute.train.run_folder import default_run, existing_run, new_run


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with runs/first, runs/group/second, the folds runs/cv/fold-0, and a folder `first` that is not a run."""
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
        ("first", "runs/first"),
        ("./runs/first/", "runs/first"),
        ("group/second", "runs/group/second"),
        ("cv", "runs/cv"),
        ("runs/first/last.pt", "runs/first/last.pt"),
        ("first/last.pt", "runs/first/last.pt"),
        ("elsewhere", "elsewhere"),
    ],
)
def test_name_and_path_refer_to_the_same_run(checkout: Path, target: str, path: str) -> None:
    assert existing_run(target) == Path(path)
    assert existing_run(str(checkout / path)) == checkout / path


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("first", "runs/first"),
        ("runs/first", "runs/first"),
        ("new", "runs/new"),
        ("./runs/new", "runs/new"),
        ("group/new", "runs/group/new"),
        ("./new", "new"),
        ("elsewhere", "runs/elsewhere"),
    ],
)
def test_training_resumes_a_run_by_any_of_its_names(checkout: Path, target: str, path: str) -> None:
    before = sorted(checkout.rglob("*"))
    assert new_run(target) == Path(path)
    assert sorted(checkout.rglob("*")) == before


def test_a_missing_run_is_reported_with_a_list_of_the_runs(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval"]) == 2
    assert "RUN: got nothing, expected the name or path of a run; runs in runs: cv" in capsys.readouterr().err
    with pytest.raises(ResoluteError, match=r"at runs/frist or frist; runs in runs: cv, first, group/second$"):
        existing_run("frist")
    with pytest.raises(ResoluteError, match="there are no runs in other yet"):
        existing_run("frist", runs=Path("other"))
    with pytest.raises(ResoluteError, match="which is a file"):
        new_run("first/last.pt")


@pytest.mark.parametrize(
    ("shards", "name"),
    [
        ("imagenet/", "rn50-imagenet"),
        ("/data/imagenet/shards", "rn50-imagenet"),
        ("../shards", "rn50-shards"),
        ("s3://bucket/a/shards", "rn50-a"),
        ("rn50/shards", "rn50"),
        (".", "rn50"),
    ],
)
def test_a_run_is_named_after_its_recipe_and_set(shards: str, name: str) -> None:
    assert default_run(Path("recipes/rn50.toml"), shards) == name
