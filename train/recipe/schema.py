"""The recipe's schema: everything that changes results, as frozen, validated, keyword-only dataclasses.

Paths, threads and the device are command line flags instead. `Recipe.hash` identifies the results of a run: it is
stored in checkpoints and result files, and a run refuses to resume with a different recipe.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tomllib
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipeline.errors import ResoluteError
from pipeline.errors import check as _check
from pipeline.plan.stage import AUTO, BATCH_SIZES, MAX_BATCH, MAX_EPOCHS, Augment, Stage, without_effect

from .parse import build
from .sections import Distill, Ema, Freeze, Loss, Model, Optim, Precision, Schedule, Stop

if TYPE_CHECKING:
    from pipeline.dataset.shard_set import ShardSet
    from pipeline.plan.order import Order
    from pipeline.plan.plan import Plan

__all__ = ["AUTO", "Augment", "Data", "Distill", "Ema", "Eval", "Freeze", "Loss", "Model", "Optim", "Precision",
           "Recipe", "Schedule", "Stage", "Stop"]  # fmt: skip

_MAX_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class Data:
    # full: uniform shuffle, random reads; block: shuffled blocks of adjacent samples, mixed within a window, for
    # network disks and object stores; auto: block for shards behind a URL, else full; a resumed run keeps its order
    order: Literal["full", "block", "auto"] = "full"
    # for stages with fraction < 1: another part of the data each epoch, or the same nested subset
    fraction_mode: Literal["rotate", "fixed"] = "rotate"
    # damaged sample: stop the run and name it, or replace it by the next sample and log it
    on_bad_sample: Literal["error", "skip"] = "error"
    fold: int | None = None  # fold held out for validation, 0-based, for shards made with FOLDS
    # per-channel RGB mean, subtracted from pixels in 0 to 1. Source: timm IMAGENET_DEFAULT_MEAN
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    # per-channel RGB standard deviation to divide by, above 0. Source: timm IMAGENET_DEFAULT_STD
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        _check(all(value > 0 for value in self.std), "data.std", list(self.std), "three numbers above 0")


@dataclass(frozen=True, kw_only=True)
class Eval:
    every_epochs: int = 1  # epochs between validations; the last epoch is always validated
    batch_size: int = 256  # samples per validation batch, over all ranks
    crop_pct: float | None = None  # centre crop's side / short side, above 0 to 1; none: from prep's margin, 0.875
    flip: bool = False  # test-time flip: average the logits of each image and its mirror image

    def __post_init__(self) -> None:
        frac = self.crop_pct
        _check(frac is None or 0 < frac <= 1, "eval.crop_pct", frac, "above 0, at most 1")
        _check(self.every_epochs >= 1, "eval.every_epochs", self.every_epochs, "an integer of at least 1")
        expected = f"an integer from 1 to {MAX_BATCH}"
        _check(1 <= self.batch_size <= MAX_BATCH, "eval.batch_size", self.batch_size, expected)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    name: str
    stages: tuple[Stage, ...]
    seed: int = 0  # of initial weights, sample order and augmentation, 0 to 2^63 - 1
    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    optim: Optim = field(default_factory=Optim)
    loss: Loss = field(default_factory=Loss)
    distill: Distill = field(default_factory=Distill)
    schedule: Schedule = field(default_factory=Schedule)
    freeze: Freeze = field(default_factory=Freeze)
    ema: Ema = field(default_factory=Ema)
    precision: Precision = field(default_factory=Precision)
    eval: Eval = field(default_factory=Eval)
    stop: Stop = field(default_factory=Stop)

    def __post_init__(self) -> None:
        _check(len(self.stages) > 0, "stages", "none", "at least one [[stages]] table")
        _check(0 <= self.seed <= _MAX_SEED, "seed", self.seed, f"an integer from 0 to {_MAX_SEED}")
        expected = f"at most {MAX_EPOCHS} over all stages"
        _check(self.total_epochs <= MAX_EPOCHS, "stages.epochs", self.total_epochs, expected)
        smallest = min((s.batch_size for s in self.stages if s.batch_size != AUTO), default=self.optim.grad_accum_steps)
        expected = f"at most the smallest batch_size, {smallest}: a micro-batch needs at least one sample"
        _check(self.optim.grad_accum_steps <= smallest, "optim.grad_accum_steps", self.optim.grad_accum_steps, expected)
        marks = self.schedule.milestone_epochs
        good = all(mark < self.total_epochs for mark in marks)
        _check(good, "schedule.milestone_epochs", list(marks), f"below the run's {self.total_epochs} epochs")

    @property
    def hash(self) -> str:
        """12 hex digits of a SHA-256 over every value except the name."""
        text = json.dumps(self.values(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def total_epochs(self) -> int:
        return sum(stage.epochs for stage in self.stages)

    @property
    def resolutions(self) -> tuple[int, ...] | None:
        """Resolutions in px to open shards at; None (all stored ones) if a stage validates at another resolution."""
        if any(stage.eval_res not in (None, stage.res) for stage in self.stages):
            return None
        return tuple(sorted({stage.res for stage in self.stages}))

    @property
    def seen_resolutions(self) -> tuple[int, ...]:
        """Resolutions in px of the network's input, in training and validation, ascending."""
        return tuple(sorted({res for stage in self.stages for res in (stage.res, stage.eval_res or stage.res)}))

    def plan(self, shards: ShardSet, *, auto_order: Order | None = None) -> Plan:
        """The plan of a run with this recipe on `shards`. Raises `ResoluteError` as `Plan` does.

        `auto_order`: the order of `data.order = "auto"`, which a resumed run takes from its checkpoint; None: `block`
        if the set is remote, else `full`.
        """
        from pipeline.plan.plan import Plan  # why here: it loads the compiler, which reading a recipe does not need

        order = self.data.order
        if order == "auto":
            order = auto_order or ("block" if shards.files.remote else "full")
        return Plan(
            shards, self.stages, seed=self.seed, order=order, fraction_mode=self.data.fraction_mode,
            eval_batch_size=self.eval.batch_size, eval_every_epochs=self.eval.every_epochs,
            eval_crop_frac=self.eval.crop_pct,
        )  # fmt: skip

    def values(self) -> dict[str, Any]:
        """Every value except the name, with JSON types; stored in checkpoints."""
        values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        del values["name"]
        return values

    @classmethod
    def from_values(cls, values: dict[str, Any], *, name: str) -> Recipe:
        """The inverse of `values()`; keys added since those values were written get their defaults.

        Raises `ResoluteError` for keys that this version does not know and for values out of range.
        """
        return typing.cast(Recipe, build(cls, {**_without_none(values), "name": name}, ""))

    @classmethod
    def load(cls, path: str | Path) -> Recipe:
        """Read a TOML file. Raises `ResoluteError` for an unreadable file and missing, unknown or invalid keys."""
        path = Path(path)
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        except OSError as error:
            raise ResoluteError(
                f"{path}: no readable recipe ({error.strerror}), expected a TOML file; see train/recipes/"
            ) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ResoluteError(f"{path}: not TOML: {error}; correct that line") from None
        return cls.parse(table, name=path.stem, where=str(path))

    @classmethod
    def parse(cls, table: dict[str, Any], *, name: str, where: str = "recipe") -> Recipe:
        """Build a recipe from the parsed TOML `table`. Raises `ResoluteError`, prefixed with `where`."""
        table = dict(table)
        base = table.pop("augment", {})
        stages = table.get("stages", [])
        if not (isinstance(stages, list) and all(isinstance(stage, dict) for stage in stages)):
            raise ResoluteError(f"{where}: stages: got a single value, expected [[stages]] tables; use double brackets")
        table["stages"] = [{**stage, "augment": {**base, **stage.get("augment", {})}} for stage in stages]
        try:
            for stage in table["stages"]:
                _check(stage.get("batch_size") != AUTO, "stages.batch_size", AUTO, BATCH_SIZES)
                if stage.get("batch_size") == "auto":
                    stage["batch_size"] = AUTO
            recipe = typing.cast(Recipe, build(cls, {**table, "name": name}, ""))
            _refuse_without_effect(recipe, {**table, "augment": base})
            for stage, written in zip(recipe.stages, stages, strict=True):
                for key, reason in without_effect([stage.augment]).items():
                    if key in written.get("augment", {}):
                        raise ResoluteError(f"stages.augment.{key}: without effect, {reason}; remove it")
            return recipe
        except ResoluteError as error:
            raise ResoluteError(f"{where}: {error}") from None


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(inner) for name, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _refuse_without_effect(recipe: Recipe, table: dict[str, Any]) -> None:
    """Raise `ResoluteError` for a key in `table` that has no effect with the other values."""
    augments = [stage.augment for stage in recipe.stages]
    reasons = {
        ("stop", "min_delta"): not recipe.stop.patience and "stop.patience is 0, off",
        ("data", "order"): all(s.order for s in recipe.stages) and "every stage has its own",
        ("data", "fraction_mode"): all(s.fraction == 1.0 for s in recipe.stages) and "every fraction is 1",
        ("freeze", "mode"): recipe.freeze.mode != "none" and not _freezes(recipe) and "no stage freezes anything",
        ("schedule", "batch_rule"): _same_batches(recipe) and "every batch_size is the base",
    } | {("augment", key): reason for key, reason in without_effect(augments).items()}
    for section in ("model", "optim", "loss", "distill", "schedule", "ema", "precision"):
        reasons |= {(section, key): why for key, why in getattr(recipe, section).without_effect().items()}
    for (section, key), reason in reasons.items():
        if reason and key in table.get(section, {}):
            raise ResoluteError(f"{section}.{key}: without effect, {reason}; remove it")
    for mode in ("freeze", "unfreeze"):
        if recipe.freeze.mode != mode and any(f"{mode}_to" in stage for stage in table["stages"]):
            raise ResoluteError(f"stages.{mode}_to: without effect, freeze.mode is {recipe.freeze.mode}; remove it")


def _freezes(recipe: Recipe) -> bool:
    idle = (None, "none" if recipe.freeze.mode == "freeze" else "all")
    return any(getattr(stage, f"{recipe.freeze.mode}_to") not in idle for stage in recipe.stages)


def _same_batches(recipe: Recipe) -> bool:
    """Whether `schedule.batch_rule` changes no learning rate. A batch size of "auto" counts as different."""
    batches = {stage.batch_size for stage in recipe.stages}
    rule, base = recipe.schedule.batch_rule, recipe.schedule.base_batch or recipe.stages[0].batch_size
    return rule != "none" and batches == {base} and base != AUTO
