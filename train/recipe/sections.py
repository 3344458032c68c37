"""The recipe sections that only the trainer reads: model, optimizer, loss, schedule, EMA, precision and so on.

`unused_keys` of a section names the keys that nothing reads with its other values, and why. `[schedule]` and `[loss]`
are one class per `kind`, with the keys that this kind reads.
"""

from __future__ import annotations

import difflib
import inspect
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from resolute.errors import check
from resolute.settings import described, setting, settings

__all__ = [
    "AbsoluteErrorLoss",
    "AsymmetricLoss",
    "AutoLoss",
    "BinaryLoss",
    "ClassLoss",
    "CosineSchedule",
    "CrossEntropyLoss",
    "Distill",
    "Ema",
    "FlatCosineSchedule",
    "HuberLoss",
    "LinearSchedule",
    "Loss",
    "Model",
    "OneCycleSchedule",
    "Optim",
    "Precision",
    "Schedule",
    "SmoothedLoss",
    "SquaredErrorLoss",
    "StepSchedule",
    "Stop",
    "ValueLoss",
    "smoothing_of",
]

# (whether it reads momentum, betas; the norm to which it clips gradients by default, 0 for none) of the usual
# optimizers, known without importing timm
_USES = {"sgd": (True, False, 0.0), "adamw": (False, True, 0.0), "lamb": (False, True, 1.0)}


@settings(
    "model",
    other_names={
        "options": "model.kwargs",
        "antialias": "model.blurpool",
        "checkpoint_blocks": "model.grad_checkpointing",
        "arch": "model.name",
        "model": "model.name",
        "pretrained": "model.weights",
        "dropout": "model.drop_rate",
        "sync_bn": "model.norm",
    },
)
class Model:
    name: str = setting("resnet50", "any timm model name")
    kwargs: dict[str, Any] = setting({}, "keyword arguments for timm.create_model")
    weights: str = setting(
        "", """initial weights: "" (random), "pretrained" (timm's), or a .safetensors or .pth file"""
    )
    weights_kind: Literal["best", "raw", "ema"] = setting(
        "best",
        "for files with raw and averaged weights; best: those with the better validation (checkpoints of this "
        "project), else the averaged ones",
    )
    drop_rate: float = setting(0.0, "dropout, mostly before the head, as timm's model defines it; 0 = off", ge=0, lt=1)
    drop_path_rate: float = setting(
        0.0, "stochastic depth: drop rate of the last block, lower before it; 0 = off", ge=0, lt=1
    )
    blurpool: bool = setting(
        False, "blur before strided convolutions and pooling (BlurPool), if timm's model supports it"
    )
    norm: Literal["batch", "sync", "ghost", "group"] = setting(
        "batch", "type that replaces batch norms; sync: over all ranks"
    )
    ghost_batch: int = setting(32, "ghost: minimum number of samples per normalised group", ge=2)
    norm_groups: int = setting(32, "group: number of channel groups; lowered to a divisor of the channels", ge=1)
    bn_momentum: float | None = setting(None, "weight of a batch in running statistics; none: the model's", gt=0, le=1)
    grad_checkpointing: bool = setting(False, "gradient checkpointing: recompute blocks in backward to save memory")

    def unused_keys(self) -> dict[str, str | Literal[False]]:
        no_file = self.weights in ("", "pretrained") and f"model.weights is {self.weights or 'empty'}, not a file"
        return {
            "weights_kind": no_file,
            "ghost_batch": self.norm != "ghost" and f"model.norm is {self.norm}",
            "norm_groups": self.norm != "group" and f"model.norm is {self.norm}",
            "bn_momentum": self.norm == "group" and "group norms have no running statistics",
        }


