"""The figures of README and `docs/` that come from result files, and the only place that words them.

    python -m resolute.benchmarks.figures           # writes them into the pages
    python -m resolute.benchmarks.figures --check   # only says which pages are out of date

A page holds each of them between `<!-- figures: NAME -->` and `<!-- end -->`; what is between is written by this
command. To renew a figure, add the result file, name it in the function here, and run the command.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import argparse
import json
import math
import re
import statistics
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from resolute.errors import ResoluteError
from resolute.files import output_file

from .cli import Parser, command
from .pictures import first_waits
from .record import RESULTS

__all__ = ["BLOCK", "FIGURES", "PAGES", "main", "written"]

_ROOT = Path(__file__).resolve().parents[1]
PAGES = tuple(_ROOT / name for name in ("README.md", "docs/index.md", "docs/benchmarks.md"))
BLOCK = re.compile(r"<!-- figures: (\w+) -->\n.*?<!-- end -->", re.DOTALL)
_LINK = "benchmarks/results/"  # as README links to result files; pages in docs/ go up a folder


@cache
def _read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _file(name: str) -> str:
    return f"[{name}.json]({_LINK}{name}.json)"


def _count(value: float) -> str:
    return f"{value:,.0f}".replace(",", "\u00a0")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows))


def _processor(name: str) -> str:
    machine = _read(name)["machine"]
    return f"{'two' if machine['cores'] == 2 else machine['cores']} cores of an {machine['cpu'].split('(')[0]}"


# ---- whole trainings -----------------------------------------------------------------------------------------------

# progressive against fixed size: result files, and their photos in words; the first is in README's table
_HALVES = {
    "half-imagenette": "Imagenette",
    "half-imagenette-more": "Imagenette, other photos",
    "half-clothing": "clothing",
}
_TRAINING = next(iter(_HALVES))


def _sides(name: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Summaries of the progressive and of the fixed-size recipe."""
    recipes = _read(name)["summary"]["recipes"]
    return recipes["progressive"], recipes["fixed224"]


def _seconds(recipe: Mapping[str, Any]) -> str:
    return f"{recipe['wall_s']['median']:.0f} s"


def _percent(top1: Mapping[str, Any]) -> str:
    return f"{100 * top1['mean']:.1f}"


def _points(recipe: Mapping[str, Any]) -> str:
    """Mean difference to the baseline and its standard error."""
    points = recipe["against"]["points"]
    return f"{points['mean']:+.1f} ± {points['se']:.1f}"


def _tuned_rate(name: str, side: str) -> float:
    result = _read(name)
    return float(tomllib.loads(result["recipes"][side])["optim"]["lr"] * result["tuning"]["sides"][side]["best"])


_WHOLE = ("whole", "whole-large")  # result files of `whole`
_TOOLS = {
    "ours": "Resolute, 96 to 224 px",
    "ours-224": "Resolute, 224 px",
    "plain": "plain PyTorch loop, 96 to 224 px",
    "ffcv": "FFCV in a plain loop, 96 to 224 px",
    "timm": "timm's train.py, 224 px",
    "timm-sizes": "timm's train.py, its schedule of 96 to 224 px",
}


def _wholes(name: str) -> dict[tuple[str, int], Mapping[str, Any]]:
    """{(tool, round): its row of `whole.summary`}; round 1: peers in the time of ours."""
    from .whole import summary

    result = _read(name)
    rows = summary(result)
    numbers = dict.fromkeys((run["tool"], run["round"]) for run in result["runs"])
    return dict(zip(numbers, rows, strict=True))


def _mean(value: Sequence[float], digits: int = 1) -> str:
    return f"{value[0]:.{digits}f} ± {value[1]:.{digits}f}"


