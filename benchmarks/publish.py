"""`resolute bench-all`: measures everything that README and docs/ show, in the order of the pages.

Each measurement is a program of this package in a process of its own, which writes one result file. With `--publish`,
these are the files in benchmarks/results, and the pages and pictures are written from them at the end; they need a
commit without changes. The same command again continues: a file that today's code has measured with the same command is
kept. Nothing is measured while other work uses the processor.
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from resolute.console import without_folders
from resolute.errors import ResoluteError
from resolute.files import write_errors

from . import figures
from .cli import chosen
from .options import BenchAllOptions
from .record import CODE, RESULTS, commit

__all__ = ["MEASUREMENTS", "Measurement", "busy_cores", "is_current", "main", "shown"]

_ROOT = Path(__file__).resolve().parents[1]
_BUSY = 0.1  # cores that other work may use
_LOOK_S = 3.0  # time over which the use of the cores is averaged
_CALM_S = 300.0  # how long to wait for other work to end
_WEIGHTS = Path("lite0/model.safetensors")  # in the checkout, as benchmarks/recipes/finetune_lite0.toml names it


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A result file and its command.

    words: a template of the command. {data}: the folder of the data sets; {work}: of working files; {results}: of the
    result files; {timm}: a checkout of timm; {ffcv}, {img2dataset}: interpreters that have these packages. sets: names
    of the shard sets that it reads, or whose prep has to run before, so that its functions are compiled; they are made
    in {work} if they are missing. rates: name of the result that the learning rate is taken from. weights: whether it
    needs the folder lite0 with pretrained weights.
    """

    name: str
    words: str
    sets: tuple[str, ...] = ()
    rates: str = ""
    weights: bool = False

    def command(self, places: Mapping[str, str], out: Path) -> list[str]:
        """The words after the interpreter. Raises `ResoluteError` if the result with the rates is not finished."""
        words = [word.format_map(places) for word in self.words.split()]
        if self.rates:
            words += ["--lr", _learning_rates(Path(places["results"], f"{self.rates}.json"))]
        return ["-m", *words, "--out", str(out)]


