"""The columns of a table are chosen by its cells, or asked of the user."""

from __future__ import annotations

import json
from pathlib import Path

import duckdb
import pytest

from resolute.errors import ResoluteError
from resolute.prep.sources.tables.photo_names import NameIndex
from resolute.prep.sources.tables.table import TargetTable

PHOTOS = NameIndex(["0.jpg", "1.jpg", "2.jpg", "3.jpg", "more/IMG_4.png"])


def read(
    path: Path, text: str, columns: str | None = None, known: tuple[str, ...] = (), photos: NameIndex = PHOTOS
) -> dict[str, object]:
    path.write_text(text)
    table = TargetTable(str(path), columns, photos=photos, known_classes=known)
    return {name: cells[0] if len(cells) == 1 else cells for name, cells, _ in table.rows()}


def question(path: Path, text: str, columns: str | None = None, known: tuple[str, ...] = ()) -> str:
    with pytest.raises(ResoluteError) as raised:
        read(path, text, columns, known)
    assert "\n" not in str(raised.value)
    return str(raised.value)


WANT = {"3.jpg": "cat", "2.jpg": "dog", "1.jpg": "cat", "0.jpg": "dog"}
BODY = "0,3.jpg,cat\n1,2.jpg,dog\n2,1.jpg,cat\n3,0.jpg,dog\n"


@pytest.mark.parametrize("header", ["id,image,label", ",image,label", "Unnamed: 0,image,breed", "index,file,animal"])
def test_a_running_number_is_neither_the_photo_nor_the_target(tmp_path: Path, header: str) -> None:
    assert read(tmp_path / "t.csv", f"{header}\n{BODY}") == WANT


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.csv", "who,what\n3.jpg,cat\n2.jpg,dog\n1.jpg,cat\n0.jpg,dog\n"),
        ("t.csv", "3.jpg,cat\n2.jpg,dog\n1.jpg,cat\n0.jpg,dog\n"),
        ("t.csv", "what;who\ncat;3.jpg\ndog;2.jpg\ncat;1.jpg\ndog;0.jpg\n"),
        ("t.csv", "cat|3.jpg\ndog|2.jpg\ncat|1.jpg\ndog|0.jpg\n"),
        ("t.tsv", "id\tlabel\ta, b, c\n" + "".join(f"{name}\t{label}\tx, y\n" for name, label in WANT.items())),
        ("t.txt", "image label\n3.jpg cat\n2.jpg dog\n1.jpg cat\n0.jpg dog\n"),
        ("t.txt", "#image label\n3.jpg cat\n2.jpg dog\n1.jpg cat\n0.jpg dog\n"),
        ("t.txt", "image,label\n3.jpg,cat\n2.jpg,dog\n1.jpg,cat\n0.jpg,dog\n"),
        ("t.txt", "cat 3.jpg\ndog 2.jpg\ncat 1.jpg\ndog 0.jpg\n"),
        ("t.csv", "sep=;\nfile;label\n3.jpg;cat\n2.jpg;dog\n1.jpg;cat\n0.jpg;dog\n"),
        ("t.dat", "cat\t3.jpg\ndog\t2.jpg\ncat\t1.jpg\ndog\t0.jpg\n"),
        ("t.csv", "file,label,mask\n3.jpg,cat," + "1 2 " * 60_000 + "\n2.jpg,dog,\n1.jpg,cat,\n0.jpg,dog,\n"),
        ("t.jsonl", "".join(json.dumps({"n": i, "f": n, "label": v}) + "\n" for i, (n, v) in enumerate(WANT.items()))),
    ],
)
def test_the_cells_decide_columns_delimiter_and_header(tmp_path: Path, name: str, text: str) -> None:
    assert read(tmp_path / name, text) == WANT


def test_parquet_columns_are_chosen_by_their_cells_too(tmp_path: Path) -> None:
    rows = ", ".join(f"({i}, '{name}', '{label}', 'x'::BLOB)" for i, (name, label) in enumerate(WANT.items()))
    path = tmp_path / "t.parquet"
    duckdb.sql(f"COPY (SELECT * FROM (VALUES {rows}) AS t(id, photo, label, thumb)) TO '{path}'")
    table = TargetTable(str(path), None, photos=PHOTOS)
    assert {name: cells[0] for name, cells, _ in table.rows()} == WANT


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b,label\n0.jpg,3.jpg,x\n1.jpg,2.jpg,y\n", "several columns name photos, got a (2 of 2 rows), b (2 of 2"),
        # No file is there as it is written, so that a number that is the stem of another photo decides nothing.
        ("id,image,label\n0,x/3.jpg,cat\n1,x/2.jpg,dog\n2,x/1.jpg,cat\n", "may be in several columns, got id (3 of 3"),
        ("id,url,label\n0,http://h/3.jpg,cat\n1,http://h/2.jpg,dog\n", "may be in several columns, got id (2 of 2"),
        ("id,label\nx,cat\ny,dog\n", "no column names photos, got id (such as 'x'), label (such as 'cat')"),
        ("x,cat\ny,dog\n", "no column names photos"),
        ("image,label,class\n0.jpg,1,cat\n1.jpg,2,dog\n", "several columns may be the target, got label"),
        ("image,id,sort\n0.jpg,10,x\n1.jpg,11,y\n2.jpg,12,x\n", "several columns may be the target, got id"),
        ("0.jpg,cat,0.9\n1.jpg,dog,0.8\n", "COLUMNS=0,2"),
        ("image,label\n0.jpg,cat,x\n1.jpg,dog\n", "line 2 has 3 fields, got '0.jpg,cat,x', expected 2 as in line 1"),
        ("image,label\n0.jpg,cat\n1.jpg\n", "line 3 has 1 fields"),
    ],
)
def test_what_the_cells_do_not_decide_is_asked(tmp_path: Path, text: str, words: str) -> None:
    assert words in question(tmp_path / "t.csv", text)