def headline() -> str:
    """README's first table: whole trainings, first those with the same sizes."""
    rows, result = _wholes("whole"), _read("whole")
    sizes = {"timm": "224"} | dict.fromkeys(("ours", "plain", "ffcv", "timm-sizes"), "96 to 224")
    names = {
        "ours": "**Resolute**",
        "plain": "plain PyTorch loop",
        "ffcv": "the same loop with FFCV",
        "timm-sizes": "timm's `train.py`, its own sizes",
        "timm": "timm's `train.py`",
    }
    table = []
    for tool, name in names.items():
        row = rows[tool, 0]
        total, prep_s = row["wall_s"][0], row["prep_s"] or 0
        start_s = _start_s(result, tool) - prep_s
        parts = (start_s, prep_s, total - prep_s - start_s, total)
        table.append((name, sizes[tool], f"{_mean(row['top1'])} %", *(f"{part:.0f}" for part in parts)))
    heads = ("tool", "px", "top-1", "start-up, s", "prep, s", "training, s", "total, s")
    seeds, epochs = rows["ours", 0]["seeds"], rows["ours", 0]["epochs"]
    return (
        f"{_table(heads, table)}\n\n"
        f"Wall time from start to exit on {_processor('whole')}, measured on {result['date']} ({_file('whole')}). "
        f"Each tool trains a tiny ResNet for {epochs} epochs on {_count(result['photos'])} original-size photos; means "
        f"of {seeds} seeds, with standard errors."
    )


def _start_s(result: Mapping[str, Any], tool: str) -> float:
    """Mean seconds from a tool's start to its first step, files that it prepares included.

    The end of the first epoch less the median time of the other epochs of the first size.
    """
    first_size = result["case"]["stages"][0][1]  # epochs
    starts = []
    for run in result["runs"]:
        if (run["tool"], run["round"]) == (tool, 0):
            ends = [point["elapsed_s"] for point in run["curve"][:first_size]]
            starts.append(ends[0] - statistics.median(after - before for before, after in pairwise(ends)))
    return statistics.fmean(starts)


def trainings() -> str:
    """Photos to accuracy beside other tools, with equal epochs and in equal time."""
    rows = []
    for name in _WHOLE:
        channels = _read(name)["case"]["model_kwargs"]["channels"]
        network = f"{channels[0]} to {channels[-1]} channels"
        for (tool, number), row in _wholes(name).items():
            equal = row["equal_s"]
            rows.append(
                (
                    network,
                    _TOOLS[tool] + (", in the time of Resolute" if number else ""),
                    str(row["epochs"]),
                    f"{_mean(row['top1'])} %",
                    f"{_mean(row['wall_s'], 0)} s",
                    f"{row['prep_s']:.0f} s" if row["prep_s"] else "",
                    f"{_mean(equal, 0)} s" if equal else "",
                    f"{row['lr']:g}",
                    str(row["workers"]),
                    str(row["seeds"]),
                )
            )
    return _table(
        (
            "network",
            "tool",
            "epochs",
            "top-1",
            "whole command",
            "of it preparing files",
            "until timm's top-1 at 224 px",
            "learning rate",
            "workers",
            "seeds",
        ),
        rows,
    )


def results() -> str:
    """README's table of single parts."""
    switch, noise = _switch_ms(), "no measurable cost"
    rates = [rates["loaders"] for rates in _read("peers")["loader"]["res"]]
    photos = _count(_read(_TRAINING)["shards"]["progressive"]["train_samples"])
    prep = {tool: statistics.mean(took["seconds"]) for tool, took in _read("prep")["seconds"].items()}

    def images_per_s(loader: str) -> str:
        return ", ".join(_count(rate[loader]["images_per_s"]["median"]) for rate in rates)

    ours, fixed = _sides(_TRAINING)
    return _table(
        ("measurement", "Resolute", "compared with", "file"),
        [
            (
                "loading 128, 160, 224 px alone, images/s",
                images_per_s("ours"),
                f"FFCV, raw pixels: {images_per_s('ffcv-raw')}<br>FFCV, JPEGs: {images_per_s('ffcv')}<br>"
                f"DataLoader: {images_per_s('v2')}",
                _file("peers"),
            ),
            (
                f"{_count(_read('prep')['images'])} photos to three sizes",
                f"{prep['prep']:.0f} s",
                f"Pillow bicubic and webdataset: {prep['pillow, bicubic']:.0f} s<br>"
                f"img2dataset: {prep['img2dataset, 3 runs']:.0f} s",
                _file("prep"),
            ),
            (
                f"Imagenette, {photos} photos, 12 epochs of a tiny ResNet to 224 px",
                f"{ours['wall_s']['median']:.0f} s, {_percent(ours['final_top1'])} %",
                f"all epochs at 224 px: {fixed['wall_s']['median']:.0f} s, {_percent(fixed['final_top1'])} %",
                _file(_TRAINING),
            ),
            (
                "lost at 128 → 160 and 160 → 224 px, without a model",
                f"{noise} ({switch['ours']} ms)",
                f"persistent DataLoader: {switch['v2-sized']} ms<br>rebuilt DataLoader: {switch['pillow']} ms",
                _file("peers-switch"),
            ),
        ],
    )


