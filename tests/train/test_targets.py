"""Runs on sets whose samples have several labels or values: from the loss to the predictions."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from resolute.cli import main
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.dataset.target import IGNORED, Target
from resolute.train.inference.saved_run import open_saved_run
from resolute.train.logs.metrics import read_log
from resolute.train.model.outputs import Outputs
from resolute.train.recipe.schema import Distill
from resolute.train.recipe.sections import AutoLoss
from tests.support.exported import predict_exported
from tests.support.retarget import retarget
from tests.train.conftest import epochs_of, stages, train_words

LABELS = ("first", "second", "any", "never")
STAGES = stages((32, 3, 16), (48, 2, 16))
RECIPE = f"""
seed = 3
optim = {{ name = "adamw", lr = 0.01, weight_decay = 0.0 }}
ema = {{ decay = 0.5 }}
precision = {{ amp = "off" }}
augment = {{ mixup_alpha = 0.2 }}
eval = {{ batch_size = 8 }}
[model]
name = "test_resnet"
{STAGES}"""


def of_kind(kind: str, shard_root: Path, root: Path) -> ShardSet:
    """A copy of the set with several labels, or values, that follow from the class of each sample."""
    shutil.copytree(shard_root, root)
    splits = {name: split.samples[:]["label"].tolist() for name, split in ShardSet.open(root).splits.items()}
    if kind == "labels":
        classes = {
            name: [[c for c in (0, 1) if c == label] + [2] for label in labels] for name, labels in splits.items()
        }
        return retarget(root, Target(kind="labels", names=LABELS), classes)
    numbers = {name: [(1000.0 + 100 * label, -5.0) for label in labels] for name, labels in splits.items()}
    return retarget(root, Target(kind="values", names=("size", "constant"), units=("mm", "")), numbers)


@pytest.fixture(scope="module", params=["labels", "values"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def shards(kind: str, shard_root: Path, tmp_path_factory: pytest.TempPathFactory) -> ShardSet:
    return of_kind(kind, shard_root, tmp_path_factory.mktemp(kind) / "set")


def train(shards: ShardSet, runs: Path, recipe: str = RECIPE, *more: str) -> Path:
    """Train `recipe`; returns the run's folder."""
    runs.mkdir(parents=True, exist_ok=True)
    (runs / "r.toml").write_text(recipe)
    assert main(train_words(shards.root, runs / "r.toml", runs, *more)) == 0
    return runs / "r"


