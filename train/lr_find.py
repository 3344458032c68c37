"""`resolute lr-find`: a learning rate range test on the first stage, a chart of it and one suggested `optim.lr`.

The learning rate rises exponentially over the steps of a short training of the recipe's model, from its initial
weights, on the first stage's batches and with the recipe's loss. The largest usable rate is the last at which the
smoothed loss is at least half-way down from its first to its lowest value; the suggestion is half of it. If that is the
end of the sweep, as with Adam, the suggestion is the rate at the lowest loss. `_TRUST` says how far that was right.
Nothing is written but the chart; on a CPU, a seed gives the same numbers each time. Rates are those of `optim.lr`: the
stage's `optim.lr_scale`, `schedule.batch_rule` and layer decay apply on top.

Sources: the sweep and its largest rate as the peak: Smith, arXiv 1506.01186, section 3.3; that the best rate is within
about a factor of two of the largest that does not diverge: Bengio, arXiv 1206.5533, section 3.1.1; that the loss may
rise first and fall again at a higher rate, so that its lowest value is no sign of the largest rate: Lewkowycz et al.,
arXiv 2003.02218; the exponential sweep and its end at divergence: fastai's `lr_find`.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from resolute import cuda
from resolute.errors import ResoluteError, check
from resolute.files import output_file
from resolute.pipeline.loader.loader import Loader
from resolute.pipeline.plan.plan import Plan
from resolute.report.charts import Series, chart
from resolute.report.page import figures_page
from resolute.train.devices.distributed import Ranks
from resolute.train.optim.schedule import Rates, peak_momentum
from resolute.train.options import LrFindOptions, TrainOptions
from resolute.train.out_of_memory import DoesNotFit, out_of_memory
from resolute.train.recipe.schema import Ema, Recipe
from resolute.train.recipe.sections import OneCycleSchedule
from resolute.train.recipe.starter import chosen_recipe
from resolute.train.recipe.text import RecipeText
from resolute.train.run_folder import page_file

from .learner import Learner
from .setup import Run, set_up
from .warmup import announce_compilation, check_micro_batches

__all__ = ["RangeTest", "doubt", "main", "range_test", "smoothed", "suggestion"]

_DIVERGED = 4.0  # Source: fastai ParamScheduler.after_batch: smooth_loss > 4 * best_loss
_STOP_SMOOTHING = 0.9  # weight of earlier losses when looking for divergence
_WIDTH = 1 / 25  # standard deviation of the smoothing / number of steps of the sweep: 0.16 decades by default
# Measured: benchmarks/results/lr-find-sweeps.json
_TRUST = (
    "A start for tuning, not the optimum: in four of five range tests it was 0.6 to 1.8 times the peak in use, "
    "in the fifth 6 times; try a third of it and three times as much"
)
# why they differ: the step of Adam and its kin does not grow with the gradient
_HARDLY, _NOISES = 0.05, 2.0  # a fall of the loss of less, as a fraction of the first or over the noise, is small
_RANGES = {"momentum": (1e-3, 1e1), "betas": (1e-5, 1e-1)}


@dataclass(frozen=True, kw_only=True)
class RangeTest:
    """The sweep: learning rates and losses of the steps that ran, and whether it ended early because of divergence."""

    lrs: NDArray[np.float64]
    losses: NDArray[np.float64]  # training loss of each step; the last one can be NaN or infinite
    width: float  # steps: standard deviation of the smoothing
    diverged: bool


class _Sweep:
    """Sets exponentially rising learning rates in place of a learner's `Rates`, at the momentum of their peak."""

    def __init__(self, learner: Learner, *, low: float, high: float, steps: int) -> None:
        self.lrs = np.geomspace(low, high, steps).tolist()
        self._rates: Rates = learner.rates
        self._momentum = peak_momentum(learner.recipe.schedule, learner.recipe.optim)
        self._has_momentum = bool(learner.recipe.optim.momentum)

    def apply(self, optimizer: torch.optim.Optimizer, step: int, *, stage: int, res: int | None = None) -> float:
        """As `Rates.apply`."""
        lr: float = self.lrs[step] * self._rates.factor(stage, res)
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
            if "momentum" in group and self._has_momentum:
                group["momentum"] = self._momentum
            elif "betas" in group:
                group["betas"] = (self._momentum, group["betas"][1])
        return lr