def training() -> str:
    """Progressive against fixed size, each with its own tuned learning rate, on all sets."""
    rows = []
    for name, title in _HALVES.items():
        ours, fixed = _sides(name)
        photos, ratio = _read(name)["shards"]["progressive"], ours["against"]["wall_ratio"]
        rows.append(
            (
                f"{title}, {_count(photos['train_samples'])}",
                _count(photos["val_samples"]),
                *(f"{_percent(side['final_top1'])} %" for side in (ours, fixed)),
                f"{_points(ours)} ({ours['final_top1']['n']} seeds)",
                f"{ratio['median']:.2f}x ({_seconds(ours)} against {_seconds(fixed)})",
                " and ".join(f"{_tuned_rate(name, side):g}" for side in ("progressive", "fixed224")),
                _file(name),
            )
        )
    return _table(
        (
            "training photos",
            "validated on",
            "96 to 224 px",
            "224 px",
            "difference in points ± standard error",
            "whole command",
            "learning rates",
            "file",
        ),
        rows,
    )


class _Row(NamedTuple):
    """A recipe for Imagenette, and its result files.

    `timed`: a run alone on the machine; `seeds`: the accuracy of several.
    """

    recipe: str
    timed: str
    seeds: str

    @property
    def time(self) -> Mapping[str, Any]:
        return _read(self.timed)["summary"]["recipes"][self.recipe]

    @property
    def length(self) -> str:
        return f"{self.time['epochs']['median']:.0f} epochs to {self.time['final_res']} px"

    @property
    def wall_s(self) -> float:
        return float(self.time["wall_s"]["median"])

    @property
    def photos(self) -> tuple[str, str]:
        """Numbers of photos to train and to validate on."""
        shards = _read(self.timed)["shards"][self.recipe]
        return _count(shards["train_samples"]), _count(shards["val_samples"])

    def top1(self, key: str = "ema_top1") -> str:
        top1 = _read(self.seeds)["summary"]["recipes"][self.recipe][key]
        if top1["n"] == 1:
            return f"{100 * top1['mean']:.1f} % (one seed)"
        return f"{100 * top1['mean']:.1f} ± {100 * top1['se']:.1f} % ({top1['n']} seeds)"

    @property
    def files(self) -> str:
        return ", ".join(_file(name) for name in dict.fromkeys((self.timed, self.seeds)))


_OLD, _NEW, *_OTHERS = [
    _Row("imagenette_old", "imagenette-small", "imagenette-small"),  # its time is the budget of the others
    _Row("imagenette_cpu", "imagenette-small", "imagenette-small-seeds"),
    _Row("imagenette_cpu_whole", "imagenette-whole", "imagenette-whole-seeds"),
]
_BOARD = [
    _Row("imagenette_cpu_quick", "imagenette-board", "imagenette-board"),
    _Row("imagenette_20_epochs", "imagenette-board-20", "imagenette-board-20"),
]


def imagenette() -> str:
    """Accuracy and time of the recipes for Imagenette."""
    rows = [
        (
            f"`{row.recipe}.toml`",
            *row.photos,
            row.length,
            row.top1(),
            row.top1("top1"),
            f"{row.wall_s / 60:.1f} min, {row.wall_s / _OLD.wall_s:.2f}x",
            row.files,
        )
        for row in (_OLD, _NEW, *_OTHERS)
    ]
    return _table(
        (
            "recipe",
            "training photos",
            "validated on",
            "length",
            "top-1, averaged weights ± standard error",
            "last weights",
            "whole command",
            "files",
        ),
        rows,
    )


