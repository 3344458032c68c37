"""A finished or stopped run, opened for use: its weights, recipe and class names, and sets to try it on."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from pipeline.dataset.open_dataset import is_foreign, open_either
from pipeline.dataset.shard_set import ShardSet, read_manifest
from pipeline.errors import ResoluteError
from pipeline.loader.loader import Batch, Loader
from pipeline.plan.plan import Plan
from pipeline.plan.stage import Stage
from pipeline.storage.files import open_files
from train.checkpoint import load
from train.models import build_model
from train.recipe.schema import Recipe

__all__ = [
    "Overlap",
    "SavedRun",
    "Weights",
    "fold_count",
    "logits",
    "open_eval_set",
    "open_saved_run",
    "training_overlap",
    "validation_batches",
    "validation_plan",
]  # fmt: skip

_ONE_SAMPLE = 1e-12  # as a fraction of any split

Weights = Literal["raw", "ema"]


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """A checkpoint, opened for use. `weights` are state dicts on the CPU, "ema" only where the run had an average."""

    path: Path
    recipe: Recipe
    recipe_values: dict[str, Any]
    shards_hash: str
    data: dict[str, str]  # what the run read of its set, as `ShardSet.contents`
    classes: list[str]
    margin: float  # of the shards it was trained on
    one_size: bool  # trained on tars that others made: images are resized once, bilinearly, in the stream
    step: int
    decode: Literal["cpu", "gpu"] | None  # where a run on a GPU decoded; None for a run on a CPU
    best_weights: Weights  # which of the two had the best validation of the run
    best_top1: float
    weights: dict[Weights, dict[str, torch.Tensor]]

    @property
    def res(self) -> int:
        """px: what the run validated at last."""
        stage = self.recipe.stages[-1]
        return stage.eval_res or stage.res

    @property
    def ensemble_key(self) -> tuple[Any, ...]:
        """What has to be equal for runs to see the same images and mean the same by their outputs."""
        return self.classes, self.res, self.margin, self.recipe.data.mean, self.recipe.data.std, self.recipe.eval

    def network(self, which: Weights, device: torch.device, *, resolutions: Collection[int] = ()) -> nn.Module:
        """The model with these weights, to evaluate with, also at `resolutions` (px) that the run has not seen."""
        channels_last = self.recipe.precision.channels_last
        network = build_model(
            self.recipe.model, classes=len(self.classes), channels_last=channels_last, device=device, for_training=False,
            resolutions={*self.recipe.seen_resolutions, *resolutions},
        )  # fmt: skip
        network.load_state_dict(self.weights[which])
        return network.eval()


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Why an accuracy may not be that of unseen photos. `certain`: the run was trained on them; else it may be."""

    certain: bool
    text: str


def open_saved_run(run: Path) -> SavedRun:
    """Of a run's folder the best checkpoint (the last if nothing was validated yet), or the file that is named.

    Raises `ResoluteError` if there is none, it is damaged, or its recipe has keys of another version.
    """
    path = run
    if run.is_dir():
        path = next((run / name for name in ("best.pt", "last.pt") if (run / name).exists()), run)
    if not path.is_file():
        advice = f"name one of its folds, {run.name}/fold-K" if any(run.glob("fold-*")) else "name another RUN"
        raise ResoluteError(f"{run}: no checkpoint found, expected a run's folder or one of its .pt files; {advice}")
    state = load(path, expect={})
    progress = state["progress"]
    weights: dict[Weights, Any] = {"raw": state["model"], "ema": state["ema"]}
    try:
        recipe = Recipe.from_values(state["recipe"], name=state["name"])
    except ResoluteError as error:
        raise ResoluteError(f"{path}: made by another version: {error}") from None
    return SavedRun(
        path=path, recipe=recipe, recipe_values=state["recipe"], shards_hash=state["shards"],
        data=state.get("data", {}),
        classes=state["classes"], margin=state["margin"],
        one_size=state.get("one_size", False), step=state["step"], decode=state.get("decode"),
        best_weights=progress["best_weights"],
        best_top1=progress["best_top1"], weights={which: one for which, one in weights.items() if one is not None},
    )  # fmt: skip


def fold_count(source: str | Path) -> int | None:
    """The number of folds that the shard set at `source` was made with; None if it has none, as tars of others."""
    if is_foreign(str(source)):
        return None
    folds: int | None = read_manifest(open_files(source))[0]["settings"]["val"].get("folds")
    return folds


