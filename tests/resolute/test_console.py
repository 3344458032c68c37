"""Every command line: Ctrl-C, closed and broken outputs, and unavailable storage end in one line."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import ROOT

PROGRAM = """
import sys
from resolute.console import guard_process, run_main
guard_process()
{imports}
def main():
    {body}
    return 0
run_main(main)
"""


def start(body: str, *, imports: str = "", **words: object) -> subprocess.Popen[str]:
    code = PROGRAM.format(body=body, imports=imports)
    words = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **words}
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True, **words)  # type: ignore[call-overload]


def ended(process: subprocess.Popen[str], *, interrupt_after: str = "") -> tuple[int, str]:
    """Status and stderr of a process; with `interrupt_after`, of one that gets Ctrl-C after this line of output."""
    if interrupt_after:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{interrupt_after}\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=25)
    return process.returncode, errors


def test_a_closed_stdout_reader_does_not_stop_the_work(tmp_path: Path) -> None:
    body = f"[print('line', i, flush=True) for i in range(9999)]; open({str(tmp_path / 'done')!r}, 'w').close()"
    with start(body) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0
    assert (tmp_path / "done").exists()


@pytest.mark.parametrize("closed", ["2>&-", "0<&- 1>&- 2>&-"])
def test_closed_standard_streams_are_never_replaced_by_opened_files(tmp_path: Path, closed: str) -> None:
    body = f"print('out'); print('err', file=sys.stderr); open({str(tmp_path / 'f')!r}, 'w').write('data')"
    code = PROGRAM.format(body=body, imports="")
    done = subprocess.run(["bash", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code], cwd=ROOT, check=False)
    assert done.returncode == 0
    assert (tmp_path / "f").read_text() == "data"


def test_ctrl_c_prints_no_traceback_and_gives_status_130() -> None:
    wait = "print('ready', flush=True); import time; time.sleep(30)"
    status, errors = ended(start(wait), interrupt_after="ready")
    assert status == 130
    assert "Traceback" not in errors


@pytest.mark.parametrize("error", ["errno.EIO, 'Input/output error'", "errno.ENOENT, 'No such file', '/p/gone.jpg'"])
def test_unavailable_storage_is_reported_in_one_line_with_status_2(error: str) -> None:
    status, errors = ended(start(f"raise OSError({error})", imports="import errno"))
    assert (status, errors.count("\n")) == (2, 1)
    assert "expected a file system that answers" in errors
    assert ("/p/gone.jpg" in errors) == ("gone" in error)
