"""`resolute export RUN`: writes the best weights as a safetensors file, an ONNX model or a Hugging Face folder.

The name of the output decides: `NAME.safetensors` and a folder (a name without suffix) are loaded by timm, `NAME.onnx`
by ONNX Runtime. The metadata holds the class names, the validation preprocessing as timm's `pretrained_cfg_overlay`,
the recipe, and a complete program (`usage`) that loads the export and classifies a photo; the command prints that
program.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from resolute.errors import ResoluteError, check_installed
from resolute.files import check_output, output_file, write_errors
from resolute.train.model.build import size_options
from resolute.train.model.head import Head
from resolute.train.options import ExportOptions
from resolute.train.run_folder import existing_run

from .saved_run import SavedRun, open_saved_run

__all__ = ["export", "export_hf", "export_onnx", "main", "preprocessing"]

_PROGRAM = """\
import json
import sys

{imports}
path = {path!r}
{load}photo = ImageOps.exif_transpose(Image.open(sys.argv[1])).convert("RGB")
with torch.inference_mode():
    images = transform(photo)[None]
    outputs = {outputs}[0]
{print}"""

# name of the format: (imports of its program, how the program loads model, transform and metadata)
_LOAD = {
    "safetensors": ("""\
import timm
import torch
from PIL import Image, ImageOps
from safetensors import safe_open
""", """\
model = timm.create_model({arguments})
model.eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
with safe_open(path, "pt") as file:
    metadata = file.metadata()
"""),
    "hf": ("""\
import timm
import torch
from PIL import Image, ImageOps
""", """\
model = timm.create_model("local-dir:" + path, pretrained=True)
model.eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
with open(path + "/config.json", encoding="utf-8") as file:
    metadata = json.load(file)["resolute"]
"""),
    "onnx": ("""\
import onnxruntime
import timm
import torch
from PIL import Image, ImageOps
""", """\
session = onnxruntime.InferenceSession(path)
metadata = session.get_modelmeta().custom_metadata_map
settings = {{key: value for key, value in json.loads(metadata["pretrained_cfg_overlay"]).items() if value is not None}}
transform = timm.data.create_transform(**settings, is_training=False)


def model(images):
    return torch.from_numpy(session.run(None, {{"images": images.numpy()}})[0])


