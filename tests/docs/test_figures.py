"""README and site show the figures that the result files have, and README shows no other measured ones."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest

from resolute.benchmarks.figures import BLOCK, FIGURES, PAGES, written
from resolute.benchmarks.pictures import PICTURES, drawn
from resolute.benchmarks.record import RESULTS
from tests import ROOT
from tests.docs.commands import blocks

README = (ROOT / "README.md").read_text(encoding="utf-8")
# a number with a unit in which something is measured
MEASURED = re.compile(r"\d[\d .,\u00a0]*(?:times|ms|s|min|h|images/s|points|%|MB|MiB|GB|GiB|dB|x)(?![\w/])")
# facts about the environment, not measurements
ALLOWED = ["6 GB"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_shows_the_figures_of_the_result_files(page: Path) -> None:
    """Run `python -m resolute.benchmarks.figures` after changing a result."""
    text = page.read_text(encoding="utf-8")
    assert BLOCK.search(text)
    assert text == written(text, folder=str(page.parent.relative_to(ROOT)))


def test_every_figure_is_shown() -> None:
    shown = {name for page in PAGES for name in BLOCK.findall(page.read_text(encoding="utf-8"))}
    assert shown == set(FIGURES)


def test_training_in_the_first_table_begins_with_an_epoch_as_long_as_the_second() -> None:
    runs = json.loads((RESULTS / "whole.json").read_text(encoding="utf-8"))["runs"]
    rows = re.findall(r"^\|.*\| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", FIGURES["headline"](), re.MULTILINE)
    tools = list(dict.fromkeys(run["tool"] for run in runs))
    assert len(rows) == len(tools)
    shown = {tuple(map(int, row)) for row in rows}
    for tool in tools:
        own = [run for run in runs if run["tool"] == tool and not run["round"]]
        trained = []
        for run in own:
            first_s, second_s = (point["elapsed_s"] for point in run["curve"][:2])
            trained.append(run["wall_s"] - first_s + (second_s - first_s))
        assert any(
            abs(training - statistics.fmean(trained)) <= 1
            and abs(start + training - statistics.fmean(run["wall_s"] for run in own)) <= 1
            for start, _, training, _ in shown
        ), tool


def test_a_figure_that_was_changed_by_hand_is_noticed() -> None:
    changed = README.replace(" 40.8 ", " 41.8 ", 1)
    assert changed != README
    assert written(changed) == README


def test_readme_has_no_measured_number_of_its_own() -> None:
    text = re.sub(r"^```.*?^```$", "", BLOCK.sub("", README), flags=re.DOTALL | re.MULTILINE)
    assert [number for number in MEASURED.findall(text) if number not in ALLOWED] == []
    assert MEASURED.findall("0.61 times, 20 ms, 501 s and 84.9 %") != []


def test_the_output_in_readme_was_printed() -> None:
    printed = (RESULTS / "demo-train.txt").read_text(encoding="utf-8").splitlines()
    (shown,) = blocks(ROOT / "README.md", "text")
    lines = shown.splitlines()
    assert 8 <= len(lines) <= 12
    assert [line for line in lines if line not in printed] == []


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_drawn_from_its_result_file(name: str) -> None:
    """Run `python -m resolute.benchmarks.pictures` after changing a result."""
    path, picture = drawn(name)
    assert path.read_text(encoding="utf-8") == picture


def test_the_links_of_readme_exist() -> None:
    targets = [target for target in re.findall(r"\]\(([^)#]+)", README) if "://" not in target]
    assert len(targets) > 20
    assert [target for target in targets if not (ROOT / target).exists()] == []
