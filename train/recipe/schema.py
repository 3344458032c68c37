"""The recipe's schema: everything that changes results, as frozen, validated, keyword-only dataclasses.

Paths, threads and the device are command line flags instead. `Recipe.hash` identifies the results of a run: it is
stored in checkpoints and result files, and a run refuses to resume with a different recipe.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from resolute.errors import ResoluteError, check
from resolute.pipeline.plan.stage import (
    AUTO,
    MAX_EPOCHS,
    Augment,
    BatchSize,
    Seed,
    unused_augment_keys,
)
from resolute.settings import definitions, setting, settings

from .sections import (
    AutoLoss,
    Distill,
    Ema,
    Loss,
    Model,
    OneCycleSchedule,
    Optim,
    Precision,
    Schedule,
    StepSchedule,
    Stop,
)
from .stages import STAGE_KEYS, RecipeStage
from .text import RecipeText
from .upgrade import upgraded

if TYPE_CHECKING:
    from resolute.pipeline.dataset.shard_set import ShardSet
    from resolute.pipeline.plan.order import Order
    from resolute.pipeline.plan.plan import Plan

__all__ = [
    "AUTO",
    "Augment",
    "Data",
    "Distill",
    "Ema",
    "Eval",
    "Loss",
    "Model",
    "Optim",
    "Precision",
    "Recipe",
    "RecipeStage",
    "Schedule",
    "StageSections",
    "Stop",
    "scaled",
    "unused_keys",
]

# Source: timm IMAGENET_DEFAULT_MEAN and _STD
_IMAGENET: dict[Literal["mean", "std"], tuple[float, float, float]] = {
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225),
}
T = TypeVar("T")
_SAME = 1e-3  # means and deviations that differ less are equal


@settings("data", other_names=dict.fromkeys(("mean", "std", "mean_std", "normalise"), "data.normalize"))
class Data:
    order: Literal["shuffled", "windowed", "auto"] = setting(
        "shuffled",
        "shuffled: uniform shuffle, random reads; windowed: shuffled blocks of adjacent samples, mixed within a "
        "window, for network disks and object stores; auto: windowed for shards behind a URL, else shuffled; a resumed "
        "run keeps its order",
    )
    fraction_mode: Literal["rotate", "fixed"] = setting(
        "rotate", "for stages with fraction < 1: another part of the data each epoch, or the same nested subset"
    )
    sampling: Literal["uniform", "balanced", "sqrt"] = setting(
        "uniform",
        "uniform: every sample once per epoch; balanced: all classes equally often, in an epoch of the same "
        "length; sqrt: in proportion to the square root of their size, between the two",
    )
    on_bad_sample: Literal["error", "skip"] = setting(
        "error", "damaged sample: stop the run and name it, or replace it by another sample and log it"
    )
    folds: int | None = setting(
        None,
        "divide the training split into this many folds, stratified by class; the set's own validation split "
        "takes no part",
        ge=2,
    )
    fold: int | None = setting(None, "fold held out for validation, below `folds`; the others are trained on", ge=0)
    normalize: Literal["weights", "imagenet"] | dict[Literal["mean", "std"], tuple[float, float, float]] = setting(
        "weights",
        "what is subtracted from pixels in 0 to 1 and what they are divided by, per RGB channel: weights: as the "
        "initial weights expect (ImageNet's mean and standard deviation without weights); imagenet: ImageNet's; or "
        "{ mean = [r, g, b], std = [r, g, b] }",
    )

    def __post_init__(self) -> None:
        fold, folds = self.fold, self.folds
        are_both = (fold is None) == (folds is None)
        check(are_both, "data", "only one of fold and folds", "both (fold = 0, folds = 5) or neither")
        check(fold is None or folds is None or fold < folds, "data.fold", fold, f"0 to {(folds or 0) - 1}")
        if isinstance(self.normalize, dict):
            whole = self.normalize.keys() == {"mean", "std"} and min(self.normalize["std"]) > 0
            expected = "{ mean = [r, g, b], std = [r, g, b] } with std above 0"
            check(whole, "data.normalize", self.normalize, expected)

    @property
    def mean(self) -> tuple[float, float, float]:
        """Per-channel mean of RGB in 0 to 1. `Recipe.parse` has looked up that of initial weights."""
        return self.normalize["mean"] if isinstance(self.normalize, dict) else _IMAGENET["mean"]

    @property
    def std(self) -> tuple[float, float, float]:
        """Per-channel standard deviation of RGB in 0 to 1."""
        return self.normalize["std"] if isinstance(self.normalize, dict) else _IMAGENET["std"]


@settings("eval", other_names={"crop_frac": "eval.crop_pct"})
class Eval:
    every_epochs: int = setting(1, "epochs between validations; the last epoch is always validated", ge=1)
    batch_size: BatchSize = setting(256, "samples per validation batch, over all ranks")
    crop_pct: float | None = setting(
        None, "centre crop's side / short side; none: from prep's margin, 0.875", gt=0, le=1
    )
    flip: bool = setting(False, "test-time flip: average the logits of each image and its mirror image")


@dataclass(frozen=True, kw_only=True)
class StageSections:
    """Sections of the run with what a stage overrides."""

    augment: Augment
    loss: Loss
    model: Model
    optim: Optim


@settings(
    "",
    other_names={"augmentation": "augment", "augments": "augment", "optimizer": "optim", "freeze": "stages.train_from"},
)
class Recipe:
    name: str
    stages: tuple[RecipeStage, ...]
    seed: Seed = setting(0, "of initial weights, sample order and augmentation")
    scale_epochs: float = setting(
        1.0,
        "factor on the epochs of every stage, and on `schedule.warmup_epochs`, `milestone_epochs` and "
        "`ema.last_epochs`; whole numbers are rounded to the nearest, halves up, to at least 1",
        gt=0,
        le=MAX_EPOCHS,
    )
    data: Data = Data()
    model: Model = Model()
    optim: Optim = Optim()
    loss: Loss = AutoLoss()
    distill: Distill = Distill()
    schedule: Schedule = OneCycleSchedule()
    ema: Ema = Ema()
    precision: Precision = Precision()
    eval: Eval = Eval()
    stop: Stop = Stop()

    def __post_init__(self) -> None:
        check(len(self.stages) > 0, "stages", "none", "at least one [[stages]] table")
        expected = f"at most {MAX_EPOCHS} over all stages"
        check(self.total_epochs <= MAX_EPOCHS, "stages.epochs", self.total_epochs, expected)
        sizes = [shape.batch_size for s in self.stages for shape in s.shapes if s.batch_size != AUTO]
        smallest = min(sizes, default=self.optim.grad_accum_steps)
        expected = f"at most the smallest batch_size, {smallest}: a micro-batch needs at least one sample"
        check(self.optim.grad_accum_steps <= smallest, "optim.grad_accum_steps", self.optim.grad_accum_steps, expected)
        last, total = self.ema.last_epochs, self.total_epochs
        check(last <= total, "ema.last_epochs", last, f"at most the run's {total} epochs")
        self._check_schedule()
        for number in range(len(self.stages)):
            self.in_stage(number)

    def _check_schedule(self) -> None:
        schedule, total = self.schedule, self.total_epochs
        if isinstance(schedule, StepSchedule):
            marks = schedule.milestone_epochs
            check(marks[-1] < total, "schedule.milestone_epochs", list(marks), f"below the run's {total} epochs")
            return
        warmup = schedule.warmup_epochs or 0.0
        check(warmup < total, "schedule.warmup_epochs", warmup, f"below the run's {total} epochs")
        for name in ("first_lr", "last_lr"):
            lr = getattr(schedule, name) or 0.0
            check(lr <= self.optim.lr, f"schedule.{name}", lr, f"at most optim.lr, {self.optim.lr:g}")

    def in_stage(self, number: int) -> StageSections:
        """The sections of which a stage may override keys, with those of stage `number`."""
        return self._in_stages[number]

    @functools.cached_property
    def _in_stages(self) -> tuple[StageSections, ...]:
        return tuple(
            StageSections(
                augment=stage.augment or Augment(),
                loss=_overridden("loss", self.loss, stage),
                model=_overridden("model", self.model, stage),
                optim=_overridden("optim", self.optim, stage),
            )
            for stage in self.stages
        )

    @property
    def hash(self) -> str:
        """12 hex digits of a SHA-256 over every value except the name."""
        text = json.dumps(self.values(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def total_epochs(self) -> int:
        return sum(stage.epochs for stage in self.stages)

    @property
    def resolutions(self) -> tuple[int, ...]:
        """Resolutions in px to open shards at, in training and validation, ascending."""
        return tuple(sorted({res for stage in self.stages for res in (*stage.resolutions, stage.validation_res)}))

    def plan(self, shards: ShardSet, *, auto_order: Order | None = None) -> Plan:
        """The plan of a run with this recipe on `shards`. Raises `ResoluteError` as `Plan` does.

        `auto_order`: the order of `data.order = "auto"`, which a resumed run takes from its checkpoint; None:
        `windowed` if the set is remote, else `shuffled`.
        """
        from resolute.pipeline.plan.plan import (
            Plan,  # why here: it loads the compiler, which reading a recipe does not need
        )

        order = self.data.order
        if order == "auto":
            order = auto_order or ("windowed" if shards.files.remote else "shuffled")
        return Plan(
            shards,
            self.stages,
            seed=self.seed,
            order=order,
            fraction_mode=self.data.fraction_mode,
            sampling=self.data.sampling,
            eval_batch_size=self.eval.batch_size,
            eval_every_epochs=self.eval.every_epochs,
            eval_crop_pct=self.eval.crop_pct,
        )

    def values(self) -> dict[str, Any]:
        """Every value except the name, with JSON types; stored in checkpoints."""
        values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        del values["name"]
        return values

    def written(self) -> dict[str, Any]:
        """The fewest keys of a TOML file from which this recipe is parsed; those with an effect that are not defaults.

        Only for recipes of one stage that overrides nothing.
        """
        (stage,) = self.stages
        unused = unused_keys(self)
        table: dict[str, Any] = {}
        for name, value in _changed(self, left_out=("name", "scale_epochs", "stages")).items():
            keys = _changed(value) if dataclasses.is_dataclass(value) else value
            kept = {key: each for key, each in keys.items() if (name, key) not in unused} if keys is not value else keys
            table |= {name: kept} if kept != {} else {}
        if self.data.normalize == _normalisation_of_weights(self.model):
            table["data"].pop("normalize", None)
            table = {name: keys for name, keys in table.items() if keys != {}}
        augment = _changed(stage.augment or Augment())
        return {
            **table,
            **({"augment": augment} if augment else {}),
            "stages": [_changed(stage, left_out=("augment",))],
        }

    @classmethod
    def from_values(cls, values: dict[str, Any], *, name: str, exact: bool = False) -> Recipe:
        """The inverse of `values()`, also of earlier versions; keys that these did not have get their defaults.

        `exact`: as in `upgraded`. Raises `ResoluteError` for keys that this version does not know and for values out of
        range.
        """
        return cls(**{**upgraded(_without_none(values), exact=exact), "name": name})

    @classmethod
    def load(cls, path: str | Path) -> Recipe:
        """Read a TOML file. Raises `ResoluteError` for an unreadable file and missing, unknown or invalid keys."""
        return cls.from_text(RecipeText.read(path))

    @classmethod
    def from_text(cls, text: RecipeText) -> Recipe:
        """The recipe of a TOML text. Raises `ResoluteError` for missing, unknown or invalid keys."""
        return cls.parse(text.table(), name=text.name, where=text.where)

    @staticmethod
    def check_stages(table: Mapping[str, Any], *, where: str) -> list[dict[str, Any]]:
        """The tables of the stages in a parsed TOML `table`. Raises `ResoluteError` if they are none."""
        stages = table.get("stages", [])
        if not (isinstance(stages, list) and all(isinstance(stage, dict) for stage in stages)):
            raise ResoluteError(f"{where}: stages: got a single value, expected [[stages]] tables; use double brackets")
        return stages

    @classmethod
    def parse(cls, table: dict[str, Any], *, name: str, where: str = "recipe") -> Recipe:
        """Build a recipe from the parsed TOML `table`. Raises `ResoluteError`, prefixed with `where`."""
        table = dict(table)
        stages = cls.check_stages(table, where=where)
        for place, own in (("", table), *(("stages.", stage) for stage in stages)):
            for section in STAGE_KEYS:
                if not isinstance(keys := own.get(section, {}), dict):
                    raise ResoluteError(f"{where}: {place}{section}: got {keys!r}, expected a table; correct it")
        augment = table.pop("augment", {})
        table["stages"] = [{**stage, "augment": {**augment, **stage.get("augment", {})}} for stage in stages]
        try:
            for number, stage in enumerate(table["stages"]):
                if stage.get("batch_size") == "constant_pixels" and "base_batch_size" not in stage:
                    _keep_pixels(table["stages"], number)
            recipe = cls(**{**table, "name": name})
            _refuse_unused(recipe, {**table, "augment": augment}, stages)
            recipe = dataclasses.replace(recipe, data=_normalized(recipe))
            return recipe if recipe.scale_epochs == 1.0 else scaled(recipe)
        except ResoluteError as error:
            raise ResoluteError(f"{where}: {error}") from None


def _overridden(name: str, section: T, stage: RecipeStage) -> T:
    """The `section` of the run with the keys that the stage overrides. Raises `ResoluteError`."""
    keys: dict[str, Any] = getattr(stage, name)
    known = {field.name for field in dataclasses.fields(section)}  # type: ignore[arg-type]
    for key in keys:
        if key not in known:  # of a union
            kind = getattr(section, "kind", "")
            raise ResoluteError(f"stages.{name}.{key}: without effect, {name}.kind is {kind}; remove it")
    try:
        return dataclasses.replace(section, **keys)  # type: ignore[type-var]
    except ResoluteError as error:
        raise ResoluteError(f"stages.{error}") from None


def _keep_pixels(stages: list[dict[str, Any]], number: int) -> None:
    """Give stage `number` as many pixels per batch as the nearest stage with a batch size, before it or else after it.

    That stage's size is the one at its largest resolution. Values of a wrong type are left to the checks that follow.
    """

    def largest(stage: dict[str, Any]) -> int:
        res = stage.get("res")
        sizes = res if isinstance(res, list) else [res]
        return max(sizes) if sizes and all(type(size) is int for size in sizes) else 0

    stage, own = stages[number], largest(stages[number])
    for nearest in (*reversed(stages[:number]), *stages[number + 1 :]):
        size = nearest.get("base_batch_size", nearest.get("batch_size"))
        if type(size) is int and size > 0 and largest(nearest) > 0 < own:
            base = max(1, round(size * (largest(nearest) / own) ** 2))
            stage |= {"base_batch_size": base} if isinstance(stage["res"], list) else {"batch_size": base}
            return


def _normalized(recipe: Recipe) -> Data:
    """`recipe.data` with the mean and standard deviation in numbers.

    Raises `ResoluteError` if they are not those of the initial weights, or if these do not say theirs and timm's own
    weights of the model have others than ImageNet's.
    """
    data, model = recipe.data, recipe.model
    own = _normalisation_of_weights(model)
    if data.normalize == "weights":
        if own is None and not Path(str(model.weights)).exists():
            own = {**_IMAGENET}  # a file that does not exist is reported elsewhere
        check(
            own is not None,
            "data.normalize",
            f"none, and {model.weights} does not say its mean and std",
            f"them, since timm's own weights of {model.name} do not have ImageNet's: set data.normalize",
        )
        assert own is not None
        return dataclasses.replace(data, normalize=own)
    given: dict[Literal["mean", "std"], tuple[float, float, float]] = {"mean": data.mean, "std": data.std}
    if model.weights and own is not None:
        is_same = all(abs(a - b) < _SAME for key in own for a, b in zip(own[key], given[key], strict=True))
        check(is_same, "data.normalize", given, f"{own}, as {model.weights} of {model.name} expects: leave the key out")
    return dataclasses.replace(data, normalize=given)


def _normalisation_of_weights(model: Model) -> dict[Literal["mean", "std"], tuple[float, float, float]] | None:
    """The mean and standard deviation that the initial weights expect; ImageNet's without weights; None: not known."""
    if not model.weights:
        return {**_IMAGENET}
    from .weights import about_weights, expected_normalisation  # why here: they load torch

    known, usual = about_weights(model).normalisation, expected_normalisation(model.name)
    if known is None and (usual == (*_IMAGENET.values(),) or usual is None):
        return {**_IMAGENET}  # the usual ones; or the model does not exist, which is reported elsewhere
    return None if known is None else {"mean": known[0], "std": known[1]}


