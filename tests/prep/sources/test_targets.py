"""The meaning of tables of targets: kinds recognised, kinds set, and errors with line and column."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

from resolute.errors import ResoluteError
from resolute.prep.sources import targets
from resolute.prep.sources.image_ref import Ignored, Label, SourceTarget
from resolute.prep.sources.tables.table import TargetTable
from resolute.prep.sources.targets import name_and_unit, parse_target

NAMES = ["bird", "cat", "dog", "fish"]
RNG = np.random.default_rng(0)
SETS = [tuple(name for name in NAMES if RNG.random() < 0.4) for _ in range(40)]
Rows = Sequence[Sequence[object]]


def read(
    tmp_path: Path,
    header: Sequence[str],
    rows: Rows,
    *,
    columns: str | None = None,
    target: str | None = None,
    **settings: Any,
) -> tuple[SourceTarget, list[Label | None]]:
    """A table with a column of image names before those of `rows`; `settings` are those of `TargetSetting`."""
    path = tmp_path / "t.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["image_id", *header], *([f"{i}.jpg", *row] for i, row in enumerate(rows))])
    table = TargetTable(str(path), columns, parse_target(target)._replace(**settings))
    return table.target(), [label for _, label, _ in table]


def error(tmp_path: Path, header: Sequence[str], rows: Rows, **options: Any) -> str:
    with pytest.raises(ResoluteError) as raised:
        read(tmp_path, header, rows, **options)
    assert re.fullmatch(r".+: .*got .+expected .+; .+", str(raised.value)), raised.value
    assert "\n" not in str(raised.value)
    return str(raised.value)


WRITTEN: dict[str, Callable[[Sequence[str]], str]] = {
    "space": " ".join,
    "bar": "|".join,
    "semicolon": "; ".join,
    "comma": ",".join,
    "json": json.dumps,
    "python": lambda names: repr(list(names)),
    "0 and 1": lambda names: "",
}


@pytest.mark.parametrize("how", WRITTEN)
def test_labels_are_read_however_they_are_written(tmp_path: Path, how: str) -> None:
    header: Sequence[str] = ["tags"]
    rows: Rows = [[WRITTEN[how](own)] for own in SETS]
    if how == "0 and 1":
        header, rows = NAMES, [[int(name in own) for name in NAMES] for own in SETS]
    has_sign = how in ("space", "bar", "semicolon", "comma")
    target, labels = read(tmp_path, header, rows, target=f"labels:{how}" if has_sign else None)
    assert target.kind == "labels"
    assert [set(own or ()) for own in labels] == [set(own) for own in SETS]
    assert () in labels, "a photo without labels is a sample"
    assert len(target.about) == 4, "one line, and three rows"
    assert "TARGET=labels" in target.about[0]
    if has_sign:
        message = error(tmp_path, header, rows, target="labels")
        assert "TARGET=labels:space, :comma, :semicolon or :bar" in message
    if how in ("bar", "semicolon"):
        assert "set TARGET=labels:bar or labels:semicolon" in error(tmp_path, header, rows)
    if how in ("space", "comma"):
        target, _ = read(tmp_path, header, rows)
        assert target.kind == "class"
        assert "set TARGET=labels:space or labels:comma" in target.about[0]


@pytest.mark.parametrize("kind", ["json", "csv"])
def test_lists_of_numbers_are_values_if_one_has_a_fraction(tmp_path: Path, kind: str) -> None:
    def read_lists(lists: Sequence[object]) -> tuple[SourceTarget, list[Label | None]]:
        if kind == "csv":
            return read(tmp_path, ["gaze (deg)"], [[json.dumps(each)] for each in lists])
        rows = [json.dumps({"file_name": f"{i}.jpg", "gaze (deg)": each}) for i, each in enumerate(lists)]
        (tmp_path / "t.jsonl").write_text("\n".join(rows))
        table = TargetTable(str(tmp_path / "t.jsonl"), None)
        return table.target(), [label for _, label, _ in table]

    target, labels = read_lists([[0.5, 1.5], [1, 2]])
    assert (target.kind, target.names, target.units) == ("values", ("gaze 0", "gaze 1"), ("deg", "deg"))
    assert labels == [(0.5, 1.5), (1.0, 2.0)]
    target, labels = read_lists([[1, 2], [], [7]])
    assert (target.kind, labels) == ("labels", [("1", "2"), (), ("7",)])
    target, labels = read_lists([["red", "big"], ["red"]])
    assert (target.kind, labels) == ("labels", [("red", "big"), ("red",)])


def test_json_lines_and_parquet_are_tables_too(tmp_path: Path) -> None:
    rows = [{"file_name": "a.jpg", "label": "3", "n": 5}, {"file_name": "b.jpg", "label": "x", "n": 7}]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    duckdb.execute(f"COPY (FROM '{tmp_path}/t.jsonl') TO '{tmp_path}/t.parquet' (FORMAT parquet)")
    for name in ("t.jsonl", "t.parquet"):
        texts = TargetTable(str(tmp_path / name), None)
        assert (texts.target().kind, list(texts)) == ("class", [("a.jpg", "3", 1), ("b.jpg", "x", 2)])
        numbers = TargetTable(str(tmp_path / name), "file_name,n")
        assert (numbers.target().kind, list(numbers)) == ("class", [("a.jpg", "5", 1), ("b.jpg", "7", 2)])
        assert (texts.numbered, numbers.numbered) == (False, True)
        values = TargetTable(str(tmp_path / name), "file_name,n", parse_target("values"))
        assert (values.target().names, list(values)) == (("n",), [("a.jpg", (5.0,), 1), ("b.jpg", (7.0,), 2)])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"file_name": "b.jpg", "label": {"x": 1}}', "line 2: got {'x': 1}, expected a text, a number or a list"),
        ('{"file_name": "b.jpg"', "line 2 is not a row"),
    ],
)
def test_unusable_json_lines_are_reported_with_their_line(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(f'{{"file_name": "a.jpg", "label": "a"}}\n{line}\n')
    with pytest.raises(ResoluteError, match=re.escape(words)):
        TargetTable(str(path), None).target()


@pytest.mark.parametrize(
    "texts",
    [
        ["golden retriever", "labrador retriever", "beagle", "great dane"],
        ["tench, Tinca tinca", "goldfish, Carassius auratus", "crane", "crane, bird"],
        ["007", "01"],
        ["1.0", "01"],
        ["big, cat", "0"],
        ["16 0", "3 2"],
        ["nan", "inf"],
        ["1.5 T", "3 T", "MRI"],
        ["[", "[a"],
    ],
)
def test_what_may_be_names_of_classes_stays_a_class(tmp_path: Path, texts: list[str]) -> None:
    rows = [[texts[i % len(texts)]] for i in range(40)]
    target, labels = read(tmp_path, ["label"], rows)
    assert target.kind == "class"
    assert labels == [row[0] for row in rows]


def test_columns_with_a_single_one_in_each_row_are_a_class(tmp_path: Path) -> None:
    header = ["healthy", "multiple_diseases", "rust", "scab"]
    rows = [[int(j == i % 4) for j in range(4)] for i in range(8)]
    target, labels = read(tmp_path, header, rows)
    assert (target.kind, labels[:4]) == ("class", header)
    target, labels = read(tmp_path, header, rows, target="labels")
    assert (target.kind, labels[:2]) == ("labels", [("healthy",), ("multiple_diseases",)])
    target, labels = read(tmp_path, header, [[0.25, 0.5, 0.25, 0], *rows])
    assert (target.kind, labels[:2]) == ("values", [(0.25, 0.5, 0.25, 0.0), (1.0, 0.0, 0.0, 0.0)])
    message = error(tmp_path, header, [*rows, [1, 1, 0, 0]], target="class")
    assert "line 10: got 2 columns with 1 (healthy, multiple_diseases)" in message


def test_numbers_with_fractions_are_values_with_names_and_units(tmp_path: Path) -> None:
    target, labels = read(tmp_path, ["age [years]", "mass (kg)", "score"], [[1, 2.5, -3e-7], [2, 3, 4]])
    assert (target.kind, target.names, target.units) == ("values", ("age", "mass", "score"), ("years", "kg", ""))
    assert labels == [(1.0, 2.5, -3e-7), (2.0, 3.0, 4.0)]
    target, labels = read(tmp_path, ["score"], [[0.5], [1], [""]])
    assert (target.kind, labels) == ("values", [(0.5,), (1.0,), None])
    target, labels = read(tmp_path, ["age [years]"], [[3], [4]])
    assert (target.kind, target.names, labels) == ("values", ("age",), [(3.0,), (4.0,)])
    assert name_and_unit(["size [px]", "size [cm]"])[0] == ("size [px]", "size [cm]")


def test_target_decides_what_is_ambiguous(tmp_path: Path) -> None:
    whole = [[i % 7] for i in range(20)]
    assert read(tmp_path, ["rating"], whole)[0].kind == "class"
    assert read(tmp_path, ["rating"], whole, target="values")[1][3] == (3.0,)
    texts = [["cat dog"], ["dog"]]
    assert read(tmp_path, ["label"], texts)[1] == ["cat dog", "dog"]
    assert read(tmp_path, ["label"], texts, target="labels:space")[1] == [("cat", "dog"), ("dog",)]
    assert read(tmp_path, ["label"], texts, target="labels:bar")[1] == [("cat dog",), ("dog",)]
    assert read(tmp_path, ["tags"], [["a|b"], ["b"], ["a"]], target="class")[1] == ["a|b", "b", "a"]
    with pytest.raises(ResoluteError, match="expected class, labels or values"):
        parse_target("multi")


def test_columns_select_one_or_several_by_name_position_and_span(tmp_path: Path) -> None:
    header, rows = ["Eyes", "Face", "Pawpularity"], [[1, i % 2, 9 * i] for i in range(9)]  # as in Petfinder
    message = error(tmp_path, header, rows)
    assert "ambiguous columns, got 2 of 0 and 1 (Eyes, Face) and 1 of other numbers (Pawpularity)" in message
    assert "COLUMNS=image,Pawpularity" in message
    target, labels = read(tmp_path, header, rows, columns="image_id,Pawpularity", target="values")
    assert (target.names, labels[2]) == (("Pawpularity",), (18.0,))
    for columns in ("image_id,Eyes..Face", "image_id,Eyes,Face", "0,1..2"):
        assert read(tmp_path, header, rows, columns=columns)[1][:2] == [("Eyes",), ("Eyes", "Face")]
    target, labels = read(tmp_path, ["a,b", "c"], [[1, 0], [1, 1]], columns='image_id,"a,b",c')
    assert labels == [("a,b",), ("a,b", "c")]
    assert "no column Nose" in error(tmp_path, header, rows, columns="image_id,Nose..Face")
    assert "column Face twice" in error(tmp_path, header, rows, columns="image_id,Eyes..Face,Face")


@pytest.mark.parametrize(
    ("header", "rows", "options", "words"),
    [
        (["v"], [[0.5], ["inf"]], {}, "line 3: got 'inf' in column v"),
        (["v"], [[0.5], [0.25], ["much"]], {}, "ambiguous column v, got '0.5' (line 2) and 'much' (line 4)"),
        (["v"], [["0,5"], ["1,25"]], {}, "ambiguous column v, got '0,5' (line 2)"),
        (["v"], [["[0.5, 1]"], ["[0.5]"]], {}, "line 3: got 1 numbers in column v, expected 2"),
        (["tags"], [["a|b"], ["b"]], {}, "ambiguous column tags, got 'a|b' (line 2)"),
        (["a", "b"], [[1.5, 2], [3, ""]], {}, "line 3: got nothing in column b"),
        (["a", "b"], [[1, 0], [1, 1], ["x", 1]], {"target": "labels"}, "line 4: got 'x' in column a, expected 0 or 1"),
        (["a", "b"], [[1, "F"], [0, "M"]], {}, "unrecognised columns, got a, b"),
        (["a", "b"], [[1, 0]], {"target": "labels:bar"}, "got a separator for 2 columns"),
    ],
)
def test_unusable_targets_are_reported_with_line_and_column(
    tmp_path: Path, header: Sequence[str], rows: Rows, options: dict[str, str], words: str
) -> None:
    assert words in error(tmp_path, header, rows, **options)


def test_the_kind_depends_on_all_rows_of_a_long_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_MAX_SEEN", 100)
    rows: Rows = [[i] for i in range(1000)]
    assert read(tmp_path, ["score"], rows)[0].kind == "class"
    assert read(tmp_path, ["score"], [*rows, [0.5]])[0].kind == "values"


HEADER = ["Edema", "Fracture", "Devices"]
CHEXPERT = [["1.0", "", "0.0"], ["-1.0", "0.0", ""], ["1.0", "1.0", "0.0"], ["", "", ""], ["0.0", "-1.0", "1.0"]]


@pytest.mark.parametrize("target", [None, "labels"])
def test_blank_and_uncertain_cells_are_counted_and_asked_for(tmp_path: Path, target: str | None) -> None:
    message = error(tmp_path, HEADER, CHEXPERT, target=target)
    assert (
        "got 5 blank cells (first: line 2, column Fracture) and 2 cells of -1 (first: line 3, column Edema)" in message
    )
    assert (
        "set BLANK=0 (they count as 0) or BLANK=drop (leave out 3 photos), and UNCERTAIN=0, UNCERTAIN=1 or" in message
    )
    message = error(tmp_path, HEADER, CHEXPERT, target=target, blank="0")
    assert "BLANK" not in message
    assert "set UNCERTAIN=0" in message
    message = error(tmp_path, HEADER, CHEXPERT, target=target, uncertain="1")
    assert "cells of -1" not in message
    assert "set BLANK=0" in message


@pytest.mark.parametrize("blank", ["0", "drop"])
@pytest.mark.parametrize("uncertain", ["0", "1", "ignore"])
def test_blank_and_uncertain_cells_count_as_the_settings_say(tmp_path: Path, blank: str, uncertain: str) -> None:
    target, labels = read(tmp_path, HEADER, CHEXPERT, blank=blank, uncertain=uncertain)
    expected: list[tuple[object, ...] | None] = []
    for row in CHEXPERT:
        pairs = [*zip(HEADER, row, strict=True)]
        ones = [name for name, cell in pairs if cell == "1.0" or (cell == "-1.0" and uncertain == "1")]
        ignored = [Ignored(name) for name, cell in pairs if cell == "-1.0" and uncertain == "ignore"]
        expected.append(None if blank == "drop" and "" in row else (*ones, *ignored))
    assert labels == expected
    assert (target.kind, target.ignored, target.classes) == ("labels", uncertain == "ignore", tuple(HEADER))
    said = "5 blank cells as 0 (BLANK=0)" if blank == "0" else "3 photos with blank cells left out (BLANK=drop)"
    assert said in target.about[0]
    assert f"2 cells of -1 {'ignored' if uncertain == 'ignore' else f'as {uncertain}'} " in target.about[0]


def test_cells_that_need_no_setting_never_ask(tmp_path: Path) -> None:
    rows: Rows = [["1", "true", 0], ["0.0", "FALSE", 1], ["", "", ""], ["1.0", "True", 1]]
    _, labels = read(tmp_path, HEADER, rows)
    assert labels == [("Edema", "Fracture"), ("Devices",), None, ("Edema", "Fracture", "Devices")]
    assert read(tmp_path, HEADER, rows, blank="0")[1][2] == (), "a photo that has none of the labels"
    assert read(tmp_path, HEADER, rows, blank="drop", uncertain="ignore")[1] == labels
    two = [["1.00", "-1.00"], ["0.00", "1.00"]]
    assert read(tmp_path, ["a", "b"], two, uncertain="ignore")[1] == [("a", Ignored("b")), ("b",)]


@pytest.mark.parametrize("word", ["NA", "nan", "null", "None"])
def test_words_for_a_missing_cell_are_blank_among_bits(tmp_path: Path, word: str) -> None:
    rows: Rows = [[1, 0], [word, 1], [1, 1]]
    assert "got 1 blank cell (first: line 3, column a)" in error(tmp_path, ["a", "b"], rows, columns="image_id,a,b")
    assert read(tmp_path, ["a", "b"], rows, columns="image_id,a,b", blank="0")[1] == [("a",), ("b",), ("a", "b")]


def test_columns_of_minus_one_and_one_alone_are_labels(tmp_path: Path) -> None:
    header = ["Smiling", "Young", "Hat"]
    rows: Rows = [[-1, 1, -1], [1, 1, -1], [-1, -1, -1], ["1.0", "-1.0", -1]]
    for given in (None, "labels"):
        target, labels = read(tmp_path, header, rows, target=given)
        assert (target.kind, target.signs, target.ignored) == ("labels", True, False)
        assert labels == [("Young",), ("Smiling", "Young"), (), ("Smiling",)]
        assert "-1 counts as 0, since no cell is 0 or blank" in target.about[0]
    one_hot = [[1, -1, -1], [-1, -1, 1], [-1, 1, -1]]
    target, labels = read(tmp_path, header, one_hot)
    assert (target.kind, labels) == ("class", ["Smiling", "Hat", "Young"])
    assert read(tmp_path, header, one_hot, target="class")[1] == labels
    assert read(tmp_path, header, one_hot, target="values")[1][0] == (1.0, -1.0, -1.0)
    assert read(tmp_path, header, rows, uncertain="ignore")[1][1] == ("Smiling", "Young", Ignored("Hat"))
    for other in (["0", "1", "-1"], ["", "1", "-1"]):
        assert "set " in error(tmp_path, header, [*rows, other])
        assert "UNCERTAIN=0, UNCERTAIN=1 or UNCERTAIN=ignore" in error(tmp_path, header, [*rows, other], blank="0")
    never = [[-1, -1], [-1, -1]]
    assert "4 cells of -1" in error(tmp_path, ["a", "b"], never), "without a 1, -1 may mean anything"


def test_a_validation_table_reads_minus_one_as_the_training_table_does(tmp_path: Path) -> None:
    header: Sequence[str] = ["Smiling", "Young"]
    signs: dict[str, Any] = {"target": "labels", "signs": True}
    assert read(tmp_path, header, [[-1, -1], [-1, -1]], **signs)[1] == [(), ()]
    assert "1 cell of -1" in error(tmp_path, header, [[0, 1], [1, -1]], **signs)
    message = error(tmp_path, header, [[-1, 1], [1, 1]], target="labels", signs=False)
    assert "1 cell of -1 (first: line 2, column Smiling)" in message, "the training table has no -1 for 0"


def test_a_single_column_of_minus_one_and_one_asks_and_is_one_label(tmp_path: Path) -> None:
    rows = [[1], [-1], [1]]
    message = error(tmp_path, ["Smiling"], rows, columns="image_id,Smiling")
    assert "set TARGET=labels if a photo with 1 has the label Smiling and one with -1 has not" in message
    target, labels = read(tmp_path, ["Smiling"], rows, columns="image_id,Smiling", target="labels")
    assert (target.kind, target.classes) == ("labels", ("Smiling",))
    assert labels == [("Smiling",), (), ("Smiling",)]
    assert "1 is the label Smiling, -1 is none" in target.about[0]


@pytest.mark.parametrize(
    ("header", "rows", "options", "words"),
    [
        (["v"], [["a"], ["b"]], {"blank": "0"}, "BLANK: has no effect on column v"),
        (["v"], [["a"], ["b"]], {"uncertain": "1"}, "UNCERTAIN: has no effect on column v"),
        (["a", "b"], [[1.5, 2], [3, 4]], {"blank": "drop"}, "BLANK: has no effect on 2 columns of numbers"),
        (["a", "b"], [[1, 0], [-1, 1]], {"target": "values", "uncertain": "0"}, "UNCERTAIN: has no effect on 2"),
        (["a", "b"], [[1, 0], [0, 1]], {"target": "class", "uncertain": "ignore"}, "UNCERTAIN: got ignore with TARGET"),
    ],
)
def test_settings_of_blank_and_uncertain_cells_without_effect_are_an_error(
    tmp_path: Path, header: Sequence[str], rows: Rows, options: dict[str, str], words: str
) -> None:
    assert words in error(tmp_path, header, rows, **options)


def test_one_hot_columns_are_a_class_after_the_settings(tmp_path: Path) -> None:
    header = ["a", "b", "c"]
    rows = [[1, "", ""], ["", 1, ""], ["", "", 1]]
    assert "set BLANK=0" in error(tmp_path, header, rows)
    target, labels = read(tmp_path, header, rows, blank="0")
    assert (target.kind, labels) == ("class", ["a", "b", "c"])
    uncertain = [[-1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert "UNCERTAIN=ignore" not in error(tmp_path, header, uncertain, target="class")
    assert read(tmp_path, header, uncertain, uncertain="1")[0].kind == "class"
    assert read(tmp_path, header, uncertain, uncertain="ignore")[0].kind == "labels"
    assert read(tmp_path, header, [[1, 0, 0], [0, 1, 0]], uncertain="ignore")[0].kind == "labels"


def test_columns_of_bits_with_odd_cells_beside_numbers_are_ambiguous(tmp_path: Path) -> None:
    rows = [[34, -1, 1], [51, 0, -1], [7, 1, 0]]
    message = error(tmp_path, ["Age", "Edema", "Fracture"], rows)
    assert "got 2 of 0 and 1 (Edema, Fracture) and 1 of other numbers (Age)" in message


def test_binary_formats_hold_the_same_bits(tmp_path: Path) -> None:
    rows = [{"image": f"{i}.jpg", "a": a, "b": b} for i, (a, b) in enumerate([(1.0, -1.0), (None, 0.0), (0.0, 1.0)])]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sql = f"COPY (SELECT image, a::DOUBLE AS a, coalesce(b, 'nan'::DOUBLE) AS b FROM '{tmp_path}/t.jsonl')"
    duckdb.execute(f"{sql} TO '{tmp_path}/t.parquet' (FORMAT parquet)")
    setting = parse_target(None)._replace(blank="0", uncertain="ignore")
    for name in ("t.jsonl", "t.parquet"):
        with pytest.raises(ResoluteError, match=r"got 1 blank cell .* and 1 cell of -1 "):
            TargetTable(str(tmp_path / name), None).target()
        table = TargetTable(str(tmp_path / name), None, setting)
        assert table.target().kind == "labels"
        assert [label for _, label, _ in table] == [("a", Ignored("b")), (), ("b",)]


def test_a_name_that_looks_like_a_bad_list_is_no_class_number(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("id,label\n0.jpg,0\n1.jpg,[x]\n")
    table = TargetTable(str(path), None, parse_target("class"))
    table.target()
    assert not table.numbered
