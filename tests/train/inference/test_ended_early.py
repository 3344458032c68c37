"""A run that ended before its last stage is used at the resolution of its weights, not at one that it never saw."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import timm

from resolute.cli import main
from resolute.train import trainer as runs
from resolute.train.inference.saved_run import open_saved_run
from resolute.train.logs.metrics import read_log
from tests.train.conftest import stages

RECIPE = f"""
seed = 3
model = {{ name = "test_resnet" }}
optim = {{ lr = 1e-9 }}
precision = {{ amp = "off" }}
eval = {{ batch_size = 8, crop_pct = 0.7 }}
stop = {{ patience = PATIENCE, min_delta = 0.9 }}
{stages((32, 3, 25), (48, 2, 25))}"""  # 3 steps and 2 batches of validation per epoch


@pytest.fixture(scope="module")
def early(shard_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs below this folder: stopped (early, in the first stage), first and second (interrupted in that stage, before
    any validation, and after it). Their set has 32, 48 and 64 px."""
    folder = tmp_path_factory.mktemp("early")
    after = runs._Session._after
    for name, patience, stop_at in (("stopped", 1, -1), ("first", 0, 1), ("second", 0, 16)):
        def interrupted(session: runs._Session, spec: runs.BatchSpec, at: int = stop_at) -> bool:
            session.stopped_by = 15 if spec.index == at else session.stopped_by
            return after(session, spec)

        text = RECIPE.replace("PATIENCE", str(patience))
        (folder / f"{name}.toml").write_text(text if patience else text.replace(", min_delta = 0.9", ""))
        words = ["train", "--shards", shard_root, "--recipe", folder / f"{name}.toml",
                 "--run", name, "--runs", folder, "--device"]  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runs._Session, "_after", interrupted)
            assert main([*map(str, words), "cpu", "--threads", "1"]) == (0 if patience else 128 + 15)
    return folder


def evaluated(run: Path, shards: Path, out: Path, *more: str) -> dict[str, Any]:
    words = ["eval", run, "--shards", shards, "--device", "cpu", "--json", out / "e.json", *more]
    assert main([*map(str, words)]) == 0
    (row,) = json.loads((out / "e.json").read_text())["rows"]
    return dict(row)


def test_eval_of_a_run_that_stopped_early_equals_its_best_validation(
    early: Path, shard_root: Path, tmp_path: Path
) -> None:
    for name in ("stopped", "second"):
        epochs = [record for record in read_log(early / name / "run.jsonl") if record["kind"] == "epoch"]
        assert {epoch["eval_res"] for epoch in epochs} == {32}
        row = evaluated(early / name, shard_root, tmp_path)
        best = max(epochs, key=lambda epoch: epoch["top1"])
        assert (row["res"], row["top1"], row["top5"]) == (32, best["top1"], best["top5"])


@pytest.mark.parametrize(("name", "res"), [
    ("stopped", 32), ("first", 32), ("first/last.pt", 32), ("second", 32), ("second/best.pt", 32),
    ("second/last.pt", 48),  # it has trained at 48 px since its last validation
])  # fmt: skip
def test_a_checkpoint_holds_the_resolution_of_its_weights(early: Path, name: str, res: int) -> None:
    assert open_saved_run(early / name).res == res


def test_predictions_and_exports_have_the_resolution_of_the_weights(
    early: Path, shard_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = evaluated(early / "stopped", shard_root, tmp_path)
    capsys.readouterr()
    words = ["predict", early / "stopped", "--src", shard_root, "--out", tmp_path / "p.csv", "--device", "cpu"]
    assert main([*map(str, words)]) == 0
    assert "1 run, 3 classes, 32 px, cpu" in capsys.readouterr().out
    with (tmp_path / "p.csv").open(newline="") as file:
        hits = [each["label"] == each["class1"] for each in csv.DictReader(file)]
    assert sum(hits) / len(hits) == row["top1"]
    assert main(["export", str(early / "stopped"), "--out", str(tmp_path / "folder")]) == 0
    model = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True)
    config = timm.data.resolve_model_data_config(model)
    assert (config["input_size"], config["crop_pct"]) == ((3, 32, 32), 0.7)  # eval.crop_pct
    assert json.loads((tmp_path / "folder" / "config.json").read_text())["resolute"]["res"] == 32


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the exporter's packages
def test_the_input_of_an_onnx_model_has_the_resolution_of_the_weights(early: Path, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    assert main(["export", str(early / "stopped"), "--out", str(tmp_path / "m"), "--format", "onnx"]) == 0
    (images,) = onnxruntime.InferenceSession(str(tmp_path / "m" / "model.onnx")).get_inputs()
    assert images.shape[1:] == [3, 32, 32]


def test_folds_validated_at_different_resolutions_are_averaged_at_a_chosen_one(
    early: Path, shard_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for k, file in enumerate(("second/best.pt", "second/last.pt")):
        (tmp_path / f"fold-{k}").mkdir()
        (tmp_path / f"fold-{k}" / "best.pt").hardlink_to(early / file)
    words = ["predict", tmp_path, "--src", shard_root, "--out", tmp_path / "p.csv", "--device", "cpu"]
    assert main([*map(str, words)]) == 2
    assert "validated at 48 px, expected 32 px as " in capsys.readouterr().err
    assert main([*map(str, words), "--res", "40"]) == 0
    assert "2 runs, 3 classes, 40 px, cpu" in capsys.readouterr().out


def test_the_report_of_an_interrupted_run_names_the_epoch_of_best_pt(
    shard_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 48, 32 and 48 px, interrupted at 32 px: the best one at 48 px, the resolution of the plan's end, stays."""
    after = runs._Session._after

    def interrupted(session: runs._Session, spec: runs.BatchSpec) -> bool:
        session.stopped_by = 15 if spec.epoch == 2 else 0
        return after(session, spec)

    monkeypatch.setattr(runs._Session, "_after", interrupted)
    text = RECIPE.replace("PATIENCE, min_delta = 0.9", "0").partition("[[stages]]")[0]
    (tmp_path / "down.toml").write_text(text + stages((48, 1, 25), (32, 2, 25), (48, 1, 25)))
    words = ["train", "--shards", shard_root, "--recipe", tmp_path / "down.toml",
             "--run", "down", "--runs", tmp_path, "--device", "cpu"]  # fmt: skip
    assert main([*map(str, words), "--threads", "1"]) == 128 + 15
    assert main(["report", str(tmp_path / "down")]) == 0
    assert open_saved_run(tmp_path / "down").res == 48
    assert "best top-1, epoch 0" in (tmp_path / "down" / "report.html").read_text()
