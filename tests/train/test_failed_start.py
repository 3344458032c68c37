"""A run that fails before its first batch leaves nothing behind; one that exists stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from resolute.cli import main
from resolute.train import trainer
from resolute.train.planner.batch_size import DoesNotFit
from tests.train.conftest import stages


def _fails(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["train", *words, "--device", "cpu", "--threads", "1"]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("folds", [(), ("--folds", "2")], ids=["run", "folds"])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("stages[0].res=512", "no shards at 512 px"),
        ("stages[0].batch_size=4096", "batch_size: got 4096, expected at most"),
        ("model.name=no_such_model", "timm cannot build 'no_such_model'"),
        ("model.weights=gone.safetensors", "gone.safetensors not found"),
        ("optim.lrr=1", "optim.lrr: no such setting"),
    ],
)
def test_what_does_not_fit_leaves_no_folder(
    folds: tuple[str, ...],
    settings: str,
    message: str,
    shard_root: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = (str(shard_root), "--runs", str(tmp_path / "runs"), "--run", "group/first", *folds)
    assert message in _fails(*words, "--set", settings, capsys=capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folds", [(), ("--folds", "2")], ids=["run", "folds"])
def test_a_failed_warm_up_leaves_no_folder_and_no_recipe_for_the_next_start(
    folds: tuple[str, ...],
    shard_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(session: trainer._Session) -> None:
        assert (session.options.folder / "run.jsonl").exists()
        raise DoesNotFit("train", 64, 8)

    monkeypatch.setattr(trainer._Session, "_warm_up", fail)
    words = (str(shard_root), "--runs", str(tmp_path / "runs"), "--run", "first", *folds)
    assert "out of memory" in _fails(*words, capsys=capsys)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_exists_and_other_files_stay(
    words: Callable[[Path], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(session: trainer._Session) -> None:
        raise DoesNotFit("train", 64, 8)

    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "notes.txt").write_text("mine")
    with monkeypatch.context() as patch:
        patch.setattr(trainer._Session, "_warm_up", fail)
        assert main(words(tmp_path)) == 2
    assert [path.name for path in (tmp_path / "tiny").iterdir()] == ["notes.txt"]
    assert main(words(tmp_path)) == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "tiny").iterdir()}
    assert main([*words(tmp_path), "--set", "optim.lr=0.5"]) == 2
    assert {path.name: path.read_bytes() for path in (tmp_path / "tiny").iterdir()} == before


def test_another_recipe_is_answered_with_what_differs_and_how_many_stages_there_are(
    words: Callable[[Path], list[str]], shard_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(tmp_path)) == 0
    recipe = tmp_path / "other.toml"
    recipe.write_text(f'model.name = "test_resnet"\noptim.lr = 0.3\n{stages((32, 2, 16), (64, 1, 8))}')
    other = ("--recipe", str(recipe), "--run", "tiny", "--runs", str(tmp_path))
    error = _fails(str(shard_root), *other, capsys=capsys)
    assert "made with another recipe: the run has 3 stages, the recipe 2; stages[0].fraction: the run has 0.5" in error
    assert "stages[1].res: the run has 48, the recipe 64" in error or "more; use another RUN for this recipe" in error
    assert f"or the run's own ({tmp_path / 'tiny' / 'recipe.toml'})" in error
    assert len(error) < 700