@settings(
    "optim",
    other_names={
        "smoothing": "loss.label_smoothing",
        "centralise": "optim.gradient_centralization",
        "accumulate": "optim.grad_accum_steps",
        "opt": "optim.name",
        "learning_rate": "optim.lr",
        "wd": "optim.weight_decay",
        **dict.fromkeys(("clip_grad", "grad_clip"), "optim.clip_norm"),
    },
)
class Optim:
    name: str = setting("sgd", "any optimizer of timm.optim with momentum or two betas; sgd uses Nesterov momentum")
    lr: float = setting(0.5, "peak learning rate of the schedule, before `lr_scale`", gt=0)
    lr_scale: float = setting(1.0, "factor on the learning rate of the schedule", gt=0)
    weight_decay: float = setting(5e-5, "not applied to norms, biases and what the model excludes", ge=0)
    layer_decay: float | None = setting(
        None, "factor on the learning rate per layer below the head; none: off", gt=0, le=1
    )
    head_lr_scale: float = setting(1.0, "factor on the learning rate of the head (the classifier)", gt=0)
    momentum: float = setting(0.9, "sgd and others with momentum; the schedule may lower it", ge=0, lt=1)
    betas: tuple[float, float] | None = setting(
        None,
        "adamw, lamb and others with betas; the schedule may lower the first, except muon's, which are those of "
        "the AdamW for vectors; none: 0.9, 0.999, muon's 0.9, 0.95",
    )
    fused: bool = setting(
        False, "sgd and adamw: torch's fused kernel also on a CPU, where it rounds differently; a GPU always uses it"
    )
    lookahead: int = setting(0, "Lookahead: optimizer steps between updates of the slow weights; 0 = off", ge=0)
    lookahead_alpha: float = setting(0.5, "Lookahead: step size of the slow weights", gt=0, le=1)
    clip_norm: float | None = setting(
        None,
        "maximum L2 norm of the gradient of all weights together; 0 = off; none: the optimizer's own (lamb and its "
        "variants: 1; others, or with another way to clip: off)",
        ge=0,
    )
    clip_value: float = setting(0.0, "maximum absolute value of a gradient element; 0 = off", ge=0)
    clip_agc: float = setting(
        0.0, "adaptive clipping: maximum gradient norm / weight norm per unit, except the head; 0 = off", ge=0
    )
    gradient_centralization: bool = setting(False, "subtract the mean of each unit's gradient")
    gradient_normalization: bool = setting(False, "divide the gradient of each layer by its L2 norm")
    grad_accum_steps: int = setting(1, "micro-batches per optimizer step; `batch_size` is the sum over them", ge=1)

    def __post_init__(self) -> None:
        momentum, betas, clip_norm = self._uses
        if self.betas is None:
            object.__setattr__(self, "betas", (0.9, 0.95) if momentum and betas else (0.9, 0.999))
        if self.clip_norm is None:
            object.__setattr__(self, "clip_norm", 0.0 if self.clip_value or self.clip_agc else clip_norm)
        clips = {name: getattr(self, name) for name in ("clip_norm", "clip_value", "clip_agc")}
        check(sum(clip > 0 for clip in clips.values()) <= 1, "optim", clips, "one way to clip, the others 0")

    @property
    def uses_betas(self) -> bool:
        """Whether the optimizer reads `betas` instead of `momentum`."""
        momentum, betas, _ = self._uses
        return betas and not momentum

    @property
    def _uses(self) -> tuple[bool, bool, float]:
        """As `_USES`. Raises `ResoluteError` for an unknown name."""
        if self.name in _USES:
            return _USES[self.name]
        import timm.optim  # why here: slow, and rarely needed

        names: list[str] = timm.optim.list_optimizers()  # type: ignore[assignment]  # without descriptions
        near = ", ".join(difflib.get_close_matches(self.name, names, n=3)) or "sgd, adamw, lamb"
        check(self.name in names, "optim.name", repr(self.name), f"an optimizer of timm.optim (near: {near})")
        info = timm.optim.get_optimizer_info(self.name)
        arguments = inspect.signature(timm.optim.get_optimizer_class(self.name, bind_defaults=False)).parameters
        clip_norm = arguments["max_grad_norm"].default if "max_grad_norm" in arguments else 0.0
        return info.has_momentum, info.has_betas, float(clip_norm or 0.0)

    def unused_keys(self) -> dict[str, str | Literal[False]]:
        return {
            "momentum": self.uses_betas and f"{self.name} uses optim.betas",
            "betas": not self._uses[1] and f"{self.name} uses optim.momentum",
            "fused": self.name not in ("sgd", "adamw") and f"{self.name} has no fused kernel",
            "lookahead_alpha": not self.lookahead and "optim.lookahead is 0, off",
        }