def scaled(recipe: Recipe) -> Recipe:
    """The recipe with `scale_epochs` applied. `Recipe.values` has the scaled numbers, `Recipe.from_values` keeps them.

    Raises `ResoluteError` if no stage changes, or two milestones become equal.
    """
    stages = tuple(
        dataclasses.replace(stage, epochs=_times(stage.epochs, recipe.scale_epochs)) for stage in recipe.stages
    )
    if [stage.epochs for stage in stages] == [stage.epochs for stage in recipe.stages]:
        raise ResoluteError(
            f"scale_epochs: without effect, {recipe.scale_epochs:g} changes no stage's epochs when rounded; remove it"
        )
    ema, total = recipe.ema, sum(stage.epochs for stage in stages)
    if ema.last_epochs:
        ema = dataclasses.replace(ema, last_epochs=min(total, _times(ema.last_epochs, recipe.scale_epochs)))
    schedule = _scaled_schedule(recipe.schedule, recipe.scale_epochs)
    return dataclasses.replace(recipe, stages=stages, schedule=schedule, ema=ema)


def _times(epochs: int, factor: float) -> int:
    return max(1, int((Decimal(repr(factor)) * epochs).quantize(Decimal(1), ROUND_HALF_UP)))


def _scaled_schedule(schedule: Schedule, factor: float) -> Schedule:
    """The schedule for `factor` times as many epochs. Raises `ResoluteError` if two milestones become equal."""
    if isinstance(schedule, StepSchedule):
        marks = tuple(_times(mark, factor) for mark in schedule.milestone_epochs)
        return dataclasses.replace(schedule, milestone_epochs=marks)
    if schedule.warmup_epochs is None:
        return schedule
    return dataclasses.replace(schedule, warmup_epochs=factor * schedule.warmup_epochs)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(inner) for name, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _changed(part: Any, *, left_out: Sequence[str] = ()) -> dict[str, Any]:
    """The values of a settings class that are not its defaults."""
    values = {key.name: (getattr(part, key.name), key.default) for key in definitions(type(part))}
    if isinstance(part, Optim):  # its defaults of None depend on the name
        usual = Optim(name=part.name)
        values |= {name: (value, getattr(usual, name)) for name, (value, default) in values.items() if default is None}
    return {name: value for name, (value, default) in values.items() if name not in left_out and value != default}


