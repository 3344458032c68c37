"""The search of the site finds words in a real browser, served over HTTP and opened from a disk."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import BROWSER, Browser, Tab

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="opens pages in a browser: no chromium or chrome is installed"),
]
FIELD = "document.querySelector('input[data-md-component=search-query]')"
# waits for the results of a whole word: those of its beginning may come before
RESULTS = """new Promise((done, failed) => {
  const end = Date.now() + 30000, look = () => {
    const links = [...document.querySelectorAll(".md-search-result__item > a")].map(link => link.href);
    if (links.some(link => link.includes(WANTED))) done(links);
    else if (Date.now() > end) failed(new Error(`found ${links}`));
    else setTimeout(look, 50);
  };
  look();
})"""


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
    tab.run(f"{FIELD}.focus()")
    for sign in word:
        tab.call("Input.dispatchKeyEvent", type="keyDown", key=sign, text=sign)
        tab.call("Input.dispatchKeyEvent", type="keyUp", key=sign)
    links: list[str] = tab.run(RESULTS.replace("WANTED", json.dumps(wanted)))
    return links


@pytest.mark.parametrize("protocol", ["http", "file"])
@pytest.mark.parametrize("page", ["index.html", "learning_rate.html"])
def test_a_word_typed_into_the_search_finds_pages(protocol: str, page: str, site: Path, tmp_path: Path) -> None:
    with served(site) as address, Browser(tmp_path / "profile") as browser:
        root = address if protocol == "http" else f"{site.as_uri()}/"
        with browser.open(root + page, width=1400) as tab:
            links = search(tab, "mixup_alpha", wanted="regularisation.html")
            assert all(link.startswith(root) for link in links)
            assert tab.errors() == []
            assert [url for url in tab.requests() if not url.startswith((root, "data:", "about:"))] == []
