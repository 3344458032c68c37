"""What changes results? One TOML recipe, turned into frozen, checked, keyword-only values.

Paths, threads and the device are flags of the command line, not here. `Recipe.hash` names a run; it sits in
checkpoints and result files, and a run does not resume under another one.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import tomllib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .augment import Augment, without_effect
from .errors import ResoluteError
from .errors import check as _check

__all__ = ["Augment", "Data", "Ema", "Eval", "Model", "Optim", "Precision", "Recipe", "Schedule", "Stage"]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Whole epochs at one resolution and batch size; one `[[stages]]` table."""

    res: int  # px: what the model sees, square
    epochs: int
    batch_size: int  # samples an optimizer step, over all ranks
    fraction: float = 1.0  # part of the training samples that an epoch of this stage takes
    lr_scale: float = 1.0  # factor on the global schedule
    order: Literal["full", "block"] | None = None  # of reading, in this stage; None: that of `data`
    eval_res: int | None = None  # px: validation at another resolution than training (FixRes); None: `res`
    augment: Augment = field(default_factory=Augment)

    def __post_init__(self) -> None:
        for name in ("res", "epochs", "batch_size"):
            _check(getattr(self, name) >= 1, f"stages.{name}", getattr(self, name), "an integer of at least 1")
        _check(0 < self.fraction <= 1, "stages.fraction", self.fraction, "above 0, at most 1")
        _check(self.lr_scale > 0, "stages.lr_scale", self.lr_scale, "above 0")
        eval_res = self.eval_res
        _check(eval_res is None or eval_res >= 1, "stages.eval_res", eval_res, "an integer of at least 1")


@dataclass(frozen=True, kw_only=True)
class Data:
    # full: every read at a random place; block: blocks of neighbours, shuffled in a window of them, for network disks
    # and stores; auto: whichever suits the disk, measured when the run starts and kept by its checkpoints
    order: Literal["full", "block", "auto"] = "full"
    fraction_mode: Literal["rotate", "fixed"] = "rotate"  # next part of the data, or one nested subset
    # a damaged sample ends the run with its name, or the next one takes its place (told in the log)
    on_bad_sample: Literal["error", "skip"] = "error"
    fold: int | None = None  # the part that validates, for shards made with FOLDS
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)  # Source: timm IMAGENET_DEFAULT_MEAN
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)  # Source: timm IMAGENET_DEFAULT_STD


@dataclass(frozen=True, kw_only=True)
class Model:
    name: str = "resnet50"  # any timm model
    options: dict[str, Any] = field(default_factory=dict)  # passed to timm.create_model


