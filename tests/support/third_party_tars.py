"""Third-party WebDataset tars, written by webdataset: usable samples of all kinds and eight unusable ones."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import webdataset
from PIL import Image

from resolute import ShardSet
from resolute.pipeline.dataset.webdataset.open import open_webdataset

LABELS = (0, 1, 2, 40, 907)  # with gaps


def random_image(number: int) -> Image.Image:
    rng = np.random.default_rng(number)
    width, height = (int(side) for side in rng.integers(50, 140, 2))
    coarse = rng.integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def encoded(number: int, kind: str = "JPEG", **options: Any) -> bytes:
    out = io.BytesIO()
    random_image(number).save(out, kind, **({"quality": 92} if kind == "JPEG" else {}), **options)
    return out.getvalue()


def exif(orientation: int) -> bytes:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags.tobytes()


def write(pattern: Path, samples: list[dict[str, Any]], *, size: int = 12) -> None:
    pattern.parent.mkdir(parents=True, exist_ok=True)
    with webdataset.ShardWriter(str(pattern), maxcount=size, verbose=0) as out:
        for sample in samples:
            out.write(sample)


def sample(number: int, kind: str = "JPEG", **options: Any) -> dict[str, Any]:
    return {"__key__": f"{number:06d}", "jpg" if kind == "JPEG" else kind.lower(): encoded(number, kind, **options),
            "cls": str(LABELS[number % 5]).encode()}  # fmt: skip


def write_example_set(root: Path) -> Path:
    """28 usable training samples in three tars, 10 validation samples in one, and eight unusable samples."""
    kinds: list[dict[str, Any]] = [
        *(sample(i) for i in range(16)), sample(16, progressive=True), sample(17, subsampling=0),
        *(sample(18 + k, exif=exif(o)) for k, o in enumerate((3, 6, 8))),
        sample(21, "PNG"), sample(22, "PNG", exif=exif(6)), sample(23, "WEBP", lossless=True), sample(24, "BMP"),
    ]  # fmt: skip
    grey, cmyk = io.BytesIO(), io.BytesIO()
    random_image(25).convert("L").save(grey, "JPEG")
    random_image(26).convert("CMYK").save(cmyk, "JPEG")
    whole = encoded(30)
    bad: list[dict[str, Any]] = [
        {"__key__": "cut", "jpg": whole[:-700], "cls": b"1"},
        {"__key__": "flipped", "jpg": whole[:700] + b"\xff\xc0" + whole[702:], "cls": b"1"},
        {"__key__": "unlabelled", "jpg": whole},
        {"__key__": "named", "jpg": whole, "cls": b"dog"},
        {"__key__": "negative", "jpg": whole, "cls": b"-1"},
        {"__key__": "gif", "jpg": encoded(30, "GIF"), "cls": b"1"},
        {"__key__": "two", "jpg": whole, "png": encoded(30, "PNG"), "cls": b"1"},
        {"__key__": "text", "txt": b"nothing to see", "cls": b"1"},
    ]
    good = [
        *kinds,
        {"__key__": "grey", "jpeg": grey.getvalue(), "cls": b" 2\n"},
        {"__key__": "cmyk", "jpg": cmyk.getvalue(), "cls": b"2"},
        {"__key__": "d/e.f/j", "jpg": encoded(27), "json": json.dumps({"label": 907, "caption": "x"}).encode()},
    ]  # fmt: skip
    write(root / "train-%03d.tar", [*good[:5], *bad, *good[5:]])
    write(root / "val-%03d.tar", [sample(i) for i in range(10)])  # with the keys of training samples
    return root


def opened(source: Any, **options: Any) -> tuple[ShardSet, list[str]]:
    lines: list[str] = []
    return open_webdataset(source, log=lines.append, **{"threads": 2, **options}), lines


BAD = frozenset({"cut", "flipped", "unlabelled", "named", "negative", "gif", "two", "text"})


def rejects(root: Path) -> list[dict[str, str]]:
    (path,) = root.glob(".resolute-index/*/rejects.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def expected_samples(root: Path, split: str) -> list[tuple[bytes, int]]:
    """Image bytes and labels of the usable samples, read with Python's tarfile."""
    out = []
    for path in sorted(root.glob(f"{split}-*.tar")):
        samples: dict[str, dict[str, bytes]] = {}
        with tarfile.open(path) as tar:
            for member in tar:
                key, _, extension = member.name.rpartition(".")
                samples.setdefault(key, {})[extension] = tar.extractfile(member).read()  # type: ignore[union-attr]
        for key, files in samples.items():
            if key not in BAD:
                (image,) = (data for kind, data in files.items() if kind not in ("cls", "json"))
                out.append((image, int(files["cls"]) if "cls" in files else json.loads(files["json"])["label"]))
    return out
