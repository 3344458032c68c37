"""An exported folder: its predict.py, timm and ONNX Runtime give the predictions of the run."""

from __future__ import annotations

import csv
import dataclasses
import json
import runpy
import shutil
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file

from resolute.cli import main
from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.loader import Loader
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import Stage
from resolute.train import checkpoint
from resolute.train.inference.export import export, preprocessing
from resolute.train.inference.predict import preprocess
from resolute.train.inference.saved_run import SavedRun, open_saved_run
from resolute.train.model.build import build_model
from resolute.train.recipe.schema import Data, Model
from tests.support.commands import run
from tests.support.exported import predict_exported
from tests.support.made_images import ADOBE_RGB, GREY_22, tiff

CPU = torch.device("cpu")


def with_recipe(saved: SavedRun, **tables: Any) -> SavedRun:
    return dataclasses.replace(saved, recipe=dataclasses.replace(saved.recipe, **tables))


def predicted(run: Path, source: Path, out: Path) -> list[dict[str, str]]:
    words = ["predict", run, "--src", source, "--out", out, "--device", "cpu", "--threads", "1"]
    assert main([*map(str, words)]) == 0
    with out.open(newline="") as file:
        return list(csv.DictReader(file))


def test_predict_py_writes_the_predictions_of_the_run(trained: Path, shard_root: Path, tmp_path: Path) -> None:
    photos = tmp_path / "in"
    shutil.copytree(shard_root.parent / "photos" / "class0", photos)
    first, *_ = sorted(photos.iterdir())
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.open(first).resize((60, 90)).save(photos / "turned.png", exif=exif)
    Image.open(first).convert("RGBA").rotate(30).save(photos / "clear.png")
    Image.fromarray(np.linspace(0, 65535, 6400).reshape(80, 80).astype(np.uint16)).save(photos / "deep.png")
    (photos / "cut.jpg").write_bytes(first.read_bytes()[:900])
    Image.fromarray(np.zeros((40, 40), np.float32)).save(photos / "float.tif")
    (photos / "notes.txt").touch()
    assert main(["export", str(trained), "--out", str(tmp_path / "m")]) == 0
    ours = {row["image"]: row for row in predicted(trained, photos, tmp_path / "p.csv")}
    rows = {Path(row["image"]).name: row for row in predict_exported(tmp_path / "m", photos, tmp_path / "gone.jpg")}
    assert "No such file" in rows.pop("gone.jpg")["error"]
    assert rows.keys() == ours.keys()
    assert [*rows["cut.jpg"]] == [*ours["cut.jpg"]]
    assert {name for name, row in rows.items() if row["error"]} == {"cut.jpg", "float.tif"}
    for name, row in rows.items():
        if not row["error"]:
            assert row["class1"] == ours[name]["class1"]
            assert float(row["prob1"]) == pytest.approx(float(ours[name]["prob1"]), abs=2e-3)