def range_test(plan: Plan, loader: Loader, learner: Learner, *, low: float, high: float, steps: int) -> RangeTest:
    """Train `learner` on the first `steps` batches of `plan` with learning rates from `low` to `high`.

    It stops when the loss is not finite, or above both its first value and four times its lowest one, all smoothed.
    """
    sweep = _Sweep(learner, low=low, high=high, steps=steps)
    learner.rates, learner.ema = sweep, None  # type: ignore[assignment]
    losses: list[float] = []
    mean, best, diverged = 0.0, math.inf, False
    for batch in tqdm(loader, total=steps, desc="lr-find", unit="batch", leave=False, disable=None):
        loss = float(learner.train_step(batch)[0])  # sync: decides whether the sweep continues
        losses.append(loss)
        mean = _STOP_SMOOTHING * mean + (1 - _STOP_SMOOTHING) * loss
        unbiased = mean / (1 - _STOP_SMOOTHING ** len(losses))
        best = min(best, unbiased)
        # why the first loss: when the loss comes near zero, four times its lowest value is within the noise
        diverged = not math.isfinite(loss) or unbiased > max(_DIVERGED * best, losses[0])
        if diverged or len(losses) == steps:
            break
    lrs = np.array(sweep.lrs[: len(losses)])
    return RangeTest(lrs=lrs, losses=np.array(losses), width=_WIDTH * steps, diverged=diverged)


def smoothed(losses: Sequence[float] | NDArray[np.float64], width: float) -> NDArray[np.float64]:
    """The Gaussian-weighted mean of `losses` (N,) around each step, float64; `width`: standard deviation in steps.

    Values that are not finite count as the threshold of divergence, and so do those above both it and the first loss.
    """
    values = np.asarray(losses, float)
    limit = float(np.fmax(values[0], _DIVERGED * values[np.isfinite(values)].min(initial=1e300)))
    values = np.minimum(np.nan_to_num(values, nan=limit, posinf=limit, neginf=limit), limit)
    steps = np.arange(len(values))
    weights = np.exp(-0.5 * ((steps[:, None] - steps) / width) ** 2)
    means: NDArray[np.float64] = weights @ values / weights.sum(axis=1)
    return means


def suggestion(test: RangeTest) -> float:
    """Half the last learning rate, to two digits, at which the smoothed loss is half-way or more from first to lowest.

    If that is the end of the sweep: the rate at the lowest loss.

    Raises `ResoluteError` if the loss does not fall by more than its noise (the standard deviation of the losses around
    the smoothed ones, up to the lowest), or neither rises by as much afterwards nor diverges, or only rises.
    """
    curve = smoothed(test.losses, test.width)
    lowest = int(curve.argmin())
    fall, noise = _fall_and_noise(test, curve)
    first, last, unit = f"{test.lrs[0]:.3g}", f"{test.lrs[-1]:.3g}", 100 / abs(float(curve[0]))
    if lowest < test.width:
        raise ResoluteError(f"--min-lr: got {first}, but the loss only rises from there, expected it to fall; lower it")
    if fall <= noise:
        raise ResoluteError(
            f"--steps: got {len(test.losses)}, in which the loss fell by {unit * fall:.1f} % only (noise "
            f"{unit * noise:.1f} %) from LR {first} to {last}, expected a clear fall; raise it"
        )
    if not test.diverged and curve[lowest:].max() <= curve[lowest] + noise:
        raise ResoluteError(f"--max-lr: got {last}, but the loss has not risen by then, expected it to; raise it")
    largest = int(np.flatnonzero(curve <= curve[0] - fall / 2)[-1])
    lr = test.lrs[lowest] if largest + 1 == len(curve) else test.lrs[largest] / 2
    return float(f"{lr:.2g}")


def doubt(test: RangeTest) -> str:
    """Why the suggestion is uncertain, as a sentence; empty if it is not.

    It is uncertain if the smoothed loss falls by less than 5 % of its first value, or by less than twice its noise, see
    `suggestion`: the rate half-way down such a fall depends on chance.
    """
    curve = smoothed(test.losses, test.width)
    fall, noise = (value / abs(float(curve[0])) for value in _fall_and_noise(test, curve))
    if fall >= max(_HARDLY, _NOISES * noise):
        return ""
    return f"The loss fell by {100 * fall:.1f} % only (noise {100 * noise:.1f} %): the suggestion is uncertain."


