"""The site builds without warnings, loads nothing from other hosts, and shows what the code says."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from resolute.train.recipe.keys import keys
from tests import ROOT

pytestmark = pytest.mark.slow


class Loaded(HTMLParser):
    """The addresses that a browser loads by itself when it opens a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "object": "data"}
        values = dict(attrs)
        loads = tag == "link" and values.get("rel") not in ("canonical", "prev", "next")
        address = values.get("href" if loads else names.get(tag, ""))
        if address:
            self.addresses.append(address)


def test_pages_are_small_and_load_nothing_from_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        addresses = Loaded(page.read_text(encoding="utf-8")).addresses
        assert addresses, page
        assert [each for each in addresses if re.match(r"(\w+:)?//", each)] == [], page
        assert page.stat().st_size < 3_000_000, page
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        assert re.findall(r"(?:url\(|@import )['\"]?(?:https?:)?//[^)'\"]*", text) == [], sheet


def test_generated_pages_have_what_they_are_made_from(site: Path) -> None:
    text = (site / "recipe_keys.html").read_text(encoding="utf-8")
    assert [key for key in keys() if f"<code>{html.escape(key.name, quote=False)}</code>" not in text] == []
    parameters = (site / "api.html").read_text(encoding="utf-8")
    assert re.search(r"<li>\s*(?:<p>)?<code>on_bad_sample</code>: ", parameters)
    for page, file in (("log", "benchmarks/results/LOG.md"), ("changelog", "CHANGELOG.md"),
                       ("contributing", "CONTRIBUTING.md"), ("results", "benchmarks/results/README.md")):  # fmt: skip
        headings = re.findall(r"^#+ (.+)$", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
        text = re.sub(r"<[^>]+>", "", (site / f"{page}.html").read_text(encoding="utf-8"))
        assert html.escape(headings[-1].strip("`"), quote=False).split("`")[0] in text, page


def test_files_that_pages_link_to_are_part_of_the_site(site: Path) -> None:
    links = {link for page in site.glob("*.html")
             for link in re.findall(r'href="(files/[^"#]+)', page.read_text(encoding="utf-8"))}  # fmt: skip
    assert len(links) > 20
    assert [link for link in links if not (site / link).is_file()] == []
