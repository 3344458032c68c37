"""What of the training itself can be chosen? The sections of a recipe that only the trainer reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from pipeline.errors import check

__all__ = ["Distill", "Ema", "Freeze", "Loss", "Model", "Optim", "Precision", "Schedule", "Stop"]


@dataclass(frozen=True, kw_only=True)
class Model:
    name: str = "resnet50"  # any timm model
    options: dict[str, Any] = field(default_factory=dict)  # passed to timm.create_model
    weights: str = ""  # to start from: "pretrained" (timm's, from the hub), or a .safetensors or .pth file
    # of a checkpoint that holds raw and averaged weights: best is the kind with the better validation in checkpoints of
    # ours, the averaged ones in others
    weights_kind: Literal["best", "raw", "ema"] = "best"
    drop_path_rate: float = 0.0  # stochastic depth: part of the samples that skip the last block; less before it
    antialias: bool = False  # blur before strided pooling and convolutions, where timm's model can
    norm: Literal["batch", "sync", "ghost", "group"] = "batch"  # what batch norms become; sync: over all ranks
    ghost_batch: int = 32  # ghost: samples that are normalised together, or a few more
    norm_groups: int = 32  # group: groups of a norm's channels, or fewer that divide them
    bn_momentum: float | None = None  # weight of a batch in the running statistics; None: the model's, mostly 0.1
    checkpoint_blocks: bool = False  # gradient checkpointing: blocks run again in backward, for memory

    def __post_init__(self) -> None:
        check(0 <= self.drop_path_rate < 1, "model.drop_path_rate", self.drop_path_rate, "0 (off) to below 1")
        check(self.ghost_batch >= 2, "model.ghost_batch", self.ghost_batch, "an integer of at least 2")
        check(self.norm_groups >= 1, "model.norm_groups", self.norm_groups, "an integer of at least 1")
        momentum = self.bn_momentum
        check(momentum is None or 0 < momentum <= 1, "model.bn_momentum", momentum, "above 0, at most 1")

    def without_effect(self) -> dict[str, str | Literal[False]]:
        no_file = self.weights in ("", "pretrained") and f"model.weights is {self.weights or 'empty'}, no file"
        return {
            "weights_kind": no_file,
            "ghost_batch": self.norm != "ghost" and f"model.norm is {self.norm}",
            "norm_groups": self.norm != "group" and f"model.norm is {self.norm}",
            "bn_momentum": self.norm == "group" and "group norms have no running statistics",
        }


@dataclass(frozen=True, kw_only=True)
class Optim:
    name: Literal["sgd", "adamw", "lamb"] = "sgd"  # SGD is Nesterov's
    lr: float = 0.5  # peak of the schedule, before `lr_scale`
    weight_decay: float = 5e-5  # not on norms and biases
    momentum: float = 0.9  # SGD; the schedule moves it
    betas: tuple[float, float] = (0.9, 0.999)  # AdamW and LAMB; the schedule moves the first
    fused: bool = False  # SGD and AdamW: one kernel for all weights; the same but for rounding
    lookahead: int = 0  # steps after which the weights go back part of their way (Lookahead); 0 = off
    lookahead_alpha: float = 0.5  # part of the way that they keep
    clip_norm: float = 0.0  # longest gradient of all weights together; 0 = off
    clip_value: float = 0.0  # largest element of a gradient; 0 = off
    clip_agc: float = 0.0  # longest gradient of a unit / its weights, not in the head (AGC, 0.01 is usual); 0 = off
    centralise: bool = False  # gradient centralisation: each unit's gradient less its mean
    layer_norm_grads: bool = False  # experimental: each layer's gradient is divided by its length
    accumulate: int = 1  # micro-batches a step; `batch_size` stays the samples of one step
    smoothing: float = 0.0  # label smoothing

    def __post_init__(self) -> None:
        check(self.lr > 0, "optim.lr", self.lr, "above 0")
        check(self.weight_decay >= 0, "optim.weight_decay", self.weight_decay, "0 or more")
        clips = {name: getattr(self, name) for name in ("clip_norm", "clip_value", "clip_agc")}
        for name, clip in clips.items():
            check(clip >= 0, f"optim.{name}", clip, "0 (off) or more")
        check(sum(clip > 0 for clip in clips.values()) <= 1, "optim", clips, "one way to clip, the others 0")
        check(self.lookahead >= 0, "optim.lookahead", self.lookahead, "0 (off) or an integer of at least 1")
        check(0 < self.lookahead_alpha <= 1, "optim.lookahead_alpha", self.lookahead_alpha, "above 0, at most 1")
        check(self.accumulate >= 1, "optim.accumulate", self.accumulate, "an integer of at least 1")
        check(0 <= self.smoothing < 1, "optim.smoothing", self.smoothing, "0 to below 1")
        check(0 <= self.momentum < 1, "optim.momentum", self.momentum, "0 to below 1")

    def without_effect(self) -> dict[str, str | Literal[False]]:
        return {
            "momentum": self.name != "sgd" and f"{self.name} takes optim.betas",
            "betas": self.name == "sgd" and "sgd takes optim.momentum",
            "fused": self.name == "lamb" and "lamb has no fused kernel",
            "lookahead_alpha": not self.lookahead and "optim.lookahead is 0, off",
        }


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning rate and momentum over the steps. "_stage": anew in each stage; else one curve over the whole run.

    Sources: OneCycle: Smith and Topin, arXiv 1708.07120; cosine, restarts: Loshchilov and Hutter, arXiv 1608.03983;
    warm-up and the linear rule: Goyal et al., arXiv 1706.02677; the rule of the square root: Krizhevsky, 1404.5997.
    """

    # one OneCycle over the run, or one a stage; cosines a stage, with warm restarts, or after a warm-up; steps
    kind: Literal["onecycle", "onecycle_stage", "cosine_stage", "cosine_restarts", "warmup_cosine", "step"] = "onecycle"
    # onecycle, warmup_cosine: what the curve runs over. With steps, stages of smaller batches or larger fractions take
    # more of it than their part of the samples; an epoch counts the same whatever its fraction
    progress: Literal["steps", "samples", "epochs"] = "steps"
    warmup_frac: float = 0.25  # onecycle kinds, warmup_cosine: part of the progress in which the LR rises
    start_div: float = 10.0  # onecycle kinds, warmup_cosine: first LR = peak / start_div; otherwise it is the peak
    final_div: float = 1e3  # all kinds but step: last LR = first LR / final_div
    momentum_low: float = 0.85  # onecycle kinds: at the LR's peak; at its ends it is optim.momentum (or betas[0])
    period_epochs: int = 10  # cosine_restarts: length of the first period
    period_mult: int = 1  # cosine_restarts: length of each period / the one before
    milestone_epochs: tuple[int, ...] = ()  # step: the first epochs with a lower LR
    gamma: float = 0.1  # step: factor on the LR at each of them
    batch_rule: Literal["none", "linear", "sqrt"] = "none"  # LR times batch_size / base_batch, or its square root
    base_batch: int | None = None  # the batch size that optim.lr is meant for; None: the first stage's

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
        check(0 < self.warmup_frac < 1, "schedule.warmup_frac", self.warmup_frac, "above 0, below 1")
        check(self.start_div >= 1, "schedule.start_div", self.start_div, "1 or more")
        check(self.final_div >= 1, "schedule.final_div", self.final_div, "1 or more")
        check(0 <= self.momentum_low < 1, "schedule.momentum_low", self.momentum_low, "0 to below 1")

    def without_effect(self) -> dict[str, str]:
        """Keys that nothing reads with this `kind`, and why."""
        cycles = ("onecycle", "onecycle_stage")
        readers = {
            "progress": ("onecycle", "warmup_cosine"),
            "warmup_frac": (*cycles, "warmup_cosine"), "start_div": (*cycles, "warmup_cosine"),
            "final_div": (*cycles, "warmup_cosine", "cosine_stage", "cosine_restarts"), "momentum_low": cycles,
            "period_epochs": ("cosine_restarts",), "period_mult": ("cosine_restarts",),
            "milestone_epochs": ("step",), "gamma": ("step",),
        }  # fmt: skip
        reasons = {key: f"schedule.kind is {self.kind}" for key, kinds in readers.items() if self.kind not in kinds}
        return reasons | ({"base_batch": "schedule.batch_rule is none"} if self.batch_rule == "none" else {})


