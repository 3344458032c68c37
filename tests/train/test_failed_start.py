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


def _break_warm_up(patch: pytest.MonkeyPatch) -> None:
    """Warm-ups run out of memory."""

    def fail(session: trainer._Session, **_: object) -> None:
        raise DoesNotFit("train", 64, 8)

    patch.setattr(trainer._Session, "_warm_up", fail)


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
    def fail(session: trainer._Session, **_: object) -> None:
        assert (session.run.folder / "run.jsonl").exists()
        raise DoesNotFit("train", 64, 8)

    monkeypatch.setattr(trainer._Session, "_warm_up", fail)
    words = (str(shard_root), "--runs", str(tmp_path / "runs"), "--run", "first", *folds)
    assert "out of memory" in _fails(*words, capsys=capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folds", [(), ("--folds", "0/2")], ids=["run", "folds"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--from", "best.pt"), "--from: got"),
        (("--decode", "gpu"), "--decode: got gpu with device cpu"),
        (("--shards", "no_such_set"), "no_such_set"),
        (("--recipe", "no_such_recipe"), "no_such_recipe"),
    ],
)
def test_wrong_options_leave_no_folder(
    folds: tuple[str, ...],
    change: tuple[str, ...],
    message: str,
    words: Callable[[Path], list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*words(tmp_path / "runs"), *folds, *change]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_fails_after_the_warm_up_and_before_the_first_batch_leaves_no_checkpoint_and_no_logger(
    words: Callable[[Path], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        assert (tmp_path / "runs" / "tiny" / "last.pt").exists()  # its duration is measured
        raise DoesNotFit("train", 64, 8)

    monkeypatch.setattr(trainer, "measure_stages", fail)
    assert main([*words(tmp_path / "runs"), "--calibrate", "--loggers", "csv"]) == 2
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_warm_up_leaves_no_folder(
    words: Callable[[Path], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(session: trainer._Session, **_: object) -> None:
        session.stopped_by = 2
        session._check_stop()

    monkeypatch.setattr(trainer._Session, "_warm_up", interrupted)
    assert main(words(tmp_path / "runs")) == 130
    assert "stopped by SIGINT before its first batch; the same command starts it again" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_fold_that_does_not_start_leaves_the_others(
    words: Callable[[Path], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([*words(tmp_path), "--folds", "0/2"]) == 0
    before = {path: path.read_bytes() for path in (tmp_path / "tiny").rglob("*") if path.is_file()}

    _break_warm_up(monkeypatch)
    assert main([*words(tmp_path), "--folds", "1/2"]) == 2
    assert {path: path.read_bytes() for path in (tmp_path / "tiny").rglob("*") if path.is_file()} == before
    assert not (tmp_path / "tiny" / "fold-1").exists()


def test_the_log_of_a_run_that_was_killed_before_its_first_checkpoint_stays(
    words: Callable[[Path], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny").mkdir()
    for name in ("run.jsonl", "recipe.toml"):
        (tmp_path / "tiny" / name).write_text(f"an old {name}\n")

    _break_warm_up(monkeypatch)
    assert main(words(tmp_path)) == 2
    assert {path.name: path.read_text() for path in (tmp_path / "tiny").iterdir()} == {
        "run.jsonl": "an old run.jsonl\n",
        "recipe.toml": "an old recipe.toml\n",
    }


@pytest.mark.parametrize("command", ["show", "lr", "lr-find", "plan", "compare"])
def test_a_page_that_is_not_drawn_leaves_no_folder_of_runs(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([command, "gone", *(() if command == "compare" else ("--recipe", "demo"))]) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_run_that_exists_and_other_files_stay(
    words: Callable[[Path], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "notes.txt").write_text("mine")
    with monkeypatch.context() as patch:
        _break_warm_up(patch)
        assert main(words(tmp_path)) == 2
    assert [path.name for path in (tmp_path / "tiny").iterdir()] == ["notes.txt"]
    assert main(words(tmp_path)) == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "tiny").iterdir()}
    assert main([*words(tmp_path), "--set", "optim.lr=0.5"]) == 2
    assert {path.name: path.read_bytes() for path in (tmp_path / "tiny").iterdir()} == before


@pytest.mark.slow
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
