"""The recipe sections that only the trainer reads: model, optimizer, loss, schedule, EMA, precision and so on.

`without_effect` of a section names the keys that nothing reads with its other values, and why.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeline.errors import check

__all__ = ["Distill", "Ema", "Freeze", "Loss", "Model", "Optim", "Precision", "Schedule", "Stop"]

_USES_BETAS = {"sgd": False, "adamw": True, "lamb": True}  # of the usual optimizers, known without importing timm


@dataclass(frozen=True, kw_only=True)
class Model:
    name: str = "resnet50"  # any timm model name
    kwargs: dict[str, Any] = field(default_factory=dict)  # keyword arguments for timm.create_model
    weights: str = ""  # initial weights: "" (random), "pretrained" (timm's), or a .safetensors or .pth file
    # for files with raw and averaged weights; best: those with the higher top-1 (checkpoints of this project), else
    # the averaged ones
    weights_kind: Literal["best", "raw", "ema"] = "best"
    drop_path_rate: float = 0.0  # stochastic depth: drop rate of the last block, lower before it; 0 to below 1
    blurpool: bool = False  # blur before strided convolutions and pooling (BlurPool), if timm's model supports it
    norm: Literal["batch", "sync", "ghost", "group"] = "batch"  # type that replaces batch norms; sync: over all ranks
    ghost_batch: int = 32  # ghost: minimum number of samples per normalised group, at least 2
    norm_groups: int = 32  # group: number of channel groups; lowered to a divisor of the channels
    bn_momentum: float | None = None  # weight of a batch in running statistics, above 0 to 1; none: the model's
    grad_checkpointing: bool = False  # gradient checkpointing: recompute blocks in backward to save memory

    def __post_init__(self) -> None:
        check(0 <= self.drop_path_rate < 1, "model.drop_path_rate", self.drop_path_rate, "0 (off) to below 1")
        check(self.ghost_batch >= 2, "model.ghost_batch", self.ghost_batch, "an integer of at least 2")
        check(self.norm_groups >= 1, "model.norm_groups", self.norm_groups, "an integer of at least 1")
        momentum = self.bn_momentum
        check(momentum is None or 0 < momentum <= 1, "model.bn_momentum", momentum, "above 0, at most 1")

    def without_effect(self) -> dict[str, str | Literal[False]]:
        no_file = self.weights in ("", "pretrained") and f"model.weights is {self.weights or 'empty'}, not a file"
        return {
            "weights_kind": no_file,
            "ghost_batch": self.norm != "ghost" and f"model.norm is {self.norm}",
            "norm_groups": self.norm != "group" and f"model.norm is {self.norm}",
            "bn_momentum": self.norm == "group" and "group norms have no running statistics",
        }


@dataclass(frozen=True, kw_only=True)
class Optim:
    name: str = "sgd"  # any optimizer of timm.optim with momentum or two betas; sgd uses Nesterov momentum
    lr: float = 0.5  # peak learning rate of the schedule, before `lr_scale`; above 0
    weight_decay: float = 5e-5  # not applied to norms, biases and what the model excludes; 0 or more
    layer_decay: float | None = None  # factor on the learning rate per layer below the head, above 0 to 1; none: off
    momentum: float = 0.9  # sgd and others with momentum; the schedule may lower it; 0 to below 1
    betas: tuple[float, float] = (0.9, 0.999)  # adamw, lamb and others with betas; the schedule may lower the first
    fused: bool = False  # sgd and adamw: torch's fused kernel; results differ only by rounding
    lookahead: int = 0  # Lookahead: optimizer steps between updates of the slow weights; 0 = off
    lookahead_alpha: float = 0.5  # Lookahead: step size of the slow weights, above 0 to 1
    clip_norm: float = 0.0  # maximum L2 norm of the gradient of all weights together; 0 = off
    clip_value: float = 0.0  # maximum absolute value of a gradient element; 0 = off
    clip_agc: float = 0.0  # adaptive clipping: maximum gradient norm / weight norm per unit, except the head; 0 = off
    gradient_centralization: bool = False  # subtract the mean of each unit's gradient
    grad_accum_steps: int = 1  # micro-batches per optimizer step; `batch_size` is the sum over them

    def __post_init__(self) -> None:
        check(self.lr > 0, "optim.lr", self.lr, "above 0")
        check(self.weight_decay >= 0, "optim.weight_decay", self.weight_decay, "0 or more")
        decay = self.layer_decay
        check(decay is None or 0 < decay <= 1, "optim.layer_decay", decay, "above 0, at most 1")
        self.uses_betas  # noqa: B018  # raises for an unknown name
        clips = {name: getattr(self, name) for name in ("clip_norm", "clip_value", "clip_agc")}
        for name, clip in clips.items():
            check(clip >= 0, f"optim.{name}", clip, "0 (off) or more")
        check(sum(clip > 0 for clip in clips.values()) <= 1, "optim", clips, "one way to clip, the others 0")
        check(self.lookahead >= 0, "optim.lookahead", self.lookahead, "0 (off) or an integer of at least 1")
        check(0 < self.lookahead_alpha <= 1, "optim.lookahead_alpha", self.lookahead_alpha, "above 0, at most 1")
        check(self.grad_accum_steps >= 1, "optim.grad_accum_steps", self.grad_accum_steps, "an integer of at least 1")
        check(0 <= self.momentum < 1, "optim.momentum", self.momentum, "0 to below 1")

    @property
    def uses_betas(self) -> bool:
        """Whether the optimizer reads `betas` instead of `momentum`. Raises `ResoluteError` for an unknown name."""
        if self.name in _USES_BETAS:
            return _USES_BETAS[self.name]
        import timm.optim  # why here: slow, and rarely needed

        names: list[str] = timm.optim.list_optimizers()  # type: ignore[assignment]  # without descriptions
        near = ", ".join(difflib.get_close_matches(self.name, names, n=3)) or "sgd, adamw, lamb"
        check(self.name in names, "optim.name", repr(self.name), f"an optimizer of timm.optim (near: {near})")
        info = timm.optim.get_optimizer_info(self.name)
        return bool(info.has_betas and not info.has_momentum)

    def without_effect(self) -> dict[str, str | Literal[False]]:
        return {
            "momentum": self.uses_betas and f"{self.name} uses optim.betas",
            "betas": not self.uses_betas and f"{self.name} uses optim.momentum",
            "fused": self.name not in ("sgd", "adamw") and f"{self.name} has no fused kernel",
            "lookahead_alpha": not self.lookahead and "optim.lookahead is 0, off",
        }


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning rate and momentum per optimizer step. Kinds ending in "_stage" restart in each stage.

    Sources: OneCycle: Smith and Topin, arXiv 1708.07120; cosine, restarts: Loshchilov and Hutter, arXiv 1608.03983;
    warm-up and the linear rule: Goyal et al., arXiv 1706.02677; the square-root rule: Krizhevsky, arXiv 1404.5997.
    """

    # OneCycle over the run or per stage; cosine decay per stage, with warm restarts, or after a warm-up; step decay
    kind: Literal["onecycle", "onecycle_stage", "cosine_stage", "cosine_restarts", "warmup_cosine", "step"] = "onecycle"
    # onecycle, warmup_cosine: the curve's x axis. steps favours stages with small batches; samples weights each epoch
    # by the samples it takes; epochs weights all epochs equally, whatever their fraction
    progress: Literal["steps", "samples", "epochs"] = "steps"
    pct_start: float = 0.25  # onecycle kinds, warmup_cosine: fraction of the curve in which the LR rises
    div_factor: float = 10.0  # onecycle kinds, warmup_cosine: first LR = peak / div_factor; 1 or more
    final_div_factor: float = 1e3  # all kinds except step: last LR = first LR / final_div_factor; 1 or more
    base_momentum: float = 0.85  # onecycle kinds: momentum at the LR's peak; at both ends optim.momentum or betas[0]
    period_epochs: int = 10  # cosine_restarts: length of the first period, in epochs
    period_mult: int = 1  # cosine_restarts: ratio of consecutive period lengths
    milestone_epochs: tuple[int, ...] = ()  # step: epochs (0-based) at which the LR drops
    gamma: float = 0.1  # step: factor on the LR at each milestone, above 0, below 1
    batch_rule: Literal["none", "linear", "sqrt"] = "none"  # multiply the LR by batch_size / base_batch or its root
    base_batch: int | None = None  # batch size that optim.lr is meant for; none: the first stage's

    def __post_init__(self) -> None:
        marks = self.milestone_epochs
        good = list(marks) == sorted({*marks}) and all(mark >= 1 for mark in marks)
        check(good, "schedule.milestone_epochs", list(marks), "rising epochs of at least 1")
        check(self.kind != "step" or bool(marks), "schedule.milestone_epochs", "none", "at least one for kind step")
        check(0 < self.gamma < 1, "schedule.gamma", self.gamma, "above 0, below 1")
        check(self.period_epochs >= 1, "schedule.period_epochs", self.period_epochs, "an integer of at least 1")
        check(self.period_mult >= 1, "schedule.period_mult", self.period_mult, "an integer of at least 1")
        base = self.base_batch
        check(base is None or base >= 1, "schedule.base_batch", base, "an integer of at least 1")
        check(0 < self.pct_start < 1, "schedule.pct_start", self.pct_start, "above 0, below 1")
        check(self.div_factor >= 1, "schedule.div_factor", self.div_factor, "1 or more")
        check(self.final_div_factor >= 1, "schedule.final_div_factor", self.final_div_factor, "1 or more")
        check(0 <= self.base_momentum < 1, "schedule.base_momentum", self.base_momentum, "0 to below 1")

    def without_effect(self) -> dict[str, str]:
        """Keys that this `kind` does not use, and why."""
        cycles = ("onecycle", "onecycle_stage")
        readers = {
            "progress": ("onecycle", "warmup_cosine"),
            "pct_start": (*cycles, "warmup_cosine"), "div_factor": (*cycles, "warmup_cosine"),
            "final_div_factor": (*cycles, "warmup_cosine", "cosine_stage", "cosine_restarts"), "base_momentum": cycles,
            "period_epochs": ("cosine_restarts",), "period_mult": ("cosine_restarts",),
            "milestone_epochs": ("step",), "gamma": ("step",),
        }  # fmt: skip
        reasons = {key: f"schedule.kind is {self.kind}" for key, kinds in readers.items() if self.kind not in kinds}
        return reasons | ({"base_batch": "schedule.batch_rule is none"} if self.batch_rule == "none" else {})


