"""Predictions: a folder gives those of its shards within JPEG noise, and an ensemble gives the mean of its members."""

from __future__ import annotations

import csv
import errno
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from resolute.cli import main
from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.dataset.target import Target
from resolute.pipeline.loader.loader import Loader
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import Stage
from resolute.prep.convert.decode import Reject, decode
from resolute.prep.sources import fetch
from resolute.prep.storage import retry
from resolute.train import checkpoint
from resolute.train.inference import predict as predict_module
from resolute.train.inference.predict import PredictionBatch
from resolute.train.inference.saved_run import open_eval_set, open_saved_run
from resolute.train.model.outputs import Outputs


def predict(run: Path, source: Path | str, out: Path, *more: str) -> list[dict[str, str]]:
    words = ["predict", str(run), "--src", str(source), "--out", str(out), "--device", "cpu", "--threads", "1", *more]
    assert main(words) == 0
    with out.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def photos(shard_root: Path) -> list[Path]:
    """The source photo of each validation sample."""
    return [shard_root.parent / "photos" / name for name in ShardSet.open(shard_root).photo_names("val")]


def test_probabilities_of_shards_equal_the_networks_and_those_of_the_folder_are_close(
    trained: Path, shard_root: Path, photos: list[Path], tmp_path: Path
) -> None:
    rows = predict(trained, shard_root, tmp_path / "shards.csv")
    assert [row["image"] for row in rows] == [f"{path.parent.name}/{path.name}" for path in photos]
    assert {row["split"] for row in rows} == {"val"}
    saved, shards = open_saved_run(trained), ShardSet.open(shard_root)
    network = saved.network(saved.best_weights, torch.device("cpu"))
    plan = Plan(shards, [Stage(res=48, epochs=1, batch_size=75)], eval_batch_size=8)
    expected = []
    with Loader(plan, num_threads=1, start=1) as loader, torch.no_grad():
        for batch in loader:
            images = batch.images
            expected.append(((network(images) + network(images.flip(3))) / 2).softmax(1))  # the recipe flips
    table = predict(trained, shard_root, tmp_path / "wide.csv", "--format", "wide")
    for row, wide, path, values in zip(rows, table, photos, torch.cat(expected), strict=True):
        got = torch.tensor([float(wide[name]) for name in saved.classes])
        torch.testing.assert_close(got, values, atol=2e-5, rtol=0)
        assert {row[f"class{k}"]: row[f"prob{k}"] for k in (1, 2, 3)}.items() <= wide.items()
        assert row["prob1"] == max((wide[name] for name in saved.classes), key=float)
        assert row["label"] == path.parent.name
    folder = predict(trained, shard_root.parent / "photos", tmp_path / "folder.csv", "--topk", "1")
    assert len(folder) == 90
    assert [*folder[0]] == ["image", "class1", "prob1"]  # neither labels nor errors
    by_name = {row["image"]: float(row["prob1"]) for row in folder}
    assert all(abs(by_name[row["image"]] - float(row["prob1"])) < 0.02 for row in rows)


