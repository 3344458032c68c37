"""A worker process of prep: reads, decodes, resizes and encodes images, and sends back tar members or writes shards.

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
from contextlib import suppress
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from queue import SimpleQueue
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.format import SOURCE, STORED, key_name
from resolute.prep.convert.batch import Batch, BatchResult, EncodeOptions, PixelFacts, Times, send_answer
from resolute.prep.convert.codecs import check_codecs
from resolute.prep.convert.decode import MAX_PIXELS, Photo, Reject
from resolute.prep.convert.reduced import decode_for_sizes
from resolute.prep.convert.resize import describe_and_encode
from resolute.prep.near_copies.descriptor import HASHES
from resolute.prep.run.stats import RunStats, ShardReport
from resolute.prep.shard_set.tar_format import BLOCK_BYTES, member, target_file
from resolute.prep.shard_set.writer import ShardSpec, ShardWriter
from resolute.prep.sources.fetch import fetch_many
from resolute.prep.sources.image_ref import ByteRange
from resolute.prep.storage.output import Store
from resolute.urls import is_url

__all__ = ["convert", "serve"]

_READERS, _READ_FILES = 8, 2  # read threads, and files per request: hides slow or remote disks
_AHEAD_BYTES = 8 << 20  # larger files, which are rare, are not read ahead
_BATCHES_AHEAD = 2  # batches whose files are in memory
_REPORT_BATCHES, _REPORT_S = 8, 0.5  # of a shard: one report after as many batches or seconds
Files = list[Future[list[bytes | Reject | None]]]
_Message = tuple[int, EncodeOptions, Store, Batch | ShardSpec]  # number, options, store, task
# the same, a batch of the task, its files
_Received = tuple[int, EncodeOptions, Store, Batch | ShardSpec, Batch, Files]


def serve(conn: Connection, current: Any) -> None:
    """Convert the tasks that arrive through `conn`, as (number, options, store, task), until it closes.

    The answers are sent by `send_answer`: for a `Batch` its `BatchResult`; for a `ShardSpec`, which is written to
    `store`, a `ShardReport` now and then, at once if there are rejects, and one with its records when it is durable.
    After an exception, which is sent instead, nothing more is converted; a `MemoryError` becomes a `ResoluteError`.

    `current.value` is the number of the task plus the position of the image being converted, -1 between images: the
    image to blame if this process dies. Decodes in one thread, ignores Ctrl-C (the parent ends it) and exits with the
    parent. Files of a shard that is unfinished by then stay behind: to be deleted by `delete_partial_shards`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Image.MAX_IMAGE_PIXELS = None  # why: the set has its own limit, which may be higher than Pillow's
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    sending = threading.Lock()

    def answer(number: int, content: BatchResult | ShardReport | Exception) -> None:
        if isinstance(content, MemoryError):
            content = ResoluteError(
                f"machine {socket.gethostname()}: got no memory left in a worker, expected about 1 GB for each, or 13 "
                "bytes a pixel of MAX_MEGAPIXELS; use fewer WORKERS (--workers)"
            )
        with sending:
            send_answer(conn, number, content)

    def on_image(i: int) -> None:
        current.value = -1 if i < 0 else first + i

    def finish(number: int, writer: ShardWriter, stats: RunStats) -> None:
        try:
            answer(number, ShardReport(stats=stats, records=writer.finish()))
        except Exception as error:  # why: it is sent to the main process, which raises it
            answer(number, error)

    received: SimpleQueue[_Received | None] = SimpleQueue()
    ahead = threading.Semaphore(_BATCHES_AHEAD)
    inbox: SimpleQueue[_Message | None] = SimpleQueue()
    threading.Thread(target=_receive, args=(conn, inbox), daemon=True).start()
    threading.Thread(target=_read_ahead, args=(inbox, received, ahead), daemon=True).start()
    writer: ShardWriter | None = None
    finishing: Future[None] | None = None
    stats, reported_at = RunStats(), perf_counter()
    # why a thread: the next shard is converted while this one waits for the disk
    with ThreadPoolExecutor(1, thread_name_prefix="finish") as finisher:
        while (item := received.get()) is not None:
            number, options, store, task, batch, files = item
            first = number + batch.first_key - task.first_key
            try:
                result = convert(options, batch, on_image, files)
                ahead.release()
                if isinstance(task, Batch):
                    answer(number, result)
                    continue
                writer = writer or ShardWriter(store, options, task)
                start = perf_counter()
                writer.add(result)
                now = perf_counter()
                stats.write_s += now - start
                stats.add(task.split, result)
                is_due = stats.batches >= _REPORT_BATCHES or now - reported_at >= _REPORT_S
                if stats.rejected or (is_due and not writer.is_complete):
                    answer(number, ShardReport(stats=stats))
                    stats, reported_at = RunStats(), now
            except Exception as error:  # why: it is sent to the main process, which raises it
                answer(number, error)
                return
            if writer.is_complete:
                if finishing is not None:
                    finishing.result()  # why: at most one finished and one unfinished shard take up memory
                finishing = finisher.submit(finish, number, writer, stats)
                writer, stats = None, RunStats()


