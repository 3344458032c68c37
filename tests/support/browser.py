"""A headless Chromium, driven by the DevTools protocol over a pair of pipes: no package and no open port needed.

Source: https://chromedevtools.github.io/devtools-protocol/ and `--remote-debugging-pipe`: messages are JSON, each ended
by a zero byte; the browser reads them from descriptor 3 and writes its own to descriptor 4.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["BROWSER", "Browser", "Tab"]

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
_TIMEOUT_S = 60.0
_FLAGS = (
    "--headless",
    "--disable-gpu",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)


class Browser:
    """A running browser; a context manager. Raises `RuntimeError` if it ends or does not answer within 60 s."""

    def __init__(self, profile: Path) -> None:
        assert BROWSER is not None
        theirs, self._write = os.pipe()
        self._read, answers = os.pipe()
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        words = [BROWSER, *_FLAGS, *sandbox, f"--user-data-dir={profile}", "about:blank"]
        # why bash: it puts the pipes on descriptors 3 and 4 without a fork hook, which Python 3.12 warns about
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$0" "$@" 3<&{theirs} 4>&{answers}', *words],
            pass_fds=(theirs, answers),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(answers)
        self._buffer, self._number = b"", 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            self.call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The result of a command. Events that arrive before it are appended to `events`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": session} if session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(time.monotonic() + _TIMEOUT_S)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def wait_for(self, method: str, session: str) -> None:
        """Return after the next event `method` of a session."""
        seen, end = 0, time.monotonic() + _TIMEOUT_S
        while True:
            if any(each.get("method") == method and each.get("sessionId") == session for each in self.events[seen:]):
                return
            seen = len(self.events)
            self.events.append(self._receive(end))

    def _receive(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            data = os.read(self._read, 1 << 20) if ready else b""
            if not data:
                raise RuntimeError("the browser ended" if ready else "the browser does not answer")
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    @contextlib.contextmanager
    def open(self, url: str, *, width: int, height: int = 900, dark: bool = False) -> Iterator[Tab]:
        """A tab that has loaded `url`, in a window of `width` x `height` CSS px, without anything stored before."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        try:
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable", session)
            self.call(
                "Emulation.setDeviceMetricsOverride",
                session,
                width=width,
                height=height,
                deviceScaleFactor=1,
                mobile=False,
            )
            self.call(
                "Emulation.setEmulatedMedia",
                session,
                features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
            )
            self.events.clear()
            self.call("Page.navigate", session, url=url)
            self.wait_for("Page.loadEventFired", session)
            yield Tab(self, session, url)
        finally:
            self.call("Target.disposeBrowserContext", browserContextId=context)


class Tab:
    """A loaded page."""

    def __init__(self, browser: Browser, session: str, url: str) -> None:
        self._browser, self._session, self.url = browser, session, url

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, as JSON. Raises `RuntimeError` if it throws."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"]["description"])
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key: Tab, ArrowRight, Enter …"""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key])

    def requests(self) -> list[str]:
        """The URLs that the page has asked for."""
        return [event["params"]["request"]["url"] for event in self._events("Network.requestWillBeSent")]

    def errors(self) -> list[str]:
        """Uncaught exceptions, and the warnings and errors of the console."""
        self.run("new Promise(done => setTimeout(done, 0))")
        thrown = [event["params"]["exceptionDetails"]["text"] for event in self._events("Runtime.exceptionThrown")]
        printed = [
            str(event["params"]["args"])
            for event in self._events("Runtime.consoleAPICalled")
            if event["params"]["type"] in ("error", "warning", "assert")
        ]
        logged = [
            event["params"]["entry"]["text"]
            for event in self._events("Log.entryAdded")
            if event["params"]["entry"]["level"] in ("error", "warning")
        ]
        return thrown + printed + logged

    def _events(self, method: str) -> list[dict[str, Any]]:
        return [
            event
            for event in self._browser.events
            if event.get("method") == method and event.get("sessionId") == self._session
        ]

    def accessible(self, *roles: str) -> list[tuple[str, str]]:
        """(role, name) of the nodes of the accessibility tree with these roles, as a screen reader gets them."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        named = [
            (node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node.get("ignored")
        ]
        return [(role, name) for role, name in named if role in roles]
