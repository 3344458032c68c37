"""The figures of README and `docs/` that come from result files, with the sentences around them.

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
from .record import RESULTS

__all__ = ["BLOCK", "FIGURES", "PAGES", "main", "written"]

_ROOT = Path(__file__).resolve().parents[1]
PAGES = tuple(
    _ROOT / name for name in ("README.md", "docs/index.md", "docs/benchmarks.md", "docs/gpu.md", "docs/validation.md")
)
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

# progressive and fixed size: result files, and their photos in words; the first is in the table of single parts
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


def _with_error(top1: Mapping[str, Any]) -> str:
    """Mean, standard error and number of seeds."""
    return f"{_percent(top1)} ± {100 * top1['se']:.1f} % ({top1['n']} seeds)"


def _points(recipe: Mapping[str, Any]) -> str:
    """Mean difference to the baseline and its standard error."""
    points = recipe["against"]["points"]
    return f"{points['mean']:+.1f} ± {points['se']:.1f}"


def _tuned_rate(name: str, side: str) -> float:
    result = _read(name)
    return float(tomllib.loads(result["recipes"][side])["optim"]["lr"] * result["tuning"]["sides"][side]["best"])


_WHOLE = ("whole", "whole-large")  # result files of `whole`
_SIZES = "96 to 224"
_TOOLS = {  # {tool: (name, px)}, first those with the same sizes and the same validation; some are not measured yet
    "ours": ("**Resolute**", _SIZES),
    "plain": ("plain PyTorch loop", _SIZES),
    "ffcv": ("the same loop with FFCV", _SIZES),
    "plain-once": ("plain loop, photos resized once", _SIZES),
    "timm-sizes": ("timm's `train.py`, its own sizes", _SIZES),
    "timm": ("timm's `train.py`", "224"),
    "ours-224": ("Resolute", "224"),
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


def _start_s(result: Mapping[str, Any], tool: str) -> float:
    """Mean seconds that a tool's first epoch takes longer than its second: starting and compiling."""
    curves = [run["curve"] for run in result["runs"] if (run["tool"], run["round"]) == (tool, 0)]
    return statistics.fmean(2 * first["elapsed_s"] - second["elapsed_s"] for first, second, *_ in curves)


def _parts(name: str, tool: str) -> tuple[str, ...]:
    """Seconds of a tool's start-up, prep and training, and their sum, which starts before prep."""
    row = _wholes(name)[tool, 0]
    total, prep_s, start_s = row["wall_s"][0], row["prep_s"], _start_s(_read(name), tool)
    return tuple(f"{seconds:.0f}" for seconds in (start_s, prep_s, total - prep_s - start_s, total))


_PARTS = ("start-up, s", "prep, s", "training, s", "total, s")


def headline() -> str:
    """README's first table: whole trainings."""
    rows, result = _wholes("whole"), _read("whole")
    table = [
        (name, px, _mean(rows[tool, 0]["top1"]), *_parts("whole", tool))
        if (tool, 0) in rows
        else (name, px, "not measured yet", *[""] * len(_PARTS))
        for tool, (name, px) in _TOOLS.items()
    ]
    large = _wholes("whole-large")
    ours_s, plain_s = (large[tool, 0]["wall_s"][0] for tool in ("ours", "plain"))
    return (
        f"{_table(('tool', 'px', 'top-1, %', *_PARTS), table)}\n\n"
        f"Wall time from start to exit on {_processor('whole')}, measured on {result['date']} ({_file('whole')}). "
        f"Each tool trains a tiny ResNet for {rows['ours', 0]['epochs']} epochs on {_count(result['photos'])} "
        f"original-size photos; means of {rows['ours', 0]['seeds']} seeds, with standard errors. "
        "Start-up is the time by which the first epoch is longer than the second. "
        f"With a wider network, Resolute takes {ours_s:.0f} s and the plain loop {plain_s:.0f} s "
        f"({_file('whole-large')}). "
        "timm validates at 224 px after every epoch, the other tools at the size of training. "
        "FFCV compiles in each run. Resolute compiled in its first run and first preparation; both were "
        f"[replaced]({_LINK}LOG.md) by later ones."
    )


