"""Photos resized once, as many people prepare them: JPEG of quality 90, the short side `--short-side` px.

    python -m resolute.benchmarks.whole.resize_once PHOTOS OUT        # PHOTOS/train/CLASS and PHOTOS/val/CLASS

Pillow decodes large JPEGs at a fraction of their size (`draft`), resizes bicubically and encodes; one process per core.
Smaller photos keep their size. Of Resolute, only what starts and ends the process is used.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from PIL import Image

from resolute.machine import available_cpus

__all__ = ["main", "resize"]

SHORT_SIDE_PX, QUALITY = 256, 90
_PIECE = 16  # photos that a process takes at once


def resize(source: Path, to: Path) -> None:
    """Write the photo `source` to `to`, a JPEG whose short side is at most `SHORT_SIDE_PX`."""
    with Image.open(source) as photo:
        photo.draft("RGB", (SHORT_SIDE_PX, SHORT_SIDE_PX))
        image = photo.convert("RGB")
    factor = min(1.0, SHORT_SIDE_PX / min(image.size))
    width, height = (max(1, round(factor * side)) for side in image.size)
    image.resize((width, height), Image.Resampling.BICUBIC).save(to, "JPEG", quality=QUALITY)


def main(argv: Sequence[str] | None = None) -> int:
    photos, out = map(Path, sys.argv[1:] if argv is None else argv)
    sources = sorted(path for path in photos.glob("*/*/*") if path.is_file())
    targets = [(out / path.relative_to(photos)).with_suffix(".jpg") for path in sources]
    for folder in {path.parent for path in targets}:
        folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(available_cpus()) as pool:
        for _ in pool.map(resize, sources, targets, chunksize=_PIECE):
            pass
    return 0


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
