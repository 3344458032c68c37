"""Parquet files on this machine or behind URLs, read by DuckDB through `open_file`.

DuckDB has `_VECTOR` rows in memory at once, images included, about four times. Files that are read at the same time
share this process's memory: each waits until its part is free, and has a limit of its own.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from typing import Any, BinaryIO

from resolute.errors import ResoluteError
from resolute.prep.storage.query_interrupts import query_interrupts

from .filesystem import open_file, read_errors

__all__ = ["ParquetFile", "open_parquet"]

_VECTOR = 2048  # rows that DuckDB decodes at once
_COPIES = 4  # of their bytes, at most: measured, with images of 100 kB
_UNEVEN = 4  # times the mean size of the images: where the larger ones lie together
_LEAST = 256 << 20  # bytes; DuckDB reads pages of up to 100 MB

_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


class _SharedMemory:
    """The memory of this process, of which each reader takes a part; one that needs more than there is reads alone."""

    def __init__(self) -> None:
        self._changed, self._taken = threading.Condition(), 0

    @contextmanager
    def take(self, nbytes: int, total: int) -> Iterator[None]:
        """Wait until `nbytes` of `total` are free, or nobody else has any; they are taken until the block ends."""
        with self._changed:
            self._changed.wait_for(lambda: not self._taken or self._taken + nbytes <= total)
            self._taken += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._taken -= nbytes
                self._changed.notify_all()


_MEMORY = _SharedMemory()


class ParquetFile:
    """An open Parquet file; `types` maps each column to its type in DuckDB, such as `BIGINT` or `VARCHAR[]`.

    `features` maps columns to what the library `datasets` says about them in the metadata: {} for other files.
    """

    def __init__(self, connection: Any, name: str, stack: ExitStack) -> None:
        self._connection, self._name, self._stack = connection, name, stack
        described = connection.execute("DESCRIBE SELECT * FROM read_parquet(?)", [name]).fetchall()
        self.types: dict[str, str] = {row[0]: row[1] for row in described}
        self.features = self._features()

    def rows(self, expressions: Sequence[str], at_once: int) -> Iterator[tuple[Any, ...]]:
        """Yield the rows, in order, as the values of SQL expressions. To be called once."""
        self._take_memory()
        found = self._connection.execute(f"SELECT {', '.join(expressions)} FROM read_parquet(?)", [self._name])
        while block := found.fetchmany(at_once):
            yield from block

    def _take_memory(self) -> None:
        sql = (
            "SELECT max(nbytes / greatest(rows, 1) * least(rows, ?)) FROM (SELECT sum(total_uncompressed_size) AS "
            "nbytes, any_value(row_group_num_rows) AS rows FROM parquet_metadata(?) GROUP BY row_group_id)"
        )
        vector = self._connection.execute(sql, [_VECTOR, self._name]).fetchone()[0] or 0
        need = _LEAST + int(vector) * _COPIES
        number, unit = self._connection.execute("SELECT current_setting('memory_limit')").fetchone()[0].split()
        total = int(float(number) * _UNITS[unit])  # DuckDB's default: 80 % of what the machine or container has
        self._stack.enter_context(_MEMORY.take(need, total))
        limit = min(need * _UNEVEN, total)
        self._connection.execute(f"SET memory_limit = '{limit >> 10}KiB'")

    def _features(self) -> dict[str, dict[str, Any]]:
        # Source: the metadata that `datasets` writes, key "huggingface".
        sql = "SELECT value FROM parquet_kv_metadata(?) WHERE key = 'huggingface'::BLOB"
        try:
            features = json.loads(self._connection.execute(sql, [self._name]).fetchone()[0])["info"]["features"]
            return {name: feature for name, feature in features.items() if isinstance(feature, dict)}
        except (ValueError, KeyError, TypeError, AttributeError):
            return {}


class _File:
    """The file as DuckDB uses it: from several threads at once, each of which seeks, then reads from there.

    `failed` gets the errors of reading: DuckDB keeps only their words.
    """

    def __init__(self, file: BinaryIO, failed: list[BaseException]) -> None:
        self._file, self._failed = file, failed
        self._lock, self._thread = threading.Lock(), threading.local()

    def seek(self, offset: int) -> None:
        self._thread.at = offset

    def tell(self) -> int:
        return getattr(self._thread, "at", 0)

    def read(self, nbytes: int = -1) -> bytes:
        try:
            with self._lock:
                self._file.seek(self.tell())
                data = self._file.read(nbytes)
        except BaseException as error:
            self._failed.append(error)
            raise
        self._thread.at = self.tell() + len(data)
        return data

    def close(self) -> None:
        with self._lock:
            self._file.close()


@contextmanager
def open_parquet(path: str) -> Iterator[ParquetFile]:
    """Open a Parquet file. Raises `ResoluteError` for any error while it is open, as `open_file`."""
    import duckdb
    from fsspec import AbstractFileSystem

    failed: list[BaseException] = []

    class Files(AbstractFileSystem):
        """A file system with the one file."""

        protocol = "source"
        cachable = False

        def open(self, name: str, mode: str = "rb", **options: Any) -> _File:
            return _File(stack.enter_context(open_file(path)), failed)

        def info(self, name: str, **options: Any) -> dict[str, Any]:
            with open_file(path) as file:
                return {"name": name, "size": file.seek(0, 2), "type": "file"}

        def glob(self, pattern: str, **options: Any) -> list[str]:
            return [pattern]

        def modified(self, name: str) -> datetime:
            return datetime.fromtimestamp(0, UTC)

    with read_errors(path), ExitStack() as stack:
        # One thread: further ones decode several groups of rows at once, each with all its images in memory.
        connection = stack.enter_context(duckdb.connect(config={"threads": 1, "autoinstall_known_extensions": False}))
        connection.register_filesystem(Files())
        try:
            with query_interrupts():
                # why: DuckDB would read all images of a row group at once
                connection.execute("SET disable_parquet_prefetching = true")
                yield ParquetFile(connection, "source://file.parquet", stack)
        except duckdb.OutOfMemoryException as error:
            raise ResoluteError(
                f"{path}: needs too much memory, got '{str(error).partition(chr(10))[0]}' for {_VECTOR} rows, expected "
                "images of a few MB; use a machine with more memory, or unpack the images to a folder"
            ) from None
        except duckdb.Error:
            if failed:
                raise failed[0] from None
            raise