@dataclass(frozen=True, kw_only=True)
class Freeze:
    """Which layers train in which stage. Frozen layers are in eval mode: no updates, fixed statistics, no dropout."""

    mode: Literal["none", "freeze", "unfreeze"] = "none"  # use the stages' freeze_to, or their unfreeze_to


@dataclass(frozen=True, kw_only=True)
class Ema:
    decay: float = 0.0  # weight of the previous average per step, 0 to below 1; 0 = off
    half_life_epochs: float = 0.0  # instead of `decay`: epochs after which a contribution has half its weight; 0 = off
    half_life_steps: float = 0.0  # the same in optimizer steps; 0 = off
    warmup: bool = True  # cap the decay at 1 - (1 + step)^(-2/3) early in the run, as timm's ModelEmaV3

    def __post_init__(self) -> None:
        check(0 <= self.decay < 1, "ema.decay", self.decay, "0 (off) to below 1")
        for name in ("half_life_epochs", "half_life_steps"):
            check(getattr(self, name) >= 0, f"ema.{name}", getattr(self, name), "0 (off) or more")
        chosen = [name for name in ("decay", "half_life_epochs", "half_life_steps") if getattr(self, name)]
        check(len(chosen) <= 1, "ema", " and ".join(chosen), "one of decay, half_life_epochs and half_life_steps")

    @property
    def on(self) -> bool:
        return bool(self.decay or self.half_life_epochs or self.half_life_steps)

    def without_effect(self) -> dict[str, str | Literal[False]]:
        return {"warmup": not self.on and "ema.decay is 0, off"}


