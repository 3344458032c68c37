"""Commands that messages and pages recommend are correct."""

from __future__ import annotations

import re

from tests import ROOT


def test_no_advice_installs_the_project_that_has_the_name_resolute_on_the_package_index() -> None:
    folders = ("resolute", "pipeline", "prep", "train", "benchmarks")
    code = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    # why the last: it would install a copy of the code beside the checkout
    wrong = re.compile(r"install '?resolute\b(?!-vision)|resolute\[|pip install '\.\[")
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    advising = [path for path in [*pages, ROOT / "Makefile", *code] if "pip install" in path.read_text()]
    assert len(advising) > 4
    assert [path for path in advising if wrong.search(path.read_text())] == []
