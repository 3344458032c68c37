"""A local S3 server for tests, and a proxy in front of it that injects faults."""

from __future__ import annotations

import http.client
import os
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest import mock
from urllib.request import Request, urlopen

import fsspec
import pytest

from resolute.pipeline.storage.drivers import obstore_fs

BUCKET = "bucket"


@contextmanager
def running_s3() -> Iterator[str]:
    """`s3://bucket` on a new server, which clients find through environment variables, in subprocesses too."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    with mock.patch.dict(os.environ, environment):
        _forget_servers()
        # why: moto keeps its buckets in this process, whichever server they came through
        urlopen(Request(f"{environment['AWS_ENDPOINT_URL']}/moto-api/reset", method="POST")).close()
        try:
            fsspec.filesystem("s3").mkdir(BUCKET)
            yield f"s3://{BUCKET}"
        finally:
            _forget_servers()
            server.stop()


def _forget_servers() -> None:
    """Make new file systems: those made earlier use another server."""
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    obstore_fs.cache_clear()


@pytest.fixture
def s3_server() -> Iterator[str]:
    """The URL of an empty bucket, `s3://bucket`."""
    with running_s3() as url:
        yield url


class FaultyProxy:
    """A proxy that injects `faults` into GETs of objects, one fault per request, in order.

    an int   answer with this HTTP status        "cut"    send half of the body, then hang up
    "hang"   answer nothing until `release`      "drop"   hang up
    None     pass it on                          "short"  half of the body, as if that were all

    The faults of `each` apply to every object separately, one per request, in an order of its own, so that the number
    of faults of an object does not depend on threads. `requests` counts GETs by path; `slow_bytes_per_s` is the
    bandwidth of a body, None for no limit; without `etags`, answers have no ETag; `before_put` gets the path of an
    upload before it is passed on, and may return an HTTP status to answer with instead.
    """

    def __init__(self, server_address: str) -> None:
        self.server_address = server_address
        self.faults: deque[int | str | None] = deque()
        self.each: Sequence[int | str | None] = ()  # before `faults`
        self.always: int | str | None = None  # after both
        self.before_put: Callable[[str], int | None] = lambda path: None
        self.requests: Counter[str] = Counter()
        self.etags = True
        self.slow_bytes_per_s: float | None = None
        self.concurrent = self.max_concurrent = 0  # GETs being answered
        self.lock = threading.Lock()
        self.released = threading.Event()
        proxy = self

        class Handler(_ProxyHandler):
            owner = proxy

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # type: ignore[method-assign]  # of a client that was killed
        self.address = f"127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()

    def release(self) -> None:
        self.released.set()

    def close(self) -> None:
        self.release()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


class _ProxyHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: FaultyProxy

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _pass(self) -> None:
        proxy, path = self.owner, self.path
        fault: int | str | None = proxy.before_put(path) if self.command == "PUT" else None
        # not those of listings, nor of the API of the Hub
        counted = self.command == "GET" and path.count("/") > 1 and "?" not in path and not path.startswith("/api/")
        if counted:
            with proxy.lock:
                proxy.requests[path] += 1
                proxy.concurrent += 1
                proxy.max_concurrent = max(proxy.max_concurrent, proxy.concurrent)
                nth = proxy.requests[path] - 1
                if nth < len(proxy.each):
                    fault = random.Random(path).sample(proxy.each, len(proxy.each))[nth]
                else:
                    fault = proxy.faults.popleft() if proxy.faults else proxy.always
        try:
            with suppress(ConnectionError):  # why: a client that timed out has closed the connection
                self._answer(fault)
        finally:
            if counted:
                with proxy.lock:
                    proxy.concurrent -= 1

    def _answer(self, fault: int | str | None) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if fault == "hang":
            self.owner.released.wait(60)
        if fault in ("hang", "drop"):
            self.close_connection = True
            return
        if isinstance(fault, int):
            status, headers, data = fault, [], b""
        else:
            with closing(http.client.HTTPConnection(self.owner.server_address, timeout=60)) as link:
                link.request(self.command, self.path, body, dict(self.headers.items()))
                answer = link.getresponse()
                status, headers, data = answer.status, answer.getheaders(), answer.read()
        self.send_response_only(status)
        own_headers = {"connection", "transfer-encoding", "server"}
        if self.command != "HEAD":
            own_headers.add("content-length")
        if not self.owner.etags:
            own_headers.add("etag")
        for name, value in headers:
            if name.lower() not in own_headers:
                self.send_header(name, value)
        if fault == "short":
            data = data[: len(data) // 2]
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if fault == "cut":
            data, self.close_connection = data[: len(data) // 2], True
        pace = self.owner.slow_bytes_per_s
        step = max(1, round(pace * 0.05)) if pace else 1 << 20
        for at in range(0, len(data), step):
            piece = data[at : at + step]
            if pace:
                time.sleep(len(piece) / pace)
            self.wfile.write(piece)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass


@pytest.fixture
def proxy(s3_server: str) -> Iterator[FaultyProxy]:
    """A proxy in front of the S3 server, used by file systems made afterwards. Also `http://ADDRESS/BUCKET`."""
    faulty_proxy = FaultyProxy(os.environ["AWS_ENDPOINT_URL"].partition("://")[2])
    with mock.patch.dict(os.environ, {"AWS_ENDPOINT_URL": f"http://{faulty_proxy.address}"}):
        obstore_fs.cache_clear()
        yield faulty_proxy
    faulty_proxy.close()