def board() -> str:
    """Imagenette by the rules of its board for 128 px."""
    rows = [
        (
            f"`{row.recipe}.toml`",
            row.length,
            *row.photos,
            row.top1(),
            row.top1("top1"),
            f"{row.wall_s / 60:.1f} min",
            row.files,
        )
        for row in _BOARD
    ]
    return _table(
        (
            "recipe",
            "length",
            "training photos",
            "validated on",
            "top-1, averaged weights ± standard error",
            "last weights",
            "whole command",
            "file",
        ),
        rows,
    )


# {name in techniques.json: description}, in the order of the table's rows
_TECHNIQUES = {
    "base": "Muon, RandAugment, label smoothing, EMA: the baseline",
    "sgd": "SGD instead of Muon",
    "adamw": "AdamW instead of Muon",
    "flat_cosine": "flat-then-cosine learning rate instead of OneCycle",
    "swa": "mean of the last four epochs' weights instead of the EMA",
    "no_smoothing": "without label smoothing",
    "no_policy": "without RandAugment",
    "trivialaugment": "TrivialAugment instead of RandAugment",
    "magnitude_std": "RandAugment's `magnitude_std = 1.5`",
    "rising_magnitude": "RandAugment's magnitude from 4 at 64 px to 12 at 96 px",
    "erasing": "random erasing of a quarter of the samples",
    "cutmix": "CutMix of half of the samples",
    "mixup": "mixup of all samples, alpha 0.2",
    "alternate_flip": "alternating flips",
    "simple_crop": "simple random crops",
    "drop_path": "stochastic depth, 0.1",
    "sam": "*SAM, radius 0.05*, twice the time per step",
    "easy": "*without the easiest quarter of each batch*",
    "repeat": "*repeated augmentation, twice per batch*",
    "dirac": "*convolutions that start as identities*",
    "whiten": "*first convolution that starts with whitening filters*",
}


def techniques() -> str:
    """Change of top-1 in points, with its standard error, from a single change to the baseline's settings."""
    runs = {
        name: {run["seed"]: run for run in _read("techniques")["runs"] if run["technique"] == name}
        for name in _TECHNIQUES
    }
    base = runs.pop("base")

    def points(name: str, key: str) -> list[float]:
        return [100 * (run[key] - base[seed][key]) for seed, run in runs[name].items()]

    def column(key: str) -> tuple[str, dict[str, str]]:
        # why pooled over the rows: two or three seeds are too few to estimate the deviation of one row
        squares = sum(statistics.variance(points(name, key)) * (len(own) - 1) for name, own in runs.items())
        sd = math.sqrt(squares / sum(len(own) - 1 for own in runs.values()))
        return f"{100 * statistics.fmean(run[key] for run in base.values()):.1f} %", {
            name: f"{statistics.fmean(points(name, key)):+.1f} ± {sd / math.sqrt(len(own)):.1f}"
            for name, own in runs.items()
        }

    averaged, last = column("ema_top1"), column("top1")
    rows = [(_TECHNIQUES["base"], averaged[0], last[0], str(len(base)))]
    rows += [(_TECHNIQUES[name], averaged[1][name], last[1][name], str(len(own))) for name, own in runs.items()]
    return _table(("change", "averaged weights", "last weights", "seeds"), rows)


# ---- loaders -------------------------------------------------------------------------------------------------------

_LOADERS = {
    "ours": "Resolute",
    "ffcv-raw": "FFCV 1.0.2, raw pixels",
    "ffcv": "FFCV 1.0.2, JPEG mode",
    "dali": "DALI's own webdataset reader and operators",
    "v2": "torch DataLoader, torchvision v2",
    "webdataset": "webdataset's loader, torchvision v2",
    "timm-plain": "timm's loader, without its prefetcher",
    "timm": "timm's loader",
    "pillow": "torch DataLoader, Pillow",
}


