"""MAX_BAD: how many photos may be unusable. A set remembers it, and a run that fails leaves a finished set as it is."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from resolute.prep.shard_set.work_list import WorkList
from tests.support.cli import prep as main
from tests.support.cli import verify
from tests.support.manifests import generation_spec
from tests.support.source_formats import jpeg
from tests.support.trees import tree

Prep = Callable[..., Any]


def make_photos(root: Path, good: int, bad: int) -> Path:
    """Photos of two classes, the last `bad` of each unusable."""
    for label in "ab":
        (root / label).mkdir(parents=True, exist_ok=True)
        for number in range(good + bad):
            data = jpeg(number + 100 * (label == "b")) if number < good else b"junk"
            (root / label / f"{number:02d}.jpg").write_bytes(data)
    return root


@pytest.fixture
def argv(tmp_path: Path) -> tuple[object, ...]:
    """The command of a set of 12 photos, 4 of them unusable."""
    return ("--src", make_photos(tmp_path / "p", 4, 2), "--out", tmp_path / "s", "--val-frac", 0)


def kept(out: Path, before: dict[str, str]) -> bool:
    """Whether every file of the set is as it was, and the set sound."""
    return before.items() <= tree(out).items() and verify([out, "--workers", "1"]) == 0


def test_a_run_with_too_many_rejects_leaves_a_finished_set_as_it_is(
    tmp_path: Path, prep: Prep, argv: tuple[object, ...]
) -> None:
    out, failed = tmp_path / "s", tmp_path / "s" / ".prep" / "rejects.jsonl"
    assert prep(*argv, "--res", "16", "--max-bad", 0.5).status == 0
    before = tree(out)
    ran = prep(*argv, "--res", "16,24", "--max-bad", 0.1)
    assert (ran.status, ran.err.count("\n")) == (2, 1), ran.err
    for words in ("too many unusable images", "of 12", "expected at most 1 (MAX_BAD=0.1)", f"see {failed}"):
        assert words in ran.err
    assert len(failed.read_text().splitlines()) >= 2
    assert kept(out, before)
    make_photos(tmp_path / "p", 4, 4)
    extension = prep(*argv, "--extend", "--max-bad", 0.1)
    assert (extension.status, "no image of train is usable" in extension.err) == (2, False), extension.err
    assert "too many unusable images" in extension.err
    assert kept(out, before)


@pytest.mark.parametrize("more", [("--res", "16,24"), ("--extend",), ("--dry",)], ids=["size", "extend", "dry"])
def test_a_set_remembers_its_max_bad_for_every_later_command(
    tmp_path: Path, prep: Prep, argv: tuple[object, ...], more: tuple[str, ...]
) -> None:
    out = tmp_path / "s"
    assert prep(*argv, "--res", "16", "--max-bad", 0.5).status == 0
    (out / ".prep").mkdir()
    (out / ".prep" / "rejects.jsonl").write_text("of a run that failed\n")
    if "--extend" in more:
        make_photos(tmp_path / "p", 4, 4)
        (tmp_path / "p" / "a" / "new.jpg").write_bytes(jpeg(99))
        (tmp_path / "p" / "b" / "new.jpg").write_bytes(jpeg(199))
        assert prep(*argv, *more, "--max-bad", 0.3).status == 2, "an explicit one wins"
        assert prep(*argv, *more).status == 2, "4 of 6 new photos"
        for name in ("new1", "new2", "new3"):
            (tmp_path / "p" / "a" / f"{name}.jpg").write_bytes(jpeg(int(name[3:]) + 50))
    ran = prep(*argv, *more)
    assert ran.status == 0, ran.err
    if "--dry" not in more:
        assert not (out / ".prep").exists()
        assert json.loads((out / "source.json").read_text())["make"]["MAX_BAD"] == "0.5"
    assert prep(*argv, "--res", "16").status == 0


def test_the_rows_without_a_photo_that_a_set_allows_are_allowed_later(tmp_path: Path, prep: Prep) -> None:
    make_photos(tmp_path / "p", 6, 0)
    rows = [f"{label}/{number:02d}.jpg,{label}" for label in "ab" for number in range(9)]
    (tmp_path / "labels.csv").write_text("\n".join(["image,class", *rows]) + "\n")
    argv = ("--src", tmp_path / "p", "--labels", tmp_path / "labels.csv", "--out", tmp_path / "s", "--val-frac", 0)
    assert prep(*argv, "--res", "16").status == 2
    assert prep(*argv, "--res", "16", "--max-bad", 0.5).status == 0
    assert "nothing to do" in prep(*argv, "--res", "16").out
    for more in (("--res", "16,24", "--dry"), ("--res", "16,24")):
        ran = prep(*argv, *more)
        assert ran.status == 0, ran.err


def test_a_rebuilt_set_has_the_max_bad_of_its_command(tmp_path: Path, prep: Prep, argv: tuple[object, ...]) -> None:
    assert prep(*argv, "--res", "16", "--max-bad", 0.5).status == 0
    ran = prep(*argv, "--res", "16", "--rebuild")
    assert "(MAX_BAD=0.01)" in ran.err, ran.out


def test_jobs_use_the_max_bad_that_the_set_remembers(
    tmp_path: Path, prep: Prep, argv: tuple[object, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "s"
    assert prep(*argv, "--res", "16", "--max-bad", 0.5).status == 0
    before = json.loads((out / "source.json").read_text())
    assert main(["plan", *argv, "--res", "16,24"]) == 0
    assert main(["range", "--out", out, "--range", ":", "--workers", "1"]) == 0
    assert main(["finish", "--out", out]) == 0, capfd.readouterr().err
    assert json.loads((out / "source.json").read_text()) == before
    assert "nothing to do" in prep(*argv, "--res", "16,24").out


@pytest.mark.parametrize(
    ("images", "max_bad", "expected"),
    [(50, 0.01, 1), (50, 0.0, 0), (1, 0.01, 1), (100, 0.29, 29), (199, 0.01, 1), (200, 0.01, 2), (7, 1.0, 7)],
)
def test_at_least_one_photo_may_be_unusable_unless_max_bad_is_0(images: int, max_bad: float, expected: int) -> None:
    spec = generation_spec(images={"train": images})
    todo = WorkList(
        generations=(spec,), src="photos", short_sides={16: 18}, max_bad=max_bad, ignored=Counter(), variables={}
    )
    assert todo.max_rejects == expected
