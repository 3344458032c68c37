"""SPLIT: the table, or the photos' names, say which photos are trained and which are validated on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.prep.sources.tables.split_column import looks_like_a_split, parse_split
from tests.support.cli import prep
from tests.support.source_formats import noise_photos as photos

Rows = list[tuple[str, str, str]]
ROWS: Rows = [
    (f"{label}{number}.jpg", label, part)
    for label in ("cat", "dog")
    for number, part in enumerate(["train"] * 6 + ["val"] * 2 + ["test"] * 3)
]


def as_csv(rows: Rows, heads: str = "filename,label,split") -> str:
    return "\n".join([*([heads] if heads else []), *map(",".join, rows)]) + "\n"


def as_jsonl(rows: Rows) -> str:
    return "".join(json.dumps({"filename": name, "label": label, "split": part}) + "\n" for name, label, part in rows)


def made(folder: Path, *words: str) -> int:
    return prep(["--out", folder / "set", "--res", "32", "--workers", "1", *words])


def stored(folder: Path) -> dict[str, set[str]]:
    """The names of the photos of each split."""
    with ShardSet.open(folder / "set") as shards:
        return {split: set(shards.photo_names(split)) for split in shards.splits}


def names(part: str, rows: Rows = ROWS) -> set[str]:
    return {name for name, _, of in rows if of == part}


@pytest.mark.parametrize("write", [as_csv, as_jsonl])
def test_rows_belong_to_the_part_that_their_column_says_and_others_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], write: Callable[[Rows], str]
) -> None:
    photos(tmp_path / "photos", [name for name, _, _ in ROWS] + ["extra.jpg"])
    table = tmp_path / ("l.csv" if write is as_csv else "l.jsonl")
    table.write_text(write(ROWS))
    assert made(tmp_path, "--src", str(tmp_path / "photos"), "--labels", str(table), "--split", "split") == 0
    assert stored(tmp_path) == {"train": names("train"), "val": names("val")}
    out = capsys.readouterr().out
    assert "6 of other parts, 1 unlabelled" in out
    assert "listed 23 = 16 stored + 0 rejected + 7 ignored" in out


def test_a_list_of_paths_is_divided_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos(tmp_path, [name for name, _, _ in ROWS])
    (tmp_path / "list.csv").write_text(as_csv(ROWS))
    assert made(tmp_path, "--src", str(tmp_path / "list.csv"), "--split", "split:test=val") == 0
    assert stored(tmp_path) == {"train": names("train"), "val": names("val") | names("test")}
    assert "listed 22 = 22 stored + 0 rejected + 0 ignored" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("heads", "values", "split"),
    [
        ("filename,label,is_train", {"train": "1", "val": "0", "test": "2"}, "is_train:1=train,0=val,2=none"),
        ("filename,label,fold", {"train": "3", "val": "0", "test": "1"}, "fold:0=val,1=none,*=train"),
        ("filename,label,Part", {"train": "Training", "val": "DEV", "test": "testing"}, "Part"),
        ("", {"train": "train", "val": "valid", "test": "test"}, "2"),
    ],
)
def test_values_have_the_meaning_that_the_setting_gives_them(
    tmp_path: Path, heads: str, values: dict[str, str], split: str
) -> None:
    photos(tmp_path / "photos", [name for name, _, _ in ROWS])
    rows = [(name, label, values[part]) for name, label, part in ROWS]
    (tmp_path / "l.csv").write_text(as_csv(rows, heads))
    words = ["--src", str(tmp_path / "photos"), "--labels", str(tmp_path / "l.csv"), "--split", split]
    assert made(tmp_path, *words, *([] if heads else ["--columns", "0,1"])) == 0
    assert stored(tmp_path) == {"train": names("train"), "val": names("val")}


def test_a_pattern_divides_photos_by_their_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = [
        f"{label}/{part}_{i}.jpg" for label in ("cat", "dog") for part in ("train", "val", "test") for i in range(4)
    ]
    photos(tmp_path / "photos", listed)
    (tmp_path / "photos/cat/notes.md").write_text("x")
    words = ["--src", str(tmp_path / "photos")]
    assert made(tmp_path, *words, "--split", "(train|val|test)_") == 0
    assert stored(tmp_path) == {part: {name for name in listed if f"/{part}_" in name} for part in ("train", "val")}
    assert "listed 25 = 16 stored + 0 rejected + 9 ignored" in capsys.readouterr().out
    assert made(tmp_path, *words, "--split", "(cat|val)_", "--rebuild") == 2
    assert "does not match, got 'cat/test_0.jpg'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("heads", "values"),
    [
        ("filename,label,split", ("train", "val", "test")),
        ("filename,label,Usage", ("Training", "Valid", "Testing")),
        ("filename,label,is_train", ("1", "0", "0")),
        ("filename,label,fold", ("0", "1", "2")),
        ("split,filename,label", ("train", "val", "test")),
    ],
)
def test_a_column_that_seems_to_divide_the_photos_is_asked_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], heads: str, values: tuple[str, ...]
) -> None:
    photos(tmp_path / "photos", [name for name, _, _ in ROWS])
    renamed = dict(zip(("train", "val", "test"), values, strict=True))
    order = [
        ("filename", "label", heads.split(",")[2]).index(head) if head in ("filename", "label") else 2
        for head in heads.split(",")
    ]
    rows = [tuple((name, label, renamed[part])[i] for i in order) for name, label, part in ROWS]
    (tmp_path / "l.csv").write_text(as_csv(rows, heads))  # type: ignore[arg-type]
    words = ["--src", str(tmp_path / "photos"), "--labels", str(tmp_path / "l.csv")]
    for more in ([], ["--columns", "filename,label"], ["--val-frac", "0.2"]):
        assert made(tmp_path, *words, *more) == 2
        err = capsys.readouterr().err
        assert "may say which photos are trained and which are validated on, got " in err
        assert f"{values[0]} (1" in err
        assert "with SPLIT=none it divides nothing" in err
        assert f"SPLIT={heads.split(',')[order.index(2)]}" in err
    if heads == "filename,label,split":
        assert made(tmp_path, *words, "--columns", "filename,label", "--split", "none") == 0
        assert len(stored(tmp_path)["train"]) > len(names("train"))


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("set", ["basic", "fire", "water"]),
        ("part", ["hand", "foot"]),
        ("split", ["train"] * 5),
        ("fold", [str(i) for i in range(50)]),
        ("breed", ["dev", "pug", "collie"]),
    ],
)
def test_other_columns_are_no_question(name: str, cells: list[str]) -> None:
    assert looks_like_a_split(name, cells) is None


def test_photos_that_are_added_keep_the_parts_of_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos(tmp_path / "photos", [name for name, _, _ in ROWS])
    table = tmp_path / "l.csv"
    words = ["--src", str(tmp_path / "photos"), "--labels", str(table), "--split", "split"]
    before = [row for row in ROWS if not row[0].endswith(("5.jpg", "7.jpg"))]
    table.write_text(as_csv(before))
    assert made(tmp_path, *words) == 0
    table.write_text(as_csv(ROWS))
    assert made(tmp_path, *words, "--extend") == 0
    assert stored(tmp_path) == {"train": names("train"), "val": names("val")}
    capsys.readouterr()


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("nope", "has no column nope, got filename, label, split"),
        ("split:train=val,val=train,test", "got test, expected VALUE=train, VALUE=val or VALUE=none"),
        ("(train|val", "no regular expression"),
        ("(train)|(val)", "with 2 groups, expected one"),
        ("label", r"line 2: a value of SPLIT without a meaning, got 'cat'"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], split: str, message: str
) -> None:
    photos(tmp_path / "photos", [name for name, _, _ in ROWS])
    (tmp_path / "l.csv").write_text(as_csv(ROWS))
    words = ["--src", str(tmp_path / "photos"), "--labels", str(tmp_path / "l.csv"), "--columns", "filename,label"]
    assert made(tmp_path, *words, "--split", split) == 2
    assert message in capsys.readouterr().err


def test_split_is_one_of_the_ways_to_choose_the_validation_photos(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos(tmp_path / "photos", ["cat/1.jpg", "dog/1.jpg"])
    for more in (["--val-frac", "0.1"], ["--val", str(tmp_path)], ["--val-list", "x"]):
        assert made(tmp_path, "--src", str(tmp_path / "photos"), "--split", "split", *more) == 2
        assert "cannot be combined with --split" in capsys.readouterr().err
    assert made(tmp_path, "--src", str(tmp_path / "photos"), "--split", "split") == 2
    assert "SPLIT: has no effect for KIND=folders" in capsys.readouterr().err


def test_meanings_of_words() -> None:
    usual = parse_split("column")
    assert [usual.part(word, "x") for word in ("Train", " VALID ", "validation", "dev", "test")] == [
        "train",
        "val",
        "val",
        "val",
        None,
    ]
    with pytest.raises(ResoluteError, match="without a meaning, got 'holdout'"):
        usual.part("holdout", "x")