def peers() -> str:
    """Rates of all loaders with batches of 256, each with its faster number of workers or threads."""
    rates = _read("peers")["loader"]["res"]

    def cell(rate: Mapping[str, Any], loader: str) -> str:
        values = rate["loaders"][loader]
        return f"{_count(values['images_per_s']['median'])} ({values['cpu_s_per_1000']['median']:.2f})"

    def counts(loader: str) -> list[str]:
        chosen = [rate["loaders"][loader] for rate in rates]
        names = ("workers", "threads")
        return [", ".join(map(str, dict.fromkeys(values[name] for values in chosen))) for name in names]

    rows = [(title, *(cell(rate, loader) for rate in rates), *counts(loader)) for loader, title in _LOADERS.items()]
    header = ("images/s (CPU seconds per 1 000 images)", *(f"{rate['res']} px" for rate in rates), "workers", "threads")
    files = _read("peers")["ffcv"]["ffcv-raw"]["res"].values()
    times = sum(each["file_bytes"] for each in files) / sum(each["jpeg_bytes"] for each in files)
    return f"{_table(header, rows)}\n\nFFCV's files of raw pixels take {times:.1f} times the disk space of the JPEGs."


def _switch_ms() -> dict[str, str]:
    """{loader: "29 and 20"}: ms lost at both changes, medians."""
    changes = _read("peers-switch")["change"]["consumers"]["drained"]["changes"]
    return {
        loader: " and ".join(f"{change['loaders'][loader]['cost_s']['median'] * 1e3:.0f}" for change in changes)
        for loader in changes[0]["loaders"]
    }


def switch() -> str:
    """Time lost by a loop that only takes batches."""
    lost, result = _switch_ms(), _read("peers-switch")
    names = {
        "ours": "Resolute",
        "v2-sized": "one persistent DataLoader whose sampler yields the size",
        "timm-scheduled": "timm's loader with `input_size_choices`",
        "ffcv-output-size": "FFCV with `output_size`",
        "pillow": "a DataLoader that is rebuilt",
    }
    table = _table(
        ("loader", "ms lost at 128 → 160 and 160 → 224 px"), [(name, lost[key]) for key, name in names.items()]
    )
    return (
        f"{table}\n\nA loop without a model takes batches of {result['settings']['batch_size']}; medians of "
        f"{result['rounds']} rounds ({_file('peers-switch')})."
    )


def changes() -> str:
    """Time lost at each kind of change."""
    lost = {change["kind"]: change["lost_steps"]["median"] for change in _read("changes-xeon")["changes"]}
    kinds = {
        "a new epoch": ("epoch to epoch",),
        "training to validation": ("training to validation",),
        "and back": ("validation to training",),
        "resolution": ("resolution, up", "resolution, down"),
        "batch size": ("batch size, half", "batch size, double"),
        "fraction": ("fraction 1 to 0.7", "fraction 0.7 to 1"),
        "augmentation": ("augmentation on", "augmentation off"),
        "order": ("order, full to block", "order, block to full"),
        "all at once": ("all at once",),
    }
    cells = [", ".join(f"{lost[name]:.2f}".replace("-0.00", "0.00") for name in names) for names in kinds.values()]
    return _table(list(kinds), [cells])


def picture() -> str:
    """The caption of the stage-change picture."""
    slowest = {
        name: " and ".join(f"{max(waits[:5]) * 1e3:.0f}" for waits in stages[1:])
        for name, stages in first_waits(_read("bench-cpu")).items()
    }
    return (
        f"Longest waits for a batch of 64 at the two changes: {slowest['ours']} ms with Resolute. With a DataLoader "
        f"that is rebuilt for the new size: {slowest['peer']} ms. The model is replaced by a fixed pause per step "
        f"({_file('bench-cpu')}, first round)."
    )


def gpu() -> str:
    """The loader's rates and training on live data on a GPU."""
    result = _read("gpu-check-h200")
    values = {part["part"]: part["values"] for part in result["parts"]}
    machine = result["machine"]
    rows = []
    for size in result["settings"]["resolutions"]:
        images = values["training"][str(size)]["images_per_s"]
        live, synthetic = (images[kind]["median"] for kind in ("live", "synthetic"))
        rows.append(
            (
                f"{size} px",
                _count(values["loader"][f"{size} plain"]["images_per_s"]),
                _count(live),
                f"{live / synthetic:.3f}",
            )
        )
    heads = (f"{machine['gpu']}, {machine['cores']} CPU cores", "loader, images/s", "ResNet-50, images/s")
    return (
        f"{_table((*heads, 'compared with synthetic images'), rows)}\n\n"
        f"Measured once; a change of resolution has no measurable cost ({_file('gpu-check-h200')})."
    )


