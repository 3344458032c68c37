"""`resolute export RUN`: the best weights as a folder that timm or ONNX Runtime reads, with a program that predicts.

The folder has the model (`model.safetensors` or `model.onnx`), `config.json`, and `predict.py` (`exported_predict.py`),
which needs nothing of this project. The key `resolute` of `config.json` says what the outputs mean and how photos are
prepared, and has the recipe; the rest is timm's.
"""

from __future__ import annotations

import json
import math
import shlex
import tempfile
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import save_for_hf

from resolute.errors import ResoluteError, check_installed
from resolute.files import output_file, used_folder, write_errors
from resolute.prep.convert import pixels
from resolute.train.model.build import size_options
from resolute.train.options import ExportOptions
from resolute.train.run_folder import existing_run

from .saved_run import SavedRun, open_saved_run

__all__ = ["export", "main", "preprocessing"]


def export(saved: SavedRun, folder: Path, *, onnx: bool = False) -> None:
    """Write the run's best weights, raw or averaged, to `folder`; the files of an earlier export are replaced.

    Of `model.safetensors`, `timm.create_model("local-dir:FOLDER", pretrained=True)` builds the model, after an upload
    also `hf-hub:USER/NAME`. `model.onnx` has the input `images` (N, 3, res, res) float32, normalised, and the output
    `outputs` (N, C or D) float32, without softmax and test-time flip; N is free.
    Raises `ResoluteError` if the format cannot hold the model, a package is missing, or the folder cannot be written.
    """
    with write_errors(folder), used_folder(folder):
        files = _onnx_files(saved) if onnx else _timm_files(saved)
        files["predict.py"] = _program()
        for name, data in files.items():
            with output_file(folder / name) as file:
                file.write(data)


def _program() -> bytes:
    """`exported_predict.py` with the code of `pixels.py`, which decides what pixels mean, in place of its import."""
    program, code = Path(__file__).with_name("exported_predict.py").read_text(), Path(pixels.__file__).read_text()
    imported = "from resolute.prep.convert.pixels import read_rgb\n"
    before, _, after = program.partition(imported)
    return (before + code.partition("from __future__ import annotations\n")[2] + after).encode()


def _timm_files(saved: SavedRun) -> dict[str, bytes]:
    model = saved.recipe.model
    for setting, is_set in (('norm = "group"', model.norm == "group"), ("blurpool = true", model.blurpool)):
        if is_set:
            raise ResoluteError(
                f"--format: got timm for a model with {setting}, which timm's config.json cannot "
                "describe; choose --format onnx"
            )
    origin = dict.fromkeys(("license", "origin_url", "paper_ids", "paper_name", "notes"))  # of timm's own weights
    options = {**size_options(model, saved.recipe.resolutions), **model.kwargs}
    network = timm.create_model(model.name, num_classes=len(saved.classes), pretrained_cfg_overlay=origin, **options)
    network.load_state_dict(saved.weights[saved.best_weights])
    about = {"label_names": saved.classes, "resolute": _description(saved)}
    with tempfile.TemporaryDirectory() as written:
        save_for_hf(network, written, model_config=about, safe_serialization=True, data_config=preprocessing(saved))
        # config.json first: by it the folder is known as an export, should this be interrupted
        return {path.name: path.read_bytes() for path in sorted(Path(written).iterdir())}