_OTHER_SCHEDULE_NAMES = {
    "warmup_frac": "schedule.pct_start",
    **dict.fromkeys(("div_factor", "start_div", "warmup_lr"), "schedule.first_lr"),
    **dict.fromkeys(("final_div_factor", "final_div", "min_lr", "eta_min"), "schedule.last_lr"),
    "momentum_low": "schedule.base_momentum",
    **dict.fromkeys(("sched", "scheduler", "lr_scheduler"), "schedule.kind"),
}


@settings("schedule", other_names=_OTHER_SCHEDULE_NAMES)
class _Schedule:
    """Learning rate and momentum per optimizer step: keys of every kind.

    Sources: OneCycle: Smith and Topin, arXiv 1708.07120; cosine: Loshchilov and Hutter, arXiv 1608.03983; warm-up and
    the linear rule: Goyal et al., arXiv 1706.02677; the square-root rule: Krizhevsky, arXiv 1404.5997; constant, then
    cosine: fastai's `fit_flat_cos`.
    """

    batch_rule: Literal["none", "linear", "sqrt"] = setting(
        "none", "multiply the LR by batch_size / base_batch or its root"
    )
    base_batch: int | None = setting(None, "batch size that optim.lr is meant for; none: the first stage's", ge=1)

    def unused_keys(self) -> dict[str, str | Literal[False]]:
        return {"base_batch": self.batch_rule == "none" and "schedule.batch_rule is none"}


@settings("schedule", other_names=_OTHER_SCHEDULE_NAMES)
class _WarmSchedule(_Schedule):
    """Keys of the kinds that may begin with a rising learning rate, the warm-up."""

    progress: Literal["steps", "samples", "epochs"] = setting(
        "steps",
        "the curve's x axis. steps favours stages with small batches; samples weights each epoch by the samples it "
        "takes; epochs weights all epochs equally, whatever their fraction",
    )
    pct_start: float | None = setting(
        None, "fraction of the curve with a rising LR; none: 0.25 of onecycle, else 0", ge=0, lt=1
    )
    warmup_epochs: float | None = setting(None, "instead of `pct_start`: epochs with a rising LR", ge=0)
    first_lr: float | None = setting(None, "LR from which it rises; none: a tenth of optim.lr", ge=0)
    last_lr: float | None = setting(None, "LR of the last step; none: a thousandth of the first step's", ge=0)

    def __post_init__(self) -> None:
        both = self.pct_start is not None and self.warmup_epochs is not None
        check(not both, "schedule", "pct_start and warmup_epochs", "one of them")

    @property
    def warms_up(self) -> bool:
        return bool(self.pct_start or self.warmup_epochs)

    def unused_keys(self) -> dict[str, str | Literal[False]]:
        return super().unused_keys() | {
            "first_lr": not self.warms_up and "there is no warm-up without pct_start or warmup_epochs"
        }


@settings("schedule", other_names=_OTHER_SCHEDULE_NAMES)
class _RestartingSchedule(_WarmSchedule):
    restart_each_stage: bool = setting(False, "a curve for each stage instead of one for the run")

    def unused_keys(self) -> dict[str, str | Literal[False]]:
        each = self.restart_each_stage and "schedule.restart_each_stage is true"
        return super().unused_keys() | {"progress": each, "warmup_epochs": each}


@settings("schedule", other_names=_OTHER_SCHEDULE_NAMES)
class OneCycleSchedule(_RestartingSchedule):
    kind: Literal["onecycle"] = setting("onecycle", "the LR rises and falls along half a cosine each")
    base_momentum: float = setting(
        0.85, "momentum at the LR's peak; at both ends optim.momentum or betas[0]", ge=0, lt=1
    )

    @property
    def warms_up(self) -> bool:
        return True


@settings("schedule", other_names=_OTHER_SCHEDULE_NAMES)
class CosineSchedule(_RestartingSchedule):
    kind: Annotated[Literal["cosine"], described("a linear warm-up, if there is one, then half a cosine")]


@settings("schedule", other_names=_OTHER_SCHEDULE_NAMES)
class LinearSchedule(_WarmSchedule):
    kind: Annotated[Literal["linear"], described("a linear warm-up, if there is one, then a straight line")]