"""),
}  # fmt: skip

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
    program = _program(saved, path, "safetensors")
    metadata = {"format": "pt", **_metadata(saved), "usage": program}
    # why: safetensors supports neither channels_last nor tensors that share memory
    tensors = {name: value.clone(memory_format=torch.contiguous_format)
               for name, value in saved.weights[saved.best_weights].items()}  # fmt: skip
    with output_file(path) as file:
        file.write(save(tensors, metadata=metadata))
    return program


def export_onnx(saved: SavedRun, path: Path) -> str:
    """Write the run's best network to `path` in ONNX's format; returns the program that runs it with ONNX Runtime.

    Input `images` (N, 3, res, res) float32, normalised with the metadata's mean and std; output `outputs` (N, C or D)
    float32, without softmax and without test-time flip. N is free. The metadata is that of `export`.
    Raises `ResoluteError` if a package is missing, the network cannot be exported, or the file cannot be written.
    """
    for package in ("onnx", "onnxscript"):
        check_installed(package, setting="--out", extra="onnx")
    program, res = _program(saved, path, "onnx"), saved.res
    network = saved.network(saved.best_weights, torch.device("cpu")).to(memory_format=torch.contiguous_format)
    try:
        exported = torch.onnx.export(
            network, (torch.zeros(2, 3, res, res),), dynamo=True, verbose=False, input_names=["images"],
            output_names=["outputs"], dynamic_shapes=({0: torch.export.Dim("batch")},),
        )  # fmt: skip
    except torch.onnx.OnnxExporterError as error:
        reason = str(error).strip().splitlines()[0]
        raise ResoluteError(f"{saved.recipe.model.name}: torch cannot export it to ONNX ({reason}), expected another "
                            "model; choose --out NAME.safetensors") from None  # fmt: skip
    assert exported is not None
    model = exported.model_proto
    for key, value in {**_metadata(saved), "usage": program}.items():
        model.metadata_props.add(key=key, value=value)
    with output_file(path) as file:
        file.write(model.SerializeToString())
    return program


def export_hf(saved: SavedRun, folder: Path) -> str:
    """Write the run's best weights to `folder` as timm's `save_for_hf`; returns the program that loads them.

    `timm.create_model("local-dir:FOLDER", pretrained=True)` loads it, after an upload also `hf-hub:USER/NAME`.
    `label_names` and `pretrained_cfg` of config.json are of this run, and its key `resolute` has the metadata of
    `export`. The files of an earlier export are replaced one by one. Raises `ResoluteError` if timm cannot build the
    model from such a folder, or it cannot be written.
    """
    model = saved.recipe.model
    for setting, is_set in (('norm = "group"', model.norm == "group"), ("blurpool = true", model.blurpool)):
        if is_set:
            raise ResoluteError(f"--out: got a folder for a model with {setting}, which a timm folder cannot describe; "
                                "choose NAME.onnx or NAME.safetensors")  # fmt: skip
    origin = dict.fromkeys(("license", "origin_url", "paper_ids", "paper_name", "notes"))  # of timm's own weights
    network = timm.create_model(
        model.name, num_classes=len(saved.classes), pretrained_cfg_overlay=origin, **_options(saved)
    )
    network.load_state_dict(saved.weights[saved.best_weights])
    program = _program(saved, folder, "hf")
    config = {"label_names": saved.classes, "resolute": {**_metadata(saved), "usage": program}}
    overlay = {name: value for name, value in preprocessing(saved).items() if value is not None}
    with write_errors(folder), tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as written:
        timm.models.save_for_hf(network, written, model_config=config, safe_serialization=True, data_config=overlay)
        folder.mkdir(exist_ok=True)
        for file in sorted(Path(written).iterdir(), reverse=True):  # config.json last
            shutil.copyfile(file, folder / f".{file.name}.new")
            (folder / f".{file.name}.new").replace(folder / file.name)
    return program


def _metadata(saved: SavedRun) -> dict[str, str]:
    recipe = saved.recipe
    return {
        "model": recipe.model.name, "options": json.dumps(recipe.model.kwargs),
        **_target_metadata(saved.head), "recipe": json.dumps(recipe.values()), "recipe_hash": recipe.hash,
        "shards": saved.shards_hash, "weights": saved.best_weights, "step": str(saved.step),
        f"best_{saved.metric.key}": str(saved.best_score),
        "res": str(saved.res), "margin": str(saved.margin), "mean": json.dumps(recipe.data.mean),
        "std": json.dumps(recipe.data.std), "pretrained_cfg_overlay": json.dumps(preprocessing(saved)),
    }  # fmt: skip


def preprocessing(saved: SavedRun) -> dict[str, Any]:
    """The `pretrained_cfg_overlay` that makes timm's evaluation transform reproduce this project's validation.

    `input_size` (3, px, px), `mean` and `std` of RGB in 0 to 1, `crop_pct` = centre crop's side / resized short side.
    The remaining difference: validation decodes resized photos that were stored as JPEG.
    """
    recipe, res = saved.recipe, saved.res
    overlay: dict[str, Any] = {
        "input_size": (3, res, res), "mean": tuple(recipe.data.mean), "std": tuple(recipe.data.std),
        "crop_pct": recipe.eval.crop_pct or _crop_pct(res, round(res * saved.margin)), "crop_mode": "center",
        "interpolation": "bicubic",
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


def _options(saved: SavedRun) -> dict[str, Any]:
    """Keyword arguments with which timm builds the run's model, besides those that stand for its own recipe keys."""
    recipe = saved.recipe
    options = {**size_options(recipe.model, recipe.resolutions), **recipe.model.kwargs}
    default = _default_cfg(saved)
    if getattr(default, "fixed_input_size", False) and "img_size" not in options:
        # why: `input_size` would make timm build position embeddings of another size than the weights have
        options["img_size"] = default.input_size[-1]
    return options


