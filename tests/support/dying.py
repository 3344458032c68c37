"""A worker process whose decoder dies, hangs or fails where the picture says so."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prep.convert import worker


def serve(conn: Connection, current: Any) -> None:
    faulthandler.disable()  # why: dying is what is wanted here
    decode = worker.decode

    def odd(data: bytes) -> NDArray[np.uint8]:
        if data.startswith(b"die once "):
            mark = Path(os.fsdecode(data[9:]))
            if mark.exists():
                mark.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            return np.zeros((8, 8, 3), np.uint8)
        if data == b"die":
            os.kill(os.getpid(), signal.SIGSEGV)
        if data == b"hang":
            time.sleep(600)
        if data == b"spin":
            while True:
                pass
        if data.startswith(b"slow "):
            Path(os.fsdecode(data[5:])).write_text(str(os.getpid()))
            ends = time.monotonic() + 0.5  # why: not a sleep, in which a stop would pass unnoticed
            while time.monotonic() < ends:
                pass
            return np.zeros((8, 8, 3), np.uint8)
        if data == b"bug":
            raise ZeroDivisionError("ours")
        return decode(data)

    worker.decode = odd  # type: ignore[assignment]
    worker.serve(conn, current)


def serve_nobody(conn: Connection, current: Any) -> None:
    os._exit(3)
