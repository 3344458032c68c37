"""`resolute bench`: which of loader and model is the limit, and what a stage change costs.

In about 90 s, on any shard set:

loader    rates of our loader and of torch's DataLoader alone
training  rates of the model alone, on random numbers, and of training on the batches of each loader
change    time of every training step across the stage changes, with these loaders and with a DataLoader that is rebuilt

The DataLoader is at its best: one for all resolutions, with the faster of two decoders, normalised by its workers or
later, whichever is faster at the largest resolution. `--rounds N` measures everything N times, the loaders in turns,
and the tables show medians and ranges. It ends with a sentence, and writes an HTML page, and the values as JSON.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

from resolute.errors import ResoluteError
from resolute.files import check_output, output_file
from resolute.report.charts import Chart, Series, chart
from resolute.report.page import figures_page

from . import change, loader
from .cli import chosen, default_file, repeated, show_progress, spread, text_table
from .loaders import run
from .loaders.job import Job
from .loaders.registry import LOADERS
from .options import BenchOptions
from .record import check_writable, find_device, write

if TYPE_CHECKING:
    from .trainer import Trainer

__all__ = ["PARTS", "change_steps", "main", "page", "sentence", "stage_costs", "tables"]

PARTS = ("loader", "training", "change")
# of these DataLoaders, names in `LOADERS`, the fastest is compared
_BEST = ("v2-sized", "v2-uint8-sized", "simplejpeg-sized", "simplejpeg-uint8-sized")
_REBUILT = "v2"  # the DataLoader that is rebuilt at each change
_SHARES = {"loader": 0.2, "training": 0.3, "change": 0.25}  # of the time of a round; the rest is for starts
_CHOICE_S = 1.0  # measuring each of `_BEST`
_PLANNED_S = 0.3  # measuring the model at one resolution, for the number of steps
_MOST_STEPS = 60  # training steps at a resolution
_WARM_UP = 5  # training steps before the clock starts
_FASTEST = 100_000  # images/s: an upper bound, so that no loader runs out of batches
_BUSY = 0.5  # load average of the last minute; above it, other work ran
_ENOUGH = 1.1  # loader's rate / model's: below it, single late batches already cost time

Values = dict[str, Any]  # `repeated` values
Table = tuple[str, tuple[str, ...], list[tuple[str, ...]], str]  # heading, heads ("#": numbers), rows, note


def main(options: BenchOptions) -> None:
    """Measure and write the page. Raises `ResoluteError`."""
    began = time.perf_counter()
    parts = chosen(options.parts, PARTS, setting="--parts")
    out = options.out or default_file("bench", suffix=".html")
    check_output(out, setting="--out", suffixes=(".html", ".json"), named=options.out is not None)
    check_writable(out.with_suffix(".json"), named=options.out is not None)
    result = _measure(options, parts)
    show_progress("")
    result["took_s"] = round(time.perf_counter() - began, 1)
    if out.suffix == ".html":
        with output_file(out) as file:
            file.write(page(result))
    write(out.with_suffix(".json"), result)
    for heading, heads, rows, note in tables(result):
        print(f"\n{text_table(f'{heading}. {note}', [head.rstrip('#') for head in heads], rows)}")
    print(f"\n{sentence(result)}\n{out}")


def _measure(options: BenchOptions, parts: list[str]) -> dict[str, Any]:
    """The result, with a field for each of the parts."""
    # why here: --help and command line errors should not wait for slow imports
    import timm
    import torch

    from resolute.train.devices.memory import keep_freed_memory

    if not timm.is_model(options.model):
        raise ResoluteError(f"--model: got {options.model!r}, expected a timm model; see timm.list_models()")
    device = find_device(options.device)
    shards, batch_size = run.open_set(options, least=2 if "change" in parts else 1)
    settings = {
        "device": device.type,
        "threads": options.threads,
        "batch_size": batch_size,
        "model": options.model,
        "parts": parts,
        "seconds": options.seconds,
    }
    result = run.begin(shards, settings, rounds=options.rounds, device=device)
    if device.type == "cpu":
        keep_freed_memory()
        torch.set_num_threads(options.threads)
    else:
        torch.backends.cudnn.benchmark = True  # each shape is autotuned once, in the warm-up
    trainer = None
    if {"training", "change"} & {*parts}:
        from .trainer import Trainer

        show_progress("warming up the model")
        trainer = Trainer(shards, model=options.model, device=device, batch_size=batch_size)
    job = Job(
        shards=options.shards,
        resolutions=shards.resolutions,
        batch_size=batch_size,
        workers=options.threads,
        device=str(device),
        dtype="float16" if trainer and trainer.image_dtype is torch.float16 else "float32",
    )
    chosen_s = min(_CHOICE_S, options.seconds / 60)
    measured = _rates(dataclasses.replace(job, resolutions=job.resolutions[-1:], seconds=chosen_s), _BEST, rounds=1)
    tried = {name: values["images_per_s"]["median"] for name, values in measured["res"][0]["loaders"].items()}
    peer = max(tried, key=lambda name: tried[name])
    result["peer"] = {"loader": peer, "tried": tried}
    pair, seconds = ("ours", peer), options.seconds / len(shards.resolutions)
    if "loader" in parts:
        job_s = dataclasses.replace(job, seconds=_SHARES["loader"] * seconds / len(pair))
        result["loader"] = _rates(job_s, pair, rounds=options.rounds)
    if trainer and "training" in parts:
        each_s = _SHARES["training"] * seconds / (1 + len(pair))
        result["training"] = _training(trainer, job, pair, seconds=each_s, rounds=options.rounds)
    if trainer and "change" in parts:
        budget_s = _SHARES["change"] * options.seconds
        result["change"] = _changes(trainer, job, (*pair, _REBUILT), budget_s=budget_s, rounds=options.rounds)
    return result


def _rates(job: Job, loaders: tuple[str, ...], *, rounds: int) -> dict[str, Any]:
    return loader.measure_rates(run.Runner(job=job, loaders=loaders, rounds=rounds, isolated=False))


def _training(trainer: Trainer, job: Job, loaders: tuple[str, ...], *, seconds: float, rounds: int) -> dict[str, Any]:
    """{"res": [{"res", "alone", "loaders": {name: …}, "headroom"}]}: images/s of the model alone and of training.

    headroom: alone / training with ours, which is the gain from an infinitely fast loader. All values are `repeated`.
    """
    from .loaders import child

    alone: dict[int, list[float]] = {res: [] for res in job.resolutions}
    live: dict[tuple[int, str], list[float]] = {(res, name): [] for res in job.resolutions for name in loaders}
    batches = _WARM_UP + 1 + math.ceil(seconds * _FASTEST / job.batch_size)
    for number in range(rounds):
        for res in job.resolutions:
            show_progress(f"round {number + 1} of {rounds}: the model alone at {res} px")
            alone[res].append(trainer.rate(res, seconds=seconds))
            for name in loaders:
                show_progress(f"round {number + 1} of {rounds}: training at {res} px with {LOADERS[name].title}")
                one = _job_of(name, job, resolutions=(res,), batches=batches)
                with closing(child.adapter(one).stream(one)) as stream:
                    measured = trainer.live(stream, seconds=seconds, steps_before=_WARM_UP)
                live[res, name].append(measured["images_per_s"])
    return {
        "res": [
            {
                "res": res,
                "alone": repeated(alone[res]),
                "loaders": {name: repeated(live[res, name]) for name in loaders},
                "headroom": repeated([a / b for a, b in zip(alone[res], live[res, "ours"], strict=True)]),
            }
            for res in job.resolutions
        ]
    }


def _changes(trainer: Trainer, job: Job, loaders: tuple[str, ...], *, budget_s: float, rounds: int) -> dict[str, Any]:
    """{"batch_size", "step_s": {loader: [round][resolution][step]}}: seconds of training steps, the wait included."""
    sample_s = sum(1 / trainer.rate(res, seconds=_PLANNED_S) for res in job.resolutions)
    count, size = change_steps(sample_s, budget_s / len(loaders), workers=job.workers, batch_size=job.batch_size)
    trainer.warm_up(size)
    step_s: dict[str, list[list[list[float]]]] = {name: [] for name in loaders}
    for number in range(rounds):
        for name in loaders:
            show_progress(f"round {number + 1} of {rounds}: training across the changes with {LOADERS[name].title}")
            times = trainer.step_times(LOADERS[name], _job_of(name, job, batches=count, batch_size=size))
            step_s[name].append([own[:count] for own in times])
    return {"batch_size": size, "step_s": step_s}


def _job_of(name: str, job: Job, **more: Any) -> Job:
    return dataclasses.replace(job, module=LOADERS[name].module, variant=LOADERS[name].variant, **more)


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


# ---- what the page says ----------------------------------------------------------------------------------------------


def stage_costs(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The costs of the stage changes, as `change.summary` gives them, of a result with the part "change"."""
    return change.summary(result["change"]["step_s"], result["shards"]["resolutions"], result["settings"]["threads"])


