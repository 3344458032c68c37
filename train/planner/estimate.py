"""The forecast of `resolute plan`: a run's time per stage and part, what limits it, and advice on a time budget.

Pure functions of measured rates (`Throughput`).
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from resolute.errors import ResoluteError
from resolute.pipeline.plan.plan import Plan
from resolute.train.logs.run_log import format_duration

from .measure import Throughput

__all__ = [
    "Forecast",
    "StageForecast",
    "advice",
    "calibration",
    "forecast",
    "parse_duration",
    "table",
    "to_json",
    "with_doubled_batches",
]


@dataclass(frozen=True, kw_only=True)
class StageForecast:
    """The forecast of one stage; `images` per epoch, `eval_images` per validation.

    With several resolutions, `res` is the largest, and `batch_size` the mean.
    """

    stage: int
    res: int
    batch_size: int
    epochs: int
    images: int
    eval_images: int
    throughput: Throughput
    ramp_steps: int | None = None  # optimizer steps, if resolution or batch size change in the stage

    @property
    def steps(self) -> int:
        return self.ramp_steps or self.epochs * -(-self.images // self.batch_size)

    @property
    def epoch_s(self) -> float:
        return self.images / self.throughput.live_images_per_s

    @property
    def eval_s(self) -> float:
        """Seconds per validation; if not measured, estimated at three times the training rate (forward only)."""
        return self.eval_images / (self.throughput.eval_images_per_s or 3 * self.throughput.model_images_per_s)

    @property
    def limit(self) -> str:
        """The bottleneck: the slower of loader and model, or both if they slow each other down by over 20 %."""
        loader, model = self.throughput.loader_images_per_s, self.throughput.model_images_per_s
        if self.throughput.live_images_per_s < 0.8 * min(loader, model):
            return "both"
        return "loader" if loader < model else "model"


@dataclass(frozen=True, kw_only=True)
class Forecast:
    stages: tuple[StageForecast, ...]
    eval_every: int  # epochs between validations
    start_s: float  # time before the first step
    save_s: float  # time per checkpoint
    save_every_s: float
    folds: int = 1  # number of runs, one after another

    def parts_s(self, epochs: Sequence[int] = ()) -> dict[str, float]:
        """Seconds of all folds by part of the work. `epochs`: per stage (0: left out), if not those of the stages."""
        counts = list(epochs) or [stage.epochs for stage in self.stages]
        ends = list(accumulate(counts))
        validations = [
            end // self.eval_every - (end - count) // self.eval_every for end, count in zip(ends, counts, strict=True)
        ]
        if ends[-1] % self.eval_every:
            validations[ends.index(ends[-1])] += 1  # the last epoch is always validated
        run = list(zip(self.stages, counts, validations, strict=True))
        saves = sum(count * (1 + int(stage.epoch_s // self.save_every_s)) for stage, count, _ in run)
        single = {
            "start": self.start_s,
            "training": sum(count * stage.epoch_s for stage, count, _ in run),
            "validation": sum(n * stage.eval_s for stage, _, n in run),
            "checkpoints": saves * self.save_s,
        }
        return {name: self.folds * value for name, value in single.items()}

    def total_s(self, epochs: Sequence[int] = ()) -> float:
        return sum(self.parts_s(epochs).values())


def forecast(
    plan: Plan,
    throughputs: Sequence[Throughput],
    *,
    eval_every: int,
    start_s: float,
    save_s: float,
    save_every_s: float,
    folds: int = 1,
) -> Forecast:
    """The forecast of a run of `plan` with the measured `throughputs` of its stages."""
    val = len(plan.shards.splits["val"]) if "val" in plan.shards.splits else 0
    steps = Counter[int]()
    for phase in plan.phases:
        steps[phase.stage] += phase.batches if phase.split == "train" else 0
    stages = []
    for i, stage in enumerate(plan.stages):
        images, size = plan.first_phase("train", i).samples, stage.shapes[0].batch_size
        ramp_steps = steps[i] if len(stage.shapes) > 1 else None
        stages.append(
            StageForecast(
                stage=i,
                res=stage.max_res,
                batch_size=round(stage.epochs * images / ramp_steps) if ramp_steps else size,
                epochs=stage.epochs,
                images=images,
                eval_images=val,
                throughput=throughputs[i],
                ramp_steps=ramp_steps,
            )
        )
    return Forecast(
        stages=tuple(stages),
        eval_every=eval_every,
        start_s=start_s,
        save_s=save_s,
        save_every_s=save_every_s,
        folds=folds,
    )


def with_doubled_batches(result: Forecast, models: Sequence[float | None], *, shared: bool) -> Forecast:
    """`result` with doubled batch sizes, at which the model alone reaches `models` images/s (None: stage unchanged).

    `shared`: loader and model share the CPU cores, so the loader's extra time per image is assumed constant. Otherwise
    the live rate is assumed to stay the same fraction of the slower one's rate.
    """
    stages = []
    for stage, model in zip(result.stages, models, strict=True):
        throughput = stage.throughput
        if model is None:
            stages.append(stage)
            continue
        loader, old, live = throughput.loader_images_per_s, throughput.model_images_per_s, throughput.live_images_per_s
        new = min(loader, model) * live / min(loader, old)
        if shared:
            new = 1 / max(1 / model, 1 / model + 1 / live - 1 / old)
        new_throughput = dataclasses.replace(throughput, model_images_per_s=model, live_images_per_s=new)
        steps = None if stage.ramp_steps is None else -(-stage.ramp_steps // 2)
        stages.append(
            dataclasses.replace(stage, batch_size=2 * stage.batch_size, throughput=new_throughput, ramp_steps=steps)
        )
    return dataclasses.replace(result, stages=tuple(stages))


def parse_duration(text: str, *, setting: str = "--budget") -> float:
    """Seconds of a duration such as 90s, 11m or 1.5h. Raises `ResoluteError` for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text.strip())
    if not match or not float(match[1]):
        raise ResoluteError(f"{setting}: got {text!r}, expected a time like 90s, 11m or 1.5h; correct it")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def calibration(result: Forecast) -> list[dict[str, Any]]:
    """The calibration records of run.jsonl, one per stage."""
    return [
        {
            "kind": "calibration",
            "stage": stage.stage,
            "loader_images_per_s": stage.throughput.loader_images_per_s,
            "model_images_per_s": stage.throughput.model_images_per_s,
            "step_s": stage.batch_size / stage.throughput.live_images_per_s,
        }
        for stage in result.stages
    ]


