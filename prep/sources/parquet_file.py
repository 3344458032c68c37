"""Parquet files on this machine or behind URLs, read by DuckDB through `open_file`."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from typing import Any, BinaryIO

from resolute.prep.storage.query_interrupts import query_interrupts

from .filesystem import open_file, read_errors

__all__ = ["ParquetFile", "open_parquet"]


class ParquetFile:
    """An open Parquet file; `types` maps each column to its type in DuckDB, such as `BIGINT` or `VARCHAR[]`.

    `features` maps columns to what the library `datasets` says about them in the metadata: {} for other files.
    """

    def __init__(self, connection: Any, name: str) -> None:
        self._connection, self._name = connection, name
        described = connection.execute("DESCRIBE SELECT * FROM read_parquet(?)", [name]).fetchall()
        self.types: dict[str, str] = {row[0]: row[1] for row in described}
        self.features = self._features()

    def rows(self, expressions: Sequence[str], at_once: int) -> Iterator[tuple[Any, ...]]:
        """Yield the rows, in order, as the values of SQL expressions."""
        found = self._connection.execute(f"SELECT {', '.join(expressions)} FROM read_parquet(?)", [self._name])
        while block := found.fetchmany(at_once):
            yield from block

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
                yield ParquetFile(connection, "source://file.parquet")
        except duckdb.Error:
            if failed:
                raise failed[0] from None
            raise
