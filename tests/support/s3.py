"""An S3 server on loopback, for whoever tests against an object store; and a front before it that fails on purpose."""

from __future__ import annotations

import http.client
import os
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest import mock
from urllib.request import Request, urlopen

import fsspec
import pytest

__all__ = ["BUCKET", "Front", "front", "running_s3", "s3_server"]

BUCKET = "bucket"


@contextmanager
def running_s3() -> Iterator[str]:
    """`s3://bucket` on a server of its own; the environment names it to s3fs, in subprocesses too."""
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    told = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    with mock.patch.dict(os.environ, told):
        s3fs.S3FileSystem.clear_instance_cache()  # why: one made earlier talks to another server
        # why: moto keeps its buckets in this process, whichever server they came through
        urlopen(Request(f"{told['AWS_ENDPOINT_URL']}/moto-api/reset", method="POST")).close()
        try:
            fsspec.filesystem("s3").mkdir(BUCKET)
            yield f"s3://{BUCKET}"
        finally:
            s3fs.S3FileSystem.clear_instance_cache()
            server.stop()


@pytest.fixture
def s3_server() -> Iterator[str]:
    """The URL of an empty bucket, `s3://bucket`."""
    with running_s3() as url:
        yield url


class Front:
    """Passes requests on to a server, and does to ranged GETs what `faults` say, one fault a request, in order.

    an int   answer with this HTTP status        "cut"    send half of the body, then hang up
    "hang"   answer nothing until `release`      "drop"   hang up
    "whole"  pass it on without its range        "short"  half of the body, as if that were all
    None     pass it on

    `each` is met by every range anew, one an ask, in an order of its own: no range meets more than these, however
    threads take turns. `asked` counts ranged GETs by (path, range); `slow_bytes_per_s` is the bandwidth of a body,
    None for no bound.
    """

    def __init__(self, behind: str) -> None:
        self.behind = behind
        self.faults: deque[int | str | None] = deque()
        self.each: Sequence[int | str | None] = ()  # before `faults`
        self.always: int | str | None = None  # when both are used up
        self.asked: Counter[tuple[str, str]] = Counter()
        self.slow_bytes_per_s: float | None = None
        self.at_once = self.most_at_once = 0  # ranged GETs being answered
        self.lock = threading.Lock()
        self.released = threading.Event()
        front = self

        class Handler(_Passing):
            owner = front

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
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


class _Passing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: Front

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _pass(self) -> None:
        front, asked = self.owner, self.headers.get("Range")
        ranged = self.command == "GET" and asked is not None
        fault: int | str | None = None
        if ranged:
            with front.lock:
                front.asked[self.path, asked] += 1
                front.at_once += 1
                front.most_at_once = max(front.most_at_once, front.at_once)
                nth = front.asked[self.path, asked] - 1
                if nth < len(front.each):
                    fault = random.Random(asked).sample(front.each, len(front.each))[nth]
                else:
                    fault = front.faults.popleft() if front.faults else front.always
        try:
            with suppress(ConnectionError):  # why: who gave up waiting has hung up
                self._answer(fault)
        finally:
            if ranged:
                with front.lock:
                    front.at_once -= 1

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
            link = http.client.HTTPConnection(self.owner.behind, timeout=60)
            words = {name: value for name, value in self.headers.items() if fault != "whole" or name != "Range"}
            link.request(self.command, self.path, body, words)
            answer = link.getresponse()
            status, headers, data = answer.status, answer.getheaders(), answer.read()
            link.close()
        self.send_response_only(status)
        mine = {"connection", "transfer-encoding", "server"} | (set() if self.command == "HEAD" else {"content-length"})
        for name, value in headers:
            if name.lower() not in mine:
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
def front(s3_server: str) -> Iterator[Front]:
    """A front before the S3 server; file systems made from here on talk to it. Also `http://ADDRESS/BUCKET`."""
    before = Front(os.environ["AWS_ENDPOINT_URL"].partition("://")[2])
    with mock.patch.dict(os.environ, {"AWS_ENDPOINT_URL": f"http://{before.address}"}):
        yield before
    before.close()