def test_predict_py_prepares_photos_as_predict_does_whatever_their_profile_bands_and_range(
    trained: Path, tmp_path: Path
) -> None:
    saved = dataclasses.replace(open_saved_run(trained), grey_bits=12)
    export(saved, tmp_path / "m")
    read = runpy.run_path(str(tmp_path / "m" / "predict.py"))["read"]
    y, x = np.ogrid[:90, :100]
    rgb = np.dstack([x + y, x * 2 + 0 * y, 190 - x - y // 2]).astype(np.uint8)
    for name, image, options in (
        ("adobe.png", Image.fromarray(rgb), {"icc_profile": ADOBE_RGB}),
        ("adobe.jpg", Image.fromarray(rgb), {"icc_profile": ADOBE_RGB, "quality": 95}),
        ("grey.tif", Image.fromarray(rgb[..., 0]), {"icc_profile": GREY_22}),
        ("deep.png", Image.fromarray((x * 40 + 0 * y).astype(np.uint16)), {}),
    ):
        image.save(tmp_path / name, **options)
    (tmp_path / "bands.tif").write_bytes(tiff(np.dstack([rgb, rgb[..., :1] // 9]), 2))
    mean, std = saved.recipe.data.mean, saved.recipe.data.std
    for name in ("adobe.png", "adobe.jpg", "grey.tif", "deep.png", "bands.tif"):
        theirs = (read(tmp_path / name)[0].transpose(1, 2, 0) * std + mean) * 255
        ours = preprocess(tmp_path / name, res=saved.res, margin=saved.margin, crop_pct=None, grey_bits=12)
        assert np.abs(theirs - ours).max() <= 3, name
    plain = preprocess(tmp_path / "deep.png", res=saved.res, margin=saved.margin, crop_pct=None)
    assert plain.max() < 20
    state = checkpoint.load(trained / "best.pt", expect={})
    assert state.pop("grey_bits") == 16
    for kept, bits in (({}, 16), ({"grey_bits": 12}, 12)):  # the first as older runs are
        checkpoint.save(tmp_path / "other.pt", {**state, **kept})
        assert open_saved_run(tmp_path / "other.pt").grey_bits == bits


@pytest.mark.slow
def test_an_export_runs_without_the_project_from_any_folder(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my model"
    assert main(["export", str(trained), "--out", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "3 classes: class0, class1, class2\n" in out
    assert out.endswith(f"python '{folder}/predict.py' photo.jpg folder/ > predictions.csv\n")
    folder.rename(tmp_path / "moved")
    Image.new("RGB", (70, 60), "red").save(tmp_path / "photo.png")
    (tmp_path / "elsewhere").mkdir()
    code = (
        "import runpy, sys\n"
        "for name in [name for name in sys.modules if name.partition('.')[0] == 'resolute']: sys.modules[name] = None\n"
        "runpy.run_path('../moved/predict.py', None, '__main__')"
    )
    done = run("tests.support.execute", [code, "../photo.png"], folder=tmp_path / "elsewhere", scratch=tmp_path)
    assert done.status == 0, done.err
    head, row = done.out.splitlines()
    assert head == "image,class1,prob1,class2,prob2,class3,prob3,error"
    assert row.startswith("../photo.png,class")


def test_timms_transform_reproduces_the_validation_pixels(trained: Path, shard_set: ShardSet) -> None:
    overlay = preprocessing(open_saved_run(trained))
    transform: Any = timm.data.create_transform(**{**overlay, "mean": (0, 0, 0), "std": (1, 1, 1)}, is_training=False)
    paths = (Path(shard_set.root).parent / "photos").rglob("*.jpg")
    images = torch.stack([transform(Image.open(path)) for path in paths]).numpy() * 255
    plan = Plan(shard_set, [Stage(res=48, epochs=1, batch_size=75)], eval_batch_size=15)
    with Loader(plan, num_threads=1, mean=(0, 0, 0), std=(1, 1, 1), start=1) as loader:
        validation = next(loader).images.numpy() * 255
    nearest = [images[np.abs(images - pixels).mean((1, 2, 3)).argmin()] for pixels in validation]
    assert len({photo.tobytes() for photo in nearest}) == 15
    difference = np.abs(np.stack(nearest) - validation).mean()
    assert difference < 3  # of 255: quality 90
    assert np.abs(np.roll(nearest, 1, axis=3) - validation).mean() > 1.5 * difference  # not off by a pixel


@pytest.mark.parametrize("which", ["raw", "ema"])
def test_timm_builds_the_model_with_the_best_weights_and_the_runs_preprocessing(
    trained: Path, tmp_path: Path, which: Literal["raw", "ema"]
) -> None:
    data = Data(normalize={"mean": (0.9, 0.8, 0.9), "std": (0.1, 0.1, 0.1)})  # far from timm's defaults for this model
    saved = with_recipe(dataclasses.replace(open_saved_run(trained), best_weights=which), data=data)
    export(saved, tmp_path / "m")
    export(saved, tmp_path / "m")  # an export may be replaced
    assert {path.name for path in (tmp_path / "m").iterdir()} == {"config.json", "model.safetensors", "predict.py"}
    weights = load_file(tmp_path / "m" / "model.safetensors")
    assert all(torch.equal(value, weights[name]) for name, value in saved.weights[which].items())
    assert not torch.equal(saved.weights["raw"]["fc.weight"], saved.weights["ema"]["fc.weight"])
    model: Any = timm.create_model(f"local-dir:{tmp_path / 'm'}", pretrained=True).eval()
    images = torch.randn(2, 3, 48, 48)
    with torch.inference_mode():
        torch.testing.assert_close(model(images), saved.network(which, CPU)(images))
    assert model.pretrained_cfg["label_names"] == ["class0", "class1", "class2"]
    resolved = timm.data.resolve_model_data_config(model)
    assert (tuple(resolved["mean"]), tuple(resolved["std"])) == (data.mean, data.std)
    assert tuple(resolved["input_size"]) == (3, 48, 48)
    assert resolved["crop_pct"] == preprocessing(saved)["crop_pct"]
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    about = config["resolute"]
    assert not {"license", "origin_url", "paper_ids"} & config["pretrained_cfg"].keys()  # of timm's own weights
    assert (about["names"], about["weights"], about["recipe_hash"]) == (saved.classes, which, saved.recipe.hash)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("test_vit", {}),
        ("swin_tiny_patch4_window7_224", {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2]}),
    ],
)
def test_fixed_size_models_load_at_the_resolutions_of_the_run(
    trained: Path, tmp_path: Path, model: str, options: dict[str, Any]
) -> None:
    saved = with_recipe(open_saved_run(trained), model=Model(name=model, kwargs=options))
    network = build_model(
        saved.recipe.model, classes=3, channels_last=False, device=CPU, resolutions=saved.recipe.resolutions
    ).eval()
    export(dataclasses.replace(saved, weights={"raw": network.state_dict()}, best_weights="raw"), tmp_path / "m")
    theirs = timm.create_model(f"local-dir:{tmp_path / 'm'}", pretrained=True).eval()
    for res in (48, 32):
        images = torch.randn(1, 3, res, res)
        with torch.inference_mode():
            torch.testing.assert_close(theirs(images), network(images))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # why: the packages of others may warn of each other's ageing interfaces
def test_an_onnx_model_gives_the_outputs_of_the_network_for_any_batch_size(
    trained: Path, shard_root: Path, tmp_path: Path
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    folder = tmp_path / "m"
    assert main(["export", str(trained), "--format", "onnx", "--out", str(folder)]) == 0
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.onnx", "predict.py"}
    saved, session = open_saved_run(trained), onnxruntime.InferenceSession(folder / "model.onnx")
    config = json.loads(session.get_modelmeta().custom_metadata_map["config"])
    assert config == json.loads((folder / "config.json").read_text())
    network = saved.network(saved.best_weights, CPU)
    for size in (1, 3):
        images = torch.randn(size, 3, 48, 48)
        (got,) = session.run(None, {"images": images.numpy()})
        with torch.inference_mode():
            torch.testing.assert_close(torch.from_numpy(got), network(images), rtol=1e-4, atol=1e-4)
    photo = next((shard_root.parent / "photos").rglob("*.jpg"))
    (row,), (ours,) = predict_exported(folder, photo), predicted(trained, photo, tmp_path / "p.csv")
    assert float(row["prob1"]) == pytest.approx(float(ours["prob1"]), abs=2e-3)
    assert main(["export", str(trained), "--out", str(folder)]) == 2  # the other format would mix with this one


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("photos", "photos exists and is not a run exported for timm, expected a new name; choose another"),
        ("model.onnx", "expected a folder; choose --out {tmp_path}/model --format onnx\n"),
        ("photos/config.json/x", "not written (Not a directory)"),
    ],
)
def test_only_an_earlier_export_is_written_over(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "config.json").write_text("{}")
    assert main(["export", str(trained), "--out", str(tmp_path / name)]) == 2
    err = capsys.readouterr().err
    assert message.format(tmp_path=tmp_path) in err
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.rglob("*")] == ["photos", "config.json"]


def test_what_a_format_cannot_hold_is_refused(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = open_saved_run(trained)
    for model, text in (
        (Model(name="test_resnet", norm="group"), "group"),
        (Model(name="test_resnet", blurpool=True), "blurpool"),
    ):
        with pytest.raises(ResoluteError, match=rf"{text}.*choose --format onnx"):
            export(with_recipe(saved, model=model), tmp_path / "m")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ResoluteError, match=r"onnx is not installed.*pip install 'resolute-vision\[onnx\]'"):
        export(saved, tmp_path / "m", onnx=True)
    assert list(tmp_path.iterdir()) == []
