"""Commands that messages and pages recommend are correct."""

from __future__ import annotations

from tests import ROOT


def test_extras_are_installed_from_the_checkout() -> None:
    """The name `resolute` on the package index belongs to an unrelated project."""
    folders = ("pipeline", "prep", "train", "benchmarks")
    code = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    # why the last: it would install a copy of the code beside the checkout
    wrong = ("install resolute", "resolute[", "pip install '.[")
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    advising = [path for path in [*pages, ROOT / "Makefile", *code] if "pip install" in path.read_text()]
    assert len(advising) > 4
    assert [path for path in advising if any(words in path.read_text() for words in wrong)] == []
