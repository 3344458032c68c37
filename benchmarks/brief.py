"""`resolute bench`: which of loader and model is the limit, and what a stage change costs.

In about 90 s: the model's rate at each resolution, the time of every training step across the
stage changes, with our loader and with torch's DataLoader rebuilt at each, and the rates of both loaders alone. It ends
with a sentence and writes an HTML page, and the values as JSON beside it. `resolute bench-all` measures the same for
longer, in rounds whose spread it shows.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resolute.files import check_output, output_file
from resolute.report.charts import Chart, Series, chart
from resolute.report.page import figures_page

from . import change, loader
from .cli import show_progress
from .loaders.registry import LOADERS
from .loaders.run import Runner
from .options import BenchOptions
from .record import check_writable, write
from .setting import Setting, default_file, set_up

__all__ = ["Figures", "change_steps", "main", "page", "sentence"]

_PAIR = ("ours", "pillow")  # names in `LOADERS`
_MODEL_S = 1.5  # measuring the model at one resolution
_LOADER_S = 1.5  # measuring a loader at one resolution
_CHANGE_SHARE = 0.3  # of the time for the training steps across the stage changes
_MOST_STEPS = 60  # training steps at a resolution
_MOST_ROUNDS = 5  # of measuring the loaders' rates
_BUSY = 0.5  # load average of the last minute; above it, other work ran
_ENOUGH = 1.1  # loader's rate / model's: below it, single late batches already cost time


def main(args: BenchOptions) -> None:
    """Measure and write the page. Raises `ResoluteError`."""
    began = time.perf_counter()
    out: Path = args.out or default_file("bench", suffix=".html")
    check_output(out, setting="--out", suffixes=(".html",), named=args.out is not None)
    check_writable(out.with_suffix(".json"), named=args.out is not None)
    setting = set_up(args, rounds=1, changes=True)
    model, steps = _train(args, setting)
    runner = Runner(
        job=setting.job(args, seconds=min(_LOADER_S, args.seconds / 60)),
        loaders=_PAIR,
        rounds=_MOST_ROUNDS,
        isolated=False,
        until=began + args.seconds,
    )
    rates = loader.measure_rates(runner)
    show_progress("")
    result = {
        **setting.result,
        "model": model,
        "steps": steps,
        "loader": rates,
        "took_s": round(time.perf_counter() - began, 1),
    }
    with output_file(out) as file:
        file.write(page(result))
    write(out.with_suffix(".json"), result)
    print(f"{loader.rates_table(rates)}\n\n{sentence(result)}\n{out}")


def _train(args: BenchOptions, setting: Setting) -> tuple[dict[int, float], dict[str, Any]]:
    """{res: images/s of the model alone}, and {"batch_size", "step_s": {loader: [resolution][step]}}."""
    # why here: --help and command line errors should not wait for slow imports
    import torch

    from resolute.train.devices.memory import keep_freed_memory

    from .trainer import Trainer

    if setting.device.type == "cpu":
        keep_freed_memory()
        torch.set_num_threads(args.threads)
    else:
        torch.backends.cudnn.benchmark = True  # each shape is autotuned once, in the warm-up
    show_progress("warming up the model")
    trainer = Trainer(setting.shards, model=args.model, device=setting.device, batch_size=setting.batch_size)
    rates = {}
    for res in setting.shards.resolutions:
        show_progress(f"the model alone at {res} px")
        rates[res] = trainer.rate(res, seconds=min(_MODEL_S, args.seconds / 60))
    sample_s, budget_s = sum(1 / rate for rate in rates.values()), _CHANGE_SHARE * args.seconds / len(_PAIR)
    count, size = change_steps(sample_s, budget_s, workers=args.threads, batch_size=setting.batch_size)
    trainer.warm_up(size)
    job = dataclasses.replace(setting.job(args, batches=count), batch_size=size)
    step_s = {}
    for name in _PAIR:
        show_progress(f"training steps across the stage changes: {LOADERS[name].title}")
        step_s[name] = [own[:count] for own in trainer.step_times(LOADERS[name], job)]
    return rates, {"batch_size": size, "step_s": step_s}


def change_steps(sample_s: float, budget_s: float, *, workers: int, batch_size: int) -> tuple[int, int]:
    """(steps at each resolution, batch size) for training across the stage changes within `budget_s` s.

    `sample_s`: seconds that the model takes for a sample of each resolution, in all. At least as many steps as a cost
    can be computed from (see `change.cost_s`); if these take too long, their batches are smaller.
    """
    least = 2 * change.first_batches(workers) + workers
    count = min(_MOST_STEPS, int(budget_s / (batch_size * sample_s)))
    if count >= least:
        return count, batch_size
    return least, max(2, min(batch_size, int(budget_s / (least * sample_s))))


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The numbers of the page, from a result: rates in images/s by resolution, pairs of ours and the DataLoader's."""

    loaders: dict[int, tuple[float, float]]  # alone
    model: dict[int, float]  # alone
    training: dict[int, tuple[float, float]]  # with each loader
    changes: list[tuple[str, tuple[float, float], tuple[float, float]]]  # change, costs in s, and in steps

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> Figures:
        steps, workers = result["steps"], result["settings"]["threads"]
        resolutions = result["shards"]["resolutions"]
        changes = change.summary({name: [run] for name, run in steps["step_s"].items()}, resolutions, workers)

        def pair(value: Callable[[str, int], float], number: int) -> tuple[float, float]:
            ours, peer = (value(name, number) for name in _PAIR)
            return ours, peer

        def alone(name: str, res: int) -> float:
            entry = next(entry for entry in result["loader"]["res"] if entry["res"] == res)
            return float(entry["loaders"][name]["images_per_s"]["median"])

        def training(name: str, number: int) -> float:
            return steps["batch_size"] / change.steady_s(steps["step_s"][name][number], workers)

        def cost_s(name: str, number: int) -> float:
            return float(changes[number]["loaders"][name]["cost_s"]["median"])

        def cost_steps(name: str, number: int) -> float:
            return cost_s(name, number) / float(changes[number]["loaders"][name]["steady_s"]["median"])

        return cls(
            loaders={res: pair(alone, res) for res in resolutions},
            model={int(res): rate for res, rate in result["model"].items()},
            training={res: pair(training, i) for i, res in enumerate(resolutions)},
            changes=[
                (f"{each['from_res']} to {each['to_res']} px", pair(cost_s, i), pair(cost_steps, i))
                for i, each in enumerate(changes)
            ],
        )

    @property
    def slow(self) -> list[int]:
        """The resolutions at which the loader is the limit."""
        return [res for res, (ours, _) in self.loaders.items() if ours < _ENOUGH * self.model[res]]


