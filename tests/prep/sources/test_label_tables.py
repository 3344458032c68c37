"""Tables and lists of labels: accepted formats, and errors that name the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from resolute.errors import ResoluteError
from resolute.prep.sources.tables.columns import IMAGE_NAMES, PhotoNames
from resolute.prep.sources.tables.photo_names import NameIndex
from resolute.prep.sources.tables.table import TargetTable


def rows(
    path: Path, text: str | bytes, columns: str | None = None, photos: PhotoNames = IMAGE_NAMES
) -> list[tuple[str, object]]:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return [(name, cells[0]) for name, cells, _ in TargetTable(str(path), columns, photos=photos).rows()]


def error(path: Path, text: str | bytes, columns: str | None = None) -> str:
    with pytest.raises(ResoluteError) as raised:
        rows(path, text, columns)
    return str(raised.value)


TABLE = "".join(f"{i}.jpg,cat\n" for i in range(40))


@pytest.mark.parametrize(
    ("line", "row", "later"),
    [
        (2, '7.jpg,"cat\n', ""),
        (7, '"7.jpg,cat\n', 'x.jpg,"dog"\n'),
        (41, '7.jpg,"cat\n', 'x.jpg,"the ""best"" dog"\n'),
        (3, '7.jpg,"cat\n', TABLE * 1000),
    ],
)
def test_an_open_quote_is_reported_at_the_line_where_it_opens(tmp_path: Path, line: int, row: str, later: str) -> None:
    lines = ["id,label\n", *TABLE.splitlines(keepends=True)]
    lines[line - 1] = row
    assert f"line {line} " in error(tmp_path / "t.csv", "".join(lines) + later)


def test_quoted_fields_may_span_lines(tmp_path: Path) -> None:
    text = 'id,note,label\na.jpg,"one\ntwo",cat\nb.jpg,,dog\nc.jpg\n'
    assert "line 5 has 1 fields" in error(tmp_path / "t.csv", text)
    assert rows(tmp_path / "t.csv", text.removesuffix("c.jpg\n")) == [("a.jpg", "cat"), ("b.jpg", "dog")]


def test_a_table_without_a_header_is_read_by_column_position(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    photos = NameIndex(["a.jpg", "b.jpg", "a b.jpg"])
    assert rows(path, "a,x,cat\nb,y,dog\n", "0,2", photos) == [("a", "cat"), ("b", "dog")]
    assert rows(path, "cat,a\ndog,b\n", "1,0", photos) == [("a", "cat"), ("b", "dog")]
    assert rows(path, 'a b.jpg,"big, cat"\nb.jpg,0\n') == [("a b.jpg", "big, cat"), ("b.jpg", "0")]
    assert rows(path, "id,x,label\na,x,cat\n", "0,2", photos) == [("a", "cat")], "a header is no row"
    assert rows(path, "1,0\na,cat\n", "1,0", photos) == [("a", "cat")], "names come before positions"
    assert "COLUMNS=0,1" in error(path, "c,x,cat\nd,y,dog\n")
    assert "has no column 3" in error(path, "a,x,cat\n", "0,3")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("my cats/1.jpg big cat", ("my cats/1.jpg", "big cat")),
        ('"my cats/1.jpg" "big cat"', ("my cats/1.jpg", "big cat")),
        ("my cats/1.jpg\tbig cat", ("my cats/1.jpg", "big cat")),
        ("cat.jpg/my 1.jpg big, cat", ("cat.jpg/my 1.jpg", "big, cat")),
        ('a.jpg 12"', ("a.jpg", '12"')),
        ("my cats/1.jpg", ("my cats/1.jpg", "")),
    ],
)
def test_paths_and_labels_in_a_list_may_contain_spaces(tmp_path: Path, line: str, expected: tuple[str, str]) -> None:
    assert rows(tmp_path / "l.txt", f"x.jpg 1\n{line}\n") == [("x.jpg", "1"), expected]


@pytest.mark.parametrize("line", ['my cats/1.jpg "big cat', "cat 0"])
def test_a_line_without_image_and_label_is_reported_by_number(tmp_path: Path, line: str) -> None:
    assert "line 2 is not an image and its label" in error(tmp_path / "l.txt", f"x.jpg 1\n{line}\n")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.csv", "id,label\na.jpg,cat\nb.jpg,größe\n"),
        ("l.txt", "x.jpg dog\na.jpg cat\nb.jpg größe\n"),
    ],
)
def test_encodings_other_than_utf8_are_reported_with_the_line(tmp_path: Path, name: str, text: str) -> None:
    assert rows(tmp_path / name, text.encode("utf-8-sig"))[-1] == ("b.jpg", "größe")
    assert "not UTF-8, line 3" in error(tmp_path / name, text.encode("latin-1"))
    for encoding in ("utf-16", "utf-16-le", "utf-16-be"):
        assert "not UTF-8, line 1: got UTF-16" in error(tmp_path / name, text.encode(encoding))
