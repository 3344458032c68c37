"""What of the training itself can be chosen? The sections of a recipe that only the trainer reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from .errors import check

__all__ = ["Ema", "Model", "Optim", "Precision", "Schedule"]


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
        check(self.lr > 0, "optim.lr", self.lr, "above 0")
        check(self.weight_decay >= 0, "optim.weight_decay", self.weight_decay, "0 or more")
        check(self.clip_norm >= 0, "optim.clip_norm", self.clip_norm, "0 (off) or more")
        check(self.accumulate >= 1, "optim.accumulate", self.accumulate, "an integer of at least 1")
        check(0 <= self.smoothing < 1, "optim.smoothing", self.smoothing, "0 to below 1")
        check(0 <= self.momentum < 1, "optim.momentum", self.momentum, "0 to below 1")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One OneCycle over all steps of all stages. Source: Smith and Topin, arXiv 1708.07120."""

    warmup_frac: float = 0.25  # part of the steps in which the LR rises
    start_div: float = 10.0  # first LR = peak / start_div
    final_div: float = 1e3  # last LR = first LR / final_div
    momentum_low: float = 0.85  # at the LR's peak; at its ends it is optim.momentum (or betas[0])

    def __post_init__(self) -> None:
        check(0 < self.warmup_frac < 1, "schedule.warmup_frac", self.warmup_frac, "above 0, below 1")
        check(self.start_div >= 1, "schedule.start_div", self.start_div, "1 or more")
        check(self.final_div >= 1, "schedule.final_div", self.final_div, "1 or more")
        check(0 <= self.momentum_low < 1, "schedule.momentum_low", self.momentum_low, "0 to below 1")


@dataclass(frozen=True, kw_only=True)
class Ema:
    decay: float = 0.0  # 0 = off; else the weight of the old average at each step
    warmup: bool = True  # smaller decay at first: 1 - (1 + step)^(-2/3), timm's ModelEmaV3

    def __post_init__(self) -> None:
        check(0 <= self.decay < 1, "ema.decay", self.decay, "0 (off) to below 1")


@dataclass(frozen=True, kw_only=True)
class Precision:
    amp: Literal["bf16", "fp16", "off"] = "bf16"
    channels_last: bool = True
