"""The summary, the report and the manifest count photos whose colour profile was converted, after a resume too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from tests.support.made_images import ADOBE_RGB, SRGB
from tests.support.manifests import read_joined

Prep = Callable[..., Any]


def add_profiles(photos: Path) -> None:
    paths = sorted(photos.rglob("[0-9]*.jpg"))
    for path, profile in zip(paths, [ADOBE_RGB] * 3 + [SRGB] + [b"junk"], strict=False):
        Image.open(path).save(path, quality=95, icc_profile=profile)


def test_converted_profiles_are_counted(photos: Path, tmp_path: Path, prep: Prep) -> None:
    add_profiles(photos)
    out = tmp_path / "s"
    argv = ("--src", photos, "--out", out, "--res", "32", "--shard-samples", 8)
    ran = prep(*argv)
    assert ran.status == 0, ran.err
    lines = ("colour profile converted to sRGB: 3 images", "colour profile unusable, so ignored: 1 image")
    assert all(f"  {line}\n" in ran.out for line in lines)
    report = (out / "report.html").read_text()
    assert all(line in report for line in lines)
    manifest = (out / "manifest.json").read_bytes()
    assert read_joined(out)["generations"][0]["pixels"] == {"converted": 3, "unusable": 1}

    (out / "manifest.json").unlink()
    for lost in sorted((out / "records").glob("train-*.rec"))[::2]:
        lost.unlink()
    ran = prep(*argv)
    assert all(f"  {line}\n" in ran.out for line in lines)
    assert (out / "manifest.json").read_bytes() == manifest


def test_a_set_without_such_photos_says_nothing(photos: Path, tmp_path: Path, prep: Prep) -> None:
    ran = prep("--src", photos, "--out", tmp_path / "s", "--res", "32")
    assert "profile" not in ran.out
    assert "colour profile" not in (tmp_path / "s" / "report.html").read_text()
    assert "pixels" not in read_joined(tmp_path / "s")["generations"][0]
    assert all(b'"pixels"' not in path.read_bytes() for path in (tmp_path / "s" / "records").glob("*.rec"))
