"""README and site show the figures that the result files have, and README shows no other measured ones."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from resolute.benchmarks import figures
from resolute.benchmarks.figures import PAGES, main, stale, written
from resolute.benchmarks.record import digest
from resolute.errors import ResoluteError
from tests import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"<!-- figures: (\w+) -->\n.*?<!-- end -->", re.DOTALL)
# a number with a unit in which something is measured
MEASURED = re.compile(r"\d[\d .,\u00a0]*(?:times|ms|s|min|h|images/s|points|%|MB|MiB|GB|GiB|dB|x)(?![\w/])")
# facts about the environment, not measurements
ALLOWED = ["6 GB"]


def test_pages_and_pictures_show_what_the_result_files_have() -> None:
    """Run `python -m resolute.benchmarks.figures` after changing a result."""
    assert [path.name for path, _ in stale()] == []


def test_every_template_is_shown() -> None:
    shown = {name for page in PAGES for name in BLOCK.findall(page.read_text(encoding="utf-8"))}
    templates = {path.stem for path in (ROOT / "benchmarks/templates").glob("*.md")}
    assert shown == templates


def test_readme_has_no_measured_number_of_its_own() -> None:
    text = re.sub(r"^```.*?^```$", "", BLOCK.sub("", README), flags=re.DOTALL | re.MULTILINE)
    assert [number for number in MEASURED.findall(text) if number not in ALLOWED] == []
    assert MEASURED.findall("0.61 times, 20 ms, 501 s and 84.9 %") != []


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The result file speed.json, which the template speed.md shows."""
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates/speed.md").write_text('{{ result("speed") | spread(1) }} s ({{ link("speed") }})\n')
    monkeypatch.setattr(figures, "_TEMPLATES", tmp_path / "templates")
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    write_result(tmp_path / "speed.json", raw=[1.0, 3.0, 2.0], median=2.0)
    yield tmp_path / "speed.json"
    figures.result.cache_clear()


def write_result(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(values | {"digest": digest(values)}))
    figures.result.cache_clear()


PAGE = "before\n<!-- figures: speed -->\n\nold\n\n<!-- end -->\nafter\n"


def test_a_block_is_written_from_its_template_and_result(speed: Path) -> None:
    shown = "2.0 (1.0 to 3.0) s ([speed.json](../benchmarks/results/speed.json))"
    assert written(PAGE, folder="docs") == PAGE.replace("old", shown)
    write_result(speed, raw=[1.0, 2.5, 3.0], median=2.5)
    assert "2.5 (1.0" in written(written(PAGE))


def test_a_result_that_is_missing_or_edited_is_refused(speed: Path) -> None:
    speed.write_text(speed.read_text().replace("3.0", "9.0"))
    with pytest.raises(ResoluteError, match=r"speed\.json: got values that do not fit its digest.*; measure it again"):
        written(PAGE)
    speed.unlink()
    with pytest.raises(ResoluteError, match=r"speed\.json: not found, expected in benchmarks/results; measure it"):
        written(PAGE)


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (PAGE.replace("<!-- end -->", ""), "a block without its end"),
        (PAGE.replace("figures: speed", "figures: sped"), "got sped.md, expected one of speed.md"),
    ],
)
def test_a_wrong_block_is_refused(speed: Path, page: str, message: str) -> None:
    with pytest.raises(ResoluteError, match=message):
        written(page)


def test_a_result_of_another_shape_is_refused(speed: Path) -> None:
    write_result(speed)
    with pytest.raises(ResoluteError, match=r"templates/speed.md: got .*, expected a result of today's programs"):
        written(PAGE)


def test_check_names_what_is_out_of_date(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(figures, "stale", lambda: iter([(ROOT / "docs/gpu.md", "new")]))
    assert main(["--check"]) == 2
    assert "docs/gpu.md: got other figures than the result files have" in capsys.readouterr().err


def test_the_links_of_readme_exist() -> None:
    targets = [target for target in re.findall(r"\]\(([^)#]+)", README) if "://" not in target]
    assert len(targets) > 20
    assert [target for target in targets if not (ROOT / target).exists()] == []
