"""`python -m train export RUN`: writes the best weights as a safetensors file that timm loads.

Its metadata holds the class names, the validation preprocessing as timm's `pretrained_cfg_overlay`, the recipe, and a
complete program (`usage`) that loads the file and classifies a photo; the command prints that program.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from pipeline.errors import ResoluteError
from pipeline.storage.atomic_file import check_output, output_file
from train.head import Head
from train.models import size_options
from train.run_folder import existing_run

from .saved_run import SavedRun, open_saved_run

__all__ = ["export", "main", "preprocessing"]

_PROGRAM = """\
import json
import sys

import timm
import torch
from PIL import Image, ImageOps
from safetensors import safe_open

path = {path!r}
model = timm.create_model({arguments})
model.eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
with safe_open(path, "pt") as file:
    metadata = file.metadata()
photo = ImageOps.exif_transpose(Image.open(sys.argv[1])).convert("RGB")
with torch.inference_mode():
    images = transform(photo)[None]
    outputs = {outputs}[0]
{print}"""

_PRINT = {
    "class": """\
classes = json.loads(metadata["classes"])
probabilities = outputs.{activation}
print(classes[probabilities.argmax()], f"{{probabilities.max():.4f}}")
""",
    "labels": """\
for name, probability in zip(json.loads(metadata["classes"]), outputs.sigmoid().tolist()):
    print(name, f"{{probability:.4f}}")
""",
    "values": """\
names, units, means, stds = (json.loads(metadata[key]) for key in ("names", "units", "target_mean", "target_std"))
for name, unit, mean, std, output in zip(names, units, means, stds, outputs.tolist()):
    print(name, f"{{output * std + mean:.6g}}", unit)
""",
}


def export(saved: SavedRun, path: Path) -> str:
    """Write the run's best weights, raw or averaged, to `path`; returns the program that loads them with only timm.

    The file's metadata (all text) holds `classes`, `pretrained_cfg_overlay` (see `preprocessing`) and `recipe` as
    JSON, the program as `usage`, the kind of target as `target`, and identifiers of the run; for values `names`,
    `units`, and the `target_mean` and `target_std` with which a value is output * std + mean, instead of `classes`.
    Raises `ResoluteError` if the file cannot be written.
    """
    recipe, which = saved.recipe, saved.best_weights
    program = _program(saved, path)
    metadata = {
        "format": "pt", "model": recipe.model.name, "options": json.dumps(recipe.model.kwargs),
        **_target_metadata(saved.head), "recipe": json.dumps(recipe.values()), "recipe_hash": recipe.hash,
        "shards": saved.shards_hash, "weights": which, "step": str(saved.step),
        f"best_{saved.metric.key}": str(saved.best_score),
        "res": str(saved.res), "margin": str(saved.margin), "mean": json.dumps(recipe.data.mean),
        "std": json.dumps(recipe.data.std), "pretrained_cfg_overlay": json.dumps(preprocessing(saved)),
        "usage": program,
    }  # fmt: skip
    # why: safetensors supports neither channels_last nor tensors that share memory
    tensors = {name: value.clone(memory_format=torch.contiguous_format) for name, value in saved.weights[which].items()}
    with output_file(path) as file:
        file.write(save(tensors, metadata=metadata))
    return program


def preprocessing(saved: SavedRun) -> dict[str, Any]:
    """The `pretrained_cfg_overlay` that makes timm's evaluation transform reproduce this project's validation.

    `input_size` (3, px, px), `mean` and `std` of RGB in 0 to 1, `crop_pct` = centre crop's side / resized short side.
    The remaining difference: validation decodes resized photos that were stored as JPEG.
    """
    recipe, res = saved.recipe, saved.res
    overlay: dict[str, Any] = {
        "input_size": (3, res, res), "mean": tuple(recipe.data.mean), "std": tuple(recipe.data.std),
        "crop_pct": recipe.eval.crop_pct or _crop_pct(res, round(res * saved.margin)), "crop_mode": "center",
        "interpolation": "bilinear" if saved.single_resolution else "bicubic",
    }  # fmt: skip
    # why: timm's validation script prefers these two keys, whose defaults belong to timm's weights
    default = _default_cfg(saved)
    overlay |= {name: None for name in ("test_input_size", "test_crop_pct") if getattr(default, name, None)}
    return overlay


def _default_cfg(saved: SavedRun) -> Any:
    """timm's default image configuration of the model; None if it has none."""
    return timm.models.get_pretrained_cfg(saved.recipe.model.name, allow_unregistered=True)


