"""A headless Chromium that is installed on this machine, driven by Playwright, which downloads none."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Error, Page, sync_playwright

__all__ = ["NEEDS_BROWSER", "Tab", "browser", "open_tab"]

_BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
NEEDS_BROWSER = pytest.mark.skipif(
    _BROWSER is None, reason="opens pages in a browser: no chromium or chrome is installed"
)


class Tab:
    """A loaded page, the addresses that it has asked for, and its uncaught exceptions, console warnings and errors."""

    def __init__(self, page: Page) -> None:
        self.page, self.requests, self._errors = page, list[str](), list[str]()
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("requestfailed", lambda request: self._errors.append(f"not loaded: {request.url}"))
        page.on("pageerror", self._add_error)
        page.on("console", self._add_message)

    def _add_error(self, error: Error) -> None:
        self._errors.append(str(error))

    def _add_message(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning", "assert"):
            self._errors.append(message.text)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, as JSON. Raises `playwright.sync_api.Error` if it throws."""
        return self.page.evaluate(script)

    def errors(self) -> list[str]:
        """What went wrong since the page began to load."""
        self.run("new Promise(done => setTimeout(done, 0))")
        return self._errors

    def accessible(self, *roles: str) -> list[tuple[str, str]]:
        """(role, name) of the nodes of the accessibility tree with these roles, as a screen reader gets them."""
        session = self.page.context.new_cdp_session(self.page)
        nodes = [node for node in session.send("Accessibility.getFullAXTree")["nodes"] if not node.get("ignored")]
        named = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes]
        return [(role, name) for role, name in named if role in roles]


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A running browser."""
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=_BROWSER)


@contextlib.contextmanager
def open_tab(browser: Browser, url: str, *, width: int, height: int = 900, dark: bool = False) -> Iterator[Tab]:
    """A tab that has loaded `url`, in a window of `width` x `height` CSS px, without anything stored before."""
    scheme: Any = "dark" if dark else "light"
    with browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme) as context:
        tab = Tab(context.new_page())
        tab.page.goto(url)
        yield tab
