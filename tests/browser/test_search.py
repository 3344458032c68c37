"""The search of the site finds words in a real browser, served over HTTP and opened from a disk."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from tests.support.browser import NEEDS_BROWSER, Tab, browser, open_tab

pytestmark = [pytest.mark.slow, NEEDS_BROWSER]
FIELD = "input[data-md-component=search-query]"
FOUND = ".md-search-result__item > a"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address at which a folder is served on loopback."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


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


@pytest.mark.parametrize("protocol", ["http", "file"])
@pytest.mark.parametrize("page", ["index.html", "learning_rate.html"])
def test_a_word_typed_into_the_search_finds_pages(protocol: str, page: str, site: Path, running: Browser) -> None:
    with served(site) as address:
        root = address if protocol == "http" else f"{site.as_uri()}/"
        with open_tab(running, root + page, width=1400) as tab:
            links = search(tab, "mixup_alpha", wanted="regularisation.html")
            assert all(link.startswith(root) for link in links)
            assert tab.errors() == []
            assert [url for url in tab.requests if not url.startswith((root, "data:", "about:"))] == []