# ---- prep ----------------------------------------------------------------------------------------------------------


def prep() -> str:
    """Prep beside other converters."""
    from .prep.__main__ import FEW

    result = _read("prep")

    def rates(tool: str) -> tuple[str, str]:
        seconds = result["seconds"][tool]
        took = statistics.median(seconds["seconds"])
        steady = (result["images"] - FEW) / (took - statistics.median(seconds["few_seconds"]))
        return f"{result['images'] / took:.0f}", f"{steady:.0f}"

    def lowest(reference: str) -> str:
        return f"{min(result['psnr_db'][reference].values()):.1f} dB"

    return _table(
        ("tool", "images/s", "steady", "PSNR before JPEG, lowest mean of the three sizes"),
        [
            (
                "Resolute, one pass, hashed and synced",
                *rates("prep"),
                f"{lowest('bicubic')} to bicubic, {lowest('lanczos')} to Lanczos",
            ),
            ("Pillow Lanczos + webdataset ShardWriter, one pass", *rates("pillow + ShardWriter"), ""),
            ("Pillow bicubic + webdataset ShardWriter, one pass", *rates("pillow, bicubic"), ""),
            (f"img2dataset {result['versions']['img2dataset']}, once per size", *rates("img2dataset, 3 runs"), ""),
        ],
    )


def soak() -> str:
    """The latest soak over all scenarios but train-all."""
    result = _read("soak")
    findings = len(result["findings"])
    return (
        f"{result['kills']} kills and {result['faults']} storage faults in {result['elapsed_s'] / 60:.0f} minutes: "
        f"{findings or 'no'} findings ({_file('soak')})."
    )


FIGURES: Mapping[str, Callable[[], str]] = {
    figure.__name__: figure
    for figure in (
        headline,
        results,
        trainings,
        training,
        imagenette,
        board,
        techniques,
        peers,
        switch,
        changes,
        picture,
        gpu,
        prep,
        soak,
    )
}


def written(text: str, *, folder: str = "") -> str:
    """`text` of a page with all its figures as the result files have them now.

    folder: of the page, relative to the repository's root. Raises `ResoluteError` for an unknown figure.
    """

    def block(match: re.Match[str]) -> str:
        name = match[1]
        if name not in FIGURES:
            raise ResoluteError(f"figures: got {name}, expected one of {', '.join(FIGURES)}; correct the page")
        figure = FIGURES[name]().replace(f"]({_LINK}", f"]({'../' * len(Path(folder).parts)}{_LINK}")
        return f"<!-- figures: {name} -->\n\n{figure}\n\n<!-- end -->"

    if text.count("<!-- figures:") != len(BLOCK.findall(text)):
        raise ResoluteError("figures: got a block without its end, expected <!-- end --> after each; correct the page")
    return BLOCK.sub(block, text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = Parser(prog="python -m resolute.benchmarks.figures", description="Write the figures of README and docs/.")
    parser.add_argument("--check", action="store_true", help="write nothing; status 2 if a page is out of date")

    def work(args: argparse.Namespace) -> None:
        stale = []
        for page in PAGES:
            text = page.read_text(encoding="utf-8")
            new = written(text, folder=str(page.parent.relative_to(_ROOT)))
            if new == text:
                continue
            if args.check:
                stale.append(str(page.relative_to(_ROOT)))
                continue
            with output_file(page) as file:
                file.write(new.encode())
            print(f"written: {page.relative_to(_ROOT)}")
        if stale:
            raise ResoluteError(
                f"{', '.join(stale)}: got other figures than the result files have, expected the same; "
                "run `python -m resolute.benchmarks.figures`"
            )

    return command(parser, work, argv)


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