def trainings() -> str:
    """Photos to accuracy with several tools: with equal epochs for each network, and in the time of Resolute."""
    parts = []
    for name in _WHOLE:
        rows, result = _wholes(name), _read(name)
        channels, first = result["case"]["model_kwargs"]["channels"], rows["ours", 0]
        table = [
            (
                *_TOOLS[tool],
                _mean(row["top1"]),
                *_parts(name, tool)[:-1],
                _mean(row["wall_s"], 0),
                f"{row['lr']:g}",
                str(row["workers"]),
            )
            for tool in _TOOLS
            if (row := rows.get((tool, 0)))
        ]
        parts.append(
            f"#### {channels[0]} to {channels[-1]} channels\n\n"
            f"{first['epochs']} epochs, {first['seeds']} seeds, measured on {result['date']} ({_file(name)}).\n\n"
            f"{_table(('tool', 'px', 'top-1, %', *_PARTS, 'learning rate', 'workers'), table)}"
        )
    rows = _wholes(_WHOLE[0])
    shorter = [
        (*_TOOLS[tool], str(row["epochs"]), _mean(row["top1"]), _mean(row["wall_s"], 0), str(row["seeds"]))
        for tool in _TOOLS
        for row in [rows.get((tool, int(tool != "ours")))]
        if row and tool != "ours-224"
    ]
    heads = ("tool", "px", "epochs", "top-1, %", _PARTS[-1], "seeds")
    return "\n\n".join([*parts, f"#### As many epochs as fit into the time of Resolute\n\n{_table(heads, shorter)}"])


def results() -> str:
    """The table of single parts."""
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
                f"Imagenette, {photos} photos, 12 epochs of a tiny ResNet to 224 px, time and top-1",
                f"{ours['wall_s']['median']:.0f} s, {_percent(ours['final_top1'])} %",
                f"Resolute, all epochs at 224 px: {fixed['wall_s']['median']:.0f} s, {_percent(fixed['final_top1'])} %",
                _file(_TRAINING),
            ),
            (
                "ms lost at 128 → 160 and 160 → 224 px, without a model",
                _lost("ours"),
                f"persistent DataLoader: {_lost('v2-sized')}<br>rebuilt DataLoader: {_lost('pillow')}",
                _file("peers-switch"),
            ),
        ],
    )


def training() -> str:
    """Progressive and fixed size, each with its own tuned learning rate, on all sets."""
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
                *(_seconds(side) for side in (ours, fixed)),
                f"{ratio['median']:.2f}",
                ", ".join(f"{_tuned_rate(name, side):g}" for side in ("progressive", "fixed224")),
                _file(name),
            )
        )
    return _table(
        (
            "training photos",
            "validated on",
            "top-1, 96 to 224 px",
            "224 px",
            "difference in points ± standard error",
            "wall time, 96 to 224 px",
            "224 px",
            "ratio",
            "learning rates",
            "file",
        ),
        rows,
    )


_FINE_TUNED = {"finetune-clothing": "clothing", "finetune-imagenette": "Imagenette"}


def fine_tuning() -> str:
    """Accuracy and time of fine-tuning and of the same network from random weights."""
    rows = []
    for name, title in _FINE_TUNED.items():
        if not (RESULTS / f"{name}.json").exists():
            continue
        result = _read(name)
        recipes, photos = result["summary"]["recipes"], result["shards"]["finetune_lite0"]
        tuned, scratch = (recipes[side] for side in ("finetune_lite0", "scratch_lite0"))
        rows.append(
            (
                f"{title}, {_count(photos['train_samples'])}",
                _count(photos["val_samples"]),
                *(_with_error(side["final_top1"]) for side in (tuned, scratch)),
                *(_seconds(side) for side in (tuned, scratch)),
                _file(name),
            )
        )
    heads = (
        "training photos",
        "validated on",
        "top-1, fine-tuned",
        "from random weights",
        "wall time, fine-tuned",
        "from random weights",
        "file",
    )
    return _table(heads, rows)


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
_LEADERBOARD = [
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
            f"{row.wall_s / 60:.1f} min ({row.wall_s / _OLD.wall_s:.2f})",
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
            "wall time (ratio to the first row)",
            "files",
        ),
        rows,
    )


def siblings() -> str:
    """What near copies of training photos among the validation photos do to top-1, and what GROUP changes."""
    result = _read("siblings")
    heads = ("the photos are divided", "all validation photos", "without a near copy in train", "other photos", "file")
    names = {"at random": "at random", "GROUP": "with `--group`"}
    rows = [
        (
            name,
            *(
                _with_error(figures[key]) if key in figures else ""
                for key in ("top1", "without_near_copies", "true_top1")
            ),
            _file("siblings"),
        )
        for side, name in names.items()
        for figures in [result["summary"][side]]
    ]
    return _table(heads, rows)