@settings("schedule", other_names=_OTHER_SCHEDULE_NAMES)
class FlatCosineSchedule(_WarmSchedule):
    kind: Annotated[
        Literal["flat_cosine"], described("a linear warm-up, if there is one, a constant part, then half a cosine")
    ]
    flat_until: float = setting(
        0.75, "fraction of the curve up to which the LR stays at its peak, after any warm-up", gt=0, lt=1
    )


@settings("schedule", other_names=_OTHER_SCHEDULE_NAMES)
class StepSchedule(_Schedule):
    kind: Annotated[Literal["step"], described("the LR drops at milestones")]
    milestone_epochs: Annotated[
        tuple[Annotated[int, Field(ge=1)], ...],
        described("rising epochs (0-based) at which the LR drops", min_length=1),
    ]
    gamma: float = setting(0.1, "factor on the LR at each milestone", gt=0, lt=1)

    def __post_init__(self) -> None:
        marks = self.milestone_epochs
        check(list(marks) == sorted({*marks}), "schedule.milestone_epochs", list(marks), "rising epochs")


Schedule: TypeAlias = Annotated[
    OneCycleSchedule | CosineSchedule | LinearSchedule | FlatCosineSchedule | StepSchedule,
    Field(discriminator="kind"),
]


@settings("ema")
class Ema:
    decay: float = setting(0.0, "weight of the previous average per step; 0 = off", ge=0, lt=1)
    half_life_epochs: float = setting(
        0.0, "instead of `decay`: epochs after which a contribution has half its weight; 0 = off", ge=0
    )
    half_life_steps: float = setting(0.0, "the same in optimizer steps; 0 = off", ge=0)
    last_epochs: int = setting(
        0,
        "instead of `decay`: stochastic weight averaging, the plain mean of the weights and norm statistics after "
        "each step of the run's last epochs, this many of them; 0 = off",
        ge=0,
    )
    warmup: bool = setting(True, "cap the decay at 1 - (1 + step)^(-2/3) early in the run, as timm's ModelEmaV3")

    def __post_init__(self) -> None:
        chosen = [
            name for name in ("decay", "half_life_epochs", "half_life_steps", "last_epochs") if getattr(self, name)
        ]
        expected = "one of decay, half_life_epochs, half_life_steps and last_epochs"
        check(len(chosen) <= 1, "ema", " and ".join(chosen), expected)

    @property
    def on(self) -> bool:
        return bool(self.decay or self.half_life_epochs or self.half_life_steps or self.last_epochs)

    def unused_keys(self) -> dict[str, str | Literal[False]]:
        return {
            "warmup": (not self.on and "ema.decay is 0, off")
            or (self.last_epochs > 0 and "ema.last_epochs is a plain mean")
        }


@settings("precision")
class Precision:
    amp: Literal["auto", "bf16", "fp16", "off"] = setting(
        "auto", "autocast dtype; auto: bf16, or where the device would emulate it fp16 (GPU) or off (CPU)"
    )
    channels_last: bool = setting(True, "memory format of images and weights")
    tf32: Literal["convolutions", "all", "off"] = setting(
        "convolutions", "on a GPU with amp off: operations computed in TF32 (10 instead of 23 mantissa bits)"
    )
    compile: bool = setting(
        False, "torch.compile: one graph per shape, and per drop rate, all compiled during the warm-up"
    )

    cuda_graphs: bool = setting(
        False,
        "on one GPU: forward and backward pass as one CUDA graph per stage, captured during the warm-up, which "
        "saves the launches of a small network. Each stage needs one res and batch_size",
    )

    def __post_init__(self) -> None:
        check(not (self.compile and self.cuda_graphs), "precision", "compile and cuda_graphs", "one of them")

    def unused_keys(self) -> dict[str, str | Literal[False]]:
        return {"tf32": self.amp != "off" and f"precision.amp is {self.amp}, which is less precise"}


@settings("loss")
class ClassLoss:
    """Keys of the losses for classes and labels."""

    class_weights: Literal["none", "balanced"] | dict[str, Annotated[float, Field(gt=0)]] = setting(
        "none",
        "factor on the loss of each class (bce: on the terms of present classes); balanced: the inverse of its "
        'frequency, 1 on average; a table { "class name" = weight } has 1 for all others. Validation is not weighted',
    )

    def __post_init__(self) -> None:
        weights = self.class_weights
        if isinstance(weights, dict):
            check(bool(weights), "loss.class_weights", "an empty table", 'weights of classes, "balanced" or "none"')


