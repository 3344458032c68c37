"""A worker process whose decoder crashes, hangs or raises if the image data says so."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from resolute.prep.convert.decode import Photo
from resolute.prep.run import worker


def serve(conn: Connection, current: Any) -> None:
    faulthandler.disable()  # why: the crash is intended
    decode = worker.decode_for_sizes

    def faulty_decode(data: bytes, short_sides: Sequence[int], max_pixels: int, **options: Any) -> list[Photo]:
        if data.startswith(b"die once "):
            mark = Path(os.fsdecode(data[9:]))
            if mark.exists():
                mark.unlink()
                os.kill(os.getpid(), signal.SIGABRT)
            return [Photo.full(np.zeros((8, 8, 3), np.uint8))] * len(short_sides)
        if data == b"die":
            os.kill(os.getpid(), signal.SIGSEGV)
        if data == b"hang":
            time.sleep(600)
        if data == b"slow":
            time.sleep(0.6)
            return [Photo.full(np.zeros((8, 8, 3), np.uint8))] * len(short_sides)
        if data == b"spin":
            while True:
                pass
        if data.startswith(b"wait "):
            ends = time.monotonic() + 0.9  # less than the limit of the pool
            while not Path(os.fsdecode(data[5:])).exists() and time.monotonic() < ends:
                time.sleep(0.005)
            if not Path(os.fsdecode(data[5:])).exists():
                raise ZeroDivisionError("waited in vain")
            return [Photo.full(np.zeros((8, 8, 3), np.uint8))] * len(short_sides)
        if data == b"memory":
            raise MemoryError
        if data == b"bug":
            raise ZeroDivisionError("ours")
        return decode(data, short_sides, max_pixels, **options)

    worker.decode_for_sizes = faulty_decode  # type: ignore[assignment]
    worker.serve(conn, current)


def crash_at_start(conn: Connection, current: Any) -> None:
    faulthandler.disable()
    os.kill(os.getpid(), signal.SIGILL)


def exit_at_start(conn: Connection, current: Any) -> None:
    os._exit(3)