def _program(saved: SavedRun, path: Path, kind: str) -> str:
    recipe = saved.recipe
    if recipe.model.norm == "group" and kind == "safetensors":
        return (
            f"# timm cannot build {recipe.model.name} with group norms; use the file in a run of this project, as its "
            f'initial weights: [model] norm = "group", weights = "{path}"\n'
        )
    keywords = {"num_classes": repr(len(saved.classes)), "checkpoint_path": "path"}
    keywords |= {name: repr(value) for name, value in _options(saved).items()}
    if recipe.model.blurpool:
        keywords["aa_layer"] = "timm.layers.BlurPool2d"
    overlay = "".join(f"        {name}={value!r},\n" for name, value in preprocessing(saved).items())
    keywords["pretrained_cfg_overlay"] = f"dict(\n{overlay}    )"
    arguments = "".join(f"    {name}={value},\n" for name, value in keywords.items())
    forward = "((model(images) + model(images.flip(3))) / 2)" if recipe.eval.flip else "model(images)"
    printed = _PRINT[saved.head.target.kind].format(activation="softmax(0)" if saved.head.loss == "ce" else "sigmoid()")
    imports, load = _LOAD[kind]
    return _PROGRAM.format(
        imports=imports, path=str(path), load=load.format(arguments=f"\n    {recipe.model.name!r},\n{arguments}"),
        outputs=forward, print=printed,
    )  # fmt: skip


def _target_metadata(head: Head) -> dict[str, str]:
    if head.target.kind != "values":
        return {"target": head.target.kind, "classes": json.dumps(head.target.names)}
    table = head.to_json()
    return {"target": "values", **{key: json.dumps(table[key]) for key in ("names", "units")},
            **{f"target_{key}": json.dumps(table[key]) for key in ("mean", "std")}}  # fmt: skip


def _is_safetensors(path: Path) -> bool:
    try:
        with safe_open(path, "pt") as file:
            return "recipe_hash" in (file.metadata() or {})
    except (OSError, SafetensorError):
        return False


def _is_onnx(path: Path) -> bool:
    with path.open("rb") as file:
        data = file.read()
    return b"recipe_hash" in data and b"pretrained_cfg_overlay" in data


def _is_hf(folder: Path) -> bool:
    try:
        return "resolute" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):  # a TypeError: the JSON is a number
        return False


# suffix: (function that writes, whether an existing path is such an export and may be replaced)
_FORMATS = {".safetensors": (export, _is_safetensors), ".onnx": (export_onnx, _is_onnx), "": (export_hf, _is_hf)}


def main(args: ExportOptions) -> None:
    """Run the command."""
    saved = open_saved_run(existing_run(args.run))
    path = args.out or saved.path.parent / "model.safetensors"
    write, is_export = _FORMATS.get(path.suffix.lower(), _FORMATS[".safetensors"])
    if path.suffix:
        check_output(path, setting="--out", suffixes=(".safetensors", ".onnx"))
    is_empty = path.is_dir() and not any(path.iterdir())
    if path.exists() and not is_empty and not is_export(path):
        raise ResoluteError(f"--out: {path} exists and is not an exported run, expected a new name; choose another")
    program = write(saved, path)
    names = ", ".join(saved.classes[:10]) + (", …" if len(saved.classes) > 10 else "")
    is_values, metric = saved.head.target.kind == "values", saved.metric
    print(f"{path}: {saved.best_weights} weights of {saved.path} (step {saved.step}), {metric.title} "
          f"{metric.text(saved.best_score)}\n{len(saved.classes)} {'values' if is_values else 'classes'}: {names}\n"
          f"the program below {'predicts the values of' if is_values else 'classifies'} a photo as in validation; the "
          "metadata has it as 'usage':\n\n"
          f"{program}", end="")  # fmt: skip