@pytest.fixture(scope="module")
def run(shards: ShardSet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(shards, tmp_path_factory.mktemp("runs"))


@pytest.mark.slow
def test_a_run_learns_and_keeps_evaluates_and_draws_the_epoch_with_the_best_metric(
    kind: str, shards: ShardSet, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    epochs = epochs_of(run)
    key = {"labels": "mAP", "values": "r2"}[kind]
    scores = [max(epoch[key], epoch[f"ema_{key}"]) for epoch in epochs]
    assert len(scores) == 5
    assert max(scores[3:]) > 0.6
    saved = open_saved_run(run)
    assert saved.metric.key == key
    assert saved.best_score == max(scores[3:])  # at the last resolution
    assert read_log(run / "run.jsonl")[-2][f"best_{key}"] == saved.best_score
    out = tmp_path / "eval.json"
    capsys.readouterr()
    assert main(["eval", str(run), "--shards", shards.root, "--json", str(out), "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    if kind == "values":  # one is in mm, the other has no unit
        assert re.search(r"^  res  weights +R²$", printed, re.MULTILINE)
        assert re.search(r"^  size: MAE \S+, RMSE \S+ mm, R² ", printed, re.MULTILINE)
    rows = json.loads(out.read_text())["rows"]
    assert max(row[key] for row in rows) == pytest.approx(saved.best_score, abs=1e-5)
    page = (run / "report.html").read_text(encoding="utf-8")
    for text in (
        ("first", "second", "average precision")
        if kind == "labels"
        else (' mm</b><span class="soft">RMSE of size, ', "size: errors")
    ):
        assert text in page


def test_predictions_are_in_the_form_of_the_target(
    kind: str, shards: ShardSet, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "pred.csv"
    assert main(["predict", str(run), "--src", shards.root, "--out", str(out), "--device", "cpu"]) == 0
    assert ("RMSE" in capsys.readouterr().out) is False  # of values in different units
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 15
    if kind == "labels":
        for row in rows:
            above = [name for name in LABELS if float(row[name]) >= 0.5]
            assert row["predicted"] == "|".join(above)
        assert {row["labels"] for row in rows} == {"first|any", "second|any", "any"}
        assert all(row["predicted"].endswith("any") for row in rows)
    else:
        got = np.array([[float(row["predicted size"]), float(row["true size"])] for row in rows])
        assert {*got[:, 1].tolist()} == {1000.0, 1100.0, 1200.0}
        assert np.abs(got[:, 0] - got[:, 1]).mean() < 30
        assert all(abs(float(row["predicted constant"]) + 5) < 1 for row in rows)


def test_a_set_of_another_kind_is_refused_in_one_line(
    kind: str, shards: ShardSet, run: Path, shard_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    renamed = Path(shutil.copytree(shards.root, tmp_path / "renamed"))
    retarget(renamed, dataclasses.replace(shards.target, names=shards.target.names[::-1]), {})
    wanted = f"expected {'several labels per sample' if kind == 'labels' else 'numbers'}"
    out, table = tmp_path / "e.json", tmp_path / "p.csv"
    for words, message in (
        (["eval", run, "--shards", shard_root, "--json", out], f"got one class per sample, {wanted}"),
        (["eval", run, "--shards", renamed, "--json", out], f"{'class' if kind == 'labels' else 'valu'}es differ from"),
        (["predict", run, "--src", shard_root, "--out", table], "got one class per sample"),
    ):
        assert main([*map(str, words), "--device", "cpu"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
        assert not out.exists()
        assert not table.exists()


def test_values_are_standardised_by_the_training_split(shard_root: Path, tmp_path: Path) -> None:
    shards = of_kind("values", shard_root, tmp_path / "set")
    values = shards.target.decode(shards.splits["train"].samples[:]).astype(np.float64)
    head = Outputs.of(shards, AutoLoss(), Distill())
    assert head.mean == pytest.approx(values.mean(0).tolist())
    assert head.std == pytest.approx([values[:, 0].std(), 1.0])  # a constant column is only shifted
    assert Outputs.from_json(json.loads(json.dumps(head.to_json()))) == head
    plain = Outputs.of(shards, AutoLoss(standardize=False), Distill())
    assert (plain.mean, plain.std) == ((0.0, 0.0), (1.0, 1.0))


@pytest.mark.slow
def test_an_exported_program_writes_the_predictions_and_submissions_have_labels_or_values(
    kind: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photo, sample = tmp_path / "photo.jpg", tmp_path / "sample.csv"
    pixels = np.random.default_rng(0).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((120, 90), Image.Resampling.BICUBIC).save(photo, quality=95)
    words = ["predict", str(run), "--src", str(photo), "--device", "cpu", "--out"]
    assert main([*words, str(tmp_path / "p.csv")]) == 0
    with (tmp_path / "p.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)

    submission = tmp_path / "s.csv"
    submit = [*words, str(submission), "--sample", str(sample)]
    tags, columns = ("id,tags", ["predicted"]), ("id,constant,size", ["predicted constant", "predicted size"])
    for header, cells in [tags, ("id,first", ["first"])] if kind == "labels" else [columns]:
        sample.write_text(f"{header}\nphoto,0\n")
        assert main(submit) == 0
        expected = [row[name].replace("|", " ") for name in cells]
        assert submission.read_text().splitlines() == [header, ",".join(["photo", *expected])]
        submission.unlink()
    sample.write_text(f"{(columns if kind == 'labels' else tags)[0]}\nphoto,0\n")
    assert main(submit) == 2
    assert "expected one column besides the ids, or names of the run's " in capsys.readouterr().err

    assert main(["export", str(run), "--out", str(tmp_path / "m")]) == 0
    (theirs,) = predict_exported(tmp_path / "m", photo)
    assert [*theirs] == [*row, "error"]
    if kind == "labels":
        assert theirs.pop("predicted") == row["predicted"]
    for name in theirs.keys() - {"image", "error"}:
        assert float(theirs[name]) == pytest.approx(float(row[name]), abs=0.01 * (100 if kind == "values" else 1))


@dataclasses.dataclass(frozen=True)
class Ignored:
    """A set with several labels, `plain`; the same with 30 % of its labels ignored, `shards`, and the run on it.

    `labels`: {split: (samples, labels) of -1, 0 and 1}.
    """

    plain: ShardSet
    shards: ShardSet
    run: Path
    labels: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def ignored(shard_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Ignored:
    folder = tmp_path_factory.mktemp("ignored")
    plain = of_kind("labels", shard_root, folder / "plain")
    of_kind("labels", shard_root, folder / "set")
    rng, labels, rows = np.random.default_rng(2), {}, {}
    for name, split in plain.splits.items():
        dense = plain.target.decode(split.samples[:])
        dense[rng.random(dense.shape) < 0.3] = -1
        labels[name] = dense
        rows[name] = [[*np.flatnonzero(row == 1), *(IGNORED + np.flatnonzero(row == -1))] for row in dense]
    shards = retarget(folder / "set", Target(kind="labels", names=LABELS, ignored=True), rows)
    return Ignored(plain=plain, shards=shards, run=train(shards, folder / "runs"), labels=labels)


def _evaluated(run: Path, shards: ShardSet, folder: Path) -> list[dict[str, Any]]:
    """The rows that `resolute eval` writes for a run on a set."""
    out = folder / "eval.json"
    assert main(["eval", str(run), "--shards", shards.root, "--json", str(out), "--device", "cpu"]) == 0
    rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
    return rows


def test_a_run_with_ignored_labels_has_finite_losses_and_evaluates_the_others(ignored: Ignored, tmp_path: Path) -> None:
    saved = open_saved_run(ignored.run)
    assert saved.head.target == ignored.shards.target
    assert all(epoch["loss"] is not None and epoch["eval_loss"] > 0 for epoch in epochs_of(ignored.run))
    best = max(_evaluated(ignored.run, ignored.shards, tmp_path), key=lambda row: row["mAP"])
    assert best["mAP"] == pytest.approx(saved.best_score, abs=1e-5)
    positives = (ignored.labels["val"] == 1).sum(0).tolist()
    assert [row["samples"] for row in best["details"]["classes"]] == positives


def test_predictions_of_a_set_with_ignored_labels_name_those_that_are_known(ignored: Ignored, tmp_path: Path) -> None:
    table = tmp_path / "p.csv"
    words = ["predict", str(ignored.run), "--src", ignored.shards.root, "--out", str(table), "--device", "cpu"]
    assert main(words) == 0
    with table.open(newline="") as file:
        written = [row["labels"] for row in csv.DictReader(file)]
    assert written == ["|".join(np.array(LABELS)[row == 1]) for row in ignored.labels["val"]]


def test_ignored_labels_are_shown_as_such(ignored: Ignored, tmp_path: Path) -> None:
    recipe, out = ignored.run.parent / "r.toml", tmp_path / "s.html"
    assert main(["show", "--recipe", str(recipe), "--shards", ignored.shards.root, "--out", str(out)]) == 0
    assert "any ignored" in out.read_text(encoding="utf-8")


def test_a_run_without_ignored_labels_leaves_them_out_of_the_evaluation_of_a_set_with_some(
    ignored: Ignored, tmp_path: Path
) -> None:
    other = train(ignored.plain, tmp_path / "others", RECIPE.replace(STAGES, stages((48, 1, 16))))
    rows = _evaluated(other, ignored.shards, tmp_path)
    positives = (ignored.labels["val"] == 1).sum(0).tolist()
    assert [row["samples"] for row in rows[0]["details"]["classes"]] == positives
