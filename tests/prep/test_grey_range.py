"""16-bit photos that are dark: prep asks how many bits their samples use, and a run remembers the answer."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.prep import grey_range

Prep = Callable[..., Any]


def make(folder: Path, brightest: int, *, count: int = 8, suffix: str = "png") -> Path:
    for n in range(count):
        path = folder / "ab"[n % 2] / f"{n}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        ramp = np.linspace(0, brightest, 48 * 40).round().astype(np.uint16).reshape(40, 48)
        Image.fromarray(np.roll(ramp, n)).save(path)
    return folder


def brightest_stored(out: Path) -> int:
    values = []
    for path in (out / "32").glob("*.tar"):
        with tarfile.open(path) as tar:
            for member in tar:
                file = tar.extractfile(member)
                if file is not None and member.name.endswith(".jpg"):
                    values.append(int(np.asarray(Image.open(io.BytesIO(file.read()))).max()))
    return max(values)


@pytest.mark.parametrize(
    ("brightest", "bits", "suffix"),
    [(3000, 12, "png"), (16383, 14, "TIFF"), (200, 8, "tif")],
)
def test_dark_16_bit_photos_are_asked_about_before_anything_is_written(
    tmp_path: Path, prep: Prep, brightest: int, bits: int, suffix: str
) -> None:
    argv = ("--src", make(tmp_path / "p", brightest, suffix=suffix), "--out", tmp_path / "s", "--res", "32")
    ran = prep(*argv)
    assert (ran.status, ran.err.count("\n")) == (2, 1), ran.err
    for words in (f"got {brightest} as the brightest", f"GREY_RANGE={bits} if", "GREY_RANGE=16"):
        assert words in ran.err
    assert not (tmp_path / "s" / "records").exists()
    assert "GREY_RANGE" in prep(*argv, "--dry").err
    ran = prep(*argv, "--grey-range", bits)
    assert ran.status == 0, ran.err
    assert abs(brightest_stored(tmp_path / "s") - 255 * brightest / (2**bits - 1)) < 8
    assert json.loads((tmp_path / "s" / "records" / "plan.json").read_text())["settings"]["grey_range"] == bits
    assert ShardSet.open(tmp_path / "s").grey_bits == bits


def test_nothing_is_asked_of_bright_or_few_photos_or_if_the_range_is_given(tmp_path: Path, prep: Prep) -> None:
    bright = make(tmp_path / "bright", 300)
    make(bright, 40_000, count=1)
    few = make(tmp_path / "few", 4095, count=3)
    for src, options in ((bright, ()), (few, ("--val-frac", 0)), (make(tmp_path / "p", 900), ("--grey-range", 16))):
        out = tmp_path / f"set-{src.name}"
        ran = prep("--src", src, "--out", out, "--res", "32", *options)
        assert ran.status == 0, ran.err
        settings = json.loads((out / "records" / "plan.json").read_text())["settings"]
        assert ("grey_range" in settings) == bool(options and options[0] == "--grey-range")
        assert ShardSet.open(out).grey_bits == 16


def test_photos_in_archives_are_looked_at_too(tmp_path: Path, prep: Prep) -> None:
    source = make(tmp_path / "p", 4095)
    with zipfile.ZipFile(tmp_path / "p.zip", "w") as archive:
        for path in sorted(source.rglob("*.png")):
            archive.write(path, path.relative_to(source))
    ran = prep("--src", tmp_path / "p.zip", "--out", tmp_path / "s", "--res", "32")
    assert (ran.status, "GREY_RANGE=12" in ran.err) == (2, True), ran.err


def test_what_the_sample_missed_is_asked_at_the_end_and_after_a_resume(
    tmp_path: Path, prep: Prep, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ("--src", make(tmp_path / "p", 4095), "--out", tmp_path / "s", "--res", "32", "--shard-samples", 2)
    monkeypatch.setattr(grey_range, "_SUFFIXES", (".none",))
    for _ in range(2):  # the second time, all shards are there
        ran = prep(*argv)
        assert ran.status == 2
        assert "8 photos have 16-bit samples, got 4095 as" in ran.err
        assert "GREY_RANGE=12 with REBUILD=1 if" in ran.err
        assert not (tmp_path / "s" / "manifest.json").exists()
    assert prep(*argv, "--grey-range", 12, "--rebuild").status == 0
    assert brightest_stored(tmp_path / "s") > 250


@pytest.mark.parametrize("value", ["7", "17", "12.5", "dark"])
def test_a_range_that_no_file_has_is_refused(tmp_path: Path, prep: Prep, value: str) -> None:
    ran = prep("--src", make(tmp_path / "p", 4095), "--out", tmp_path / "s", "--grey-range", value)
    assert (ran.status, ran.err.count("\n")) == (2, 1), ran.err
    assert "grey-range" in ran.err
