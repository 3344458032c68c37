"""The tables of a run: a disk that refuses ends in one line, and Ctrl-C is an interrupt."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

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