@dataclass(frozen=True, kw_only=True)
class Freeze:
    """Which layers train in which stage. Frozen layers run as in validation: no update, statistics kept, no dropout."""

    mode: Literal["none", "freeze", "unfreeze"] = "none"  # by each stage's freeze_to, or by its unfreeze_to


@dataclass(frozen=True, kw_only=True)
class Ema:
    decay: float = 0.0  # 0 = off; else the weight of the old average at each step
    half_life_epochs: float = 0.0  # instead of `decay`: after so many epochs weights count half; 0 = off
    half_life_steps: float = 0.0  # the same in steps
    warmup: bool = True  # smaller decay at first: 1 - (1 + step)^(-2/3), timm's ModelEmaV3

    def __post_init__(self) -> None:
        check(0 <= self.decay < 1, "ema.decay", self.decay, "0 (off) to below 1")
        for name in ("half_life_epochs", "half_life_steps"):
            check(getattr(self, name) >= 0, f"ema.{name}", getattr(self, name), "0 (off) or more")
        given = [name for name in ("decay", "half_life_epochs", "half_life_steps") if getattr(self, name)]
        check(len(given) <= 1, "ema", " and ".join(given), "one of decay, half_life_epochs and half_life_steps")

    @property
    def on(self) -> bool:
        return bool(self.decay or self.half_life_epochs or self.half_life_steps)

    def without_effect(self) -> dict[str, str | Literal[False]]:
        return {"warmup": not self.on and "ema.decay is 0, off"}