@dataclass(frozen=True, kw_only=True)
class Precision:
    amp: Literal["bf16", "fp16", "off"] = "bf16"  # autocast dtype
    channels_last: bool = True  # memory format of images and weights
    # on a GPU with amp off: operations computed in TF32 (10 instead of 23 mantissa bits)
    tf32: Literal["convolutions", "all", "off"] = "convolutions"
    compile: bool = False  # torch.compile: one graph per shape, all compiled during the warm-up

    def without_effect(self) -> dict[str, str | Literal[False]]:
        return {"tf32": self.amp != "off" and f"precision.amp is {self.amp}, which is less precise"}


@dataclass(frozen=True, kw_only=True)
class Loss:
    kind: Literal["ce", "bce"] = "ce"  # cross-entropy, or binary cross-entropy per class
    label_smoothing: float = 0.0  # label smoothing of both kinds, 0 to below 1
    threshold: float = 0.0  # bce: targets above it become 1, all others 0; 0 to below 1, 0 = off
    sum_classes: bool = False  # bce: sum over the classes instead of their mean

    def __post_init__(self) -> None:
        check(0 <= self.label_smoothing < 1, "loss.label_smoothing", self.label_smoothing, "0 to below 1")
        check(0 <= self.threshold < 1, "loss.threshold", self.threshold, "0 (off) to below 1")

    def without_effect(self) -> dict[str, str | Literal[False]]:
        return dict.fromkeys(("threshold", "sum_classes"), self.kind != "bce" and "loss.kind is ce")


@dataclass(frozen=True, kw_only=True)
class Distill:
    """Knowledge distillation from a teacher that sees the same images. Source: Hinton et al., arXiv 1503.02531."""

    teacher: str = ""  # any timm model with the same classes; "" = off
    weights: str = "pretrained"  # the teacher's weights, as `model.weights`
    kwargs: dict[str, Any] = field(default_factory=dict)  # keyword arguments for timm.create_model
    alpha: float = 0.5  # weight of the distillation loss, above 0 to 1; the label loss has 1 - alpha
    temperature: float = 4.0  # divisor of both networks' logits, above 0

    def __post_init__(self) -> None:
        check(0 < self.alpha <= 1, "distill.alpha", self.alpha, "above 0, at most 1")
        check(self.temperature > 0, "distill.temperature", self.temperature, "above 0")
        check(not self.teacher or bool(self.weights), "distill.weights", "none", 'a file or "pretrained"')

    def without_effect(self) -> dict[str, str | Literal[False]]:
        keys = ("weights", "kwargs", "alpha", "temperature")
        return dict.fromkeys(keys, not self.teacher and "distill.teacher is empty, off")


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Early stopping on the best top-1 of raw and averaged weights."""

    patience: int = 0  # epochs without improvement after which the run stops; 0 = off
    min_delta: float = 0.0  # increase of top-1 that counts as improvement, 0 to below 1 (0.001 is 0.1 points)

    def __post_init__(self) -> None:
        check(self.patience >= 0, "stop.patience", self.patience, "0 (off) or more")
        check(0 <= self.min_delta < 1, "stop.min_delta", self.min_delta, "0 to below 1")