def _learning_rates(path: Path) -> str:
    """TOOL=RATE,… of a result of `whole --rates`, one rate for all: that with the highest mean top-1 over the tools.

    A rate for each tool would be chosen by a single training. Raises `ResoluteError`.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        tools, runs = [*result["rates"]], result["runs"]
        if result["missing"]:
            raise ValueError(f"{result['missing']} trainings that are missing")
        top1: dict[float, list[float]] = {run["lr"]: [] for run in runs}
        for run in runs:
            top1[run["lr"]].append(run["top1"])
        best = max(top1, key=lambda lr: statistics.fmean(top1[lr]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        got = error.strerror if isinstance(error, OSError) else error
        raise ResoluteError(
            f"{path}: got {got}, expected a finished result of `whole --rates`; measure it first, with "
            f"--only {path.stem}"
        ) from None
    return ",".join(f"{tool}={best:g}" for tool in tools)


# {placeholder: the option without which its measurements are left out}
_NEEDED = {"timm": "--timm", "ffcv": "--ffcv-python", "img2dataset": "--img2dataset"}
_CLOTHING = "--photos {data}/clothing10 --val-list {data}/clothing10.val.txt"
_TUNING = "--photos {data}/imagenette224 --val-list {data}/imagenette224.val.txt"
_PEERS = "--timm {timm} --ffcv-python {ffcv}"
_WHOLE = "resolute.benchmarks.whole"
# for the tiny network two thirds of the steps of the training that follows, for the wider one about as many
_RATES = "--rates 0.03,0.1,0.3 --epochs 96=2,224=1"
_RATES_LARGE = "--case large --rates 0.03,0.1,0.3 --epochs 96=1,224=1"
_SAME_SIZES = ("ours", "plain-once", "plain", "ffcv", "timm-sizes-once", "timm-sizes")
_LARGE = "--case large --epochs 96=3,128=1,160=1,224=1"
# the folder of photos and the sizes of each set of shards
_SETS = {"clothing": ("clothing10", "128,160,224"), "imagenette": ("imagenette224_more", "128,160,224")}
MEASUREMENTS = (
    Measurement(name="demo", words="resolute.benchmarks.demo --picture {picture}"),
    Measurement(name="whole-rates", words=f"{_WHOLE} {_TUNING} {_PEERS} {_RATES} --work {{work}}/rates"),
    Measurement(
        name="whole",
        words=f"{_WHOLE} {_CLOTHING} {_PEERS} --seeds 0,1,2,3,4 --work {{work}}/whole",
        sets=("clothing",),
        rates="whole-rates",
    ),
    Measurement(  # does the common rate of 0.1 put a tool at a disadvantage?
        name="whole-high-rate",
        words=f"{_WHOLE} {_CLOTHING} {_PEERS} --tools {','.join(_SAME_SIZES)} --seeds 0,1,2,3,4 --work {{work}}/high "
        f"--lr {','.join(f'{tool}=0.3' for tool in _SAME_SIZES)}",
        sets=("clothing",),
    ),
    Measurement(
        name="whole-rates-large",
        words=f"{_WHOLE} {_TUNING} {_PEERS} {_RATES_LARGE} --work {{work}}/rates-large",
    ),
    Measurement(
        name="whole-large",
        words=f"{_WHOLE} {_CLOTHING} {_PEERS} {_LARGE} --seeds 0,1,2 --work {{work}}/large",
        sets=("clothing",),
        rates="whole-rates-large",
    ),
    Measurement(
        name="peers",
        words="resolute.benchmarks.loader --shards {work}/clothing --batch-size 256 --seconds 2 --rounds 3 "
        "--ffcv-python {ffcv} --only ours,ffcv-raw,ffcv,dali,simplejpeg-sized,v2,webdataset,timm-plain,timm,pillow",
        sets=("clothing",),
    ),
    Measurement(
        name="prep",
        words="resolute.benchmarks.prep --src {data}/clothing10 --copies 3 --rounds 3 --img2dataset {img2dataset}",
    ),
    Measurement(
        name="peers-switch",
        words="resolute.benchmarks.change --shards {work}/clothing --rounds 5 --ffcv-python {ffcv} "
        "--only ours,pillow,v2-sized,timm-scheduled,ffcv-output-size",
        sets=("clothing",),
    ),
    Measurement(name="bench", words="resolute bench --shards {work}/clothing --rounds 3", sets=("clothing",)),
    Measurement(
        name="imagenette",
        words=f"{_WHOLE} --photos {{data}}/imagenette224 --photos {{data}}/imagenette224_more --val-hash 10 "
        "--recipes train/recipes/imagenette_cpu_quick.toml,benchmarks/recipes/imagenette_20_epochs.toml,"
        "train/recipes/imagenette_cpu_whole.toml --seeds 0,1,2 --work {work}/recipes",
        sets=("clothing",),
    ),
    Measurement(
        name="finetune-clothing",
        words=f"{_WHOLE} {_CLOTHING} --recipes benchmarks/recipes/finetune_lite0.toml,"
        "benchmarks/recipes/scratch_lite0.toml --seeds 0,1,2 --work {work}/finetune",
        weights=True,
    ),
    Measurement(
        name="storage",
        words="resolute.benchmarks.storage --shards {work}/imagenette --res 128 --pace 1000 --batch-size 256 "
        "--seconds 12 --only local,store",
        sets=("imagenette",),
    ),
    Measurement(name="soak", words="tests.soak --minutes 20 --kills 3000 --faults 1000"),
    Measurement(name="siblings", words="resolute.benchmarks.siblings --photos {data}/imagenette224 --seeds 0,1,2,3,4"),
    Measurement(
        name="near_copies",
        words="resolute.benchmarks.near_copies --src {data}/imagenette224 --src {data}/imagenette224_more "
        "--src {data}/clothing10 --src {data}/imagenet_like --rounds 5",
    ),
)


def is_current(path: Path, command: Sequence[str]) -> bool:
    """Whether a result file was measured by this command with the code as it is now, at a commit without changes."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        measured, how = str(result["commit"]), str(result["command"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    unfinished = result.get("missing")  # of trainings, in a file that is written after each
    if unfinished or measured.endswith("-dirty") or shlex.split(how) != without_folders(shown(command)):
        return False
    changed = subprocess.run(
        ["git", "diff", "--quiet", measured, "--", *CODE], cwd=_ROOT, capture_output=True, check=False
    )
    return changed.returncode == 0


def shown(command: Sequence[str]) -> list[str]:
    """The command as results record it: without `-m` for the program `resolute` itself."""
    words = list(command)
    return ["resolute", *words[2:]] if words[1] == "resolute" else ["python", *words]