@dataclass(frozen=True, kw_only=True)
class Precision:
    amp: Literal["bf16", "fp16", "off"] = "bf16"  # autocast
    channels_last: bool = True  # layout of images and weights
    # on a GPU, amp off: what is computed in TF32, of 10 bits instead of 23
    tf32: Literal["convolutions", "all", "off"] = "convolutions"
    compile: bool = False  # torch.compile, one graph a shape, all made before the clock starts

    def without_effect(self) -> dict[str, str | Literal[False]]:
        return {"tf32": self.amp != "off" and f"precision.amp is {self.amp}, of fewer bits still"}


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Of a classifier. `optim.smoothing` smooths the labels of either."""

    kind: Literal["ce", "bce"] = "ce"  # cross-entropy, or binary cross-entropy of each class
    threshold: float = 0.0  # bce: targets above it become 1, the others 0; 0 = as they are
    sum_classes: bool = False  # bce: the sum over classes, not their mean

    def __post_init__(self) -> None:
        check(0 <= self.threshold < 1, "loss.threshold", self.threshold, "0 (off) to below 1")

    def without_effect(self) -> dict[str, str | Literal[False]]:
        return dict.fromkeys(("threshold", "sum_classes"), self.kind != "bce" and "loss.kind is ce")


@dataclass(frozen=True, kw_only=True)
class Distill:
    """Knowledge distillation: a teacher sees the same images. Source: Hinton et al., arXiv 1503.02531."""

    teacher: str = ""  # any timm model of the same classes; empty = off
    weights: str = "pretrained"  # the teacher's: as `model.weights`
    options: dict[str, Any] = field(default_factory=dict)  # the teacher's, passed to timm.create_model
    alpha: float = 0.5  # weight of the teacher's part of the loss; the labels have the rest
    temperature: float = 4.0  # by which both logits are divided

    def __post_init__(self) -> None:
        check(0 < self.alpha <= 1, "distill.alpha", self.alpha, "above 0, at most 1")
        check(self.temperature > 0, "distill.temperature", self.temperature, "above 0")
        check(not self.teacher or bool(self.weights), "distill.weights", "none", 'a file or "pretrained"')

    def without_effect(self) -> dict[str, str | Literal[False]]:
        keys = ("weights", "options", "alpha", "temperature")
        return dict.fromkeys(keys, not self.teacher and "distill.teacher is empty, off")


@dataclass(frozen=True, kw_only=True)
class Stop:
    """The run ends early when its best top-1, of raw or averaged weights, no longer gets better."""

    patience: int = 0  # epochs to wait for a better validation; 0 = off
    min_delta: float = 0.0  # what counts as better: so much more top-1 (0.001 is 0.1 points)

    def __post_init__(self) -> None:
        check(self.patience >= 0, "stop.patience", self.patience, "0 (off) or more")
        check(0 <= self.min_delta < 1, "stop.min_delta", self.min_delta, "0 to below 1")
