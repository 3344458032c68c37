"""Predict photos with the exported model in this folder, and write the predictions to stdout as CSV.

    python predict.py photo.jpg folder/ > predictions.csv

Photos are prepared as in the validation of the training run (config.json, key "resolute"). A photo that cannot be read
has the reason in the column `error`. Needs numpy and Pillow; timm and torch for model.safetensors, onnxruntime for
model.onnx.
"""

from __future__ import annotations

import csv
import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from resolute.prep.convert.pixels import read_rgb

FOLDER = Path(__file__).resolve().parent
CONFIG = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))["resolute"]
KIND, NAMES = CONFIG["target"], CONFIG["names"]  # "class", "labels" or "values", and the names of these
TOP = min(5, len(NAMES))  # classes per photo, most likely first
THRESHOLD = 0.5  # probability from which on a label is predicted
SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif")


def load_model() -> Callable[[Any], Any]:
    """The model as a function from images (N, 3, res, res) to outputs (N, names), float32 arrays."""
    if (FOLDER / "model.onnx").exists():
        import onnxruntime

        session = onnxruntime.InferenceSession(FOLDER / "model.onnx")
        return lambda images: session.run(None, {"images": images})[0]
    import timm
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = timm.create_model(f"local-dir:{FOLDER}", pretrained=True).eval().to(device)

    def outputs(images: Any) -> Any:
        with torch.inference_mode():
            return model(torch.from_numpy(images).to(device)).float().cpu().numpy()

    return outputs


def read(path: Path) -> Any:
    """A photo as the model expects it: (1, 3, res, res), the middle of the resized photo, normalised."""
    photo = Image.fromarray(read_rgb(path.read_bytes(), bits=CONFIG["grey_bits"]).pixels)
    scale = CONFIG["short_side"] / min(photo.size)
    if scale < 1:
        width, height = (round(side * scale) for side in photo.size)
        photo = photo.resize((width, height), Image.Resampling.BICUBIC)
    side = max(1, round(min(photo.size) * CONFIG["crop"]))
    left, top = (round((length - side) / 2) for length in photo.size)
    photo = photo.crop((left, top, left + side, top + side))
    photo = photo.resize((CONFIG["res"], CONFIG["res"]), Image.Resampling.BILINEAR)
    pixels = (np.asarray(photo, np.float32) / 255 - CONFIG["mean"]) / CONFIG["std"]
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)[None], np.float32)


def header() -> list[str]:
    """The columns of `cells`."""
    if KIND == "values":
        return [f"predicted {name}" for name in NAMES]
    if KIND == "labels":
        return ["predicted", *NAMES]
    return [f"{what}{k}" for k in range(1, TOP + 1) for what in ("class", "prob")]


def cells(outputs: Any) -> list[str]:
    """The model's outputs for a photo (names,) as predictions: values in their units, or probabilities."""
    if KIND == "values":
        return [f"{value:.7g}" for value in outputs * CONFIG["target_std"] + CONFIG["target_mean"]]
    if CONFIG["activation"] == "softmax":
        powers = np.exp(outputs - outputs.max())
        probabilities = powers / powers.sum()
    else:
        probabilities = 1 / (1 + np.exp(-outputs))
    if KIND == "labels":
        predicted = [name for name, probability in zip(NAMES, probabilities, strict=True) if probability >= THRESHOLD]
        return ["|".join(predicted), *(f"{probability:.6f}" for probability in probabilities)]
    best = np.argsort(-probabilities)[:TOP]
    return [text for k in best for text in (NAMES[k], f"{probabilities[k]:.6f}")]


def photos(names: list[str]) -> Iterator[Path]:
    """The files of `names`; of folders, the image files in them."""
    for path in map(Path, names):
        files = sorted(path.rglob("*")) if path.is_dir() else ()
        yield from (file for file in files if file.suffix.lower() in SUFFIXES and not file.name.startswith("."))
        if not path.is_dir():
            yield path


def main(names: list[str]) -> None:
    """Predict the photos in `names`, files and folders."""
    model = load_model()
    rows = csv.writer(sys.stdout)
    rows.writerow(["image", *header(), "error"])
    for path in photos(names):
        try:
            images = read(path)
        except Exception as error:  # why any: Pillow raises many types on damaged files
            rows.writerow([path, *[""] * len(header()), " ".join(f"{type(error).__name__}: {error}".split())])
            continue
        outputs = model(images)
        if CONFIG["flip"]:
            outputs = (outputs + model(images[..., ::-1].copy())) / 2
        rows.writerow([path, *cells(outputs[0]), ""])


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    if hasattr(signal, "SIGPIPE"):  # `… | head` ends the program without a message
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape", newline="")  # type: ignore[union-attr]
    main(sys.argv[1:])
