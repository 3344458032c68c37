"""Sets and runs that earlier versions wrote, in tests/frozen, work with today's code or are refused in one line."""

from __future__ import annotations

import csv
import json
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from resolute import Loader, Plan, ShardSet, Stage
from resolute.cli import main
from resolute.train.logs.metrics import read_log
from tests import ROOT
from tests.support.exported import predict_exported
from tests.support.trees import tree

FROZEN = ROOT / "tests" / "frozen"
SAMPLES = {"0.1.0": {"train": 8, "val": 4}, "0.2.0": {"train": 10, "val": 6}}
CPU = ("--device", "cpu", "--threads", "1")


@pytest.fixture(params=SAMPLES)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def frozen(version: str, tmp_path: Path) -> Path:
    """A folder with the set `shards`, the finished run `run`, and its `predictions.csv` of the validation photos."""
    with tarfile.open(FROZEN / version / "files.tar.xz") as files:
        files.extractall(tmp_path, filter="data")
    return tmp_path


def refusal(words: Sequence[object], capsys: pytest.CaptureFixture[str]) -> str:
    """The only line on stderr of a command that refuses to work."""
    capsys.readouterr()
    assert main([*map(str, words)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def new_recipe(version: str, folder: Path) -> Path:
    """The recipe of the run, translated if it has keys of earlier versions."""
    path = folder / "recipe.toml"
    shutil.copy(FROZEN / version / "recipe.toml", path)
    if version == "0.2.0":
        assert main(["recipe", "--upgrade", str(path)]) == 0
    return path


def predictions(file: Path) -> list[tuple[str, str, float]]:
    """(label, most likely class, its probability) of each row."""
    with file.open(newline="") as lines:
        return [(row["label"], row["class1"], float(row["prob1"])) for row in csv.DictReader(lines)]


def test_an_old_set_is_sound_and_every_sample_of_it_is_loaded(version: str, frozen: Path) -> None:
    assert main(["verify", str(frozen / "shards")]) == 0
    shards = ShardSet.open(frozen / "shards")
    assert (shards.resolutions, list(shards.classes)) == ((32, 48), ["dark", "light"])
    assert {name: len(split) for name, split in shards.splits.items()} == SAMPLES[version]
    stages = [Stage(res=res, epochs=1, batch_size=2) for res in shards.resolutions]
    images: dict[str, list[torch.Tensor]] = {"train": [], "val": []}
    labels: dict[str, list[int]] = {"train": [], "val": []}
    with Loader(Plan(shards, stages, eval_batch_size=2)) as loader:
        for batch in loader:
            assert batch.images.shape == (len(batch.labels), 3, batch.spec.res, batch.spec.res)
            images[batch.spec.split].append(batch.images.mean((1, 2, 3)))
            labels[batch.spec.split] += batch.labels.tolist()
    for split, count in SAMPLES[version].items():
        assert sorted(labels[split]) == [0] * count + [1] * count  # each sample once at each of two resolutions
        brightness = torch.cat(images[split])
        is_light = torch.tensor(labels[split], dtype=torch.bool)
        assert brightness[~is_light].mean() < brightness[is_light].mean()


def test_a_run_on_an_old_set_has_the_steps_of_the_old_run(version: str, frozen: Path) -> None:
    recipe = new_recipe(version, frozen)
    words = ["--shards", frozen / "shards", "--recipe", recipe, "--run", frozen / "new", *CPU]
    assert main(["train", *map(str, words)]) == 0
    old, new = (read_log(frozen / name / "run.jsonl") for name in ("run", "new"))
    assert [record["kind"] for record in new].count("end") == 1
    old_steps, new_steps = ([record for record in log if record["kind"] == "step"] for log in (old, new))
    for now, then in zip(new_steps, old_steps, strict=True):
        assert [now[key] for key in ("step", "epoch", "stage", "res", "samples")] == [
            then[key] for key in ("step", "epoch", "stage", "res", "samples")
        ]
        assert now["lr"] == pytest.approx(then["lr"])
    # the same network, photos and crops; later, rounding differs more
    first = [[record["loss"] for record in steps if record["epoch"] == 0] for steps in (new_steps, old_steps)]
    assert first[0] == pytest.approx(first[1], abs=0.005)


def test_an_old_checkpoint_has_the_results_that_its_version_recorded(
    frozen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards, run = frozen / "shards", frozen / "run"
    recorded = json.loads((run / "eval.json").read_text())["rows"]
    assert main(["eval", str(run), "--shards", str(shards), *CPU]) == 0
    rows = json.loads((run / "eval.json").read_text())["rows"]
    assert [(row["res"], row["weights"], row["top1"], row["samples"]) for row in rows] == [
        (row["res"], row["weights"], row["top1"], row["samples"]) for row in recorded
    ]
    expected = predictions(frozen / "predictions.csv")
    assert main(["predict", str(run), "--src", str(shards), "--out", str(frozen / "now.csv"), *CPU]) == 0
    for now, then in zip(predictions(frozen / "now.csv"), expected, strict=True):
        assert now == (*then[:2], pytest.approx(then[2], abs=1e-3))
    assert main(["export", str(run), "--out", str(frozen / "export")]) == 0
    photos = []
    for path in sorted((shards / "48").glob("val-*.tar")):
        with tarfile.open(path) as tar:
            tar.extractall(frozen / "photos", filter="data")
            photos += [frozen / "photos" / member for member in tar.getnames() if member.endswith(".jpg")]
    for row, (_, name, prob) in zip(predict_exported(frozen / "export", *photos), expected, strict=True):
        assert (row["class1"], float(row["prob1"])) == (name, pytest.approx(prob, abs=0.02))


def test_an_old_run_is_not_resumed_and_stays_as_it_is(
    version: str, frozen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = new_recipe(version, frozen)
    before = tree(frozen / "run")
    line = refusal(["train", frozen / "shards", "--recipe", recipe, "--run", frozen / "run", *CPU], capsys)
    assert "made by an earlier version of Resolute, expected a run of this one; finish it with that version" in line
    assert tree(frozen / "run") == before


def test_an_old_run_goes_on_with_more_epochs_on_the_set_that_is_named(
    frozen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--run", frozen / "run", "--more-epochs", "1", *CPU]
    assert "does not say on which set it was trained, expected one; name it with --shards" in refusal(words, capsys)
    assert main([*map(str, words), "--shards", str(frozen / "shards")]) == 0
    assert (frozen / "run-plus-1" / "best.pt").exists()


def test_photos_are_not_added_to_an_old_set(frozen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tarfile.open(frozen / "shards" / "48" / "train-000000.tar") as tar:
        tar.extractall(frozen / "more" / "dark", filter="data")
    before = tree(frozen / "shards")
    words = ["shards", "--src", frozen / "more", "--out", frozen / "shards", "--res", "32,48", "--extend"]
    assert "got version 5, expected 8; train on it as it is, extend it with the version" in refusal(words, capsys)
    assert tree(frozen / "shards") == before