def near_copies() -> str:
    """Planted copies that are recognised, and pairs of different photos that are taken for copies, by kind."""
    from .near_copies.copies import ONLY_REPORTED

    result = _read("near_copies")
    at = [result["thresholds"].index(threshold) for threshold in (0.90, 0.95)]
    rows = []
    for kind, found in result["kinds"].items():
        right = [found["recognised"][i] for i in at]
        wrong = [found["wrong"][i] for i in at]
        rows.append(
            (
                kind + ("*" if kind in ONLY_REPORTED else ""),
                f"{100 * found['candidates'] / found['copies']:.1f} %",
                *(f"{100 * count / found['copies']:.1f} %" for count in right),
                *(f"{_count(count)} of {_count(count + of)}" for count, of in zip(wrong, right, strict=True)),
            )
        )
    heads = ("copy", "found by the index", "scores ≥ 0.90", "≥ 0.95", "wrong pairs ≥ 0.90", "≥ 0.95")
    heads = ("copy", "found by the index", "scores ≥ 0.90", "≥ 0.95", "wrong pairs ≥ 0.90", "≥ 0.95")
    costs = []
    for source, times in result["prep"].items():
        none, find = (statistics.median(times[setting]["seconds"]) for setting in ("none", "find"))
        costs.append((f"`{source}`", f"{find:.1f} s", f"{none:.1f} s", f"{100 * (find / none - 1):+.0f} %"))
    search = result["search"]
    parts = [
        f"Copies of {_count(result['planted_photos'])} photos, among {_count(sum(result['sources'].values()))} photos "
        f"({_file('near_copies')}). The method is not made for kinds with a star.",
        _table(heads, rows),
        "Time of prep. The photos of the last set have the size that a camera gave them, the others are small:",
        _table(("photos", "with the search", "without", "difference"), costs),
        "The search alone, with made-up descriptors:",
        _table(
            ("photos that are looked up", "photos", "time", "memory"),
            [
                (
                    _count(search["asking"]),
                    _count(search["photos"]),
                    f"{search['seconds']:.0f} s",
                    f"{search['peak_mib'] / 1024:.1f} GiB",
                )
            ],
        ),
    ]
    return "\n\n".join(parts)