def _median(values: Values) -> float:
    return float(values["median"])


def sentence(result: Mapping[str, Any]) -> str:
    """The answer: the loader's rate and the model's where they are closest, and the cost of the worst stage change."""
    peer, model, said, verdict = result["peer"]["loader"], result["settings"]["model"], [], ""
    needed = {each["res"]: _median(each["alone"]) for each in result.get("training", {}).get("res", ())}
    if "loader" in result:
        fed = {
            each["res"]: [_median(each["loaders"][name]["images_per_s"]) for name in ("ours", peer)]
            for each in result["loader"]["res"]
        }
        times = {res: ours / needed.get(res, 1.0) for res, (ours, _) in fed.items()}
        res = min(times, key=lambda res: times[res])
        said.append(f"at {res} px the loader feeds up to {fed[res][0]:,.0f} images/s (a DataLoader {fed[res][1]:,.0f})")
        if needed:
            said[0] += f", {model} needs {needed[res]:,.0f}"
            slow = ", ".join(str(res) for res in times if times[res] < _ENOUGH)
            verdict = ": the model is the limit at every resolution"
            if slow:
                verdict = f": the loader is the limit at {slow} px; more cores or a lower JPEG quality would help"
    elif needed:
        res, rate = next(reversed(needed.items()))
        live = _median(result["training"]["res"][-1]["loaders"]["ours"])
        said.append(f"at {res} px {model} trains {live:,.0f} images/s, without a loader {rate:,.0f}")
    if "change" in result:
        ours, other = (
            max(0.0, *(_median(each["loaders"][name]["cost_steps"]) for each in stage_costs(result)))
            for name in ("ours", peer)
        )
        said.append(f"a stage change costs at most {ours:.1f} steps (a DataLoader {other:.1f})")
    text = "; ".join(said) + verdict
    return f"{text[0].upper()}{text[1:]}."


