"""`Database`: the tables of a run in DuckDB, on disk, so that they do not fill the memory.

A full disk and a lack of memory are `ResoluteError`s.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resolute.errors import ResoluteError
from resolute.machine import available_cpus
from resolute.prep.storage.query_interrupts import deferred_interrupts, query_interrupts
from resolute.scratch import ScratchFolder

__all__ = ["Database", "objects"]

_MEMORY = "2GiB"  # beyond that DuckDB sorts, joins and groups on disk
_PLAIN = re.compile(r"[A-Za-z0-9 _.,+@=-]*(/[A-Za-z0-9 _.,+@=-]*)*")  # paths that DuckDB opens as they are


class Database:
    """A DuckDB database in the empty folder `folder`, or in a temporary one if DuckDB cannot open such a path.

    Closed by `close`; not for use by several threads.
    """

    def __init__(self, folder: Path) -> None:
        import duckdb  # why here: commands that list no photos start faster

        # Not all errors of DuckDB: a wrong statement is a fault of the program.
        self._failures, self._where = (duckdb.OperationalError, duckdb.FatalException), folder
        self._links: ScratchFolder | None = None
        self._link_numbers = count()
        if not _PLAIN.fullmatch(str(folder)):  # a link is no way out: DuckDB follows it
            self._links = ScratchFolder()
            folder = self._links.path
        options: dict[str, Any] = {
            "memory_limit": _MEMORY,
            "threads": available_cpus(),
            "temp_directory": str(folder / "sorting"),
            "autoinstall_known_extensions": False,
        }
        with self._errors():
            self._connection = duckdb.connect(str(folder / "photos.db"), config=options)

    def close(self) -> None:
        self._connection.close()
        if self._links is not None:
            self._links.close()

    def path(self, path: Path) -> str:
        """A path of a Parquet file for DuckDB, also as the inside of an SQL string; valid until `close`.

        In paths DuckDB takes `*`, `?`, `[` and `\\` for more than signs, and refuses names that are not UTF-8. A folder
        with other signs than the usual ones is reached by a link. The file's own name is one of ours, and plain.
        """
        if _PLAIN.fullmatch(str(path)):
            return str(path)
        self._links = self._links or ScratchFolder()
        link = self._links.path / f"link-{next(self._link_numbers)}"
        link.symlink_to(path.parent.absolute())
        return str(link / path.name)

    def run(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """Run a statement with `values` for its question marks; returns its rows."""
        with self._errors():
            rows: list[tuple[Any, ...]] = self._connection.execute(sql, list(values)).fetchall()
            return rows

    def one(self, sql: str, *values: object) -> Any:
        """The only value of a query's only row."""
        ((value,),) = self.run(sql, *values)
        return value

    def rows(self, sql: str, *values: object, at_once: int = 1 << 14) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a query, of which up to `at_once` are in memory; other statements may run meanwhile."""
        with self._errors():
            cursor = self._connection.cursor()
            cursor.execute(sql, list(values))
            while block := cursor.fetchmany(at_once):
                yield from block

    def arrays(self, sql: str, *values: object) -> dict[str, NDArray[Any]]:
        """{column: (n,) array} of a query."""
        with self._errors():
            found: dict[str, Any] = self._connection.execute(sql, list(values)).fetchnumpy()
            return found

    def run_on(self, columns: Mapping[str, NDArray[Any]], sql: str, *values: object) -> list[tuple[Any, ...]]:
        """As `run`, for a statement that reads from the table `columns`: {column: (n,) array of objects or numbers}."""
        columns = dict(columns)  # why a local variable: DuckDB finds it by its name
        # why deferred: DuckDB looks for it in Python, drops a Ctrl-C there, and then says that it does not exist
        with self._errors(), deferred_interrupts():
            rows: list[tuple[Any, ...]] = self._connection.execute(sql, list(values)).fetchall()
            return rows

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """One commit for all statements of the block, which saves a flush to disk after each."""
        self.run("BEGIN TRANSACTION")
        yield
        self.run("COMMIT")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            with query_interrupts():
                yield
        except self._failures as error:
            first = str(error).partition("\n")[0]
            raise ResoluteError(
                f"{self._where}: the table of photos cannot be written or read, got '{first}', expected a disk with "
                "space and a machine with 4 GiB of memory; free space, then run the same command again"
            ) from None


def objects(values: Iterable[object]) -> NDArray[Any]:
    """(n,) array of Python objects, which may be bytes or lists: a column for `Database.run_on`."""
    values = list(values)
    array = np.empty(len(values), object)
    array[:] = values
    return array
