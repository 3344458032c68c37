"""Draws the first screen of a run's report, or of another HTML page, in headless Chromium.

    python -m resolute.benchmarks.report_picture runs/demo [--out docs/report.png]

Meant for the report of `make train`, whose photos are generated: people's photos do not belong in the repository.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import argparse
import contextlib
import io
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from resolute.errors import ResoluteError
from resolute.files import check_output, output_file

from .cli import Parser, command

__all__ = ["main"]

_PICTURE = Path(__file__).resolve().parents[1] / "docs" / "report.png"
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_WIDTH, _HEIGHT = 1240, 900  # px
_MAX_BYTES = 100_000


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    about = "Draw the first screen of an HTML page."
    parser = Parser(prog="python -m resolute.benchmarks.report_picture", description=about)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run, such as runs/demo, or an .html page")
    parser.add_argument("--out", type=Path, default=_PICTURE, metavar="FILE", help="default: docs/report.png")

    def work(args: argparse.Namespace) -> None:
        check_output(args.out, setting="--out", suffixes=(".png",))
        report = args.run if args.run.suffix == ".html" else args.run / "report.html"
        if not report.is_file():
            raise ResoluteError(f"{report}: not found, expected a report or a page; train the run, or draw the page")
        picture = _screenshot(report)
        if len(picture) > _MAX_BYTES:
            raise ResoluteError(
                f"{report}: got a picture of {len(picture)} bytes, expected at most {_MAX_BYTES}; "
                "choose a run with fewer epochs"
            )
        with output_file(args.out) as file:
            file.write(picture)

    return command(parser, work, argv)


def _screenshot(page: Path) -> bytes:
    """The first screen of an HTML file as PNG with 64 colours. Raises `ResoluteError` without a browser."""
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
        raise ResoluteError(f"browser: not found, expected one of {', '.join(_BROWSERS)}; install the package chromium")
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder) / "shot.png"
        words = [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--screenshot={shot}",
            f"--window-size={_WIDTH},{_HEIGHT}",
            page.resolve().as_uri(),
        ]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(words, capture_output=True, timeout=300, check=False)
        if not shot.exists():
            raise ResoluteError(f"{browser}: wrote no picture of {page}, expected one; try the command by hand")
        out = io.BytesIO()
        Image.open(shot).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    return out.getvalue()


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
