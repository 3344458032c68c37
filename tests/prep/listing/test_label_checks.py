"""Labels that are probably not meant are a question, which a setting answers, before anything is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pytest

from resolute.errors import ResoluteError
from resolute.prep.listing.class_file import read_classes
from resolute.prep.listing.label_checks import alike
from tests.support.source_formats import jpeg

Prep = Callable[..., Any]
FORMS = ("csv", "jsonl", "parquet", "list", "folders")


class Case:
    """Photos with these labels in several forms; `run` gives the classes, or the message if prep refuses."""

    def __init__(self, folder: Path, prep: Prep) -> None:
        self.folder, self._prep = folder, prep

    def run(self, labels: Sequence[str | None], form: str = "csv", *more: object) -> list[str] | str:
        photos, table = self.folder / form / "photos", self.folder / form / f"t.{form}"
        words: list[object] = ["--src", photos, "--labels", table]
        rows = [(f"{i:03d}.jpg", label) for i, label in enumerate(labels)]
        for i, (name, label) in enumerate(rows):
            path = photos / (label or "") / name if form == "folders" else photos / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(jpeg(i))
        if form == "csv":
            table.write_text("image,label\n" + "".join(f'{name},"{label or ""}"\n' for name, label in rows))
        elif form == "jsonl":
            table.write_text("".join(json.dumps({"image": name, "label": label}) + "\n" for name, label in rows))
        elif form == "parquet":
            source = self.folder / "rows.json"
            source.write_text(json.dumps([{"image": name, "label": label} for name, label in rows]))
            duckdb.sql(f"COPY (SELECT image, label::VARCHAR AS label FROM '{source}') TO '{table}'")
        elif form == "list":
            (photos / "l.txt").write_text("".join(f"{name} {label or ''}\n" for name, label in rows))
            words = ["--src", photos / "l.txt"]
        else:
            words = ["--src", photos, "--kind", "folders"]
        out = self.folder / f"{form}-set"
        ran = self._prep(*words, "--out", out, "--res", "32", "--val-frac", 0, "--rebuild", *more)
        if ran.status:
            assert ran.status == 2
            assert not (out / "manifest.json").exists()
            return str(ran.err.splitlines()[-1])
        self.out = ran.out
        classes: list[str] = json.loads((out / "manifest.json").read_text())["classes"]
        return classes


@pytest.fixture
def case(tmp_path: Path, prep: Prep) -> Case:
    return Case(tmp_path, prep)


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet", "list"])
@pytest.mark.parametrize("word", ["nan", "None", "NULL", "N/A", "no_label", "Unlabeled", "unknown", "?"])
def test_words_for_a_missing_label_are_asked_about(case: Case, form: str, word: str) -> None:
    labels = ["cat", "dog", word, "cat"]
    assert f"002.jpg has the label {word!r}" in case.run(labels, form)
    assert case.run(labels, form, "--unlabelled", "drop") == ["cat", "dog"]
    assert "1 unlabelled" in case.out
    assert case.run(labels, form, "--unlabelled", "keep") == sorted(["cat", "dog", word])


def test_a_word_for_a_missing_label_among_several_labels_is_asked_about(case: Case) -> None:
    labels = ["cat|dog", "dog|unknown", "cat"]
    assert "001.jpg has the label 'unknown'" in case.run(labels, "csv", "--target", "labels:bar")
    assert case.run(labels, "csv", "--target", "labels:bar", "--unlabelled", "drop") == ["cat", "dog"]


def test_class_numbers_stay_numbers_when_words_are_dropped(case: Case) -> None:
    labels = [*(str(i % 11) for i in range(22)), "nan"]
    assert case.run(labels, "csv", "--unlabelled", "drop") == [str(i) for i in range(11)]
    assert case.run([f"{i % 11}.0" for i in range(22)]) == [str(i) for i in range(11)], "as pandas writes them"


def test_words_for_a_missing_number_are_unlabelled(case: Case) -> None:
    labels = ["0.5", "nan", "0.25", None]
    assert "001.jpg is unlabelled" in case.run(labels)
    assert case.run(labels, "csv", "--unlabelled", "drop") == []
    assert "2 unlabelled" in case.out


@pytest.mark.parametrize(
    ("one", "other", "are_alike"),
    [
        ("cat", "cat ", True),
        ("Cat", "cat", True),
        ("ice cream", "ice-cream", True),
        ("ice_cream", "icecream", True),
        ("\u00e9t\u00e9", "e\u0301te\u0301", True),
        ("a\u00a0b", "a b", True),
        ("\uff21b", "Ab", True),
        ("a\u200bb", "ab", True),
        ("1-2", "12", False),
        ("-5", "5", False),
        ("cat", "cats", False),
    ],
)
def test_names_are_alike_that_one_cannot_tell_apart(one: str, other: str, are_alike: bool) -> None:
    assert (alike(one) == alike(other)) == are_alike


@pytest.mark.parametrize("form", FORMS)
def test_class_names_that_differ_in_form_alone_are_asked_about(case: Case, form: str) -> None:
    labels = ["T-shirt", "t shirt", "T-shirt", "dog"]
    message = case.run(labels, form)
    assert "got 'T-shirt' (2 photos) and 't shirt' (1 photos), expected one name for a class" in message
    (case.folder / "classes.txt").write_text("T-shirt\nt shirt\ndog\n")
    assert case.run(labels, form, "--classes", case.folder / "classes.txt") == ["T-shirt", "t shirt", "dog"]


def test_blanks_around_a_label_mean_nothing_in_any_table(case: Case) -> None:
    for form in ("csv", "jsonl", "parquet"):
        assert case.run(["cat", "cat ", " dog", "dog"], form) == ["cat", "dog"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("label", "looks"),
    [("a dog runs {} times there", "captions"), ("x{}", "names of the photos"), ("1{:02d}", "to predict")],
)
def test_nearly_a_class_per_photo_is_asked_about(case: Case, form: str, label: str, looks: str) -> None:
    labels = [label.format(i) for i in range(12)]
    message = case.run(labels, form)
    assert "nearly a class per photo, got 12 different labels for 12 photos, 12 of them once" in message
    if form in ("jsonl", "parquet") and looks == "to predict":  # texts in JSON are names
        looks = "names of the photos"
    assert ("a folder for each photo" if form == "folders" else looks) in message
    assert len(case.run(labels, form, "--target", "class")) >= 12
    assert len(case.run([label.format(i % 6) for i in range(12)], form)) >= 6


def test_large_gaps_between_class_numbers_are_asked_about(case: Case) -> None:
    labels = ["0", "1", "900012", "0", "1", "900012"]
    for form in ("csv", "list"):
        message = case.run(labels, form)
        assert "got 3 different ones such as 0, 1 and 900012, which would make 900013 classes" in message
    assert len(case.run(["1", "2", "3", "1", "2", "3"])) == 4


def test_a_label_of_the_validation_part_that_differs_in_form_is_explained(case: Case, prep: Prep) -> None:
    for name in ("train/cat/1.jpg", "train/dog/2.jpg", "val/Cat/3.jpg"):
        path = case.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(len(name)))
    ran = prep("--src", case.folder / "train", "--val", case.folder / "val", "--out", case.folder / "s", "--res", "32")
    assert "got 1 such as 'Cat', expected only those of" in ran.err
    assert "('cat' differs only by blanks, hyphens, case or Unicode form)" in ran.err


@pytest.mark.parametrize(
    "text",
    [
        '{"0": "cat", "1": "dog", "2": "elk"}',
        '{"cat": 0, "elk": 2, "dog": 1}',
        '["cat", "dog", "elk"]',
        "cat\ndog\nelk\n",
        "0 cat\n1 dog\n2 elk\n",
        "2,elk\n0,cat\n1,dog\n",
        "cat 0\ndog 1\nelk 2\n",
        "id,name\n0,cat\n1,dog\n2,elk\n",
        "0: cat\n1: dog\n2: elk",
    ],
)
def test_classes_may_be_names_or_a_map(case: Case, text: str) -> None:
    path = case.folder / "classes"
    path.write_text(text)
    assert read_classes(path).names == ("cat", "dog", "elk")
    assert case.run(["0", "2", "1", "0"], "csv", "--classes", path) == ["cat", "dog", "elk"]
    assert case.run(["cat", "elk", "dog"], "folders", "--classes", path) == ["cat", "dog", "elk"]


def test_a_map_may_count_from_one_also_for_the_validation_part(case: Case, prep: Prep) -> None:
    path = case.folder / "classes.txt"
    path.write_text("1 001.Black_footed\n2 002.Laysan\n")
    for part, numbers in (("train", (1, 2, 1, 2)), ("val", (2, 1))):
        (case.folder / part).mkdir()
        for i, _ in enumerate(numbers):
            (case.folder / part / f"{part}{i}.jpg").write_bytes(jpeg(i + 10 * len(part)))
        rows = "".join(f"{part}{i}.jpg,{number}\n" for i, number in enumerate(numbers))
        (case.folder / f"{part}.csv").write_text("image,label\n" + rows)
    tables = ("--labels", case.folder / "train.csv", "--val-labels", case.folder / "val.csv", "--classes", path)
    folders = ("--src", case.folder / "train", "--val", case.folder / "val", "--out", case.folder / "s")
    ran = prep(*folders, *tables, "--res", "32")
    assert ran.status == 0, ran.err
    assert "read as a map of numbers and names: 1 is 001.Black_footed, 2 is 002.Laysan" in ran.err
    manifest = json.loads((case.folder / "s" / "manifest.json").read_text())
    assert manifest["classes"] == ["001.Black_footed", "002.Laysan"]
    (case.folder / "val.csv").write_text("image,label\nval0.jpg,3\nval1.jpg,1\n")
    assert "got 3 in line 2, expected one of its 2, 1 to 2" in prep(*folders, *tables, "--rebuild", "--res", "32").err


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("AM General Hummer SUV 2000\nAcura RL Sedan 2012\nAcura TL 2012\n", 3),
        ("golden retriever\nbeagle\n", 2),
        ("747\n707\n", 2),
        ('["Boeing 747", "Boeing 707"]', 2),
    ],
)
def test_names_with_numbers_stay_names(tmp_path: Path, text: str, names: int) -> None:
    (tmp_path / "c").write_text(text)
    found = read_classes(tmp_path / "c")
    assert (len(found.names), found.numbers) == (names, None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Boeing 747\nBoeing 707\n", "expected numbers from 0 or 1 without gaps, or names alone"),
        ("0 cat\n7 dog\n", "expected numbers from 0 or 1 without gaps"),
        ('{"n01": "cat"}', "expected a map of numbers and names"),
        ('{"0": ["n01", "cat"]}', "expected a map of numbers and names"),
        ('{"0": "cat", "00": "dog"}', "a number for two classes"),
        ('{"0": "cat", "1": "cat"}', "duplicate class, got cat"),
        ('{"0": "cat"', "expected JSON"),
    ],
)
def test_files_of_classes_that_could_mean_several_things_are_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "c").write_text(text)
    with pytest.raises(ResoluteError, match=words):
        read_classes(tmp_path / "c")
