"""Results record how they were made, the results page lists all of them, and tables show every value."""

from __future__ import annotations

import argparse
import statistics

import pytest

from resolute.benchmarks.cli import Parser, command, repeated, spread, text_table
from resolute.benchmarks.record import RESULTS, header, results_page


def test_the_results_page_is_up_to_date() -> None:
    """Run `python -m resolute.benchmarks.record` after adding or removing a result."""
    assert (RESULTS / "README.md").read_text() == results_page(RESULTS)


def test_a_result_records_the_command_without_absolute_folders() -> None:
    parser, made = Parser(prog="python -m resolute.benchmarks.x"), list[str]()
    parser.add_argument("words", nargs="*")
    parser.add_argument("--out")

    def work(args: argparse.Namespace) -> None:
        made.append(header(rounds=3)["command"])

    words = ["/a/my set", "s3://bucket/set", "photos/train", "a.toml,/a/b.toml", "--out=/a/b/y.json"]
    assert command(parser, work, words) == 0
    assert made == ["python -m resolute.benchmarks.x 'my set' s3://bucket/set photos/train a.toml,b.toml --out=y.json"]


@pytest.mark.parametrize("raw", [[3.0], [1.0, 9.0], [5.0, 1.0, 2.0, 8.0, 3.0]])
def test_a_summary_keeps_every_value_and_their_median(raw: list[float]) -> None:
    assert repeated(raw) == {"raw": raw, "median": statistics.median(raw)}


def test_a_spread_shows_median_and_extremes_in_the_requested_unit() -> None:
    assert spread(repeated([1234.5, 1000.0, 2000.0])) == "1,234 (1,000..2,000)"
    assert spread(repeated([0.002, 0.001, 0.004]), 1, 1e3) == "2.0 (1.0..4.0)"
    assert spread(repeated([7.0])) == "7"


def test_a_table_prints_all_rows_with_their_columns_aligned() -> None:
    rows = [["128 px", "ours", "1"], ["64 px", "the other one", "23,456"], ["", "x", ""]]
    lines = text_table("the title", ["", "loader", "rate"], rows, left=2).splitlines()
    assert lines[0] == "the title"
    assert [line.split() for line in lines[3:]] == [" ".join(row).split() for row in rows]
    where = lines[1].index("loader")
    assert all(line[where - 2 : where] == "  " for line in lines[3:])
    assert lines[4].startswith("  64 px   the other one")
    assert lines[3].endswith("     1")
    assert len(lines[3]) == len(lines[4]) == len(lines[2])