def test_columns_answers_the_question(tmp_path: Path) -> None:
    text = "a,b,label\n0.jpg,3.jpg,x\n1.jpg,2.jpg,y\n"
    assert read(tmp_path / "t.csv", text, "b,label") == {"3.jpg": "x", "2.jpg": "y"}
    assert read(tmp_path / "t.csv", text, "1,2") == {"3.jpg": "x", "2.jpg": "y"}
    words = "IMG_4 2 1 1\n0 1 1 1\n1 1 1 1\n"
    assert "COLUMNS=0,1" in question(tmp_path / "t.txt", words)
    assert read(tmp_path / "t.txt", words, "0,1") == {"IMG_4": "2", "0": "1", "1": "1"}
    assert "2 columns called x" in question(tmp_path / "t.csv", "f,x,x\n0.jpg,a,b\n1.jpg,a,b\n", "f,x")


def test_the_classes_of_the_training_part_decide_between_columns(tmp_path: Path) -> None:
    text = "".join(f"{i}.jpg\tn0{i % 2}\t0\t{i}\t44\n" for i in range(4))
    assert "COLUMNS=" in question(tmp_path / "val.txt", text)
    assert read(tmp_path / "val.txt", text, known=("n00", "n01", "n02")) == {f"{i}.jpg": f"n0{i % 2}" for i in range(4)}


def test_names_in_a_list_may_lack_their_suffix_and_labels_may_hold_blanks(tmp_path: Path) -> None:
    assert read(tmp_path / "l.txt", "0 Boeing 717\nIMG_4 707-320\n") == {"0": "Boeing 717", "IMG_4": "707-320"}


@pytest.mark.parametrize(
    ("document", "labels"),
    [
        ([(0, 1), (1, 2)], {"0.jpg": "cat", "1.jpg": "dog", "2.jpg": None}),
        ([(0, 1), (0, 2), (0, 1), (1, 2)], {"0.jpg": ["cat", "dog"], "1.jpg": ["dog"], "2.jpg": []}),
    ],
)
def test_coco_json_gives_a_class_or_labels(
    tmp_path: Path, document: list[tuple[int, int]], labels: dict[str, object]
) -> None:
    coco: dict[str, object] = {
        "images": [{"id": n, "file_name": f"{n}.jpg"} for n in range(3)],
        "annotations": [{"image_id": image, "category_id": category} for image, category in document],
        "categories": [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}],
    }
    for indent in (None, 1):
        assert read(tmp_path / "t.json", json.dumps(coco, indent=indent)) == labels
    del coco["annotations"]
    assert "no annotations" in question(tmp_path / "t.json", json.dumps(coco))
    assert "not COCO's JSON" in question(tmp_path / "t.json", '{"0.jpg": "cat",\n"1.jpg": "dog"}')


def test_tables_are_joined_by_their_first_columns(tmp_path: Path) -> None:
    (tmp_path / "images.txt").write_text("1 0.jpg\n2 1.jpg\n3 more/IMG_4.png\n")
    (tmp_path / "classes.txt").write_text("1 7\n3 8\n2 7\n")
    path = f"{tmp_path / 'images.txt'},{tmp_path / 'classes.txt'}"

    def joined() -> list[tuple[str, object]]:
        return [(name, cells[0]) for name, cells, _ in TargetTable(path, None, photos=PHOTOS).rows()]

    assert joined() == [("0.jpg", "7"), ("1.jpg", "7"), ("more/IMG_4.png", "8")]
    for text, words in (
        ("1 7\n3 8\n", "has no row for id '2'"),
        ("1 7\n2 7\n3 8\n4 9\n", "got 1 such as '4'"),
        ("1 7\n2 7\n3 8\n3 9\n", "line 4: id '3' again"),
    ):
        (tmp_path / "classes.txt").write_text(text)
        with pytest.raises(ResoluteError, match=words):
            joined()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("PK\3\4\0\0", "got an Excel file or a zip archive"),
        ("<html>", "got XML or HTML"),
        ("image,label\n", "no rows, got only"),
        ("", "no rows, got an empty file"),
    ],
)
def test_files_that_are_no_tables_are_named(tmp_path: Path, text: str, words: str) -> None:
    assert words in question(tmp_path / "t.csv", text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.jsonl", '{"f": "0.jpg", "label": "a"}\n{"f": "1\\u0000.jpg", "label": "b"}\n'),
        ("t.jsonl", '{"f": "0.jpg", "label": "a"}\n{"f": "1\\ud83d.jpg", "label": "b"}\n'),
        ("t.csv", "0.jpg,a\n1\0.jpg,b\n"),
        ("t.txt", "0.jpg a\n1\0.jpg b\n"),
    ],
)
def test_names_that_no_file_can_have_are_refused_with_their_line(tmp_path: Path, name: str, text: str) -> None:
    assert "line 2: got" in question(tmp_path / name, text)
