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
from resolute.prep.sources.targets import is_word_for_none
from tests.support.listing import list_inputs, refusal
from tests.support.manifests import read_joined
from tests.support.source_formats import jpeg, pack_samples, pack_zip

Prep = Callable[..., Any]
WORDS = ("nan", "None", "NULL", "N/A", "no_label", "Unlabeled", "unknown", "?")
FORMS = ("csv", "jsonl", "parquet", "list", "folders", "zip", "samples")


class Case:
    """Photos with these labels in several forms; `run` gives the classes, or the message if prep refuses."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, labels: Sequence[str | None], form: str = "csv", **settings: Any) -> list[str] | str:
        photos, table = self.folder / form / "photos", self.folder / form / f"t.{form}"
        src: dict[str, Any] = {"src": photos, "labels": table}
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
            src = {"src": photos / "l.txt"}
        elif form == "zip":
            files = [(f"{label}/{name}", jpeg(i)) for i, (name, label) in enumerate(rows)]
            src = {"src": pack_zip(self.folder / "a.zip", files), "kind": "archive"}
        elif form == "samples":
            samples = [(name, jpeg(i), {"txt": str(label).encode()}) for i, (name, label) in enumerate(rows)]
            src = {"src": pack_samples(self.folder / "a.tar", samples)}
        else:
            src = {"src": photos, "kind": "folders"}
        try:
            self.listed = list_inputs(self.folder / "work", **src, **settings)
        except ResoluteError as error:
            return str(error)
        return self.listed.classes


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def write_photos(folder: Path, *names: str) -> None:
    """Photos of different contents."""
    for i, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(jpeg(i) + bytes(i))


@pytest.mark.parametrize(("form", "word"), [*(("csv", word) for word in WORDS), *((form, "nan") for form in FORMS[1:])])
def test_words_for_a_missing_label_are_asked_about(case: Case, form: str, word: str) -> None:
    labels = ["cat", "dog", word, "cat"]
    assert f"002.jpg has the label {word!r}, expected a class; leave such photos out with" in case.run(labels, form)
    assert case.run(labels, form, unlabelled="drop") == ["cat", "dog"]
    assert "1 unlabelled" in case.listed.ignored
    assert case.run(labels, form, unlabelled="keep") == sorted(["cat", "dog", word])


@pytest.mark.parametrize("form", ["csv", "folders", "zip"])
def test_a_word_that_classes_lists_is_a_class(case: Case, form: str) -> None:
    (case.folder / "classes.txt").write_text("none\nscratch\n")
    for unlabelled in ("refuse", "drop"):
        found = case.run(["none", "scratch"], form, classes=case.folder / "classes.txt", unlabelled=unlabelled)
        assert found == ["none", "scratch"]


def test_the_words_that_are_classes_of_a_set_stay_classes_when_it_is_extended(tmp_path: Path, prep: Prep) -> None:
    photos, table = tmp_path / "photos", tmp_path / "t.csv"
    write_photos(photos, *(f"{i:03d}.jpg" for i in range(4)))
    table.write_text("image,label\n000.jpg,cat\n001.jpg,unknown\n002.jpg,cat\n")
    words = ("--src", photos, "--labels", table, "--out", tmp_path / "s", "--val-frac", 0)
    assert prep(*words, "--res", "32", "--unlabelled", "keep").status == 0
    table.write_text(table.read_text() + "003.jpg,unknown\n")
    ran = prep(*words, "--extend")
    assert ran.status == 0, ran.err
    assert read_joined(tmp_path / "s")["classes"] == ["cat", "unknown"]
    table.write_text(table.read_text() + "003.jpg,nan\n")
    assert "has the label 'nan'" in prep(*words, "--extend").err


@pytest.mark.parametrize("kind", ["folders", "archive"])
def test_a_folder_of_unlabelled_photos_is_left_out_before_others_are_judged(tmp_path: Path, kind: str) -> None:
    src, work = tmp_path / "photos", tmp_path / "work"
    names = ("cat/0.jpg", "dog/1.jpg", "unlabeled/2.jpg", "unlabeled/3.jpg")
    write_photos(src, *names)
    if kind == "archive":
        src = pack_zip(tmp_path / "a.zip", [(name, (src / name).read_bytes()) for name in names])
    assert f"UNLABELLED=drop to leave out unlabeled, or KIND={kind} if" in refusal(work, src=src)
    assert "has the label 'unlabeled'" in refusal(work, src=src, kind=kind)
    listed = list_inputs(work, src=src, unlabelled="drop")
    assert "2 unlabelled" in listed.ignored
    assert listed.classes == ["cat", "dog"]


def test_a_word_for_no_label_in_the_validation_part_is_asked_about(tmp_path: Path, prep: Prep) -> None:
    write_photos(tmp_path, "train/cat/1.jpg", "train/dog/22.jpg", "val/cat/333.jpg", "val/unknown/4444.jpg")
    words = ("--src", tmp_path / "train", "--val", tmp_path / "val", "--out", tmp_path / "s", "--res", "32")
    assert "unknown/4444.jpg has the label 'unknown'" in prep(*words).err
    assert not (tmp_path / "s").exists()
    ran = prep(*words, "--unlabelled", "drop")
    assert ran.status == 0, ran.err
    assert "1 unlabelled" in ran.out
    assert read_joined(tmp_path / "s")["classes"] == ["cat", "dog"]


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        *((word, True) for word in ("<unk>", "(none)", "n.a.", "[Unknown]", "not-labelled", "?", "???", "--", "NaT")),
        *((word, False) for word in ("other", "empty", "background", "no finding", "none of these", "C", "7", "", "*")),
    ],
)
def test_words_that_are_written_for_no_label(text: str, is_one: bool) -> None:
    assert is_word_for_none(text) == is_one


def test_a_word_for_a_missing_label_among_several_labels_is_asked_about(case: Case) -> None:
    labels = ["cat|dog", "dog|unknown", "cat"]
    assert "001.jpg has the label 'unknown'" in case.run(labels, target="labels:bar")
    assert case.run(labels, target="labels:bar", unlabelled="drop") == ["cat", "dog"]


def test_class_numbers_stay_numbers_when_words_are_dropped(case: Case) -> None:
    labels = [*(str(i % 11) for i in range(22)), "nan"]
    assert case.run(labels, unlabelled="drop") == [str(i) for i in range(11)]
    assert case.run([f"{i % 11}.0" for i in range(22)]) == [str(i) for i in range(11)], "as pandas writes them"


def test_words_for_a_missing_number_are_unlabelled(case: Case) -> None:
    labels = ["0.5", "nan", "0.25", None]
    assert "001.jpg is unlabelled" in case.run(labels)
    assert case.run(labels, unlabelled="drop") == []
    assert "2 unlabelled" in case.listed.ignored


def test_photos_without_some_of_several_numbers_are_asked_about(tmp_path: Path) -> None:
    table, work = tmp_path / "t.csv", tmp_path / "work"
    write_photos(tmp_path / "photos", *(f"{i:03d}.jpg" for i in range(3)))
    source = {"src": tmp_path / "photos", "labels": table}
    for cell, got in (("nan", "'nan'"), ("", "nothing"), ("None", "'None'")):
        table.write_text(f"image,a,b\n000.jpg,1.5,2\n001.jpg,1,{cell}\n002.jpg,2,3\n")
        assert f"line 3: got {got} in column b, expected a number" in refusal(work, **source)
        assert "1 unlabelled" in list_inputs(work, **source, unlabelled="drop").ignored
    table.write_text("image,a,b\n000.jpg,1.5,2\n001.jpg,1,inf\n")
    assert "line 3: got 'inf' in column b" in refusal(work, **source, unlabelled="drop")


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_floats_that_are_all_whole_are_asked_about(tmp_path: Path, form: str) -> None:
    write_photos(tmp_path, *(f"{i}.jpg" for i in range(4)))
    rows = [{"image": f"{i}.jpg", "label": float(i % 2)} for i in range(4)]
    table = tmp_path / f"t.{form}"
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if form == "jsonl":
        table.write_text((tmp_path / "rows.jsonl").read_text())
    else:
        duckdb.sql(f"COPY (SELECT image, label::DOUBLE AS label FROM '{tmp_path}/rows.jsonl') TO '{table}'")
    work = tmp_path.with_name(f"{tmp_path.name}-work")
    message = refusal(work, src=tmp_path, labels=table)
    assert "set TARGET=class for class numbers, or TARGET=values for numbers to predict" in message
    assert list_inputs(work, src=tmp_path, labels=table, target="class").classes == ["0", "1"]
    assert list_inputs(work, src=tmp_path, labels=table, target="values").classes == []


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
        ("07", "7", True),
        ("a\u2013b", "a-b", True),
        ("rock\u2019n", "rock'n", True),
        ("7.0", "7", True),
        ("1.05", "1.5", False),
        ("v07", "v7", False),
        ("cat", "cats", False),
    ],
)
def test_names_are_alike_that_one_cannot_tell_apart(one: str, other: str, are_alike: bool) -> None:
    assert (alike(one) == alike(other)) == are_alike


@pytest.mark.parametrize("form", FORMS)
def test_class_names_that_differ_in_form_alone_are_asked_about(case: Case, form: str) -> None:
    labels = ["T-shirt", "t shirt", "T-shirt", "dog"]
    message = case.run(labels, form)
    assert "got 'T-shirt' (2 photos) and 't shirt' (1 photo), expected one name for a class" in message
    (case.folder / "classes.txt").write_text("T-shirt\nt shirt\ndog\n")
    assert case.run(labels, form, classes=case.folder / "classes.txt") == ["T-shirt", "t shirt", "dog"]


def test_blanks_around_a_label_mean_nothing_in_any_table(case: Case) -> None:
    for form in ("csv", "jsonl", "parquet"):
        assert case.run(["cat", "cat ", " dog", "dog"], form) == ["cat", "dog"]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("label", "looks"),
    [("a dog runs {} times there", "captions"), ("x{}", "names or numbers of"), ("1{:02d}", "to predict")],
)
def test_nearly_a_class_per_photo_is_asked_about(case: Case, form: str, label: str, looks: str) -> None:
    labels = [label.format(i) for i in range(12)]
    message = case.run(labels, form)
    assert "nearly a class per photo, got 12 different labels for 12 photos, 12 of them once" in message
    if form in ("jsonl", "parquet", "samples") and looks == "to predict":  # texts in JSON are names
        looks = "names or numbers of the photos"
    assert ("a folder for each photo" if form in ("folders", "zip") else looks) in message
    assert len(case.run(labels, form, target="class")) >= 12
    assert len(case.run([label.format(i % 6) for i in range(12)], form)) >= 6


def test_large_gaps_between_class_numbers_are_asked_about(case: Case) -> None:
    labels = ["0", "1", "900012", "0", "1", "900012"]
    (case.folder / "names.json").write_text('{"0": "cat", "1": "dog", "900012": "elk"}')
    for form in ("csv", "list"):
        message = case.run(labels, form)
        assert "got 3 different ones such as 0, 1 and 900012, which would make 900013 classes" in message
        assert case.run(labels, form, classes=case.folder / "names.json") == ["cat", "dog", "elk"]
    assert len(case.run(["0", "1", "27"] * 2)) == 28, "small gaps are no question"


def test_numbers_that_count_from_one_are_said(case: Case) -> None:
    (case.folder / "names.json").write_text('{"1": "cat", "2": "dog", "3": "elk"}')
    for form in ("csv", "list"):
        assert case.run(["1", "2", "3", "1", "2", "3"], form) == ["0", "1", "2", "3"]
        assert "the labels count from 1 to 3, so that output 0 of a model stays unused" in case.listed.said
        assert case.run(["1", "2", "3"], form, classes=case.folder / "names.json") == ["cat", "dog", "elk"]


def test_few_captions_are_doubted_and_few_names_are_not(case: Case) -> None:
    assert "but captions, name the column" in case.run([f"a dog runs {i} times" for i in range(4)])
    assert len(case.run([f"dog {i}" for i in range(7)], "folders")) == 7


def test_a_label_of_the_validation_part_that_differs_in_form_is_explained(tmp_path: Path) -> None:
    write_photos(tmp_path, "train/cat/1.jpg", "train/dog/2.jpg", "val/Cat/3.jpg")
    message = refusal(tmp_path / "work", src=tmp_path / "train", val=tmp_path / "val", val_frac=None)
    assert "got 1 such as 'Cat', expected only those of" in message
    assert "('cat' differs only in form)" in message


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
        ",class name\n0,cat\n1,dog\n2,elk\n",
        "index label\n0 cat\n1 dog\n2 elk\n",
        "0) cat\n1) dog\n2) elk",
        "cat: 0\ndog: 1\nelk: 2",
        "cat=0\ndog=1\nelk=2",
        "0 - cat\n1 - dog\n2 - elk",
        '"cat"\n"dog"\n"elk"\n',
        "0: cat\n1: dog\n2: elk",
    ],
)
def test_classes_may_be_names_or_a_map(tmp_path: Path, text: str) -> None:
    (tmp_path / "classes").write_text(text)
    assert read_classes(tmp_path / "classes").names == ("cat", "dog", "elk")


@pytest.mark.parametrize("text", ['{"cat": 0, "elk": 2, "dog": 1}', "cat\ndog\nelk\n"])
def test_labels_are_numbers_or_names_of_the_file_of_classes(case: Case, text: str) -> None:
    path = case.folder / "classes"
    path.write_text(text)
    assert case.run(["0", "2", "1", "0"], classes=path) == ["cat", "dog", "elk"]
    assert case.run(["cat", "elk", "dog"], "folders", classes=path) == ["cat", "dog", "elk"]


@pytest.mark.parametrize("form", ["csv", "folders", "zip"])
def test_labels_that_are_numbers_with_zeros_in_front_are_looked_up_in_a_map(tmp_path: Path, form: str) -> None:
    names = tmp_path / "names.json"
    names.write_text('{"0": "cat", "1": "dog", "2": "elk"}')
    for labels in (["00000", "00002", "00001"], ["cat", "elk", "dog"]):
        (tmp_path / labels[0]).mkdir()
        assert Case(tmp_path / labels[0]).run(labels, form, classes=names) == ["cat", "dog", "elk"]
    assert "classes that" in Case(tmp_path).run(["0", "1", "7"], "folders", classes=names)


def labelled_parts(folder: Path, train: Sequence[object], val: Sequence[object]) -> dict[str, Path]:
    """SRC and VAL, and their tables, of photos with these labels."""
    for part, labels in (("train", train), ("val", val)):
        (folder / part).mkdir()
        for i, _ in enumerate(labels):
            (folder / part / f"{part}{i}.jpg").write_bytes(jpeg(i + 10 * len(part)))
        rows = "".join(f"{part}{i}.jpg,{label}\n" for i, label in enumerate(labels))
        (folder / f"{part}.csv").write_text("image,label\n" + rows)
    tables = {"labels": folder / "train.csv", "val_labels": folder / "val.csv"}
    return {"src": folder / "train", "val": folder / "val", **tables}


def test_names_that_are_numbers_are_matched_by_name_in_both_parts(tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_text("747\n767\n")
    source = labelled_parts(tmp_path, ("767", "747"), ("767", "767"))
    listed = list_inputs(tmp_path / "work", **source, classes=tmp_path / "c.txt", val_frac=None)
    assert listed.inputs.sources["val"].labels.tolist() == [1, 1]
    assert listed.inputs.sources["train"].labels.tolist() == [1, 0]


def test_names_that_are_numbers_in_another_order_are_asked_about(case: Case) -> None:
    (case.folder / "c.txt").write_text("1\n0\n")
    (case.folder / "c.json").write_text('{"1": "1", "0": "0"}')
    for form in ("csv", "list"):
        message = case.run(["1", "0", "1"], form, classes=case.folder / "c.txt")
        assert "got 1 in place 0 (from 0), expected one meaning of the label 1, its name or its place" in message
        assert case.run(["1", "0", "1"], form, classes=case.folder / "c.json") == ["0", "1"]
    assert case.run(["1", "0", "1"], "folders", classes=case.folder / "c.txt") == ["1", "0"], "always names"


def test_names_of_classes_with_numbers_are_told_to_be_written_as_a_list(case: Case) -> None:
    (case.folder / "c").write_text("Alpha 1\nBeta 2\n")
    (case.folder / "c.json").write_text('["Alpha 1", "Beta 2"]')
    for form in ("csv", "folders"):
        message = case.run(["Alpha 1", "Beta 2"], form, classes=case.folder / "c")
        assert "read as a map of numbers and names (if these are names with numbers, write a JSON list)" in message
        assert case.run(["Alpha 1", "Beta 2"], form, classes=case.folder / "c.json") == ["Alpha 1", "Beta 2"]


def test_a_label_that_differs_in_form_from_a_listed_class_is_explained(case: Case) -> None:
    (case.folder / "c").write_text("golden retriever\nbeagle\n")
    for form in ("csv", "folders"):
        message = case.run(["golden_retriever", "beagle"], form, classes=case.folder / "c")
        assert "'golden_retriever'" in message
        assert "('golden retriever' differs only in form)" in message


def test_a_map_may_count_from_one_also_for_the_validation_part(tmp_path: Path) -> None:
    path, work = tmp_path / "classes.txt", tmp_path / "work"
    path.write_text("1 001.Black_footed\n2 002.Laysan\n")
    source = labelled_parts(tmp_path, (1, 2, 1, 2), (2, 1))
    listed = list_inputs(work, **source, classes=path, val_frac=None)
    assert "read as a map of numbers and names: 1 is 001.Black_footed, 2 is 002.Laysan" in listed.said
    assert listed.classes == ["001.Black_footed", "002.Laysan"]
    (tmp_path / "val.csv").write_text("image,label\nval0.jpg,3\nval1.jpg,1\n")
    message = refusal(work, **source, classes=path, val_frac=None)
    assert "got 3 in line 2, expected one of its 2, 1 to 2" in message


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("AM General Hummer SUV 2000\nAcura RL Sedan 2012\nAcura TL 2012\n", 3),
        ("golden retriever\nbeagle\n", 2),
        ("747\n707\n", 2),
        ("Boeing 747\nBoeing 707\n", 2),
        ("Grade 0\nGrade 1\nGrade 2\nungradable\n", 4),
        ("yes\nno\n", 2),
        ("tench, Tinca tinca\ngoldfish, Carassius auratus\n", 2),
        ('"747"\n"707"\n', 2),
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
        ("Boeing 747\nAirbus 320\n", "expected different numbers from 0 or 1 without gaps, or names alone"),
        ("0 cat\n7 dog\n", "expected different numbers from 0 or 1 without gaps"),
        ("0 cat\n0 dog\n1 elk\n", "expected different numbers from 0 or 1 without gaps"),
        ("0 cat\n1 dog\nelk\n", "line 3: got 'elk', expected a number and a name, as in '0 cat'"),
        ("0,cat,pet\n1,dog,pet\n", "line 1: got '0,cat,pet', which has 3 fields"),
        ("names:\n  0: cat\n  1: dog\n", "line 1: got 'names:'"),
        ("nc: 2\nnames: ['cat', 'dog']\n", "line 1: got 'nc: 2', which looks like YAML"),
        ("- cat\n- dog\n", "which looks like YAML"),
        ("item {\n id: 1\n}\n", "which looks like YAML or another form"),
        ("n01\tcat\nn02\tdog\n", "looks like a tab"),
        ("# two classes\ncat\ndog\n", "looks like a remark"),
        ("class name\ncat\ndog\n", "looks like the name of a column"),
        ("cat, dog, elk\n", "looks like several names"),
        ('{"cat": 0, "cat": 1}', "duplicate class, got cat"),
        ('{"0": " "}', "expected a map of numbers and names"),
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