def _fall_and_noise(test: RangeTest, curve: NDArray[np.float64]) -> tuple[float, float]:
    """From the first to the lowest smoothed loss, and the standard deviation of the losses around it till then."""
    lowest = int(curve.argmin())
    return float(curve[0] - curve[lowest]), float(np.std(test.losses[: lowest + 1] - curve[: lowest + 1]))


def draw(test: RangeTest, path: Path, *, suggested: float | None, title: str, subtitle: str) -> None:
    """Write the page to `path`. Raises `ResoluteError` if it cannot be written."""
    curve = smoothed(test.losses, test.width)
    marks = [] if suggested is None else [(suggested, f"optim.lr = {suggested:g}")]
    drawn = chart(
        "Loss",
        [
            Series(name="loss of a step", colour="soft", x=test.lrs.tolist(), y=test.losses.tolist()),
            Series(name="smoothed", colour="a", x=test.lrs.tolist(), y=curve.tolist()),
        ],
        unit="",
        marks=marks,
        top=1.5 * float(curve[0]),
        zero=False,
        log="x",
        x_name="LR",
        wide=True,
        start=float(test.lrs[0]),
        note=f"Suggested: half the last rate at which the smoothed loss is half-way down or lower. {_TRUST}. "
        + ("" if suggested is None else doubt(test)),
    )
    with output_file(path) as file:
        file.write(figures_page(title=title, subtitle=subtitle, charts=[drawn]))


def main(args: LrFindOptions) -> None:
    """Run the command."""
    gpu = args.device != "cpu" and cuda.available()
    written = chosen_recipe(args.recipe, args.set_, shards=args.shards, gpu=gpu)
    with page_file(args.out, f"{written.name}-lr-find.html") as out:
        _test(args, written, out)


def _test(args: LrFindOptions, written: RecipeText, out: Path) -> None:
    default = _RANGES["betas" if Recipe.from_text(written).optim.uses_betas else "momentum"]
    low, high = args.min_lr or default[0], args.max_lr or default[1]
    check(10 * low <= high, "--min-lr, --max-lr", f"{low:g} to {high:g}", "at least a factor of 10 between them")
    with tempfile.TemporaryDirectory() as folder:  # stays empty: no run is read or written
        options = TrainOptions(shards=args.shards, device=args.device, threads=args.threads)
        run = Run(options=options, shards=args.shards, folder=Path(folder))
        recipe, shards, plan, learner = set_up(run, written, Ranks())
    fewest = plan.first_phase("train", 0).samples // max(shape.batch_size for shape in plan.stages[0].shapes)
    epochs = max(recipe.stages[0].epochs, -(-args.steps // max(1, fewest)))
    # why no schedule and no EMA: the sweep uses neither, and their milestones or `last_epochs` may not suit this recipe
    first = dataclasses.replace(
        recipe,
        stages=(dataclasses.replace(recipe.stages[0], epochs=epochs),),
        schedule=OneCycleSchedule(),
        ema=Ema(),
        eval=dataclasses.replace(recipe.eval, every_epochs=epochs),
    )
    plan = first.plan(shards, auto_order=plan.order)
    check_micro_batches(plan, learner)
    stage = plan.first_phase("train", 0)
    text = (
        f"{args.steps} steps of stage 0 ({stage.res} px, batch {stage.batch_size}), LR {low:g} to {high:g}, "
        f"{recipe.optim.name}, seed {recipe.seed}"
    )
    print(f"{recipe.name}: {text}", flush=True)
    announce_compilation(learner.device)
    try:
        with Loader(
            plan,
            device=learner.device,
            num_threads=args.threads,
            mean=recipe.data.mean,
            std=recipe.data.std,
            on_bad_sample=recipe.data.on_bad_sample,
            dtype=learner.image_dtype,
            world_size=1,
        ) as loader:
            test = range_test(plan, loader, learner, low=low, high=high, steps=args.steps)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise DoesNotFit("train", stage.res, stage.batch_size).describe(plan, recipe, learner.device) from None
    if test.diverged:
        print(f"stopped at LR {test.lrs[-1]:.3g}, step {len(test.lrs)}: the loss diverged")
    suggested = None
    try:
        suggested = suggestion(test)
    finally:
        draw(test, out, suggested=suggested, title=f"Learning rate range test of {recipe.name}", subtitle=text)
        print(out)
    print(f"optim.lr = {suggested:g} (the recipe has {recipe.optim.lr:g}). {_TRUST}.")
    if uncertain := doubt(test):
        print(f"{uncertain} Try again with `--steps {2 * args.steps}`.")
