"""What near copies of training photos among the validation photos do to the accuracy, and what GROUP changes.

    python -m resolute.benchmarks.siblings --photos FOLDER [--originals 700] [--share 0.3] [--seeds 0,1,2,3,4]

The set is a part of the photos in the class folders of FOLDER and changed copies of some of them, `--share` of all: as
if somebody had augmented the photos before dividing them. A fifth is validated on, drawn by each seed anew: at random,
or with GROUP, which keeps a photo and its copies on one side. Both sides train the same recipe. The truth is the
accuracy of the same networks on other photos of FOLDER, which are in neither set.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import json
import math
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from PIL import Image, ImageEnhance, ImageOps
from pydantic import Field

from resolute.cli import program
from resolute.errors import ResoluteError
from resolute.settings import described, setting, settings
from resolute.train.logs.run_log import RunLogReader

from .cli import default_file
from .record import check_writable, header, write
from .whole.tools import timed

__all__ = ["main", "make_sets"]

RECIPE = Path(__file__).parent / "recipes" / "siblings.toml"
SIDES: dict[str, dict[str, str]] = {"at random": {}, "GROUP": {"group": r"/([^/.]+?)(?:_copy)?\.[^/]*$"}}
_VAL_FRAC, _SIZES = "0.2", "64,96"


@settings("")
class SiblingsOptions:
    photos: Annotated[Path, described("folder of class folders")]
    originals: int = setting(700, "photos of the set", ge=1)
    share: float = setting(0.3, "of copies in the set", gt=0, lt=1)
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = setting(
        (0, 1, 2, 3, 4), "one division and training each", min_length=1
    )
    out: Path | None = setting(None, "JSON file to write (default: bench/siblings.json)")


def make_sets(src: Path, root: Path, *, originals: int, share: float) -> dict[str, int]:
    """Write the folders `set` and `truth` of class folders to `root`; returns their numbers of photos.

    Raises `ResoluteError` if `src` has too few photos.
    """
    files = sorted(path for path in src.glob("*/*") if path.is_file())
    draw = random.Random(0)
    draw.shuffle(files)
    if len(files) < 2 * originals:
        raise ResoluteError(
            f"{src}: got {len(files)} photos in class folders, expected {2 * originals} for --originals {originals}, "
            "as many again for the truth; lower --originals"
        )
    copied = round(originals * share / (1 - share))
    parts = {"set": files[:originals], "truth": files[originals : 2 * originals]}
    for name, part in parts.items():
        for path in part:
            target = root / name / path.parent.name / path.name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    for path in parts["set"][:copied]:
        with Image.open(path) as image:
            photo = ImageOps.mirror(image.convert("RGB")) if draw.random() < 0.5 else image.convert("RGB")
        cut = draw.uniform(0.02, 0.1)
        w, h = photo.size
        left, top = round(w * cut * draw.random()), round(h * cut * draw.random())
        photo = photo.crop((left, top, left + round(w * (1 - cut)), top + round(h * (1 - cut))))
        photo = ImageEnhance.Brightness(photo).enhance(draw.uniform(0.85, 1.15))
        photo.save(root / "set" / path.parent.name / f"{path.stem}_copy.jpg", quality=draw.randint(50, 95))
    return {"originals": originals, "copies": copied, "truth": len(parts["truth"])}


def _resolute(root: Path, command: str, **options: object) -> None:
    """Run a command of `resolute`, with its output in `root`. Raises `ResoluteError` with its last line if it fails."""
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    timed([sys.executable, "-m", "resolute", command, *words], root / "out.log", name=f"resolute {command}")


def _train(root: Path, side: str, seed: int) -> dict[str, float | None]:
    """Accuracies (0 to 1) of a training: on all validation photos, on those without a near copy in train, and true."""
    folder = root / f"{side.replace(' ', '-')}-{seed}"
    shards, run = folder / "shards", folder / "run"
    divided = {"res": _SIZES, "val_frac": _VAL_FRAC, "seed": seed, **SIDES[side]}
    _resolute(root, "shards", src=root / "set", out=shards, **divided)
    _resolute(root, "train", shards=shards, recipe=RECIPE, run=run, set=f"seed={seed}")
    log = RunLogReader(run / "run.jsonl")
    log.read()
    last = log.epochs[-1]
    out = folder / "true.json"
    _resolute(root, "eval", run=run, shards=root / "truth-shards", json=out)
    rows = json.loads(out.read_text())["rows"]
    figures: dict[str, float | None] = {
        "top1": last["ema_top1"],
        "without_near_copies": last.get("ema_top1_unrelated"),
        "true_top1": next(row["top1"] for row in rows if row["weights"] == "ema"),
    }
    shutil.rmtree(folder)
    return figures


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    name, help = "python -m resolute.benchmarks.siblings", (__doc__ or "").partition("\n\n")[0]
    return program(name, SiblingsOptions, _measure, words, help=help)


def _measure(options: SiblingsOptions) -> None:
    out = options.out or default_file("siblings")
    check_writable(out)
    result = header(rounds=len(options.seeds))
    with tempfile.TemporaryDirectory(prefix="resolute-siblings-") as temporary:
        root = Path(temporary)
        counts = make_sets(options.photos, root, originals=options.originals, share=options.share)
        # a set needs training photos of all classes; only its validation photos are used
        _resolute(root, "shards", src=root / "set", val=root / "truth", out=root / "truth-shards", res=_SIZES)
        sides: dict[str, list[dict[str, float | None]]] = {side: [] for side in SIDES}
        for seed in options.seeds:
            for side, runs in sides.items():
                runs.append(_train(root, side, seed))
                print(f"seed {seed}, {side}: {runs[-1]}", flush=True)
    result |= {"photos": counts, "val_frac": float(_VAL_FRAC), "seeds": options.seeds, "sides": sides}
    result["summary"] = {side: _summary(runs) for side, runs in sides.items()}
    write(out, result)


def _summary(runs: Sequence[dict[str, float | None]]) -> dict[str, Any]:
    """Mean and standard error over the seeds of each figure."""
    found: dict[str, Any] = {}
    for name in runs[0]:
        values = [value for run in runs if (value := run[name]) is not None]
        if values:
            error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
            found[name] = {"mean": statistics.mean(values), "se": error, "n": len(values)}
    return found


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
