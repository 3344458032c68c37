"""The recipe of a command: the file that the user names, that of the run, or a starter recipe that fits the set.

The starter recipe is for a first run: it is derived from the size of the set, the kind and number of its targets, its
resolutions and the device alone, so the same set always gets the same recipe.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.dataset.target import TargetKind

from . import RECIPE_FILE
from .text import RecipeText, assignments
from .upgrade import old_key

__all__ = ["STARTER", "SetFacts", "chosen_recipe", "split_epochs", "starter_recipe"]

STARTER = "starter"  # its name

# Network of the recipes for a CPU: resnet10t, narrower and with two more blocks; 1.4 instead of 4.9 million weights.
_SMALL: dict[str, Any] = {
    "channels": [16, 40, 80, 192],
    "layers": [1, 1, 2, 2],
    "stem_width": 8,
    "stem_type": "deep",
}
# Images trained on in all epochs, and the fewest and most epochs. Measured on a CPU only: 68 epochs of 2 911 photos.
_CPU, _GPU = (120_000, 4, 60), (25_000_000, 16, 90)
_SHARES = {1: (1.0,), 2: (0.6, 0.4), 3: (0.5, 0.3, 0.2)}  # of the epochs, by number of stages
_STEPS = 25  # of an epoch, at least, unless batches would be very small
_SMALLEST_FRAC = 0.4  # of the largest resolution: training on fewer pixels teaches little


@dataclass(frozen=True, kw_only=True)
class SetFacts:
    """What of a shard set decides on its starter recipe. `resolutions`: stored ones, px; `outputs`: of the network."""

    train: int
    val: int
    kind: TargetKind
    outputs: int
    resolutions: tuple[int, ...]

    @classmethod
    def of(cls, shards: str | Path) -> SetFacts:
        """Those of the set at a folder or URL. Raises `ResoluteError` as `ShardSet.open` does."""
        with ShardSet.open(shards) as opened:
            return cls(
                train=len(opened.splits["train"]),
                val=len(opened.splits["val"]),
                kind=opened.target.kind,
                outputs=len(opened.target),
                resolutions=opened.resolutions,
            )


def chosen_recipe(
    recipe: Path | None, settings: Sequence[str], *, shards: str | Path, gpu: bool, run: Path | None = None
) -> RecipeText:
    """The recipe that a command uses.

    - `recipe`: the file that the user named; None: that of the folder `run` if it has one, else the starter recipe of
      the set `shards` for a CPU or `gpu`
    - `settings`: values that replace those of the recipe, as `--set` takes them

    Raises `ResoluteError` if the file or the set cannot be read, and for wrong settings.
    """
    if recipe is not None:
        return RecipeText.read(recipe).with_values(settings)
    if run is not None and (run / RECIPE_FILE).is_file():
        text = RecipeText.read(run / RECIPE_FILE, any_version=True)
        if old_key(text.table()):
            raise ResoluteError(
                f"{run}: made by an earlier version of Resolute, expected a run of this one; finish it with that "
                "version, or use another RUN"
            )
        return text.with_values(settings)
    model = assignments(settings).get("model.name")
    text = starter_recipe(SetFacts.of(shards), gpu=gpu, model=model if isinstance(model, str) else None)
    return text.with_values(settings)


def starter_recipe(facts: SetFacts, *, gpu: bool, model: str | None = None, epochs: int | None = None) -> RecipeText:
    """The starter recipe of a set, for a CPU or `gpu`.

    - `model`: name of a timm model; None: one that suits device and set
    - `epochs`: of all stages together; None: by the number of photos
    """
    sizes = _resolutions(facts.resolutions)
    images, fewest, most = _GPU if gpu else _CPU
    counts = split_epochs(epochs or min(most, max(fewest, round(images / facts.train))), len(sizes))
    batch = 2 ** math.floor(math.log2(max(1, facts.train / _STEPS)))
    batch = min(max(batch, 16), 256 if gpu else 128)
    steps = sum(counts) * math.ceil(facts.train / batch)
    kwargs = f"\nkwargs = {_inline(_SMALL)}" if model is None and not gpu else ""
    name = model or ("resnet10t" if not gpu else "resnet50" if facts.train >= 100_000 else "resnet18")
    every = max(1, min(sum(counts), round(4 * facts.val / facts.train)))
    stages = "".join(
        f"\n[[stages]]\nres = {res}\nepochs = {count}\nbatch_size = {batch}\n"
        for res, count in zip(sizes, counts, strict=True)
    )
    what = {"class": "classes", "labels": "labels", "values": "values"}[facts.kind]
    is_class = facts.kind == "class"
    policy = 'policy = "randaugment"\n\n' if is_class else "\n"
    toml = f"""\
# Starter recipe for {facts.train} training photos with {facts.outputs} {what}, on a {"GPU" if gpu else "CPU"}.
# A first run to improve on; `resolute keys` lists all keys, and `--set optim.lr=0.01` replaces a value for one run.

[model]
name = "{name}"{kwargs}  # any timm model

[optim]
name = "muon"
lr = 0.03  # `resolute lr-find` suggests another
weight_decay = {float(f"{min(0.4, 620 / steps):.1g}")}
{
        '''
[loss]
label_smoothing = 0.1
'''
        if is_class
        else ""
    }
[ema]
decay = {round(min(0.9999, 1 - 1 / max(10, steps / 30)), 4)}

[augment]
scale = {[0.35, 1.0] if is_class else [0.5, 1.0]}  # area of a crop / that of the image
{policy}[eval]
every_epochs = {every}
{stages}"""
    return RecipeText(name=STARTER, toml=toml, where="starter recipe")


def _resolutions(stored: Sequence[int]) -> list[int]:
    """One to three training resolutions, px, ascending: stored ones, or multiples of 32 below a single one."""
    largest = max(stored)
    sizes = sorted(res for res in {*stored} if res >= _SMALLEST_FRAC * largest)
    if len(sizes) == 1:
        smaller = {32 * round(largest * part / 32) for part in (4 / 7, 5 / 7)}
        sizes = sorted({*(res for res in smaller if 32 <= res < largest), largest})
    return sizes if len(sizes) <= 3 else [sizes[0], sizes[(len(sizes) - 1) // 2], sizes[-1]]


def split_epochs(epochs: int, stages: int) -> list[int]:
    """The epochs of each stage: those of `_SHARES`, at least one."""
    later = [max(1, round(share * epochs)) for share in _SHARES[stages][1:]]
    return [max(1, epochs - sum(later)), *later]


def _inline(table: dict[str, Any]) -> str:
    return "{ " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in table.items()) + " }"