def unused_keys(recipe: Recipe) -> dict[tuple[str, str], str]:
    """{(section, key): why} of the keys of the run that have no effect with the other values of the recipe."""
    in_stages = [recipe.in_stage(number) for number in range(len(recipe.stages))]
    reasons: dict[tuple[str, str], str | Literal[False]] = {
        ("stop", "min_delta"): not recipe.stop.patience and "stop.patience is 0, off",
        ("data", "order"): all(s.order for s in recipe.stages) and "every stage has its own",
        ("data", "fraction_mode"): all(s.fraction == 1.0 for s in recipe.stages) and "every fraction is 1",
        ("schedule", "batch_rule"): _same_batches(recipe) and "every batch_size is the base",
    }
    parts = {name: [getattr(recipe, name).unused_keys()] for name in ("distill", "ema", "precision", "schedule")}
    parts |= {name: [getattr(each, name).unused_keys() for each in in_stages] for name in ("model", "optim")}
    parts["augment"] = [unused_augment_keys([each.augment for each in in_stages])]
    for section, unused in parts.items():
        for key, reason in unused[0].items():
            reasons[section, key] = all(each.get(key) for each in unused) and reason
    return {key: reason for key, reason in reasons.items() if reason}


def _refuse_unused(recipe: Recipe, table: dict[str, Any], stages: Sequence[dict[str, Any]]) -> None:
    """Raise `ResoluteError` for a key that has no effect with the other values, in `table` or the tables `stages`."""
    unused = unused_keys(recipe)
    for section, keys in STAGE_KEYS.items():
        for key in keys:
            if all(key in stage.get(section, {}) for stage in stages):
                unused[section, key] = "every stage overrides it"
    for (section, key), reason in unused.items():
        if key in table.get(section, {}):
            raise ResoluteError(f"{section}.{key}: without effect, {reason}; remove it")
    for number, stage in enumerate(stages):
        own = recipe.in_stage(number)
        own_unused: dict[str, Mapping[str, str | Literal[False]]] = {
            "augment": unused_augment_keys([own.augment]),
            "model": own.model.unused_keys(),
            "optim": own.optim.unused_keys(),
        }
        for section, reasons in own_unused.items():
            for key in stage.get(section, {}):
                if why := reasons.get(key):
                    raise ResoluteError(f"stages.{section}.{key}: without effect, {why}; remove it")


def _same_batches(recipe: Recipe) -> bool:
    """Whether `schedule.batch_rule` changes no learning rate. A batch size of "auto" counts as different."""
    batches = {shape.batch_size for stage in recipe.stages for shape in stage.shapes}
    rule, base = recipe.schedule.batch_rule, recipe.schedule.base_batch or recipe.stages[0].shapes[0].batch_size
    return rule != "none" and batches == {base} and base != 0  # 0: "auto"
