"""`python -m tests.nightly`: limits that need minutes and a machine of their own, checked once a day by `.ci/nightly`.

loader    images/s of ours at least `LOADER` times those of torch's DataLoader with torchvision v2
prep      photos/s of ours, without start-up, at least `PREP` times those of Pillow and webdataset's writer
accuracy  top-1 of the included recipe `RECIPE` on Imagenette's photos at least `TOP1`

Tools that are compared take turns in one run, and the median of the rounds' ratios counts. The photos are those of
`--photos`, or of the environment variable RESOLUTE_PHOTOS: class folders of JPEGs. Without them, generated photos are
used for the first two, and the accuracy is not checked. Exit status: 0 all good, 1 a value is below its limit, 2 for a
problem that the one line on stderr explains.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from resolute.benchmarks.cli import text_table
from resolute.cli import program
from resolute.errors import ResoluteError
from resolute.settings import setting, settings
from tests import ROOT

__all__ = ["main"]

# On 29 November 2026, two cores of an AMD EPYC, 3 631 photos of Imagenette with 224 px, and 1 500 generated photos:
LOADER = 3.0  # 5.7 to 6.2, and 6.1
PREP = {"pillow + ShardWriter": 1.5, "pillow, bicubic": 1.2}  # 1.8 and 2.7; 1.4 and 2.0
TOP1 = 0.70  # 73.7 % of 730 photos, with a standard error of 1.6; not checked on generated photos
RECIPE = "imagenette_cpu_quick"
RESOLUTIONS = "96,128"  # of the recipe

Value = tuple[str, float, float]  # name, value, least value


@settings("")
class NightlyOptions:
    photos: Path | None = setting(None, "class folders of JPEGs (default: RESOLUTE_PHOTOS, else generated photos)")
    out: Path | None = setting(None, "folder for sets, runs and result files, new or empty (default: a temporary one)")


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    about = "Check the speed of loader and prep beside other tools, and the accuracy of a recipe."
    return program("python -m tests.nightly", NightlyOptions, _check, words, help=about)


def _check(options: NightlyOptions) -> int:
    given = options.photos or (Path(name) if (name := os.environ.get("RESOLUTE_PHOTOS")) else None)
    if given is not None and not given.is_dir():
        raise ResoluteError(f"--photos, RESOLUTE_PHOTOS: got {given}, expected a folder of class folders; correct it")
    with tempfile.TemporaryDirectory(prefix="resolute-nightly-") as temporary:
        out = options.out or Path(temporary)
        photos = given or out / "photos"
        if given is None:
            _run("resolute.pipeline.examples.demo_photos", f"--out={photos}")
        shards = out / "shards"
        words = [f"--src={photos}", f"--out={shards}", f"--res={RESOLUTIONS}", "--val-frac=0.2", "--near-copies=none"]
        _run("resolute", "shards", *words)
        values = [*check_loader(shards, out / "loader.json"), *check_prep(photos, out / "prep.json")]
        if given is not None:
            values.append(check_accuracy(shards, out / "run"))
    rows = [
        (name, f"{value:.3f}", f"{least:g}", "good" if value >= least else "TOO LOW") for name, value, least in values
    ]
    print(f"\n{text_table('nightly', ('what', 'value', 'at least', ''), rows)}")
    if given is None:
        print("  accuracy: not checked, since RESOLUTE_PHOTOS does not name Imagenette's class folders")
    return int(any(value < least for _, value, least in values))


def check_loader(shards: Path, out: Path) -> list[Value]:
    words = ["--only=ours,v2", f"--res={RESOLUTIONS}", "--rounds=3", "--seconds=3"]
    _run("resolute.benchmarks.loader", f"--shards={shards}", *words, f"--out={out}")
    return [
        (f"loader at {entry['res']} px / DataLoader", entry["loaders"]["v2"]["ours_times"]["median"], LOADER)
        for entry in _read(out)["loader"]["res"]
    ]


def check_prep(photos: Path, out: Path) -> list[Value]:
    words = [f"--res={RESOLUTIONS}", "--copies=2", "--rounds=3"]
    _run("resolute.benchmarks.prep", f"--src={photos}", *words, f"--out={out}")
    took = {  # less the time of a few photos, which is that of the start-up
        tool: [all_s - few_s for all_s, few_s in zip(values["seconds"], values["few_seconds"], strict=True)]
        for tool, values in _read(out)["seconds"].items()
    }
    ratios = {tool: [b / a for a, b in zip(took["prep"], took[tool], strict=True)] for tool in PREP}
    return [(f"prep / {tool}", statistics.median(values), PREP[tool]) for tool, values in ratios.items()]


def check_accuracy(shards: Path, run: Path) -> Value:
    recipe = ROOT / "train" / "recipes" / f"{RECIPE}.toml"
    _run("resolute", "train", f"--shards={shards}", f"--recipe={recipe}", f"--run={run}")
    _run("resolute", "eval", f"--run={run}", f"--shards={shards}")
    rows = _read(run / "eval.json")["rows"]
    return f"top-1 of {RECIPE}", max(row["top1"] for row in rows), TOP1


def _run(module: str, *words: str) -> None:
    """Run a program with its output on ours. Raises `ResoluteError` if it fails."""
    done = subprocess.run([sys.executable, "-m", module, *words], cwd=ROOT, check=False)
    if done.returncode:
        raise ResoluteError(
            f"{module} {words[0]}: ended with status {done.returncode}, expected 0; its own message is above"
        )


def _read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
