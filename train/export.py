"""`python -m train.export RUN`: how do a run's weights get into other people's programs? As one safetensors file.

    timm.create_model(NAME, num_classes=N, checkpoint_path="RUN/model.safetensors")
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from pipeline.cli import guard_process

    guard_process()

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save

from pipeline.cli import command
from pipeline.errors import ResoluteError
from pipeline.storage.atomic_file import output_file

from .saved import Saved, open_saved

__all__ = ["export", "main"]


def export(saved: Saved, path: Path) -> str:
    """Write the run's best weights, raw or averaged, to `path`; returns how to load them: a line of Python.

    The file's metadata (all text) has the class names, the recipe and its hash, and what images have to look like.
    """
    recipe, which = saved.recipe, saved.best_weights
    metadata = {
        "format": "pt", "model": recipe.model.name, "options": json.dumps(recipe.model.options),
        "classes": json.dumps(saved.classes), "recipe": json.dumps(saved.recipe_values), "recipe_hash": recipe.hash,
        "shards": saved.shards_hash, "weights": which, "step": str(saved.step), "best_top1": str(saved.best_top1),
        "res": str(saved.res), "margin": str(saved.margin), "mean": json.dumps(recipe.data.mean),
        "std": json.dumps(recipe.data.std),
    }  # fmt: skip
    # why: safetensors takes no channels_last, and no two tensors that share memory
    tensors = {name: value.clone(memory_format=torch.contiguous_format) for name, value in saved.weights[which].items()}
    with output_file(path) as file:
        file.write(save(tensors, metadata=metadata))
    if recipe.model.norm == "group":
        return f'timm alone has no such {recipe.model.name}: a recipe\'s [model] norm = "group", weights = "{path}"'
    words = [repr(recipe.model.name), f"num_classes={len(saved.classes)}"]
    words += [f"{name}={value!r}" for name, value in recipe.model.options.items()]
    words += ["aa_layer=timm.layers.BlurPool2d"] if recipe.model.antialias else []
    return f"timm.create_model({', '.join([*words, f'checkpoint_path={str(path)!r}'])})"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m train.export", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder, or one of its checkpoints")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: model.safetensors in the run's folder")
    return command(parser, _run, arguments)


def _run(got: argparse.Namespace) -> None:
    saved = open_saved(got.run)
    path = got.out or saved.path.parent / "model.safetensors"
    if path.suffix != ".safetensors":
        raise ResoluteError(f"--out: got {path}, expected a name that ends in .safetensors; timm goes by it")
    line = export(saved, path)
    print(f"{path}: {saved.best_weights} weights of {saved.path} (step {saved.step}), top-1 "
          f"{100 * saved.best_top1:.2f} %\n{line}")  # fmt: skip


if __name__ == "__main__":
    from pipeline.cli import run_main

    run_main(main)
