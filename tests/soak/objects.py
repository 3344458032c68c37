"""An S3 server on loopback that fails on command: moto, behind a layer that can refuse, delay or cut requests.

    store = ObjectStore()
    store.variables                       # environment variables for its clients
    store.fail("503", after=10, limit=3)
    store.clear()

Kinds of faults: an HTTP status, `hang` (no answer for `wait_s`, then the connection ends), `slow` (an answer after
`wait_s`), `cut` (half of the body, then the connection ends).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import s3fs
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

__all__ = ["BUCKET", "ObjectStore"]

BUCKET = "bucket"
_CODES = {"403": "AccessDenied", "500": "InternalError", "503": "SlowDown"}


@dataclass
class _Fault:
    kind: str
    after: int
    limit: int
    wait_s: float
    requests: int = 0
    hits: int = 0

    def is_next(self) -> bool:
        """Count a request; whether the fault hits it."""
        number = self.requests - self.after
        is_hit = number >= 0 and (self.limit < 0 or number < self.limit)
        self.requests, self.hits = self.requests + 1, self.hits + is_hit
        return is_hit


class ObjectStore:
    """The running server, with an empty bucket; it ends with this process. files: a client of it."""

    def __init__(self) -> None:
        self._app = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()
        self._fault: _Fault | None = None
        server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=_Handler)
        server.daemon_threads = True  # type: ignore[attr-defined]
        server.handle_error = lambda *_: None  # type: ignore[method-assign]  # of a client that was killed
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        self.variables = {
            "AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
        }  # fmt: skip
        self.files = s3fs.S3FileSystem(key="test", secret="test", endpoint_url=url, use_listings_cache=False)
        self.files.mkdir(BUCKET)

    def fail(self, kind: str, *, after: int = 0, limit: int = -1, wait_s: float = 0.0) -> None:
        """Let `after` requests pass, then inject `kind` into the next `limit` requests (-1: all)."""
        self._fault = _Fault(kind, after, limit, wait_s)

    def clear(self) -> int:
        """End the fault; returns the number of requests that it hit."""
        fault, self._fault = self._fault, None
        return fault.hits if fault is not None else 0

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        """The WSGI application: moto's, except for requests that the fault hits."""
        with self._lock:
            fault = self._fault if self._fault is not None and self._fault.is_next() else None
        kind = fault.kind if fault is not None else ""
        if fault is not None and kind in ("slow", "hang"):
            until = time.monotonic() + fault.wait_s
            while self._fault is fault and time.monotonic() < until:
                time.sleep(0.02)
        if kind in ("", "slow"):
            return self._app(environ, start)
        if kind == "cut":
            return self._cut(environ, start)
        if kind == "hang":
            raise ConnectionAbortedError  # why: werkzeug then closes the connection
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        text = f"<?xml version='1.0'?><Error><Code>{_CODES[kind]}</Code><Message>injected</Message></Error>"
        body = b"" if environ["REQUEST_METHOD"] == "HEAD" else text.encode()
        start(f"{kind} {_CODES[kind]}", [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [body]

    def _cut(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        answer: list[Any] = []
        body = b"".join(self._app(environ, lambda *words: answer.extend(words[:2])))
        if environ["REQUEST_METHOD"] == "HEAD":  # why: half of an empty body would be a complete response
            raise ConnectionAbortedError
        status, headers = answer
        others = [(name, value) for name, value in headers if name.lower() != "content-length"]
        start(status, [*others, ("Content-Length", str(len(body)))])
        yield body[: len(body) // 2]
        raise ConnectionAbortedError


class _Handler(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # why: otherwise every response waits 40 ms for an acknowledgement

    def connection_dropped(self, error: BaseException, environ: Any = None) -> None:
        self.close_connection = True

    def log(self, *_words: Any) -> None:
        """Print nothing."""