def tables(result: Mapping[str, Any]) -> list[Table]:
    """A table for each part; values of several rounds are medians with their range."""
    peer, batch, found = result["peer"]["loader"], result["settings"]["batch_size"], list[Table]()
    titles = {"ours": "ours", peer: "DataLoader"}
    rounds = f"Rounds: {result['rounds']}. DataLoader: {LOADERS[peer].title.partition(', ')[2]}."
    if "loader" in result:
        rows = [
            (
                str(each["res"]),
                *(spread(each["loaders"][name]["images_per_s"]) for name in titles),
                spread(each["loaders"][peer]["ours_times"], 2),
            )
            for each in result["loader"]["res"]
        ]
        heads = ("px", *(f"{title}#" for title in titles.values()), "ours / DataLoader#")
        found.append(("Loaders alone, images/s", heads, rows, f"Batch {batch}. {rounds}"))
    if "training" in result:
        rows = [
            (
                str(each["res"]),
                spread(each["alone"]),
                *(spread(each["loaders"][name]) for name in titles),
                spread(each["headroom"], 2),
            )
            for each in result["training"]["res"]
        ]
        heads = ("px", "model alone#", *(f"with {title}#" for title in titles.values()), "headroom#")
        note = f"Batch {batch}. {rounds} Headroom: model alone / with ours, the gain from an infinitely fast loader."
        found.append((f"Training {result['settings']['model']}, images/s", heads, rows, note))
    if "change" in result:
        titles |= {_REBUILT: "DataLoader, rebuilt"}
        rows = [
            (
                f"{each['from_res']} to {each['to_res']} px",
                *(
                    text
                    for values in (each["loaders"][name] for name in titles)
                    for text in (spread(values["cost_s"], 0, 1e3), spread(values["cost_steps"], 1))
                ),
            )
            for each in stage_costs(result)
        ]
        heads = ("change", *(f"{title}, {unit}#" for title in titles.values() for unit in ("ms", "steps")))
        first = change.first_batches(result["settings"]["threads"])
        note = (
            f"Extra time of the first {first} training steps after a change, batch {result['change']['batch_size']}. "
            f"{rounds} Less than one step may be noise."
        )
        found.append(("Cost of a stage change", heads, rows, note))
    return found


