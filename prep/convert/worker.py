"""A worker process of prep: reads, decodes, resizes and encodes batches and sends back their tar members.

Bytes read ahead are bounded: two batches of `BATCH_SAMPLES` files of at most `_AHEAD_BYTES` each, plus one larger file
at a time of at most `MAX_BYTES`.
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from queue import SimpleQueue
from time import perf_counter
from typing import Any

import numpy as np

from pipeline.dataset.shard_set import SAMPLE, SOURCE, STORED, key_name
from prep.shards.tar_format import BLOCK_BYTES, member
from prep.sources.fetch import fetch_many
from prep.sources.image_ref import ByteRange, is_url

from .batch import Batch, BatchResult, EncodeOptions, Times
from .codecs import check_codecs
from .decode import Reject, decode
from .resize import resize_and_encode

__all__ = ["convert", "serve"]

_READERS, _READ_FILES = 8, 2  # read threads, and files per request: hides slow or remote disks
_AHEAD_BYTES = 8 << 20  # larger files, which are rare, are not read ahead
Files = list[Future[list[bytes | Reject | None]]]


def serve(conn: Connection, current: Any) -> None:
    """Convert the (options, batch) pairs that arrive through `conn` until it closes; send a BatchResult or an exception
    each.

    `current.value` is the position of the image being converted, -1 between images: the image to blame if this process
    dies. Decodes in one thread, ignores Ctrl-C (the parent ends it) and exits with the parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()

    def on_image(i: int) -> None:
        current.value = i

    received: SimpleQueue[tuple[EncodeOptions, Batch, Files] | None] = SimpleQueue()
    threading.Thread(target=_receive, args=(conn, received), daemon=True).start()
    while (item := received.get()) is not None:
        options, batch, files = item
        try:
            result: BatchResult | Exception = convert(options, batch, on_image, files)
        except Exception as error:  # why: it is sent to the main process, which raises it
            result = error
        conn.send(result)


def _receive(conn: Connection, received: SimpleQueue[tuple[EncodeOptions, Batch, Files] | None]) -> None:
    """Receive batches and read their files, several at once, while the previous batch is converted."""
    with ThreadPoolExecutor(_READERS, thread_name_prefix="read") as readers:
        while True:
            try:
                options, batch = conn.recv()
            except (EOFError, OSError):
                received.put(None)
                return
            ranges = batch.byte_ranges
            # why: requests to a remote store are concurrent anyway
            per_request = len(ranges) if any(is_url(byte_range.path) for byte_range in ranges) else _READ_FILES
            requests = [ranges[i : i + per_request] for i in range(0, len(ranges), per_request)]
            received.put((options, batch, [readers.submit(_fetch_ahead, part) for part in requests]))


def _fetch_ahead(byte_ranges: Sequence[ByteRange]) -> list[bytes | Reject | None]:
    return fetch_many(byte_ranges, ahead_bytes=_AHEAD_BYTES)


def _exit_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)  # why not rely on the connection: it is not read during a decode


def convert(
    options: EncodeOptions,
    batch: Batch,
    on_image: Callable[[int], None] = lambda i: None,
    files: Files | None = None,
) -> BatchResult:
    """Read (unless `files` holds the contents), decode, resize and encode one batch, and pack its tar members.

    Calls `on_image` with the position of each image it starts, and with -1 while it reads. Only `Reject` is caught: a
    `StorageError` ends the run.
    """
    check_codecs(options.codecs, f"machine {socket.gethostname()}: this run")
    tars: list[list[bytes]] = [[] for _ in batch.short_sides]
    sizes = [0] * len(batch.short_sides)
    samples: list[tuple[int, int, int]] = []
    sources: list[tuple[int, int, int, int]] = []
    stored: list[list[tuple[int, ...]]] = [[] for _ in batch.short_sides]
    rejects: list[tuple[int, str]] = []
    read_bytes, decode_s, convert_s, slowest = 0, 0.0, 0.0, (0.0, 0)
    start = perf_counter()
    contents = _fetch_ahead(batch.byte_ranges) if files is None else [data for part in files for data in part.result()]
    read_s = perf_counter() - start
    for i, (data, label) in enumerate(zip(contents, batch.labels, strict=True)):
        key = batch.first_key + i
        if data is None and i not in batch.skip:
            on_image(-1)  # why -1: slow storage is not the image's fault
            start = perf_counter()
            (data,) = fetch_many([batch.byte_ranges[i]])
            read_s += perf_counter() - start
        start = perf_counter()
        on_image(i)
        try:
            if i in batch.skip:
                raise Reject(batch.skip[i])
            if isinstance(data, Reject):
                raise data
            assert data is not None
            read_bytes += len(data)
            digest = int.from_bytes(hashlib.sha256(data).digest()[:8], "little")
            pixels = decode(data)
        except Reject as reject:
            rejects.append((key, str(reject)))
            continue
        decoded = perf_counter()
        height, width = pixels.shape[:2]
        name = key_name(key)
        label_member = member(f"{name}.cls", b"%0*d" % (options.label_digits, label))
        samples.append((key, label, 0))
        sources.append((digest, len(data), width, height))
        for r, (jpeg, w, h) in enumerate(resize_and_encode(pixels, batch.short_sides, options.quality)):
            jpeg_member = member(f"{name}.jpg", jpeg)
            stored[r].append((sizes[r] + BLOCK_BYTES, len(jpeg), zlib.crc32(jpeg), 0, w, h))
            tars[r] += (jpeg_member, label_member)
            sizes[r] += len(jpeg_member) + len(label_member)
        done = perf_counter()
        decode_s += decoded - start
        convert_s += done - decoded
        slowest = max(slowest, (done - start, key))
    on_image(-1)
    return BatchResult(
        tars=tuple(b"".join(members) for members in tars),
        samples=np.array(samples, SAMPLE),
        sources=np.array(sources, SOURCE),
        stored=tuple(np.array(rows, STORED) for rows in stored),
        rejects=tuple(rejects),
        read_bytes=read_bytes,
        times=Times(read_s=read_s, decode_s=decode_s, convert_s=convert_s, slowest=slowest),
    )