@dataclass(frozen=True, kw_only=True)
class Optim:
    name: Literal["sgd", "adamw"] = "sgd"  # SGD is Nesterov's
    lr: float = 0.5  # peak of the schedule, before `lr_scale`
    weight_decay: float = 5e-5  # not on norms and biases
    momentum: float = 0.9  # SGD; the schedule moves it
    betas: tuple[float, float] = (0.9, 0.999)  # AdamW; the schedule moves the first
    clip_norm: float = 0.0  # 0 = off
    accumulate: int = 1  # micro-batches a step; `batch_size` stays the samples of one step
    smoothing: float = 0.0  # label smoothing

    def __post_init__(self) -> None:
        _check(self.lr > 0, "optim.lr", self.lr, "above 0")
        _check(self.weight_decay >= 0, "optim.weight_decay", self.weight_decay, "0 or more")
        _check(self.clip_norm >= 0, "optim.clip_norm", self.clip_norm, "0 (off) or more")
        _check(self.accumulate >= 1, "optim.accumulate", self.accumulate, "an integer of at least 1")
        _check(0 <= self.smoothing < 1, "optim.smoothing", self.smoothing, "0 to below 1")
        _check(0 <= self.momentum < 1, "optim.momentum", self.momentum, "0 to below 1")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One OneCycle over all steps of all stages. Source: Smith and Topin, arXiv 1708.07120."""

    warmup_frac: float = 0.25  # part of the steps in which the LR rises
    start_div: float = 10.0  # first LR = peak / start_div
    final_div: float = 1e3  # last LR = first LR / final_div
    momentum_low: float = 0.85  # at the LR's peak; at its ends it is optim.momentum (or betas[0])

    def __post_init__(self) -> None:
        _check(0 < self.warmup_frac < 1, "schedule.warmup_frac", self.warmup_frac, "above 0, below 1")
        _check(self.start_div >= 1, "schedule.start_div", self.start_div, "1 or more")
        _check(self.final_div >= 1, "schedule.final_div", self.final_div, "1 or more")
        _check(0 <= self.momentum_low < 1, "schedule.momentum_low", self.momentum_low, "0 to below 1")


@dataclass(frozen=True, kw_only=True)
class Ema:
    decay: float = 0.0  # 0 = off; else the weight of the old average at each step
    warmup: bool = True  # smaller decay at first: 1 - (1 + step)^(-2/3), timm's ModelEmaV3

    def __post_init__(self) -> None:
        _check(0 <= self.decay < 1, "ema.decay", self.decay, "0 (off) to below 1")


@dataclass(frozen=True, kw_only=True)
class Precision:
    amp: Literal["bf16", "fp16", "off"] = "bf16"
    channels_last: bool = True


@dataclass(frozen=True, kw_only=True)
class Eval:
    every_epochs: int = 1  # the last epoch of the run is always validated
    batch_size: int = 256
    crop_frac: float | None = None  # side of the centre crop / short side; None: what prep's margin leaves, 0.875
    flip: bool = False  # test-time flip: the mean logits of each image and its mirror

    def __post_init__(self) -> None:
        frac = self.crop_frac
        _check(frac is None or 0 < frac <= 1, "eval.crop_frac", frac, "above 0, at most 1")
        _check(self.every_epochs >= 1, "eval.every_epochs", self.every_epochs, "an integer of at least 1")
        _check(self.batch_size >= 1, "eval.batch_size", self.batch_size, "an integer of at least 1")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    name: str
    stages: tuple[Stage, ...]
    seed: int = 0
    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    optim: Optim = field(default_factory=Optim)
    schedule: Schedule = field(default_factory=Schedule)
    ema: Ema = field(default_factory=Ema)
    precision: Precision = field(default_factory=Precision)
    eval: Eval = field(default_factory=Eval)

    def __post_init__(self) -> None:
        _check(len(self.stages) > 0, "stages", "none", "at least one [[stages]] table")

    @property
    def hash(self) -> str:
        """12 hex digits over every value but the name: the same results, the same hash."""
        values = dataclasses.asdict(self)
        del values["name"]
        text = json.dumps(values, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def total_epochs(self) -> int:
        return sum(stage.epochs for stage in self.stages)

    @property
    def resolutions(self) -> tuple[int, ...] | None:
        """px that shards are opened at; None, all there are, if a stage validates at another resolution."""
        if any(stage.eval_res not in (None, stage.res) for stage in self.stages):
            return None
        return tuple(sorted({stage.res for stage in self.stages}))

    @classmethod
    def load(cls, path: str | Path) -> Recipe:
        """Read a TOML file. Raises `ResoluteError` for what is missing, unknown or out of range."""
        path = Path(path)
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ResoluteError(
                f"{path}: no readable recipe ({error.strerror}), expected a TOML file; see train/recipes/"
            ) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ResoluteError(f"{path}: not TOML: {error}; correct that line") from None
        return cls.parse(table, name=path.stem, where=str(path))

    @classmethod
    def parse(cls, table: dict[str, Any], *, name: str, where: str = "recipe") -> Recipe:
        """Build a recipe from the tables of a TOML file."""
        table = dict(table)
        base = table.pop("augment", {})
        stages = table.get("stages", [])
        if not (isinstance(stages, list) and all(isinstance(stage, dict) for stage in stages)):
            raise ResoluteError(f"{where}: stages: got one value, expected [[stages]] tables; write it so")
        table["stages"] = [{**stage, "augment": {**base, **stage.get("augment", {})}} for stage in stages]
        try:
            recipe = typing.cast(Recipe, _build(cls, {**table, "name": name}, ""))
            _refuse_without_effect(recipe, {**table, "augment": base})
            for stage, given in zip(recipe.stages, stages, strict=True):
                for key, reason in without_effect([stage.augment]).items():
                    if key in given.get("augment", {}):
                        raise ResoluteError(f"stages.augment.{key}: without effect, {reason}; remove it")
            return recipe
        except ResoluteError as error:
            raise ResoluteError(f"{where}: {error}") from None


def _refuse_without_effect(recipe: Recipe, table: dict[str, Any]) -> None:
    """Raise for a key that was given and that nothing would read."""
    augments = [stage.augment for stage in recipe.stages]
    reasons = {
        ("optim", "momentum"): recipe.optim.name == "adamw" and "adamw takes optim.betas",
        ("optim", "betas"): recipe.optim.name == "sgd" and "sgd takes optim.momentum",
        ("ema", "warmup"): not recipe.ema.decay and "ema.decay is 0, off",
        ("data", "order"): all(s.order for s in recipe.stages) and "every stage has its own",
        ("data", "fraction_mode"): all(s.fraction == 1.0 for s in recipe.stages) and "every fraction is 1",
    } | {("augment", key): reason for key, reason in without_effect(augments).items()}
    for (section, key), reason in reasons.items():
        if reason and key in table.get(section, {}):
            raise ResoluteError(f"{section}.{key}: without effect, {reason}; remove it")


def _build(cls: type, table: object, where: str) -> Any:
    if not isinstance(table, dict):
        raise ResoluteError(f"{where}: got {table!r}, expected a table; write [{where}]")
    hints = typing.get_type_hints(cls)
    prefix = f"{where}." if where else ""
    for key in table:
        if key not in hints:
            close = difflib.get_close_matches(key, hints, n=1)
            advice = f"did you mean {prefix}{close[0]}?" if close else f"known: {', '.join(hints)}"
            raise ResoluteError(f"unknown key {prefix}{key}; {advice}")
    for spec in dataclasses.fields(cls):
        needed = spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING
        if needed and spec.name not in table:
            raise ResoluteError(f"{prefix}{spec.name}: missing; add it to the recipe")
    return cls(**{key: _convert(hints[key], value, prefix + key) for key, value in table.items()})


def _convert(hint: Any, value: Any, where: str) -> Any:
    """`value` from TOML as the type `hint`, or a `ResoluteError` that says what was expected."""
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value, where)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):  # a value or none at all: TOML has no null
        (hint,) = (arg for arg in typing.get_args(hint) if arg is not types.NoneType)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        _check(value in args, where, repr(value), "one of " + ", ".join(map(repr, args)))
        return value
    if origin is tuple:
        many = len(args) == 2 and args[1] is Ellipsis
        good = isinstance(value, list) and (many or len(value) == len(args))
        _check(good, where, repr(value), "a list" if many else f"a list of {len(args)} numbers")
        return tuple(_convert(args[0], item, where) for item in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    kind = origin if isinstance(origin, type) else hint
    good = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    names = {int: "an integer", float: "a number", str: "text", bool: "true or false", dict: "a table"}
    _check(good, where, repr(value), names.get(kind, str(kind)))
    return value
