"""A trained run opened for inference: weights, recipe and class names, and the data sets to evaluate it on."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from pipeline.dataset.open_dataset import is_foreign, open_dataset
from pipeline.dataset.shard_set import ShardSet, read_manifest
from pipeline.errors import ResoluteError
from pipeline.loader.loader import Loader
from pipeline.plan.plan import Plan
from pipeline.storage.base import open_files
from train.checkpoint import load
from train.loop import image_dtype
from train.models import build_model
from train.recipe.schema import Recipe

__all__ = [
    "Overlap",
    "SavedRun",
    "Weights",
    "fold_count",
    "open_eval_set",
    "open_saved_run",
    "training_overlap",
    "validation_loader",
]  # fmt: skip

Weights = Literal["raw", "ema"]


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """A checkpoint opened for inference. `weights`: state dicts on the CPU, with "ema" only if the run used EMA."""

    path: Path
    recipe: Recipe
    recipe_values: dict[str, Any]
    shards_hash: str
    data: dict[str, str]  # digests of the data that the run read, as `ShardSet.contents`
    classes: list[str]
    margin: float  # stored short side / res of the training shards
    single_resolution: bool  # trained on plain tars: images are resized once, bilinearly, by the loader
    step: int
    decode: Literal["cpu", "gpu"] | None  # where a GPU run decoded; None for a CPU run
    best_weights: Weights  # which of the two had the best validation
    best_top1: float  # 0 to 1
    weights: dict[Weights, dict[str, torch.Tensor]]

    @property
    def res(self) -> int:
        """Resolution of the run's last validation, px."""
        stage = self.recipe.stages[-1]
        return stage.eval_res or stage.res

    @property
    def ensemble_key(self) -> tuple[Any, ...]:
        """What must be equal for the outputs of several runs to be averaged."""
        return self.classes, self.res, self.margin, self.recipe.data.mean, self.recipe.data.std, self.recipe.eval

    def network(self, which: Weights, device: torch.device, *, resolutions: Collection[int] = ()) -> nn.Module:
        """The model with these weights in eval mode; it also accepts `resolutions` (px) not seen in training."""
        channels_last = self.recipe.precision.channels_last
        network = build_model(
            self.recipe.model, classes=len(self.classes), channels_last=channels_last, device=device,
            for_training=False, resolutions={*self.recipe.seen_resolutions, *resolutions},
        )  # fmt: skip
        network.load_state_dict(self.weights[which])
        return network.eval()


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Why an accuracy is not that of unseen photos. `certain`: the run was trained on them; False: possibly."""

    certain: bool
    text: str


def open_saved_run(run: Path) -> SavedRun:
    """Open the checkpoint file `run`, or the best checkpoint of the folder `run` (the last if none was validated).

    Raises `ResoluteError` if there is none, it is damaged, or its recipe has keys of another version.
    """
    path = run
    if run.is_dir():
        path = next((run / name for name in ("best.pt", "last.pt") if (run / name).exists()), run)
    if not path.is_file():
        advice = f"name one of its folds, {run.name}/fold-K" if any(run.glob("fold-*")) else "name another RUN"
        raise ResoluteError(f"{run}: no checkpoint, expected a run's folder or one of its .pt files; {advice}")
    state = load(path, expect={})
    progress = state["progress"]
    weights: dict[Weights, Any] = {"raw": state["model"], "ema": state["ema"]}
    try:
        recipe = Recipe.from_values(state["recipe"], name=state["name"])
    except ResoluteError as error:
        raise ResoluteError(f"{path}: made by another version: {error}") from None
    return SavedRun(
        path=path, recipe=recipe, recipe_values=state["recipe"], shards_hash=state["shards"],
        data=state["data"],
        classes=state["classes"], margin=state["margin"],
        single_resolution=state["single_resolution"], step=state["step"], decode=state["decode"],
        best_weights=progress["best_weights"],
        best_top1=progress["best_top1"], weights={which: tensors for which, tensors in weights.items() if tensors},
    )  # fmt: skip


def fold_count(source: str | Path) -> int | None:
    """The number of folds of the shard set at `source`; None if it has none, as plain tars."""
    if is_foreign(str(source)):
        return None
    folds: int | None = read_manifest(open_files(source))[0]["settings"]["val"].get("folds")
    return folds


def open_eval_set(
    source: str, saved: SavedRun, *, fold: int | None = None, val: str | None = None, classes: str | None = None
) -> ShardSet:
    """The shard set at `source` with all its resolutions, or plain tars, to evaluate `saved` on.

    `fold`: from the command line; None: the run's own, if the set has folds. `val`, `classes`: as for `open_dataset`.
    Plain tars have numeric labels: if the run's classes are numbers too and `classes` is None, the run's classes are
    used, so that tars without samples of the last classes fit. Raises `ResoluteError` for an unknown `fold`, and as
    `open_dataset`.
    """
    folds = None if val is not None or classes is not None else fold_count(source)
    if folds is None and fold is not None:
        raise ResoluteError(f"--fold: got {fold} for {source}, which has no folds, expected none; omit it")
    if folds is not None:
        fold = saved.recipe.data.fold if fold is None else fold
        if fold is None or not 0 <= fold < folds:
            got = "none" if fold is None else fold
            raise ResoluteError(f"--fold: got {got}, expected 0 to {folds - 1}: {source} has {folds}; choose another")
    shards = open_dataset(source, fold=fold, val=val, classes=classes)
    names = [str(number) for number in range(len(saved.classes))]
    if shards.single_resolution and classes is None and saved.classes == names and len(shards.classes) <= len(names):
        shards = dataclasses.replace(shards, classes=tuple(names))
    return shards


def training_overlap(saved: SavedRun, shards: ShardSet, *, split: str, fold: int | None) -> Overlap | None:
    """Whether the run was, or may have been, trained on the samples of `split`; None if it held them out.

    `shards`: from `open_eval_set` with the same `fold`.
    """
    own_fold = saved.recipe.data.fold
    eval_fold = own_fold if fold is None else fold
    if not _is_own(saved, shards):
        return Overlap(certain=False, text=(
            f"{saved.path} was not trained on {shards.root} in its present state: if its training photos are among "
            "these, the accuracy is too high"
        ))  # fmt: skip
    if split == "train" and eval_fold == own_fold:
        return Overlap(certain=True, text=f"{saved.path} was trained on these photos")
    if eval_fold != own_fold:
        return Overlap(certain=True, text=(
            f"{saved.path} held out fold {own_fold}; it was trained on photos of fold {eval_fold}"
        ))  # fmt: skip
    return None


def _is_own(saved: SavedRun, shards: ShardSet) -> bool:
    """Whether the run was trained on this set, ignoring the fold and resolutions added since."""
    read = {name: digest for name, digest in saved.data.items() if name != "fold"}
    return saved.shards_hash == shards.hash or read.items() <= shards.digests.items()


def validation_loader(
    saved: SavedRun, shards: ShardSet, resolutions: Sequence[int], *, split: str, device: torch.device, threads: int
) -> Loader:
    """A loader of `Plan.evaluation` with the run's `[eval]`, decoding on the same device type as the run."""
    recipe, on_gpu = saved.recipe, device.type == "cuda"
    plan = Plan.evaluation(
        shards, resolutions, split=split, batch_size=recipe.eval.batch_size, crop_frac=recipe.eval.crop_pct
    )
    return Loader(plan, device=device, decode=saved.decode if on_gpu else None, threads=threads, mean=recipe.data.mean,
                  std=recipe.data.std, dtype=image_dtype(recipe.precision, device))  # fmt: skip
