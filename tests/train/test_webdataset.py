"""Third-party tars are accepted by every command that accepts a shard set."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from resolute.cli import main
from resolute.train.inference import export
from resolute.train.logs.metrics import read_log
from tests.support.cli import bench
from tests.support.third_party_tars import encoded, write
from tests.train.conftest import stages

RECIPE = f"""
[model]
name = "test_resnet"
[precision]
amp = "off"
[eval]
batch_size = 8
{stages((32, 1, 8), (48, 1, 8))}"""


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with wds/ (24 training samples of 3 classes, 9 for validation), recipe, class names and a run."""
    folder = tmp_path_factory.mktemp("tars")
    for split, numbers in (("train", range(24)), ("val", range(24, 33))):
        samples = [{"__key__": f"{i:06d}", "jpg": encoded(i), "cls": str(i % 3).encode()} for i in numbers]
        write(folder / "wds" / f"{split}-%03d.tar", samples)
    (folder / "tiny.toml").write_text(RECIPE)
    (folder / "names.txt").write_text("ant\nbee\ncat\n")
    assert main([*words(folder), "--runs", str(folder / "runs")]) == 0
    return folder


def words(folder: Path) -> list[str]:
    return ["train", "--shards", str(folder / "wds"), "--val", "*val*", "--recipe", str(folder / "tiny.toml"),
            "--run", "tiny",
            "--device", "cpu", "--threads", "1"]  # fmt: skip


def test_eval_equals_the_validation_of_the_run(tars: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = tars / "runs" / "tiny", tars / "e.json"
    assert main(["eval", str(run / "last.pt"), "--shards", str(tars / "wds"), "--val", "*val*", "--device", "cpu",
                          "--threads", "1", "--res", "40,48", "--json", str(out)]) == 0  # fmt: skip
    result = json.loads(out.read_text())
    epoch = [record for record in read_log(run / "run.jsonl") if record["kind"] == "epoch"][-1]
    assert [row["res"] for row in result["rows"]] == [40, 48]
    assert (result["rows"][1]["top1"], result["rows"][1]["samples"]) == (epoch["top1"], 9)
    assert result["note"] is None
    assert "note:" not in capsys.readouterr().out


def test_tars_with_fewer_classes_use_the_classes_of_the_run(tars: Path, tmp_path: Path) -> None:
    samples = [{"__key__": f"{i:06d}", "jpg": encoded(i), "cls": b"0"} for i in range(4)]
    write(tmp_path / "test-%03d.tar", samples)
    write(tmp_path / "other-%03d.tar", samples)
    assert main(["eval", str(tars / "runs" / "tiny"), "--shards", str(tmp_path), "--val", "test*", "--device", "cpu",
                          "--json", str(tmp_path / "e.json")]) == 0  # fmt: skip
    result = json.loads((tmp_path / "e.json").read_text())
    assert result["rows"][0]["samples"] == 4
    assert "was not trained on" in result["note"]


def test_eval_of_a_run_with_class_names_needs_the_names(
    tars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["--classes", str(tars / "names.txt")]
    assert main([*words(tars), *names, "--runs", str(tmp_path)]) == 0
    source = ["--shards", str(tars / "wds"), "--val", "*val*", "--device", "cpu"]
    assert main(["eval", str(tmp_path / "tiny"), *source]) == 2
    assert "expected 3 (ant, bee, cat …); name them with --classes" in capsys.readouterr().err
    assert main(["eval", str(tmp_path / "tiny"), *source, *names]) == 0


def test_predict_accepts_folder_pattern_and_single_tar(tars: Path, tmp_path: Path) -> None:
    val, wds = ["--val", "*val*"], tars / "wds"
    for source, more in ((wds, val), (wds / "*.tar", val), (wds / "val-000.tar", [])):
        out = tmp_path / "pred.csv"
        assert main(["predict", str(tars / "runs" / "tiny"), "--src", str(source), *more, "--out", str(out), "--device",
                             "cpu", "--threads", "1"]) == 0  # fmt: skip
        with out.open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == 9
        assert [row["label"] for row in rows] == [str(i % 3) for i in range(24, 33)]


def test_lr_show_and_plan_accept_third_party_tars(
    tars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = [str(tars / "wds"), "--val", "*val*"]
    recipe = ["--recipe", str(tars / "tiny.toml")]
    assert main(["lr", "--shards", *source, *recipe, "--out", str(tmp_path / "lr.html")]) == 0
    assert "6 steps" in capsys.readouterr().out  # 24 samples in batches of 8, twice
    assert main(["show", *source, *recipe, "--out", str(tmp_path / "seen.html"), "--count", "2"]) == 0
    assert main(["plan", *words(tars)[1:], "--runs", str(tmp_path), "--json", str(tmp_path / "plan.json")]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"lr.html", "seen.html", "plan.json"}


def test_export_uses_the_interpolation_of_the_training(tars: Path, tmp_path: Path) -> None:
    assert export.preprocessing(export.open_saved_run(tars / "runs" / "tiny"))["interpolation"] == "bilinear"


def test_bench_accepts_third_party_tars_at_any_resolution(tars: Path, tmp_path: Path) -> None:
    out = tmp_path / "b.json"
    assert bench(["--shards", str(tars / "wds"), "--val", "*val*", "--res", "32,48", "--only", "loader", "--seconds",
                  "0.02", "--rounds", "1", "--threads", "1", "--device", "cpu", "--out", str(out)]) == 0  # fmt: skip
    result = json.loads(out.read_text())
    assert [entry["res"] for entry in result["loader"]["res"]] == [32, 48]
    assert result["settings"]["batch_size"] == 24  # all of a set below 64


def test_tars_are_trained_and_predicted_in_folds(
    tars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words(tars), "--runs", str(tmp_path), "--folds", "2"]) == 0
    (start,) = (r for r in read_log(tmp_path / "tiny" / "fold-1" / "run.jsonl") if r["kind"] == "start")
    assert (start["train_samples"], start["val_samples"]) == (12, 12)
    out = tmp_path / "pred.csv"
    source = ["--src", str(tars / "wds"), "--val", "*val*", "--out", str(out), "--device", "cpu", "--threads", "1"]
    assert main(["predict", str(tmp_path / "tiny"), *source]) == 0
    assert "out of fold" in capsys.readouterr().out
    with out.open(newline="") as file:
        assert sorted(int(row["image"]) for row in csv.DictReader(file)) == list(range(24))
