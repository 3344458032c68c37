"""The recipe's schema: everything that changes results, as frozen, validated, keyword-only dataclasses.

Paths, threads and the device are command line flags instead. `Recipe.hash` identifies the results of a run: it is
stored in checkpoints and result files, and a run refuses to resume with a different recipe.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from resolute.errors import ResoluteError, check
from resolute.pipeline.plan.stage import (
    AUTO,
    MAX_EPOCHS,
    SIZED_AT,
    Augment,
    BatchSize,
    Seed,
    without_effect,
)
from resolute.settings import definitions, setting, settings

from .sections import Distill, Ema, Freeze, Loss, Model, Optim, Precision, Schedule, Stop
from .stages import AUGMENT_STRENGTHS, RecipeStage, Regularization
from .text import RecipeText

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
    "Freeze",
    "Loss",
    "Model",
    "Optim",
    "Precision",
    "Recipe",
    "RecipeStage",
    "Regularization",
    "Schedule",
    "Stop",
    "scaled_schedule",
    "unused_keys",
]

# Source: timm IMAGENET_DEFAULT_MEAN and _STD
_IMAGENET: dict[Literal["mean", "std"], tuple[float, float, float]] = {
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225),
}
_SAME = 1e-3  # means and deviations that differ less are equal

# Sections of the keys of `regularization`, whose values it replaces.
_REPLACES = {
    "drop_rate": "model",
    "drop_path_rate": "model",
    "label_smoothing": "loss",
    "weight_decay": "optim",
    **dict.fromkeys(AUGMENT_STRENGTHS, "augment"),
}


@settings("data", other_names=dict.fromkeys(("mean", "std", "mean_std", "normalise"), "data.normalize"))
class Data:
    order: Literal["full", "block", "auto"] = setting(
        "full",
        "full: uniform shuffle, random reads; block: shuffled blocks of adjacent samples, mixed within a "
        "window, for network disks and object stores; auto: block for shards behind a URL, else full; a resumed run "
        "keeps its order",
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


@settings("", other_names={"augmentation": "augment", "augments": "augment", "optimizer": "optim"})
class Recipe:
    name: str
    stages: tuple[RecipeStage, ...]
    seed: Seed = setting(0, "of initial weights, sample order and augmentation")
    scale_epochs: float = setting(
        1.0,
        "factor on the epochs of every stage, and on `schedule.warmup_epochs`, `period_epochs`, "
        "`milestone_epochs` and `ema.last_epochs`; whole numbers are rounded to the nearest, halves up, to at least 1",
        gt=0,
        le=MAX_EPOCHS,
    )
    data: Data = Data()
    model: Model = Model()
    optim: Optim = Optim()
    loss: Loss = Loss()
    distill: Distill = Distill()
    schedule: Schedule = Schedule()
    freeze: Freeze = Freeze()
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
        marks = self.schedule.milestone_epochs
        good = all(mark < self.total_epochs for mark in marks)
        check(good, "schedule.milestone_epochs", list(marks), f"below the run's {self.total_epochs} epochs")
        last = self.ema.last_epochs
        check(last <= self.total_epochs, "ema.last_epochs", last, f"at most the run's {self.total_epochs} epochs")
        warmup = self.schedule.warmup_epochs
        good = warmup is None or warmup < self.total_epochs
        check(good, "schedule.warmup_epochs", warmup, f"below the run's {self.total_epochs} epochs")

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

        `auto_order`: the order of `data.order = "auto"`, which a resumed run takes from its checkpoint; None: `block`
        if the set is remote, else `full`.
        """
        from resolute.pipeline.plan.plan import (
            Plan,  # why here: it loads the compiler, which reading a recipe does not need
        )

        order = self.data.order
        if order == "auto":
            order = auto_order or ("block" if shards.files.remote else "full")
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

    def regularization_at(self, stage: int, res: int) -> dict[str, float]:
        """Value of every key of `regularization` for training batches of `stage` at `res` px; if it has none of that
        resolution, at its largest one.

        Keys that the stage does not set have the values of their own sections.
        """
        own = self.stages[stage]
        res = res if res in own.resolutions else own.max_res
        augment = own.augments[res]
        sections = {"model": self.model, "loss": self.loss, "optim": self.optim, "augment": augment}
        values = {name: getattr(sections[section], name) for name, section in _REPLACES.items()}
        return {**values, **own.regularization_at(res), "magnitude": augment.magnitude}

    def values(self) -> dict[str, Any]:
        """Every value except the name, with JSON types; stored in checkpoints."""
        values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        del values["name"]
        # why these names: checkpoints have them
        del values["data"]["normalize"]
        values["data"] |= {"mean": [*self.data.mean], "std": [*self.data.std], "mean_std": "keys"}
        # why: recipes without these keys keep the hash that they had before there were any
        for stage in values["stages"]:
            if (augment := stage["augment"]) and augment["op_prob"] == 1.0:
                del augment["op_prob"]
            if augment and Augment(**augment).has_sizes:
                augment["sized_at"] = SIZED_AT  # why: an earlier version used the same px at every resolution
            if regularization := _without_none(stage.pop("regularization")):
                stage["regularization"] = regularization
        for section, key in (("model", "drop_rate"), ("optim", "gradient_normalization"), ("precision", "cuda_graphs")):
            if not values[section][key]:
                del values[section][key]
        return values

    def written(self) -> dict[str, Any]:
        """The fewest keys of a TOML file from which this recipe is parsed; those with an effect that are not defaults.

        Only for recipes of one stage without ramps.
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
        parts = {"augment": stage.augment or Augment(), "regularization": stage.regularization}
        table |= {name: keys for name, part in parts.items() if (keys := _changed(part))}
        return {**table, "stages": [_changed(stage, left_out=(*parts,))]}

    @classmethod
    def from_values(cls, values: dict[str, Any], *, name: str) -> Recipe:
        """The inverse of `values()`; keys added since those values were written get their defaults.

        Raises `ResoluteError` for keys that this version does not know and for values out of range.
        """
        values = _without_none(values)
        for stage in values.get("stages", []):
            stage.get("augment", {}).pop("sized_at", None)
        if "mean" in (data := values.get("data", {})):
            others = {key: value for key, value in data.items() if key not in ("mean", "std", "mean_std")}
            data = {**others, "normalize": {key: data[key] for key in ("mean", "std")}}
        return cls(**{**values, "data": data, "name": name})

    @classmethod
    def load(cls, path: str | Path) -> Recipe:
        """Read a TOML file. Raises `ResoluteError` for an unreadable file and missing, unknown or invalid keys."""
        return cls.from_text(RecipeText.read(path))

    @classmethod
    def from_text(cls, text: RecipeText) -> Recipe:
        """The recipe of a TOML text. Raises `ResoluteError` for missing, unknown or invalid keys."""
        return cls.parse(text.table(), name=text.name, where=text.where)

    @classmethod
    def parse(cls, table: dict[str, Any], *, name: str, where: str = "recipe") -> Recipe:
        """Build a recipe from the parsed TOML `table`. Raises `ResoluteError`, prefixed with `where`."""
        table = dict(table)
        stages = table.get("stages", [])
        if not (isinstance(stages, list) and all(isinstance(stage, dict) for stage in stages)):
            raise ResoluteError(f"{where}: stages: got a single value, expected [[stages]] tables; use double brackets")
        tables: dict[str, list[dict[str, Any]]] = {}  # of a section: that of the run, then those of the stages
        for section, example in (("augment", "scale = [0.3, 1.0]"), ("regularization", "drop_rate = 0.2")):
            tables[section] = [table.pop(section, {}), *(stage.get(section, {}) for stage in stages)]
            for number, value in enumerate(tables[section]):
                if not isinstance(value, dict):
                    raise ResoluteError(
                        f"{where}: {'stages.' * (number > 0)}{section}: got {value!r}, expected a "
                        f"table such as {{ {example} }}; correct it"
                    )
        base, *own = tables["augment"]
        table["stages"] = [
            {**stage, "augment": {**base, **value}, "regularization": {}}
            for stage, value in zip(stages, own, strict=True)
        ]
        try:
            for number, stage in enumerate(table["stages"]):
                if stage.get("batch_size") == "constant_pixels" and "base_batch_size" not in stage:
                    _keep_pixels(table["stages"], number)
            recipe = cls(**{**table, "name": name})
            recipe = _regularized(recipe, *tables["regularization"])
            _refuse_without_effect(recipe, {**table, "augment": base, "regularization": tables["regularization"][0]})
            for stage, written in zip(recipe.stages, stages, strict=True):
                _refuse_in_stage(recipe, stage, written)
            recipe = dataclasses.replace(recipe, data=_normalized(recipe))
            return recipe if recipe.scale_epochs == 1.0 else _scaled(recipe)
        except ResoluteError as error:
            raise ResoluteError(f"{where}: {error}") from None


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


def _regularized(recipe: Recipe, run: dict[str, Any], *stages: dict[str, Any]) -> Recipe:
    """The recipe with [regularization] `run` and those of its stages, whose pairs become those of the stages.

    Raises `ResoluteError` for an invalid value, and for a pair if the run has a single resolution.
    """
    base = Regularization(**run).strengths
    sizes = [res for stage in recipe.stages for res in stage.resolutions]
    smallest, largest = min(sizes), max(sizes)
    regularized = []
    for stage, own in zip(recipe.stages, stages, strict=True):
        values = Regularization(**{**base, **Regularization(**own).strengths})
        for name, value in values.strengths.items():
            if isinstance(value, tuple):
                expected = f"a number, since all stages have {largest} px"
                check(smallest < largest, f"regularization.{name}", list(value), expected)
        low, high = (
            values.at(res, smallest=smallest, largest=largest) for res in (min(stage.resolutions), stage.max_res)
        )
        regularized.append(
            dataclasses.replace(
                stage,
                regularization=Regularization(
                    **{name: low[name] if low[name] == high[name] else (low[name], high[name]) for name in low}
                ),
            )
        )
    return dataclasses.replace(recipe, stages=tuple(regularized))


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


def _scaled(recipe: Recipe) -> Recipe:
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
    schedule = scaled_schedule(recipe.schedule, recipe.scale_epochs)
    return dataclasses.replace(recipe, stages=stages, schedule=schedule, ema=ema)


def _times(epochs: int, factor: float) -> int:
    return max(1, int((Decimal(repr(factor)) * epochs).quantize(Decimal(1), ROUND_HALF_UP)))


def scaled_schedule(schedule: Schedule, factor: float) -> Schedule:
    """The schedule for `factor` times as many epochs. Raises `ResoluteError` if two milestones become equal."""
    restarts = schedule.kind == "cosine_restarts"
    return dataclasses.replace(
        schedule,
        warmup_epochs=None if schedule.warmup_epochs is None else factor * schedule.warmup_epochs,
        period_epochs=_times(schedule.period_epochs, factor) if restarts else schedule.period_epochs,
        milestone_epochs=tuple(_times(mark, factor) for mark in schedule.milestone_epochs),
    )


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
    """{(section, key): why} of the keys that have no effect with the other values of the recipe."""
    augments = [augment for stage in recipe.stages for augment in stage.augments.values()]
    reasons: dict[tuple[str, str], str | Literal[False]] = {
        ("stop", "min_delta"): not recipe.stop.patience and "stop.patience is 0, off",
        ("data", "order"): all(s.order for s in recipe.stages) and "every stage has its own",
        ("data", "fraction_mode"): all(s.fraction == 1.0 for s in recipe.stages) and "every fraction is 1",
        ("freeze", "mode"): recipe.freeze.mode != "none" and not _freezes(recipe) and "no stage freezes anything",
        ("schedule", "batch_rule"): _same_batches(recipe) and "every batch_size is the base",
    } | {("augment", key): reason for key, reason in without_effect(augments).items()}
    for section in ("model", "optim", "loss", "distill", "schedule", "ema", "precision"):
        reasons |= {(section, key): why for key, why in getattr(recipe, section).without_effect().items()}
    reasons |= {("regularization", key): reasons.get((section, key), False) for key, section in _REPLACES.items()}
    for name, section in _REPLACES.items():
        if all(name in stage.regularization.strengths for stage in recipe.stages):
            reasons[section, name] = "[regularization] replaces it in every stage"
    return {key: reason for key, reason in reasons.items() if reason}


def _refuse_without_effect(recipe: Recipe, table: dict[str, Any]) -> None:
    """Raise `ResoluteError` for a key in `table` that has no effect with the other values."""
    for (section, name), reason in unused_keys(recipe).items():
        if name in table.get(section, {}):
            raise ResoluteError(f"{section}.{name}: without effect, {reason}; remove it")
    for mode in ("freeze", "unfreeze"):
        if recipe.freeze.mode != mode and any(f"{mode}_to" in stage for stage in table["stages"]):
            raise ResoluteError(f"stages.{mode}_to: without effect, freeze.mode is {recipe.freeze.mode}; remove it")


def _refuse_in_stage(recipe: Recipe, stage: RecipeStage, written: dict[str, Any]) -> None:
    """Raise `ResoluteError` for a key of the stage's table `written` that has no effect in it."""
    reasons: dict[str, str | Literal[False]] = {**without_effect([*stage.augments.values()])}
    replaced = dict.fromkeys(stage.regularization.strengths, "[regularization] replaces it")
    smoothing = recipe.loss.without_effect()["label_smoothing"]
    for section, why in {
        "augment": {**reasons, **replaced},
        "regularization": {**reasons, "label_smoothing": smoothing},
    }.items():
        for name in written.get(section, {}):
            if reason := why.get(name):
                raise ResoluteError(f"stages.{section}.{name}: without effect, {reason}; remove it")


def _freezes(recipe: Recipe) -> bool:
    idle = (None, "none" if recipe.freeze.mode == "freeze" else "all")
    return any(getattr(stage, f"{recipe.freeze.mode}_to") not in idle for stage in recipe.stages)


def _same_batches(recipe: Recipe) -> bool:
    """Whether `schedule.batch_rule` changes no learning rate. A batch size of "auto" counts as different."""
    batches = {shape.batch_size for stage in recipe.stages for shape in stage.shapes}
    rule, base = recipe.schedule.batch_rule, recipe.schedule.base_batch or recipe.stages[0].shapes[0].batch_size
    return rule != "none" and batches == {base} and base != 0  # 0: "auto"