def _onnx_files(saved: SavedRun) -> dict[str, bytes]:
    for package in ("onnx", "onnxscript"):
        check_installed(package, setting="--format", extra="onnx")
    network = saved.network(saved.best_weights, torch.device("cpu")).to(memory_format=torch.contiguous_format)
    try:
        exported = torch.onnx.export(
            network,
            (torch.zeros(2, 3, saved.res, saved.res),),
            dynamo=True,
            verbose=False,
            input_names=["images"],
            output_names=["outputs"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
        )
    except torch.onnx.OnnxExporterError as error:
        reason = str(error).strip().splitlines()[0]
        raise ResoluteError(
            f"{saved.recipe.model.name}: torch cannot export it to ONNX ({reason}), expected another "
            "model; choose --format timm"
        ) from None
    assert exported is not None
    model, config = exported.model_proto, json.dumps({"resolute": _description(saved)}, indent=2)
    model.metadata_props.add(key="config", value=config)  # for readers who have the model alone
    return {"config.json": config.encode(), "model.onnx": model.SerializeToString()}


def _description(saved: SavedRun) -> dict[str, Any]:
    """The settings of `predict.py`, and the origin of the weights; a value is output * target_std + target_mean."""
    recipe, head, short_side = saved.recipe, saved.head.to_json(), round(saved.res * saved.margin)
    activation = None if head["kind"] == "values" else "softmax" if head["loss"] == "ce" else "sigmoid"
    return {
        "target": head["kind"],
        "names": head["names"],
        "units": head["units"],
        "activation": activation,
        "target_mean": head["mean"],
        "target_std": head["std"],
        "res": saved.res,
        "short_side": short_side,
        "grey_bits": saved.grey_bits,
        "crop": recipe.eval.crop_pct or saved.res / short_side,
        "mean": recipe.data.mean,
        "std": recipe.data.std,
        "flip": recipe.eval.flip,
        "weights": saved.best_weights,
        "step": saved.step,
        f"best_{saved.metric.key}": saved.best_score,
        "model": recipe.model.name,
        "recipe": recipe.values(),
        "recipe_hash": recipe.hash,
        "shards": saved.shards_hash,
    }


def preprocessing(saved: SavedRun) -> dict[str, Any]:
    """The settings with which timm's evaluation transform reproduces this project's validation.

    `input_size` (3, px, px), `mean` and `std` of RGB in 0 to 1, `crop_pct` = centre crop's side / resized short side.
    The remaining difference: validation decodes resized photos that were stored as JPEG.
    """
    recipe, res = saved.recipe, saved.res
    return {
        "input_size": (3, res, res),
        "mean": tuple(recipe.data.mean),
        "std": tuple(recipe.data.std),
        "crop_pct": recipe.eval.crop_pct or _crop_pct(res, round(res * saved.margin)),
        "crop_mode": "center",
        "interpolation": "bicubic",
    }


def _crop_pct(res: int, short_side: int) -> float:
    """The `crop_pct` for which timm resizes to exactly `short_side` px = floor(res / crop_pct)."""
    crop_pct = res / short_side
    while math.floor(res / crop_pct) < short_side:
        crop_pct = math.nextafter(crop_pct, 0.0)
    return crop_pct


def _is_export(folder: Path, model: str) -> bool:
    """Whether `folder` has an earlier export with the same name of the model's file."""
    try:
        is_ours = "resolute" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):  # a TypeError: the JSON is a number
        return False
    return is_ours and (folder / model).exists()


def main(args: ExportOptions) -> None:
    """Run the command."""
    saved = open_saved_run(existing_run(args.run))
    onnx = args.format == "onnx"
    folder = args.out or saved.path.parent / ("export-onnx" if onnx else "export")
    if folder.suffix in (".onnx", ".safetensors"):
        raise ResoluteError(
            f"--out: got {folder}, expected a folder; choose --out {folder.with_suffix('')}"
            f"{' --format onnx' * (folder.suffix == '.onnx')}"
        )
    is_empty = folder.is_dir() and not any(folder.iterdir())
    if folder.exists() and not is_empty and not _is_export(folder, "model.onnx" if onnx else "model.safetensors"):
        raise ResoluteError(
            f"--out: {folder} exists and is not a run exported for {args.format}, expected a new name; choose another"
        )
    if args.out and folder.exists() and not is_empty:
        print(f"{folder}: an earlier export will be overwritten", flush=True)
    export(saved, folder, onnx=onnx)
    names = ", ".join(saved.classes[:10]) + (", …" if len(saved.classes) > 10 else "")
    what = "values" if saved.head.target.kind == "values" else "classes"
    print(
        f"{folder}: {saved.best_weights} weights of {saved.path} (step {saved.step}), {saved.metric.title} "
        f"{saved.metric.text(saved.best_score)}; {len(saved.classes)} {what}: {names}\n"
        f"python {shlex.quote(str(folder / 'predict.py'))} photo.jpg folder/ > predictions.csv"
    )