def open_eval_set(
    source: str, saved: SavedRun, *, fold: int | None = None, val: str | None = None, classes: str | None = None
) -> ShardSet:
    """The shard set at `source` with all its resolutions, or tars that others made, as `open_either` takes them.

    `fold` is that of the command line; None is the run's own, in a set with folds. Tars have numbers for labels: where
    the run's classes are numbers too and no `classes` are given, they are taken from the run, so that tars without
    samples of the last classes fit. Raises `ResoluteError` for a `fold` that the set has not, and as `open_either`.
    """
    folds = None if val is not None or classes is not None else fold_count(source)
    if folds is None and fold is not None:
        raise ResoluteError(f"--fold: got {fold} for {source}, which has no folds, expected none; leave it out")
    if folds is not None:
        fold = saved.recipe.data.fold if fold is None else fold
        if fold is None or not 0 <= fold < folds:
            got = "none" if fold is None else fold
            raise ResoluteError(f"--fold: got {got}, expected 0 to {folds - 1}: {source} has {folds} folds; choose one")
    shards = open_either(source, fold=fold, val=val, classes=classes)
    names = [str(number) for number in range(len(saved.classes))]
    if shards.one_size and classes is None and saved.classes == names and len(shards.classes) <= len(names):
        shards = dataclasses.replace(shards, classes=tuple(names))
    return shards


def training_overlap(saved: SavedRun, shards: ShardSet, *, split: str, fold: int | None) -> Overlap | None:
    """Whether the run has seen the samples of `split` in training; None: it has held them out.

    `shards` as `open_set` gives them, with `fold` of the command line.
    """
    own_fold = saved.recipe.data.fold
    asked_fold = own_fold if fold is None else fold
    if not _is_own(saved, shards):
        return Overlap(certain=False, text=(
            f"{saved.path} was not trained on {shards.root} as it is: if its training photos are among these, the "
            "accuracy is too high"
        ))  # fmt: skip
    if split == "train" and asked_fold == own_fold:
        return Overlap(certain=True, text=f"{saved.path} was trained on these very photos")
    if asked_fold != own_fold:
        return Overlap(certain=True, text=(
            f"{saved.path} held out fold {own_fold}; it was trained on photos of fold {asked_fold}"
        ))  # fmt: skip
    return None


def _is_own(saved: SavedRun, shards: ShardSet) -> bool:
    """Whether the run was trained on this set, which may have got other resolutions since; its fold does not count."""
    read = {name: digest for name, digest in saved.data.items() if name != "fold"}
    return saved.shards_hash == shards.hash or (bool(read) and read.items() <= shards.digests.items())


def validation_plan(shards: ShardSet, recipe: Recipe, resolutions: Sequence[int], *, split: str) -> Plan:
    """Whole passes over a split, one a resolution (px), as the recipe validates; stage i is resolutions[i].

    A plan trains before it validates: each pass comes after a training batch of one sample, to be skipped.
    """
    if split not in shards.splits:
        raise ResoluteError(f"{shards.root}: no split {split}, expected one of {', '.join(shards.splits)}; choose one")
    shards = dataclasses.replace(shards, splits={"train": shards.splits[split], "val": shards.splits[split]})
    stages = []
    for res in resolutions:
        stored = next((there for there in shards.resolutions if there >= res), (shards.resolutions or (res,))[-1])
        stages.append(Stage(res=stored, eval_res=res, epochs=1, batch_size=1, fraction=_ONE_SAMPLE))
    return Plan(shards, stages, eval_batch_size=recipe.eval.batch_size, eval_crop_frac=recipe.eval.crop_frac)


@contextlib.contextmanager
def validation_batches(
    plan: Plan, saved: SavedRun, *, device: torch.device, threads: int
) -> Iterator[Iterator[Batch]]:
    """The validation batches of a plan, decoded where the run's images were."""
    recipe, on_gpu = saved.recipe, device.type == "cuda"
    half = on_gpu and recipe.precision.amp != "off"
    with Loader(plan, device=device, decode=saved.decode if on_gpu else None, threads=threads, mean=recipe.data.mean,
                std=recipe.data.std, dtype=torch.float16 if half else torch.float32) as loader:  # fmt: skip
        yield (batch for batch in loader if batch.spec.split == "val")


@torch.inference_mode()
def logits(network: nn.Module, images: torch.Tensor, *, recipe: Recipe, flip: bool) -> torch.Tensor:
    """(N, classes) float32, of each image or, with `flip`, the mean of it and its mirror, as in validation."""
    amp = recipe.precision.amp
    dtype = torch.float16 if amp == "fp16" else torch.bfloat16
    images = images if recipe.precision.channels_last else images.contiguous()
    with torch.autocast(images.device.type, dtype=dtype, enabled=amp != "off"):
        out: torch.Tensor = network(images).float()
        return (out + network(images.flip(3)).float()) / 2 if flip else out
