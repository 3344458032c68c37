"""The imbalance benchmark: class sizes fall exponentially, variants differ by one key, accuracies equal the file's."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

import pytest

from resolute.benchmarks.training.imbalance import (
    _RECIPE,
    VARIANTS,
    accuracies,
    class_sizes,
    log_entry,
    main,
    select,
    summary,
)
from resolute.benchmarks.training.imbalance import variant as with_variant
from resolute.errors import ResoluteError
from resolute.train.recipe.schema import Recipe

CLASSES = tuple(f"c{k}" for k in range(10))


def test_class_sizes_fall_exponentially_in_a_random_order_of_the_classes() -> None:
    sizes = class_sizes(CLASSES, largest=780, ratio=50, seed=0)
    values = list(sizes.values())
    assert values == [780, 505, 327, 212, 137, 89, 57, 37, 24, 16]
    assert set(sizes) == set(CLASSES)
    assert list(sizes) != list(class_sizes(CLASSES, largest=780, ratio=50, seed=1))


@pytest.fixture
def photos(tmp_path: Path) -> tuple[list[Path], Path]:
    """Two folders with 12 and 8 photos of 4 classes; 3 of each class are held out."""
    for folder, count in (("one", 12), ("two", 8)):
        for name in CLASSES[:4]:
            (tmp_path / folder / name).mkdir(parents=True)
            for k in range(count):
                (tmp_path / folder / name / f"{folder}{k}.jpg").touch()
    listed = tmp_path / "val.txt"
    listed.write_text("".join(f"{name}/one{k}.jpg\n" for name in CLASSES[:4] for k in (0, 5, 7)))
    return [tmp_path / "one", tmp_path / "two"], listed


def test_the_set_keeps_all_listed_photos_and_its_number_of_others(photos: tuple[list[Path], Path]) -> None:
    folders, listed = photos
    chosen, sizes = select(folders, listed, largest=16, ratio=8, seed=3)
    assert sorted(sizes.values()) == [2, 4, 8, 16]
    for name, files in chosen.items():
        names = [file.name for file in files]
        assert len(set(names)) == sizes[name] + 3
        assert {"one0.jpg", "one5.jpg", "one7.jpg"} <= set(names)
        assert {file.parent.name for file in files} == {name}
    assert select(folders, listed, largest=16, ratio=8, seed=3) == (chosen, sizes)
    with pytest.raises(ResoluteError, match=r"--largest: got 18 photos for c\d, expected at most 17; lower it"):
        select(folders, listed, largest=18, ratio=8, seed=3)
    listed.write_text("c0/none.jpg\n")
    with pytest.raises(ResoluteError, match=r"--val-list: got c0/none.jpg, expected photos of --photos; correct it"):
        select(folders, listed, largest=4, ratio=2, seed=3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_differ_from_the_recipe_by_one_key(variant: str, tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text(with_variant(_RECIPE.read_text(encoding="utf-8"), *VARIANTS[variant]))
    got, plain = Recipe.load(file).values(), Recipe.load(_RECIPE).values()
    changed = {f"{section}.{key}": value for section in ("data", "loss") for key, value in got[section].items()
               if plain[section][key] != value}  # fmt: skip
    assert changed == {"uniform": {}, "sqrt": {"data.sampling": "sqrt"}, "balanced": {"data.sampling": "balanced"},
                       "weights": {"loss.class_weights": "balanced"}}[variant]  # fmt: skip
    assert {**got, "data": 0, "loss": 0} == {**plain, "data": 0, "loss": 0}


def test_head_and_tail_are_the_largest_and_smallest_classes(tmp_path: Path) -> None:
    sizes = class_sizes(CLASSES, largest=100, ratio=50, seed=0)
    right = {name: 10 - k for k, name in enumerate(sizes)}  # of 10 photos each
    with (tmp_path / "p.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["image", "label", "class1", "prob1"])
        for name, count in right.items():
            rows.writerows([f"{name}{k}", name, name if k < count else "other", 0.5] for k in range(10))
    got = accuracies(tmp_path / "p.csv", sizes)
    assert (got["head"], got["middle"], got["tail"], got["overall"]) == pytest.approx((0.9, 0.55, 0.2, 0.55))
    assert list(got["classes"].values()) == [count / 10 for count in right.values()]


def test_gains_are_differences_within_a_seed() -> None:
    runs = [{"recipe": name, "seed": seed, "overall": 0.5 + seed / 10 + gain, "head": 0.9, "middle": 0.5, "tail": gain}
            for seed in (0, 1) for name, gain in (("uniform", 0.0), ("sqrt", 0.05 * (1 + seed)))]  # fmt: skip
    got = summary(runs)
    assert got["sqrt"]["overall"]["gain"] == pytest.approx(0.075)
    assert got["sqrt"]["overall"]["gain_deviation"] == pytest.approx(0.05 / 2**0.5)
    assert got["uniform"]["overall"] == pytest.approx(
        {"mean": 0.55, "deviation": 0.1 / 2**0.5, "gain": 0, "gain_deviation": 0}
    )
    lines = log_entry({"summary": got}).splitlines()
    assert Counter(line.count("|") for line in lines) == {6: 4}
    assert "57.5 ± 3.5 (" not in lines[2]
    assert "62.5 ± 10.6 (+7.5 ± 3.5)" in lines[3]


def test_mistakes_end_in_one_line(photos: tuple[list[Path], Path], capsys: pytest.CaptureFixture[str]) -> None:
    folders, listed = photos
    words = ["--photos", str(folders[0]), "--val-list", str(listed), "--work", str(listed.parent / "work"),
             "--out", str(listed.parent / "x.json")]  # fmt: skip
    for more, message in ((["--only", "sqr"], "--only: got sqr"), (["--ratio", "0.5"], "--ratio: got 0.5")):
        assert main([*words, *more]) == 2
        assert message in capsys.readouterr().err