@settings("loss")
class SmoothedLoss(ClassLoss):
    label_smoothing: float = setting(0.0, "label smoothing", ge=0, lt=1)


def smoothing_of(loss: ClassLoss | ValueLoss) -> float:
    """The label smoothing of a loss; 0 for kinds without it."""
    return loss.label_smoothing if isinstance(loss, SmoothedLoss) else 0.0


@settings("loss")
class ValueLoss:
    """Keys of the losses for values."""

    standardize: bool = setting(
        True,
        "of values: predict (value - mean) / std of the training split; all reported and predicted values are in "
        "the table's units",
    )


@settings("loss")
class AutoLoss(SmoothedLoss, ValueLoss):
    kind: Literal["auto"] = setting("auto", "classes: ce; several labels: bce; values: mse")


@settings("loss")
class CrossEntropyLoss(SmoothedLoss):
    kind: Annotated[Literal["ce"], described("classes: cross-entropy")]


@settings("loss")
class BinaryLoss(SmoothedLoss):
    kind: Annotated[Literal["bce"], described("classes or several labels: binary cross-entropy per class")]
    threshold: float = setting(0.0, "targets above it become 1, all others 0; 0 = off", ge=0, lt=1)
    sum_classes: bool = setting(False, "sum over the classes instead of their mean")


@settings("loss")
class AsymmetricLoss(ClassLoss):
    kind: Annotated[Literal["asl"], described("classes or several labels: asymmetric loss per class")]
    gamma_neg: float = setting(4.0, "focusing power of absent classes", ge=0)
    gamma_pos: float = setting(1.0, "focusing power of present classes", ge=0)
    clip: float = setting(0.05, "probability below which an absent class has no loss", ge=0, lt=1)
    sum_classes: bool = setting(False, "sum over the classes instead of their mean")


@settings("loss")
class SquaredErrorLoss(ValueLoss):
    kind: Annotated[Literal["mse"], described("values: squared error")]


@settings("loss")
class AbsoluteErrorLoss(ValueLoss):
    kind: Annotated[Literal["l1"], described("values: absolute error")]


@settings("loss")
class HuberLoss(ValueLoss):
    kind: Annotated[Literal["huber"], described("values: Huber's loss, squared near 0, absolute beyond")]
    delta: float = setting(1.0, "error at which the loss turns from quadratic to linear", gt=0)


Loss: TypeAlias = Annotated[
    AutoLoss | CrossEntropyLoss | BinaryLoss | AsymmetricLoss | SquaredErrorLoss | AbsoluteErrorLoss | HuberLoss,
    Field(discriminator="kind"),
]


@settings("distill", other_names={"options": "distill.kwargs"})
class Distill:
    """Knowledge distillation from a teacher that sees the same images. Source: Hinton et al., arXiv 1503.02531."""

    teacher: str = setting("", 'any timm model with the same classes; "" = off')
    weights: str = setting("pretrained", "the teacher's weights, as `model.weights`")
    kwargs: dict[str, Any] = setting({}, "keyword arguments for timm.create_model")
    alpha: float = setting(0.5, "weight of the distillation loss; the label loss has 1 - alpha", gt=0, le=1)
    temperature: float = setting(4.0, "divisor of both networks' logits", gt=0)

    def __post_init__(self) -> None:
        check(not self.teacher or bool(self.weights), "distill.weights", "none", 'a file or "pretrained"')

    def unused_keys(self) -> dict[str, str | Literal[False]]:
        keys = ("weights", "kwargs", "alpha", "temperature")
        return dict.fromkeys(keys, not self.teacher and "distill.teacher is empty, off")


@settings("stop")
class Stop:
    """Early stopping on the better top-1 (classes), mAP (several labels) or R² (values) of raw and averaged weights."""

    patience: int = setting(
        0,
        "validations without improvement after which the stage ends; the next one begins, and after the last stage "
        "the run is finished; 0 = off",
        ge=0,
    )
    min_delta: float = setting(
        0.0, "increase of top-1, mAP or R² that counts as improvement (0.001 is 0.1 points)", ge=0, lt=1
    )
