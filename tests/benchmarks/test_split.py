"""The division of photos: shares by class, stable when photos are added, no copy in two parts; its use in tables."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from resolute.benchmarks.training.__main__ import main as compare
from resolute.benchmarks.training.split import Parts, Photo, divide, main
from resolute.errors import ResoluteError
from resolute.train.recipe.schema import Recipe
from tests.benchmarks.test_training import tiny, write_log
from tests.conftest import make_photos
from tests.support.cli import prep

SHARES = {"tune": 0.1, "choose": 0.05, "report": 0.2}


def photos(count: int, *, label: str = "a", first: int = 0) -> list[Photo]:
    return [Photo(f"{label}/{k}.jpg", Path(f"{label}/{k}.jpg"), f"{label}{k:04d}") for k in range(first, first + count)]


def where(parts: dict[str, list[Photo]]) -> dict[str, str]:
    return {photo.digest: part for part, own in parts.items() for photo in own}


def test_every_class_has_its_share_in_each_part_to_within_rounding() -> None:
    all_photos = [*photos(97), *photos(1003, label="b"), *photos(11, label="c")]
    parts = divide(all_photos, shares=SHARES, salt="0")
    assert sorted(photo for own in parts.values() for photo in own) == sorted(all_photos)
    for label, total in (("a", 97), ("b", 1003), ("c", 11)):
        for part, share in SHARES.items():
            assert abs(sum(photo.label == label for photo in parts[part]) - share * total) <= 0.5
    assert where(divide(all_photos[::-1], shares=SHARES, salt="0")) == where(parts)
    assert where(divide(all_photos, shares=SHARES, salt="1")) != where(parts)


def test_added_photos_change_no_part_and_fill_the_parts_up_to_their_shares() -> None:
    before = where(divide(photos(100), shares=SHARES, salt="0"))
    after = divide([*photos(100), *photos(60, first=100)], shares=SHARES, salt="0", known=before)
    assert before.items() <= where(after).items()
    assert {part: len(own) for part, own in after.items()} == {"train": 104, "tune": 16, "choose": 8, "report": 32}
    fresh = where(divide([*photos(100), *photos(1, first=100)], shares=SHARES, salt="0"))
    assert sum(fresh[digest] != part for digest, part in before.items()) <= 3  # at the borders of the parts


def test_identical_photos_are_in_one_part_whatever_their_names() -> None:
    copies = [Photo(f"b/{photo.name[2:]}", photo.path, photo.digest) for photo in photos(200)]
    parts = divide([*photos(200), *copies], shares=SHARES, salt="0")
    seen = Counter(digest for own in parts.values() for digest in {photo.digest for photo in own})
    assert len(seen) == 200
    assert set(seen.values()) == {1}
    assert sum(map(len, parts.values())) == 400


def make_set(out: Path, train: Path, val: Path) -> None:
    assert prep(["--src", train, "--val", val, "--out", out, "--res", "32", "--workers", "1"]) == 0


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a division with the sets tune and report; 3 classes of 20 photos, one of which is there twice."""
    folder = tmp_path_factory.mktemp("divided")
    root, more, out = make_photos(folder / "photos", each=20), folder / "more", folder / "parts"
    (more / "class0").mkdir(parents=True)
    (more / "class0" / "copy.jpg").write_bytes((root / "class0" / "003.jpg").read_bytes())
    assert main(["--src", str(root), str(more), "--out", str(out)]) == 0
    for part, train in (("tune", "train"), ("report", "rest")):
        make_set(out / part, out / f"{train}.csv", out / f"{part}.csv")
    return out