def sentence(result: Mapping[str, Any]) -> str:
    """The answer: the loader's rate and the model's where they are closest, and the cost of the worst stage change."""
    figures = Figures.of(result)
    res = min(figures.model, key=lambda res: figures.loaders[res][0] / figures.model[res])
    ours, peer = figures.loaders[res]
    costs = [max(0.0, *(steps[i] for _, _, steps in figures.changes)) for i in range(2)]
    verdict = "the model is the limit at every resolution"
    if figures.slow:
        where = ", ".join(map(str, figures.slow))
        verdict = f"the loader is the limit at {where} px; more cores or smaller shards (`QUALITY=…`) would help"
    return (
        f"At {res} px the loader feeds up to {ours:,.0f} images/s (a torch DataLoader {peer:,.0f}), "
        f"{result['settings']['model']} needs {figures.model[res]:,.0f}; a stage change costs at most {costs[0]:.1f} "
        f"steps (a rebuilt DataLoader {costs[1]:.1f}): {verdict}."
    )


def page(result: Mapping[str, Any]) -> bytes:
    """The HTML page of a result."""
    figures, machine, settings = Figures.of(result), result["machine"], result["settings"]
    resolutions, titles = result["shards"]["resolutions"], [LOADERS[name].title for name in _PAIR]
    findings = [sentence(result)]
    if settings["device"] == "cpu" and result["steps"]["batch_size"] == settings["batch_size"]:
        res = resolutions[-1]
        rate = figures.training[res][0]
        findings.append(
            f"Loader and model share the cores: at {res} px training runs at {rate:,.0f} images/s, "
            f"{100 * rate / figures.model[res]:.0f} % of the model alone."
        )
    if machine["load_before"] > _BUSY:
        findings.append(
            f"Other work ran before this measurement (load average {machine['load_before']}): repeat it on "
            "a quiet machine."
        )
    rates = [
        (
            res,
            *(f"{rate:,.0f}" for rate in figures.loaders[res]),
            f"{figures.loaders[res][0] / figures.loaders[res][1]:.2f}",
            f"{figures.model[res]:,.0f}",
            *(f"{rate:,.0f}" for rate in figures.training[res]),
        )
        for res in resolutions
    ]
    costs = [
        (
            name,
            *(
                text
                for cost_s, cost in zip(costs_s, costs, strict=True)
                for text in (f"{1e3 * cost_s:+,.0f}", f"{cost:+.1f}")
            ),
        )
        for name, costs_s, costs in figures.changes
    ]
    rounds = len(result["loader"]["res"][0]["loaders"]["ours"]["images_per_s"]["raw"])
    return figures_page(
        title=f"Benchmark of {result['shards']['name']}",
        subtitle=f"{machine['gpu'] or machine['cpu']}, {machine['cores']} cores, {settings['model']}, "
        f"{result['date']}, commit {result['commit']}, {result['took_s']:.0f} s",
        findings=findings,
        charts=_charts(figures, result, titles),
        tables=[
            (
                "Images/s",
                (
                    "px#",
                    *(f"{title}, alone#" for title in titles),
                    f"{titles[0]} / {titles[1]}#",
                    "model alone#",
                    *(f"training with {title}#" for title in titles),
                ),
                rates,
                f"Loaders: batch {settings['batch_size']}, rounds: {rounds}. "
                f"Training: batch {result['steps']['batch_size']}.",
            ),
            (
                "Cost of a stage change",
                ("change", *(f"{title}, {unit}#" for title in titles for unit in ("ms", "steps"))),
                costs,
                f"Extra time of the first {change.first_batches(settings['threads'])} training steps after a change. "
                "Less than one step may be noise.",
            ),
        ],
    )


