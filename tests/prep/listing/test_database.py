"""The tables of a run: a disk that refuses ends in one line, and Ctrl-C is an interrupt."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from resolute import prep
from resolute.prep.listing.database import Database

PROGRAM = """
import resource, sys
from pathlib import Path
from resolute.errors import ResoluteError
from resolute.prep.listing.database import Database
database = Database(Path(sys.argv[1]))
database.run("CREATE TABLE t (i INTEGER)")
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    database.run(sys.argv[2])
except ResoluteError as error:
    print(error)
"""


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO t SELECT range FROM range(3_000_000)",  # written to the database
        "CREATE VIEW v AS SELECT '" + "x" * 100_000 + "'",  # written to its log
    ],
)
def test_a_disk_that_refuses_is_one_line(tmp_path: Path, statement: str) -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM, tmp_path, statement], capture_output=True, text=True)
    assert ran.stdout.startswith(f"{tmp_path}: the table of photos cannot be written or read, got "), ran.stderr
    assert ran.stdout.count("\n") == 1


def test_every_folder_that_duckdb_cannot_open_has_a_link_of_its_own(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a[1]", "b*", "c?")]
    for number, folder in enumerate(folders):
        folder.mkdir()
        (folder / "rows.csv").write_text(f"i\n{number}\n")
    (tmp_path / "work[0]").mkdir()
    database = Database(tmp_path / "work[0]")
    database.run("CREATE TABLE t (i INTEGER)")
    found = []
    for folder in folders:
        path = database.path(folder / "rows.csv")
        database.run("CHECKPOINT")  # why: the database's log, in the folder of the links, goes and comes
        found.append(database.one(f"SELECT i FROM read_csv('{path}')"))
    assert found == [0, 1, 2]
    database.close()


def test_no_statement_numbers_rows_in_an_order_that_it_does_not_say() -> None:
    sources = Path(prep.__file__).parent.rglob("*.py")
    assert [path.name for path in sources if re.search(r"OVER \(\)", path.read_text())] == []


@pytest.mark.parametrize("how", ["run", "rows"])
def test_ctrl_c_ends_a_long_query_as_an_interrupt(tmp_path: Path, how: str) -> None:
    database = Database(tmp_path)
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.2, lambda: signal.pthread_kill(main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):  # rows are read as they are asked for
        list(getattr(database, how)("SELECT max(hash(a)) FROM range(300_000_000) r(a)"))
    timer.join()
    assert database.one("SELECT 1") == 1
    database.close()
