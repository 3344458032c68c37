"""An exported model, loaded by the printed program alone, has the accuracy of the run's own validation."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors import safe_open

from resolute.cli import main
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.loader import Loader
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import Stage
from resolute.train import checkpoint
from resolute.train.inference.evaluate import evaluate
from resolute.train.inference.export import export, preprocessing
from resolute.train.inference.saved_run import SavedRun, open_saved_run
from resolute.train.model.build import build_model
from resolute.train.recipe.schema import Model, Recipe
from tests.support.cli import prep

CPU = torch.device("cpu")
# far from timm's defaults for this model: 160 px, crop 0.95, mean and std 0.5
RECIPE = """
seed = 1
[model]
name = "test_resnet"
[optim]
lr = 0.01
[precision]
amp = "off"
[data]
mean = [0.9, 0.8, 0.9]
std = [0.1, 0.1, 0.1]
[eval]
flip = true
[[stages]]
res = 48
epochs = 8
batch_size = 16
augment = { scale = [0.5, 1.0], ratio = [1.0, 1.0] }
"""


@pytest.fixture(scope="module")
def textures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """150 photos of three classes that differ in the width of their stripes, below photos/CLASS."""
    folder = tmp_path_factory.mktemp("textures")
    rng = np.random.default_rng(0)
    for label, period in (("coarse", 0.5), ("fine", 0.12), ("medium", 0.25)):
        (folder / "photos" / label).mkdir(parents=True)
        for number in range(50):
            width, height = (int(side) for side in rng.integers(90, 180, 2))
            x = np.arange(width) / min(width, height)
            wave = np.sin(2 * np.pi * (x / (period * rng.uniform(0.85, 1.15)) + rng.uniform()))
            row = 215 + 30 * wave[:, None] * rng.uniform(0.6, 1.0, 3)
            pixels = np.clip(row[None] + rng.normal(0, 6, (height, width, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / "photos" / label / f"{number:02d}.jpg", quality=97)
    words = ["--src", folder / "photos", "--out", folder / "shards", "--res", "48", "--workers", "1"]
    assert prep([*map(str, words), "--val-frac", "0.4"]) == 0
    (folder / "stripes.toml").write_text(RECIPE)
    words = ["train", "--shards", folder / "shards", "--recipe", folder / "stripes.toml",
             "--run", "stripes", "--runs", folder]  # fmt: skip
    assert main([*map(str, words), "--device", "cpu", "--threads", "1"]) == 0
    return folder


def every_photo(folder: Path) -> tuple[list[Path], torch.Tensor]:
    """The photos in the order of their classes and names, and their labels (N,)."""
    paths = sorted((folder / "photos").rglob("*.jpg"))
    names = sorted({path.parent.name for path in paths})
    return paths, torch.tensor([names.index(path.parent.name) for path in paths])


@pytest.mark.slow
def test_the_printed_program_reproduces_the_accuracy_of_eval(
    textures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(textures / "stripes"), "--out", str(tmp_path / "m.safetensors")]) == 0
    printed = capsys.readouterr().out
    program = printed[printed.index("import json\n") :]
    paths, labels = every_photo(textures)
    named: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["program", str(paths[0])])
        exec(program, named)  # exactly the printed text
    model, transform = named["model"], named["transform"]
    photos = [Image.open(path) for path in paths]

    def accuracy(images: torch.Tensor) -> float:
        with torch.inference_mode():
            return float(((model(images) + model(images.flip(3))).argmax(1) == labels).float().mean())

    exported = accuracy(torch.stack([transform(photo) for photo in photos]))
    saved, shards = open_saved_run(textures / "stripes"), ShardSet.open(textures / "shards")
    rows = [row for split in ("train", "val") for row in evaluate(saved, shards, [48], device=CPU, threads=1,
            flip=True, split=split) if row["weights"] == saved.best_weights]  # fmt: skip
    assert sum(row["samples"] for row in rows) == len(paths)
    evaluated = sum(row["top1"] * row["samples"] for row in rows) / len(paths)
    assert evaluated > 0.8
    # why not equal: eval reads the resized photos from JPEGs of quality 90, the program resizes them itself
    assert abs(exported - evaluated) <= 0.02
    # timm's own defaults for this model, and each of their parts alone, fail by a wide margin
    defaults = timm.data.resolve_model_data_config(timm.create_model("test_resnet"))
    ours = timm.data.resolve_model_data_config(model)
    for keys in (("input_size", "mean", "std", "crop_pct"), ("input_size",), ("mean", "std")):
        other = timm.data.create_transform(**{**ours, **{key: defaults[key] for key in keys}}, is_training=False)
        assert accuracy(torch.stack([other(photo) for photo in photos])) < evaluated - 0.1, keys


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


@pytest.mark.parametrize(("res", "margin"), [(224, 256 / 224), (48, 256 / 224), (133, 1.143), (7, 3.0), (128, 1.0)])
def test_timm_resizes_to_the_stored_short_side(trained: Path, res: int, margin: float) -> None:
    other: SavedRun = dataclasses.replace(open_saved_run(trained), res=res, margin=margin)
    assert int(res / preprocessing(other)["crop_pct"]) == round(res * margin)


@pytest.mark.parametrize("which", ["raw", "ema"])
def test_timm_loads_the_best_weights_bit_identically(trained: Path, tmp_path: Path, which: str) -> None:
    state = torch.load(trained / "best.pt", weights_only=True)
    state["progress"]["best_weights"] = which
    checkpoint.save(tmp_path / "best.pt", state)
    saved = open_saved_run(tmp_path)
    export(saved, tmp_path / "model.safetensors")
    theirs = timm.create_model("test_resnet", num_classes=3, checkpoint_path=str(tmp_path / "model.safetensors"))
    ours = timm.create_model("test_resnet", num_classes=3).eval()
    ours.load_state_dict(state["model" if which == "raw" else "ema"])
    images = torch.randn(4, 3, 48, 48)
    assert torch.equal(theirs.eval()(images), ours(images))
    assert not torch.equal(state["model"]["fc.weight"], state["ema"]["fc.weight"])
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        about = file.metadata()
    assert json.loads(about["classes"]) == ["class0", "class1", "class2"]
    assert (about["weights"], about["recipe_hash"]) == (which, saved.recipe.hash)
    assert json.loads(about["recipe"])["stages"][1]["res"] == 48
    overlay = json.loads(about["pretrained_cfg_overlay"])
    assert (overlay["input_size"], overlay["mean"]) == ([3, 48, 48], list(saved.recipe.data.mean))


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("test_vit", {}),
        ("test_resnet", {"drop_rate": 0.1}),
        ("swin_tiny_patch4_window7_224", {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2]}),
    ],
)
def test_fixed_size_models_load_at_the_resolutions_of_the_run(
    trained: Path, tmp_path: Path, model: str, options: dict[str, Any]
) -> None:
    recipe = dataclasses.replace(open_saved_run(trained).recipe, model=Model(name=model, kwargs=options))
    network = build_model(recipe.model, classes=3, channels_last=False, device=CPU,
                          resolutions=recipe.resolutions).eval()  # fmt: skip
    saved = dataclasses.replace(
        open_saved_run(trained), recipe=recipe, weights={"raw": network.state_dict()}, best_weights="raw"
    )
    program = export(saved, tmp_path / "m.safetensors")
    Image.new("RGB", (70, 60), "red").save(tmp_path / "photo.png")
    named: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["program", str(tmp_path / "photo.png")])
        exec(program, named)
    assert named["images"].shape == (1, 3, 48, 48)
    with torch.inference_mode():
        torch.testing.assert_close(named["model"](named["images"]), network(named["images"]))


@pytest.mark.slow
def test_the_program_in_the_exported_file_runs(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(trained), "--out", str(tmp_path / "m.safetensors")]) == 0
    out = capsys.readouterr().out
    assert "3 classes: class0, class1, class2\n" in out
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        program = file.metadata()["usage"]
    assert out.endswith(program)
    Image.new("RGB", (70, 60), "red").save(tmp_path / "photo.png")
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "photo.png"], capture_output=True, text=True,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] in ("class0", "class1", "class2")
    assert main(["export", str(trained), "--out", str(tmp_path / "m.pth")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["export", str(tmp_path)]) == 2
    assert "no run or checkpoint" in capsys.readouterr().err


def test_a_checkpoint_holds_the_recipe_of_its_training(trained: Path) -> None:
    saved = open_saved_run(trained)
    assert saved.recipe == Recipe.load(trained.parent / "small.toml")
