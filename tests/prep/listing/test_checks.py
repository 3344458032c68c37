"""Warnings about inputs that are allowed but rarely intended, and the figures that prep prints of a set."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from resolute.pipeline.dataset.format import SOURCE
from resolute.prep.listing.checks import describe_ignored, size_warnings

Prep = Callable[..., Any]
Scene = Callable[..., NDArray[np.uint8]]


def make_photos(root: Path, scene: Scene, classes: dict[str, int], size: int = 60) -> Path:
    for number, (name, count) in enumerate(classes.items()):
        (root / name).mkdir(parents=True)
        for i in range(count):
            Image.fromarray(scene(number * 1000 + i, size, size)).save(root / name / f"{i}.jpg")
    return root


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


def test_ignored_kinds_are_listed_in_order_and_bounded() -> None:
    assert describe_ignored({}) == "nothing"
    assert describe_ignored({"hidden": 2, "other files": 1, "junk": 0}) == "2 hidden, 1 other files"
    many = {f".a{i}": 1 for i in range(20)}
    assert describe_ignored(many).endswith(", 12 more)")


def test_classes_without_an_image_are_named(photos: Path, tmp_path: Path, prep: Prep) -> None:
    numbers = {"apple": 0, "bee": 5, "cat": 10}
    names = [path.relative_to(photos) for path in sorted(photos.rglob("[0-9]*.*"))]
    (photos / "list.txt").write_text("".join(f"{name} {numbers[name.parts[0]]}\n" for name in names))
    ran = prep("--src", photos / "list.txt", "--out", tmp_path / "s", "--res", "32", "--dry")
    assert ran.status == 0
    (warning,) = warnings(ran.out)
    assert "classes without a training image: 8 of 11 (1, 2, 3, 4, 6, 7, 8, 9); numeric labels" in warning


def test_classes_that_look_alike_are_named(tmp_path: Path, scene: Scene, prep: Prep) -> None:
    composed, decomposed = (unicodedata.normalize(form, "caf\u00e9") for form in ("NFC", "NFD"))
    classes = dict.fromkeys(["Cat", "cat", "UP", "up", composed, decomposed, "dog"], 12)
    photos = make_photos(tmp_path / "p", scene, classes)
    ran = prep("--src", photos, "--out", tmp_path / "s", "--res", "32", "--dry")
    assert ran.status == 0
    (warning,) = warnings(ran.out)
    for pair in ("'Cat' and 'cat'", "'UP' and 'up'", "'cafe\\u0301' and 'caf\\xe9'"):
        assert pair in warning
    assert "dog" not in warning
    assert "7 classes" in ran.out


def test_numbers_mixed_with_names_are_reported(photos: Path, tmp_path: Path, scene: Scene, prep: Prep) -> None:
    names = [path.relative_to(photos) for path in sorted(photos.rglob("*.jpg"))]
    (photos / "list.txt").write_text("".join(f"{name} {i % 4 if i else 'bird'}\n" for i, name in enumerate(names)))
    ran = prep("--src", photos / "list.txt", "--out", tmp_path / "s", "--res", "32", "--dry")
    (warning,) = warnings(ran.out)
    assert "class names are numbers but for 1 of 5 (bird), so all are taken as names" in warning
    val = make_photos(tmp_path / "val", scene, {"x": 4})
    (val / "list.txt").write_text("".join(f"x/{i}.jpg {i % 3}\n" for i in range(4)))
    ran = prep("--src", photos, "--val", val / "list.txt", "--out", tmp_path / "s", "--res", "32", "--dry")
    (warning,) = warnings(ran.out)
    assert "count these names in their order (0 is apple, 1 is bee, 2 is cat); check" in warning


def test_a_validation_split_much_larger_than_requested_is_reported(tmp_path: Path, scene: Scene, prep: Prep) -> None:
    for each, warned in ((5, True), (7, False)):
        photos = make_photos(tmp_path / str(each), scene, {"a": each, "b": each})
        ran = prep("--src", photos, "--out", tmp_path / "s", "--res", "32", "--val-frac", 0.1, "--dry")
        assert ran.status == 0
        said = f"{100 / each:.0f} % of the images are held out, not 10 %"
        assert [said in line for line in warnings(ran.out)] == [True] * warned


def test_photos_smaller_than_res_needs_are_reported(photos: Path, tmp_path: Path, prep: Prep) -> None:
    for dry in (["--dry"], []):
        ran = prep("--src", photos, "--out", tmp_path / "s", "--res", "32,50000", *dry)
        assert ran.status == 0
        (warning,) = warnings(ran.out)
        assert "most photos are smaller than RES needs: 100 % below 57143 px for 50000 px" in warning
        assert "not enlarged" in warning


def test_small_photos_are_reported_only_if_they_are_the_majority() -> None:
    rows = np.zeros(4, SOURCE)
    rows["width"], rows["height"] = 100, [50, 60, 200, 300]
    assert size_warnings({64: 73}, [rows[:1], rows[1:]]) == []
    rows["height"][2] = 72
    (warning,) = size_warnings({64: 73, 32: 37}, [rows])
    assert "75 % below 73 px for 64 px;" in warning
