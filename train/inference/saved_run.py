"""A trained run opened for inference: weights, recipe and class names, and the data sets to evaluate it on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.manifest import read_manifest
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.loader import Loader
from resolute.pipeline.plan.plan import Plan
from resolute.train.checkpoint import load
from resolute.train.learner import image_dtype
from resolute.train.model.build import build_model
from resolute.train.model.outputs import Outputs
from resolute.train.recipe.schema import Recipe
from resolute.train.score import METRICS, Metric
from resolute.train.warmup import announce_compilation

__all__ = [
    "SavedRun",
    "Weights",
    "left_out_note",
    "open_eval_set",
    "open_saved_run",
    "related_to_training",
    "training_overlap",
    "validation_loader",
]

Weights = Literal["raw", "ema"]


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """A checkpoint opened for inference. `weights`: state dicts on the CPU, with "ema" only if the run used EMA."""

    path: Path
    recipe: Recipe
    shards_hash: str
    own_set: str  # path or URL of the run's set; "" if an older run does not say
    data: dict[str, str]  # digests of the data that the run read, as `ShardSet.contents`
    head: Outputs  # what the outputs mean
    margin: float  # stored short side / res of the training shards
    grey_bits: int  # that samples of 16 bits use, in the photos of the set
    generation: int  # of the shard set
    step: int
    res: int  # resolution of the validations of these weights, px
    decode: Literal["cpu", "gpu"] | None  # device on which a GPU run decoded; None for a CPU run
    best_weights: Weights  # the better of the two in validation
    best_score: float  # top-1 or mAP, 0 to 1, or R², by the kind of target
    weights: dict[Weights, dict[str, torch.Tensor]]

    @property
    def classes(self) -> list[str]:
        """The names of the classes, or of the values."""
        return list(self.head.target.names)

    @property
    def metric(self) -> Metric:
        """The metric of `best_score`."""
        return METRICS[self.head.target.kind][0]

    @property
    def ensemble_key(self) -> tuple[Any, ...]:
        """Settings that must be equal for the outputs of several runs to be averaged."""
        data = self.recipe.data
        head = self.head
        return head.target, head.loss, self.margin, self.grey_bits, data.mean, data.std, data.folds, self.recipe.eval

    def network(self, which: Weights, device: torch.device, *, resolutions: Collection[int] = ()) -> nn.Module:
        """The model with these weights in eval mode; it also accepts `resolutions` (px) not seen in training."""
        channels_last = self.recipe.precision.channels_last
        network = build_model(
            self.recipe.model,
            classes=len(self.classes),
            channels_last=channels_last,
            device=device,
            for_training=False,
            resolutions={*self.recipe.resolutions, *resolutions},
        )
        network.load_state_dict(self.weights[which])
        return network.eval()


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
    weights: dict[Weights, Any] = {"raw": state["model"], "ema": state["ema"]}
    progress = state["progress"]
    try:
        recipe = Recipe.from_values(state["recipe"], name=state["name"])
        return SavedRun(
            path=path,
            recipe=recipe,
            head=Outputs.from_json(state["head"]),
            shards_hash=state["shards"],
            own_set=state.get("set", {}).get("source", ""),
            data=state["data"],
            margin=state["margin"],
            grey_bits=state.get("grey_bits", 16),  # older runs have none
            generation=state["generation"],
            step=state["step"],
            # runs of 0.1.0 have none; it evaluated them so
            res=state.get("res", recipe.stages[-1].validation_res),
            decode=state["decode"],
            best_weights=progress["best_weights"],
            best_score=progress["best_score"],
            weights={kind: tensors for kind, tensors in weights.items() if tensors},
        )
    except ResoluteError as error:
        raise ResoluteError(f"{path}: made by another version: {error}") from None
    except KeyError as error:
        raise ResoluteError(f"{path}: made by another version, got no {error}, expected it; train again") from None


def open_eval_set(source: str | None, saved: SavedRun, *, fold: int | None = None) -> ShardSet:
    """The shard set at `source` with all its resolutions, to evaluate `saved` on; None: the run's own.

    If the set is that of a run with folds, `val` is the fold that the run held out, or `fold`. If photos were added to
    the run's own set, they are part of it, unless that would change the run's folds, or they are of classes that the
    run does not know. Raises `ResoluteError` for a `fold` that is none of the run's or of another set, if other photos
    belong together than in the run's folds, and as `ShardSet.open`.
    """
    data = saved.recipe.data
    hint = "" if source else f" (the set of {saved.path}; if it is elsewhere now, name it with SHARDS, of predict SRC)"
    source = source or saved.own_set
    if not source:
        raise ResoluteError(
            f"{saved.path}: does not say on which set it was trained, expected one; name it with SHARDS"
        )
    try:
        shards = ShardSet.open(source)
    except ResoluteError as error:
        raise type(error)(f"{error}{hint}") from None
    is_extended = shards.generation > saved.generation and _is_own(saved, shards, extended=True)
    if is_extended and (data.folds is not None or shards.target != saved.head.target):
        shards.close()
        shards = ShardSet.open(source, generation=saved.generation)
    if data.fold is not None and data.folds is not None and _is_own(saved, shards):
        shards = shards.with_fold(data.fold if fold is None else fold, data.folds)
        if _groups(shards.digests["fold"]) != _groups(saved.data["fold"]):
            raise ResoluteError(
                f"{source}: got photos that belong together otherwise than when {saved.path} was trained, so its folds "
                "are others; expected the same groups; put that set back, or train the folds again"
            )
    elif fold is not None:
        what = f"{source}, which the run was not trained on" if data.folds else "a run without folds"
        raise ResoluteError(f"--fold: got {fold} for {what}, expected none; omit it")
    return shards


def _groups(fold: str) -> str:
    """Of the digest of a fold, that of the groups that it keeps together; "" without groups."""
    return fold.partition(", groups ")[2]


def left_out_note(shards: ShardSet) -> str | None:
    """The note on a set of `open_eval_set` that is not opened with all its photos; None if it is."""
    if shards.generation + 1 == shards.generations:
        return None
    return (
        f"without the photos that were added to {shards.root} after generation {shards.generation}, that of the run: "
        "they would change its folds, or are of classes that it does not know"
    )


def training_overlap(saved: SavedRun, shards: ShardSet, *, split: str, fold: int | None) -> str | None:
    """A note if the run was, or may have been, trained on the samples of `split`; None if it held them out.

    `shards`: from `open_eval_set` with the same `fold`.
    """
    own_fold = saved.recipe.data.fold
    eval_fold = own_fold if fold is None else fold
    if not _is_own(saved, shards):
        return (
            f"{saved.path} was not trained on {shards.root} in its present state: if its training photos are among "
            "these, the accuracy is too high"
        )
    if eval_fold != own_fold:
        return f"{saved.path} held out fold {own_fold}; it was trained on photos of fold {eval_fold}"
    if split == "train":
        is_extended = shards.generation > saved.generation
        return f"{saved.path} was trained on these photos{', as far as its set had them then' if is_extended else ''}"
    return None


def related_to_training(saved: SavedRun, shards: ShardSet, *, split: str, fold: int | None) -> NDArray[np.bool_] | None:
    """(N,) which samples of `split` have a near copy or group-mate among the run's training samples.

    None if none has, or if it is not known: of another set, or if `training_overlap` says that the run was trained on
    them. `shards`: from `open_eval_set` with the same `fold`.
    """
    if split not in shards.splits or training_overlap(saved, shards, split=split, fold=fold) is not None:
        return None
    train = shards.splits["train"]
    if shards.generation > saved.generation:
        # photos that were added after the run come last
        older = read_manifest(shards.files)[0]["generations"][: saved.generation + 1]
        count = sum(generation["samples"]["train"] for generation in older)
        train = train.subset("train", np.arange(len(train)) < count)
    related = shards.splits[split].related(train)
    return related if related.any() else None


def _is_own(saved: SavedRun, shards: ShardSet, *, extended: bool = False) -> bool:
    """Whether the run was trained on this set, ignoring the fold and resolutions and photos added since.

    `extended`: ignore classes too, of which an extension may have added some.
    """
    ignored = {"fold", "classes"} if extended else {"fold"}
    read = {name: digest for name, digest in saved.data.items() if name not in ignored}
    return saved.shards_hash == shards.hash or read.items() <= shards.digests.items()


def validation_loader(
    saved: SavedRun, shards: ShardSet, resolutions: Sequence[int], *, split: str, device: torch.device, threads: int
) -> Loader:
    """A loader of `Plan.evaluation` with the run's `[eval]`, decoding on the same device type as the run."""
    recipe, on_gpu = saved.recipe, device.type == "cuda"
    plan = Plan.evaluation(
        shards, resolutions, split=split, batch_size=recipe.eval.batch_size, crop_pct=recipe.eval.crop_pct
    )
    announce_compilation(device, decode=saved.decode if on_gpu else None)
    return Loader(
        plan,
        device=device,
        decode=saved.decode if on_gpu else None,
        num_threads=threads,
        mean=recipe.data.mean,
        std=recipe.data.std,
        dtype=image_dtype(recipe.precision, device),
        world_size=1,
    )