def test_a_set_is_accepted_for_its_own_part_only(divided: Path) -> None:
    parts = Parts.open(divided)
    sizes = {part: len(digests) for part, digests in parts.digests.items()}
    assert sizes == {"train": 42, "tune": 6, "choose": 6, "report": 6}
    with (divided / "rest.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 55  # the copy too
    for name, other in (("tune", "report"), ("report", "tune")):
        parts.check(divided / name, name)
        with pytest.raises(ResoluteError, match=f"val holds 6 photos of the part {name}, expected only {other}"):
            parts.check(divided / name, other)


def test_a_set_is_refused_if_it_trains_on_a_later_part(divided: Path, tmp_path: Path) -> None:
    train, report = ((divided / f"{name}.csv").read_text().splitlines(keepends=True) for name in ("train", "report"))
    (divided / "leak.csv").write_text("".join([*train, report[1]]))
    make_set(tmp_path / "leak", divided / "leak.csv", divided / "tune.csv")
    with pytest.raises(ResoluteError, match="train holds 1 photos of the part report, expected only train"):
        Parts.open(divided).check(tmp_path / "leak", "tune")


def fake_trainer(words: Sequence[str]) -> None:
    """A run's accuracy follows from its learning rate: best at 0.1 for the recipe `a`, at 0.2 for `b`."""
    options = {flag: value for flag, value in pairwise(words) if flag.startswith("--")}
    recipe = Recipe.load(options["--recipe"])
    best = 0.1 if recipe.name.startswith("a") else 0.2
    write_log(
        Path(options["--runs"]) / options["--run"] / "run.jsonl",
        [(32, 1.0)],
        top1=0.9 - abs(recipe.optim.lr - best) - 0.01 * recipe.seed,
    )


def test_learning_rates_are_tuned_before_the_reported_part_is_read_and_each_run_is_logged(
    divided: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = divided / "tuning.jsonl"
    log.unlink(missing_ok=True)
    recipes = ",".join(str(tiny(tmp_path, name, [(32, 2)])) for name in ("a", "b"))
    words = [
        "--split",
        divided,
        "--recipes",
        recipes,
        "--device",
        "cpu",
        "--out",
        tmp_path / "o.json",
        "--runs",
        tmp_path / "runs",
    ]
    tuning = [str(word) for word in [*words, "--seeds", "5"]]
    report = [str(word) for word in [*words, "--seeds", "0,1", "--report", "--tune-lr", "0.5,1,2"]]
    assert compare(tuning, run=fake_trainer) == 0
    assert json.loads((tmp_path / "o.json").read_text())["split"]["part"] == "tune"
    assert compare(report, run=fake_trainer) == 0
    result = json.loads((tmp_path / "o.json").read_text())
    assert {name: side["best"] for name, side in result["tuning"]["sides"].items()} == {"a": 1.0, "b": 2.0}
    assert result["tuning"]["runs_per_side"] == 3
    assert [run["lr_factor"] for run in result["runs"]] == [1.0, 2.0, 1.0, 2.0]
    assert result["split"]["part"] == "report"
    assert result["split"]["runs_before"] == {"tune": 2 + 6, "choose": 0, "report": 0}
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert Counter(line["part"] for line in lines) == {"tune": 8, "report": 4}
    out = capsys.readouterr().out
    assert "validated on the part report; runs before: 8 on tune, 0 on choose, 0 on report" in out
    assert compare(report, run=fake_trainer) == 0  # all of earlier calls
    assert len(log.read_text().splitlines()) == 12


def test_sides_with_sets_of_their_own_validate_on_the_same_photos(
    divided: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny(tmp_path, "a", [(32, 2)])
    words = ["--device", "cpu", "--seeds", "0", "--out", str(tmp_path / "o.json")]
    same = f"{recipe},{recipe}={divided}/tune"
    assert compare([*words, "--recipes", same, "--shards", str(divided / "tune")], run=fake_trainer) == 0
    assert json.loads((tmp_path / "o.json").read_text())["settings"]["recipes"] == ["a", "a-tune"]
    others = f"{recipe},{recipe}={divided}/report"
    assert compare([*words, "--recipes", others, "--shards", str(divided / "tune")], run=fake_trainer) == 2
    assert "got classes or validation photos other than those of" in capsys.readouterr().err


def test_mistakes_of_a_division_end_in_one_line(
    divided: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, out = str(divided.parent / "photos"), str(tmp_path / "parts")
    for words, message in (
        (["--src", root, "--out", out, "--shares", "0.1,0.01,0.1"], "leaves no photo for choose"),
        (["--src", root, "--out", str(divided), "--salt", "1"], "made with --salt 0 --shares 0.1,0.1,0.1, got 1"),
    ):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert message in error
        assert len(error.splitlines()) == 1