def busy_cores(seconds: float = _LOOK_S) -> float:
    """Number of processor cores in use, on average over `seconds` s."""

    def idle() -> tuple[float, float]:
        # Source: proc(5), /proc/stat: user nice system idle iowait irq softirq steal, in ticks of all cores
        ticks = [int(word) for word in Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:9]]
        return ticks[3] + ticks[4], sum(ticks)

    (idle_before, all_before), cores = idle(), os.cpu_count() or 1
    time.sleep(seconds)
    idle_after, all_after = idle()
    return cores * (1 - (idle_after - idle_before) / max(1.0, all_after - all_before))


def _wait_for_calm() -> None:
    """Return when no other work uses the processor. Raises `ResoluteError` if some still does after five minutes."""
    until = time.monotonic() + _CALM_S
    while (busy := busy_cores()) > _BUSY:
        if time.monotonic() > until:
            raise ResoluteError(
                f"processor: got {busy:.1f} cores in use by other work, expected none; end it, and repeat the command"
            )


def _places(options: BenchAllOptions, folder: Path) -> dict[str, str]:
    """{placeholder: its value} of the commands' templates, without the options that were not given."""
    values = {
        "data": options.data.resolve(),
        "work": options.work.resolve(),
        "results": folder,
        "picture": (_ROOT / "docs" if options.publish else folder) / "report.png",
        "timm": options.timm and options.timm.resolve(),
        "ffcv": options.ffcv_python,
        "img2dataset": options.img2dataset,
    }
    return {name: str(value) for name, value in values.items() if value}


def _make_sets(names: Sequence[str], places: Mapping[str, str]) -> None:
    """Write the sets of shards that are missing. Raises `ResoluteError` with prep's last line if it fails."""
    for name in names:
        photos, res = _SETS[name]
        words = ["shards", "--src", f"{places['data']}/{photos}", "--out", f"{places['work']}/{name}", "--res", res]
        _run(["-m", "resolute", *words], name=f"the set {name}")


def _run(words: Sequence[str], *, name: str) -> None:
    """Run a program to its end. Raises `ResoluteError` if it fails; its output is on the terminal."""
    done = subprocess.run([sys.executable, *words], cwd=_ROOT, check=False)
    if done.returncode:
        raise ResoluteError(
            f"{name}: got status {done.returncode}, expected 0; see the lines above, and repeat the command"
        )


def _todo(options: BenchAllOptions, places: Mapping[str, str], folder: Path) -> Iterator[tuple[Measurement, list[str]]]:
    """The measurements that are still to be done, with their commands; prints why the others are not."""
    names = [each.name for each in MEASUREMENTS]
    only = chosen(options.only or names, names)
    for each in MEASUREMENTS:
        out = folder / f"{each.name}.json"
        missing = [option for name, option in _NEEDED.items() if f"{{{name}}}" in each.words and name not in places]
        if each.name not in only:
            continue
        if each.weights and not (_ROOT / _WEIGHTS).exists():
            missing.append(f"{_WEIGHTS} (`python -m resolute.benchmarks.lite0_weights --out {_WEIGHTS.parent}`)")
        if each.rates and not missing and not (folder / f"{each.rates}.json").exists():
            missing.append(f"{each.rates}.json")
        if missing:
            print(f"{each.name}: left out; it needs {' and '.join(missing)}", flush=True)
        elif is_current(out, command := each.command(places, out)):
            print(f"{each.name}: measured by this code", flush=True)
        else:
            yield each, command


def main(options: BenchAllOptions) -> None:
    """Measure, and write the pages. Raises `ResoluteError`."""
    folder = RESULTS if options.publish else Path("bench/all").resolve()
    if options.publish and (at := commit() or "no commit").endswith(("-dirty", "no commit")):
        raise ResoluteError(f"--publish: got the code at {at}, expected a commit without changes; commit them first")
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        options.work.mkdir(parents=True, exist_ok=True)
    places, began = _places(options, folder), time.monotonic()
    left = 0
    for each, command in _todo(options, places, folder):
        if time.monotonic() - began > 60 * options.minutes:
            left += 1
            continue
        _make_sets(each.sets, places)
        _wait_for_calm()
        print(f"{each.name}: {shlex.join(shown(command))}", flush=True)
        measured = time.monotonic()
        _run(command, name=each.name)
        print(f"{each.name}: {(time.monotonic() - measured) / 60:.1f} min", flush=True)
    if options.publish:
        figures.write_all()
    if left:
        print(f"{left} measurements are left; the same command continues")
