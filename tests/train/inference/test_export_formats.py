"""A run exported to ONNX or to a Hugging Face folder, loaded by other packages, gives the outputs of its network."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image

from resolute.cli import main
from resolute.errors import ResoluteError
from resolute.train.inference.export import export_hf, export_onnx, preprocessing
from resolute.train.inference.saved_run import SavedRun, open_saved_run
from resolute.train.recipe.schema import Model

# why: the packages of others may warn of each other's ageing interfaces
pytestmark = pytest.mark.filterwarnings("default")
CPU = torch.device("cpu")


def run_program(program: str, folder: Path) -> dict[str, Any]:
    """The variables of an export's program after it has classified a photo."""
    Image.radial_gradient("L").resize((70, 60)).convert("RGB").save(folder / "photo.png")
    variables: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["program", str(folder / "photo.png")])
        exec(program, variables)
    return variables


def expected_outputs(saved: SavedRun, images: torch.Tensor, *, flip: bool) -> torch.Tensor:
    network = saved.network(saved.best_weights, CPU)
    with torch.inference_mode():
        return (network(images) + network(images.flip(3))) / 2 if flip else network(images)


@pytest.mark.slow
def test_an_onnx_model_gives_the_outputs_of_the_network_for_any_batch_size(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    path = tmp_path / "model.onnx"
    assert main(["export", str(trained), "--out", str(path)]) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]  # the weights are inside
    saved, session = open_saved_run(trained), onnxruntime.InferenceSession(str(path))
    about = session.get_modelmeta().custom_metadata_map
    assert json.loads(about["classes"]) == ["class0", "class1", "class2"]
    assert (about["res"], about["recipe_hash"]) == ("48", saved.recipe.hash)
    assert json.loads(about["mean"]) == list(saved.recipe.data.mean)
    assert json.loads(about["std"]) == list(saved.recipe.data.std)
    for size in (1, 3):
        images = torch.randn(size, 3, 48, 48)
        (got,) = session.run(None, {"images": images.numpy()})
        torch.testing.assert_close(torch.from_numpy(got), expected_outputs(saved, images, flip=False), rtol=1e-4,
                                   atol=1e-4)  # fmt: skip
    printed = capsys.readouterr().out
    assert printed.endswith(about["usage"])
    variables = run_program(about["usage"], tmp_path)
    expected = expected_outputs(saved, variables["images"], flip=saved.recipe.eval.flip)[0]
    torch.testing.assert_close(variables["outputs"], expected, rtol=1e-4, atol=1e-4)
    assert main(["export", str(trained), "--out", str(path)]) == 0  # an export may be replaced
    path.write_bytes(b"something else")
    assert main(["export", str(trained), "--out", str(path)]) == 2
    assert path.read_bytes() == b"something else"


def test_a_hugging_face_folder_gives_the_outputs_of_the_network(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "flowers"
    assert main(["export", str(trained), "--out", str(folder)]) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["flowers"]
    saved = open_saved_run(trained)
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    images = torch.randn(2, 3, 48, 48)
    with torch.inference_mode():
        torch.testing.assert_close(model(images), expected_outputs(saved, images, flip=False))
    assert model.pretrained_cfg["label_names"] == ["class0", "class1", "class2"]
    resolved, ours = (json.loads(json.dumps(settings)) for settings in (  # tuples as lists
        timm.data.resolve_model_data_config(model), preprocessing(saved)
    ))  # fmt: skip
    both = resolved.keys() & ours.keys()
    assert {"input_size", "mean", "std", "crop_pct", "interpolation"} <= both
    assert {name: resolved[name] for name in both} == {name: ours[name] for name in both}
    config = json.loads((folder / "config.json").read_text())
    assert config["resolute"]["recipe_hash"] == saved.recipe.hash
    printed = capsys.readouterr().out
    assert printed.endswith(config["resolute"]["usage"])
    variables = run_program(config["resolute"]["usage"], tmp_path)
    expected = expected_outputs(saved, variables["images"], flip=saved.recipe.eval.flip)[0]
    torch.testing.assert_close(variables["outputs"], expected)
    assert main(["export", str(trained), "--out", str(folder)]) == 0  # an export may be replaced


def test_a_folder_of_something_else_is_not_written_to(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "config.json").write_text("{}")
    assert main(["export", str(trained), "--out", str(tmp_path / "photos")]) == 2
    assert "photos exists and is not an exported run" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["config.json"]


@pytest.mark.parametrize(("setting", "text"), [({"norm": "group"}, "group"), ({"blurpool": True}, "blurpool")])
def test_models_that_a_folder_cannot_describe_are_refused(
    trained: Path, tmp_path: Path, setting: dict[str, Any], text: str
) -> None:
    saved = open_saved_run(trained)
    recipe = dataclasses.replace(saved.recipe, model=Model(name="test_resnet", **setting))
    with pytest.raises(ResoluteError, match=rf"{text}.*choose NAME.onnx"):
        export_hf(dataclasses.replace(saved, recipe=recipe), tmp_path / "folder")
    assert list(tmp_path.iterdir()) == []


def test_an_export_to_onnx_without_its_package_says_what_to_install(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ResoluteError, match=r"onnx is not installed.*pip install 'resolute-vision\[onnx\]'"):
        export_onnx(open_saved_run(trained), tmp_path / "m.onnx")
