"""A run keeps the generation of its shard set: photos that are added while it lasts change nothing for it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from resolute.cli import main
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.train import checkpoint
from resolute.train.inference.saved_run import open_eval_set, open_saved_run, training_overlap
from tests.conftest import make_photos
from tests.support.cli import prep
from tests.train.conftest import SMALL, assert_equal_runs, stages, stop_at, train_words


@pytest.fixture
def extend(tmp_path: Path) -> Any:
    """A set in tmp_path/s; extend("class3") adds 20 photos of a class to it."""
    make_photos(tmp_path / "all", classes=4, each=30)
    for label in range(3):
        (tmp_path / "photos" / f"class{label}").mkdir(parents=True)
        for photo in sorted((tmp_path / "all" / f"class{label}").iterdir())[:20]:
            shutil.copy(photo, tmp_path / "photos" / f"class{label}")
    words = [
        "--src",
        tmp_path / "photos",
        "--out",
        tmp_path / "s",
        "--res",
        "32,48",
        "--val-frac",
        "0.2",
        "--shard-samples",
        "16",
        "--workers",
        "1",
    ]
    assert prep([str(word) for word in words]) == 0

    def extend(label: str, *more: str) -> None:
        shutil.copytree(tmp_path / "all" / label, tmp_path / "photos" / label, dirs_exist_ok=True)
        assert prep([*map(str, words), "--extend", *more]) == 0

    return extend


def words(folder: Path, run: str, recipe: str = SMALL) -> list[str]:
    (folder / "small.toml").write_text(recipe)
    return train_words(folder / "s", folder / "small.toml", folder, "--run", run, "--save-every-steps", "1")


@pytest.mark.slow
def test_a_run_is_resumed_bit_exactly_on_its_own_generation_and_a_new_one_takes_the_photos_of_all(
    extend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(tmp_path, "whole")) == 0
    with monkeypatch.context() as patch:
        stop_at(patch, 2)
        assert main(words(tmp_path, "cut")) == 128 + 15
    extend("class0")
    extend("class3")
    capsys.readouterr()
    assert main(words(tmp_path, "cut")) == 0
    out = capsys.readouterr().out
    assert "photos were added since this run began; it continues without them, on generation 0" in out
    assert "resuming at batch 3" in out
    assert_equal_runs(tmp_path / "cut", tmp_path / "whole")
    assert checkpoint.peek(tmp_path / "cut" / "last.pt", "generation") == 0
    recipe = SMALL.replace("epochs = 2", "epochs = 1")
    assert main(words(tmp_path, "new", f'{recipe}[data]\norder = "windowed"\n')) == 0
    start = json.loads((tmp_path / "new" / "run.jsonl").read_text().splitlines()[0])
    newest = ShardSet.open(tmp_path / "s")
    assert sum(map(len, newest.splits.values())) == 100
    assert (start["classes"], start["train_samples"]) == (4, len(newest.splits["train"]))
    assert start["generation"] == checkpoint.peek(tmp_path / "new" / "last.pt", "generation") == 2


@pytest.mark.slow
def test_a_run_is_evaluated_on_the_newest_photos_that_it_did_not_see(
    extend: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(tmp_path, "first")) == 0
    saved = open_saved_run(tmp_path / "first")
    extend("class0")
    newest = open_eval_set(str(tmp_path / "s"), saved)
    assert (newest.generation, len(newest.splits["val"])) == (1, 14)
    assert training_overlap(saved, newest, split="val", fold=None) is None
    assert "was trained on these photos" in str(training_overlap(saved, newest, split="train", fold=None))
    extend("class1")
    third = open_eval_set(str(tmp_path / "s"), saved)
    assert third.generation == 2
    names = {split: third.photo_names(split) for split in ("train", "val")}
    for split, of_split in names.items():  # generations do not shift them
        labels = third.splits[split].samples[:]["label"].tolist()
        assert [name.partition("/")[0] for name in of_split] == [f"class{label}" for label in labels]
    there = [str(path.relative_to(tmp_path / "photos")) for path in (tmp_path / "photos").rglob("*.jpg")]
    assert sorted(names["train"] + names["val"]) == sorted(there)
    extend("class3")  # the run does not know this class
    own = open_eval_set(str(tmp_path / "s"), saved)
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "first"), "--shards", str(tmp_path / "s"), "--device", "cpu"]) == 0
    assert "note: without the photos that were added" in capsys.readouterr().out
    assert (own.generation, own.classes) == (0, ("class0", "class1", "class2"))
    assert training_overlap(saved, own, split="val", fold=None) is None


@pytest.mark.slow
def test_all_folds_of_a_cross_validation_use_one_generation(extend: Any, tmp_path: Path) -> None:
    recipe = f'[model]\nname = "test_resnet"\n[optim]\nlr = 0.001\n[precision]\namp = "off"\n{stages((32, 1, 8))}'
    assert main([*words(tmp_path, "cv", recipe), "--folds", "0/2"]) == 0
    extend("class3")
    assert main([*words(tmp_path, "cv", recipe), "--folds", "0,1/2"]) == 0
    for fold in (0, 1):
        shards = open_eval_set(str(tmp_path / "s"), open_saved_run(tmp_path / "cv" / f"fold-{fold}"))
        assert shards.generation == 0
        held_out = ShardSet.open(tmp_path / "s", generation=0).with_fold(fold, 2).splits["val"]
        assert shards.splits["val"].samples["key"].tolist() == held_out.samples["key"].tolist()
