"""An S3 server on loopback with configurable latency and bandwidth, in place of a remote object store.

    with store(folder, latency_s=0.03, bytes_per_s=80e6, total_bytes_per_s=1e9) as url: ...  # "s3://bucket/set"

Serves a folder in its own process and answers GET (with ranges) and HEAD as S3 does. The first byte of a response takes
`latency_s`; a request gets at most `bytes_per_s`, all requests together `total_bytes_per_s`. It injects no errors.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock

__all__ = ["store"]

_PIECE_BYTES = 256 << 10
_PREFIX = "/bucket/set/"


@contextmanager
def store(folder: Path, *, latency_s: float, bytes_per_s: float, total_bytes_per_s: float) -> Iterator[str]:
    """The URL of `folder` behind such a store; within the block, environment variables lead clients to it."""
    speeds = (latency_s, bytes_per_s, total_bytes_per_s)
    words = [sys.executable, "-m", __name__, str(folder.resolve()), *map(str, speeds)]
    server = subprocess.Popen(words, cwd=Path(__file__).resolve().parents[2], stdout=subprocess.PIPE, text=True)
    assert server.stdout
    variables = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{int(server.stdout.readline())}",
        "AWS_ACCESS_KEY_ID": "none",
        "AWS_SECRET_ACCESS_KEY": "none",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    try:
        with mock.patch.dict(os.environ, variables):
            yield f"s3:/{_PREFIX}".rstrip("/")
    finally:
        server.terminate()
        server.wait()
        server.stdout.close()


class _Bandwidth:
    """The bandwidth that all responses share: one after another."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s, self._free_s, self._lock = bytes_per_s, 0.0, threading.Lock()

    def reserve(self, nbytes: int) -> float:
        """The time of `time.perf_counter` at which `nbytes` more are sent."""
        with self._lock:
            self._free_s = max(self._free_s, time.perf_counter()) + nbytes / self._bytes_per_s
            return self._free_s


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(
        self, folder: Path, latency_s: float, bytes_per_s: float, bandwidth: _Bandwidth, *request: object
    ) -> None:
        self.folder, self.latency_s, self.bytes_per_s, self.bandwidth = (folder, latency_s, bytes_per_s, bandwidth)
        super().__init__(*request)  # type: ignore[arg-type]

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        time.sleep(self.latency_s)
        path = self.folder / self.path.removeprefix(_PREFIX)
        if not self.path.startswith(_PREFIX) or not path.is_file():
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        total = path.stat().st_size
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        start, stop = int(first), min(int(last) + 1 if last else total, total)
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("Content-Length", str(stop - start))
        self.send_header("ETag", f'"{total}-{path.stat().st_mtime_ns}"')
        self.send_header("Last-Modified", self.date_time_string(path.stat().st_mtime))
        if "Range" in self.headers:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{total}")
        self.end_headers()
        if not body:
            return
        began = time.perf_counter()
        with path.open("rb") as file, suppress(ConnectionError):
            for at in range(start, stop, _PIECE_BYTES):
                self.wfile.flush()
                size = min(_PIECE_BYTES, stop - at)
                until = max(began + (at + size - start) / self.bytes_per_s, self.bandwidth.reserve(size))
                time.sleep(max(0.0, until - time.perf_counter()))
                assert os.sendfile(self.connection.fileno(), file.fileno(), at, size) == size


def _serve(folder: Path, latency_s: float, bytes_per_s: float, total_bytes_per_s: float) -> None:
    handler = functools.partial(_Handler, folder, latency_s, bytes_per_s, _Bandwidth(total_bytes_per_s))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), *map(float, sys.argv[2:]))
