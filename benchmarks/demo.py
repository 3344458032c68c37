"""The demo of README as a measurement: its output and durations, and a picture of its report, from one run.

    python -m resolute.benchmarks.demo [--out FILE] [--picture FILE]

It does what `make train` does in an empty folder: it generates photos, writes them as shards, and trains. The picture
is the first screen of the run's report in Chromium, which has to be installed.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from resolute.cli import program
from resolute.errors import ResoluteError
from resolute.files import check_output, output_file
from resolute.settings import setting, settings

from .cli import default_file
from .record import check_writable, header, write

__all__ = ["DemoOptions", "main", "screenshot"]

_ROOT = Path(__file__).resolve().parents[1]
# the commands of `make train`, in its order
_STEPS = {
    "photos": ("resolute.pipeline.examples.demo_photos", "--out", "demo/photos"),
    "shards": ("resolute", "shards", "--src=demo/photos", "--out=demo/shards"),
    "train": ("resolute", "train", "--shards=demo/shards", "--recipe=demo.toml", "--run=demo"),
}
_RECIPE = _ROOT / "train" / "recipes" / "demo.toml"
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_WIDTH, _HEIGHT = 1240, 900  # px
_COLOURS, _MAX_BYTES = 64, 100_000  # of the picture


@settings("")
class DemoOptions:
    out: Path | None = setting(None, "JSON file to write (default: bench/demo.json)")
    picture: Path | None = setting(None, "picture of the run's report to write (.png)")


def _run(options: DemoOptions) -> None:
    out = options.out or default_file("demo")
    check_writable(out)
    if options.picture:
        check_output(options.picture, setting="--picture", suffixes=(".png",))
        _browser()
    result, steps = header(), {}
    with tempfile.TemporaryDirectory(prefix="resolute-demo-") as folder:
        shutil.copyfile(_RECIPE, Path(folder, "demo.toml"))
        for name, words in _STEPS.items():
            began = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-m", *words],
                cwd=folder,
                capture_output=True,
                text=True,
                check=False,
                env={**os.environ, "PYTHONPATH": str(_ROOT)},
            )
            if done.returncode:
                lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
                raise ResoluteError(f"demo, {name}: got status {done.returncode}, expected 0: {lines[-1]}")
            lines = done.stdout.replace(f"{folder}/", "").splitlines()
            steps[name] = {"wall_s": round(time.perf_counter() - began, 1), "lines": lines}
            print(f"{name}: {steps[name]['wall_s']} s", flush=True)
        if options.picture:
            picture = screenshot(Path(folder, "runs/demo/report.html"))
            with output_file(options.picture) as file:
                file.write(picture)
    write(out, {**result, "steps": steps})


def _browser() -> str:
    """The browser that is installed. Raises `ResoluteError` without one."""
    found = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if found is None:
        raise ResoluteError(f"browser: not found, expected one of {', '.join(_BROWSERS)}; install the package chromium")
    return found


def screenshot(page: Path) -> bytes:
    """The first screen of an HTML file as PNG with 64 colours. Raises `ResoluteError` if it is too large."""
    from playwright.sync_api import sync_playwright  # why here: only development environments have it

    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=_browser()) as browser:
        tab = browser.new_page(viewport={"width": _WIDTH, "height": _HEIGHT})
        tab.goto(page.as_uri())
        shot = tab.screenshot()
    out = io.BytesIO()
    with Image.open(io.BytesIO(shot)) as image:
        image.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    if len(out.getvalue()) > _MAX_BYTES:
        raise ResoluteError(
            f"{page}: got a picture of {len(out.getvalue())} bytes, expected at most {_MAX_BYTES}; "
            "choose a run with fewer epochs"
        )
    return out.getvalue()


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    help = "Run the demo of README, and record its output and durations."
    return program("python -m resolute.benchmarks.demo", DemoOptions, _run, words, help=help)


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