def page(result: Mapping[str, Any]) -> bytes:
    """The HTML page of a result."""
    machine, settings = result["machine"], result["settings"]
    findings = [sentence(result)]
    if settings["device"] == "cpu" and "training" in result:
        *_, last = result["training"]["res"]
        live = _median(last["loaders"]["ours"])
        findings.append(
            f"Loader and model share the cores: at {last['res']} px training runs at {live:,.0f} images/s, "
            f"{100 * live / _median(last['alone']):.0f} % of the model alone."
        )
    if machine["load_before"] > _BUSY:
        findings.append(
            f"Other work ran before this measurement (load average {machine['load_before']}): repeat it on "
            "a quiet machine."
        )
    return figures_page(
        title=f"Benchmark of {result['shards']['name']}",
        subtitle=f"{machine['gpu'] or machine['cpu']}, {machine['cores']} cores, {settings['model']}, "
        f"{result['date']}, commit {result['commit']}, {result['took_s']:.0f} s",
        findings=findings,
        charts=_charts(result),
        tables=tables(result),
    )


def _charts(result: Mapping[str, Any]) -> Iterator[Chart | None]:
    sizes, peer = result["shards"]["resolutions"], result["peer"]["loader"]
    lines: dict[tuple[str, str], list[float]] = {}
    if "loader" in result:
        for name, label in (("ours", ("our loader alone", "a")), (peer, ("torch DataLoader alone", "b"))):
            lines[label] = [_median(each["loaders"][name]["images_per_s"]) for each in result["loader"]["res"]]
    if "training" in result:
        entries = result["training"]["res"]
        lines["model alone", "c"] = [_median(each["alone"]) for each in entries]
        lines["training with ours", "d"] = [_median(each["loaders"]["ours"]) for each in entries]
    if lines:
        x = [float(res) for res in sizes]
        yield chart(
            "Rates by resolution",
            [Series(name=name, colour=colour, kind="dots", x=x, y=y) for (name, colour), y in lines.items()],
            unit="images/s",
            x_name="px",
            marks=[(res, f"{res:g} px") for res in x],
            wide=True,
        )
    if "change" in result:
        runs = {name: rounds[0] for name, rounds in result["change"]["step_s"].items()}
        count = min(len(own) for each in runs.values() for own in each)
        names = {_REBUILT: ("DataLoader, rebuilt", "c"), peer: ("DataLoader, one for all", "b"), "ours": ("ours", "a")}
        yield chart(
            "Time of each training step",
            [
                Series(
                    name=title,
                    colour=colour,
                    x=[float(step) for step in range(count * len(sizes))],
                    y=[1e3 * step_s for own in runs[name] for step_s in own[:count]],
                )
                for name, (title, colour) in names.items()
            ],
            unit="ms",
            marks=[(float(i * count), f"{res} px") for i, res in enumerate(sizes)],
            wide=True,
        )