def test_a_line_says_which_photos_of_a_set_are_predicted(
    trained: Path, shard_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = predict(trained, shard_root, tmp_path / "p.csv", "--split", "train", "--format", "wide")
    line = f"{shard_root}: predicting 75 photos of train, not the 15 of val (--split val)\n"
    assert line in capsys.readouterr().out
    assert [*rows[0]] == ["image", "split", "label", "class0", "class1", "class2"]
    assert {row["split"] for row in rows} == {"train"}
    assert all((shard_root.parent / "photos" / row["image"]).is_file() for row in rows)
    words = ["predict", str(trained), "--src", str(shard_root), "--out", str(tmp_path / "p.csv"), "--split", "x"]
    assert main(words) == 2
    assert "got split x, expected one of train, val; choose another" in capsys.readouterr().err


def test_an_ensemble_predicts_the_mean_probabilities_of_its_folds(
    trained: Path, shard_root: Path, tmp_path: Path
) -> None:
    state = torch.load(trained / "best.pt", weights_only=True)
    for k, scale in enumerate((1.0, -3.0)):
        (tmp_path / f"fold-{k}").mkdir()
        state["model"]["fc.weight"] = state["model"]["fc.weight"] * scale
        checkpoint.save(tmp_path / f"fold-{k}" / "best.pt", state)
    words = ("--weights", "raw", "--format", "wide")
    each = [predict(tmp_path / f"fold-{k}", shard_root, tmp_path / f"{k}.csv", *words) for k in (0, 1)]
    rows = predict(tmp_path, shard_root, tmp_path / "both.csv", *words)
    assert len(rows) == 15
    for row, first, second in zip(rows, *each, strict=True):
        for name in ("class0", "class1", "class2"):
            assert float(row[name]) == pytest.approx((float(first[name]) + float(second[name])) / 2, abs=2e-6)


def test_photos_that_prep_rejects_are_reported_in_their_rows_and_the_others_are_predicted(
    trained: Path, photos: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, photo = tmp_path / "in", photos[0].read_bytes()
    root.mkdir()
    (root / "good.jpg").write_bytes(photo)
    (whole,) = predict(trained, root, tmp_path / "whole.csv")
    Image.fromarray(np.zeros((40, 40), np.float32)).save(root / "float.tif")
    (root / "cut.jpg").write_bytes(photo[: len(photo) // 2])
    (root / "empty.png").touch()
    (root / "gone.jpg").symlink_to("nowhere")
    rows = {row["image"]: row for row in predict(trained, root, tmp_path / "pred.csv")}
    assert "5 images; 4 could not be read" in (out := capsys.readouterr().out)
    assert "overwritten" not in out
    predict(trained, root, tmp_path / "pred.csv")
    assert f"{tmp_path / 'pred.csv'}: exists, and will be overwritten\n" in capsys.readouterr().out
    assert rows.pop("good.jpg") == whole | {"error": ""}
    assert rows.pop("gone.jpg")["error"] == "not there: no such file when the source was listed"
    assert set(rows) == {"float.tif", "cut.jpg", "empty.png"}
    for name, row in rows.items():
        with pytest.raises(Reject) as reject:
            decode((root / name).read_bytes())
        assert (row["error"], row["class1"]) == (str(reject.value), "")


def test_an_io_error_ends_the_command(
    trained: Path,
    photos: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "in").mkdir()
    for name in ("0.jpg", "1.jpg"):
        shutil.copy(photos[0], tmp_path / "in" / name)
    opened = fetch._open

    def failing(path: str) -> int:
        if path.endswith("1.jpg"):
            raise OSError(errno.EIO, "Input/output error")
        return opened(path)

    monkeypatch.setattr(fetch, "_open", failing)
    monkeypatch.setattr(retry, "WAITS_S", (0.0, 0.0))
    words = ["predict", str(trained), "--src", str(tmp_path / "in"), "--out", str(tmp_path / "p.csv")]
    assert main([*words, "--device", "cpu"]) == 2
    assert "1.jpg: storage is unavailable, got 'Input/output error'" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.fixture
def unsorted(trained: Path, photos: list[Path], tmp_path: Path) -> dict[str, dict[str, str]]:
    """The predictions, with a column per class, of tmp_path/in: a/b.jpg, a/c.d.jpg, e/b.png and the damaged f.jpg."""
    for name, source in zip(("a/b.jpg", "a/c.d.jpg", "e/b.png"), photos[::5], strict=True):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.open(source).save(tmp_path / "in" / name)
    (tmp_path / "in" / "f.jpg").write_bytes(b"\xff\xd8 no photo")
    rows = predict(trained, tmp_path / "in", tmp_path / "wide.csv", "--format", "wide")
    return {row["image"]: row for row in rows}


@pytest.mark.parametrize(
    "ids",
    [
        {"e/b.png": "e/b.png", "a/c.d.jpg": "a/c.d.jpg"},
        {"e/b": "e/b.png", "a/c.d": "a/c.d.jpg"},
        {"test/c.d.jpg": "a/c.d.jpg", "b.png": "e/b.png"},
        {"c.d": "a/c.d.jpg", "f.jpg": "f.jpg"},
    ],
)
def test_a_submission_has_the_header_the_ids_and_the_order_of_its_sample(
    trained: Path,
    unsorted: dict[str, dict[str, str]],
    tmp_path: Path,
    ids: dict[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    capsys.readouterr()
    for columns in (["category"], ["class2", "class0"]):
        text = "".join(f"{','.join(row)}\n" for row in (["Id", *columns], *([key, *columns] for key in ids)))
        (tmp_path / "sample.csv").write_text("\ufeff" + text)
        out = tmp_path / f"{len(columns)}.csv"
        rows = predict(trained, tmp_path / "in", out, "--sample", str(tmp_path / "sample.csv"))
        assert out.read_text().splitlines()[0] == ",".join(["Id", *columns])
        assert [row["Id"] for row in rows] == [*ids]
        for row in rows:
            expected = unsorted[ids[row["Id"]]]
            probabilities = {name: expected[name] for name in ("class0", "class1", "class2")}
            if expected["error"]:
                assert {row[name] for name in columns} == {""}
            elif len(columns) == 1:
                assert probabilities[row["category"]] == max(probabilities.values())
            else:
                assert {name: row[name] for name in columns}.items() <= probabilities.items()
    assert ("1 could not be read, their cells are empty (f.jpg: " in capsys.readouterr().out) == ("f.jpg" in ids)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("id,x\nb,0\n", "the id b fits 2 photos, "),
        ("id,x\ne/b,0\nq,0\nr,0\n", "2 of 3 ids have no photo in "),
        ("id,class0,x\ne/b,0,0\n", "has the column 'x', expected one column besides the ids, or names of the run's "),
        ("id\ne/b\n", "has 1 columns and 1 rows"),
    ],
)
def test_a_sample_that_does_not_fit_is_refused_before_predicting(
    trained: Path, unsorted: object, tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sample.csv").write_text(text)
    words = ["predict", trained, "--src", tmp_path / "in", "--sample", tmp_path / "sample.csv", "--device", "cpu"]
    capsys.readouterr()
    assert main([*map(str, words), "--out", str(tmp_path / "s.csv")]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "s.csv").exists()
    assert main([*map(str, words), "--out", str(tmp_path / "sample.csv")]) == 2
    assert "sample.csv exists, expected a new name; choose another" in capsys.readouterr().err


def test_targets_of_labels_are_compared_by_name() -> None:
    head = Outputs(target=Target(kind="labels", names=("a", "b", "c")), loss="bce")

    def own(*names: str) -> Any:
        batch = PredictionBatch(
            names=["x"],
            predictions=torch.zeros(1, 3),
            targets=torch.tensor([[1.0, 0.0, 0.5]]),
            classes=names,
            errors={},
        )
        found = predict_module._own_targets(head, batch)
        return None if found is None else found.tolist()

    assert own("a", "b", "c") == [[1.0, 0.0, 0.5]]
    assert own("c", "a", "b") == [[0.0, 0.5, 1.0]]
    assert own("a", "b", "z") is None


def test_a_run_that_does_not_name_its_set_predicts_photos(trained: Path, photos: list[Path], tmp_path: Path) -> None:
    """As older runs do; only commands that need the set ask for it."""
    state = torch.load(trained / "best.pt", weights_only=True)
    digest = state.pop("set")
    assert digest
    checkpoint.save(tmp_path / "best.pt", {key: value for key, value in state.items() if key != "sha256"})
    assert len(predict(tmp_path / "best.pt", photos[0].parent, tmp_path / "p.csv")) > 0
    with pytest.raises(ResoluteError, match="does not say on which set it was trained"):
        open_eval_set(None, open_saved_run(tmp_path / "best.pt"))
