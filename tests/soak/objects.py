"""An S3 server on loopback that fails on command: moto, wrapped by a layer that can fail, delay or cut requests.

    with object_store() as store:
        store.variables            # environment variables for its clients
        store.fail("503", after=10, limit=3)

The server is a process of its own (`python -m tests.soak.objects`). Kinds of faults: an HTTP status,
`hang` (no answer for `wait_s`, then the connection ends), `slow` (an answer after `wait_s`), `cut` (half of the body,
then the connection ends).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from resolute.errors import ResoluteError

__all__ = ["BUCKET", "ObjectStore", "object_store"]

BUCKET = "bucket"
_CONTROL = "/soak-control"
_HEADERS = {
    "Content-Type": "application/octet-stream",
    "Authorization": "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, Signature=none",
}


class ObjectStore:
    """The running server; `pid`: its process ID."""

    def __init__(self, port: int, pid: int) -> None:
        self.pid, self._url = pid, f"http://127.0.0.1:{port}"
        self.variables = {
            "AWS_ENDPOINT_URL": self._url, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
        }  # fmt: skip

    def fail(self, kind: str, *, after: int, limit: int = -1, wait_s: float = 0.0) -> None:
        """Let `after` requests pass, then inject `kind` into the next `limit` requests (-1: all)."""
        self._control({"kind": kind, "after": after, "limit": limit, "wait_s": wait_s})

    def clear(self) -> tuple[int, int]:
        """End the fault; returns (requests, requests hit) since the last change."""
        requests, hits = self._control({"kind": None})
        return requests, hits

    def _control(self, fault: dict[str, Any]) -> Any:
        with urlopen(Request(self._url + _CONTROL, json.dumps(fault).encode(), method="POST")) as answer:
            return json.loads(answer.read())

    def _s3(self, method: str, key: str, data: bytes | None = None) -> bytes:
        with urlopen(Request(f"{self._url}/{BUCKET}/{key}", data, _HEADERS, method=method)) as answer:
            content: bytes = answer.read()
            return content

    def empty(self) -> None:
        """Delete everything and create an empty bucket."""
        urlopen(Request(f"{self._url}/moto-api/reset", b"", method="POST")).close()
        self._s3("PUT", "", b"")

    def upload(self, folder: Path, prefix: str) -> None:
        """Copy a folder to BUCKET/prefix."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self._s3("PUT", f"{prefix}/{path.relative_to(folder)}", path.read_bytes())

    def names(self, prefix: str) -> list[str]:
        """Keys below BUCKET/prefix, relative to it, sorted."""
        import re
        from html import unescape

        names: list[str] = []
        token = ""
        while True:
            page = self._s3("GET", f"?list-type=2&prefix={prefix}/{token}").decode()
            names += [unescape(key)[len(prefix) + 1 :] for key in re.findall(r"<Key>(.*?)</Key>", page)]
            following = re.search(r"<NextContinuationToken>(.*?)</NextContinuationToken>", page)
            if following is None:
                return sorted(names)
            token = f"&continuation-token={following[1]}"

    def read(self, key: str) -> bytes:
        """The bytes of BUCKET/key."""
        return self._s3("GET", key)

    def delete(self, prefix: str) -> None:
        for name in self.names(prefix):
            self._s3("DELETE", f"{prefix}/{name}")


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """Start the server with an empty bucket; it ends with the block. Raises `ResoluteError` where moto is missing."""
    words = [sys.executable, "-m", __name__]
    environ = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environ) as server:
        assert server.stdout
        line = server.stdout.readline().split()
        if not line:
            raise ResoluteError("soak: the S3 server did not start, expected moto: pip install 'resolute-vision[dev]'")
        try:
            store = ObjectStore(int(line[0]), server.pid)
            store.empty()
            yield store
        finally:
            server.kill()


class _Faults:
    """A WSGI layer that applies the active fault to requests."""

    def __init__(self, app: Callable[..., Iterable[bytes]]) -> None:
        self._app, self._lock = app, threading.Lock()
        self._fault: dict[str, Any] = {"kind": None}
        self._requests = self._hits = 0

    def __call__(self, environ: dict[str, Any], answer: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] == _CONTROL:
            fault = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
            with self._lock:
                counts = [self._requests, self._hits]
                self._fault, self._requests, self._hits = fault, 0, 0
            answer("200 OK", [("Content-Type", "application/json")])
            return [json.dumps(counts).encode()]
        with self._lock:
            fault, number = self._fault, self._requests
            self._requests += 1
            kind = fault["kind"]
            if kind and (number < fault["after"] or 0 <= fault["limit"] <= number - fault["after"]):
                kind = None
            self._hits += kind is not None
        if kind is None:
            return self._app(environ, answer)
        if kind == "slow":
            time.sleep(fault["wait_s"])
            return self._app(environ, answer)
        if kind == "cut":
            return self._cut(environ, answer)
        if kind == "hang":
            until = time.monotonic() + fault["wait_s"]
            while self._fault is fault and time.monotonic() < until:
                time.sleep(0.02)
            raise ConnectionAbortedError  # why: werkzeug then closes the connection
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        code = {"403": "AccessDenied", "500": "InternalError", "503": "SlowDown"}[kind]
        body = b"" if environ["REQUEST_METHOD"] == "HEAD" else (
            f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
        )  # fmt: skip
        answer(f"{kind} {code}", [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [body]

    def _cut(self, environ: dict[str, Any], answer: Callable[..., Any]) -> Iterable[bytes]:
        status: list[Any] = []
        body = b"".join(self._app(environ, lambda *words: status.extend(words[:2])))
        if environ["REQUEST_METHOD"] == "HEAD":  # why: half of an empty body would be a complete response
            raise ConnectionAbortedError
        headers = [(name, value) for name, value in status[1] if name.lower() != "content-length"]
        answer(status[0], [*headers, ("Content-Length", str(len(body)))])
        yield body[: len(body) // 2]
        raise ConnectionAbortedError


def _serve() -> None:
    import logging

    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    logging.getLogger("werkzeug").disabled = True

    class Handler(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # why: otherwise every response waits 40 ms for an acknowledgement

        def connection_dropped(self, error: BaseException, environ: Any = None) -> None:
            self.close_connection = True

        def log(self, *_words: Any) -> None:
            pass

    sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115  # why: it would report connections that are cut on purpose
    server = make_server(
        "127.0.0.1", 0, _Faults(DomainDispatcherApplication(create_backend_app)), threaded=True,
        request_handler=Handler,
    )  # fmt: skip
    server.daemon_threads = True  # type: ignore[attr-defined]
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    _serve()