def _charts(figures: Figures, result: Mapping[str, Any], titles: Sequence[str]) -> Iterator[Chart | None]:
    sizes = result["shards"]["resolutions"]
    x = [float(res) for res in sizes]
    yield chart(
        "Rates by resolution",
        [
            *(
                Series(
                    name=f"{title}, alone",
                    colour=colour,
                    kind="dots",
                    x=x,
                    y=[figures.loaders[res][i] for res in sizes],
                )
                for i, (title, colour) in enumerate(zip(titles, "ab", strict=True))
            ),
            Series(
                name=f"{result['settings']['model']} alone",
                colour="c",
                kind="dots",
                x=x,
                y=[figures.model[res] for res in sizes],
            ),
            Series(
                name="training with ours", colour="d", kind="dots", x=x, y=[figures.training[res][0] for res in sizes]
            ),
        ],
        unit="images/s",
        x_name="px",
        marks=[(res, f"{res:g} px") for res in x],
        wide=True,
    )
    step_s = result["steps"]["step_s"]
    count = min(len(own) for run in step_s.values() for own in run)
    steps = [float(step) for step in range(count * len(sizes))]
    yield chart(
        "Time of each training step",
        [
            Series(name=title, colour=colour, x=steps, y=[1e3 * each for own in step_s[name] for each in own[:count]])
            for name, title, colour in reversed(
                [*zip(_PAIR, ("ours", f"{titles[1]}, rebuilt at each change"), "ab", strict=True)]
            )
        ],
        unit="ms",
        marks=[(float(i * count), f"{res} px") for i, res in enumerate(sizes)],
        wide=True,
    )