def leaderboard() -> str:
    """Imagenette by the rules of its leaderboard for 128 px."""
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
        for row in _LEADERBOARD
    ]
    return _table(
        (
            "recipe",
            "length",
            "training photos",
            "validated on",
            "top-1, averaged weights ± standard error",
            "last weights",
            "wall time",
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
    ratios = [
        (
            title,
            *(
                f"{rate['loaders']['ours']['images_per_s']['median'] / each['images_per_s']['median']:.2f}"
                for rate in rates
                for each in [rate["loaders"][loader]]
            ),
            _psnr(loader),
        )
        for loader, title in _LOADERS.items()
    ]
    heads = ("rate of Resolute / rate of the loader", *(f"{rate['res']} px" for rate in rates), "PSNR to Pillow, dB")
    return (
        f"{_table(header, rows)}\n\n{_table(heads, ratios)}\n\n"
        f"FFCV's files of raw pixels take {times:.1f} times the disk space of the JPEGs. PSNR is the range over sizes "
        f"and crops, compared with Pillow's antialiased bilinear resize ({_file('peers')}, {_read('peers')['date']})."
    )


def _psnr(loader: str) -> str:
    """Lowest and highest mean PSNR of a loader's images over all sizes and crops; empty if it was not measured."""
    values = [each["psnr_db"][loader] for each in _read("peers")["quality"] if loader in each["psnr_db"]]
    return f"{min(values):.0f} to {max(values):.0f}" if values and loader != "pillow" else ""


def _lost(loader: str) -> str:
    """Time that a loop without a model loses at both changes, ms: medians, or that nothing can be measured."""
    changes = [
        change["loaders"][loader]["cost_s"]
        for change in _read("peers-switch")["change"]["consumers"]["drained"]["changes"]
    ]
    if all(min(cost["raw"]) <= 0 for cost in changes):
        return "no measurable cost"
    return ", ".join(f"{cost['median'] * 1e3:.0f}" for cost in changes)


def switch() -> str:
    """Time lost by a loop that only takes batches."""
    result = _read("peers-switch")
    changes = result["change"]["consumers"]["drained"]["changes"]
    names = {
        "ours": "Resolute",
        "v2-sized": "one persistent DataLoader whose sampler yields the size",
        "timm-scheduled": "timm's loader with `input_size_choices`",
        "ffcv-output-size": "FFCV with `output_size`",
        "pillow": "a DataLoader that is rebuilt",
    }

    def cell(cost: Mapping[str, Any]) -> str:
        median, lowest, highest = (
            round(1e3 * seconds) for seconds in (cost["median"], min(cost["raw"]), max(cost["raw"]))
        )
        return f"{median} ({lowest} to {highest})"

    heads = ("ms lost: median (lowest to highest)", *(f"{each['from_res']} → {each['to_res']} px" for each in changes))
    rows = [(name, *(cell(each["loaders"][loader]["cost_s"]) for each in changes)) for loader, name in names.items()]
    return (
        f"{_table(heads, rows)}\n\nA loop without a model takes batches of {result['settings']['batch_size']}, in "
        f"{result['rounds']} rounds on {result['date']} ({_file('peers-switch')})."
    )


def picture() -> str:
    """The caption of the stage-change picture."""
    return (
        f"The picture is older: one round of {_read('bench-cpu')['date']}, with a fixed pause in place of a model "
        f"({_file('bench-cpu')})."
    )


def storage() -> str:
    """Share of its time that a simulated model waits for batches, by storage."""
    result = _read("storage-tars")
    names = {
        "page cache": "local folder, in the page cache",
        "20 ms per sample": "local folder, 20 ms added to every sample",
        "store, empty cache": "object store, empty cache",
    }
    rows = [
        (
            names[row["name"]],
            row["order"],
            *([f"{100 * epoch['stall_frac']:.1f} %" for epoch in row["epochs"]] + [""])[:2],
        )
        for row in result["rows"]
        if row["name"] in names
    ]
    settings = result["settings"]
    return (
        f"{_table(('storage', 'order', 'waiting, first epoch', 'second epoch'), rows)}\n\n"
        f"The store answers after {settings['latency_ms']} ms and sends {settings['total_mib_per_s']} MiB/s "
        f"({_file('storage-tars')}, {result['date']})."
    )


def _gpu_parts() -> Mapping[str, Any]:
    """{part: values} of the check on a GPU."""
    return {part["part"]: part["values"] for part in _read("gpu-check-h200")["parts"]}


def _live_and_synthetic(values: Mapping[str, Any]) -> tuple[float, float]:
    live, synthetic = (values["images_per_s"][kind]["median"] for kind in ("live", "synthetic"))
    return live, synthetic


def gpu() -> str:
    """The loader's rates and training on live data on a GPU."""
    result, values = _read("gpu-check-h200"), _gpu_parts()
    machine = result["machine"]
    rows = []
    for size in result["settings"]["resolutions"]:
        live, synthetic = _live_and_synthetic(values["training"][str(size)])
        loaded = values["loader"][f"{size} plain"]["images_per_s"]
        rows.append((f"{size} px", _count(loaded), _count(live), f"{live / synthetic:.3f}"))
    heads = (f"{machine['gpu']}, {machine['cores']} CPU cores", "loader, images/s", "ResNet-50, images/s")
    cost = max(abs(each["cost_s"]) / each["steady_s"] for each in values["switch"]["costs"])
    return (
        f"{_table((*heads, 'ratio to synthetic images'), rows)}\n\n"
        f"Measured once, on {result['date']} ({_file('gpu-check-h200')}); no other tool was measured. "
        f"A change of resolution costs less than {math.ceil(100 * cost)} % of a step."
    )


def gpu_training() -> str:
    """All rates of the check on a GPU, by resolution."""
    result, values = _read("gpu-check-h200"), _gpu_parts()
    sizes = result["settings"]["resolutions"]

    def loader(kind: str, value: Callable[[Mapping[str, Any]], str]) -> list[str]:
        return [value(values["loader"][f"{size} {kind}"]) for size in sizes]

    def rates(kind: str) -> list[str]:
        return [_count(values["training"][str(size)]["images_per_s"][kind]["median"]) for size in sizes]

    def ratios(images_per_s: Mapping[str, Any]) -> str:
        rounds = zip(images_per_s["live"]["raw"], images_per_s["synthetic"]["raw"], strict=True)
        each = [live / synthetic for live, synthetic in rounds]
        return f"{min(each):.3f} to {max(each):.3f}"

    batch, largest = _count(result["settings"]["train_batch_size"]), str(sizes[-1])
    compiled = values["compiled"][largest]["images_per_s"]
    blanks = [""] * (len(sizes) - 1)
    rows = [
        (
            f"loader alone, batches of {_count(result['settings']['batch_size'])}, images/s",
            *loader("plain", lambda each: _count(each["images_per_s"])),
        ),
        (
            "the same with RandAugment, mixing and erasing, images/s",
            *loader("policy", lambda each: _count(each["images_per_s"])),
        ),
        ("cores that the loader keeps busy", *loader("plain", lambda each: f"{each['cores']:.1f}")),
        (
            "cores for 1\u00a0000 images/s",
            *loader("plain", lambda each: f"{1000 * each['cores'] / each['images_per_s']:.2f}"),
        ),
        (f"ResNet-50, bf16, batches of {batch}, on the loader's batches, images/s", *rates("live")),
        ("ResNet-50 on one synthetic batch, images/s", *rates("synthetic")),
        (
            "ratio of both, lowest and highest of three rounds",
            *(ratios(values["training"][str(size)]["images_per_s"]) for size in sizes),
        ),
        ("the same ratio with `compile = true`", *blanks, ratios(compiled)),
        ("rate with `compile = true`, images/s", *blanks, _count(compiled["live"]["median"])),
    ]
    return (
        f"{_table(('measurement', *(f'{size} px' for size in sizes)), rows)}\n\n"
        f"From {_file('gpu-check-h200')}, measured on {result['date']}."
    )


def gpu_changes() -> str:
    """What a change of resolution costs on a GPU."""
    result, switch = _read("gpu-check-h200"), _gpu_parts()["switch"]
    sizes = result["settings"]["resolutions"]
    rows = [
        (f"{before} → {after} px", *(f"{1e3 * cost[key]:.1f}" for key in ("cost_s", "noise_s", "steady_s")))
        for (before, after), cost in zip(pairwise(sizes), switch["costs"], strict=True)
    ]
    heads = ("change", "ms lost in the first five steps", "noise of five steps, ms", "a usual step, ms")
    return (
        f"{_table(heads, rows)}\n\nThe warm-up before the run tunes cuDNN for all shapes of training and "
        f"validation; it took {switch['warm_up_s']:.0f} s."
    )


def gpu_peers() -> str:
    """The tables of `benchmarks/gpu.py`, of each GPU that it ran on."""
    from .gpu import tables

    names = [path.stem for path in sorted(RESULTS.glob("gpu-*.json")) if not path.stem.startswith("gpu-check")]
    if not names:
        return "Not measured yet: no GPU was there since this program was written."
    return "\n\n".join(f"```text\n{tables(_read(name))}\n```\n\nFrom {_file(name)}." for name in names)


def gpu_decoders() -> str:
    """Rates of the ways to decode on a GPU."""
    values = _gpu_parts()["decoders"]
    names = {
        "cpu None": "CPU",
        "whole 0.0": "CUDA kernels (`hw_decoder_load=0`)",
        "whole 0.65": "65 % by the JPEG engine (DALI's default)",
        "whole 1.0": "all by the JPEG engine (Resolute's setting)",
    }
    rows = [
        (name, _count(values[key]["images_per_s"]), f"{values[key]['cores']:.1f}", f"{values[key]['error']:.3f}")
        for key, name in names.items()
    ]
    return _table(("decoder", "images/s", "cores", "mean difference from the CPU's pixels, of 255"), rows)


# ---- prep ----------------------------------------------------------------------------------------------------------


def prep() -> str:
    """Prep and other converters."""
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
        ("tool", "images/s", "images/s without start-up", "PSNR before JPEG, lowest mean of the three sizes"),
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
    """The latest soaks."""
    names = {"soak": "all scenarios but the next", "soak-train-all": "`train-all`: a run with many settings on"}
    rows = []
    for name, scenarios in names.items():
        result = _read(name)
        minutes = f"{result['elapsed_s'] / 60:.0f}"
        counts = (str(result["kills"]), str(result["faults"]), minutes, str(len(result["findings"])))
        rows.append((scenarios, *counts, result["date"], _file(name)))
    return _table(("scenarios", "kills", "storage faults", "minutes", "findings", "date", "file"), rows)


FIGURES: Mapping[str, Callable[[], str]] = {
    figure.__name__: figure
    for figure in (
        headline,
        results,
        trainings,
        training,
        imagenette,
        fine_tuning,
        siblings,
        near_copies,
        leaderboard,
        techniques,
        peers,
        switch,
        picture,
        storage,
        gpu,
        gpu_training,
        gpu_changes,
        gpu_peers,
        gpu_decoders,
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