def _crop_pct(res: int, short_side: int) -> float:
    """The `crop_pct` for which timm resizes to exactly `short_side` px = floor(res / crop_pct)."""
    crop_pct = res / short_side
    while math.floor(res / crop_pct) < short_side:
        crop_pct = math.nextafter(crop_pct, 0.0)
    return crop_pct


def _program(saved: SavedRun, path: Path) -> str:
    recipe = saved.recipe
    if recipe.model.norm == "group":
        return (
            f"# timm cannot build {recipe.model.name} with group norms; use the file in a run of this project, as its "
            f'initial weights: [model] norm = "group", weights = "{path}"\n'
        )
    keywords = {"num_classes": repr(len(saved.classes)), "checkpoint_path": "path"}
    options = {**size_options(recipe.model, recipe.resolutions), **recipe.model.kwargs}
    default = _default_cfg(saved)
    if getattr(default, "fixed_input_size", False) and "img_size" not in options:
        # why: `input_size` would make timm build position embeddings of another size than the weights have
        options["img_size"] = default.input_size[-1]
    keywords |= {name: repr(value) for name, value in options.items()}
    if recipe.model.blurpool:
        keywords["aa_layer"] = "timm.layers.BlurPool2d"
    overlay = "".join(f"        {name}={value!r},\n" for name, value in preprocessing(saved).items())
    keywords["pretrained_cfg_overlay"] = f"dict(\n{overlay}    )"
    arguments = "".join(f"    {name}={value},\n" for name, value in keywords.items())
    forward = "((model(images) + model(images.flip(3))) / 2)" if recipe.eval.flip else "model(images)"
    printed = _PRINT[saved.head.target.kind].format(activation="softmax(0)" if saved.head.loss == "ce" else "sigmoid()")
    return _PROGRAM.format(
        path=str(path), arguments=f"\n    {recipe.model.name!r},\n{arguments}", outputs=forward, print=printed
    )


def _target_metadata(head: Head) -> dict[str, str]:
    if head.target.kind != "values":
        return {"target": head.target.kind, "classes": json.dumps(head.target.names)}
    table = head.to_json()
    return {"target": "values", **{key: json.dumps(table[key]) for key in ("names", "units")},
            **{f"target_{key}": json.dumps(table[key]) for key in ("mean", "std")}}  # fmt: skip


def _is_export(path: Path) -> bool:
    try:
        with safe_open(path, "pt") as file:
            return "recipe_hash" in (file.metadata() or {})
    except (OSError, SafetensorError):
        return False


def main(args: argparse.Namespace) -> None:
    """Run the command."""
    saved = open_saved_run(existing_run(args.run))
    path = args.out or saved.path.parent / "model.safetensors"
    check_output(path, setting="--out", suffixes=(".safetensors",))
    if path.exists() and not _is_export(path):
        raise ResoluteError(f"--out: {path} exists and is not an exported run, expected a new name; choose another")
    program = export(saved, path)
    names = ", ".join(saved.classes[:10]) + (", …" if len(saved.classes) > 10 else "")
    is_values, metric = saved.head.target.kind == "values", saved.metric
    print(f"{path}: {saved.best_weights} weights of {saved.path} (step {saved.step}), {metric.title} "
          f"{metric.text(saved.best_score)}\n{len(saved.classes)} {'values' if is_values else 'classes'}: {names}\n"
          f"the program below {'predicts the values of' if is_values else 'classifies'} a photo as in validation; the "
          "file's metadata has it as 'usage':\n\n"
          f"{program}", end="")  # fmt: skip
