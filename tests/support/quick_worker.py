"""A worker process of prep that asks a failing server or disk again at once, instead of after seconds."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

from resolute.prep.run import worker
from resolute.prep.sources import fetch
from resolute.prep.storage import retry


def serve(conn: Connection, current: Any) -> None:
    fetch._REMOTE_WAITS_S = (0.0, 0.0, 0.0)
    retry.WAITS_S = (0.0, 0.0)
    worker.serve(conn, current)
