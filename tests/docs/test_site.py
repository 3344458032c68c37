"""The site builds without warnings, loads nothing from other hosts, has what its pages link to, and can be searched."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from playwright.sync_api import Browser

import resolute
from tests import ROOT
from tests.support.browser import NEEDS_BROWSER, Tab, browser, open_tab
from tests.support.http_server import serving

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


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site of `docs/`. Any warning of the build is an error."""
    out = tmp_path_factory.mktemp("site") / "out"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_pages_load_nothing_from_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        addresses = Loaded(page.read_text(encoding="utf-8")).addresses
        assert addresses, page
        assert [each for each in addresses if re.match(r"(\w+:)?//", each)] == [], page
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        assert re.findall(r"(?:url\(|@import )['\"]?(?:https?:)?//[^)'\"]*", text) == [], sheet


def test_files_that_pages_link_to_are_part_of_the_site(site: Path) -> None:
    links = {
        link
        for page in site.glob("*.html")
        for link in re.findall(r'href="(files/[^"#]+)', page.read_text(encoding="utf-8"))
    }
    assert len(links) > 10
    assert [link for link in links if not (site / link).is_file()] == []


def test_the_notebook_is_a_page_with_its_cells_and_a_link_to_the_file(site: Path) -> None:
    text = (site / "notebook.html").read_text(encoding="utf-8")
    for cell in json.loads((ROOT / "docs" / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]:
        line = next(line for line in cell["source"] if line.strip()).strip("# \n")
        words = [word for word in re.findall(r"\w+", line) if len(word) > 3]
        assert [word for word in words if word not in text] == []
    assert '<a href="notebook.ipynb" download' in text
    assert (site / "notebook.ipynb").is_file()
    assert 'href="notebook.html"' in (site / "start.html").read_text(encoding="utf-8")


def test_the_api_has_the_names_that_users_import(site: Path) -> None:
    """In headings, signatures and the text; only anchors may have the modules' names."""
    text = re.sub(r"<[^>]*>", "", (site / "api.html").read_text(encoding="utf-8"))
    assert [name for name in resolute.__all__ if name != "__version__" and f"resolute.{name}" not in text] == []
    assert re.findall(r"resolute\.(?:pipeline|errors|train|prep)[\w.]*", text) == []
    for field in ("batch_size", "mixup_alpha", "soft_targets", "partner_labels", "global_size"):
        assert field in text


# ---- the search, in a browser

FIELD = "input[data-md-component=search-query]"
FOUND = ".md-search-result__item > a"


def search(tab: Tab, word: str, wanted: str) -> list[str]:
    """The addresses that the search finds for a typed `word`, once `wanted` is part of one."""
    tab.page.locator(FIELD).press_sequentially(word)
    # why wait: results for the beginning of the word may come before
    tab.page.locator(f"{FOUND}[href*='{wanted}']").first.wait_for(state="attached")
    return [str(link) for link in tab.page.locator(FOUND).evaluate_all("links => links.map(link => link.href)")]


@pytest.fixture(scope="module")
def running() -> Iterator[Browser]:
    with browser() as running:
        yield running


@NEEDS_BROWSER
@pytest.mark.parametrize("protocol", ["http", "file"])
@pytest.mark.parametrize("page", ["index.html", "learning_rate.html"])
def test_a_word_typed_into_the_search_finds_pages(protocol: str, page: str, site: Path, running: Browser) -> None:
    with serving(site) as port:
        root = f"http://127.0.0.1:{port}/" if protocol == "http" else f"{site.as_uri()}/"
        with open_tab(running, root + page, width=1400) as tab:
            links = search(tab, "mixup_alpha", wanted="regularisation.html")
            assert all(link.startswith(root) for link in links)
            assert tab.errors() == []
            assert [url for url in tab.requests if not url.startswith((root, "data:", "about:"))] == []
