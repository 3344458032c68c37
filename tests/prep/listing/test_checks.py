"""Warnings about inputs that are allowed but rarely intended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Prep = Callable[..., Any]


def warnings(text: str) -> list[str]:
    return [line for line in text.splitlines() if "WARNING" in line]


def test_ignored_files_are_counted_by_suffix_with_a_hint(photos: Path, tmp_path: Path, prep: Prep) -> None:
    for name in [*(f"bee/{i}.HEIC" for i in range(5)), "cat/0.CR2", "cat/1.CR2", "cat/001.0001"]:
        (photos / name).write_bytes(b"x")
    ran = prep("--src", photos, "--out", tmp_path / "s", "--res", "32")
    assert ran.status == 0
    assert "10 other files (5 .heic, 2 .cr2, 1 .md, 1 .txt, 1 without a usual suffix)" in ran.out
    (warning,) = warnings(ran.out)
    assert "left out, as prep does not read their format: 7 files (5 .heic, 2 .cr2); convert" in warning
    assert "convert them to JPEG" in (tmp_path / "s" / "report.html").read_text()


def test_photos_smaller_than_res_needs_are_reported(photos: Path, tmp_path: Path, prep: Prep) -> None:
    for dry in (["--dry"], []):
        ran = prep("--src", photos, "--out", tmp_path / "s", "--res", "32,50000", *dry)
        assert ran.status == 0
        (warning,) = warnings(ran.out)
        assert "most photos are smaller than RES needs: 100 % below 57143 px for 50000 px" in warning
        assert "not enlarged" in warning