def to_json(result: Forecast, budget_s: float | None, advice_lines: list[str]) -> dict[str, Any]:
    """The content of the `--json` file."""
    stages = [
        {
            **dataclasses.asdict(stage),
            "steps": stage.steps,
            "limit": stage.limit,
            "epoch_s": stage.epoch_s,
            "eval_s": stage.eval_s,
        }
        for stage in result.stages
    ]
    return {
        "stages": stages,
        "folds": result.folds,
        "parts_s": result.parts_s(),
        "total_s": result.total_s(),
        "budget_s": budget_s,
        "advice": advice_lines,
    }


def table(result: Forecast) -> str:
    """The forecast as text: one row per stage, the total, and a warning if a rate is impossible; rates in images/s."""
    lines = ["stage  res batch epochs  steps  loader/s   model/s    live/s  limit   stall %  memory GiB epoch s  val s"]
    for stage in result.stages:
        throughput, batch = stage.throughput, min(stage.batch_size, stage.images)
        sign = "" if throughput.estimated_from is None else "~"
        loader, model, live, epoch_s, eval_s = (
            f"{sign}{value:.1f}"
            for value in (
                throughput.loader_images_per_s,
                throughput.model_images_per_s,
                throughput.live_images_per_s,
                stage.epoch_s,
                stage.eval_s,
            )
        )
        memory = f"{throughput.memory_bytes / 2**30:.2f}" if throughput.memory_bytes else "-"
        lines.append(
            f"{stage.stage:5d} {stage.res:4d} {batch:5d} {stage.epochs:6d} {stage.steps:6d} {loader:>9} {model:>9} "
            f"{live:>9}  {stage.limit:6} {100 * throughput.stall_frac:8.2f} {memory:>11} {epoch_s:>7} {eval_s:>6}"
        )
    parts = ", ".join(f"{name} {format_duration(value)}" for name, value in result.parts_s().items())
    runs = f" in {result.folds} folds" if result.folds > 1 else ""
    lines.append(f"total {format_duration(result.total_s())}{runs}: {parts}")
    sources = {stage.throughput.estimated_from for stage in result.stages}
    for known in sorted(number for number in sources if number is not None):
        rows = [stage.stage for stage in result.stages if stage.throughput.estimated_from == known]
        lines.append(
            f"~ stage{'s' * (len(rows) > 1)} {_list(rows)}: estimated from stage {known} by the number of pixels, to "
            "keep within --limit"
        )
    if wrong := [stage for stage in result.stages if not stage.throughput.is_possible]:
        numbers, throughput = _list([stage.stage for stage in wrong]), wrong[0].throughput
        lines.append(
            f"stage {numbers}: got {throughput.live_images_per_s:.1f} images/s live, expected at most the model's "
            f"{throughput.model_images_per_s:.1f}, also when measured again: the machine is busy, the forecast is "
            "unreliable; repeat it when nothing else runs"
        )
    return "\n".join(lines)


def advice(
    result: Forecast, budget_s: float, scaled: tuple[float, Sequence[int]] | None, doubled: Forecast | None
) -> list[str]:
    """Whether the run fits `budget_s`, and if not, what would.

    - `scaled`: the largest `scale_epochs` that fits, with the epochs of each stage; None: not even the smallest does
    - `doubled`: the forecast with doubled batch sizes; None: not known
    """
    total, budget = result.total_s(), format_duration(budget_s)
    fits = total <= budget_s
    planned = [stage.epochs for stage in result.stages]
    if fits:
        lines = [f"fits the budget of {budget}: {format_duration(budget_s - total)} to spare"]
    else:
        lines = [f"does not fit the budget of {budget}: {format_duration(total - budget_s)} too long. Options:"]
    if scaled is None:
        lines += [] if fits else ["- fewer epochs: not enough, whatever scale_epochs"]
    elif [*scaled[1]] != planned:
        scale, epochs = scaled
        what = f"--set scale_epochs={scale:g}: {_list(epochs)} epochs instead of {_list(planned)}"
        lines.append(f"- {'more' if fits else 'fewer'} epochs: {what}: {format_duration(result.total_s(epochs))}")
    if fits:
        return lines
    if result.folds > 1:
        fold_s = total / result.folds
        folds = int(budget_s // fold_s)
        lines.append(
            f"- fewer folds: {folds} of {result.folds}: {format_duration(folds * fold_s)}"
            if folds
            else f"- fewer folds: not enough, one fold takes {format_duration(fold_s)}"
        )
    if doubled is not None:
        sizes = [_list([stage.batch_size for stage in f.stages]) for f in (doubled, result)]
        doubled_s = doubled.total_s()
        effect = "fits" if doubled_s <= budget_s else "still too long" if doubled_s < total else "no gain"
        lines.append(
            f"- larger batches: {sizes[0]} instead of {sizes[1]}: {format_duration(doubled_s)}, {effect} "
            "(adapt the learning rate)"
        )
    return lines


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