def _receive(conn: Connection, inbox: SimpleQueue[_Message | None]) -> None:
    """Receive tasks at once, however far ahead of their conversion, so that sending them never blocks."""
    with suppress(EOFError, OSError):
        while True:
            inbox.put(conn.recv())
    inbox.put(None)


def _read_ahead(
    inbox: SimpleQueue[_Message | None], received: SimpleQueue[_Received | None], ahead: threading.Semaphore
) -> None:
    """Read the files of the batches of all tasks, several at once, while the previous batch is converted."""
    with ThreadPoolExecutor(_READERS, thread_name_prefix="read") as readers:
        while (message := inbox.get()) is not None:
            number, options, store, task = message
            for batch in [task] if isinstance(task, Batch) else task.batches():
                ahead.acquire()
                ranges = batch.byte_ranges
                # why: requests to a remote store are concurrent anyway
                per_request = len(ranges) if any(is_url(byte_range.path) for byte_range in ranges) else _READ_FILES
                requests = [ranges[i : i + per_request] for i in range(0, len(ranges), per_request)]
                files = [readers.submit(_fetch_ahead, part, options.servers) for part in requests]
                received.put((number, options, store, task, batch, files))
    received.put(None)


def _fetch_ahead(byte_ranges: Sequence[ByteRange], servers: Sequence[str]) -> list[bytes | Reject | None]:
    return fetch_many(byte_ranges, ahead_bytes=_AHEAD_BYTES, servers=servers)


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
    samples: list[tuple[int, Any]] = []
    sources: list[tuple[int, int, int, int]] = []
    stored: list[list[tuple[int, ...]]] = [[] for _ in batch.short_sides]
    rejects: list[tuple[int, str]] = []
    facts: list[PixelFacts] = []
    hashes: list[NDArray[np.uint64]] = []
    is_described = options.described_side in batch.short_sides
    read_bytes, decode_s, convert_s, slowest = 0, 0.0, 0.0, (0.0, 0)
    start = perf_counter()
    if files is None:
        contents = _fetch_ahead(batch.byte_ranges, options.servers)
    else:
        contents = [data for part in files for data in part.result()]
    read_s = perf_counter() - start
    column = str((options.samples.names or ("",))[-1])
    max_pixels = MAX_PIXELS if options.max_megapixels is None else options.max_megapixels * 1_000_000
    for i, (data, target) in enumerate(zip(contents, batch.labels, strict=True)):
        key = batch.first_key + i
        if data is None and i not in batch.skip:
            on_image(-1)  # why -1: slow storage is not the image's fault
            start = perf_counter()
            (data,) = fetch_many([batch.byte_ranges[i]], servers=options.servers)
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
            photos = decode_for_sizes(data, batch.short_sides, max_pixels, bits=options.grey_bits)
        except Reject as reject:
            rejects.append((key, str(reject)))
            continue
        decoded = perf_counter()
        name = key_name(key)
        extension, content = target_file(column, target, options.label_digits)
        target_member = member(f"{name}.{extension}", content)
        samples.append((key, target))
        facts.append(_facts(photos[0]))
        sources.append((digest, len(data), photos[0].width, photos[0].height))
        jpegs, own_hashes = describe_and_encode(photos, batch.short_sides, options.quality, options.described_side)
        if own_hashes is not None:
            hashes.append(own_hashes)
        for r, (jpeg, w, h) in enumerate(jpegs):
            jpeg_member = member(f"{name}.jpg", jpeg)
            stored[r].append((sizes[r] + BLOCK_BYTES, len(jpeg), zlib.crc32(jpeg), 0, w, h))
            tars[r] += (jpeg_member, target_member)
            sizes[r] += len(jpeg_member) + len(target_member)
        done = perf_counter()
        decode_s += decoded - start
        convert_s += done - decoded
        slowest = max(slowest, (done - start, key))
    on_image(-1)
    return BatchResult(
        tars=tuple(b"".join(members) for members in tars),
        samples=np.array(samples, options.samples),
        sources=np.array(sources, SOURCE),
        stored=tuple(np.array(rows, STORED) for rows in stored),
        rejects=tuple(rejects),
        read_bytes=read_bytes,
        times=Times(read_s=read_s, decode_s=decode_s, convert_s=convert_s, slowest=slowest),
        facts=PixelFacts.total(facts),
        hashes=np.array(hashes, np.uint64).reshape(-1, HASHES) if is_described else None,
    )


def _facts(photo: Photo) -> PixelFacts:
    return PixelFacts(
        converted=photo.conversion.use == "converted",
        unusable=photo.conversion.use == "unusable",
        deep=photo.largest is not None,
        largest=photo.largest or 0,
    )
